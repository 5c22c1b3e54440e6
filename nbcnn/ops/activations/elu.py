"""ELU with alpha > 0: y = x where x > 0, else alpha·(exp(x) − 1); dx = dy where y > 0, else dy·(y + alpha).

The gradient is read off y, which has the sign of x because alpha is positive: alpha·exp(x) = y + alpha.
Source: D.-A. Clevert, T. Unterthiner, S. Hochreiter, "Fast and accurate deep network learning by exponential linear units", arXiv:1511.07289.
"""

from __future__ import annotations

import math

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.activations.activation import Activation


def elu_fprop(x: np.ndarray, y: np.ndarray, *, alpha: float) -> None:
    """y = x where x > 0, else alpha·(exp(x) − 1), any shape; NaN stays NaN."""
    np.multiply(np.expm1(np.minimum(x, 0)), alpha, out=y)
    np.copyto(y, x, where=x > 0)


def elu_dgrad(dy: np.ndarray, y: np.ndarray, dx: np.ndarray, *, alpha: float) -> None:
    """dx = dy where y > 0, else dy·(y + alpha), any shape."""
    np.multiply(dy, y + y.dtype.type(alpha), out=dx)
    np.copyto(dx, dy, where=y > 0)


@jit(device=True)
def _elu(x, alpha):
    # expm1 keeps the digits of small x, where exp(x) − 1 would lose them.
    return x if x > 0.0 else math.expm1(x) * alpha


@jit(device=True)
def _elu_gradient(dy, y, alpha):
    return dy if y > 0.0 else dy * (y + alpha)


ELU = Activation("elu", _elu, _elu_gradient, "y", elu_fprop, elu_dgrad, {"alpha": 0.8})
