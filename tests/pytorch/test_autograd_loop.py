"""PyTorch's autograd makes the loss's gradient for a training step of `nbcnn.Model.step`, from its output in place; losses by PyTorch's names."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is no dependency: pip install 'nbcnn[torch]'")
pytestmark = pytest.mark.full

import nbcnn  # noqa: E402
from nbcnn.nn.joins import ALIASES, losses_of  # noqa: E402


def test_autograd_takes_the_output_and_gives_its_gradient():
    """With whole numbers, whose products and sums float32 has exactly: the loss Σ y²/2 has the gradient y."""
    random = np.random.default_rng(2)
    x, w = (random.integers(-3, 4, shape).astype(np.float32) for shape in ((4, 6), (3, 6)))
    model = nbcnn.Model([nbcnn.Linear(3, bias=False)], mode="cpu").build((6,))
    model.set_weights({"linear1.weight": w})
    step = model.step(nbcnn.SGD(lr=0.5, momentum=0))
    made = step.forward(torch.from_numpy(x))
    y = torch.from_dlpack(made)
    assert y.data_ptr() == made.ctypes.data  # not a copy
    y.requires_grad_()
    (y * y / 2).sum().backward()
    step.backward(y.grad)
    step.update()
    assert np.array_equal(model.weights()["linear1.weight"], w - np.float32(0.5) * (x @ w.T).T @ x)


@pytest.mark.parametrize("name", [name for name in ALIASES if hasattr(torch.nn, name)])
def test_a_loss_by_pytorchs_name_is_pytorchs(name):
    random = np.random.default_rng(4)
    y, t = 2 * random.standard_normal((6, 5)), random.random((6, 5))
    if name == "CrossEntropyLoss":
        t = random.integers(0, 5, 6)
    # BCELoss takes probabilities: the sigmoid, which a network for it ends in, and before which our loss takes its outputs.
    seen = torch.from_numpy(1 / (1 + np.exp(-y)) if name == "BCELoss" else y)
    wanted = float(getattr(torch.nn, name)()(seen, torch.from_numpy(t)))
    total, count = losses_of(name).measure(y, t)
    # Both in float64: sums of 30 terms of the order of 1, whose roundings add up to 30·2⁻⁵³ at most; the sigmoid's is of that size, too.
    assert abs(total / count - wanted) <= 2**-46
