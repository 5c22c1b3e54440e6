"""σ(z) and 1 − σ(z) for the kernels of EvoNorm-S0."""

from __future__ import annotations

import math

from nbcnn.cuda import SIMULATOR, cuda, f4, jit
from nbcnn.ops.sigmoid import divide

if SIMULATOR:

    @jit(device=True)
    def _exp(z):
        return f4(math.exp(min(z, f4(88))))
else:
    _exp = cuda.libdevice.fast_expf


@jit(device=True)
def swish_factor(z):
    """σ(z) to a relative error of about 2⁻²¹·|z|: for results that are rounded to 10 bits of mantissa or fewer. 0 below −88."""
    return divide(f4(1), f4(1) + _exp(-z))


@jit(device=True)
def both_sides(z):
    """σ(z) and 1 − σ(z), neither by subtraction from 1."""
    e = f4(math.exp(-abs(z)))
    t = divide(f4(1), f4(1) + e)
    return (e * t, t) if z < f4(0) else (t, e * t)
