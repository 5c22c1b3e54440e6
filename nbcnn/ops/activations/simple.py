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
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.kernel.elementwise import Activation


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


@cache
def _clip(low: float, high: float) -> Any:
    """Device function y = f(x) with the ends frozen."""

    @jit(device=True)
    def clip(x):
        # Not min and max, which would turn NaN into an end.
        return low if x < low else (high if x > high else x)

    return clip


@cache
def _clip_gradient(low: float, high: float) -> Any:
    """Device function dx = f(dy, x) with the ends frozen."""

    @jit(device=True)
    def clip_gradient(dy, x):
        return dy if (x > low) & (x < high) else 0.0

    return clip_gradient


def power_fprop(x: np.ndarray, y: np.ndarray, *, exponent: float) -> None:
    """y = x^exponent, any shape."""
    with np.errstate(divide="ignore", invalid="ignore"):
        np.power(x, x.dtype.type(exponent), out=y)


def power_dgrad(dy: np.ndarray, x: np.ndarray, dx: np.ndarray, *, exponent: float) -> None:
    """dx = dy·exponent·x^(exponent − 1), any shape."""
    with np.errstate(divide="ignore", invalid="ignore"):
        np.multiply(dy, np.power(x, x.dtype.type(exponent - 1)) * x.dtype.type(exponent), out=dx)


@cache
def _power(exponent: float) -> Any:
    """Device function y = f(x) with `exponent` frozen; roots and reciprocals as what the GPU has for them."""
    if exponent == 2.0:

        @jit(device=True)
        def power(x):
            return x * x
    elif exponent == 0.5:

        @jit(device=True)
        def power(x):
            return math.sqrt(x)
    elif exponent == -1.0:

        @jit(device=True)
        def power(x):
            return 1.0 / x
    elif exponent == -0.5:

        @jit(device=True)
        def power(x):
            return 1.0 / math.sqrt(x)
    elif exponent == 1.0:

        @jit(device=True)
        def power(x):
            return x
    else:

        @jit(device=True)
        def power(x):
            return math.pow(x, exponent)

    return power


@cache
def _power_gradient(exponent: float) -> Any:
    """Device function dx = f(dy, x) with `exponent` frozen."""
    slope = _power(exponent - 1)

    @jit(device=True)
    def power_gradient(dy, x):
        return dy * exponent * slope(x)

    return power_gradient


def scale_fprop(x: np.ndarray, y: np.ndarray, *, factor: float, shift: float) -> None:
    """y = factor·x + shift, any shape."""
    np.multiply(x, x.dtype.type(factor), out=y)
    np.add(y, x.dtype.type(shift), out=y)


def scale_dgrad(dy: np.ndarray, x: np.ndarray, dx: np.ndarray, *, factor: float, shift: float) -> None:
    """dx = dy·factor, any shape."""
    np.multiply(dy, dy.dtype.type(factor), out=dx)


@cache
def _scale(factor: float, shift: float) -> Any:
    """Device function y = f(x) with factor and shift frozen."""

    @jit(device=True)
    def scale(x):
        return factor * x + shift

    return scale


@cache
def _scale_gradient(factor: float, shift: float) -> Any:
    """Device function dx = f(dy, x) with the factor frozen."""

    @jit(device=True)
    def scale_gradient(dy, x):
        return dy * factor

    return scale_gradient


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


@cache
def _threshold(limit: float, value: float) -> Any:
    """Device function y = f(x) with limit and value frozen."""

    @jit(device=True)
    def threshold(x):
        return value if x <= limit else x

    return threshold


@cache
def _threshold_gradient(limit: float, value: float) -> Any:
    """Device function dx = f(dy, x) with the limit frozen."""

    @jit(device=True)
    def threshold_gradient(dy, x):
        return 0.0 if x <= limit else dy

    return threshold_gradient


ABS = Activation("abs", abs_fprop, abs_dgrad, _abs, _abs_gradient, reads="x")
CLIP = Activation("clip", clip_fprop, clip_dgrad, _clip, _clip_gradient, reads="x", parameters={"low": -0.5, "high": 0.75})
POWER = Activation("power", power_fprop, power_dgrad, _power, _power_gradient, reads="x", parameters={"exponent": 2.0})
SCALE = Activation("scale", scale_fprop, scale_dgrad, _scale, _scale_gradient, reads="x", parameters={"factor": -1.5, "shift": 0.25})
SOFTPLUS = Activation("softplus", softplus_fprop, softplus_dgrad, _softplus, _softplus_gradient, reads="y")
THRESHOLD = Activation(
    "threshold", threshold_fprop, threshold_dgrad, _threshold, _threshold_gradient, reads="x", parameters={"limit": 0.125, "value": -0.25}
)

SIMPLE = (ABS, CLIP, POWER, SCALE, SOFTPLUS, THRESHOLD)
"""All of them, for the table of activations."""
