"""Mean squared error: loss = Σ (y - target)² / count; dy = 2 (y - target) / count, count = all elements of the batch.

The kernel takes the difference in float32 and everything after it in float64. A difference rounded by a factor (1 + δ),
|δ| ≤ 2^-24, has a square that is off by at most 2^-23: the loss is within one float32 eps of the exact value.

    mse_fprop         y, target -> loss () float64                                            mean over all elements
    mse_dgrad         y, target -> dy
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, jit, types
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.case import IMAGES, Case, Gradient, Shapes, label_of, normal
from nbcnn.ops.kernel.reduce import QUADS, QUADS_PER_BLOCK, THREADS, add_partials, block_sum, f8, partial_bytes, sum_blocks
from nbcnn.ops.kernel.stored import scalar_io, vector_io, vector_load_if
from nbcnn.ops.kernel.traffic import Traffic, once, size, streamed
from nbcnn.plan.shapes import numel


def mse_fprop(y: np.ndarray, target: np.ndarray, loss: np.ndarray) -> None:
    """loss () float64 = mean of (y - target)² over all elements; y and target of one shape."""
    loss[...] = np.square(y - target, dtype=np.float64).mean()


def mse_dgrad(y: np.ndarray, target: np.ndarray, dy: np.ndarray) -> None:
    """dy = 2 (y - target) / count."""
    np.subtract(y, target, out=dy)
    np.multiply(dy, 2 / y.size, out=dy)


@cache
def fprop_kernel(kind: str, target_kind: str) -> Any:
    """total[block] = scale · Σ (y - target)² over the elements of the block.

    grid min(ceil(count / 4096), 1024), block 256, a thread owns four groups of four elements in every 4096·grid;
    shared 2 KiB; moves 8·count bytes of float32. y and target aligned for groups of four.
    """
    load, load4_if = scalar_io(kind)[0], vector_load_if(kind)
    load_target, load4_target_if = scalar_io(target_kind)[0], vector_load_if(target_kind)

    @jit()
    def mse_fprop_kernel(y, target, count, scale, total):
        sums = cuda.shared.array(THREADS, types.float64)
        tid = cuda.threadIdx.x
        block = cuda.blockIdx.x
        quads = count >> 2
        mine = f8(0)
        # Not a range: Numba counts its iterations by a 64-bit division when the stride is no constant.
        start = block * QUADS_PER_BLOCK
        while start < quads:
            for j in range(QUADS):
                quad = start + j * THREADS + tid
                inside = quad < quads
                y0, y1, y2, y3 = load4_if(y, quad * 4, inside)
                t0, t1, t2, t3 = load4_target_if(target, quad * 4, inside)
                d0, d1, d2, d3 = f8(y0 - t0), f8(y1 - t1), f8(y2 - t2), f8(y3 - t3)
                mine += d0 * d0 + d1 * d1 + d2 * d2 + d3 * d3
            start += cuda.gridDim.x * QUADS_PER_BLOCK
        tail = 4 * quads + tid
        if block == 0 and tail < count:
            d = f8(load(y, tail) - load_target(target, tail))
            mine += d * d
        value = block_sum(sums, mine)
        if tid == 0:
            total[block] = scale * value

    return mse_fprop_kernel


@cache
def dgrad_kernel(kind: str, target_kind: str) -> Any:
    """dy = scale · (y - target), scale = 2 / count.

    grid ceil(count / 1024), block 256, a thread owns four neighbours; moves 12·count bytes of float32. Arrays aligned for groups of four.
    """
    (load, store), (load4, store4) = scalar_io(kind), vector_io(kind)
    load_target, load4_target = scalar_io(target_kind)[0], vector_io(target_kind)[0]

    @jit()
    def mse_dgrad_kernel(y, target, dy, count, scale):
        thread = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        quads = count >> 2
        if thread < quads:
            i = 4 * thread
            y0, y1, y2, y3 = load4(y, i)
            t0, t1, t2, t3 = load4_target(target, i)
            store4(dy, i, scale * (y0 - t0), scale * (y1 - t1), scale * (y2 - t2), scale * (y3 - t3))
        tail = 4 * quads + thread
        if tail < count:
            store(dy, tail, scale * (load(y, tail) - load_target(target, tail)))

    return mse_dgrad_kernel


def _kinds(call: Call) -> tuple[str, str]:
    """How y and the target are stored."""
    return (call.in_dtypes[0], call.in_dtypes[1]) if call.in_dtypes else ("float32", "float32")


def scratch_fprop(call: Call) -> int:
    return partial_bytes(sum_blocks(numel(call.in_shapes[0])))


def bind_fprop(call: Call) -> list[Launch]:
    (y, target), (loss,) = call.ins, call.outs
    count = numel(call.in_shapes[0])
    grid, kernel = sum_blocks(count), fprop_kernel(*_kinds(call))
    if grid == 1:
        return [Launch(kernel, 1, THREADS, (y, target, np.int32(count), np.float64(1 / count), loss))]
    partials = call.scratch.view(np.float64)
    return [
        Launch(kernel, grid, THREADS, (y, target, np.int32(count), np.float64(1), partials)),
        add_partials(partials, grid, 1 / count, loss),
    ]


def bind_dgrad(call: Call) -> list[Launch]:
    (y, target), (dy,) = call.ins, call.outs
    count = numel(call.in_shapes[0])
    args = (y, target, dy, np.int32(count), np.float32(2 / count))
    return [Launch(dgrad_kernel(*_kinds(call)), blocks(count, 4 * THREADS), THREADS, args)]


def traffic_fprop(call: Call) -> list[Traffic]:
    """Bytes of `bind_fprop`."""
    read, grid = size(call, "in", 0) + size(call, "in", 1), sum_blocks(numel(call.in_shapes[0]))
    return [once(read, 8 * grid), *([once(8 * grid, 8)] if grid > 1 else [])]


FPROP, DGRAD = Impl(bind_fprop, scratch_fprop, traffic=traffic_fprop), Impl(bind_dgrad, traffic=streamed)


HOST = {"mse_fprop": host(mse_fprop), "mse_dgrad": host(mse_dgrad)}
OPS = {"mse_fprop": FPROP, "mse_dgrad": DGRAD}
GRADIENTS = {"mse_dgrad": Gradient("mse_fprop", lambda ins, outs, v: (ins[0], ins[1]), loss=True)}


def cases(images: Shapes = IMAGES) -> Iterator[Case]:
    """The loss and its gradient."""
    for shape in images:
        y, target, label = normal(12, *shape), normal(13, *shape), label_of(shape)
        yield Case("mse_fprop", label, (y, target), (((), "float64"),), {}, numel(shape))
        yield Case("mse_dgrad", label, (y, target), ((shape, "float32"),))
