"""Variant best for short series, backward: the weight gradient, and both gradients from one load of x and dy.

As in `whole.py` a lane works on a series of its own. It has dy in registers, and sums for all taps, which stay there over the strip of the
batch that its warp takes; x it reads from shared memory, four elements for 48 products. At the end the sums of all lanes are added up, once.
The input's gradient is made of the same dy, and leaves through the place where dy was staged.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.kernel.call import Call, Launch
from nbcnn.ops.kernel.loops import ALIGNMENT
from nbcnn.ops.ptx.shuffle import WARP, warp_barrier
from nbcnn.ops.series.dwconv1d import partials
from nbcnn.ops.series.dwconv1d.series import Correlation
from nbcnn.ops.series.dwconv1d.short import convolve, take
from nbcnn.ops.series.dwconv1d.sliding import odd_quads
from nbcnn.ops.series.dwconv1d.staging import fill_filter, quads
from nbcnn.ops.series.dwconv1d.straight import gradient
from nbcnn.ops.series.dwconv1d.whole import mover

WARPS = 2
"""Warps of a block."""


def resident(length: int, taps: int, with_dx: bool) -> int:
    """Blocks that share a multiprocessor: 128 registers per thread hold 48 elements and 48 sums, 144 dx as well, 200 all that fits."""
    return 8 - with_dx if length + taps <= 96 else 5


@functools.cache
def kernel_for(length: int, taps: int, left: int, left_dx: int | None, flipped: bool, skip: bool, kind: str, out_kind: str) -> Any:
    """The kernel of the partial sums, and of dx if `left_dx` is given: then with the filter in the order `flipped`, with a `skip` or not."""
    L, T, LEFT, PITCH, TAPS, THREADS, WITH_DX = length, taps, left_dx or 0, odd_quads(length), quads(taps), WARP * WARPS, left_dx is not None
    FILTER, APART, ROWS = TAPS if left_dx is not None else 0, taps | 1, WARP * odd_quads(length)
    MEMORY = max(FILTER + 2 * WARPS * ROWS, THREADS * APART)
    (stage, _), (_, store), take_row, add = mover(kind, length), mover(out_kind, length), take(length), gradient(length, taps, left)
    stage_filter, run = fill_filter(flipped, skip, THREADS), convolve(length, taps, LEFT)

    @jit(launch_bounds=(THREADS, resident(length, taps, left_dx is not None)))
    def dwconv1d_bwd_whole_kernel(x, dy, w, d, dx, partial, N, C, strip):
        """partial[part][c][i] = Σ_n Σ_t dy[n,c,t] · x[n,c,t+i−left] over the series of the part; dx as dwconv1d_whole_kernel has it.

        grid C·parts, block 2 warps; a block owns one channel of 32·2·strip series and its partial sums, per warp 32 series at a time, per lane one
        shared 16·32·2·pitch bytes: x and dy of 32 series per warp, and the filter for dx; at the end all sums of all lanes
        moves  x and dy once, partial once; dx once, the filter once per block
        source ours; the order of a sum never depends on timing
        """
        shared = cuda.shared.array(MEMORY, f4, ALIGNMENT)
        tid = cuda.threadIdx.x
        lane, warp = tid & WARP - 1, tid // WARP
        part = cuda.blockIdx.x // C
        c = cuda.blockIdx.x - part * C
        at_dy = FILTER + warp * (2 * ROWS)
        at_x = at_dy + ROWS
        own = lane * PITCH
        if WITH_DX:
            stage_filter(shared, 0, w, d, c, T, 0, TAPS, LEFT, tid)
        cuda.syncthreads()
        row, sums = cuda.local.array(L, f4), cuda.local.array(T, f4)
        for i in range(T):
            sums[i] = 0.0
        iteration = 0
        while iteration < strip:
            n0 = ((part * strip + iteration) * WARPS + warp) * WARP
            stage(shared, at_dy, dy, n0, N, C, c, lane)
            stage(shared, at_x, x, n0, N, C, c, lane)
            warp_barrier()
            take_row(row, shared, at_dy + own)
            add(sums, row, shared, at_x + own)
            if WITH_DX:
                run(row, shared, 0, at_dy + own)
                warp_barrier()
                store(shared, at_dy, dx, n0, N, C, c, lane)
            warp_barrier()
            iteration += 1
        # What is staged is done with: its place takes the sums of all lanes.
        cuda.syncthreads()
        for i in range(T):
            shared[APART * tid + i] = sums[i]
        cuda.syncthreads()
        tap = tid
        while tap < T:
            total = 0.0
            for other in range(THREADS):
                total += shared[APART * other + tap]
            partial[(part * C + c) * T + tap] = total
            tap += THREADS

    return dwconv1d_bwd_whole_kernel


def launches(call: Call, g: Correlation, towards: Correlation | None, arrays: tuple[Any, ...], dw: Any, dd: Any) -> list[Launch]:
    """The kernel on x, dy, w, d and dx, then the sum of its partial sums."""
    partial, parts = partials.partial_sums(call), call.tile.parts
    direction = (None, False, False) if towards is None else (towards.left, towards.flipped, towards.skip)
    kind = (call.in_dtypes or ("float32",))[0]
    out_kind = kind if towards is None else (call.out_dtypes or ("float32",))[0]
    kernel = kernel_for(g.L, g.T, g.left, *direction, kind, out_kind)
    numbers = (np.int32(g.N), np.int32(g.C), np.int32(call.tile.strip(g, WARPS)))
    return [Launch(kernel, g.C * parts, WARP * WARPS, (*arrays, partial, *numbers)), partials.add(g, partial, dw, dd, parts)]
