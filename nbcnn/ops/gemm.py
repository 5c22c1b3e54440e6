"""Plain matrix product on CUDA cores: c = a·bᵀ, fp32, with a and b row-major and their rows along the summed axis.

This is what a Gram matrix is (`b` is `a`), and the register-tiled product of the convolutions without a convolution: a
1×1 "image" per row.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.cuda import cuda, f4, i4, jit
from nbcnn.ops.call import Launch
from nbcnn.ops.conv.loaders import gather_rows
from nbcnn.ops.conv.register_tile import ALIGNMENT, block_corner, block_part, matrix_product, shared_floats, store_tile
from nbcnn.ops.conv.tiles import Tile

TILE = Tile(128, 128, 16, 8, 8)
"""For K a multiple of 16."""
RAGGED_TILE = Tile(64, 64, 16, 4, 4)
"""For any K."""


def gemm_nt(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """c = a·bᵀ: a (M,K), b (N,K), c (M,N)."""
    np.matmul(a, b.T, out=c)


@functools.cache
def gemm_nt_kernel_for(tile: Tile, vector: int, whole_tiles: bool, vector_out: bool) -> Any:
    A = gather_rows(tile, tile.BM, 1, 1, 1, 1, vector, whole_tiles)
    B = gather_rows(tile, tile.BN, 1, 1, 1, 1, vector, whole_tiles)
    product, store = matrix_product(tile, A, B), store_tile(tile, vector_out)
    corner, part = block_corner(tile), block_part(tile)
    ACC, FLOATS_A, FLOATS_B, MEMORY = tile.TM * tile.TN, A.floats, B.floats, shared_floats(tile, A, B)

    @jit(launch_bounds=(tile.threads, tile.blocks_per_multiprocessor))
    def gemm_nt_kernel(a, b, c, M, N, K, k_tiles):
        """c[m][n] = Σ_k a[m][k] · b[n][k].

        gemm: GM, GN, GK = M, N, K. grid: tiles of BM×BN; owns: a block BM×BN, a thread TM×TN.
        shared: 2·BK·(BM + BN + 8)·4 bytes; moves per block: 4·K·(BM + BN) + 4·BM·BN bytes.
        """
        m0, n0 = corner(N)
        first, last = part(K, k_tiles)
        shared = cuda.shared.array(MEMORY, f4, ALIGNMENT)
        acc = cuda.local.array(ACC, f4)
        stage_a = cuda.local.array(FLOATS_A, f4)
        stage_b = cuda.local.array(FLOATS_B, f4)
        one, none = i4(1), i4(0)
        rows_a = (M, K, one, one, one, one, none, none)
        rows_b = (N, K, one, one, one, one, none, none)
        product(acc, stage_a, stage_b, shared, a, b, rows_a, rows_b, m0, n0, first, last)
        store(acc, c, m0, n0, M, N, none, (c, c, none, one))

    return gemm_nt_kernel


def launch_gemm_nt(a: Any, b: Any, c: Any, M: int, N: int, K: int, tile: Tile | None = None) -> Launch:
    """Launch of c = a·bᵀ on flat float32 arrays that start at 16-byte addresses: a (M,K), b (N,K), c (M,N), any M, N, K.

    a and b must have fewer than 2³¹ elements each; c may have more.
    """
    if tile is None:
        tile = TILE if K % TILE.BK == 0 else RAGGED_TILE
    kernel = gemm_nt_kernel_for(tile, 4 if K % 4 == 0 else 1, K % tile.BK == 0, N % 4 == 0)
    sizes = (M, N, K, tile.k_tiles(K))
    return Launch(kernel, tile.grid(M, N)[0], tile.threads, (a, b, c, *(np.int32(size) for size in sizes)), name="gemm_nt")
