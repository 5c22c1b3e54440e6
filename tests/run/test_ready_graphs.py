"""Tests of resnet18, mobilenet and unet, with few channels, on every row of a GPU: loss, gradients and predictions as on the NumPy path."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from test_net import net_or_skip

from nbcnn.modes import MODES
from nbcnn.nn import models
from nbcnn.nn.activations import Swish
from nbcnn.nn.models import mobilenet, resnet18, unet
from nbcnn.plan.bounds import STORE, parity_bound
from nbcnn.plan.storage import UNIT_ROUNDOFF
from nbcnn.run.net import Net

SHAPE, BATCH = (3, 16, 16), 8
ROWS = [key for key in MODES if key[0] != "cpu"]


def smooth_mobilenet():
    """Four blocks of it, with Swish for ReLU6: of the whole network the gradients are not comparable where rows round (`CHAOTIC`)."""
    with mock.patch.multiple(models, ReLU6=Swish, MOBILE=models.MOBILE[:4]):
        return mobilenet(*SHAPE, classes=5, multiplier=1 / 8)


MODELS = {
    "resnet18": lambda: resnet18(*SHAPE, classes=5, filters=8),
    "mobilenet": lambda: mobilenet(*SHAPE, classes=5, multiplier=1 / 8),
    "smooth mobilenet": smooth_mobilenet,
    "unet": lambda: unet(*SHAPE, classes=5, filters=8, depth=2),
    "unet (denoising)": lambda: unet(*SHAPE, filters=8, depth=2),
}


CHAOTIC = {("mobilenet", "tf32"), ("mobilenet", "bf16")}
"""Its gradients move by 0.9 to 2.2 of their norm when weights change by 2^-11: its ReLU6s switch, and norms of eight values amplify that."""
NEEDLESS = {("smooth mobilenet", "fp32"), ("smooth mobilenet", "fp16")}
"""What is not run: in fp32 the whole network's gradients are compared, in fp16 no gradients are, and the whole network's outputs."""
TOLD = [(name, each) for name in MODELS for each in ("fp32", "tf32", "bf16") if (name, each) not in CHAOTIC | NEEDLESS]
"""Networks and precisions whose gradients are compared."""


def limit_of(precision, layers=40, switches=27, terms=9 * 64):
    """How far a gradient may be: `layers` are those on the longest way, convolutions and norms, `terms` those of the widest convolution.

    Forward and back each layer may err by the parity bound. In fp32 these errors are simply added up. Roundings of tf32 and bf16 are so much larger
    that their sum would allow anything: they are independent of each other from layer to layer, so they add up as the root of the sum of their
    squares. Every ReLU, ReLU6 or maximum also passes a part u of the gradients the other way, all together √(switches·u) in norm.
    """
    if precision == "fp32":
        return 2 * layers * parity_bound(terms, precision)
    return 2 * (layers**0.5 * parity_bound(terms, precision) + (switches * UNIT_ROUNDOFF[STORE[precision]]) ** 0.5)


def apart(grads, expected):
    """How far each gradient is from the expected one, relative to its norm, and the name of the farthest.

    A bias in front of a norm has next to no gradient: what it has is held against a hundredth of all gradients.
    """
    least = 0.01 * np.linalg.norm([np.linalg.norm(grad) for grad in expected.values()])
    off = {name: float(np.linalg.norm(grads[name] - grad) / max(np.linalg.norm(grad), least)) for name, grad in expected.items()}
    return max(off.values()), max(off, key=off.get)


def moved(name, precision, x, *targets):
    """How far the gradients of the NumPy path move when weights and images are off by a rounding of the row, at most of three times."""
    u, found = UNIT_ROUNDOFF[STORE[precision]], []
    exact = Net(MODELS[name](), SHAPE, mode="cpu", seed=2).gradients(x, *targets)[1]
    for seed in range(3):
        rng, net = np.random.default_rng(seed), Net(MODELS[name](), SHAPE, mode="cpu", seed=2)
        net.params.weights[:] *= 1 + u * rng.uniform(-1, 1, net.params.weights.shape).astype(np.float32)
        found.append(apart(net.gradients(x * (1 + u * rng.uniform(-1, 1, x.shape).astype(np.float32)), *targets)[1], exact)[0])
    return max(found)


def limit_of_gradients(name, precision, x, *targets):
    """Of a row that rounds, gradients may also be off by twice what its roundings of weights and images alone do to the NumPy path's."""
    if precision == "fp32":
        return limit_of(precision)
    own = limit_of(precision, layers=14, switches=0) if name == "smooth mobilenet" else limit_of(precision)
    return max(own, 2 * moved(name, precision, x, *targets))


def taken_by(name):
    """Images, and the targets of a network's loss, if it has any."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((BATCH, *SHAPE)).astype(np.float32)
    plane = Net(MODELS[name](), SHAPE, mode="cpu", seed=2).plane
    return x, *([] if "denoising" in name else [rng.integers(0, 5, (BATCH, *plane)).astype(np.int32)])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "row"), [pytest.param(name, key, id=f"{name}-{'-'.join(key)}") for name in MODELS for key in ROWS if (name, key[1]) not in NEEDLESS]
)
def test_a_ready_made_graph_agrees_with_the_numpy_path(name, row):
    """Outputs, and where they tell loss and gradients."""
    x, *targets = taken_by(name)
    net = net_or_skip(MODELS[name](), SHAPE, row, seed=2)
    reference, limit = Net(MODELS[name](), SHAPE, mode="cpu", seed=2), limit_of(row[1])
    if (name, row[1]) in TOLD:
        (loss, grads), (expected_loss, expected) = net.gradients(x, *targets), reference.gradients(x, *targets)
        assert loss == pytest.approx(expected_loss, rel=limit)
        off, farthest = apart(grads, expected)
        assert off <= limit_of_gradients(name, row[1], x, *targets), farthest
    got, wanted = net.predict(x), reference.predict(x)
    assert np.linalg.norm(got - wanted) <= limit * np.linalg.norm(wanted)


@pytest.mark.parametrize(("name", "precision"), TOLD)
def test_a_wrong_gradient_is_farther_than_its_limit_allows(name, precision):
    """Targets that go to the next image, or mirrored images, make more difference than the test above allows."""
    x, *targets = taken_by(name)
    net = Net(MODELS[name](), SHAPE, mode="cpu", seed=2)
    exact, swapped = net.gradients(x, *targets)[1], [np.roll(each, 1, axis=0) for each in targets]
    wrong = net.gradients(x, *swapped)[1] if targets else net.gradients(x[..., ::-1].copy())[1]
    assert apart(wrong, exact)[0] > limit_of_gradients(name, precision, x, *targets)
    assert precision != "fp32" or limit_of(precision) > 2 * moved(name, precision, x, *targets)
