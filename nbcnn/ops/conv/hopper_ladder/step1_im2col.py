"""Step 1, im2col GEMM: a convolution is a product of matrices, one of which is never stored.

Row m of A is an output pixel, column k a channel of one of its R·S taps. The threads of a block compute where in x that is and copy a
k-tile of A and B into shared memory; then all of them multiply it on tensor cores with `mma.sync`, from fragments in registers.
"""

from __future__ import annotations

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit, types, u4
from nbcnn.ops.conv.frame.correlation import correlation
from nbcnn.ops.conv.hopper_ladder.mma_product import multiply, shared_address, store_sums
from nbcnn.ops.conv.hopper_ladder.parts import BK, BLOCKS, BM, BN, SUMS, THREADS, blocks, first_corner, step, words
from nbcnn.ops.kernel.call import Call, Launch
from nbcnn.ops.kernel.loops import ALIGNMENT, ceil_div
from nbcnn.ops.ptx.vector import load_halves8_if, shared_store_halves8

CHUNKS = BK // 8
"""Chunks of 16 bytes in a row of a k-tile."""
PASSES = BM * CHUNKS // THREADS
"""Chunks of A that a thread copies, and of B: of every 32nd row."""
DOWN = THREADS // CHUNKS
TILE = BM * BK
"""Elements of a k-tile of A, or of B."""
OUTSIDE = -(1 << 20)
"""A row of the image that no tap leads back from."""


@jit(device=True)
def swizzled(row, chunk):
    """Where in a k-tile (in elements) a chunk of a row lies: chunks change places by XOR, so that eight rows of one chunk have all 32 banks."""
    return row * BK + ((chunk ^ (row & 7)) << 3)


@jit(launch_bounds=(THREADS, BLOCKS))
def im2col_kernel(x, w, y, GM, H, W, C, P, Q, K, R, S, stride, top, left, across):
    """y[m,n] = Σ_k A[m,k]·B[n,k], A[m, (r,s,c)] = x[image, p·stride + r − top, q·stride + s − left, c], B[n, (r,s,c)] = w[n,c,r,s].

    gemm    GM = N·P·Q, GN = K, GK = R·S·C; y as words of two bfloat16.
    grid    ⌈GM/BM⌉·⌈K/BN⌉, block 256.
    owns    block 128 × 128 of y, warp 64 × 32, thread 2 columns of 8, every 8th row.
    shared  one k-tile of A and one of B, 32 KiB.
    moves   x R·S·⌈K/BN⌉ times and the filters once per block, mostly out of L2, through registers; y once.
    needs   compute capability 8.0; C a multiple of 64, K of 8.
    source  K. Chellapilla et al., "High Performance Convolutional Neural Networks for Document Processing" (2006); CUTLASS, "implicit GEMM".
    """
    As = cuda.shared.array(TILE, types.uint16, ALIGNMENT)
    Bs = cuda.shared.array(TILE, types.uint16, ALIGNMENT)
    t = cuda.threadIdx.x
    lane, warp = t & 31, t >> 5
    m0, n0 = cuda.blockIdx.x // across * BM, cuda.blockIdx.x % across * BN
    chunk, row = t % CHUNKS, t // CHUNKS
    images, rows, columns = cuda.local.array(PASSES, types.int32), cuda.local.array(PASSES, types.int32), cuda.local.array(PASSES, types.int32)
    for i in range(PASSES):
        m = m0 + row + i * DOWN
        image, rows[i], columns[i] = first_corner(m, P, Q, stride, top, left)
        images[i] = image * H
        if m >= GM:
            rows[i] = OUTSIDE
    acc = cuda.local.array(SUMS, f4)
    for i in range(SUMS):
        acc[i] = 0.0
    a = cuda.local.array((PASSES, 4), u4)
    b = cuda.local.array((PASSES, 4), u4)
    for tap in range(R * S):
        r, s = tap // S, tap % S
        for c in range(0, C, BK):
            # All loads first: a store waits for its load, and the loads behind it would wait with it.
            for i in range(PASSES):
                h, v = rows[i] + r, columns[i] + s
                inside = 0 <= h < H and 0 <= v < W
                a[i, 0], a[i, 1], a[i, 2], a[i, 3] = load_halves8_if(x, ((images[i] + h) * W + v) * C + c + 8 * chunk, inside)
                n = n0 + row + i * DOWN
                b[i, 0], b[i, 1], b[i, 2], b[i, 3] = load_halves8_if(w, (n * R * S + tap) * C + c + 8 * chunk, n < K)
            for i in range(PASSES):
                at = swizzled(row + i * DOWN, chunk)
                shared_store_halves8(As, at, a[i, 0], a[i, 1], a[i, 2], a[i, 3])
                shared_store_halves8(Bs, at, b[i, 0], b[i, 1], b[i, 2], b[i, 3])
            cuda.syncthreads()
            multiply(acc, shared_address(As), shared_address(Bs), warp, lane)
            cuda.syncthreads()
    store_sums(acc, y, m0, n0, warp, lane, GM, K)


def bind(call: Call) -> list[Launch]:
    """x (N,H,W,C), filters (K,R,S,C) -> y (N,P,Q,K)."""
    g = correlation(call)
    found = (g.GM, g.H, g.W, g.C, g.P, g.Q, g.K, g.R, g.S, g.stride, g.top, g.left, ceil_div(g.K, BN))
    args = (call.ins[0], call.packed, words(call.outs[0]), *(np.int32(value) for value in found))
    return [Launch(im2col_kernel, blocks(g), THREADS, args)]


IMPL = step(bind)
