"""GELU: y = x·Φ(x) with Φ(x) = ½(1 + erf(x/√2)); dx = dy·(Φ(x) + x·φ(x)) with φ(x) = exp(−x²/2)/√(2π).

The exact form, not its tanh approximation. Source: D. Hendrycks, K. Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415.

NumPy has no erf. `erfc` below is t·exp(−x² + P(t)) with t = 2/(2 + |x|), the form of Press et al., "Numerical Recipes",
3rd edition, 6.2; P is interpolated at its first use in Chebyshev points from Python's math.erfc, in as many terms as the dtype can tell, once
for |x| up to 8 and once for what is left of the left tail.

The kernels want few instructions: one pass over bfloat16 leaves about 26 for an element, and the compiler's own erfc takes more than that alone. With
a = |x| and t = 1/(1 + a·SLOPE), Φ(−a)·exp(a²/2) is smooth in t, and t times a polynomial of degree 8 is right to 4e-8 of it up to a = 13.5, behind
which Φ(−a) is no normal float32. So Φ(−a) costs a reciprocal, a power of two and a dozen products, has all digits of the left tail but for what
rounding of a² takes (1e-5 of 1e-38 at its end), and shares exp(−a²/2) with the derivative. The form is that of M. Abramowitz, I. Stegun, "Handbook of
Mathematical Functions", 7.1.26; the coefficients interpolate in Chebyshev points of t, so the error is that of the test.

Towards −∞ y and its derivative go to 0, and are 0 where the dtype has no smaller number. At infinity itself ∞·0 makes NaN of y(−∞) and of both
derivatives, here, in the kernels and in PyTorch: an activation that overflowed is not hidden.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.activations.activation import Activation
from nbcnn.ops.ptx.fast import LOG2E, exp2, reciprocal

_NEAR, _FAR = (0.0, 8.0), (8.0, 26.0)  # erfc(8) = 1e-29, and erfc(26) = 6e-296: nearly the smallest that float64 has all digits of
_NOTHING = 28.0  # erfc(28) is 0 in both dtypes
_TERMS = {"float32": 10, "float64": 24}
_END_OF_DENSITY = 40.0  # exp(−40²/2) is 0 in both dtypes
_ROOT_HALF, _DENSITY = math.sqrt(0.5), 1 / math.sqrt(2 * math.pi)


@functools.cache
def _log_erfc(part: tuple[float, float], terms: int) -> np.ndarray:
    """Coefficients, lowest first, of log(erfc(x)/t) + x² in u = −1..1, where t = 2/(2+x) runs over the x of `part` from last to first."""
    least, most = (2 / (2 + end) for end in part[::-1])

    def function(u: Any) -> Any:
        t = least + (u + 1) / 2 * (most - least)
        x = 2 / t - 2
        return np.array([math.log(math.erfc(each)) for each in x]) - np.log(t) + x * x

    return np.polynomial.chebyshev.cheb2poly(np.polynomial.chebyshev.chebinterpolate(function, terms - 1))


def _erfc_of(a: np.ndarray, part: tuple[float, float]) -> np.ndarray:
    """1 − erf(a) for a in `part`."""
    least, most = (2 / (2 + end) for end in part[::-1])
    t = 2 / (2 + a)
    u = (t - least) * (2 / (most - least)) - 1
    power = np.zeros_like(a)
    for coefficient in _log_erfc(part, _TERMS[a.dtype.name])[::-1]:
        power *= u
        power += coefficient
    return t * np.exp(power - a * a)


def erfc(x: np.ndarray) -> np.ndarray:
    """1 − erf(x), any shape, float32 or float64, to a few roundings; 0 where the dtype has no smaller number, NaN of NaN."""
    a = np.atleast_1d(np.abs(x))
    right = _erfc_of(np.minimum(a, x.dtype.type(_NEAR[1])), _NEAR)
    far = a > _NEAR[1]
    if far.any():
        right[far] = _erfc_of(np.minimum(a[far], x.dtype.type(_NOTHING)), _FAR)
    return np.where(x < 0, 2 - right.reshape(x.shape), right.reshape(x.shape))


def gelu_fprop(x: np.ndarray, y: np.ndarray) -> None:
    """y = x·Φ(x), any shape."""
    np.multiply(x, erfc(x * -_ROOT_HALF) / 2, out=y)


def gelu_dgrad(dy: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy·(Φ(x) + x·φ(x)), any shape."""
    bounded = np.clip(x, -_END_OF_DENSITY, _END_OF_DENSITY)  # or x² overflows, with a warning
    np.multiply(dy, erfc(x * -_ROOT_HALF) / 2 + x * (_DENSITY * np.exp(bounded * bounded * -0.5)), out=dx)


SLOPE = 0.35
COEFFICIENTS = (
    *(0.13961890197132723, 0.13990826500206577, 0.11947943265457812, 0.10695824049311417, -0.026633098251985315),
    *(0.16439173597226636, -0.26033790580668986, 0.14622420672553507, -0.029609795538795503),
)
"""The coefficients of Φ(−a)·exp(a²/2)/t, the lowest power of t first."""
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7, _C8 = COEFFICIENTS
_ROOT = math.sqrt(0.5 * LOG2E)


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


GELU = Activation("gelu", _gelu, _gelu_gradient, "x", gelu_fprop, gelu_dgrad)
