"""PReLU: y = x where x > 0, else a[c]·x, with a slope for each channel c, or one for all; dx = dy where x > 0, else a[c]·dy;
da[c] = Σ dy·x over the elements of the channel with x ≤ 0.

Source: K. He, X. Zhang, S. Ren, J. Sun, "Delving deep into rectifiers", arXiv:1502.01852.

    prelu_fprop       x, a (C or 1) -> y                                        x images (N,C,H,W), series (N,C,L) or vectors (N,C)
    prelu_dgrad       dy, x, a -> dx
    prelu_wgrad       dy, x -> da (C or 1)

A tensor lies as (outer, channels, inner): images NCHW and series as (N, C, plane), images NHWC and vectors as (pixels, C, 1); with one slope
for all it has one channel. Sums are kept in float64 and have a fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, jit, types
from nbcnn.ops.kernel.by_channel import launch_by_channel
from nbcnn.ops.kernel.call import Call, Impl, Launch, Shape, blocks, host
from nbcnn.ops.kernel.case import IMAGES, Case, Gradient, label_of, normal
from nbcnn.ops.kernel.loops import quotient
from nbcnn.ops.kernel.maps import supports
from nbcnn.ops.kernel.reduce import THREADS, block_sum, f8
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.traffic import Traffic, once, outputs, size
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

LANES = 32
ROWS = THREADS // LANES
SLABS = 256
"""Parts of a channel's sum at most."""


def _of_channels(x: np.ndarray, a: np.ndarray) -> np.ndarray:
    """`a`, shaped so that it stands beside the channels of x."""
    return a.reshape(1, -1, *(1,) * (x.ndim - 2))


def prelu_fprop(x: np.ndarray, a: np.ndarray, y: np.ndarray) -> None:
    """y = x where x > 0, else a·x; NaN stays NaN."""
    np.multiply(x, _of_channels(x, a), out=y)
    np.copyto(y, x, where=x > 0)


def prelu_dgrad(dy: np.ndarray, x: np.ndarray, a: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy where x > 0, else a·dy."""
    np.multiply(dy, _of_channels(x, a), out=dx)
    np.copyto(dx, dy, where=x > 0)


def prelu_wgrad(dy: np.ndarray, x: np.ndarray, da: np.ndarray) -> None:
    """da = the sum of dy·x where x ≤ 0, of each channel, or of all."""
    each = np.where(x > 0, 0, dy * x)
    axes = tuple(axis for axis in range(x.ndim) if axis != 1 or da.size == 1)
    da[...] = each.sum(axes, dtype=np.float64)


@jit(device=True)
def _prelu(x, a):
    return x if x > 0.0 else x * a


@jit(device=True)
def _prelu_gradient(dy, x, a):
    return dy if x > 0.0 else dy * a


@functools.cache
def plane_sums_kernel(kind: str) -> Any:
    """The kernel of a slab's sum where the elements of a channel are neighbours; dy and x stored as `kind`."""
    load, _ = scalar_io(kind)

    @jit()
    def prelu_plane_sums_kernel(dy, x, partials, outer, channels, inner):
        """partials[slab, c] = Σ dy·x where x ≤ 0, over the elements of channel c that are the slab's.

        grid    (channels, slabs), block 256
        owns    thread: every (256·slabs)th element of the channel
        shared  2 KiB
        moves   8·count bytes of float32
        """
        sums = cuda.shared.array(THREADS, types.float64)
        c, slab, slabs = cuda.blockIdx.x, cuda.blockIdx.y, cuda.gridDim.y
        mine = f8(0)
        j = slab * THREADS + cuda.threadIdx.x
        while j < outer * inner:
            n = quotient(j, inner)
            i = (n * channels + c) * inner + j - n * inner
            value = load(x, i)
            if not value > 0.0:
                mine += f8(load(dy, i) * value)
            j += slabs * THREADS
        total = block_sum(sums, mine)
        if cuda.threadIdx.x == 0:
            partials[slab * channels + c] = total

    return prelu_plane_sums_kernel


@functools.cache
def row_sums_kernel(kind: str) -> Any:
    """The kernel of a slab's sums where channels are neighbours; dy and x stored as `kind`."""
    load, _ = scalar_io(kind)

    @jit()
    def prelu_row_sums_kernel(dy, x, partials, outer, channels, inner):
        """partials[slab, c] = Σ dy·x where x ≤ 0, over the rows of the slab, for 32 channels.

        grid    (⌈channels / 32⌉, slabs), block 256
        owns    thread: every (8·slabs)th row of one channel
        shared  2 KiB
        moves   8·count bytes of float32
        """
        sums = cuda.shared.array(THREADS, types.float64)
        tid = cuda.threadIdx.x
        slab, slabs = cuda.blockIdx.y, cuda.gridDim.y
        c = cuda.blockIdx.x * LANES + tid % LANES
        mine = f8(0)
        row = slab * ROWS + tid // LANES
        while row < outer and c < channels:
            i = row * channels + c
            value = load(x, i)
            if not value > 0.0:
                mine += f8(load(dy, i) * value)
            row += slabs * ROWS
        sums[tid] = mine
        cuda.syncthreads()
        if tid < LANES and c < channels:
            total = f8(0)
            for r in range(ROWS):
                total += sums[r * LANES + tid]
            partials[slab * channels + c] = total

    return prelu_row_sums_kernel


@jit()
def slope_sum_kernel(partials, slabs, channels, da):
    """da[c] = Σ partials[:slabs, c].

    grid ⌈channels / 256⌉, block 256, a thread owns a channel; shared none; moves 8·slabs·channels bytes.
    """
    c = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if c < channels:
        total = f8(0)
        for slab in range(slabs):
            total += partials[slab * channels + c]
        da[c] = total


def extents(shape: Shape, layout: str, slopes: int) -> tuple[int, int, int]:
    """(outer, channels, inner) of a tensor of logical `shape`, stored in `layout`, with so many slopes."""
    if slopes == 1:
        return 1, 1, numel(shape)
    inner = 1 if len(shape) == 4 and layout == "NHWC" else numel(shape[2:])
    return numel(shape) // (slopes * inner), slopes, inner


def _slabs(outer: int, channels: int, inner: int) -> int:
    """Parts of a channel's sum: as many as fill a large GPU, each of at least a block's elements."""
    threads = THREADS if inner > 1 or channels == 1 else ROWS
    across = channels if inner > 1 or channels == 1 else blocks(channels, LANES)
    return max(1, min(SLABS, blocks(outer * inner, 4 * threads), 2048 // across))


def scratch_wgrad(call: Call) -> int:
    """A float64 for every channel of every slab."""
    outer, channels, inner = extents(call.in_shapes[1], call.layout, numel(call.out_shapes[0]))
    return 8 * channels * _slabs(outer, channels, inner)


def bind_fprop(call: Call) -> list[Launch]:
    """One launch."""
    return launch_by_channel("prelu_fprop_kernel", _prelu, call)


def bind_dgrad(call: Call) -> list[Launch]:
    """One launch."""
    return launch_by_channel("prelu_dgrad_kernel", _prelu_gradient, call)


def bind_wgrad(call: Call) -> list[Launch]:
    """Sums of slabs, then their sum."""
    (dy, x), (da,) = call.ins, call.outs
    outer, channels, inner = extents(call.in_shapes[1], call.layout, numel(call.out_shapes[0]))
    slabs, partials, planes = _slabs(outer, channels, inner), call.scratch.view(np.float64), inner > 1 or channels == 1
    kernel = (plane_sums_kernel if planes else row_sums_kernel)(kinds(call)[0])
    args = (dy, x, partials, np.int32(outer), np.int32(channels), np.int32(inner))
    return [
        Launch(kernel, (channels if planes else blocks(channels, LANES), slabs), THREADS, args),
        Launch(slope_sum_kernel, blocks(channels, THREADS), THREADS, (partials, np.int32(slabs), np.int32(channels), da)),
    ]


def traffic_fprop(call: Call) -> list[Traffic]:
    """Bytes of `bind_fprop`, where every element is negative and asks for its slope."""
    count = numel(call.in_shapes[0])
    return [Traffic(size(call, "in", 0) + 4 * count, outputs(call), size(call, "in", 0) + size(call, "in", 1))]


def traffic_dgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_dgrad`, where every element is negative and asks for its slope."""
    both, count = size(call, "in", 0) + size(call, "in", 1), numel(call.in_shapes[0])
    return [Traffic(both + 4 * count, outputs(call), both + size(call, "in", 2))]


def traffic_wgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_wgrad`, where every element is negative."""
    partials = scratch_wgrad(call)
    return [once(size(call, "in", 0) + size(call, "in", 1), partials), once(partials, outputs(call))]


HOST = {Op("prelu", "fprop"): host(prelu_fprop), Op("prelu", "dgrad"): host(prelu_dgrad), Op("prelu", "wgrad"): host(prelu_wgrad)}
OPS = {
    Op("prelu", "fprop"): Impl(bind_fprop, supports=supports, traffic=traffic_fprop),
    Op("prelu", "dgrad"): Impl(bind_dgrad, supports=supports, traffic=traffic_dgrad),
    Op("prelu", "wgrad"): Impl(bind_wgrad, scratch_wgrad, supports=supports, traffic=traffic_wgrad),
}
GRADIENTS = {
    Op("prelu", "dgrad"): Gradient(Op("prelu", "fprop"), lambda ins, outs, v: (v, *ins)),
    Op("prelu", "wgrad"): Gradient(Op("prelu", "fprop"), lambda ins, outs, v: (v, ins[0]), of=(1,)),
}


def cases() -> Iterator[Case]:
    """All three, of images, series and vectors, with a slope for each channel and with one."""
    for shape in (*IMAGES[:3], (3, 5, 9), (70, 33)):
        for slopes in dict.fromkeys((shape[1], 1)):
            x, dy, a, label = normal(5, *shape), normal(6, *shape), normal(7, slopes), f"{label_of(shape)}, {slopes}"
            yield Case(Op("prelu", "fprop"), label, (x, a), ((shape, "float32"),), {}, 4)
            yield Case(Op("prelu", "dgrad"), label, (dy, x, a), ((shape, "float32"),), {}, 4)
            yield Case(Op("prelu", "wgrad"), label, (dy, x), (((slopes,), "float32"),), {}, numel(shape) // slopes)
