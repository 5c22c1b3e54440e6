"""Sums that repeat bit for bit: within a block by a tree in shared memory, across blocks through partials in scratch.

Every addition has a fixed place in a fixed tree and no block waits for another, so the order never depends on timing.
Sums are kept in float64: over the few million terms of a loss or a gradient norm the additions then contribute less
than 1e-9 of relative error, and what remains is the float32 rounding of the terms themselves. The memory stays the
bottleneck (one float64 multiply-add for every four or eight bytes read).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, jit, types
from nbcnn.ops.kernel.call import Launch

THREADS = 256
"""Threads of every block that adds with `block_sum`."""
QUADS = 4
"""Groups of four float32 that a thread has in flight at once."""
QUADS_PER_BLOCK = THREADS * QUADS
MAX_BLOCKS = 1024
"""Partials a sum leaves at most: more elements make the blocks loop."""

f8: Any = types.float64


@jit(device=True)
def plus(a, b):
    return a + b


@jit(device=True)
def larger(a, b):
    return max(a, b)


@functools.cache
def group_reduction(group: int, combine: Any) -> Any:
    """A device function that combines the values of every `group` neighbouring threads (a power of two) of a block.

    reduction(values, value) takes a shared array of one element per thread, and gives each thread the result of its group.
    All threads of the block must call it, each call with an array of its own.
    """
    first_half = group // 2

    @jit(device=True)
    def reduction(values, value):
        tid = cuda.threadIdx.x
        lane = tid & group - 1
        values[tid] = value
        cuda.syncthreads()
        half = first_half
        while half > 0:
            if lane < half:
                values[tid] = combine(values[tid], values[tid + half])
            cuda.syncthreads()
            half >>= 1
        return values[tid - lane]

    return reduction


block_sum = group_reduction(THREADS, plus)


@jit(device=True)
def sum_of(partials, count):
    """Σ partials[:count] by one block, float64, the same in every thread. Call it once per kernel."""
    sums = cuda.shared.array(THREADS, types.float64)  # 2 KiB
    mine = f8(0)
    for i in range(cuda.threadIdx.x, count, THREADS):
        mine += partials[i]
    return block_sum(sums, mine)


@jit()
def add_partials_kernel(partials, count, scale, total):
    """total[0] = scale · Σ partials[:count], all float64.

    grid 1, block 256, owns the sum; shared 2 KiB; moves 8·count bytes.
    """
    value = sum_of(partials, count)
    if cuda.threadIdx.x == 0:
        total[0] = scale * value


def sum_blocks(count: int) -> int:
    """Blocks that share a sum over `count` float32 elements."""
    return min(max(1, -(-count // (4 * QUADS_PER_BLOCK))), MAX_BLOCKS)


def partial_bytes(blocks: int) -> int:
    """Scratch for the partials of `blocks` blocks: none for a single block, which writes the total itself."""
    return 8 * blocks if blocks > 1 else 0


def add_partials(partials: Any, blocks: int, scale: float, total: Any) -> Launch:
    """The launch that turns `blocks` float64 partials into total = scale · Σ."""
    return Launch(add_partials_kernel, 1, THREADS, (partials, np.int32(blocks), np.float64(scale), total))
