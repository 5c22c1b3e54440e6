"""A sparse linear map along one axis of images: y[…, p, …] = Σ_k weight[p,k] · x[…, index[p,k], …].

Interpolation to any size, slices, flips, borders that repeat or mirror the image, repetition, means and sums along an axis are such maps; a table
says which. Its transpose is such a map too, so the gradient is the same op with the transposed table (`transposed`), which gathers as well: nothing
is atomic and bits repeat. Doubling, repeating pixels and pooling have faster kernels of their own (resize.py, upsample.py, pool.py).

    axis_map          x (N,C,H,W), table (2·P·K) -> y          axis (1, 2 or 3)

y has P elements along `axis`. The table, float32, has the indices (P,K), then the weights (P,K); an index of −1 adds nothing. Indices are exact
below 2²⁴.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i4, jit
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import IMAGES, Case, Shapes, label_of, normal
from nbcnn.ops.kernel.loops import within
from nbcnn.ops.kernel.maps import supports
from nbcnn.ops.kernel.stored import kinds
from nbcnn.ops.kernel.traffic import Traffic, element, outputs, size
from nbcnn.ops.kernel.windows import lane_io, lanes_of, launch, split
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel


def _entries(table: np.ndarray, extent: int) -> tuple[np.ndarray, np.ndarray]:
    """The indices and the weights, (P,K), of the table for an axis of P = `extent` elements."""
    index, weight = table.reshape(2, extent, -1)
    return index.astype(np.int64), weight


def axis_map(x: np.ndarray, table: np.ndarray, y: np.ndarray, *, axis: int) -> None:
    """y = the map of `table` (2·P·K), applied to x (N,C,H,W) along `axis`, where y has P elements."""
    index, weight = _entries(table, y.shape[axis])
    shape = [1] * x.ndim
    shape[axis] = -1
    y.fill(0)
    for k in range(index.shape[1]):
        used = np.where(index[:, k] < 0, 0, weight[:, k]).astype(x.dtype)
        y += x.take(np.maximum(index[:, k], 0), axis) * used.reshape(shape)


@cache
def axis_map_kernel(kind: str, lanes: int) -> Any:
    """The kernel of the map; x and y stored as `kind`, what lies behind the axis in groups of `lanes`."""
    load, store = lane_io(lanes, kind)

    @jit()
    def axis_map_kernel(x, table, y, count, extent, made, taps, groups):
        """y[o,p,c] = Σ_k table[made·taps + p·taps + k] · x[o, table[p·taps + k], c].

        grid    ⌈count / 256⌉, block 256, count = outer·made·groups
        owns    thread: one group of one element of y
        shared  none
        moves   taps elements of x and of the table, through the caches, for each of y
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        rest, group = split(i, groups)
        o, p = split(rest, made)
        total, part = cuda.local.array(lanes, f4), cuda.local.array(lanes, f4)
        for lane in range(lanes):
            total[lane] = 0.0
        for k in range(taps):
            index = i4(table[p * taps + k])
            if within(index, extent):
                weight = table[(made + p) * taps + k]
                load(x, (o * extent + index) * groups + group, part)
                for lane in range(lanes):
                    total[lane] += weight * part[lane]
        store(y, i, total)

    return axis_map_kernel


def _view(shape: tuple[int, ...], layout: str, axis: int) -> tuple[int, int]:
    """(outer, inner) of images of `shape` (N,C,H,W) around `axis`, as they are stored."""
    n, c, h, w = shape
    if layout == "NHWC":
        return {1: (n * h * w, 1), 2: (n, w * c), 3: (n * h, c)}[axis]
    return {1: (n, h * w), 2: (n * c, w), 3: (n * c * h, 1)}[axis]


def bind(call: Call) -> list[Launch]:
    """One launch."""
    axis = call.attrs["axis"]
    outer, inner = _view(call.in_shapes[0], call.layout, axis)
    extent, made = call.in_shapes[0][axis], call.out_shapes[0][axis]
    lanes = lanes_of(inner)
    taps, groups = call.in_shapes[1][0] // (2 * made), inner // lanes
    return launch(axis_map_kernel(kinds(call)[0], lanes), outer * made * groups, (*call.ins, *call.outs), extent, made, taps, groups)


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`: every tap reads an element of x."""
    taps = call.in_shapes[1][0] // (2 * call.out_shapes[0][call.attrs["axis"]])
    return [Traffic(element(call) * taps * numel(call.out_shapes[0]), outputs(call), size(call, "in", 0))]


HOST, OPS = {Op("axis_map"): host(axis_map)}, {Op("axis_map"): Impl(bind, supports=supports, traffic=traffic)}


def _table(extent: int) -> np.ndarray:
    """A table of two elements more than `extent`, three taps each: means of neighbours, with nothing beyond the ends."""
    index = np.arange(extent + 2)[:, None] + np.array([-2, -1, 0])
    index[(index < 0) | (index >= extent)] = -1
    weight = np.broadcast_to(np.array([0.25, 0.5, -0.75]), index.shape)
    return np.stack([index, weight]).astype(np.float32).reshape(-1)


def cases(images: Shapes = IMAGES) -> Iterator[Case]:
    """Every axis, with elements that some taps miss."""
    for shape in images:
        for axis in (1, 2, 3):
            made = tuple(extent + 2 * (at == axis) for at, extent in enumerate(shape))
            operands = (normal(45, *shape), _table(shape[axis]))
            yield Case(Op("axis_map"), f"{label_of(shape)} along {axis}", operands, ((made, "float32"),), {"axis": axis}, 3)
