"""Declarations of the element-wise functions: f for one element, and what multiplies by its slope. GELU's are in gelu.py.

A gradient that is read off y, not x, costs no memory: y is alive anyway as the next layer's input. It suits an f whose slope follows from its value.
Comparisons stand where min and max would turn NaN into an end, and hide where a training run broke.
"""

from __future__ import annotations

import math

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.activations.activation import Activation
from nbcnn.ops.activations.gelu import GELU
from nbcnn.ops.activations.sigmoid import both_sides, sigmoid


@jit(device=True)
def relu(x):
    """max(x, 0)."""
    return 0.0 if x < 0.0 else x


@jit(device=True)
def _relu_gradient(dy, y):
    """dy where y > 0: exactly where x > 0."""
    return dy if y > 0.0 else 0.0


def _relu_on_arrays(x: np.ndarray, y: np.ndarray) -> None:
    np.maximum(x, 0, out=y)


def _relu_gradient_on_arrays(dy: np.ndarray, y: np.ndarray, dx: np.ndarray) -> None:
    np.multiply(dy, y > 0, out=dx)


@jit(device=True)
def _relu6(x):
    """min(max(x, 0), 6). Source: A. Howard et al., "MobileNets", arXiv:1704.04861."""
    return 0.0 if x < 0.0 else 6.0 if x > 6.0 else x


@jit(device=True)
def _relu6_gradient(dy, y):
    """dy where 0 < y < 6: exactly where x lies inside."""
    return dy if (y > 0.0) & (y < 6.0) else 0.0


def _relu6_on_arrays(x: np.ndarray, y: np.ndarray) -> None:
    np.clip(x, 0, 6, out=y)


def _relu6_gradient_on_arrays(dy: np.ndarray, y: np.ndarray, dx: np.ndarray) -> None:
    np.multiply(dy, (y > 0) & (y < 6), out=dx)


@jit(device=True)
def _leaky_relu(x, slope):
    """x where x > 0, else slope·x."""
    return x if x > 0.0 else x * slope


@jit(device=True)
def _leaky_relu_gradient(dy, y, slope):
    """dy where y > 0, else slope·dy: y has the sign of x only because the slope is positive."""
    return dy if y > 0.0 else dy * slope


@jit(device=True)
def _elu(x, alpha):
    """x where x > 0, else alpha·(exp(x) − 1); expm1 keeps the digits of small x.

    Source: D.-A. Clevert, T. Unterthiner, S. Hochreiter, "Fast and accurate deep network learning by exponential linear units", arXiv:1511.07289.
    """
    return x if x > 0.0 else math.expm1(x) * alpha


@jit(device=True)
def _elu_gradient(dy, y, alpha):
    """dy where y > 0, else dy·(y + alpha): y has the sign of x because alpha is positive, and alpha·exp(x) = y + alpha."""
    return dy if y > 0.0 else dy * (y + alpha)


@jit(device=True)
def _sigmoid_gradient(dy, y):
    """dy·y·(1 − y)."""
    return dy * (y * (1.0 - y))


@jit(device=True)
def _swish(x):
    """x·σ(x). Source: P. Ramachandran, B. Zoph, Q. V. Le, "Searching for Activation Functions", arXiv:1710.05941."""
    return x * sigmoid(x)


@jit(device=True)
def _swish_gradient(dy, x):
    """dy·σ·(1 + x·(1 − σ)), read off x because y is not monotonic."""
    s, rest = both_sides(x)
    return dy * (s * (1.0 + x * rest))


_END, _TWICE, _CUBIC = 40.0, 2 * math.sqrt(2 / math.pi), 0.044715
_SQUARE = 3 * _CUBIC


@jit(device=True)
def _bounded(x):
    """x cut to ±40: GELU's σ is 0 or 1 there, and x³ would overflow."""
    return _END if x > _END else -_END if x < -_END else x


@jit(device=True)
def _gelu_tanh(x):
    """x·(1 + tanh(u))/2 = x·σ(2u) with u = √(2/π)·(x + 0.044715·x³); the sigmoid keeps the digits of the left tail, where 1 + tanh would lose them.

    Source: D. Hendrycks, K. Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415, section 2; torch.nn.GELU(approximate="tanh").
    """
    b = _bounded(x)
    return x * sigmoid(_TWICE * (b + _CUBIC * (b * b * b)))


@jit(device=True)
def _gelu_tanh_gradient(dy, x):
    """dy·(σ + x·σ·(1 − σ)·2u′), u′ = √(2/π)·(1 + 0.134145·x²)."""
    b = _bounded(x)
    s, rest = both_sides(_TWICE * (b + _CUBIC * (b * b * b)))
    return dy * (s * (1.0 + x * rest * (_TWICE * (1.0 + _SQUARE * (b * b)))))


@jit(device=True)
def _tanh(x):
    """tanh(x)."""
    return math.tanh(x)


@jit(device=True)
def _tanh_gradient(dy, y):
    """dy·(1 − y²); (1 − y)(1 + y) keeps the digits that 1 − y² loses near ±1."""
    return dy * ((1.0 - y) * (1.0 + y))


@jit(device=True)
def _gate(x):
    """min(max(x + 3, 0), 6)/6."""
    return 0.0 if x < -3.0 else 1.0 if x > 3.0 else (x + 3.0) * (1 / 6)


@jit(device=True)
def _hard_swish(x):
    """x·min(max(x + 3, 0), 6)/6. Source: A. Howard et al., "Searching for MobileNetV3", arXiv:1905.02244."""
    return x * _gate(x)


@jit(device=True)
def _hard_swish_gradient(dy, x):
    """dy·(gate + x/6 between the kinks)."""
    return dy * (_gate(x) + (0.0 if abs(x) >= 3.0 else x * (1 / 6)))


@jit(device=True)
def _root(x, offset):
    """x / √(|x| + offset), about sign(x)·√|x| for larger |x|; it evens out features of very different size, as means of many rectified products are
    (F. Perronnin, J. Sánchez, T. Mensink, ECCV 2010). The root itself has no bounded slope at 0; with offset it is at most 1/√offset.
    """
    return x / math.sqrt(abs(x) + offset)


@jit(device=True)
def _root_gradient(dy, x, offset):
    """dy·(|x|/2 + offset) / (|x| + offset)^1.5."""
    size = abs(x) + offset
    return dy * ((size + offset) / (2.0 * size * math.sqrt(size)))


@jit(device=True)
def _abs(x):
    """|x|."""
    return abs(x)


@jit(device=True)
def _abs_gradient(dy, x):
    """dy·sign(x)."""
    return dy if x > 0.0 else (-dy if x < 0.0 else dy * x)


@jit(device=True)
def _clip(x, low, high):
    """min(max(x, low), high)."""
    return low if x < low else (high if x > high else x)


@jit(device=True)
def _clip_gradient(dy, x, low, high):
    """dy where low < x < high, else 0."""
    return dy if (x > low) & (x < high) else 0.0


@jit(device=True)
def _power(x, exponent):
    """x^exponent, NaN for a negative x and an exponent that is no whole number, as in C.

    Of a constant exponent the compiler keeps one line: roots and reciprocals as what the GPU has for them.
    """
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
    """dy·exponent·x^(exponent − 1)."""
    return dy * exponent * _power(x, exponent - 1.0)


@jit(device=True)
def _scale(x, factor, shift):
    """factor·x + shift."""
    return factor * x + shift


@jit(device=True)
def _scale_gradient(dy, x, factor, shift):
    """dy·factor."""
    return dy * factor


@jit(device=True)
def _softplus(x):
    """log(1 + exp(x)) as max(x, 0) + log1p(exp(−|x|)), which no x overflows (C. Dugas et al., "Incorporating second-order functional knowledge for
    better option pricing", NIPS 2000).
    """
    return (0.0 if x < 0.0 else x) + math.log1p(math.exp(-abs(x)))


@jit(device=True)
def _softplus_gradient(dy, y):
    """dy·(1 − exp(−y)): 1 − exp(−y) = exp(x)/(1 + exp(x))."""
    return -dy * math.expm1(-y)


@jit(device=True)
def _softplus_again(dy, x):
    """dy·σ(x), which needs neither log1p nor expm1: with both, a norm's gradient spilled 128 bytes per thread."""
    return dy * sigmoid(x)


@jit(device=True)
def _threshold(x, limit, value):
    """x where x > limit, else value."""
    return value if x <= limit else x


@jit(device=True)
def _threshold_gradient(dy, x, limit, value):
    """dy where x > limit, else 0."""
    return 0.0 if x <= limit else dy


RELU = Activation("relu", relu, _relu_gradient, "y", gates=True, arrays=(_relu_on_arrays, _relu_gradient_on_arrays))
SWISH = Activation("swish", _swish, _swish_gradient)
FUNCTIONS = (
    RELU,
    Activation("leaky_relu", _leaky_relu, _leaky_relu_gradient, "y", {"slope": 0.1}),
    Activation("sigmoid", sigmoid, _sigmoid_gradient, "y"),
    SWISH,
    GELU,
    Activation("gelu_tanh", _gelu_tanh, _gelu_tanh_gradient),
    Activation("tanh", _tanh, _tanh_gradient, "y"),
    Activation("elu", _elu, _elu_gradient, "y", {"alpha": 0.8}),
    Activation("relu6", _relu6, _relu6_gradient, "y", gates=True, arrays=(_relu6_on_arrays, _relu6_gradient_on_arrays)),
    Activation("hard_swish", _hard_swish, _hard_swish_gradient),
    Activation("root", _root, _root_gradient, "x", {"offset": 0.01}),
    Activation("abs", _abs, _abs_gradient),
    Activation("clip", _clip, _clip_gradient, "x", {"low": -0.5, "high": 0.75}, gates=True),
    Activation("power", _power, _power_gradient, "x", {"exponent": 2.0}),
    Activation("scale", _scale, _scale_gradient, "x", {"factor": -1.5, "shift": 0.25}),
    Activation("softplus", _softplus, _softplus_gradient, "y", again=_softplus_again),
    Activation("threshold", _threshold, _threshold_gradient, "x", {"limit": 0.125, "value": -0.25}, gates=True),
)
"""All of them, with the parameters that their cases have."""
