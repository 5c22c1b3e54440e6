"""Smoothed signed root: y = x / √(|x| + offset), about sign(x)·√|x| for larger |x|; dx = dy·(|x|/2 + offset) / (|x| + offset)^1.5.

It evens out features of very different size, as means of many rectified products are (F. Perronnin, J. Sánchez, T. Mensink, ECCV 2010). The root
itself has no bounded slope at 0; with offset it is at most 1/√offset, and small features are multiplied by that.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.kernel.elementwise import Activation


def root_fprop(x: np.ndarray, y: np.ndarray, *, offset: float) -> None:
    """y = x / √(|x| + offset), any shape."""
    np.divide(x, np.sqrt(np.abs(x) + offset), out=y)


def root_dgrad(dy: np.ndarray, x: np.ndarray, dx: np.ndarray, *, offset: float) -> None:
    """dx = dy·(|x|/2 + offset) / (|x| + offset)^1.5, any shape."""
    size = np.abs(x) + offset
    np.multiply(dy, (size + offset) / (2 * size * np.sqrt(size)), out=dx)


@functools.cache
def root(offset: float) -> Any:
    """The device function for this offset."""

    @jit(device=True)
    def root(x):
        return x / math.sqrt(abs(x) + offset)

    return root


@functools.cache
def _root_gradient(offset: float) -> Any:
    @jit(device=True)
    def root_gradient(dy, x):
        size = abs(x) + offset
        return dy * ((size + offset) / (2.0 * size * math.sqrt(size)))

    return root_gradient


ROOT = Activation("root", root_fprop, root_dgrad, root, _root_gradient, reads="x", parameters={"offset": 0.01})
