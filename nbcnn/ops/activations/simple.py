"""Elementary functions of every element, of which formulas are made that have no layer of their own:

    abs        y = |x|                           dx = dy·sign(x)
    clip       y = min(max(x, low), high)        dx = dy where low < x < high, else 0
    power      y = x^exponent                    dx = dy·exponent·x^(exponent − 1)
    scale      y = factor·x + shift              dx = dy·factor
    softplus   y = log(1 + exp(x))               dx = dy·(1 − exp(−y))
    threshold  y = x where x > limit, else value dx = dy where x > limit, else 0

Softplus is computed as max(x, 0) + log1p(exp(−|x|)), which no x overflows (C. Dugas et al., "Incorporating second-order functional knowledge for
better option pricing", NIPS 2000). x^exponent is NaN for a negative x and an exponent that is no whole number, as in C.
"""

from __future__ import annotations

import math

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.activations.activation import Activation


def abs_fprop(x: np.ndarray, y: np.ndarray) -> None:
    """y = |x|, any shape."""
    np.abs(x, out=y)


def abs_dgrad(dy: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy·sign(x), any shape."""
    np.multiply(dy, np.sign(x), out=dx)


@jit(device=True)
def _abs(x):
    return abs(x)


@jit(device=True)
def _abs_gradient(dy, x):
    return dy if x > 0.0 else (-dy if x < 0.0 else dy * x)


def clip_fprop(x: np.ndarray, y: np.ndarray, *, low: float, high: float) -> None:
    """y = min(max(x, low), high), any shape; NaN stays NaN."""
    np.clip(x, x.dtype.type(low), x.dtype.type(high), out=y)


def clip_dgrad(dy: np.ndarray, x: np.ndarray, dx: np.ndarray, *, low: float, high: float) -> None:
    """dx = dy where low < x < high, else 0, any shape."""
    np.copyto(dx, np.where((x > x.dtype.type(low)) & (x < x.dtype.type(high)), dy, 0))


@jit(device=True)
def _clip(x, low, high):
    # Not min and max, which would turn NaN into an end.
    return low if x < low else (high if x > high else x)


@jit(device=True)
def _clip_gradient(dy, x, low, high):
    return dy if (x > low) & (x < high) else 0.0


def power_fprop(x: np.ndarray, y: np.ndarray, *, exponent: float) -> None:
    """y = x^exponent, any shape."""
    with np.errstate(divide="ignore", invalid="ignore"):
        np.power(x, x.dtype.type(exponent), out=y)


def power_dgrad(dy: np.ndarray, x: np.ndarray, dx: np.ndarray, *, exponent: float) -> None:
    """dx = dy·exponent·x^(exponent − 1), any shape."""
    with np.errstate(divide="ignore", invalid="ignore"):
        np.multiply(dy, np.power(x, x.dtype.type(exponent - 1)) * x.dtype.type(exponent), out=dx)


@jit(device=True)
def _power(x, exponent):
    """x^exponent; of a constant exponent the compiler keeps one line: roots and reciprocals as what the GPU has for them."""
    if exponent == 2.0:
        return x * x
    if exponent == 0.5:
        return math.sqrt(x)
    if exponent == -1.0:
        return 1.0 / x
    if exponent == -0.5:
        return 1.0 / math.sqrt(x)
    if exponent == 1.0:
        return x
    return math.pow(x, exponent)


@jit(device=True)
def _power_gradient(dy, x, exponent):
    return dy * exponent * _power(x, exponent - 1.0)


def scale_fprop(x: np.ndarray, y: np.ndarray, *, factor: float, shift: float) -> None:
    """y = factor·x + shift, any shape."""
    np.multiply(x, x.dtype.type(factor), out=y)
    np.add(y, x.dtype.type(shift), out=y)


def scale_dgrad(dy: np.ndarray, x: np.ndarray, dx: np.ndarray, *, factor: float, shift: float) -> None:
    """dx = dy·factor, any shape."""
    np.multiply(dy, dy.dtype.type(factor), out=dx)


@jit(device=True)
def _scale(x, factor, shift):
    return factor * x + shift


@jit(device=True)
def _scale_gradient(dy, x, factor, shift):
    return dy * factor


def softplus_fprop(x: np.ndarray, y: np.ndarray) -> None:
    """y = log(1 + exp(x)), any shape."""
    np.add(np.maximum(x, 0), np.log1p(np.exp(-np.abs(x))), out=y)


def softplus_dgrad(dy: np.ndarray, y: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy·(1 − exp(−y)), any shape: 1 − exp(−y) = exp(x)/(1 + exp(x))."""
    np.multiply(dy, -np.expm1(-y), out=dx)


@jit(device=True)
def _softplus(x):
    # Not max(x, 0), which would turn NaN into 0.
    return (0.0 if x < 0.0 else x) + math.log1p(math.exp(-abs(x)))


@jit(device=True)
def _softplus_gradient(dy, y):
    return -dy * math.expm1(-y)


def threshold_fprop(x: np.ndarray, y: np.ndarray, *, limit: float, value: float) -> None:
    """y = x where x > limit, else `value`, any shape; NaN stays NaN."""
    np.copyto(y, np.where(x <= x.dtype.type(limit), x.dtype.type(value), x))


def threshold_dgrad(dy: np.ndarray, x: np.ndarray, dx: np.ndarray, *, limit: float, value: float) -> None:
    """dx = dy where x > limit, else 0, any shape."""
    np.copyto(dx, np.where(x <= x.dtype.type(limit), 0, dy))


@jit(device=True)
def _threshold(x, limit, value):
    return value if x <= limit else x


@jit(device=True)
def _threshold_gradient(dy, x, limit, value):
    return 0.0 if x <= limit else dy


SIMPLE = (
    Activation("abs", _abs, _abs_gradient, "x", abs_fprop, abs_dgrad),
    Activation("clip", _clip, _clip_gradient, "x", clip_fprop, clip_dgrad, {"low": -0.5, "high": 0.75}),
    Activation("power", _power, _power_gradient, "x", power_fprop, power_dgrad, {"exponent": 2.0}),
    Activation("scale", _scale, _scale_gradient, "x", scale_fprop, scale_dgrad, {"factor": -1.5, "shift": 0.25}),
    Activation("softplus", _softplus, _softplus_gradient, "y", softplus_fprop, softplus_dgrad),
    Activation("threshold", _threshold, _threshold_gradient, "x", threshold_fprop, threshold_dgrad, {"limit": 0.125, "value": -0.25}),
)
"""All of them, for the table of activations."""
