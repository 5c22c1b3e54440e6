"""Tests of resnet18, mobilenet and unet, with few channels, on every row of a GPU: loss, gradients and predictions as on the NumPy path."""

from __future__ import annotations

import numpy as np
import pytest
from test_net import net_or_skip

from nbcnn.modes import MODES
from nbcnn.nn.models import mobilenet, resnet18, unet
from nbcnn.plan.bounds import STORE, parity_bound
from nbcnn.plan.storage import UNIT_ROUNDOFF
from nbcnn.run.net import Net

SHAPE, BATCH = (3, 16, 16), 8
ROWS = pytest.mark.parametrize("row", [pytest.param(key, marks=pytest.mark.gpu) for key in MODES if key[0] != "cpu"], ids="-".join)
MODELS = {
    "resnet18": lambda: resnet18(*SHAPE, classes=5, filters=8),
    "mobilenet": lambda: mobilenet(*SHAPE, classes=5, multiplier=1 / 8),
    "unet": lambda: unet(*SHAPE, classes=5, filters=8, depth=2),
    "unet (denoising)": lambda: unet(*SHAPE, filters=8, depth=2),
}


def limit_of(precision, layers=40, switches=27, terms=9 * 64):
    """How far a gradient may be: `layers` are those on the longest way, convolutions and norms, `terms` those of the widest convolution.

    Forward and back each layer may err by the parity bound. In fp32 these errors are simply added up. Roundings of tf32 and bf16 are so much larger
    that their sum would allow anything: they are independent of each other from layer to layer, so they add up as the root of the sum of their
    squares. Every ReLU, ReLU6 or maximum also passes a part u of the gradients the other way, all together √(switches·u) in norm.
    """
    if precision == "fp32":
        return 2 * layers * parity_bound(terms, precision)
    return 2 * (layers**0.5 * parity_bound(terms, precision) + (switches * UNIT_ROUNDOFF[STORE[precision]]) ** 0.5)


@ROWS
@pytest.mark.parametrize("name", MODELS)
def test_a_ready_made_graph_agrees_with_the_numpy_path(name, row):
    rng = np.random.default_rng(7)
    x = rng.standard_normal((BATCH, *SHAPE)).astype(np.float32)
    net = net_or_skip(MODELS[name](), SHAPE, row, seed=2)
    reference = Net(MODELS[name](), SHAPE, mode="cpu", seed=2)
    targets = [] if "denoising" in name else [rng.integers(0, 5, (BATCH, *reference.plane)).astype(np.int32)]
    (loss, grads), (expected_loss, expected) = net.gradients(x, *targets), reference.gradients(x, *targets)
    limit = limit_of(row[1])
    assert loss == pytest.approx(expected_loss, rel=limit)
    # A bias in front of a norm has next to no gradient: what it has is held against a hundredth of all gradients.
    least = 0.01 * np.linalg.norm([np.linalg.norm(grad) for grad in expected.values()])
    off = {name: float(np.linalg.norm(grads[name] - grad) / max(np.linalg.norm(grad), least)) for name, grad in expected.items()}
    assert max(off.values()) <= limit, max(off, key=off.get)
    got, wanted = net.predict(x), reference.predict(x)
    assert np.linalg.norm(got - wanted) <= limit * np.linalg.norm(wanted)
