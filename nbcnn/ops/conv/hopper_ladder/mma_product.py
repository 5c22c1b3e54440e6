"""The product of steps 1 … 3: fragments of a k-tile by `ldmatrix`, products by `mma.sync`, sums written from registers.

Eight warps share the tile as 2 × 4: each has 64 rows and 32 columns, four fragments of 16 rows by four of 8 columns. Rows of the k-tile have
128 bytes, swizzled: chunk c (16 bytes) of row i lies at c ^ (i mod 8). In the simulator a thread computes its own sums with NumPy.
"""

from __future__ import annotations

import numpy as np

from nbcnn.gpu.language import NUMBA_SIMULATOR, cuda, jit, u4
from nbcnn.ops.conv.hopper_ladder.parts import BK, BM
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES
from nbcnn.ops.ptx.asm import byte_address_shared
from nbcnn.ops.ptx.cvt import bf16x2
from nbcnn.ops.ptx.ldmatrix import ldmatrix_x4
from nbcnn.ops.ptx.mma import mma_bf16

MI, NI = 4, 4
"""Fragments of a warp: down, 16 rows each, and across, 8 columns each."""
ROWS, COLUMNS = 16 * MI, 8 * NI
WORDS_B = 2 * NI

if NUMBA_SIMULATOR:

    @jit(device=True)
    def shared_address(array):
        return array

    @jit(device=True)
    def multiply(acc, a, b, warp, lane):
        eighths = np.arange(BM)[:, None], np.arange(BK // 8) ^ (np.arange(BM)[:, None] & 7)
        left, right = ((tile.reshape(BM, -1, 8)[eighths].reshape(BM, BK).astype(np.uint32) << 16).view(np.float32) for tile in (a, b))
        rows = (warp & 1) * ROWS + (lane >> 2) + 8 * np.arange(2 * MI)
        columns = (warp >> 1) * COLUMNS + 2 * (lane & 3) + (8 * np.arange(NI)[:, None] + np.arange(2)).reshape(-1)
        sums = (left[rows] @ right[columns].T).reshape(MI, 2, NI, 2)
        acc[:] += sums.transpose(0, 2, 1, 3).reshape(-1)
else:
    shared_address = byte_address_shared

    @jit(device=True)
    def multiply(acc, a, b, warp, lane):
        """acc += A·Bᵀ of the k-tiles at shared addresses a and b.

        One `ldmatrix` brings 16 rows × 16 k of A, or 16 columns × 16 k of B: lanes give the addresses of rows, chunk by chunk.
        """
        fb = cuda.local.array(WORDS_B, u4)
        row_a = a + ((warp & 1) * ROWS + (lane & 15)) * ROW_BYTES
        row_b = b + ((warp >> 1) * COLUMNS + (lane & 7) + ((lane >> 4) << 3)) * ROW_BYTES
        chunk_a, chunk_b = (lane >> 4) ^ (lane & 7), ((lane >> 3) & 1) ^ (lane & 7)
        for k in range(BK // 16):
            # 16 further k are two chunks: with the swizzle, one XOR.
            at_a, at_b = row_a + ((chunk_a ^ (2 * k)) << 4), row_b + ((chunk_b ^ (2 * k)) << 4)
            for j in range(NI // 2):
                fb[4 * j], fb[4 * j + 1], fb[4 * j + 2], fb[4 * j + 3] = ldmatrix_x4(at_b + 16 * ROW_BYTES * j)
            for i in range(MI):
                a0, a1, a2, a3 = ldmatrix_x4(at_a + 16 * ROW_BYTES * i)
                for j in range(NI):
                    o = (i * NI + j) * 4
                    acc[o], acc[o + 1], acc[o + 2], acc[o + 3] = mma_bf16(
                        a0, a1, a2, a3, fb[2 * j], fb[2 * j + 1], acc[o], acc[o + 1], acc[o + 2], acc[o + 3]
                    )


@jit(device=True)
def store_sums(acc, y, m0, n0, warp, lane, GM, K):
    """The sums, rounded to bfloat16, to y (GM, K) as words of two: four lanes write 16 bytes of a row, a warp eight rows at a time."""
    row = m0 + (warp & 1) * ROWS + (lane >> 2)
    column = n0 + (warp >> 1) * COLUMNS + 2 * (lane & 3)
    for i in range(MI):
        for j in range(NI):
            for h in range(2):
                m, n, o = row + 16 * i + 8 * h, column + 8 * j, (i * NI + j) * 4 + 2 * h
                if m < GM and n < K:
                    y[(m * K + n) >> 1] = bf16x2(acc[o], acc[o + 1])
