"""Gradient norm: norm = √Σ g² over the whole gradient buffer, for clipping by norm.

grad_norm         g -> norm () float64
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from nbcnn.gpu.language import cuda, jit, types
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import Case, normal
from nbcnn.ops.kernel.reduce import QUADS, QUADS_PER_BLOCK, THREADS, block_sum, f8, sum_blocks, sum_of
from nbcnn.ops.kernel.traffic import Traffic, once, size
from nbcnn.ops.ptx.vector import load4_if
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel


def grad_norm(g: np.ndarray, norm: np.ndarray) -> None:
    """norm () float64 = √Σ g², any shape."""
    norm[...] = np.sqrt(np.square(g, dtype=np.float64).sum())


@jit()
def square_sum_kernel(g, count, partials):
    """partials[block] = Σ g² over the elements of the block, float64 (squares of float32 are exact there).

    grid min(ceil(count / 4096), 1024), block 256, a thread owns four groups of four elements in every 4096·grid;
    shared 2 KiB; moves 4·count bytes. 16-byte aligned g.
    """
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
            a, b, c, d = load4_if(g, quad * 4, quad < quads)
            mine += f8(a) * f8(a) + f8(b) * f8(b) + f8(c) * f8(c) + f8(d) * f8(d)
        start += cuda.gridDim.x * QUADS_PER_BLOCK
    tail = 4 * quads + tid
    if block == 0 and tail < count:
        mine += f8(g[tail]) * f8(g[tail])
    value = block_sum(sums, mine)
    if tid == 0:
        partials[block] = value


@jit()
def root_kernel(partials, count, norm):
    """norm[0] = √Σ partials[:count].

    grid 1, block 256, owns the norm; shared 2 KiB; moves 8·count bytes.
    """
    value = sum_of(partials, count)
    if cuda.threadIdx.x == 0:
        norm[0] = math.sqrt(value)


def scratch(call: Call) -> int:
    return 8 * sum_blocks(numel(call.in_shapes[0]))


def bind(call: Call) -> list[Launch]:
    (g,), (norm,) = call.ins, call.outs
    count = numel(call.in_shapes[0])
    grid = sum_blocks(count)
    partials = call.scratch.view(np.float64)
    return [
        Launch(square_sum_kernel, grid, THREADS, (g, np.int32(count), partials)),
        Launch(root_kernel, 1, THREADS, (partials, np.int32(grid), norm)),
    ]


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`."""
    partials = scratch(call)
    return [once(size(call, "in", 0), partials), once(partials, 8)]


HOST, OPS = {Op("grad_norm"): host(grad_norm)}, {Op("grad_norm"): Impl(bind, scratch, traffic=traffic)}


def cases(count: int = 1003) -> Iterator[Case]:
    """`count` gradients."""
    yield Case(Op("grad_norm"), f"{count}", (normal(18, count),), (((), "float64"),), {}, count)
