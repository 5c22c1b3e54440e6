"""Tests of `nbcnn.torch.from_module`: outputs and names of networks of PyTorch, and that what has no counterpart is named at once."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is no dependency: pip install 'nbcnn[torch]'")
pytestmark = pytest.mark.full

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from networks import ResNet18, assert_as_exact, settled  # noqa: E402
from torch import nn  # noqa: E402

import nbcnn  # noqa: E402
import nbcnn.torch  # noqa: E402
from nbcnn.torch import Unsupported  # noqa: E402


def sample(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def taken(module, *x, **options):
    """The module's model on the CPU; its output is compared."""
    settled(module)
    model = nbcnn.torch.from_module(module, x if len(x) > 1 else x[0], mode="cpu", **options)
    arrays = tuple(each.numpy() for each in x)
    assert_as_exact(model.predict(arrays if len(x) > 1 else arrays[0]), module, x)
    return model


IMAGE, VECTOR = (3, 4, 12, 8), (3, 10)
MODULES = [
    (nn.Conv2d(4, 6, 3, padding=1), IMAGE),
    (nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 0), bias=False), IMAGE),
    (nn.Conv2d(4, 8, 3, padding=2, dilation=2, groups=4), IMAGE),
    (nn.Conv2d(4, 6, (4, 3), padding="same"), IMAGE),
    (nn.Conv2d(4, 6, 3, padding="valid"), IMAGE),
    (nn.ConvTranspose2d(4, 5, 3, 2, 1, 1), IMAGE),
    (nn.ConvTranspose2d(4, 6, (3, 2), (2, 3), (1, 0), (1, 2), groups=2, dilation=(2, 1)), IMAGE),
    (nn.Linear(10, 7), VECTOR),
    (nn.Linear(10, 7, bias=False), VECTOR),
    (nn.BatchNorm2d(4), IMAGE),
    (nn.BatchNorm2d(4, affine=False), IMAGE),
    (nn.GroupNorm(2, 4), IMAGE),
    (nn.InstanceNorm2d(4), IMAGE),
    (nn.InstanceNorm2d(4, affine=True), IMAGE),
    (nn.LayerNorm((4, 12, 8)), IMAGE),
    (nn.LayerNorm(10), VECTOR),
    (nn.PReLU(4), IMAGE),
    (nn.ReLU(), IMAGE),
    (nn.ReLU6(), IMAGE),
    (nn.LeakyReLU(0.2), IMAGE),
    (nn.ELU(0.7), IMAGE),
    (nn.GELU(), IMAGE),
    (nn.GELU("tanh"), VECTOR),
    (nn.SiLU(), IMAGE),
    (nn.Hardswish(), IMAGE),
    (nn.Hardtanh(0, 6), IMAGE),
    (nn.Sigmoid(), VECTOR),
    (nn.Tanh(), IMAGE),
    (nn.Softmax(-1), VECTOR),
    (nn.Softmax2d(), IMAGE),
    (nn.MaxPool2d(3, 2, 1), IMAGE),
    (nn.MaxPool2d((2, 3), ceil_mode=True), IMAGE),
    (nn.AvgPool2d(3, 2, 1, count_include_pad=False), IMAGE),
    (nn.AdaptiveAvgPool2d(1), IMAGE),
    (nn.AdaptiveAvgPool2d((6, 2)), IMAGE),
    (nn.AdaptiveMaxPool2d(4), IMAGE),
    (nn.Flatten(), IMAGE),
    (nn.Unflatten(1, (2, 5, 1)), VECTOR),
    (nn.ZeroPad2d((1, 2, 0, 3)), IMAGE),
    (nn.ConstantPad2d(1, 0.5), IMAGE),
    (nn.Upsample(scale_factor=3), IMAGE),
    (nn.Upsample(scale_factor=(2, 1)), IMAGE),
    (nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False), IMAGE),
]


@pytest.mark.parametrize(("module", "shape"), MODULES, ids=lambda each: re.sub(r"\W+", " ", str(each)))
def test_a_module_of_pytorch_is_a_layer(module, shape):
    model = taken(nn.Sequential(module, nn.Tanh()) if isinstance(module, nn.Flatten) else nn.Sequential(module), sample(*shape))
    state = {name for name in settled(module).state_dict() if not name.endswith("num_batches_tracked")}
    if not isinstance(module, nn.BatchNorm2d | nn.InstanceNorm2d | nn.Flatten):
        assert {name.rpartition(".")[2] for name in model.net.params.names} == state


class Functions(nn.Module):
    """Functions, methods and operators in the place of modules."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, 3, 3))
        self.conv = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x):
        y = F.relu(F.conv2d(x, self.weight, padding=1))
        y = y + self.conv(y).sigmoid() * torch.tanh(y)
        y = torch.cat([F.max_pool2d(y, 2), F.avg_pool2d(y, 2)], 1)
        y = F.interpolate(F.pad(y, (1, 1, 1, 1)), scale_factor=2)
        y = F.dropout(F.silu(y), 0.3, self.training)
        y = F.adaptive_avg_pool2d(y, 1)
        return F.softmax(F.leaky_relu(y.view(y.size(0), -1), 0.1), dim=1)


@pytest.mark.parametrize("module", [nn.Conv2d(4, 6, 3), nn.BatchNorm2d(4, affine=False), nn.InstanceNorm2d(4, affine=True), nn.ELU(0.3)], ids=str)
def test_a_module_alone_is_read_by_its_functions(module):
    taken(module, sample(*IMAGE))


def test_functions_and_methods_are_layers_too():
    model = taken(Functions(), sample(3, 4, 8, 6))
    assert {"conv2d.weight", "conv.weight", "conv.bias"} == set(model.net.params.names)


class Deciding(nn.Module):
    """A module whose Python decides by a shape, which torch.fx cannot follow."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.norm, self.head = nn.GroupNorm(2, 6), nn.Linear(6, 5)

    def forward(self, x):
        batch, _channels, height, _width = x.shape
        x = self.norm(self.body(x)) if height > 4 else x
        x += F.hardswish(x)
        return self.head(x.mean((2, 3)).reshape(batch, -1))


def test_where_tracing_fails_the_module_is_exported():
    with pytest.raises(Exception, match=r"(?i)proxy|iterat|traced"):
        torch.fx.symbolic_trace(Deciding())
    module = Deciding()
    model = taken(module, sample(3, 4, 8, 6))
    assert set(model.net.params.names) == {name for name in module.state_dict() if not name.endswith("num_batches_tracked")}


def test_a_resnet_has_its_names_and_outputs():
    module = ResNet18(8)
    model = taken(module, sample(2, 3, 32, 32), loss="cross_entropy")
    assert set(model.net.params.names) == {name for name in module.state_dict() if not name.endswith("num_batches_tracked")}
    assert model.features(sample(2, 3, 32, 32).numpy(), "layer2.1.bn2").shape == (2, 16, 8, 8)
    assert model.freeze("layer1.*")
    history = model.fit(sample(4, 3, 32, 32).numpy(), np.arange(4), batch_size=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()


def test_names_survive_a_file(tmp_path):
    model = taken(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 3)), sample(2, 3, 8, 8))
    again = nbcnn.load(model.save(tmp_path / "net.safetensors"), mode="cpu")
    assert again.net.params.names == model.net.params.names
    assert {name.partition(".")[0] for name in model.net.params.names} == {"0", "1", "3"}
    np.testing.assert_array_equal(again.predict(sample(2, 3, 8, 8).numpy()), model.predict(sample(2, 3, 8, 8).numpy()))


def test_several_inputs_and_outputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, a, b):
            x, y = self.shared(a), self.shared(b)
            return x + y, F.relu(y)

    module, x = Two(), (sample(2, 3, 6, 6), sample(2, 3, 6, 6, seed=2))
    model = nbcnn.torch.from_module(module, x, mode="cpu")
    assert model.net.params.names == ["shared.weight", "shared.bias"]
    with torch.no_grad():
        wanted = module(*x)
    for found, want in zip(model.predict(tuple(each.numpy() for each in x)), wanted, strict=True):
        np.testing.assert_allclose(found, want.numpy(), rtol=0, atol=4 * 2**-24 * 27**0.5 * float(want.abs().max()))


class Odd(nn.Module):
    """Parts without a counterpart, in the middle of others."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect")
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.act = nn.Mish()
        self.fine = nn.ReLU()

    def forward(self, x):
        x = self.stem(x)
        tokens = x.flatten(2).transpose(1, 2)
        tokens, _ = self.attention(tokens, tokens, tokens)
        x = self.fine(self.act(self.norm(tokens)))
        return torch.fft.rfft(x.mean(1)).real * 2


def test_everything_without_a_counterpart_is_named_in_one_error():
    with pytest.raises(Unsupported) as raised:
        nbcnn.torch.from_module(Odd(), sample(2, 3, 8, 8), mode="cpu")
    text = str(raised.value)
    assert text.startswith("nbcnn has no counterpart of ")
    assert raised.value.exit_code == 2
    for part in ("stem: Conv2d (padding_mode='reflect')", "attention: MultiheadAttention", "norm: LayerNorm", "act: Mish", "transpose", "rfft"):
        assert part in text, text
    assert "fine" not in text


def test_a_value_that_is_changed_in_place_and_read_again_is_refused():
    class Changing(nn.Module):
        def forward(self, x):
            y = F.relu_(x)
            return x + y

    with pytest.raises(Unsupported, match="changes in place"):
        nbcnn.torch.from_module(Changing(), sample(2, 3, 4, 4), mode="cpu")


def test_what_is_given_wrong_is_said():
    net = nn.Sequential(nn.Conv2d(3, 4, 3))
    for example, says in ((np.zeros((1, 3, 8, 8)), "the example must be a tensor"), (sample(3, 8), "does not run on the example")):
        with pytest.raises(nbcnn.UsageError, match=says):
            nbcnn.torch.from_module(net, example)
    with pytest.raises(nbcnn.UsageError, match=r"takes a torch\.nn\.Module, got list"):
        nbcnn.torch.from_module([], sample(1, 3, 8, 8))
    with pytest.raises(nbcnn.UsageError, match="takes 1 inputs, and there are 2"):
        nbcnn.torch.from_module(net, (sample(1, 3, 8, 8), sample(1, 3, 8, 8)))
    net.train()
    nbcnn.torch.from_module(net, sample(1, 3, 8, 8), mode="cpu")
    assert net.training, "the module is left as it was"
