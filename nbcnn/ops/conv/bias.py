"""The bias of a transposed convolution, whose product is a convolution's dgrad and has none: y = x + b by channel, and db = Σ dy.

db is summed by chunks of the batch (share.py), whose sums a second launch adds in order.

    bias_fprop        x (N,C,H,W), b (C) -> y (N,C,H,W)       bias_wgrad        dy -> db (C)
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import SIMULATOR, cuda, f4, jit
from nbcnn.ops.kernel.by_channel import launch_by_channel
from nbcnn.ops.kernel.call import Call, Impl, Launch, host, parts
from nbcnn.ops.kernel.case import IMAGES, Case, Gradient, Shapes, label_of, normal
from nbcnn.ops.kernel.maps import supports
from nbcnn.ops.kernel.reduce import group_reduction, plus
from nbcnn.ops.kernel.share import IN_FLIGHT, Share, lanes_io, place_of, rows_sum, shared_call
from nbcnn.ops.kernel.traffic import Traffic, once, size, streamed
from nbcnn.plan.op import Op

TOTAL_THREADS = 8 if SIMULATOR else 256
"""Threads of a block that adds the sums of one channel."""


def bias_fprop(x: np.ndarray, b: np.ndarray, y: np.ndarray) -> None:
    """y (N,C,H,W) = x (N,C,H,W) + b (C) by channel."""
    np.add(x, b[:, None, None], out=y)


def bias_wgrad(dy: np.ndarray, db: np.ndarray) -> None:
    """db (C) = the sum of dy (N,C,H,W) over images and pixels."""
    np.sum(dy, axis=(0, 2, 3), out=db)


@jit(device=True)
def _sum(x, b):
    return x + b


def bind_fprop(call: Call) -> list[Launch]:
    """x, b -> y. One launch."""
    return launch_by_channel("bias_kernel", _sum, call)


@cache
def chunks_kernel(kind: str, share: Share) -> Any:
    (load, _), place, add = lanes_io(kind, share.width), place_of(share.last), rows_sum(share, share.width)
    WIDTH, COLUMNS, ROWS, THREADS = share.width, share.columns, share.rows, share.threads
    FLOATS, MEMORY = IN_FLIGHT * share.width, share.width * share.threads

    @jit(launch_bounds=(THREADS, 2))
    def bias_chunks_kernel(dy, partials, M, C, HW, chunk, dy_channels):
        """partials (C,chunks) = Σ dy over the block's chunk of pixels; dy is a part of `dy_channels` channels, or all of them.

        grid (tiles of channels, chunks), block up to 256; owns: one block per chunk, per thread `width` channels of every ROWS-th pixel of it.
        shared 4·width bytes per thread; moves 4·dy bytes, once.
        """
        memory = cuda.shared.array(MEMORY, f4)
        values = cuda.local.array(FLOATS, f4)
        sums = cuda.local.array(WIDTH, f4)
        tid, block, chunks = cuda.threadIdx.x, cuda.blockIdx.y, cuda.gridDim.y
        row = tid // COLUMNS
        c = (cuda.blockIdx.x * COLUMNS + (tid - row * COLUMNS)) * WIDTH
        near = min(c, C - WIDTH)
        last = min((block + 1) * chunk, M)
        for q in range(WIDTH):
            sums[q] = 0.0
        m = block * chunk + row
        while m + (IN_FLIGHT - 1) * ROWS < last:
            for j in range(IN_FLIGHT):
                load(dy, place(m + j * ROWS, near, dy_channels, HW), values, j * WIDTH)
            for j in range(IN_FLIGHT):
                for q in range(WIDTH):
                    sums[q] += values[j * WIDTH + q]
            m += IN_FLIGHT * ROWS
        while m < last:
            load(dy, place(m, near, dy_channels, HW), values, 0)
            for q in range(WIDTH):
                sums[q] += values[q]
            m += ROWS
        add(memory, sums)
        if row == 0 and c < C:
            for q in range(WIDTH):
                partials[(c + q) * chunks + block] = memory[q * THREADS + tid]

    return bias_chunks_kernel


@cache
def total_kernel() -> Any:
    THREADS = TOTAL_THREADS
    in_block = group_reduction(THREADS, plus)

    @jit()
    def bias_total_kernel(partials, db, chunks):
        """db = Σ of the partials (C,chunks) of every channel.

        grid C, block 256; owns: one block per channel; shared 4 bytes per thread; moves 4·C·chunks bytes.
        """
        values = cuda.shared.array(THREADS, f4)
        tid, c = cuda.threadIdx.x, cuda.blockIdx.x
        mine = 0.0
        for b in range(tid, chunks, THREADS):
            mine += partials[c * chunks + b]
        mine = in_block(values, mine)
        if tid == 0:
            db[c] = mine

    return bias_total_kernel


def scratch_wgrad(call: Call) -> int:
    """Bytes of a number of every channel and chunk."""
    _, _, extent = shared_call(call, 0)
    return 4 * extent.channels * extent.chunks


def bind_wgrad(call: Call) -> list[Launch]:
    """dy -> db. Two launches: sums of the chunks, those of the channels."""
    (kind, share, extent), (dy,), (db,) = shared_call(call, 0), call.ins, call.outs
    partials = call.scratch.view(np.float32)
    numbers = (np.int32(each) for each in (extent.pixels, extent.channels, extent.plane, extent.chunk))
    return [
        Launch(chunks_kernel(kind, share), extent.grid, share.threads, (dy, partials, *numbers, call.channels("in", 0))),
        Launch(total_kernel(), extent.channels, TOTAL_THREADS, (partials, db, np.int32(extent.chunks))),
    ]


def traffic_wgrad(call: Call) -> list[Traffic]:
    """dy; the partials."""
    partials = scratch_wgrad(call)
    return [once(size(call, "in", 0), partials), once(partials, size(call, "out", 0))]


HOST = {Op("bias", "fprop"): host(bias_fprop), Op("bias", "wgrad"): host(bias_wgrad)}
OPS = {
    Op("bias", "fprop"): Impl(bind_fprop, supports=supports, traffic=streamed),
    Op("bias", "wgrad"): Impl(bind_wgrad, scratch=scratch_wgrad, supports=supports, traffic=traffic_wgrad, pitched=parts(ins=(0,))),
}
GRADIENTS = {Op("bias", "wgrad"): Gradient(Op("bias", "fprop"), lambda ins, outs, v: (v,), of=(1,))}


def cases(images: Shapes = IMAGES) -> Iterator[Case]:
    """Both passes."""
    for shape in images:
        n, c, h, w = shape
        yield Case(Op("bias", "fprop"), label_of(shape), (normal(55, *shape), normal(56, c)), ((shape, "float32"),))
        yield Case(Op("bias", "wgrad"), label_of(shape), (normal(57, *shape),), (((c,), "float32"),), {}, n * h * w)
