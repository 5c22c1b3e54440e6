"""Sigmoid: y = 1 / (1 + exp(-x)); dx = dy·y·(1 - y).

exp is only taken of -|x|, so nothing overflows: with e = exp(-|x|), y = 1 / (1 + e) for x >= 0 and e / (1 + e) below.
The divisor then lies in [1, 2], where the fast division of the GPU is right to 2 ulp; the IEEE one, with its slow path for
extreme operands, would cost more than the memory traffic.
"""

from __future__ import annotations

import math

import numpy as np

from nbcnn.gpu.language import NUMBA_SIMULATOR, cuda, jit
from nbcnn.ops.activations.activation import Activation


def sigmoid_fprop(x: np.ndarray, y: np.ndarray) -> None:
    """y = 1 / (1 + exp(-x)), any shape."""
    e = np.exp(-np.abs(x))
    np.divide(np.where(x < 0, e, 1), 1 + e, out=y)


def sigmoid_dgrad(dy: np.ndarray, y: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy·y·(1 - y), any shape."""
    np.subtract(1, y, out=dx)
    dx *= y
    dx *= dy


if NUMBA_SIMULATOR:

    @jit(device=True)
    def divide(a, b):
        return a / b
else:
    divide = cuda.libdevice.fast_fdividef
    """a / b, right to 2 ulp for b in [1, 2]."""


@jit(device=True)
def sigmoid(x):
    """1 / (1 + exp(-x)) of a float32."""
    e = math.exp(-abs(x))
    return divide(e if x < 0.0 else 1.0, 1.0 + e)


@jit(device=True)
def _sigmoid_gradient(dy, y):
    return dy * (y * (1.0 - y))


SIGMOID = Activation("sigmoid", sigmoid, _sigmoid_gradient, "y", sigmoid_fprop, sigmoid_dgrad)
