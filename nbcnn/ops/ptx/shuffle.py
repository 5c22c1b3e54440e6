"""Sum over a warp by shuffles: `shfl.sync.down`, registers only; and the barrier of a warp, `bar.warp.sync`.

The simulator has no shuffles: there the same tree runs in shared memory between two block barriers, so every thread of
the block must call `warp_sum` together, on a GPU too.
"""

from __future__ import annotations

from functools import cache

from nbcnn.cuda import SIMULATOR, cuda, jit, types

WARP = 32
"""Threads of a warp."""

if SIMULATOR:
    LARGEST_BLOCK = 1024

    @cuda.jit(device=True)
    def warp_sum(value):
        lanes = cuda.shared.array(LARGEST_BLOCK, types.float64)
        tid = cuda.threadIdx.x
        cuda.syncthreads()
        lanes[tid] = value
        cuda.syncthreads()
        terms = [type(value)(lanes[i]) for i in range(tid - tid % WARP, tid - tid % WARP + WARP)]
        for half in (16, 8, 4, 2, 1):
            terms = [terms[i] + terms[i + half] for i in range(half)]
        return terms[0]

    @cuda.jit(device=True)
    def warp_sum_everywhere(value):
        return warp_sum(value)

    def sum_over(bits):
        @cuda.jit(device=True)
        def add(value):
            lanes = cuda.shared.array(LARGEST_BLOCK, types.float64)
            tid = cuda.threadIdx.x
            cuda.syncthreads()
            lanes[tid] = value
            cuda.syncthreads()
            terms = [tid]
            for half in (16, 8, 4, 2, 1):
                terms += [i ^ half for i in terms if bits & half]
            return type(value)(sum(lanes[i] for i in sorted(terms)))

        return add

    @cuda.jit(device=True)
    def warp_barrier():
        cuda.syncthreads()
else:
    _ALL_LANES = 0xFFFFFFFF

    @jit(device=True)
    def warp_sum(value):
        """Σ `value` (float32 or float64) over the 32 lanes of a warp, valid in lane 0; the block is whole warps."""
        for half in (16, 8, 4, 2, 1):
            value += cuda.shfl_down_sync(_ALL_LANES, value, half)
        return value

    @jit(device=True)
    def warp_sum_everywhere(value):
        """Σ `value` over the 32 lanes of a warp, the same bits in every lane; the block is whole warps."""
        for half in (16, 8, 4, 2, 1):
            value += cuda.shfl_xor_sync(_ALL_LANES, value, half)
        return value

    @cache
    def sum_over(bits):
        """Device function: Σ `value` over the lanes whose numbers differ in `bits` alone, the same bits in each of them."""

        @jit(device=True)
        def add(value):
            for half in (16, 8, 4, 2, 1):
                if half & bits:
                    value += cuda.shfl_xor_sync(_ALL_LANES, value, half)
            return value

        return add

    @jit(device=True)
    def warp_barrier():
        """Wait until the warp's lanes are here and see each other's shared memory. In the simulator the whole block waits."""
        cuda.syncwarp()
