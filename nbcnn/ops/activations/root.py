"""Smoothed signed root: y = x / √(|x| + offset), about sign(x)·√|x| for larger |x|; dx = dy·(|x|/2 + offset) / (|x| + offset)^1.5.

It evens out features of very different size, as means of many rectified products are (F. Perronnin, J. Sánchez, T. Mensink, ECCV 2010). The root
itself has no bounded slope at 0; with offset it is at most 1/√offset, and small features are multiplied by that.
"""

from __future__ import annotations

import math

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.activations.activation import Activation


def root_fprop(x: np.ndarray, y: np.ndarray, *, offset: float) -> None:
    """y = x / √(|x| + offset), any shape."""
    np.divide(x, np.sqrt(np.abs(x) + offset), out=y)


def root_dgrad(dy: np.ndarray, x: np.ndarray, dx: np.ndarray, *, offset: float) -> None:
    """dx = dy·(|x|/2 + offset) / (|x| + offset)^1.5, any shape."""
    size = np.abs(x) + offset
    np.multiply(dy, (size + offset) / (2 * size * np.sqrt(size)), out=dx)


@jit(device=True)
def root(x, offset):
    """x / √(|x| + offset) of a float32."""
    return x / math.sqrt(abs(x) + offset)


@jit(device=True)
def _root_gradient(dy, x, offset):
    size = abs(x) + offset
    return dy * ((size + offset) / (2.0 * size * math.sqrt(size)))


ROOT = Activation("root", root, _root_gradient, "x", root_fprop, root_dgrad, {"offset": 0.01})
