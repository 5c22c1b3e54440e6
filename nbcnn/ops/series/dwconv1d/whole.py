"""Variant best for short series, up to 64 elements and taps: a lane has a whole series in registers and works alone.

A warp moves 32 series of a channel through shared memory, so that it reads and writes memory in a row; then each lane takes its own into
registers and makes every result of it (`straight.py`). Nothing else is loaded again but the taps, one 16-byte load for 48 products, which all
lanes share. Warps of a block have only the filter in common and never wait for each other: while some load, others multiply.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.gpu.target import Target
from nbcnn.ops.kernel.call import Call, Launch, blocks
from nbcnn.ops.kernel.loops import ALIGNMENT
from nbcnn.ops.kernel.stored import kinds, vector_io, vector_load_if
from nbcnn.ops.ptx.shuffle import WARP, warp_barrier
from nbcnn.ops.ptx.vector import shared_load4, shared_store4
from nbcnn.ops.series.dwconv1d import naive
from nbcnn.ops.series.dwconv1d.series import Correlation
from nbcnn.ops.series.dwconv1d.short import Strips, convolve, fewest_rounds, take
from nbcnn.ops.series.dwconv1d.sliding import odd_quads
from nbcnn.ops.series.dwconv1d.staging import fill_filter, quads

FEWEST = WARP
"""Series of a channel below which lanes would be idle."""
AT_ONCE = 8
"""Loads of 16 bytes that a lane has in flight."""
WARPS = 4
"""Warps of a block."""


class Whole(Strips):
    """A unit is 32 series of one channel."""

    def strip(self, g: Correlation, warps: int) -> int:
        """Times 32 series that each warp takes."""
        return blocks(blocks(g.N, WARP), self.parts * warps)


def resident(length: int) -> int:
    """Blocks that share a multiprocessor: 80 registers per thread hold 48 elements, 96 all that fits."""
    return 6 if length <= 48 else 5


def choose(g: Correlation, target: Target, warps: int, resident: int) -> Whole:
    """The parts that finish first."""
    return Whole(fewest_rounds(g.C, blocks(g.N, WARP), warps, target.multiprocessors * resident, 0.5, 64))


@functools.cache
def mover(kind: str, length: int) -> tuple[Any, Any]:
    """Device functions stage(shared, at, source, n0, N, C, c, lane) and store(shared, at, out, n0, N, C, c, lane) of a warp: series
    n0 … n0+31 of channel c between memory, where they are stored as `kind`, and rows of `odd_quads(length)` floats.

    An iteration moves as many whole series as 32 lanes have quads for. Series beyond N are zeros, and are not stored.
    """
    load4_if, (_, store4) = vector_load_if(kind), vector_io(kind)
    L, QUADS, PITCH = length, length // 4, odd_quads(length)
    TOGETHER = WARP // QUADS
    TURNS = -(-WARP // TOGETHER)
    STAGED = 4 * AT_ONCE

    @jit(device=True)
    def stage(shared, at, source, n0, N, C, c, lane):
        values = cuda.local.array(STAGED, f4)
        first = lane // QUADS
        quad = 4 * (lane - first * QUADS)
        for start in range(0, TURNS, AT_ONCE):
            for b in range(AT_ONCE):
                row = first + (start + b) * TOGETHER
                inside = (first < TOGETHER) & (row < WARP) & (n0 + row < N)
                v0, v1, v2, v3 = load4_if(source, ((n0 + row) * C + c) * L + quad, inside)
                values[4 * b], values[4 * b + 1], values[4 * b + 2], values[4 * b + 3] = v0, v1, v2, v3
            for b in range(AT_ONCE):
                row = first + (start + b) * TOGETHER
                if (first < TOGETHER) & (row < WARP):
                    shared_store4(shared, at + row * PITCH + quad, values[4 * b], values[4 * b + 1], values[4 * b + 2], values[4 * b + 3])

    @jit(device=True)
    def store(shared, at, out, n0, N, C, c, lane):
        first = lane // QUADS
        quad = 4 * (lane - first * QUADS)
        for b in range(TURNS):
            row = first + b * TOGETHER
            if (first < TOGETHER) & (row < WARP) & (n0 + row < N):
                v0, v1, v2, v3 = shared_load4(shared, at + row * PITCH + quad)
                store4(out, ((n0 + row) * C + c) * L + quad, v0, v1, v2, v3)

    return stage, store


@functools.cache
def kernel_for(length: int, taps: int, left: int, flipped: bool, skip: bool, source_kind: str, out_kind: str) -> Any:
    """The kernel of fprop and dgrad."""
    L, T, LEFT, PITCH, TAPS, THREADS = length, taps, left, odd_quads(length), quads(taps), WARP * WARPS
    ROWS = WARP * PITCH
    MEMORY = TAPS + WARPS * ROWS
    (stage, _), (_, store) = mover(source_kind, length), mover(out_kind, length)
    stage_filter, take_row, run = fill_filter(flipped, skip, THREADS), take(length), convolve(length, taps, left)

    @jit(launch_bounds=(THREADS, resident(length)))
    def dwconv1d_whole_kernel(source, w, d, out, N, C, strip):
        """out[n,c,t] = Σ_i k[c,i] · source[n,c,t+i−left]; k is w, or w read backwards, with d added to tap `left`.

        grid C·parts, block 4 warps; a block owns one channel of 32·4·strip series, per warp 32 of them at a time, per lane one
        shared 4·(taps + 4·32·pitch) bytes: 32 series per warp, and the filter
        moves  source and out once, the filter once per block
        source ours: the products of a whole series between registers
        """
        shared = cuda.shared.array(MEMORY, f4, ALIGNMENT)
        tid = cuda.threadIdx.x
        lane, warp = tid & WARP - 1, tid // WARP
        part = cuda.blockIdx.x // C
        c = cuda.blockIdx.x - part * C
        at = TAPS + warp * ROWS
        own = at + lane * PITCH
        stage_filter(shared, 0, w, d, c, T, 0, TAPS, LEFT, tid)
        cuda.syncthreads()
        row = cuda.local.array(L, f4)
        iteration = 0
        while iteration < strip:
            n0 = ((part * strip + iteration) * WARPS + warp) * WARP
            stage(shared, at, source, n0, N, C, c, lane)
            warp_barrier()
            take_row(row, shared, own)
            run(row, shared, 0, own)
            warp_barrier()
            store(shared, at, out, n0, N, C, c, lane)
            warp_barrier()
            iteration += 1

    return dwconv1d_whole_kernel


def bind(call: Call, g: Correlation) -> list[Launch]:
    """One launch: y from x, or dx from dy."""
    kernel = kernel_for(g.L, g.T, g.left, g.flipped, g.skip, *kinds(call))
    numbers = (np.int32(g.N), np.int32(g.C), np.int32(call.tile.strip(g, WARPS)))
    return [Launch(kernel, g.C * call.tile.parts, WARP * WARPS, (*naive.image_arrays(call), *numbers))]
