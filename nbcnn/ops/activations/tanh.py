"""Tanh: y = tanh(x); dx = dy·(1 − y²).

The gradient is read off y, which is alive anyway as the next layer's input.
"""

from __future__ import annotations

import math

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.activations.activation import Activation


def tanh_fprop(x: np.ndarray, y: np.ndarray) -> None:
    """y = tanh(x), any shape."""
    np.tanh(x, out=y)


def tanh_dgrad(dy: np.ndarray, y: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy·(1 − y²), any shape."""
    np.multiply(dy, (1 - y) * (1 + y), out=dx)


@jit(device=True)
def _tanh(x):
    return math.tanh(x)


@jit(device=True)
def _tanh_gradient(dy, y):
    # (1 − y)(1 + y) keeps the digits that 1 − y² loses near ±1.
    return dy * ((1.0 - y) * (1.0 + y))


TANH = Activation("tanh", _tanh, _tanh_gradient, "y", tanh_fprop, tanh_dgrad)
