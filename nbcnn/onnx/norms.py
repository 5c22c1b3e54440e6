"""Ops of ONNX that normalise, and softmax: by the layer where there is one, else put together of sums, powers and products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbcnn.nn.activations import Abs, Clip, LogSoftmax, Softmax
from nbcnn.nn.graphs import Value
from nbcnn.nn.norms import BatchNorm2d, GroupNorm, InstanceNorm2d, LayerNorm
from nbcnn.onnx.errors import Unsupported
from nbcnn.onnx.node import Node, op
from nbcnn.onnx.reductions import mean_over, sum_over
from nbcnn.onnx.rows import Windows
from nbcnn.onnx.values import Val
from nbcnn.plan.shapes import numel


def _images(node: Node, x: Val) -> tuple[Any, int]:
    """(graph's images of all of space, channels)."""
    channels, extents = node.spatial(x)
    shape = (channels, *extents) if len(extents) == 2 else (channels, 1, numel(extents))
    return node.sheet.shaped(x, shape), channels


def _of_channels(node: Node, channels: int, *at: int) -> list[np.ndarray]:
    """Operands that have an element for each channel."""
    found = [node.floats(each) for each in at]
    for array, number in zip(found, at, strict=True):
        if array is None or array.shape != (channels,):
            raise Unsupported(f"its operand {number + 1} is {None if array is None else array.shape}, and there are {channels} channels")
    return found


def _epsilon(node: Node) -> float:
    made = float(node.attributes.get("epsilon", 1e-5))
    if not made > 0:
        raise Unsupported(f"epsilon {made}")
    return made


@op("BatchNormalization", "BatchNorm2d", "training_mode")
def batch_norm(node: Node) -> Sequence[Val | None]:
    if node.attributes.get("training_mode", 0) or any(node.wanted[1:]):
        raise Unsupported("training_mode: a model's training moves its statistics, and predictions use them")
    x = node.value()
    images, channels = _images(node, x)
    arrays = dict(zip(("weight", "bias", "running_mean", "running_var"), _of_channels(node, channels, 1, 2, 3, 4), strict=True))
    if (arrays["running_var"] < 0).any():
        raise Unsupported("a variance below 0")
    # ONNX's momentum is what the statistics keep, PyTorch's and ours what the batch counts.
    layer = BatchNorm2d(eps=_epsilon(node), momentum=round(1 - float(node.attributes.get("momentum", 0.9)), 6))
    names = node.called(weight=1, bias=2, running_mean=3, running_var=4)
    return Val(_normed(node, layer, images, arrays, names), x.dims), *[None] * (node.outputs - 1)


def _normed(node: Node, layer: Any, images: Value, arrays: dict[str, np.ndarray], names: dict[str, str]) -> Value:
    """A norm with a weight and a bias for each channel; where one of these is another node's, too, it is a layer behind the norm."""
    sheet, affine = node.sheet, {key: name for key, name in names.items() if key in ("weight", "bias")}
    if not sheet.apart_of(affine):
        return sheet.call(layer, images, arrays, names)
    ones = {"weight": np.ones_like(arrays["weight"]), "bias": np.zeros_like(arrays["bias"])}
    y = sheet.call(layer, images, arrays | ones, {key: name for key, name in names.items() if key not in affine})
    wide = {key: arrays[key].reshape(-1, 1, 1) for key in affine}
    return sheet.affine(Val(y, y.shape), wide.get("weight"), wide.get("bias"), affine).value


@op("InstanceNormalization", "InstanceNorm2d")
def instance_norm(node: Node) -> Val:
    x = node.value()
    images, channels = _images(node, x)
    arrays = dict(zip(("weight", "bias"), _of_channels(node, channels, 1, 2), strict=True))
    return Val(_normed(node, InstanceNorm2d(eps=_epsilon(node), affine=True), images, arrays, node.called(weight=1, bias=2)), x.dims)


@op("GroupNormalization", "GroupNorm")
def group_norm(node: Node) -> Val:
    x, groups = node.value(), int(node.attributes["num_groups"])
    images, channels = _images(node, x)
    if groups < 1 or channels % groups:
        raise Unsupported(f"{groups} groups of {channels} channels")
    # Up to opset 20 a group has a weight and a bias, from 21 on a channel.
    each = _of_channels(node, groups if node.opset < 21 else channels, 1, 2)
    arrays = {name: np.repeat(array, channels // len(array)) for name, array in zip(("weight", "bias"), each, strict=True)}
    return Val(_normed(node, GroupNorm(groups, eps=_epsilon(node)), images, arrays, node.called(weight=1, bias=2)), x.dims)


@op("LayerNormalization", "LayerNorm, or InstanceNorm2d and a depthwise Conv2d; LinearMap and Power for its other outputs")
def layer_norm(node: Node) -> Sequence[Val | None]:
    x, sheet = node.value(), node.sheet
    axis = node.axis(x, int(node.attributes.get("axis", -1)))
    weight, bias, eps = node.floats(1), node.floats(2), _epsilon(node)
    axes, size = range(axis, len(x.dims)), numel(x.dims[axis:])
    mean = rstd = None
    if any(node.wanted[1:]):
        mean = mean_over(node, x, axes)
        variance = mean_over(node, sheet.power(sheet.sum([x, sheet.scaled(mean, -1)]), 2), axes)
        rstd = sheet.power(sheet.scaled(variance, 1.0, eps), -0.5)
    whole, names = x.dims[axis:], node.called(weight=1, bias=2)
    if axis == 0 and not sheet.apart_of(names) and weight is not None and weight.shape == whole and (bias is None or bias.shape == whole):
        shape = x.value.shape
        arrays = {"weight": weight.reshape(shape), "bias": (np.zeros(whole) if bias is None else bias).reshape(shape)}
        y = Val(sheet.call(LayerNorm(eps=eps), x.value, arrays, names), x.dims)
    else:
        outer = numel(x.dims[:axis])
        y = Val(sheet.call(InstanceNorm2d(eps=eps), sheet.shaped(x, (outer, 1, size))), x.dims)
        y = sheet.affine(y, weight, bias, names)
    return [y, mean, rstd][: node.outputs]


@op("RMSNormalization", "Power, LinearMap, Mul, a depthwise Conv2d")
def rms_norm(node: Node) -> Val:
    x, sheet = node.value(), node.sheet
    axis = node.axis(x, int(node.attributes.get("axis", -1)))
    square = mean_over(node, sheet.power(x, 2), range(axis, len(x.dims)))
    y = sheet.product(x, sheet.power(sheet.scaled(square, 1.0, _epsilon(node)), -0.5))
    return sheet.affine(y, node.floats(1), None, node.called(weight=1))


@op("MeanVarianceNormalization", "LinearMap, Power, Mul")
def mean_variance(node: Node) -> Val:
    x, sheet = node.value(), node.sheet
    axes = node.axes(x, [int(axis) for axis in node.attributes.get("axes", (0, 2, 3))])
    centred = sheet.sum([x, sheet.scaled(mean_over(node, x, axes), -1)])
    variance = mean_over(node, sheet.power(centred, 2), axes)
    # The definition adds to the root, not to the variance.
    return sheet.product(centred, sheet.power(sheet.scaled(sheet.power(variance, 0.5), 1.0, 1e-9), -1))


@op("LpNormalization", "Abs, Power, LinearMap, Clip, Mul", "p other than 1 and 2")
def lp_norm(node: Node) -> Val:
    x, sheet, p = node.value(), node.sheet, int(node.attributes.get("p", 2))
    axis = node.axis(x, int(node.attributes.get("axis", -1)))
    if p not in (1, 2):
        raise Unsupported(f"p {p}")
    total = sum_over(node, sheet.power(x, 2) if p == 2 else sheet.alike(Abs(), x), [axis])
    # What is 0 stays 0: 0 divided by the least normal number, not by 0.
    total = sheet.alike(Clip(float(np.finfo(np.float32).tiny), None), total)
    return sheet.product(x, sheet.power(total, -1 / p))


@op("LRN", "Power, LinearMap, Scale, Mul")
def lrn(node: Node) -> Val:
    x, sheet, size = node.value(), node.sheet, int(node.attributes["size"])
    channels, _ = node.spatial(x)
    axis = len(x.dims) - 1 - len(node.spatial(x)[1])
    if size < 1:
        raise Unsupported(f"size {size}")
    before = (size - 1) // 2
    sums = sheet.mapped(sheet.power(x, 2), axis, Windows(size, 1, 1, before, size - 1 - before, channels).sums(channels))
    alpha, beta, bias = (float(node.attributes.get(name, value)) for name, value in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0)))
    return sheet.product(x, sheet.power(sheet.scaled(sums, alpha / size, bias), -beta))


@op("Softmax LogSoftmax", "Softmax, LogSoftmax, Permute")
def softmax(node: Node) -> Val:
    x, sheet = node.value(), node.sheet
    layer = Softmax() if node.op == "Softmax" else LogSoftmax()
    if node.opset >= 13:
        axis = node.axis(x, int(node.attributes.get("axis", -1)))
        return sheet.back(sheet.call(layer, sheet.first(x, axis)), axis, x.dims)
    # Up to opset 12 all axes from `axis` on are one.
    axis = node.axis(x, int(node.attributes.get("axis", 1)))
    rows = x.seen((numel(x.dims[:axis]), numel(x.dims[axis:])))
    return sheet.back(sheet.call(layer, sheet.first(rows, 1)), 1, rows.dims).seen(x.dims)
