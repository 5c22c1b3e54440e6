"""PyTorch's autograd makes the loss's gradient for a training step of `nbcnn.Model.step`, from its output in place."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is no dependency: pip install 'nbcnn[torch]'")
pytestmark = pytest.mark.full

import nbcnn  # noqa: E402


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
