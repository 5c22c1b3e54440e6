"""Tests of `nbcnn.torch.from_module`: outputs and names of networks of PyTorch, and that what has no counterpart is named at once."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is no dependency: pip install 'nbcnn[torch]'")
pytestmark = pytest.mark.full

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from doors import assert_same_gradients, trained  # noqa: E402
from networks import ResNet18, assert_as_exact, settled  # noqa: E402
from small import IMAGE, MODULES, VECTOR  # noqa: E402
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
    # Outputs of other than one and three axes are images of one row, or vectors (`nbcnn.torch.from_module`).
    seen = [each.reshape(len(each), *shape) for each, shape in zip(arrays, getattr(model.layers, "inputs", ()), strict=True)]
    found, wanted = model.predict(tuple(seen) if len(x) > 1 else seen[0]), module(*x)
    assert_as_exact(found.reshape(wanted.shape) if isinstance(wanted, torch.Tensor) else found, module, x)
    return model


@pytest.mark.parametrize(("module", "shape"), MODULES, ids=lambda each: re.sub(r"\W+", " ", str(each)))
def test_a_module_of_pytorch_is_a_layer(module, shape):
    model = taken(nn.Sequential(module, nn.Tanh()) if isinstance(module, nn.Flatten) else nn.Sequential(module), sample(*shape))
    state = {name for name in settled(module).state_dict() if not name.endswith("num_batches_tracked")}
    held = {name.rpartition(".")[2] for name in trained(model)} | {each for each in state if "running" in each}
    assert held == state


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
        self.blocks = nn.Sequential(*(nn.Sequential(nn.RReLU(), nn.Linear(8, 8)) for _ in range(6)))
        self.pool = nn.AvgPool2d(2, divisor_override=3)
        self.fine = nn.ReLU()

    def forward(self, x):
        x = self.pool(self.stem(x))
        tokens = x.flatten(2).transpose(1, 2)
        tokens, _ = self.attention(tokens, tokens, tokens)
        x = self.fine(self.blocks(tokens))
        return torch.fft.rfft(x.mean(1)).abs() * 2


def test_everything_without_a_counterpart_is_named_in_one_error():
    with pytest.raises(Unsupported) as raised:
        nbcnn.torch.from_module(Odd(), sample(2, 3, 8, 8), mode="cpu")
    assert str(raised.value).startswith("nbcnn has no counterpart of 9 parts of Odd:")
    assert raised.value.exit_code == 2
    assert raised.value.parts == (
        "pool: AvgPool2d (divisor_override)",
        "attention: MultiheadAttention",
        "RReLU, 6×: blocks.0.0, blocks.1.0, blocks.2.0, blocks.3.0 and 2 more",
        "fft_rfft: fft_rfft",
    )


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


def test_weights_that_are_computed_while_the_module_is_traced_are_refused():
    """2·w is a tensor already where torch.fx sees no value of the module in it: as a constant it would be trained no more."""

    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Conv2d(4, 4, 1)

        def forward(self, x):
            (weight, _) = self.parameters()
            return F.conv2d(x, 2 * weight)

    with pytest.raises(Unsupported, match=r"conv2d: tensor .it was computed of tensors that are trained while the module was traced"):
        nbcnn.torch.from_module(Listed(), sample(*IMAGE), mode="cpu")


def test_products_of_attention_are_named_behind_a_part_that_is_missing():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.qkv = nn.Parameter(torch.ones(1, 1, 4)), nn.Linear(4, 12)

        def forward(self, x):
            rows = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
            q, k, v = self.qkv(rows).chunk(3, -1)
            return ((q @ k.transpose(1, 2)).softmax(-1) @ v).mean(1)

    with pytest.raises(Unsupported) as raised:
        nbcnn.torch.from_module(Attention(), sample(3, 5, 4), mode="cpu")
    lines = str(raised.value).splitlines()
    assert lines[0] == "nbcnn has no counterpart of 3 parts of Attention:"
    assert [line.strip() for line in lines[1:]] == [
        "expand: expand (an operand is a tensor of the module, and layers are called on values)",
        "matmul (both operands are computed, and one must be a constant), 2×: matmul, matmul_1",
    ]


def test_exp_and_its_gradient():
    class Bump(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(10, 4)

        def forward(self, x):
            return torch.exp(-self.linear(x).square())

    x = sample(*VECTOR)
    module = Bump()
    assert_same_gradients(taken(module, x), module, x)
