"""Ops of ONNX with windows or weights: convolutions, pools, products of matrices; and reductions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.nn.activations import Abs
from nbcnn.nn.joins import Pad
from nbcnn.nn.layers import Conv2d, ConvTranspose2d, Linear
from nbcnn.nn.resampling import AvgPool2d, GlobalAvgPool2d, MaxPool2d
from nbcnn.onnx import rows
from nbcnn.onnx.errors import Unsupported
from nbcnn.onnx.node import MIXES, Node, op
from nbcnn.onnx.rows import Windows
from nbcnn.onnx.shapes import padded
from nbcnn.onnx.values import TAPS, Dims, Val, limited
from nbcnn.plan.shapes import numel, pooled_extent

LOWEST = -float(np.finfo(np.float32).max)
Pair = tuple[int, int]


@dataclass(frozen=True)
class Geometry:
    """Sizes, strides, dilations and paddings of a node, by axis of space."""

    sizes: list[int]
    strides: list[int]
    dilations: list[int]
    before: list[int]
    after: list[int]
    auto: str


def _geometry(node: Node, sizes: Sequence[int], extents: Dims) -> Geometry:
    """The geometry of a node over `extents`. Raises Unsupported for numbers of other axes, or out of range."""
    count = len(extents)
    strides = node.ints("strides", [1] * count)
    dilations = node.ints("dilations", [1] * count)
    pads, auto = node.ints("pads", [0] * 2 * count), node.text("auto_pad", "NOTSET")
    if not count == len(sizes) == len(strides) == len(dilations) == len(pads) / 2 or min(*sizes, *strides, *dilations) < 1:
        raise Unsupported(f"windows of {list(sizes)}, strides {strides}, dilations {dilations} and pads {pads} over {list(extents)}")
    before, after = pads[:count], pads[count:]
    if auto not in ("NOTSET", "", "VALID", "SAME_UPPER", "SAME_LOWER"):
        raise Unsupported(f"auto_pad {auto!r}")
    if auto == "VALID":
        before, after = [0] * count, [0] * count
    if max(*sizes, *strides, *dilations, *map(abs, before), *map(abs, after)) >= 2**31:
        raise Unsupported(f"windows of {list(sizes)}, strides {strides}, dilations {dilations} and pads {pads}")
    return Geometry(list(sizes), strides, dilations, before, after, auto)


def _same(geometry: Geometry, extents: Dims) -> Geometry:
    """The geometry with the paddings that auto_pad means: ⌈extent/stride⌋ windows."""
    if not geometry.auto.startswith("SAME"):
        return geometry
    before, after = [], []
    for size, stride, dilation, extent in zip(geometry.sizes, geometry.strides, geometry.dilations, extents, strict=True):
        total = max(0, (-(-extent // stride) - 1) * stride + dilation * (size - 1) + 1 - extent)
        small, large = total // 2, total - total // 2
        before.append(small if geometry.auto == "SAME_UPPER" else large)
        after.append(large if geometry.auto == "SAME_UPPER" else small)
    return Geometry(geometry.sizes, geometry.strides, geometry.dilations, before, after, geometry.auto)


def _as_images(node: Node, x: Val) -> tuple[Val, Dims]:
    """(images (C, H, W) of `x`, its extents): a series is an image of one row."""
    channels, extents = node.spatial(x)
    if len(extents) not in (1, 2):
        raise Unsupported(f"{len(extents)} axes of space; 1 and 2 are taken")
    shape = (channels, *((1,) if len(extents) == 1 else ()), *extents)
    return Val(node.sheet.shaped(x, shape), shape), extents


def _two(values: Sequence[int], one: int) -> Pair:
    """Numbers of one or two axes as (rows, columns); a series has `one` for its row."""
    return (one, values[0]) if len(values) == 1 else (values[0], values[1])


def _four(geometry: Geometry) -> tuple[int, int, int, int]:
    """The paddings as (top, bottom, left, right)."""
    (top, left), (bottom, right) = _two(geometry.before, 0), _two(geometry.after, 0)
    return top, bottom, left, right


def _images_back(node: Node, y: Any, extents: Dims) -> Val:
    """A graph's images as a value with as many axes of space as `extents`."""
    return Val(y, node.outer((y.shape[0], *y.shape[3 - len(extents) :])))


@op("Conv", "Conv2d", "3 axes of space; weights that are computed")
def conv(node: Node) -> Val:
    weight, bias = node.floats(1), node.floats(2)
    x, extents = _as_images(node, node.value())
    if weight is None or weight.ndim != len(extents) + 2:
        raise Unsupported(f"a weight of {None if weight is None else weight.shape} for {len(extents)} axes of space")
    geometry = _same(_geometry(node, weight.shape[2:], extents), extents)
    groups = int(node.attributes.get("group", 1))
    if groups < 1 or weight.shape[0] % groups or weight.shape[1] * groups != x.dims[0] or (bias is not None and bias.shape != weight.shape[:1]):
        raise Unsupported(f"a weight of {weight.shape} in {groups} groups for {x.dims[0]} channels")
    sides = _four(geometry)
    if min(sides) < 0:
        x = padded(node, x, {1: (min(sides[0], 0), min(sides[1], 0)), 2: (min(sides[2], 0), min(sides[3], 0))}, 0.0)
        sides = (max(sides[0], 0), max(sides[1], 0), max(sides[2], 0), max(sides[3], 0))
    window = _two(weight.shape[2:], 1)
    made = Conv2d(
        weight.shape[0],
        window,
        _two(geometry.strides, 1),
        sides,
        bias is not None,
        dilation=_two(geometry.dilations, 1),
        groups=groups,
    )
    arrays = {"weight": weight.reshape(*weight.shape[:2], *window)} | ({"bias": bias} if bias is not None else {})
    return _images_back(node, node.sheet.call(made, x.value, arrays, [name for name in node.names[1:3] if name]), extents)


@op("ConvTranspose", "ConvTranspose2d, Pad", "3 axes of space; weights that are computed")
def conv_transpose(node: Node) -> Val:
    weight, bias = node.floats(1), node.floats(2)
    x, extents = _as_images(node, node.value())
    if weight is None or weight.ndim != len(extents) + 2 or weight.shape[0] != x.dims[0]:
        raise Unsupported(f"a weight of {None if weight is None else weight.shape} for {x.dims[0]} channels and {len(extents)} axes of space")
    geometry, groups = _geometry(node, weight.shape[2:], extents), int(node.attributes.get("group", 1))
    more = node.ints("output_padding", [0] * len(extents))
    shape = node.ints("output_shape")
    if groups < 1 or weight.shape[0] % groups or len(more) != len(extents) or any(not 0 <= each < 2**31 for each in more):
        raise Unsupported(f"{groups} groups, output_padding {more}")
    if shape is not None and len(shape) == len(extents) + 2:
        shape = shape[2:]
    if shape is None and geometry.auto.startswith("SAME"):
        shape = [extent * stride for extent, stride in zip(extents, geometry.strides, strict=True)]
    before, after = list(geometry.before), list(geometry.after)
    if shape is not None:
        if len(shape) != len(extents):
            raise Unsupported(f"output_shape {shape} of {len(extents)} axes of space")
        for at, (extent, size) in enumerate(zip(extents, shape, strict=True)):
            whole = geometry.strides[at] * (extent - 1) + more[at] + geometry.dilations[at] * (geometry.sizes[at] - 1) + 1
            total = whole - size
            small, large = total // 2, total - total // 2
            before[at], after[at] = (small, large) if geometry.auto == "SAME_UPPER" else (large, small)
    (top, left), (bottom, right), window, (down, across) = _two(before, 0), _two(after, 0), _two(weight.shape[2:], 1), _two(more, 0)
    strides = _two(geometry.strides, 1)
    # What a layer does not take, it makes without a padding, and a Pad cuts it or puts zeros behind it (before the bias, if there is one).
    plain = min(top, bottom, left, right) >= 0 and down < strides[0] and across < strides[1]
    made = ConvTranspose2d(
        weight.shape[1] * groups,
        window,
        strides,
        (top, bottom, left, right) if plain else 0,
        (down, across) if plain else 0,
        bias is not None and plain,
        dilation=_two(geometry.dilations, 1),
        groups=groups,
    )
    arrays = {"weight": weight.reshape(*weight.shape[:2], *window)} | ({"bias": bias} if made.bias else {})
    y = node.sheet.call(made, x.value, arrays, [name for name in node.names[1:3] if name][: len(arrays)])
    if not plain:
        y = node.sheet.call(Pad((-top, down - bottom, -left, across - right)), y)
    back = _images_back(node, y, extents)
    if bias is None or plain:
        return back
    return node.sheet.affine(back, None, bias.reshape(-1, *(1,) * len(extents)))


# -- pools


def _windows(node: Node, x: Val) -> tuple[int, Dims, list[Windows]]:
    """(first axis of space, extents, windows of each axis) of a pool."""
    _, extents = node.spatial(x)
    sizes = node.ints("kernel_shape")
    if sizes is None:
        raise Unsupported("it has no kernel_shape")
    geometry = _same(_geometry(node, sizes, extents), extents)
    if min(*geometry.before, *geometry.after) < 0:
        raise Unsupported(f"pads {geometry.before + geometry.after}")
    made, ceil = [], bool(node.attributes.get("ceil_mode", 0))
    for size, stride, dilation, before, after, extent in zip(
        geometry.sizes, geometry.strides, geometry.dilations, geometry.before, geometry.after, extents, strict=True
    ):
        room = extent + before + after - dilation * (size - 1) - 1
        if room < 0:
            raise Unsupported(f"a window of {size} over {extent} elements padded by {before} and {after}")
        count = room // stride + 1
        if ceil and room % stride and count * stride < extent + before:
            # A last window begins inside, or in the padding in front.
            count += 1
        if before >= dilation * (size - 1) + 1 or (count - 1) * stride - before >= extent:
            raise Unsupported(f"windows of {size} over {extent} elements padded by {before} and {after}, of which one lies outside")
        made.append(Windows(size, stride, dilation, before, after, count))
    if sum(each.size * each.count for each in made) > TAPS:
        raise Unsupported(f"windows of {sizes} over {list(extents)}")
    return len(x.dims) - len(extents), extents, made


def _direct(windows: Sequence[Windows], extents: Dims) -> dict[str, Any] | None:
    """The arguments of a pooling layer for windows that it takes; else None."""
    if len(windows) > 2 or not all(each.before == each.after and 2 * each.before <= each.size and each.dilation == 1 for each in windows):
        return None
    sizes, strides, pads = (_two([getattr(each, name) for each in windows], one) for name, one in (("size", 1), ("stride", 1), ("before", 0)))
    for ceil in (False, True):
        counts = [pooled_extent(extent, w.size, w.stride, w.before, ceil) for extent, w in zip(extents, windows, strict=True)]
        if counts == [w.count for w in windows]:
            return {"kernel_size": sizes, "stride": strides, "padding": pads, "ceil_mode": ceil}
    return None


@op("MaxPool", "MaxPool2d, Pad, LinearMap", "the output Indices")
def max_pool(node: Node) -> Val | tuple[Val, None]:
    if any(node.wanted[1:]):
        raise Unsupported("the indices are read")
    x = node.value()
    first, extents, windows = _windows(node, x)
    if (direct := _direct(windows, extents)) is not None:
        images, _ = _as_images(node, x)
        return _first_of(node, _images_back(node, node.sheet.call(MaxPool2d(**direct), images.value), extents))
    # The maximum over a box is that of one axis after the other.
    for axis, each in enumerate(windows, first):
        x = _axis_maxima(node, x, axis, each)
    return _first_of(node, x)


def _axis_maxima(node: Node, x: Val, axis: int, windows: Windows) -> Val:
    """The maxima of windows along one axis: what is outside is the lowest number, windows with gaps are laid out without them."""
    extent = x.dims[axis]
    after = max(0, (windows.count - 1) * windows.stride + windows.reach - windows.before - extent)
    x = padded(node, x, {axis: (windows.before, after)}, LOWEST) if windows.before or after else x
    size, stride = windows.size, windows.stride
    if windows.dilation > 1:
        places = [start * stride + tap * windows.dilation for start in range(windows.count) for tap in range(size)]
        x, stride = node.sheet.mapped(x, axis, rows.taken(places)), size
    elif (kept := (windows.count - 1) * stride + size) < x.dims[axis]:
        x = node.sheet.mapped(x, axis, rows.taken(range(kept)))
    outer, extent, inner = numel(x.dims[:axis]), x.dims[axis], numel(x.dims[axis + 1 :])
    y = node.sheet.call(MaxPool2d((size, 1), (stride, 1)), node.sheet.shaped(x, (outer, extent, inner)))
    return Val(y, (*x.dims[:axis], y.shape[1], *x.dims[axis + 1 :]))


def _first_of(node: Node, y: Val) -> Any:
    """`y` as the first output of several."""
    return (y, *[None] * (node.outputs - 1))


@op("AveragePool", "AvgPool2d, LinearMap")
def average_pool(node: Node) -> Val:
    x, counted = node.value(), bool(node.attributes.get("count_include_pad", 0))
    first, extents, windows = _windows(node, x)
    if (direct := _direct(windows, extents)) is not None:
        images, _ = _as_images(node, x)
        return _images_back(node, node.sheet.call(AvgPool2d(**direct, count_include_pad=counted), images.value), extents)
    for axis, each in enumerate(windows, first):
        x = node.sheet.mapped(x, axis, each.means(x.dims[axis], counted))
    return x


@op("LpPool", "Abs, Power, LinearMap")
def lp_pool(node: Node) -> Val:
    x, p, sheet = node.value(), float(node.attributes.get("p", 2)), node.sheet
    if p < 1:
        raise Unsupported(f"p {p}")
    first, _, windows = _windows(node, x)
    made = sheet.power(x if p % 2 == 0 else sheet.alike(Abs(), x), p)
    for axis, each in enumerate(windows, first):
        made = sheet.mapped(made, axis, each.sums(made.dims[axis]))
    return sheet.power(made, 1 / p)


@op("GlobalAveragePool", "GlobalAvgPool2d")
def global_average(node: Node) -> Val:
    x = node.value()
    channels, extents = node.spatial(x)
    y = node.sheet.call(GlobalAvgPool2d(), _global(node, x, channels, extents))
    return Val(y, node.outer((channels, *(1,) * len(extents))))


@op("GlobalMaxPool", "MaxPool2d")
def global_max(node: Node) -> Val:
    x = node.value()
    channels, extents = node.spatial(x)
    images = _global(node, x, channels, extents)
    return Val(node.sheet.call(MaxPool2d((images.shape[1], images.shape[2])), images), node.outer((channels, *(1,) * len(extents))))


def _global(node: Node, x: Val, channels: int, extents: Dims) -> Any:
    """The images whose pixels are all of space."""
    shape = (channels, *extents) if len(extents) == 2 else (channels, 1, numel(extents))
    return node.sheet.shaped(x, shape)


# -- products of matrices


@op("Gemm", "Linear, or Permute and a Conv2d of 1×1", "a second operand that is computed")
def gemm(node: Node) -> Val:
    x, b, c = node.value(), node.floats(1), node.floats(2)
    if b.ndim != 2 or node.rank(x) != 2:
        raise Unsupported(f"matrices of {node.rank(x)} and {b.ndim} axes")
    b = (b.T if node.attributes.get("transB", 0) else b) * np.float32(node.attributes.get("alpha", 1.0))
    c = None if c is None else c * np.float32(node.attributes.get("beta", 1.0))
    if node.attributes.get("transA", 0):
        if node.batched:
            raise Unsupported(f"transA: {MIXES}")
        x = node.sheet.permuted(x, (1, 0))
    c = None if c is None else node.broadcastable(c, x)
    if b.shape[0] != x.dims[-1]:
        raise Unsupported(f"a matrix of {b.shape} for rows of {x.dims[-1]}")
    if c is not None and c.shape in ((), (1,), (b.shape[1],), (1, b.shape[1]), (1, 1)):
        return _rows_times(node, x, b, np.broadcast_to(c.reshape(-1), (b.shape[1],)))
    y = _rows_times(node, x, b, None)
    return y if c is None else node.sheet.affine(y, None, c)


def _rows_times(node: Node, x: Val, b: np.ndarray, bias: np.ndarray | None) -> Val:
    """x·b + bias, x (…, K) and b (K, N)."""
    k, n = b.shape
    arrays = {"weight": b.T} | ({} if bias is None else {"bias": bias})
    names = [name for name in node.names[1:3] if name][: len(arrays)]
    dims = limited((*x.dims[:-1], n))
    if numel(x.dims[:-1]) == 1:
        return Val(node.sheet.call(Linear(n, bias is not None), node.sheet.shaped(x, (k,)), arrays, names), dims)
    arrays["weight"] = arrays["weight"].reshape(n, k, 1, 1)
    y = node.sheet.call(Conv2d(n, 1, bias=bias is not None), _columns(node, x), arrays, names)
    return node.sheet.permuted(Val(y, (n, numel(dims[:-1]))), (1, 0)).seen(dims)


def _columns(node: Node, x: Val) -> Any:
    """Images (K, M, 1) of rows x (…, K)."""
    k, m = x.dims[-1], numel(x.dims[:-1])
    return node.sheet.shaped(node.sheet.permuted(x.seen((m, k)), (1, 0)), (k, m, 1))


@op("MatMul", "Linear, or Permute and a Conv2d of 1×1, in groups for several matrices", "two operands that are computed")
def matmul(node: Node) -> Val:
    left = isinstance(node.operands[0], Val)
    x, other = node.value(0 if left else 1), node.floats(1 if left else 0)
    gone = list[int]()
    if other.ndim == 1:
        gone.append(-1 if left else -2)
        other = other[:, None] if left else other[None, :]
    if node.rank(x) < 2 + (node.batched and not left):
        if node.batched:
            raise Unsupported(MIXES)
        gone.append(-2 if left else -1)
        x = x.seen((1, *x.dims) if left else (*x.dims, 1))
    if node.batched and other.ndim > 2:
        if other.ndim > node.rank(x) or (other.ndim == node.rank(x) and other.shape[0] != 1) or node.rank(x) == 2:
            raise Unsupported(f"a matrix for every example: {MIXES}")
        other = other[0] if other.ndim == node.rank(x) else other
    y = _times(node, x, other) if left else _turned(node, _times(node, _turned(node, x), np.swapaxes(other, -1, -2)))
    return y.seen([size for axis, size in enumerate(y.dims, -len(y.dims)) if axis not in gone])


def _turned(node: Node, x: Val) -> Val:
    """The matrices of `x`, transposed."""
    last = len(x.dims) - 1
    return node.sheet.permuted(x, (*range(last - 1), last, last - 1))


def _times(node: Node, x: Val, other: np.ndarray) -> Val:
    """x (…, M, K) times other (…, K, N)."""
    if other.shape[-2] != x.dims[-1]:
        raise Unsupported(f"matrices of {x.dims} and {other.shape}")
    if math.prod(other.shape[:-2]) > 1:
        return _grouped_times(node, x, other)
    more = max(0, other.ndim - max(2, len(x.dims)))
    return _rows_times(node, x.seen((*(1,) * more, *x.dims)), other.reshape(other.shape[-2:]), None)


def _grouped_times(node: Node, x: Val, other: np.ndarray) -> Val:
    """x (…, M, K) times other (…, K, N): a grouped convolution of 1×1, a group for each pair of matrices."""
    m, k = x.dims[-2:]
    n = other.shape[-1]
    lead = limited(np.broadcast_shapes(x.dims[:-2], other.shape[:-2]))
    x = node.sheet.expanded(x, (*lead, m, k))
    groups = numel(lead)
    weight = np.broadcast_to(np.swapaxes(other, -1, -2), (*lead, n, k)).reshape(groups * n, k, 1, 1)
    columns = node.sheet.permuted(x.seen((groups, m, k)), (0, 2, 1))
    y = node.sheet.call(Conv2d(groups * n, 1, groups=groups, bias=False), node.sheet.shaped(columns, (groups * k, m, 1)), {"weight": weight}, ())
    return node.sheet.permuted(Val(y, (groups, n, m)), (0, 2, 1)).seen((*lead, m, n))


# -- reductions


@op("ReduceMean ReduceSum ReduceSumSquare ReduceL1 ReduceL2", "GlobalAvgPool2d, LinearMap, Abs, Power", "axes that are constants")
def reduce(node: Node) -> Val:
    x, sheet = node.value(), node.sheet
    axes = node.whole(1, "axes")
    if not axes:
        if axes is not None and node.attributes.get("noop_with_empty_axes", 0):
            return x
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
