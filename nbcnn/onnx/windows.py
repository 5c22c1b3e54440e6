"""Ops of ONNX with windows: convolutions and pools. One axis of space is an image of one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.files.quote import quoted
from nbcnn.nn.activations import Abs
from nbcnn.nn.joins import Pad
from nbcnn.nn.layers import Conv2d, ConvTranspose2d
from nbcnn.nn.resampling import AvgPool2d, GlobalAvgPool2d, MaxPool2d
from nbcnn.onnx import rows
from nbcnn.onnx.errors import Unsupported
from nbcnn.onnx.node import Node, op
from nbcnn.onnx.rows import Windows
from nbcnn.onnx.shapes import padded
from nbcnn.onnx.values import TAPS, Dims, Val
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
    asked = f"windows of {quoted(list(sizes))}, strides {quoted(strides)}, dilations {quoted(dilations)} and pads {quoted(pads)}"
    if not count == len(sizes) == len(strides) == len(dilations) == len(pads) / 2 or min(*sizes, *strides, *dilations) < 1:
        raise Unsupported(f"{asked} over {list(extents)}")
    before, after = pads[:count], pads[count:]
    if auto not in ("NOTSET", "", "VALID", "SAME_UPPER", "SAME_LOWER"):
        raise Unsupported(f"auto_pad {quoted(auto)}")
    if auto == "VALID":
        before, after = [0] * count, [0] * count
    if max(*sizes, *strides, *dilations, *map(abs, before), *map(abs, after)) >= 2**31:
        raise Unsupported(asked)
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
    window, names = _two(weight.shape[2:], 1), node.called(weight=1, bias=2)
    apart = bias is not None and node.sheet.apart_of(names)
    made = Conv2d(
        weight.shape[0],
        window,
        stride=_two(geometry.strides, 1),
        padding=sides,
        bias=bias is not None and not apart,
        dilation=_two(geometry.dilations, 1),
        groups=groups,
    )
    arrays = {"weight": weight.reshape(*weight.shape[:2], *window)} | ({"bias": bias} if made.bias else {})
    back = _images_back(node, node.sheet.call(made, x.value, arrays, names), extents)
    return node.sheet.affine(back, None, bias.reshape(-1, *(1,) * len(extents)), names) if apart else back


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
            raise Unsupported(f"output_shape {quoted(shape)} of {len(extents)} axes of space")
        for at, (extent, size) in enumerate(zip(extents, shape, strict=True)):
            whole = geometry.strides[at] * (extent - 1) + more[at] + geometry.dilations[at] * (geometry.sizes[at] - 1) + 1
            total = whole - size
            small, large = total // 2, total - total // 2
            before[at], after[at] = (small, large) if geometry.auto == "SAME_UPPER" else (large, small)
    (top, left), (bottom, right), window, (down, across) = _two(before, 0), _two(after, 0), _two(weight.shape[2:], 1), _two(more, 0)
    strides = _two(geometry.strides, 1)
    # What a layer does not take, it makes without a padding, and a Pad cuts it or puts zeros behind it (before the bias, if there is one).
    plain, names = min(top, bottom, left, right) >= 0 and down < strides[0] and across < strides[1], node.called(weight=1, bias=2)
    own = bias is not None and plain and not node.sheet.apart_of(names)
    made = ConvTranspose2d(
        weight.shape[1] * groups,
        window,
        stride=strides,
        padding=(top, bottom, left, right) if plain else 0,
        output_padding=(down, across) if plain else 0,
        bias=own,
        dilation=_two(geometry.dilations, 1),
        groups=groups,
    )
    arrays = {"weight": weight.reshape(*weight.shape[:2], *window)} | ({"bias": bias} if own else {})
    y = node.sheet.call(made, x.value, arrays, names)
    if not plain:
        y = node.sheet.call(Pad((-top, down - bottom, -left, across - right)), y)
    back = _images_back(node, y, extents)
    if bias is None or own:
        return back
    return node.sheet.affine(back, None, bias.reshape(-1, *(1,) * len(extents)), names)


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
        raise Unsupported(f"windows of {quoted(sizes)} over {list(extents)}")
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
