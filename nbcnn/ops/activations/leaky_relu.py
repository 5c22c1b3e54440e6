"""Leaky ReLU with slope > 0: y = x where x > 0, else slope·x; dx = dy where y > 0, else slope·dy.

The gradient is read off y, which has the sign of x only because the slope is positive.
"""

from __future__ import annotations

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.activations.activation import Activation


def leaky_relu_fprop(x: np.ndarray, y: np.ndarray, *, slope: float) -> None:
    """y = x where x > 0, else slope·x, any shape; NaN stays NaN."""
    np.multiply(x, slope, out=y)
    np.copyto(y, x, where=x > 0)


def leaky_relu_dgrad(dy: np.ndarray, y: np.ndarray, dx: np.ndarray, *, slope: float) -> None:
    """dx = dy where y > 0, else slope·dy, any shape."""
    np.multiply(dy, slope, out=dx)
    np.copyto(dx, dy, where=y > 0)


@jit(device=True)
def _leaky_relu(x, slope):
    return x if x > 0.0 else x * slope


@jit(device=True)
def _leaky_relu_gradient(dy, y, slope):
    return dy if y > 0.0 else dy * slope


LEAKY_RELU = Activation("leaky_relu", _leaky_relu, _leaky_relu_gradient, "y", leaky_relu_fprop, leaky_relu_dgrad, {"slope": 0.1})
