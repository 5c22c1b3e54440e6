"""Element-wise ops of ONNX: activations, arithmetic, Dropout, Identity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbcnn.nn.activations import ELEMENTWISE, ELU, GELU, Abs, Clip, LeakyReLU, PReLU, ReLU, ReLU6, Sigmoid, Softplus, Swish, Tanh, Threshold
from nbcnn.nn.corruption import Dropout
from nbcnn.onnx.errors import Unsupported
from nbcnn.onnx.node import Node, Operand, op
from nbcnn.onnx.values import Val

FLOAT = 1
"""The number of the type FLOAT (TensorProto.DataType)."""
PLAIN: dict[str, Any] = {each.elsewhere.onnx: each for each in ELEMENTWISE if each.elsewhere.onnx and not each.elsewhere.fields}
"""Activations without parameters, by the op."""


@op(" ".join(PLAIN), ", ".join(each.__name__ for each in PLAIN.values()))
def plain(node: Node) -> Val:
    return node.sheet.alike(PLAIN[node.op](), node.value())


@op("LeakyRelu", "LeakyReLU")
def leaky_relu(node: Node) -> Val:
    slope = float(node.attributes.get("alpha", 0.01))
    if slope > 0:
        return node.sheet.alike(LeakyReLU(slope), node.value())
    return _prelu(node, node.value(), np.array(slope, np.float32)) if slope else node.sheet.alike(ReLU(), node.value())


@op("Elu", "ELU", "alpha > 0")
def elu(node: Node) -> Val:
    return node.sheet.alike(ELU(float(node.attributes.get("alpha", 1.0))), node.value())


@op("Celu", "Scale, ELU", "alpha > 0")
def celu(node: Node) -> Val:
    alpha, sheet = float(node.attributes.get("alpha", 1.0)), node.sheet
    if not alpha > 0:
        raise Unsupported(f"alpha {alpha}")
    return sheet.scaled(sheet.alike(ELU(), sheet.scaled(node.value(), 1 / alpha)), alpha)


@op("Selu", "ELU, Scale", "alpha > 0")
def selu(node: Node) -> Val:
    alpha, gamma = float(node.attributes.get("alpha", 1.6732632423543772)), float(node.attributes.get("gamma", 1.0507009873554805))
    return node.sheet.scaled(node.sheet.alike(ELU(alpha), node.value()), gamma)


@op("HardSigmoid", "Scale, Clip")
def hard_sigmoid(node: Node) -> Val:
    factor, shift = float(node.attributes.get("alpha", 0.2)), float(node.attributes.get("beta", 0.5))
    return node.sheet.alike(Clip(0.0, 1.0), node.sheet.scaled(node.value(), factor, shift))


@op("ThresholdedRelu", "Threshold")
def thresholded_relu(node: Node) -> Val:
    return node.sheet.alike(Threshold(float(node.attributes.get("alpha", 1.0))), node.value())


@op("Gelu", "GELU")
def gelu(node: Node) -> Val:
    return node.sheet.alike(GELU(approximate=node.text("approximate", "none")), node.value())


@op("Swish", "Swish, or Scale, Sigmoid and Mul")
def swish(node: Node) -> Val:
    alpha, x, sheet = float(node.attributes.get("alpha", 1.0)), node.value(), node.sheet
    return sheet.alike(Swish(), x) if alpha == 1 else sheet.product(x, sheet.alike(Sigmoid(), sheet.scaled(x, alpha)))


@op("Mish", "Softplus, Tanh, Mul")
def mish(node: Node) -> Val:
    x, sheet = node.value(), node.sheet
    return sheet.product(x, sheet.alike(Tanh(), sheet.alike(Softplus(), x)))


@op("Softsign", "Abs, Scale, Power, Mul")
def softsign(node: Node) -> Val:
    x, sheet = node.value(), node.sheet
    return sheet.product(x, sheet.power(sheet.scaled(sheet.alike(Abs(), x), 1.0, 1.0), -1))


@op("PRelu", "PReLU, or ReLU and Mul", "slopes that are constants")
def prelu(node: Node) -> Val:
    slope = node.floats(1)
    if node.opset < 7 and slope.ndim == 1 and slope.size > 1:
        # Then slopes were those of the channels; onnx's converter leaves them, and from opset 7 on they would go along the last axis.
        slope = slope.reshape(-1, *(1,) * (node.rank(node.value()) - 2))
    return _prelu(node, node.value(), node.broadcastable(slope, node.value()))


def _prelu(node: Node, x: Val, slope: np.ndarray) -> Val:
    """x where x > 0, else slope·x."""
    sheet, slope = node.sheet, np.asarray(slope)
    channels = len(x.dims) > 0 and slope.ndim == len(x.dims) and slope.shape == (x.dims[0], *(1,) * (len(x.dims) - 1))
    if slope.size == 1 or (channels and x.value.shape[0] == x.dims[0]):
        arrays = {"weight": slope.reshape(-1)}
        return Val(sheet.call(PReLU(slope.size), x.value, arrays, node.called(weight=1)), x.dims)
    # x for x > 0 and slope·x else is relu(x) − slope·relu(−x).
    below = sheet.affine(sheet.alike(ReLU(), sheet.scaled(x, -1)), -slope, None, node.called(weight=1))
    return sheet.sum([sheet.alike(ReLU(), x), below])


@op("Clip", "Clip, ReLU6, ReLU", "limits that are constants")
def clip(node: Node) -> Val:
    low, high = (node.number(at, node.attributes.get(name)) for at, name in ((1, "min"), (2, "max")))
    low, high = (None if end is None or abs(end) >= np.finfo(np.float32).max else float(end) for end in (low, high))
    if low is not None and high is not None and low > high:
        low = high
    if (low, high) == (0.0, 6.0):
        return node.sheet.alike(ReLU6(), node.value())
    return node.sheet.alike(ReLU() if (low, high) == (0.0, None) else Clip(low, high), node.value())


@op("Max Min", "MaxPool2d over what Concat puts side by side; with a constant of one number Clip")
def largest(node: Node) -> Val:
    values, constants = _split(node)
    sheet, sign = node.sheet, 1 if node.op == "Max" else -1
    top, *others = node.together(values)
    for each, name in constants:
        c = node.broadcastable(each, top)
        if sheet.trains(name, number=True):
            others = [*others, sheet.filled(top, c, name)]
            continue
        sheet.constant({"end": name})
        if c.size == 1 and c.ndim <= len(top.dims):
            end = float(c.reshape(()))
            top = top if end == -sign * np.inf else sheet.alike(Clip(end, None) if sign > 0 else Clip(None, end), top)
        else:
            # A constant beside every example: 0·x + c.
            others = [*others, sheet.affine(sheet.scaled(top, 0.0), None, c)]
    for other in others:
        top = sheet.scaled(sheet.larger(sheet.scaled(top, sign), sheet.scaled(other, sign)), sign)
    return top


@op("Identity", "none")
def identity(node: Node) -> Val:
    return node.value()


@op("CastLike", "none", "types other than FLOAT")
def cast_like(node: Node) -> Operand:
    if isinstance(node.operands[0], np.ndarray):
        node.value(1)  # of floats, as all values are
        return node.operands[0].astype(np.float32)
    if not isinstance(node.operands[1], Val):
        node.floats(1)
    return node.value()


@op("Cast", "none", "types other than FLOAT")
def cast(node: Node) -> Val:
    if int(node.attributes["to"]) != FLOAT:
        raise Unsupported(f"a cast to type {node.attributes['to']}; values are FLOAT")
    return node.value()


@op("Dropout", "Dropout", "training_mode, mask")
def dropout(node: Node) -> Sequence[Val | None]:
    ratio = float(node.number(1, node.attributes.get("ratio", 0.5)))
    if node.number(2, False) and ratio:
        raise Unsupported("training_mode: what it drops is random")
    if any(node.wanted[1:]):
        raise Unsupported("the mask is read")
    x = node.value()
    return (node.sheet.alike(Dropout(ratio), x) if 0 < ratio < 1 else x, *[None] * (node.outputs - 1))


# -- arithmetic


def _split(node: Node) -> tuple[list[Val], list[tuple[np.ndarray, str]]]:
    """The operands that are computed, and the constants with what the file calls them."""
    values, constants = list[Val](), list[tuple[np.ndarray, str]]()
    for at, each in enumerate(node.operands):
        if isinstance(each, Val):
            values.append(each)
        elif each is not None:
            constants.append((node.floats(at), node.names[at]))
    return values, constants


def _one(node: Node, constants: Sequence[tuple[np.ndarray, str]], x: Val) -> tuple[np.ndarray, str]:
    """The one constant beside `x`, and its name."""
    return node.broadcastable(constants[0][0], x), constants[0][1]


@op("Add Sum", "Add; with a constant Scale or a depthwise Conv2d")
def add(node: Node) -> Val:
    values, constants = _split(node)
    total = node.sheet.sum(node.together(values))
    for each, name in constants:
        total = node.sheet.affine(total, None, node.broadcastable(each, total), {"bias": name})
    return total


@op("Mean", "Add, Scale")
def mean(node: Node) -> Val:
    return node.sheet.scaled(add(node), 1 / len(node.operands))


@op("Sub", "Scale, Add; with a constant as Add")
def sub(node: Node) -> Val:
    values, constants = _split(node)
    sheet = node.sheet
    if len(values) == 2:
        a, b = node.together(values)
        return sheet.sum([a, sheet.scaled(b, -1)])
    x, (c, name) = values[0], _one(node, constants, values[0])
    if isinstance(node.operands[0], Val):
        return sheet.affine(x, None, -c, {"bias": name})
    return sheet.affine(sheet.scaled(x, -1), None, c, {"bias": name})


@op("Mul", "Mul, or Swish behind a Sigmoid; with a constant Scale or a depthwise Conv2d")
def mul(node: Node) -> Val:
    values, constants = _split(node)
    if len(values) < 2:
        c, name = _one(node, constants, values[0])
        return node.sheet.affine(values[0], c, None, {"weight": name})
    for x, gate in (values, values[::-1]):
        if isinstance(gate.value.layer, Sigmoid) and gate.value.reads == (x.value,) and gate.dims == x.dims:
            return node.sheet.alike(Swish(), x)
    return node.sheet.product(*node.together(values))


@op("Div", "Power, Mul; with a constant as Mul, with a trained one Power and Mul")
def div(node: Node) -> Val:
    values, constants = _split(node)
    sheet = node.sheet
    if len(values) == 2:
        a, b = node.together(values)
        return sheet.product(a, sheet.power(b, -1))
    x, (c, name) = values[0], _one(node, constants, values[0])
    if not isinstance(node.operands[0], Val):
        return sheet.affine(sheet.power(x, -1), c, None, {"weight": name})
    if not np.all(c):
        raise Unsupported("a division by zero")
    if sheet.trains(name, number=True):
        # A weight 1/c would take other steps than c.
        return sheet.product(x, sheet.power(sheet.filled(x, c, name), -1))
    sheet.constant({"weight": name})
    return sheet.affine(x, 1 / c.astype(np.float64), None)


@op("Neg", "Scale")
def neg(node: Node) -> Val:
    return node.sheet.scaled(node.value(), -1)


@op("Sqrt", "Power")
def sqrt(node: Node) -> Val:
    return node.sheet.power(node.value(), 0.5)


@op("Reciprocal", "Power")
def reciprocal(node: Node) -> Val:
    return node.sheet.power(node.value(), -1)


@op("Exp", "Scale, Sigmoid, Power, Mul")
def exponential(node: Node) -> Val:
    # With h = x/2, exp(h) is sigmoid(h)/sigmoid(−h), and exp(x) its square. Halves keep each factor a normal float32 as far as exp(x) is one.
    half, sheet = node.sheet.scaled(node.value(), 0.5), node.sheet
    below = sheet.alike(Sigmoid(), sheet.scaled(half, -1))
    return sheet.power(sheet.product(sheet.alike(Sigmoid(), half), sheet.power(below, -1)), 2)


@op("Pow", "Power", "one constant exponent")
def power(node: Node) -> Val:
    return node.sheet.power(node.value(), float(node.number(1)))


# -- choices


@op("Where", "Scale, a depthwise Conv2d, Add", "a condition that is computed")
def where(node: Node) -> Val:
    condition, sheet = np.asarray(node.constant(0)), node.sheet
    if condition.dtype != bool:
        raise Unsupported(f"a condition of {condition.dtype}")
    # What is not chosen is multiplied by 0: constants must be finite, and so are values of a network that trains.
    values = {at: node.value(at) for at in (1, 2) if isinstance(node.operands[at], Val)}
    longest = max(values.values(), key=lambda each: len(each.dims))
    mask, parts, shift = node.broadcastable(condition, longest), list[Val](), np.zeros((), np.float32)
    for at, chosen in ((1, mask), (2, ~mask)):
        if at in values:
            parts.append(sheet.affine(values[at], chosen.astype(np.float32), None))
            continue
        value = node.broadcastable(node.floats(at), longest)
        if sheet.trains(node.names[at], number=True):
            parts.append(sheet.affine(sheet.filled(longest, value, node.names[at]), chosen.astype(np.float32), None))
        else:
            sheet.constant(node.called(value=at))
            shift = chosen * value
    total = sheet.sum(node.together(parts))
    return sheet.affine(total, None, shift) if np.any(shift) else total
