"""Sums that repeat bit for bit: within a block by a tree in shared memory, across blocks through partials in scratch.

Every addition has a fixed place in a fixed tree and no block waits for another, so the order never depends on timing.
Sums are kept in float64: over the few million terms of a loss or a gradient norm the additions then contribute less
than 1e-9 of relative error, and what remains is the float32 rounding of the terms themselves. The memory stays the
bottleneck (one float64 multiply-add for every four or eight bytes read).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, jit, types
from nbcnn.ops.kernel.call import Call, Launch
from nbcnn.ops.kernel.stored import scalar_io, vector_load_if
from nbcnn.ops.kernel.traffic import Traffic, once, size
from nbcnn.plan.shapes import numel

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


@functools.cache
def partials_kernel(root: bool) -> Any:
    """The kernel of the sum of partials, or of its root."""

    @jit()
    def add_partials_kernel(partials, count, scale, total):
        """total[0] = scale · Σ partials[:count], or its root, in float64; total may be float32.

        grid 1, block 256, owns the sum; shared 2 KiB; moves 8·count bytes.
        """
        whole = scale * sum_of(partials, count)
        if cuda.threadIdx.x == 0:
            total[0] = math.sqrt(whole) if root else whole

    return add_partials_kernel


def sum_blocks(count: int) -> int:
    """Blocks that share a sum over `count` float32 elements."""
    return min(max(1, -(-count // (4 * QUADS_PER_BLOCK))), MAX_BLOCKS)


def partial_bytes(blocks: int) -> int:
    """Scratch for the partials of `blocks` blocks: none for a single block, which writes the total itself."""
    return 8 * blocks if blocks > 1 else 0


def add_partials(partials: Any, blocks: int, scale: float, total: Any, root: bool = False) -> Launch:
    """The launch that turns `blocks` float64 partials into total = scale · Σ, or its root."""
    return Launch(partials_kernel(root), 1, THREADS, (partials, np.int32(blocks), np.float64(scale), total))


@functools.cache
def sum_kernel(function: Any, kinds: tuple[str, ...], root: bool) -> Any:
    """The kernel of the sums of `function`(element of each operand), one or two operands stored as `kinds`. `root`: of the one block's sum."""
    (load, _), load4_if, TWO = scalar_io(kinds[0]), vector_load_if(kinds[0]), len(kinds) == 2
    (load_other, _), load4_other_if = scalar_io(kinds[-1]), vector_load_if(kinds[-1])

    @jit(device=True)
    def term(a, b):
        return f8(function(a, b) if TWO else function(a))

    @jit()
    def map_sum_kernel(a, b, count, scale, total):
        """total[block] = scale · Σ function(elements) over the elements of the block, or its root.

        grid    min(⌈count / 4096⌉, 1024), block 256
        owns    thread: four groups of four elements in every 4096·grid
        shared  2 KiB
        moves   every element of every operand once; operands aligned for groups of four
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
                a0, a1, a2, a3 = load4_if(a, quad * 4, quad < quads)
                b0, b1, b2, b3 = load4_other_if(b, quad * 4, quad < quads) if TWO else (a0, a1, a2, a3)
                if quad < quads:
                    mine += term(a0, b0) + term(a1, b1) + term(a2, b2) + term(a3, b3)
            start += cuda.gridDim.x * QUADS_PER_BLOCK
        tail = 4 * quads + tid
        if block == 0 and tail < count:
            value = load(a, tail)
            mine += term(value, load_other(b, tail) if TWO else value)
        whole = scale * block_sum(sums, mine)
        if tid == 0:
            total[block] = math.sqrt(whole) if root else whole

    return map_sum_kernel


def launch_sum(function: Any, call: Call, scale: float, reads: int, root: bool = False) -> list[Launch]:
    """The call's output () float64 = scale · Σ `function`(elements) over its first `reads` inputs, or the root of that.

    Partial sums of blocks, then their sum; one launch where one block is enough. The call has `scratch_of_sum`.
    """
    ins, total, count = call.ins[:reads], call.outs[0], numel(call.in_shapes[0])
    blocks, stored = sum_blocks(count), (call.in_dtypes or ("float32",) * reads)[:reads]
    kernel = sum_kernel(function, tuple(stored), root and blocks == 1)
    if blocks == 1:
        return [Launch(kernel, 1, THREADS, (ins[0], ins[-1], np.int32(count), np.float64(scale), total))]
    partials = call.scratch.view(np.float64)
    first = Launch(kernel, blocks, THREADS, (ins[0], ins[-1], np.int32(count), np.float64(1), partials))
    return [first, add_partials(partials, blocks, scale, total, root)]


def scratch_of_sum(call: Call) -> int:
    """Partial sums of the blocks of `launch_sum`."""
    return partial_bytes(sum_blocks(numel(call.in_shapes[0])))


def traffic_of_sum(call: Call) -> list[Traffic]:
    """Bytes of `launch_sum` over all inputs."""
    read, blocks = sum(size(call, "in", at) for at in range(len(call.in_shapes))), sum_blocks(numel(call.in_shapes[0]))
    return [once(read, 8 * blocks), *([once(8 * blocks, 8)] if blocks > 1 else [])]
