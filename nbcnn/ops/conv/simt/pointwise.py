"""Convolutions with 1×1 filters on CUDA cores, and linear layers, which are these on images of one pixel (row `cudacore`, fp32, NHWC).

    y[m][n] = f(Σ_k x[m][k] · w[n][k] + b[n])        GM, GN, GK = NPQ, K, C; f: an activation, or none

Both factors have their rows along the sum, as in any product a·bᵀ (`nbcnn.ops.products.gemm` launches this kernel, too): w is read as it is stored,
so that nothing is packed before every plan, and the loader of whole k-tiles leaves 1,137 instructions for 1,024 FFMA where the gathering one has
1,180.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.gpu.target import Target
from nbcnn.ops.activations.table import epilogue_function
from nbcnn.ops.conv.frame.split import launch_sum_partials, sum_partials_traffic
from nbcnn.ops.conv.simt.few_rows import extents, refusal
from nbcnn.ops.conv.simt.loaders import gather_rows, whole_rows
from nbcnn.ops.conv.simt.register_tile import Loader, block_corner, block_part, matrix_product, shared_floats, store_tile
from nbcnn.ops.conv.simt.tiles import Product, Tile, choices
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.loops import ALIGNMENT, ceil_div
from nbcnn.ops.kernel.refusals import too_large
from nbcnn.ops.kernel.tiles import partial_bytes, unsplit
from nbcnn.ops.kernel.traffic import Traffic, clipped
from nbcnn.plan.op import Map, Op

TILE = Tile(128, 128, 16, 8, 8)
"""For K a multiple of 16."""
RAGGED_TILE = Tile(64, 64, 16, 4, 4)
"""For any K."""


@functools.cache
def gemm_nt_kernel_for(tile: Tile, vector: int, whole_tiles: bool, vector_out: bool, bias: bool = False, after: Any = None) -> Any:
    def rows(side: int) -> Loader:
        return whole_rows(tile, side) if whole_tiles else gather_rows(tile, side, 1, 1, 1, 1, vector, False)

    A, B = rows(tile.BM), rows(tile.BN)
    product, store = matrix_product(tile, A, B), store_tile(tile, vector_out, bias, after)
    corner, part = block_corner(tile), block_part(tile)
    ACC, FLOATS_A, FLOATS_B, MEMORY = tile.TM * tile.TN, A.floats, B.floats, shared_floats(tile, A, B)

    @jit(launch_bounds=(tile.threads, tile.blocks_per_multiprocessor))
    def gemm_nt_kernel(a, b, shift, c, M, N, K, k_tiles):
        """c[m][n] = f(Σ_k a[m][k] · b[n][k] + shift[n]); without a bias and an activation the sum alone.

        gemm: GM, GN, GK = M, N, K. grid: (tiles of BM×BN, parts of k_tiles·BK); owns: per block BM×BN, per thread TM×TN.
        shared: 2·BK·(BM + BN + 8)·4 bytes; moves per block: 4·(K + BK)·(BM + BN) + 4·BM·BN bytes.
        """
        m0, n0 = corner(N)
        first, last = part(K, k_tiles)
        shared = cuda.shared.array(MEMORY, f4, ALIGNMENT)
        acc = cuda.local.array(ACC, f4)
        stage_a = cuda.local.array(FLOATS_A, f4)
        stage_b = cuda.local.array(FLOATS_B, f4)
        one, none = 1, 0
        rows_a = (M, K, one, one, one, one, none, none)
        rows_b = (N, K, one, one, one, one, none, none)
        product(acc, stage_a, stage_b, shared, a, b, rows_a, rows_b, m0, n0, first, last)
        store(acc, c, m0, n0, M, N, cuda.blockIdx.y, (shift, c, none, one))

    return gemm_nt_kernel


def launch_gemm_nt(
    a: Any, b: Any, c: Any, M: int, N: int, K: int, tile: Tile | None = None, shift: Any = None, after: Any = None, name: str = "gemm_nt"
) -> Launch:
    """Launch of c = f(a·bᵀ + shift) on flat float32 arrays that start at 16-byte addresses: a (M,K), b (N,K), shift None or (N), c (M,N).

    a and b must have fewer than 2³¹ elements each; c may have more. With a split tile c is `tile.split` partial results.
    """
    if tile is None:
        tile = TILE if K % TILE.BK == 0 else RAGGED_TILE
    kernel = gemm_nt_kernel_for(unsplit(tile), 4 if K % 4 == 0 else 1, K % tile.BK == 0, N % 4 == 0, shift is not None, after)
    sizes = (np.int32(size) for size in (M, N, K, tile.k_tiles(K)))
    return Launch(kernel, tile.grid(M, N), tile.threads, (a, b, c if shift is None else shift, c, *sizes), name=name)


def product_traffic(tile: Tile, M: int, N: int, K: int) -> list[Traffic]:
    """Bytes of the launches: a once per column of tiles, b once per row of tiles; `whole_rows` reads more, again, where a tile or a part ends."""
    down, across, whole = ceil_div(M, tile.BM), ceil_div(N, tile.BN), K % tile.BK == 0
    rows, columns = (down * tile.BM, across * tile.BN) if whole else (clipped(M, tile.BM), clipped(N, tile.BN))
    read = 4 * (K + whole * tile.split * tile.BK) * (rows * across + columns * down)
    product = Traffic(read, 4 * M * N * tile.split, 4 * K * (M + N))
    return [product] if tile.split == 1 else [product, sum_partials_traffic(M * N, tile.split, False)]


def supports(call: Call, target: Target) -> str | None:
    """None, or the reason in words."""
    return refusal(call) or too_large(*call.in_shapes, *call.out_shapes)


def bind(call: Call) -> list[Launch]:
    """x (N,C,H,W), w (K,C,1,1)[, b (K)] -> y (N,K,H,W): the product, and if its sum is split the sum of its parts."""
    (M, N, K), tile, y, after = extents(call), call.tile, call.outs[0], epilogue_function(call)
    x, w, *rest = call.ins
    b = rest[0] if rest else None
    if tile.split == 1:
        return [launch_gemm_nt(x, w, y, M, N, K, tile, b, after, str(call.op))]
    parts = call.scratch[: scratch(call)].view(np.float32)
    return [launch_gemm_nt(x, w, parts, M, N, K, tile, name=str(call.op)), launch_sum_partials(parts, b, y, M * N, N, tile.split, after)]


def scratch(call: Call) -> int:
    """Bytes of the parts of a split sum."""
    M, N, _ = extents(call)
    return partial_bytes(call.tile.split, M * N)


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`."""
    return product_traffic(call.tile, *extents(call))


_IMPL = Impl(bind, scratch, supports, **choices(lambda call: Product(*extents(call), extents(call)[2] % 16 == 0), traffic, "pointwise"))
OPS = {Op("conv", "fprop"): _IMPL, Op("conv", "fprop", after=(Map("relu"),)): _IMPL}
"""Forward convolutions with 1×1 filters of row `cudacore`."""
