"""Hard swish: y = x·g(x) with g(x) = min(max(x + 3, 0), 6)/6; dx = dy·(g(x) + x/6 where −3 < x < 3).

Source: A. Howard et al., "Searching for MobileNetV3", arXiv:1905.02244.
"""

from __future__ import annotations

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.activations.activation import Activation


def hard_swish_fprop(x: np.ndarray, y: np.ndarray) -> None:
    """y = x·min(max(x + 3, 0), 6)/6, any shape."""
    np.multiply(x, np.clip(x + 3, 0, 6) / 6, out=y)


def hard_swish_dgrad(dy: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy·g(x), plus dy·x/6 between the kinks."""
    np.multiply(dy, np.clip(x + 3, 0, 6) / 6 + np.where(np.abs(x) >= 3, 0, x / 6), out=dx)


@jit(device=True)
def _gate(x):
    # Not min(max(x + 3, 0), 6), which would turn NaN into 0 and hide where a training run broke.
    return 0.0 if x < -3.0 else 1.0 if x > 3.0 else (x + 3.0) * (1 / 6)


@jit(device=True)
def _hard_swish(x):
    return x * _gate(x)


@jit(device=True)
def _hard_swish_gradient(dy, x):
    return dy * (_gate(x) + (0.0 if abs(x) >= 3.0 else x * (1 / 6)))


HARD_SWISH = Activation("hard_swish", _hard_swish, _hard_swish_gradient, "x", hard_swish_fprop, hard_swish_dgrad)
