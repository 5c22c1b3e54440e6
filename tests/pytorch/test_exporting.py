"""Tests of `nbcnn.torch.to_module` and of state dicts: every layer that has a counterpart computes the same there, and weights go both ways."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is no dependency: pip install 'nbcnn[torch]'")
pytestmark = pytest.mark.full

import torch  # noqa: E402
from networks import ResNet18, assert_as_exact, settled  # noqa: E402

import nbcnn  # noqa: E402
import nbcnn.torch  # noqa: E402
from nbcnn import (  # noqa: E402
    ELU,
    GELU,
    Add,
    AvgPool2d,
    BatchNorm2d,
    Concat,
    Conv2d,
    ConvTranspose2d,
    Dropout,
    EvoNormB0,
    EvoNormS0,
    Flatten,
    GlobalAvgPool2d,
    GroupNorm,
    HardSwish,
    Input,
    InstanceNorm2d,
    LayerNorm,
    LeakyReLU,
    Linear,
    MaxPool2d,
    Noise,
    Pad,
    PReLU,
    ReLU,
    ReLU6,
    Reshape,
    Residual,
    Resize,
    Sigmoid,
    Softmax,
    Swish,
    Tanh,
    Upsample2d,
)
from nbcnn.datasets.arrays import Form  # noqa: E402
from nbcnn.nn import models  # noqa: E402
from nbcnn.torch import Unsupported  # noqa: E402

IMAGE = (4, 8, 6)
LISTS = {
    "convolutions": [
        Conv2d(6, (3, 2), stride=(2, 1), padding=(1, 0)),
        Conv2d(6, 3, padding=(0, 1, 2, 1)),
        Conv2d(6, 3, padding=2, dilation=2, groups=3, bias=False),
    ],
    "transposed": [
        ConvTranspose2d(6, 3, stride=2, padding=1, output_padding=1),
        ConvTranspose2d(4, (3, 2), stride=(2, 1), padding=(0, 1, 1, 0), output_padding=(1, 0), groups=2),
        ConvTranspose2d(3, 2, dilation=(2, 1), bias=False),
    ],
    "norms": [BatchNorm2d(), GroupNorm(2), InstanceNorm2d(affine=True), InstanceNorm2d(), LayerNorm()],
    "evonorms": [EvoNormS0(groups=2), EvoNormB0()],
    "activations": [
        Tanh(),
        ELU(0.5),
        GELU(),
        GELU(approximate="tanh"),
        HardSwish(),
        LeakyReLU(0.1),
        PReLU(4),
        ReLU6(),
        Sigmoid(),
        Swish(),
        Softmax(),
        Dropout(0.3),
    ],
    "pooling": [
        MaxPool2d(3, 2, padding=1),
        AvgPool2d((2, 1), ceil_mode=True, count_include_pad=False),
        Upsample2d(3),
        Resize((1, 2)),
        Resize(2, mode="bilinear"),
    ],
    "rest": [Noise(0.1), Pad((1, 0, -1, 2), 0.5), Residual(Conv2d(4, 3, padding=1), BatchNorm2d(), ReLU()), Reshape((2, 9, 14)), GlobalAvgPool2d()],
    "vectors": [Flatten(), Linear(7), Linear(3, bias=False)],
}


def built(layers, shape=IMAGE):
    """A model of floats as they are, with running statistics and parameters that are not those of the beginning."""
    model = nbcnn.Model(layers, mode="cpu", input_shape=shape)
    model.learn(Form(shape, scale=(0.0, 1.0)))
    random = np.random.default_rng(3)
    values = model.net.params.as_dict()
    changed = {name: (array + random.uniform(0.1, 0.6, array.shape)).astype(np.float32) for name, array in values.items() if array.ndim == 1}
    model.net.params.load_dict(values | changed)
    return model


@pytest.mark.parametrize("name", LISTS)
def test_layers_compute_the_same_in_pytorch(name):
    model = built(LISTS[name])
    module = nbcnn.torch.to_module(model)
    x = torch.randn(3, *IMAGE, generator=torch.Generator().manual_seed(5))
    assert_as_exact(model.predict(x.numpy()), module, (x,))
    assert {each for each in module.state_dict() if not each.endswith("num_batches_tracked")} == set(model.net.params.names)
    assert not module.training


@pytest.mark.parametrize("name", ["mnist_cnn", "autoencoder"])
def test_ready_models_do_too(name):
    layers = models.mnist_cnn() if name == "mnist_cnn" else models.autoencoder(3, wide=32, code=32)
    model = built([each for each in layers if not hasattr(each, "needs_labels")], (1, 28, 28) if name == "mnist_cnn" else (3, 32, 32))
    x = torch.rand(2, *model.net.input_shape, generator=torch.Generator().manual_seed(5))
    assert_as_exact(model.predict(x.numpy()), nbcnn.torch.to_module(model), (x,))


@pytest.mark.parametrize("width", [4, 6])
def test_a_factor_of_channels_is_no_factor_of_columns(width):
    """(N, C, H, W) times (N, C), in both orders, with as many columns as channels and with more."""
    x = Input((4, 5, width))
    factor = Sigmoid()(GlobalAvgPool2d()(x))
    model = built(nbcnn.Graph.of(x, Add()([x * factor, factor * x, x * Reshape((4, 1, 1))(factor)])), (4, 5, width))
    module = nbcnn.torch.to_module(model)
    images = torch.rand(3, 4, 5, width, generator=torch.Generator().manual_seed(5))
    assert_as_exact(model.predict(images.numpy()), module, (images,))
    back = nbcnn.torch.from_module(module, images, mode="cpu")
    np.testing.assert_allclose(back.predict(images.numpy()), model.predict(images.numpy()), rtol=1e-6)


def test_graphs_with_shared_layers_go_there_and_back():
    x = Input(IMAGE)
    shared = Conv2d(4, 3, padding=1)
    y = Concat()([shared(x) + x, shared(ReLU()(x)) * x])
    model = built(nbcnn.Graph.of(x, Add()([Conv2d(3, 1)(y), Conv2d(3, 1)(y), Conv2d(3, 1)(y)])))
    module = nbcnn.torch.to_module(model)
    images = torch.randn(2, *IMAGE, generator=torch.Generator().manual_seed(5))
    assert_as_exact(model.predict(images.numpy()), module, (images,))
    again = nbcnn.torch.from_module(module, images, mode="cpu")
    assert set(again.net.params.names) == set(model.net.params.names)
    np.testing.assert_array_equal(again.predict(images.numpy()), model.predict(images.numpy()))


def test_a_resnet_comes_back_with_its_state_dict():
    module = settled(ResNet18(8))
    model = nbcnn.torch.from_module(module, torch.zeros(1, 3, 32, 32), mode="cpu")
    back = nbcnn.torch.to_module(model)
    assert back.state_dict().keys() == module.state_dict().keys()
    for name, tensor in nbcnn.torch.state_dict(model).items():
        assert torch.equal(tensor, module.state_dict()[name]), name
        assert torch.equal(back.state_dict()[name], tensor), name
    module.load_state_dict(nbcnn.torch.state_dict(model))
    with torch.no_grad():
        x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(5))
        torch.testing.assert_close(back(x), module(x), rtol=0, atol=0)


def test_layers_without_a_counterpart_are_named_at_once():
    model = nbcnn.Model([nbcnn.Whiten(), nbcnn.KSparse(2), Conv2d(3, 1)], mode="cpu", input_shape=(3, 8, 8))
    with pytest.raises(Unsupported, match=r"whiten1: Whiten\n  ksparse1: KSparse"):
        nbcnn.torch.to_module(model)
    with pytest.raises(nbcnn.UsageError, match="not built"):
        nbcnn.torch.to_module(nbcnn.Model([Linear(2)], mode="cpu"))


def test_a_state_dict_of_another_precision_is_taken_and_a_wrong_one_changes_nothing():
    model = built([Conv2d(4, 3), BatchNorm2d()])
    state = {name: tensor.to(torch.bfloat16) for name, tensor in nbcnn.torch.state_dict(model).items()}
    counter = {"batchnorm1.num_batches_tracked": torch.tensor(3)}
    assert nbcnn.torch.load_state_dict(model, state | counter).taken == tuple(model.net.params.names)
    assert torch.equal(nbcnn.torch.state_dict(model)["conv1.weight"], state["conv1.weight"].float())
    before = nbcnn.torch.state_dict(model)
    wrong = before | {"conv1.weight": torch.zeros(4, 4, 1, 1), "further": torch.zeros(1)}
    with pytest.raises(nbcnn.CheckpointError, match=r"(?s)the state dict is not of this network.*of another shape: conv1.weight"):
        nbcnn.torch.load_state_dict(model, wrong)
    assert all(torch.equal(tensor, before[name]) for name, tensor in nbcnn.torch.state_dict(model).items())
    assert nbcnn.torch.load_state_dict(model, wrong, partial=True).unused == ("further",)
    with pytest.raises(nbcnn.UsageError, match=r"'conv1.bias' is torch.int64"):
        nbcnn.torch.load_state_dict(model, before | {"conv1.bias": torch.zeros(4, dtype=torch.int64)})


def test_a_safetensors_file_of_pytorch_is_read_by_its_names(tmp_path):
    """As safetensors.torch.save_file writes it: names of the state dict, half precision, the counters of batches beside them."""
    import json

    module = settled(ResNet18(8))
    model = nbcnn.torch.from_module(module, torch.zeros(1, 3, 32, 32), mode="cpu")
    entries, parts, at = {}, [], 0
    for name, tensor in module.state_dict().items():
        half = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        raw = half.contiguous().view(torch.uint8).numpy().tobytes() if half.ndim else half.numpy().tobytes()
        entries[name] = {"dtype": "BF16" if tensor.is_floating_point() else "I64", "shape": list(tensor.shape), "data_offsets": [at, at + len(raw)]}
        parts.append(raw)
        at += len(raw)
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    path = tmp_path / "resnet.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"".join(parts))
    assert not model.load_weights(path).missing
    for name, tensor in nbcnn.torch.state_dict(model).items():
        assert torch.equal(tensor, module.state_dict()[name].to(torch.bfloat16).float()), name
