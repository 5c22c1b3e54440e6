"""The sigmoid σ(z) = 1 / (1 + exp(−z)), and 1 − σ(z): parts of activations, of gates and of EvoNorm-S0.

exp is only taken of −|z|, so nothing overflows: with e = exp(−|z|) and t = 1 / (1 + e), σ and 1 − σ are t and e·t in one order or the other, neither
by a subtraction from 1. The divisor lies in [1, 2], where the fast division of the GPU is right to 2 ulp; the IEEE one, with its slow path for
extreme operands, would cost more than the memory traffic.
"""

from __future__ import annotations

import math

from nbcnn.gpu.language import NUMBA_SIMULATOR, cuda, jit

if NUMBA_SIMULATOR:

    @jit(device=True)
    def divide(a, b):
        return a / b
else:
    divide = cuda.libdevice.fast_fdividef
    """a / b, right to 2 ulp for b in [1, 2]."""


@jit(device=True)
def sigmoid(z):
    """σ(z) of a float32."""
    e = math.exp(-abs(z))
    return divide(e if z < 0.0 else 1.0, 1.0 + e)


@jit(device=True)
def both_sides(z):
    """σ(z) and 1 − σ(z)."""
    e = math.exp(-abs(z))
    t = divide(1.0, 1.0 + e)
    return (e * t, t) if z < 0.0 else (t, e * t)
