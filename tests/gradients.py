"""This module compares the gradients of networks that should have the same."""

from __future__ import annotations

import numpy as np
import pytest


def assert_same_gradients(one, other, x, labels, limit):
    """The losses of two networks agree to `limit` of themselves, and so does the length of each gradient's difference."""
    (loss, grads), (other_loss, other_grads) = one.gradients(x, labels), other.gradients(x, labels)
    assert other_loss == pytest.approx(loss, rel=limit)
    assert other_grads.keys() == grads.keys()
    for name, grad in grads.items():
        assert np.linalg.norm(other_grads[name] - grad) <= limit * np.linalg.norm(grad), name
