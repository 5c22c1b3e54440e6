"""The matrix products of a transformed convolution, one for each position of a tile, in one launch: register_tile.py with a third grid axis."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.conv.simt.im2col_wgrad import column_sums, with_sums
from nbcnn.ops.conv.simt.loaders import gather_rows, matrix
from nbcnn.ops.conv.simt.register_tile import block_corner, block_part, matrix_product, shared_floats, store_tile
from nbcnn.ops.conv.simt.split_fused import launch_exchanged, sum_exchanged
from nbcnn.ops.conv.simt.tiles import Tile
from nbcnn.ops.conv.winograd.transform import filter_of_values
from nbcnn.ops.kernel.call import Launch
from nbcnn.ops.kernel.loops import ALIGNMENT, ceil_div, quotient
from nbcnn.ops.kernel.tiles import unsplit
from nbcnn.ops.kernel.traffic import Traffic, clipped

VALUES = 16
"""Points of a weight gradient."""


@functools.cache
def rows_product(tile: Tile, positions: int) -> Any:
    A = gather_rows(tile, tile.BM, 1, 1, 1, 1, 4, True)
    B = matrix(tile, tile.BN, 4, True)
    product, store, corner, part = matrix_product(tile, A, B), store_tile(tile, True), block_corner(tile), block_part(tile)
    ACC, FLOATS_A, FLOATS_B, MEMORY = tile.TM * tile.TN, A.floats, B.floats, shared_floats(tile, A, B)

    @jit(launch_bounds=(tile.threads, tile.blocks_per_multiprocessor))
    def winograd_rows_kernel(v, u, m, tiles, K, C, k_tiles):
        """m[position][t][k] = Σ_c v[position][t][c] · u[c][position][k].

        gemm: GM, GN, GK = tiles, K, C, as often as there are positions. grid: (tiles of BM×BN, 1, positions); owns: per block BM×BN, per thread
        TM×TN.
        shared: 2·BK·(BM + 4 + BN)·4 bytes; moves per block: 4·C·(BM + BN) + 4·BM·BN bytes.
        """
        position = cuda.blockIdx.z
        m0, n0 = corner(K)
        first, last = part(C, k_tiles)
        shared = cuda.shared.array(MEMORY, f4, ALIGNMENT)
        acc = cuda.local.array(ACC, f4)
        stage_a = cuda.local.array(FLOATS_A, f4)
        stage_b = cuda.local.array(FLOATS_B, f4)
        one, none, before = 1, 0, position * tiles
        # One matrix of positions·tiles rows, one of positions·K columns. Beyond its position's last row or column a block reads the next
        # position's, and stores nothing of what that gives.
        rows = (positions * tiles, C, one, one, one, one, none, none)
        product(acc, stage_a, stage_b, shared, v, u, rows, (C, positions * K), before + m0, position * K + n0, first, last)
        store(acc, m, m0, n0, tiles, K, position, (m, m, none, one))

    return winograd_rows_kernel


@functools.cache
def columns_product(tile: Tile) -> Any:
    A, plain = matrix(tile, tile.BM, 4, True), matrix(tile, tile.BN, 4, True)
    B = with_sums(plain, 4)
    product, store, corner, part = matrix_product(tile, A, B), store_tile(tile, True), block_corner(tile), block_part(tile)
    ACC, FLOATS_A, FLOATS_B, MEMORY = tile.TM * tile.TN, A.floats, B.floats, shared_floats(tile, A, B)
    SUMS, BK, ACROSS = plain.floats, tile.BK, tile.BN // 4
    reduce_columns = column_sums(tile.BN, 4, SUMS, ACROSS, tile.threads // ACROSS)

    @jit(launch_bounds=(tile.threads, tile.blocks_per_multiprocessor))
    def winograd_columns_kernel(v, g, dm, db, tiles, C, K, plane0, k_tiles):
        """dm[z][position][c][k] = Σ_t v[position][t][c] · g[position][t][k], db[z][position][k] = Σ_t g[position][t][k], t over part z of the tiles.

        gemm: GM, GN, GK = C, K, tiles, 16 times. grid: (tiles of BM×BN, parts, 16); owns: per block BM×BN, per thread TM×TN.
        shared: 2·BK·(BM + BN)·4 bytes; moves per block: 4·tiles/parts·(BM + BN) + 4·BM·BN bytes. BK divides tiles.
        """
        position = cuda.blockIdx.z
        plane = (plane0 + cuda.blockIdx.y) * VALUES + position
        m0, n0 = corner(K)
        first, last = part(tiles, k_tiles)
        before = position * quotient(tiles, BK)
        shared = cuda.shared.array(MEMORY, f4, ALIGNMENT)
        acc = cuda.local.array(ACC, f4)
        stage_a = cuda.local.array(FLOATS_A, f4)
        stage_b = cuda.local.array(FLOATS_B, f4)
        for q in range(4):
            stage_b[SUMS + q] = 0.0
        rows = VALUES * tiles
        product(acc, stage_a, stage_b, shared, v, g, (rows, C), (rows, K), m0, n0, before + first, before + last)
        store(acc, dm, m0, n0, C, K, plane, (dm, dm, 0, 1))
        if m0 == 0:
            reduce_columns(stage_b, shared, db, n0, K, plane)

    return winograd_columns_kernel


def launch_rows(v: Any, u: Any, m: Any, positions: int, tiles: int, K: int, C: int, tile: Tile) -> Launch:
    """Launch of `winograd_rows_kernel`."""
    grid = (tile.grid(tiles, K)[0], 1, positions)
    return Launch(rows_product(unsplit(tile), positions), grid, tile.threads, (v, u, m, *(np.int32(n) for n in (tiles, K, C, tile.k_tiles(C)))))


def launch_columns(v: Any, g: Any, dm: Any, db: Any, tiles: int, C: int, K: int, plane0: int, tile: Tile) -> Launch:
    """Launch of `winograd_columns_kernel`, `tile.split` parts, which become the planes from `plane0` on."""
    sizes = (np.int32(n) for n in (tiles, C, K, plane0, tile.k_tiles(tiles)))
    return Launch(columns_product(unsplit(tile)), (*tile.grid(C, K), VALUES), tile.threads, (v, g, dm, db, *sizes))


def rows_traffic(positions: int, tiles: int, K: int, C: int, tile: Tile) -> Traffic:
    """Bytes of `launch_rows`: beyond a position's last row or column a block reads on into the next position's."""
    rows, columns = clipped(tiles, tile.BM, positions) * ceil_div(K, tile.BN), clipped(K, tile.BN, positions) * ceil_div(tiles, tile.BM)
    return Traffic(4 * C * (rows + columns), 4 * positions * tiles * K, 4 * positions * C * (tiles + K))


def columns_traffic(tiles: int, C: int, K: int, tile: Tile) -> Traffic:
    """Bytes of `launch_columns`."""
    read = C * ceil_div(K, tile.BN) + K * ceil_div(C, tile.BM)
    return Traffic(4 * VALUES * tiles * read, 4 * VALUES * tile.split * (C * K + K), 4 * VALUES * tiles * (C + K))


def launch_sum_winograd(partials: Any, partials_b: Any, dw: Any, db: Any, K: int, C: int, planes: int) -> list[Launch]:
    """dw[k][c] = Gᵀ (Σ_z partials[z][·][c][k]) G of 16 Winograd-domain values, db[k] = Σ_z partials_b[z][1,1][k] unless db is None;
    partials are overwritten."""
    return launch_exchanged(sum_exchanged(16, True, filter_of_values, 5), 16, partials, partials_b, dw, db, K, C, planes)
