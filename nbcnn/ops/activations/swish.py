"""Swish: y = x·s with s = sigmoid(x); dx = dy·s·(1 + x·(1 - s)).

y is not monotonic, so the gradient is read off x. With e = exp(-|x|) and t = 1 / (1 + e), s and 1 - s are t and e·t in
one order or the other: neither overflows, and 1 - s needs no subtraction.
Source: P. Ramachandran, B. Zoph, Q. V. Le, "Searching for Activation Functions", arXiv:1710.05941.
"""

from __future__ import annotations

import math

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.activations.activation import Activation
from nbcnn.ops.activations.sigmoid import divide


def swish_fprop(x: np.ndarray, y: np.ndarray) -> None:
    """y = x·sigmoid(x), any shape."""
    e = np.exp(-np.abs(x))
    np.multiply(x, np.where(x < 0, e, 1) / (1 + e), out=y)


def swish_dgrad(dy: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy·s·(1 + x·(1 - s)) with s = sigmoid(x), any shape."""
    e = np.exp(-np.abs(x))
    t = 1 / (1 + e)
    s, rest = np.where(x < 0, e, 1) * t, np.where(x < 0, 1, e) * t
    np.multiply(dy, s * (1 + x * rest), out=dx)


@jit(device=True)
def swish(x):
    """x / (1 + exp(-x)) of a float32."""
    e = math.exp(-abs(x))
    return x * divide(e if x < 0.0 else 1.0, 1.0 + e)


@jit(device=True)
def _swish_gradient(dy, x):
    e = math.exp(-abs(x))
    t = divide(1.0, 1.0 + e)
    s = e * t if x < 0.0 else t
    rest = t if x < 0.0 else e * t
    return dy * (s * (1.0 + x * rest))


SWISH = Activation("swish", swish, _swish_gradient, "x", swish_fprop, swish_dgrad)
