"""This module has the kernels that measure: multiply on tensor cores, or copy, at a GPU's peak (`nbcnn.run.peaks`), or wait (`nbcnn.run.timeline`).

What they compute means nothing; operands are small random numbers, because zeros draw less power and run at higher clocks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, i4, jit, types, u4
from nbcnn.ops.ptx.asm import byte_address_shared
from nbcnn.ops.ptx.mma import mma_bf16, mma_f16, mma_tf32
from nbcnn.ops.ptx.timer import cycles
from nbcnn.ops.ptx.vector import load4, store4
from nbcnn.ops.ptx.wgmma import K_STEP, k_major, wgmma_bf16, wgmma_commit, wgmma_fence, wgmma_tf32, wgmma_wait, wgmma_wait_all


@jit(device=True)
def _noise(seed):
    """A word of pseudo-random bits (one step of a linear congruential generator, its high bits mixed in)."""
    word = u4(seed) * 747796405 + 2891336453
    return (word >> 16) ^ word


@jit(device=True)
def _two_bf16(seed):
    """Two bfloat16 of random sign and fraction, between 1/2 and 1 in size."""
    return (_noise(seed) & u4(0x807F807F)) | 0x3F003F00


@jit(device=True)
def _two_f16(seed):
    """Two float16 of random sign and fraction, between 1/2 and 1 in size."""
    return (_noise(seed) & u4(0x83FF83FF)) | 0x38003800


@jit(device=True)
def _tf32(seed):
    """A float of random sign and fraction, between 1/2 and 1 in size, with tf32's 10 bits."""
    return (_noise(seed) & u4(0x807FE000)) | 0x3F000000


SLEEP_NS = 50_000
"""The length of one nap of the waiting kernel, of which the GPU takes between none and twice."""


@jit()
def wait_kernel(naps):
    """Nothing, for naps · 50 µs. grid 1, block 1; moves nothing."""
    for _ in range(naps):
        cuda.nanosleep(u4(SLEEP_NS))


COPY_THREADS = 256


@cache
def copy_kernel(groups: int) -> Any:
    """y = x, `groups` groups of four floats per thread, all loaded before the first is stored; count is a multiple of a block's.

    grid    count / (4 · COPY_THREADS · groups)
    owns    thread: groups of four, 4 · COPY_THREADS elements apart
    moves   8·count bytes
    """
    SPAN, FLOATS = 4 * COPY_THREADS, 4 * groups

    @jit()
    def copy_ceiling_kernel(x, y):
        start = cuda.blockIdx.x * (SPAN * groups) + 4 * cuda.threadIdx.x
        held = cuda.local.array(FLOATS, f4)
        for group in range(groups):
            held[4 * group], held[4 * group + 1], held[4 * group + 2], held[4 * group + 3] = load4(x, start + group * SPAN)
        for group in range(groups):
            store4(y, start + group * SPAN, held[4 * group], held[4 * group + 1], held[4 * group + 2], held[4 * group + 3])

    return copy_ceiling_kernel


MMA_THREADS, MMA_TILES = 256, 8
_MMA_SUMS = 4 * MMA_TILES


@cache
def mma_kernel(precision: str) -> Any:
    """mma.sync on fragments in registers, eight independent sums per warp; what block 0 took goes to `watch`.

    grid    any number of blocks of 8 warps
    owns    warp: 16×8 sums, eight of them; 8 products (k16 in bf16, twice k8 in fp16, k8 in tf32) per iteration
    watch   [cycles] of block 0, from when all of its warps begin to when all have their sums
    moves   one float per thread at the end
    needs   compute capability 8.0, for fp16 7.5
    """
    multiply, word = {"bf16": (mma_bf16, _two_bf16), "fp16": (mma_f16, _two_f16), "tf32": (mma_tf32, _tf32)}[precision]

    @jit(launch_bounds=(MMA_THREADS, 2))
    def mma_ceiling_kernel(x, watch, turns):
        i = i4(cuda.grid(1))
        a0, a1, a2, a3 = word(u4(i)), word(u4(i + 1)), word(u4(i + 2)), word(u4(i + 3))
        b0, b1 = word(u4(i + 4)), word(u4(i + 5))
        acc = cuda.local.array(_MMA_SUMS, f4)
        for at in range(_MMA_SUMS):
            acc[at] = 0.0
        cuda.syncthreads()
        begin = cycles()
        turn = 0
        while turn < turns:
            for j in range(MMA_TILES):
                c0, c1, c2, c3 = acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]
                acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3] = multiply(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3)
            turn += 1
        total = 0.0
        for at in range(_MMA_SUMS):
            total += acc[at]
        # The store waits for the sums, the barrier for all warps: only then is the watch read.
        x[i] = total
        cuda.syncthreads()
        if i == 0:
            watch[0] = cycles() - begin

    return mma_ceiling_kernel


WGMMA_THREADS, WGMMA_N, WGMMA_STEPS = 256, 256, 4
_ROWS = 64 + WGMMA_N
_WORDS = _ROWS * 32 + 256
"""A's 64 rows and B's 256 of 128 bytes, and 1,024 bytes to align them."""
_FILL = -(-_WORDS // WGMMA_THREADS)


@cache
def wgmma_kernel(precision: str) -> Any:
    """wgmma m64n256 on tiles that stay in shared memory: two warpgroups read the same A and B; what block 0 took goes to `watch`.

    grid    one block per multiprocessor (or a multiple), two warpgroups each
    owns    warpgroup: 64 × 256 sums; WGMMA_STEPS products (k16 in bf16, k8 in tf32) per iteration
    shared  41 KiB: A of 64 and B of 256 rows of 128 bytes
    watch   [cycles] of block 0, from when all of its warps begin to when all have their sums
    moves   one float per thread at the end
    needs   compute capability 9.0 (not above)
    """
    multiply, word = (wgmma_bf16(WGMMA_N), _two_bf16) if precision == "bf16" else (wgmma_tf32(WGMMA_N), _tf32)
    wait, wait_all, SUMS = wgmma_wait(0), wgmma_wait_all(WGMMA_N // 2), WGMMA_N // 2

    @jit(launch_bounds=(WGMMA_THREADS, 1))
    def wgmma_ceiling_kernel(x, watch, turns):
        i, t = i4(cuda.grid(1)), cuda.threadIdx.x
        memory = cuda.shared.array(_WORDS, types.uint32)
        for step in range(_FILL):
            at = t + step * WGMMA_THREADS
            if at < _WORDS:
                memory[at] = word(u4(at))
        cuda.syncthreads()
        base = (byte_address_shared(memory) + 1023) & 0xFFFFFC00
        a, b = k_major(base), k_major(base + 64 * 128)
        acc = cuda.local.array(SUMS, f4)
        for at in range(SUMS):
            acc[at] = 0.0
        cuda.syncthreads()
        begin = cycles()
        turn = 0
        while turn < turns:
            wgmma_fence()
            for k in range(WGMMA_STEPS):
                multiply(acc, a + types.uint64(k * K_STEP), b + types.uint64(k * K_STEP), u4(1))
            wgmma_commit()
            wait()
            turn += 1
        wait_all(acc)
        total = 0.0
        for at in range(SUMS):
            total += acc[at]
        x[i] = total
        cuda.syncthreads()
        if i == 0:
            watch[0] = cycles() - begin

    return wgmma_ceiling_kernel
