"""GELU: y = x·Φ(x) with Φ(x) = ½(1 + erf(x/√2)); dx = dy·(Φ(x) + x·φ(x)) with φ(x) = exp(−x²/2)/√(2π).

The exact form, not its tanh approximation. Source: D. Hendrycks, K. Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415.

In float64, for `gradcheck` and tests, it is written with Python's erfc.

The kernels want few instructions: one pass over bfloat16 leaves about 26 for an element, and the compiler's own erfc takes more than that alone. With
a = |x| and t = 1/(1 + a·SLOPE), Φ(−a)·exp(a²/2) is smooth in t, and t times a polynomial of degree 8 is right to 4e-8 of it up to a = 13.5, behind
which Φ(−a) is no normal float32. So Φ(−a) costs a reciprocal, a power of two and a dozen products, has all digits of the left tail but for what
rounding of a² takes (1e-5 of 1e-38 at its end), and shares exp(−a²/2) with the derivative. The form is that of M. Abramowitz, I. Stegun, "Handbook of
Mathematical Functions", 7.1.26; the coefficients interpolate in Chebyshev points of t, so the error is that of the test.

Towards −∞ y and its derivative go to 0, and are 0 where the dtype has no smaller number. At infinity itself ∞·0 makes NaN of y(−∞) and of both
derivatives, here and in PyTorch: an activation that overflowed is not hidden.
"""

from __future__ import annotations

import math

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.gpu.lockstep.arrays import on_arrays
from nbcnn.ops.activations.activation import Activation
from nbcnn.ops.ptx.fast import LOG2E, exp2, reciprocal

SLOPE = 0.35
COEFFICIENTS = (
    *(0.13961890197132723, 0.13990826500206577, 0.11947943265457812, 0.10695824049311417, -0.026633098251985315),
    *(0.16439173597226636, -0.26033790580668986, 0.14622420672553507, -0.029609795538795503),
)
"""The coefficients of Φ(−a)·exp(a²/2)/t, the lowest power of t first."""
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7, _C8 = COEFFICIENTS
_ROOT, _ROOT_HALF, _DENSITY = math.sqrt(0.5 * LOG2E), math.sqrt(0.5), 1 / math.sqrt(2 * math.pi)


@jit(device=True)
def _tail(x):
    """Φ(−|x|) and exp(−x²/2)."""
    t = reciprocal(abs(x) * SLOPE + 1.0)
    w = x * _ROOT
    e = exp2(-(w * w))
    p = ((_C8 * t + _C7) * t + _C6) * t + _C5
    p = (((p * t + _C4) * t + _C3) * t + _C2) * t + _C1
    return t * (p * t + _C0) * e, e


@jit(device=True)
def _gelu(x):
    tail, _ = _tail(x)
    return x * (tail if x < 0.0 else 1.0 - tail)


@jit(device=True)
def _gelu_gradient(dy, x):
    tail, e = _tail(x)
    return dy * ((tail if x < 0.0 else 1.0 - tail) + x * (_DENSITY * e))


@jit(device=True)
def _exact(x):
    return x * (0.5 * math.erfc(x * -_ROOT_HALF))


@jit(device=True)
def _exact_gradient(dy, x):
    return dy * (0.5 * math.erfc(x * -_ROOT_HALF) + x * (_DENSITY * math.exp(-0.5 * (x * x))))


def _fprop(x: np.ndarray, y: np.ndarray) -> None:
    on_arrays(_gelu if x.dtype == np.float32 else _exact)(x, out=y)


def _dgrad(dy: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    on_arrays(_gelu_gradient if x.dtype == np.float32 else _exact_gradient)(dy, x, out=dx)


GELU = Activation("gelu", _gelu, _gelu_gradient, arrays=(_fprop, _dgrad))
