"""GELU in the form with tanh: y = x·(1 + tanh(u))/2 = x·s with u = √(2/π)·(x + 0.044715·x³), s = sigmoid(2u);
dx = dy·(s + x·s·(1 − s)·2u′), u′ = √(2/π)·(1 + 0.134145·x²).

The sigmoid keeps the digits of the left tail, where 1 + tanh would lose them. With e = exp(−|2u|) and t = 1/(1 + e), s and 1 − s are t and e·t in
one order or the other, as in swish.py. In u and u′ x is cut to ±END: s is 0 or 1 there in both dtypes, and x³ would overflow.
Source: D. Hendrycks, K. Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415, section 2; torch.nn.GELU(approximate="tanh").
"""

from __future__ import annotations

import math

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.activations.activation import Activation
from nbcnn.ops.activations.sigmoid import divide

END = 40.0
_TWICE, _CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715
_SQUARE = 3 * _CUBIC


def _parts(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """s, 1 − s and 2u′."""
    b = np.clip(x, -END, END)
    e = np.exp(-np.abs(_TWICE * (b + _CUBIC * (b * b * b))))
    t = 1 / (1 + e)
    return np.where(x < 0, e, 1) * t, np.where(x < 0, 1, e) * t, _TWICE * (1 + _SQUARE * (b * b))


def gelu_tanh_fprop(x: np.ndarray, y: np.ndarray) -> None:
    """y = x·sigmoid(2u), any shape."""
    np.multiply(x, _parts(x)[0], out=y)


def gelu_tanh_dgrad(dy: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy·s·(1 + x·(1 − s)·2u′), any shape."""
    s, rest, slope = _parts(x)
    np.multiply(dy, s * (1 + x * rest * slope), out=dx)


@jit(device=True)
def _bounded(x):
    # Comparisons, because min and max of a NaN would give the bound.
    return END if x > END else -END if x < -END else x


@jit(device=True)
def _gelu_tanh(x):
    b = _bounded(x)
    e = math.exp(-abs(_TWICE * (b + _CUBIC * (b * b * b))))
    return x * divide(e if x < 0.0 else 1.0, 1.0 + e)


@jit(device=True)
def _gelu_tanh_gradient(dy, x):
    b = _bounded(x)
    e = math.exp(-abs(_TWICE * (b + _CUBIC * (b * b * b))))
    t = divide(1.0, 1.0 + e)
    s = e * t if x < 0.0 else t
    rest = t if x < 0.0 else e * t
    return dy * (s * (1.0 + x * rest * (_TWICE * (1.0 + _SQUARE * (b * b)))))


GELU_TANH = Activation("gelu_tanh", _gelu_tanh, _gelu_tanh_gradient, "x", gelu_tanh_fprop, gelu_tanh_dgrad)
