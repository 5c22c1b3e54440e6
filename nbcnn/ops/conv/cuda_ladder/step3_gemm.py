"""Step 3, implicit GEMM: a convolution is a product of matrices, y = A·B, one of which is never stored.

Row k of A is filter k, tap by tap. Column j of B is the window of output pixel j in the same order. Each thread owns one element of y, and a block
16×16 of them. It walks along the shared dimension 16 channels of a tap at a time: every thread copies one element of A and one of B to shared memory,
computing where in w and x they are, and then multiplies a row of A by a column of B.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.conv.cuda_ladder.parts import sizes, step
from nbcnn.ops.conv.cuda_ladder.step1_thread import products
from nbcnn.ops.kernel.call import Launch
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.plan.shapes import ConvShape, numel

SIDE = 16


@jit(launch_bounds=(SIDE * SIDE, 4))
def gemm_kernel(x, w, y, C, H, W, K, P, Q, R, S, stride, pad, pixels):
    """y[k,j] = Σ_e A[k,e]·B[e,j], A[k,(r,s,c)] = w[k,c,r,s], B[(r,s,c),(n,p,q)] = x[n,c,p·stride+r−pad,q·stride+s−pad].

    grid    (⌈NPQ/16⌉, ⌈K/16⌉), block 256.
    owns    block 16 filters × 16 pixels of y, thread one of them.
    shared  16×16 of A and of B, 2 KB.
    moves   A ⌈NPQ/16⌉ times, B ⌈K/16⌉ times, mostly out of L2; y once.
    source  K. Chellapilla et al., "High Performance Convolutional Neural Networks for Document Processing" (2006); CUTLASS, "implicit GEMM".
    """
    A, B = cuda.shared.array((SIDE, SIDE), f4), cuda.shared.array((SIDE, SIDE), f4)
    across, down = cuda.threadIdx.x % SIDE, cuda.threadIdx.x // SIDE
    k, j = cuda.blockIdx.y * SIDE + down, cuda.blockIdx.x * SIDE + across
    # Mapping 1, column of B to output pixel: j -> (n, p, q).
    q, p, n = j % Q, j // Q % P, j // (P * Q)
    total = 0.0
    for tap in range(R * S):
        # Mapping 2, tap to element of the window, and with the pixel to a place in the image: tap -> (r, s) -> (h, v).
        r, s = tap // S, tap % S
        h, v = p * stride + r - pad, q * stride + s - pad
        inside = j < pixels and 0 <= h < H and 0 <= v < W
        for start in range(0, C, SIDE):
            # Mapping 3, row or column of the tile to channel: c = start + 0 … 15, beyond the last one zeros.
            c = start + across
            A[down, across] = w[(k * C + c) * R * S + tap] if k < K and c < C else 0.0
            c = start + down
            B[down, across] = x[((n * C + c) * H + h) * W + v] if inside and c < C else 0.0
            cuda.syncthreads()
            for i in range(SIDE):
                total += A[down, i] * B[i, across]
            # Nobody may overwrite the tiles while somebody still reads them.
            cuda.syncthreads()
    if k < K and j < pixels:
        y[((n * K + k) * P + p) * Q + q] = total


def traffic(s: ConvShape) -> Traffic:
    """Every tile row of A for each tile of pixels, every pixel of a window inside the image for each tile of filters."""
    count, distinct = products(s)
    weights = numel(s.w_shape) * ceil_div(s.N * s.P * s.Q, SIDE)
    return Traffic(4 * (weights + count // s.K * ceil_div(s.K, SIDE)), 4 * numel(s.y_shape), distinct)


def launch(s: ConvShape, arrays: tuple[Any, ...]) -> Launch:
    """One launch of a block per 16 pixels and 16 filters."""
    pixels = s.N * s.P * s.Q
    return Launch(gemm_kernel, (ceil_div(pixels, SIDE), ceil_div(s.K, SIDE)), SIDE * SIDE, (*arrays, *sizes(s), np.int32(pixels)))


IMPL = step(launch, traffic)
