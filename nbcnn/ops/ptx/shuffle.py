"""Sum over a warp, and its largest value with an index, by shuffles (registers only); and the barrier of a warp, `bar.warp.sync`.

The simulator has no shuffles: there the same tree runs in shared memory between two block barriers, so every thread of
the block must call `warp_sum` (and the others here) together, on a GPU too.
"""

from __future__ import annotations

from functools import cache

from nbcnn.gpu.language import NUMBA_SIMULATOR, cuda, jit, types, u4

WARP = 32
"""Threads of a warp."""

if NUMBA_SIMULATOR:
    LARGEST_BLOCK = 1024

    @jit(device=True)
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

    @jit(device=True)
    def warp_sum_everywhere(value):
        return warp_sum(value)

    def sum_over(bits):
        @jit(device=True)
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

    @jit(device=True)
    def warp_argmax(value, index):
        values = cuda.shared.array(LARGEST_BLOCK, types.float64)
        indices = cuda.shared.array(LARGEST_BLOCK, types.int32)
        tid = cuda.threadIdx.x
        cuda.syncthreads()
        values[tid], indices[tid] = value, index
        cuda.syncthreads()
        first = tid - tid % WARP
        best = max(range(first, first + WARP), key=lambda i: (values[i], -indices[i]))
        return type(value)(values[best]), int(indices[best])

    @jit(device=True)
    def warp_barrier():
        cuda.syncthreads()

    @jit(device=True)
    def exchange_word(word, mask):
        words = cuda.shared.array(LARGEST_BLOCK, types.uint32)
        tid = cuda.threadIdx.x
        cuda.syncthreads()
        words[tid] = word
        cuda.syncthreads()
        return words[tid ^ int(mask)]
else:
    from nbcnn.ops.ptx.asm import instruction

    _ALL_LANES = 0xFFFFFFFF
    exchange_word = instruction("shfl_bfly", "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", u4, (u4, u4))
    """(word, mask) -> the word of the lane whose number differs in the bits of `mask`; all lanes of the warp call it."""

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

    @jit(device=True)
    def warp_argmax(value, index):
        """The largest `value` (float32) of a warp's lanes and its `index` (int32), of equal ones the lowest; the same in every lane."""
        for half in (16, 8, 4, 2, 1):
            other, at = cuda.shfl_xor_sync(_ALL_LANES, value, half), cuda.shfl_xor_sync(_ALL_LANES, index, half)
            if other > value or (other == value and at < index):
                value, index = other, at
        return value, index

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
