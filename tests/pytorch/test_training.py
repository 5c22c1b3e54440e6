"""Tests of what training does to a network of `from_module`: its trained numbers and their float64 gradients are PyTorch's, or it is refused."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is no dependency: pip install 'nbcnn[torch]'")
pytestmark = pytest.mark.full

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from doors import assert_same_gradients, trained  # noqa: E402
from networks import assert_as_exact, settled  # noqa: E402
from torch import nn  # noqa: E402

import nbcnn  # noqa: E402
import nbcnn.torch  # noqa: E402
from nbcnn.torch import Unsupported  # noqa: E402


class Module(nn.Module):
    """Two convolutions and a norm; `how` says what forward does with them."""

    def __init__(self, how, prepare=None):
        super().__init__()
        torch.manual_seed(4)
        self.a, self.b, self.c = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.n, self.fc = nn.BatchNorm2d(4), nn.Linear(4, 3)
        for each in self.parameters():
            each.data += 0.1 * torch.rand_like(each)
        self.how = how
        if prepare:
            prepare(self)

    def forward(self, x):
        return self.how(self, x)


def frozen(m):
    m.a.requires_grad_(False)
    m.b.bias.requires_grad_(False)


def tied(m):
    m.b.weight = m.a.weight


def tied_whole(m):
    m.b.weight, m.b.bias = m.a.weight, m.a.bias


def tied_linear(m):
    m.d = nn.Linear(4, 3)
    m.d.weight = m.fc.weight


def without_gradients(m, x):
    with torch.no_grad():
        y = m.a(x)
    return m.b(y) + m.c(x)


def flat(m, x):
    return F.adaptive_avg_pool2d(x, 1).flatten(1)


def scale(m):
    m.gamma, m.beta = nn.Parameter(torch.rand(4, 1, 1)), nn.Parameter(torch.rand(8))
    m.register_buffer("fixed", torch.rand(4, 1, 1))


def single(m):
    m.alpha, m.beta = nn.Parameter(torch.tensor([1.3])), nn.Parameter(torch.tensor(0.4))


KEPT = {
    "one trained number": (lambda m, x: torch.maximum(m.a(x) * m.alpha, m.beta), single),
    "a number that two parts share": (lambda m, x: m.a(x) * m.alpha + torch.tanh(x * m.alpha), single),
    "trained divisors": (lambda m, x: m.a(x) / m.gamma + x[:, :, :1] / m.beta, scale),
    "a factor that is detached": (lambda m, x: m.a(x) * m.b(x).detach(), None),
    "a value of which one use is detached": (lambda m, x: (y := m.a(x)) * y.detach() + m.b(x), None),
    "a part without gradients": (without_gradients, None),
    "an output without gradients": (lambda m, x: torch.tanh(m.a(x)) + (m.b(x) - x).detach(), None),
    "a frozen part": (lambda m, x: m.c(F.relu(m.b(F.relu(m.a(x))))), frozen),
    "a weight of two modules": (lambda m, x: m.a(x) + torch.tanh(m.b(x)), tied),
    "two modules of the same weights": (lambda m, x: m.a(x) + torch.tanh(m.b(x)), tied_whole),
    "a weight of two linear maps": (lambda m, x: m.fc(flat(m, x)) * torch.tanh(m.d(flat(m, m.a(x)))), tied_linear),
    "a weight in a module and a function": (lambda m, x: m.a(x) + torch.tanh(F.conv2d(x, m.a.weight, padding=1)), None),
    "a reused module": (lambda m, x: m.a(F.relu(m.a(x))), None),
    "a norm by its running statistics": (lambda m, x: F.batch_norm(m.a(x), m.n.running_mean, m.n.running_var, m.n.weight, m.n.bias), None),
    "a norm that stays in evaluation": (lambda m, x: m.n(m.a(x)), lambda m: setattr(m.n, "train", lambda mode=True: m.n)),
    "a norm that trains": (lambda m, x: m.n(m.a(x)), None),
    "a norm as a function": (
        lambda m, x: F.batch_norm(m.a(x), m.n.running_mean, m.n.running_var, m.n.weight, m.n.bias, m.training),
        None,
    ),
    "a norm without parameters": (lambda m, x: F.group_norm(F.instance_norm(m.a(x)), 2), None),
    "a norm of one axis": (lambda m, x: F.layer_norm(m.a(x), (8,), m.beta, None), scale),
    "a norm of rows of features": (lambda m, x: m.fc(m.a(x).permute(0, 2, 3, 1)) * F.silu(m.b(x)).movedim(1, 3)[..., :3], None),
    "factors and offsets": (lambda m, x: m.a(x) * m.gamma + m.beta - m.fixed, scale),
    "a constant of frozen tensors": (lambda m, x: F.conv2d(x, m.a.weight * 2) + m.b(x)[:, :, 1:-1, 1:-1], frozen),
    "a gate of channels": (lambda m, x: m.a(x) * torch.sigmoid(m.c(F.adaptive_avg_pool2d(m.b(x), 1))), None),
}


@pytest.mark.parametrize("name", KEPT)
def test_training_is_that_of_pytorch(name):
    module = Module(*KEPT[name])
    settled(module)
    if "norm that stays" in name:
        module.n.training = False
    x = torch.randn(3, 4, 6, 8, generator=torch.Generator().manual_seed(1))
    model = nbcnn.torch.from_module(module, x, loss="mse", mode="cpu")
    assert_as_exact(model.predict(x.numpy()).reshape(module(x).shape), module, (x,))
    # Statistics that stay are float32 factors, 2⁻²⁴ off, and offsets of them.
    assert_same_gradients(model, module, x, 2**-22 if name.startswith("a norm") else 1e-9)
    before = model.weights()
    model.fit(x.numpy(), np.zeros_like(model.predict(x.numpy())), optimizer=nbcnn.SGD(lr=0.01, weight_decay=0.1), epochs=2, verbose=0)
    changed = {name for name, array in model.weights().items() if (array != before[name]).any() and "running" not in name}
    assert changed == set(trained(model))


def conv_both_ways(m, x):
    return F.conv_transpose2d(F.conv2d(x, m.a.weight), m.a.weight)


def depth(m, x):
    return m.a(x) if m.training else m.b(x)


def normed(m):
    torch.nn.utils.parametrizations.weight_norm(m.a)


def hooked(m):
    m.a.register_forward_hook(lambda module, given, made: made * 2)


REFUSED = {
    "a weight of two kinds of layer": (conv_both_ways, None, "with 'a.weight'.*trained as the weight of a Conv2d already"),
    "statistics of the batch in predictions": (
        lambda m, x: F.batch_norm(m.a(x), m.n.running_mean, m.n.running_var, training=True),
        None,
        "batch_norm.*statistics of the batch in predictions",
    ),
    "a dropout in predictions": (lambda m, x: F.dropout(m.a(x)), None, "dropout.*in predictions"),
    "a dropout of channels": (lambda m, x: F.dropout2d(m.a(x), 0.3, m.training), None, "dropout2d.*single elements"),
    "another training": (depth, None, "computes something else in training than in evaluation"),
    "a weight that is computed": (lambda m, x: m.a(x), normed, "weight is computed of other tensors"),
    "a trained weight that is changed": (lambda m, x: F.conv2d(x, m.a.weight * 2), None, "with 'a.weight'.*computes with a tensor that is trained"),
    "a trained weight that is detached": (lambda m, x: m.a(x) * m.gamma.detach(), scale, "with 'gamma'.*computes with a tensor that is trained"),
    "a hook": (lambda m, x: m.a(x), hooked, "it has hooks"),
    "a norm that shares its weight with others": (lambda m, x: m.n(x) + F.prelu(x, m.n.weight), None, "n.weight'.*trained as the weight of a"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused(name):
    how, prepare, says = REFUSED[name]
    with pytest.raises(Unsupported, match=f"(?s){says}"):
        nbcnn.torch.from_module(Module(how, prepare).eval(), torch.zeros(2, 4, 6, 8), mode="cpu")


def test_a_dropout_drops_in_training_alone():
    module = Module(lambda m, x: F.dropout(m.a(x), 0.5, m.training))
    x = torch.randn(2, 4, 6, 8)
    model = nbcnn.torch.from_module(module, x, mode="cpu")
    assert [type(each).__name__ for each in model.layers] == ["Conv2d", "Dropout"]
    module = Module(lambda m, x: F.dropout(m.a(x), 0.5, False))
    assert [type(each).__name__ for each in nbcnn.torch.from_module(module, x, mode="cpu").layers] == ["Conv2d"]
