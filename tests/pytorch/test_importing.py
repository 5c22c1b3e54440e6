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


IMAGE, VECTOR, SERIES = (3, 4, 12, 8), (3, 10), (3, 4, 9)
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
    (nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="reflect"), IMAGE),
    (nn.Conv2d(4, 6, 3, padding=1, padding_mode="replicate", bias=False), IMAGE),
    (nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), IMAGE),
    (nn.Conv1d(4, 6, 3, padding=1, stride=2), SERIES),
    (nn.ConvTranspose1d(4, 6, 3, 2, 1), SERIES),
    (nn.Linear(9, 5), SERIES),
    (nn.Linear(8, 5, bias=False), IMAGE),
    (nn.BatchNorm1d(10), VECTOR),
    (nn.BatchNorm1d(4), SERIES),
    (nn.GroupNorm(2, 4, affine=False), IMAGE),
    (nn.GroupNorm(2, 4), SERIES),
    (nn.LayerNorm(8), IMAGE),
    (nn.LayerNorm((12, 8), elementwise_affine=False), IMAGE),
    (nn.LayerNorm(10, bias=False), VECTOR),
    (nn.RMSNorm(8), IMAGE),
    (nn.LocalResponseNorm(3, 0.1), IMAGE),
    (nn.PReLU(), SERIES),
    (nn.SELU(), IMAGE),
    (nn.CELU(0.7), IMAGE),
    (nn.Mish(), IMAGE),
    (nn.Hardsigmoid(), IMAGE),
    (nn.Hardtanh(-0.5, 0.8), IMAGE),
    (nn.Softplus(), IMAGE),
    (nn.Softplus(2.0), VECTOR),
    (nn.LogSigmoid(), IMAGE),
    (nn.Softsign(), IMAGE),
    (nn.Tanhshrink(), IMAGE),
    (nn.Softshrink(0.2), IMAGE),
    (nn.Hardshrink(0.2), IMAGE),
    (nn.Threshold(0.1, -0.2), IMAGE),
    (nn.GLU(1), IMAGE),
    (nn.GLU(-1), VECTOR),
    (nn.Softmax(-1), IMAGE),
    (nn.LogSoftmax(1), IMAGE),
    (nn.LogSoftmax(-1), VECTOR),
    (nn.MaxPool1d(3, 2, 1), SERIES),
    (nn.MaxPool2d(2, 1, dilation=2), IMAGE),
    (nn.AvgPool1d(2), SERIES),
    (nn.AvgPool2d(3, 2, 1, ceil_mode=True), IMAGE),
    (nn.AdaptiveAvgPool2d((5, 3)), IMAGE),
    (nn.AdaptiveAvgPool1d(4), SERIES),
    (nn.AdaptiveMaxPool2d(1), IMAGE),
    (nn.ReflectionPad2d((1, 2, 0, 3)), IMAGE),
    (nn.ReplicationPad2d(1), IMAGE),
    (nn.CircularPad2d((1, 0, 0, 2)), IMAGE),
    (nn.ZeroPad1d(2), SERIES),
    (nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), IMAGE),
    (nn.Upsample(size=(17, 5), mode="bilinear", align_corners=False), IMAGE),
    (nn.Upsample(size=(17, 5)), IMAGE),
    (nn.Upsample(scale_factor=1.7, mode="nearest-exact"), IMAGE),
    (nn.Upsample(scale_factor=(1.5, 2), mode="bicubic"), IMAGE),
    (nn.Upsample(scale_factor=3, mode="linear"), SERIES),
    (nn.PixelShuffle(2), IMAGE),
    (nn.PixelUnshuffle(2), IMAGE),
    (nn.ChannelShuffle(2), IMAGE),
]


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


FUNCTIONS = {
    "numbers": lambda x: (x * 0.5 + 1 - x / 4) * (2 - x) - (-x),
    "clamps": lambda x: x.clamp(-0.3, 0.4) + x.clamp(min=0.1) + torch.clamp_max(x, 0.2),
    "powers": lambda x: (x.abs() + 0.1) ** 0.5 + x.square() + (x * x + 1).rsqrt() + torch.reciprocal(x.abs() + 1),
    "axes": lambda x: x.mean((2, 3))[:, :, None, None] * x + x.mean(1, keepdim=True) - x.sum(-1, keepdim=True) * x.mean(-1)[..., None],
    "spread": lambda x: x.std(1, keepdim=True) + x.var((2, 3), unbiased=False, keepdim=True) + F.normalize(x, dim=1) + x.norm(dim=1, keepdim=True),
    "extremes": lambda x: x.amax((2, 3), keepdim=True) * torch.maximum(x, -x) - torch.minimum(x, x.roll(1, 2)) + x.amin(1, keepdim=True),
    "parts": lambda x: torch.cat([x[:, 1:3], x.flip(1)[:, ::2], *x.chunk(2, 1), x.split([1, 3], 1)[0], torch.stack(x.unbind(1), 1)], 1),
    "orders": lambda x: x.permute(0, 2, 3, 1).transpose(1, 3).movedim(-1, 1).swapaxes(2, 3).contiguous(),
    "copies": lambda x: x[:, :, :1].expand(-1, -1, 12, -1) + x.repeat(1, 1, 1, 2)[..., :8] + x[:, :, :6].repeat_interleave(2, 2),
    "rolled": lambda x: x.roll((1, -2), (2, 3)) + x[:, 0:1] * x.narrow(1, 2, 1) + x.select(1, 3).unsqueeze(1) + x[:, -1:],
    "shapes": lambda x: x.flatten(2).unflatten(2, (12, 8)).view(x.size(0), 2, 2, -1).squeeze(-1).reshape(x.shape[0], -1),
    "masked": lambda x: torch.where(torch.arange(8) > 3, x, 2 * x) + torch.where(torch.ones(12, 1, dtype=torch.bool).tril(), 0.5, x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arithmetic_and_moves_are_layers_too(name):
    class Named(nn.Module):
        def forward(self, x):
            return FUNCTIONS[name](x)

    taken(Named(), sample(*IMAGE))


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
