"""ReLU6: y = min(max(x, 0), 6); dx = dy where 0 < y < 6.

The gradient is read off y, which lies inside exactly where x does.
Source: A. Howard et al., "MobileNets", arXiv:1704.04861.
"""

from __future__ import annotations

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.activations.activation import Activation


def relu6_fprop(x: np.ndarray, y: np.ndarray) -> None:
    """y = min(max(x, 0), 6), any shape; NaN stays NaN."""
    np.clip(x, 0, 6, out=y)


def relu6_dgrad(dy: np.ndarray, y: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy where 0 < y < 6, else 0, any shape."""
    np.multiply(dy, (y > 0) & (y < 6), out=dx)


@jit(device=True)
def _relu6(x):
    # Not min(max(x, 0), 6), which would turn NaN into 0 and hide where a training run broke.
    return 0.0 if x < 0.0 else 6.0 if x > 6.0 else x


@jit(device=True)
def _relu6_gradient(dy, y):
    return dy if (y > 0.0) & (y < 6.0) else 0.0


RELU6 = Activation("relu6", _relu6, _relu6_gradient, "y", relu6_fprop, relu6_dgrad)
