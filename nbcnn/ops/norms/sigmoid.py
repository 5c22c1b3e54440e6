"""The sigmoid σ(z) and 1 − σ(z) for the kernels of EvoNorm-S0."""

from __future__ import annotations

import math

from nbcnn.gpu.language import jit
from nbcnn.ops.activations.sigmoid import divide


@jit(device=True)
def both_sides(z):
    """σ(z) and 1 − σ(z), neither by subtraction from 1."""
    e = math.exp(-abs(z))
    t = divide(1.0, 1.0 + e)
    return (e * t, t) if z < 0.0 else (t, e * t)
