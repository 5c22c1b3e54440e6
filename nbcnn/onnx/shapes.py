"""Ops of ONNX that move elements: shapes, axes, parts, borders, other sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nbcnn.files.quote import quoted
from nbcnn.nn.joins import Concat, Pad
from nbcnn.nn.resampling import Resize, Upsample2d
from nbcnn.onnx import rows
from nbcnn.onnx.errors import Unsupported
from nbcnn.onnx.node import BATCH, MIXES, Node, op
from nbcnn.onnx.values import Dims, Sheet, Val, around, limited, natural
from nbcnn.plan.shapes import numel


@op("Reshape", "Reshape, where a layer behind it needs one", "a shape that is a constant")
def reshape(node: Node) -> Val:
    x, target = node.value(), node.whole(1, "shape")
    if target is None:
        raise Unsupported("it has no shape")
    keeps_zero = bool(node.attributes.get("allowzero", 0))
    dims = (BATCH, *x.dims) if node.batched else x.dims
    if not keeps_zero:
        if any(size == 0 and at >= len(dims) for at, size in enumerate(target)):
            raise Unsupported(f"a 0 in the shape {quoted(target)} of what has {len(dims)} axes")
        target = [dims[at] if size == 0 else size for at, size in enumerate(target)]
    if node.batched:
        if not target:
            raise Unsupported(MIXES)
        first, *target = target
        if first not in (-1, BATCH, node.count) or (first == -1 and -1 in target) or any(size >= BATCH for size in target):
            raise Unsupported(f"the shape {quoted([first, *target])}: {MIXES}")
    if target.count(-1) > 1 or any(size < -1 for size in target):
        raise Unsupported(f"the shape {quoted(target)}")
    if -1 in target:
        rest = math.prod(size for size in target if size != -1)
        if not rest or numel(x.dims) % rest:
            raise Unsupported(f"the shape {quoted(target)} of {x.dims}")
        target[target.index(-1)] = numel(x.dims) // rest
    if math.prod(target) != numel(x.dims):
        raise Unsupported(f"the shape {quoted(target)} of {x.dims}{': ' + MIXES if node.batched else ''}")
    return x.seen(target)


@op("Flatten", "Reshape, where a layer behind it needs one")
def flatten(node: Node) -> Val:
    x, axis = node.value(), int(node.attributes.get("axis", 1))
    rank = node.rank(x)
    axis = axis + rank if axis < 0 else axis
    if node.batched:
        if axis != 1:
            raise Unsupported(MIXES)
        return x.seen((numel(x.dims),))
    return x.seen((numel(x.dims[:axis]), numel(x.dims[axis:])))


@op("Squeeze", "none", "axes that are constants")
def squeeze(node: Node) -> Val:
    x, axes = node.value(), node.whole(1, "axes")
    if axes is None:
        if node.batched and node.count == 1:
            raise Unsupported("no axes, so that the axis of the examples goes")
        return x.seen([size for size in x.dims if size != 1])
    chosen = node.axes(x, axes)
    if any(x.dims[axis] != 1 for axis in chosen):
        raise Unsupported(f"axes {quoted(axes)} of {x.dims}, which have more than one element")
    return x.seen([size for axis, size in enumerate(x.dims) if axis not in chosen])


@op("Unsqueeze", "none", "axes that are constants")
def unsqueeze(node: Node) -> Val:
    x, axes = node.value(), node.whole(1, "axes") or []
    rank = node.rank(x) + len(axes)
    chosen = {node.axis(x, axis, rank) for axis in axes}
    if len(chosen) < len(axes):
        raise Unsupported(f"axes {quoted(axes)}, of which one is named twice")
    sizes = iter(x.dims)
    return x.seen([1 if axis in chosen else next(sizes) for axis in range(len(x.dims) + len(axes))])


@op("Transpose", "Permute")
def transpose(node: Node) -> Val:
    x = node.value()
    rank = node.rank(x)
    perm = [int(each) for each in node.attributes.get("perm", range(rank - 1, -1, -1))]
    if sorted(perm) != list(range(rank)):
        raise Unsupported(f"perm {quoted(perm)} of {rank} axes")
    if node.batched:
        if perm[0] != 0:
            raise Unsupported(MIXES)
        perm = [axis - 1 for axis in perm[1:]]
    return node.sheet.permuted(x, perm)


@op("DepthToSpace", "Permute, Reshape")
def depth_to_space(node: Node) -> Val:
    x, block = node.value(), int(node.attributes["blocksize"])
    channels, extents = node.spatial(x)
    if len(extents) != 2 or block < 1 or channels % block**2:
        raise Unsupported(f"blocks of {block} of images {(channels, *extents)}")
    (h, w), c = extents, channels // block**2
    if node.text("mode", "DCR") == "DCR":
        moved = node.sheet.permuted(x.seen((block, block, c, h, w)), (2, 3, 0, 4, 1))
    else:
        moved = node.sheet.permuted(x.seen((c, block, block, h, w)), (0, 3, 1, 4, 2))
    return moved.seen(node.outer((c, h * block, w * block)))


@op("SpaceToDepth", "Permute, Reshape")
def space_to_depth(node: Node) -> Val:
    x, block = node.value(), int(node.attributes["blocksize"])
    c, extents = node.spatial(x)
    if len(extents) != 2 or block < 1 or any(size % block for size in extents):
        raise Unsupported(f"blocks of {block} of images {(c, *extents)}")
    h, w = extents[0] // block, extents[1] // block
    if node.text("mode", "DCR") == "DCR":
        moved = node.sheet.permuted(x.seen((c, h, block, w, block)), (2, 4, 0, 1, 3))
    else:
        moved = node.sheet.permuted(x.seen((c, h, block, w, block)), (0, 2, 4, 1, 3))
    return moved.seen(node.outer((c * block**2, h, w)))


@op("Concat", "Concat", "constants beside values")
def concat(node: Node) -> Val:
    values = [node.value(at) for at in range(len(node.operands))]
    axis = node.axis(values[0], int(node.attributes["axis"]))
    rest = {(*each.dims[:axis], *each.dims[axis + 1 :]) for each in values if len(each.dims) > axis}
    if len(rest) != 1 or any(len(each.dims) <= axis for each in values):
        raise Unsupported(f"shapes {quoted([each.dims for each in values])} along axis {axis}")
    if len(values) == 1:
        return values[0]
    joined = node.sheet.call(Concat(), [node.sheet.first(each, axis) for each in values])
    extent = sum(each.dims[axis] for each in values)
    return node.sheet.back(joined, axis, limited((*values[0].dims[:axis], extent, *values[0].dims[axis + 1 :])))


@op("Split", "LinearMap", "sizes that are constants")
def split(node: Node) -> Sequence[Val | None]:
    x = node.value()
    axis = node.axis(x, int(node.attributes.get("axis", 0)))
    extent, sizes = x.dims[axis], node.whole(1, "split")
    if sizes is None:
        each = -(-extent // node.outputs)
        sizes = [min(each, extent - at * each) for at in range(node.outputs)]
    if sum(sizes) != extent or len(sizes) != node.outputs or min(sizes) < 1:
        raise Unsupported(f"parts of {quoted(sizes)} of {extent} elements")
    made, start = list[Val | None](), 0
    for size, wanted in zip(sizes, node.wanted, strict=True):
        made.append(node.sheet.mapped(x, axis, rows.taken(range(start, start + size))) if wanted else None)
        start += size
    return made


@op("Slice", "LinearMap", "starts, ends, axes and steps that are constants")
def slices(node: Node) -> Val:
    x = node.value()
    starts, ends = node.whole(1, "starts") or [], node.whole(2, "ends") or []
    axes, steps = node.whole(3, "axes") or list(range(len(starts))), node.whole(4) or [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        raise Unsupported(f"starts {quoted(starts)}, ends {quoted(ends)}, axes {quoted(axes)}, steps {quoted(steps)}")
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if node.batched and axis in (0, -node.rank(x)) and start == 0 and step == 1 and end >= 2**31 - 1:
            continue
        at = node.axis(x, axis)
        chosen = range(x.dims[at])[slice(start, None if step < 0 and end < -x.dims[at] else end, step)]
        if not chosen:
            raise Unsupported(f"elements {start} to {end} of axis {axis}, which are none")
        x = node.sheet.mapped(x, at, rows.taken(chosen))
    return x


@op("Gather", "LinearMap", "indices that are constants, of one axis at most")
def gather(node: Node) -> Val:
    x, indices = node.value(), np.asarray(node.constant(1))
    axis = node.axis(x, int(node.attributes.get("axis", 0)))
    extent = x.dims[axis]
    if indices.dtype.kind not in "iu" or indices.ndim > 1 or not indices.size or indices.min() < -extent or indices.max() >= extent:
        raise Unsupported(f"indices of shape {indices.shape} of {extent} elements")
    made = node.sheet.mapped(x, axis, rows.taken([int(at) % extent for at in indices.reshape(-1)]))
    return made if indices.ndim else made.seen((*x.dims[:axis], *x.dims[axis + 1 :]))


@op("Expand", "LinearMap", "a shape that is a constant")
def expand(node: Node) -> Val:
    x, shape = node.value(), node.whole(1) or []
    if node.batched:
        if len(shape) > node.rank(x) or (len(shape) == node.rank(x) and shape[0] not in (1, BATCH, node.count)):
            raise Unsupported(f"the shape {quoted(shape)}: {MIXES}")
        shape = shape[1:] if len(shape) == node.rank(x) else shape
    return node.sheet.expanded(x, limited(np.broadcast_shapes(x.dims, tuple(shape))))


@op("Tile", "LinearMap", "repeats that are a constant")
def tile(node: Node) -> Val:
    x, repeats = node.value(), node.whole(1) or []
    if len(repeats) != node.rank(x) or min(repeats) < 1:
        raise Unsupported(f"repeats {quoted(repeats)} of {node.rank(x)} axes")
    if node.batched and repeats.pop(0) != 1:
        raise Unsupported(MIXES)
    for axis, count in enumerate(repeats):
        extent = x.dims[axis]
        x = node.sheet.mapped(x, axis, rows.taken([at % extent for at in range(limited((extent, count))[0] * count)])) if count > 1 else x
    return x


@op("Pad", "Pad; for the modes edge, reflect and wrap LinearMap", "paddings that are constants")
def pad(node: Node) -> Val:
    x, mode = node.value(), node.text("mode", "constant")
    pads, axes = node.whole(1, "pads") or [], node.whole(3)
    rank = node.rank(x)
    axes = list(range(rank)) if axes is None else [axis % rank for axis in axes]
    if len(pads) != 2 * len(axes) or len(set(axes)) < len(axes):
        raise Unsupported(f"pads {quoted(pads)} of {len(axes)} axes")
    value = float(node.number(2, node.attributes.get("value", 0.0)))
    if not math.isfinite(value):
        raise Unsupported(f"a padding of {value}")
    sides = {axis: (before, after) for axis, before, after in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True) if before or after}
    if any(axis < node.batched for axis in sides):
        raise Unsupported(MIXES)
    sides = {axis - node.batched: each for axis, each in sides.items()}
    if mode != "constant":
        for axis, (before, after) in sides.items():
            x = node.sheet.mapped(x, axis, rows.padded(mode, x.dims[axis], before, after))
        return x
    return padded(node, x, sides, value)


def padded(node: Node, x: Val, sides: dict[int, tuple[int, int]], value: float) -> Val:
    """`x` with `value` around it; `sides` are (before, after) by axis."""
    for axis, (before, after) in sides.items():
        if x.dims[axis] + min(before, 0) + min(after, 0) < 1:
            raise Unsupported(f"a padding of {before} and {after} of {x.dims[axis]} elements")
    dims = limited([size + sum(sides.get(axis, (0, 0))) for axis, size in enumerate(x.dims)])
    planes = len(x.dims) - 2
    if x.dims[planes:] == x.value.shape[1:] and set(sides) <= {planes, planes + 1}:
        both = [*sides.get(planes, (0, 0)), *sides.get(planes + 1, (0, 0))]
        return Val(node.sheet.call(Pad((both[0], both[1], both[2], both[3]), value), x.value), dims)
    for axis, (before, after) in sides.items():
        seen = around(x.dims, axis)
        made = node.sheet.call(Pad((before, after, 0, 0), value), node.sheet.shaped(x, seen))
        x = Val(made, (*x.dims[:axis], x.dims[axis] + before + after, *x.dims[axis + 1 :]))
    return x


# -- other sizes


@op("Resize Upsample", "Upsample2d, Resize, LinearMap", "scales or sizes that are constants")
def resize(node: Node) -> Val:
    x, rank = node.value(), node.rank(node.value())
    roi, scales, sizes = _asked(node)
    axes = [axis % rank for axis in node.attributes.get("axes", range(rank))]
    given = scales if sizes is None else sizes
    if given is None or len(given) != len(axes):
        raise Unsupported(f"{'no' if given is None else len(given)} scales or sizes for {len(axes)} axes")
    attributes: dict[str, Any] = {
        "mode": node.text("mode", "nearest"),
        "coordinates": node.text("coordinate_transformation_mode", "half_pixel"),
        "nearest": node.text("nearest_mode", "round_prefer_floor"),
        "cubic": float(node.attributes.get("cubic_coeff_a", -0.75)),
        "exclude_outside": bool(node.attributes.get("exclude_outside", 0)),
        "antialias": bool(node.attributes.get("antialias", 0)),
    }
    if node.op == "Upsample" or (node.op == "Resize" and node.opset < 11):
        attributes |= {"coordinates": "asymmetric", "nearest": "floor"}
        attributes["mode"] = "linear" if attributes["mode"] == "bilinear" else attributes["mode"]
    asked = rows.Resizing(**attributes)
    kept = [at for at, axis in enumerate(axes) if not _stays(node, axis, scales, sizes, at)]
    if any(axes[at] < node.batched for at in kept):
        raise Unsupported(MIXES)
    extents = [x.dims[axes[at] - node.batched] for at in kept]
    policy = node.text("keep_aspect_ratio_policy", "stretch")
    made = rows.resized(extents, None if scales is None else scales[kept], None if sizes is None else np.asarray(sizes)[kept], policy)
    outside_value = float(node.attributes.get("extrapolation_value", 0.0))
    maps, everywhere = {}, True
    for at, extent, (scale, size) in zip(kept, extents, made, strict=True):
        ends = (float(roi[at]), float(roi[len(axes) + at])) if roi is not None and len(roi) == 2 * len(axes) else (0.0, 1.0)
        if asked.coordinates == "tf_crop_and_resize" and roi is None:
            raise Unsupported("tf_crop_and_resize without a roi")
        if not all(map(math.isfinite, ends)):
            raise Unsupported(f"a roi of {quoted(ends)}")
        maps[axes[at] - node.batched], outside = asked.rows(extent, scale, size, ends)
        everywhere &= not any(outside)
    if not everywhere and outside_value:
        # What lies outside is 0 in the maps of x; of x − value it is, so that the value stands there in the end.
        return node.sheet.scaled(interpolated(node.sheet, node.sheet.scaled(x, 1.0, -outside_value), maps), 1.0, outside_value)
    return interpolated(node.sheet, x, maps)


def _asked(node: Node) -> tuple[Any, np.ndarray | None, list[int] | None]:
    """(roi, scales, sizes) of a node, which stand elsewhere in earlier opsets."""
    if node.op == "Upsample" or node.opset < 11:
        given = node.floats(1) if node.has(1) else node.attributes.get("scales")
        return None, None if given is None else np.asarray(given, np.float64), None
    roi, scales = (node.floats(at) if node.has(at) and np.asarray(node.constant(at)).size else None for at in (1, 2))
    sizes = node.whole(3) if node.has(3) and np.asarray(node.constant(3)).size else None
    return roi, None if scales is None or sizes else scales.astype(np.float64), sizes


def _stays(node: Node, axis: int, scales: np.ndarray | None, sizes: list[int] | None, at: int) -> bool:
    """Whether an axis keeps its size, so that the axis of the examples may be among those that are named."""
    if node.text("coordinate_transformation_mode", "") == "tf_crop_and_resize" and axis >= node.batched:
        return False
    if sizes is None:
        assert scales is not None
        return bool(scales[at] == 1)
    if node.batched and axis == 0:
        return sizes[at] in (BATCH, node.count)
    return sizes[at] == node.value().dims[axis - node.batched]


def interpolated(sheet: Sheet, x: Val, maps: dict[int, rows.Rows]) -> Val:
    """The maps, by axis, one after the other; those that a layer of images has faster kernels for as that layer."""
    planes = len(x.dims) - 2
    if len(x.value.shape) == 3 and x.value.shape[1:] == x.dims[planes:] and set(maps) <= {planes, planes + 1}:
        both = [maps.get(axis, rows.taken(range(x.dims[axis]))) for axis in (planes, planes + 1)]
        made = [len(each) for each in both]
        layer: Any = None
        if all(size % extent == 0 for size, extent in zip(made, x.value.shape[1:], strict=True)):
            factors = made[0] // x.value.shape[1], made[1] // x.value.shape[2]
            if all(_same(each, _repeated(len(each), factor)) for each, factor in zip(both, factors, strict=True)):
                layer = Upsample2d(factors[0]) if factors[0] == factors[1] else Resize(factors)
            elif factors == (2, 2) and all(_same(each, _doubled(len(each))) for each in both):
                layer = Resize(mode="bilinear")
        if layer is not None:
            return Val(sheet.call(layer, x.value), limited((*x.dims[:planes], *made)))
    for axis, each in maps.items():
        x = sheet.mapped(x, axis, each)
    return x


def _repeated(made: int, factor: int) -> rows.Rows:
    return rows.taken([at // factor for at in range(made)])


def _doubled(made: int) -> rows.Rows:
    return rows.Resizing("linear").rows(made // 2, 2.0, made)[0]


def _same(a: rows.Rows, b: rows.Rows) -> bool:
    return [[at for at, _ in row] for row in a] == [[at for at, _ in row] for row in b] and all(
        abs(one - other) < 1e-6 for left, right in zip(a, b, strict=True) for (_, one), (_, other) in zip(left, right, strict=True)
    )


def shape_of(x: Val, batched: bool) -> np.ndarray:
    """What the op Shape gives: the number of examples is `BATCH`."""
    return np.array((BATCH, *x.dims) if batched else x.dims, np.int64)


def entered(dims: Dims) -> Dims:
    """The shape of the graph's input for examples of `dims`."""
    return natural(limited(dims))
