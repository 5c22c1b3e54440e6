"""Ops of ONNX that reduce axes: sums, means and norms of the elements along them; and the means and sums that norms are made of."""

from __future__ import annotations

from collections.abc import Sequence

from nbcnn.nn.activations import Abs
from nbcnn.nn.resampling import GlobalAvgPool2d, MaxPool2d
from nbcnn.onnx import rows
from nbcnn.onnx.node import Node, op
from nbcnn.onnx.values import Val, around


@op("ReduceMean ReduceSum ReduceSumSquare ReduceL1 ReduceL2", "GlobalAvgPool2d, LinearMap, Abs, Power", "axes that are constants")
def reduce(node: Node) -> Val:
    x, sheet = node.value(), node.sheet
    axes = node.whole(1, "axes")
    if not axes:
        if node.attributes.get("noop_with_empty_axes", 0):
            return x
        axes = list(range(node.rank(x)))
    chosen = sorted(node.axes(x, axes))
    keep = bool(node.attributes.get("keepdims", 1))
    dims = tuple(1 if axis in chosen else size for axis, size in enumerate(x.dims) if keep or axis not in chosen)
    if node.op == "ReduceMean" and chosen == [len(x.dims) - 2, len(x.dims) - 1] and len(x.value.shape) == 3 and x.value.shape[1:] == x.dims[-2:]:
        return Val(sheet.call(GlobalAvgPool2d(), x.value), dims)
    if node.op in ("ReduceSumSquare", "ReduceL2"):
        x = sheet.power(x, 2)
    if node.op == "ReduceL1":
        x = sheet.alike(Abs(), x)
    for axis in chosen:
        x = sheet.mapped(x, axis, rows.of_all(x.dims[axis], 1 / x.dims[axis] if node.op == "ReduceMean" else 1.0))
    return (sheet.power(x, 0.5) if node.op == "ReduceL2" else x).seen(dims)


@op("ReduceMax ReduceMin", "MaxPool2d, Scale", "axes that are constants")
def extreme(node: Node) -> Val:
    x, sheet = node.value(), node.sheet
    axes = node.whole(1, "axes")
    if not axes and node.attributes.get("noop_with_empty_axes", 0):
        return x
    chosen = sorted(node.axes(x, axes or list(range(node.rank(x)))))
    keep = bool(node.attributes.get("keepdims", 1))
    dims = tuple(1 if axis in chosen else size for axis, size in enumerate(x.dims) if keep or axis not in chosen)
    sign = -1.0 if node.op == "ReduceMin" else 1.0
    x = sheet.scaled(x, sign)
    for axis in chosen:
        x = maxima(node, x, axis)
    return sheet.scaled(x, sign).seen(dims)


def maxima(node: Node, x: Val, axis: int) -> Val:
    """The greatest elements along an axis, which keeps one."""
    outer, extent, inner = around(x.dims, axis)
    if extent == 1:
        return x
    y = node.sheet.call(MaxPool2d((extent, 1)), node.sheet.shaped(x, (outer, extent, inner)))
    return Val(y, (*x.dims[:axis], 1, *x.dims[axis + 1 :]))


def mean_over(node: Node, x: Val, axes: Sequence[int]) -> Val:
    """The means over axes, which keep one element."""
    for axis in axes:
        x = node.sheet.mapped(x, axis, rows.of_all(x.dims[axis], 1 / x.dims[axis]))
    return x


def sum_over(node: Node, x: Val, axes: Sequence[int]) -> Val:
    """The sums over axes, which keep one element."""
    for axis in axes:
        x = node.sheet.mapped(x, axis, rows.of_all(x.dims[axis], 1.0))
    return x
