"""Step 4, register tiles: a thread owns 4×4 elements of y instead of one. Of 4 + 4 numbers from shared memory it makes 16 products, where step 3
loads two numbers for each; and a block of 256 threads owns 64×64 elements, so each tile of A and B is fetched a quarter as often.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.conv.cuda_ladder.parts import THREADS, sizes, step
from nbcnn.ops.conv.cuda_ladder.step1_thread import products
from nbcnn.ops.kernel.call import Launch
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.plan.shapes import ConvShape, numel

BM, BN, BK = 64, 64, 16
"""A block owns BM filters × BN pixels of y, and walks along the shared dimension BK at a time."""
SIDE, TN = 16, 4
"""The block's threads stand as SIDE × SIDE, and each owns TN × TN elements, SIDE rows or columns apart: neighbours read neighbouring columns."""
PITCH = BK + 1
"""A row of A in shared memory has one spare element: the two rows that a warp reads at a time, and the four it writes, lie in different banks."""

A_SIZE, B_SIZE, SUMS = BM * PITCH, BK * BN, TN * TN


@jit(device=True)
def tile_sums(acc, x, w, k0, j0, C, H, W, K, P, Q, R, S, stride, pad, pixels):
    """acc[4·i + l] = Σ_e A[k,e]·B[e,j] for the thread's k = k0 + down + 16·i, j = j0 + across + 16·l."""
    A, B = cuda.shared.array(A_SIZE, f4), cuda.shared.array(B_SIZE, f4)
    t = cuda.threadIdx.x
    across, down = t % SIDE, t // SIDE
    j, first = j0 + t % BN, t // BN
    q, p, n = j % Q, j // Q % P, j // (P * Q)
    a = cuda.local.array(TN, f4)
    for i in range(SUMS):
        acc[i] = 0.0
    for tap in range(R * S):
        h, v = p * stride + tap // S - pad, q * stride + tap % S - pad
        inside = j < pixels and 0 <= h < H and 0 <= v < W
        for start in range(0, C, BK):
            for i in range(TN):
                k, c = k0 + down + SIDE * i, start + across
                A[(down + SIDE * i) * PITCH + across] = w[(k * C + c) * R * S + tap] if k < K and c < C else 0.0
                c = start + first + TN * i
                B[(first + TN * i) * BN + t % BN] = x[((n * C + c) * H + h) * W + v] if inside and c < C else 0.0
            cuda.syncthreads()
            for e in range(BK):
                for i in range(TN):
                    a[i] = A[(down + SIDE * i) * PITCH + e]
                for l in range(TN):
                    b = B[e * BN + across + SIDE * l]
                    for i in range(TN):
                        acc[TN * i + l] += a[i] * b
            cuda.syncthreads()


@jit(launch_bounds=(THREADS, 4))
def registers_kernel(x, w, y, C, H, W, K, P, Q, R, S, stride, pad, pixels):
    """y[k,j] = Σ_e A[k,e]·B[e,j], A and B as in step 3.

    grid    (⌈NPQ/64⌉, ⌈K/64⌉), block 256.
    owns    block 64 filters × 64 pixels of y, thread 4 × 4 of them, 16 apart.
    shared  64×16 of A and 16×64 of B, 8.3 KB.
    moves   A ⌈NPQ/64⌉ times, B ⌈K/64⌉ times, mostly out of L2; y once.
    source  V. Volkov, J. Demmel, "Benchmarking GPUs to Tune Dense Linear Algebra" (2008).
    """
    acc = cuda.local.array(SUMS, f4)
    k0, j0 = cuda.blockIdx.y * BM, cuda.blockIdx.x * BN
    tile_sums(acc, x, w, k0, j0, C, H, W, K, P, Q, R, S, stride, pad, pixels)
    for l in range(TN):
        j = j0 + cuda.threadIdx.x % SIDE + SIDE * l
        for i in range(TN):
            k = k0 + cuda.threadIdx.x // SIDE + SIDE * i
            if k < K and j < pixels:
                y[(j // (P * Q) * K + k) * P * Q + j % (P * Q)] = acc[TN * i + l]


def traffic(s: ConvShape) -> Traffic:
    """The bytes of step 3 with tiles of 64."""
    count, distinct = products(s)
    weights = numel(s.w_shape) * ceil_div(s.N * s.P * s.Q, BN)
    return Traffic(4 * (weights + count // s.K * ceil_div(s.K, BM)), 4 * numel(s.y_shape), distinct)


def launch_of(kernel: Any, s: ConvShape, arrays: tuple[Any, ...]) -> Launch:
    """One launch of a block per 64 pixels and 64 filters."""
    pixels = s.N * s.P * s.Q
    return Launch(kernel, (ceil_div(pixels, BN), ceil_div(s.K, BM)), THREADS, (*arrays, *sizes(s), np.int32(pixels)))


IMPL = step(lambda s, arrays: launch_of(registers_kernel, s, arrays), traffic)
