"""ReLU: y = max(x, 0); dx = dy where y > 0.

The gradient is read off y, not x: y > 0 exactly where x > 0, and y is alive anyway as the next layer's input.
"""

from __future__ import annotations

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.activations.activation import Activation


def relu_fprop(x: np.ndarray, y: np.ndarray) -> None:
    """y = max(x, 0), any shape; NaN stays NaN."""
    np.maximum(x, 0, out=y)


def relu_dgrad(dy: np.ndarray, y: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy where y > 0, else 0, any shape."""
    np.multiply(dy, y > 0, out=dx)


@jit(device=True)
def relu(x):
    """max(x, 0) of a float32; NaN stays NaN."""
    # Not max(x, 0), which would turn NaN into 0 and hide where a training run broke.
    return 0.0 if x < 0.0 else x


@jit(device=True)
def _relu_gradient(dy, y):
    return dy if y > 0.0 else 0.0


RELU = Activation("relu", relu, _relu_gradient, "y", relu_fprop, relu_dgrad)
