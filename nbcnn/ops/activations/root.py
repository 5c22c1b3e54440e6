"""Smoothed signed root: y = x / √(|x| + eps), which is sign(x)·√|x| where |x| is much larger than eps; dx = dy·(|x|/2 + eps) / (|x| + eps)^1.5.

It evens out features of very different size, as means of many rectified products are (F. Perronnin, J. Sánchez, T. Mensink, ECCV 2010). The root
itself has no bounded slope at 0; with eps it is at most 1/√eps, and small features are multiplied by that.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.kernel.elementwise import Activation


def root_fprop(x: np.ndarray, y: np.ndarray, *, eps: float) -> None:
    """y = x / √(|x| + eps), any shape."""
    np.divide(x, np.sqrt(np.abs(x) + eps), out=y)


def root_dgrad(dy: np.ndarray, x: np.ndarray, dx: np.ndarray, *, eps: float) -> None:
    """dx = dy·(|x|/2 + eps) / (|x| + eps)^1.5, any shape."""
    size = np.abs(x) + eps
    np.multiply(dy, (size + eps) / (2 * size * np.sqrt(size)), out=dx)


@functools.cache
def root(eps: float) -> Any:
    """The device function for this eps."""

    @jit(device=True)
    def root(x):
        return x / math.sqrt(abs(x) + eps)

    return root


@functools.cache
def _root_gradient(eps: float) -> Any:
    @jit(device=True)
    def root_gradient(dy, x):
        size = abs(x) + eps
        return dy * ((size + eps) / (2.0 * size * math.sqrt(size)))

    return root_gradient


ROOT = Activation("root", root_fprop, root_dgrad, root, _root_gradient, reads="x", parameters={"eps": 0.01})
