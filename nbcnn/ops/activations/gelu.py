"""GELU: y = x·Φ(x) with Φ(x) = ½(1 + erf(x/√2)); dx = dy·(Φ(x) + x·φ(x)) with φ(x) = exp(−x²/2)/√(2π).

The exact form, not its tanh approximation. Source: D. Hendrycks, K. Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415.

NumPy has no erf. `erfc` below is t·exp(−x² + P(t)) with t = 2/(2 + |x|), the form of Press et al., "Numerical Recipes",
3rd edition, 6.2; P is interpolated at import in Chebyshev points from Python's math.erfc, in as many terms as the dtype can tell.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from nbcnn.gpu.language import f4, jit
from nbcnn.ops.kernel.call import Call, Launch
from nbcnn.ops.kernel.elementwise import launch

_FAR = 8.0  # erfc(8) = 1e-29: beyond it nothing is left in either dtype
_T_FAR = 2 / (2 + _FAR)
_TERMS = {"float32": 10, "float64": 24}
_ROOT_HALF, _DENSITY = math.sqrt(0.5), 1 / math.sqrt(2 * math.pi)


@functools.cache
def _log_erfc(terms: int) -> np.ndarray:
    """Coefficients, lowest first, of log(erfc(x)/t) + x² in u = −1..1, where t = 2/(2+x) runs from `_T_FAR` to 1."""

    def function(u: Any) -> Any:
        t = _T_FAR + (u + 1) / 2 * (1 - _T_FAR)
        x = 2 / t - 2
        return np.array([math.log(math.erfc(each)) for each in x]) - np.log(t) + x * x

    return np.polynomial.chebyshev.cheb2poly(np.polynomial.chebyshev.chebinterpolate(function, terms - 1))


def erfc(x: np.ndarray) -> np.ndarray:
    """1 − erf(x), any shape, float32 or float64, to a few roundings; x beyond ±8 counts as ±8."""
    a = np.minimum(np.abs(x), x.dtype.type(_FAR))
    t = 2 / (2 + a)
    u = (t - _T_FAR) * (2 / (1 - _T_FAR)) - 1
    power = np.zeros_like(a)
    for coefficient in _log_erfc(_TERMS[x.dtype.name])[::-1]:
        power *= u
        power += coefficient
    near = t * np.exp(power - a * a)
    return np.where(x < 0, 2 - near, near)


def gelu_fprop(x: np.ndarray, y: np.ndarray) -> None:
    """y = x·Φ(x), any shape."""
    np.multiply(x, erfc(x * -_ROOT_HALF) / 2, out=y)


def gelu_dgrad(dy: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy·(Φ(x) + x·φ(x)), any shape."""
    np.multiply(dy, erfc(x * -_ROOT_HALF) / 2 + x * (_DENSITY * np.exp(x * x * -0.5)), out=dx)


@jit(device=True)
def _gelu(x):
    # erfc keeps the digits of the left tail, where 1 + erf would lose them.
    return x * (f4(0.5) * math.erfc(x * f4(-_ROOT_HALF)))


@jit(device=True)
def _gelu_gradient(dy, x):
    return dy * (f4(0.5) * math.erfc(x * f4(-_ROOT_HALF)) + x * (f4(_DENSITY) * math.exp(x * x * f4(-0.5))))


def bind_fprop(call: Call) -> list[Launch]:
    """One launch of `elementwise.unary`."""
    return launch("gelu_fprop_kernel", _gelu, call)


def bind_dgrad(call: Call) -> list[Launch]:
    """One launch of `elementwise.binary`."""
    return launch("gelu_dgrad_kernel", _gelu_gradient, call)
