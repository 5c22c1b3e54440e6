"""Pointwise convolution of series with GLU in its epilogue, and what is added to the gated series (row `cudacore`, fp32):

    z[n][k][l] = Σ_c w[k][c] · x[n][c][l] + b[k],   k < 2C';     y[n][c][l] = z[n][c][l] · σ(z[n][C'+c][l]) (+ r[n][c][l])

The product is that of pwconv1d_direct.py with its channels in another order: a block's first half are channels p, its second half the
channels q that gate them. A thread of eight rows owns four of each, BM/2 apart, so it has p and q of the same hour in its registers.
In training z is stored for glu_dgrad, in inference it is not. Against three ops this saves 8·C'NL bytes of reading z, and of y
12·C'NL of writing it and reading it again to add r.

Source: as conv/simt/register_tile.py; GLU as glu.py.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.gpu.target import Target
from nbcnn.ops.activations.sigmoid import both_sides
from nbcnn.ops.conv.simt.loaders import matrix
from nbcnn.ops.conv.simt.register_tile import block_part, matrix_product, shared_floats, thread_corner
from nbcnn.ops.conv.simt.tiles import Tile
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.loops import ALIGNMENT, ceil_div, quotient
from nbcnn.ops.kernel.tiles import unsplit
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.ops.ptx.vector import load4, store4
from nbcnn.ops.series import pwconv1d_direct
from nbcnn.ops.series.loaders import series_columns
from nbcnn.plan.op import Map, Op

ROWS = 8
"""TM of the tiles that have p and q in one thread."""


@functools.cache
def store_gated(tile: Tile, keep: bool, plus: bool) -> Any:
    """Device function (acc, y, z, r, b, m0, n0, C, GN, L): y and, if `keep`, z of the thread's channels and hours; `plus` adds r to y."""
    TN, PB = tile.TN, tile.TN // 4
    across = tile.BN // PB
    corner = thread_corner(tile)

    @jit(device=True)
    def store(acc, y, z, r, b, m0, n0, C, GN, L):
        row, column = corner()
        first = m0 // 2 + row
        shift = cuda.local.array(ROWS, f4)
        added = cuda.local.array(16, f4)
        for i in range(4):
            channel = first + i
            shift[i] = b[channel] if channel < C else 0.0
            shift[4 + i] = b[C + channel] if channel < C else 0.0
        for j in range(PB):
            n = n0 + column + j * across
            series = quotient(n, L)
            hour = n - series * L
            at_y = (series * C + first) * L + hour
            at_z = (series * 2 * C + first) * L + hour
            if plus:
                # All loads before the first store: behind a store, each would wait for the one before.
                for i in range(4):
                    if first + i < C and n < GN:
                        v = load4(r, at_y + i * L)
                        added[4 * i], added[4 * i + 1], added[4 * i + 2], added[4 * i + 3] = v[0], v[1], v[2], v[3]
            for i in range(4):
                if first + i < C and n < GN:
                    values = cuda.local.array(4, f4)
                    p, q = i * TN + 4 * j, (4 + i) * TN + 4 * j
                    for e in range(4):
                        acc[p + e] += shift[i]
                        acc[q + e] += shift[4 + i]
                        gate, _ = both_sides(acc[q + e])
                        values[e] = acc[p + e] * gate
                        if plus:
                            values[e] += added[4 * i + e]
                    store4(y, at_y + i * L, values[0], values[1], values[2], values[3])
                    if keep:
                        store4(z, at_z + i * L, acc[p], acc[p + 1], acc[p + 2], acc[p + 3])
                        store4(z, at_z + (C + i) * L, acc[q], acc[q + 1], acc[q + 2], acc[q + 3])

    return store


@functools.cache
def gated_product(tile: Tile, whole_tiles: bool, keep: bool, plus: bool) -> Any:
    A, B = matrix(tile, tile.BM, 4, whole_tiles), series_columns(tile, tile.BN, whole_tiles)
    product, store, part = matrix_product(tile, A, B), store_gated(tile, keep, plus), block_part(tile)
    BM, BN, ACC, FLOATS_A, FLOATS_B, MEMORY = tile.BM, tile.BN, tile.TM * tile.TN, A.floats, B.floats, shared_floats(tile, A, B)

    @jit(launch_bounds=(tile.threads, tile.blocks_per_multiprocessor))
    def gated_product_kernel(w, x, b, r, y, z, C, GM, GN, GK, L, k_tiles):
        """y[n // L][c][n % L] = p·σ(q) (+ r), and z of the 2C channels: p of channel c, q of channel C + c of Σ_k w[k][m] · x[n // L][k][n % L] + b.

        gemm: GM rows of w, whole tiles of BM/2 channels p and their BM/2 channels q; GN = N·L hours; GK channels summed.
        grid: tiles of BM×BN, those of the same hours one behind the other; owns: per block BM/2 channels and BN hours, per thread 4·TN of them.
        shared: 2·BK·(BM + BN)·4 bytes; moves per block: 4·GK·(BM + BN) + 2·BM·BN bytes of y, as many of r, 4·BM·BN of z.
        needs: L a multiple of 4.
        """
        tiles_m = quotient(GM, BM)
        tile_n = quotient(cuda.blockIdx.x, tiles_m)
        m0, n0 = (cuda.blockIdx.x - tile_n * tiles_m) * BM, tile_n * BN
        first, last = part(GK, k_tiles)
        shared = cuda.shared.array(MEMORY, f4, ALIGNMENT)
        acc = cuda.local.array(ACC, f4)
        stage_a = cuda.local.array(FLOATS_A, f4)
        stage_b = cuda.local.array(FLOATS_B, f4)
        product(acc, stage_a, stage_b, shared, w, x, (GK, GM), (GK, GN, L), m0, n0, first, last)
        store(acc, y, z, r, b, m0, n0, C, GN, L)

    return gated_product_kernel


def extents(call: Call) -> tuple[int, int, int]:
    """Rows of w in whole tiles (of 2C' if the tile is not chosen yet), hours, channels summed."""
    (n, summed, length), channels = call.in_shapes[0], call.out_shapes[0][1]
    rows = 2 * channels if call.tile is None else ceil_div(channels, call.tile.BM // 2) * call.tile.BM
    return rows, n * length, summed


def bind(call: Call) -> list[Launch]:
    """x, w, b[, r] -> y[, z]. One launch."""
    (GM, GN, GK), tile, (x, _, b, *rest), (y, *kept) = extents(call), call.tile, call.ins, call.outs
    _, C, L = call.out_shapes[0]
    kernel = gated_product(unsplit(tile), GK % tile.BK == 0, bool(kept), bool(rest))
    sizes = map(np.int32, (C, GM, GN, GK, L, tile.k_tiles(GK)))
    arrays = (call.packed, x, b, rest[0] if rest else x, y, kept[0] if kept else y)
    return [Launch(kernel, tile.grid(GM, GN), tile.threads, (*arrays, *sizes), name=call.op)]


def candidates(call: Call, target: Target) -> list[Tile]:
    """The tiles whose threads have both halves, the least estimated time first."""
    return [tile for tile in pwconv1d_direct.hours_tiles(*extents(call), target) if tile.TM == ROWS]


def pack(call: Call) -> np.ndarray:
    """w (2C',C) with the channels summed down its rows: tile by tile BM/2 columns of p and their BM/2 columns of q."""
    K, C = call.in_shapes[1]
    half = call.tile.BM // 2
    channel = np.arange(-(-K // 2 // half) * half).reshape(-1, 1, half)
    rows = np.where(channel < K // 2, channel + np.array([[0], [K // 2]]), -1).reshape(-1)
    return np.where(rows >= 0, rows * C + np.arange(C)[:, None], -1).astype(np.int32).reshape(-1)


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`."""
    (GM, GN, GK), tile, C = extents(call), call.tile, call.out_shapes[0][1]
    added = 4 * C * GN * (len(call.in_shapes) == 4)
    read = 4 * GK * (GN * ceil_div(GM, tile.BM) + GM * ceil_div(GN, tile.BN)) + added
    return [Traffic(read, 4 * C * GN * (1 if len(call.out_shapes) == 1 else 3), 4 * GK * (GN + GM) + added)]


OPS: dict[Op, Impl] = {
    Op("pwconv1d", "fprop", after=(Map("glu"),)): Impl(
        bind,
        supports=pwconv1d_direct.supports_hours,
        tile=lambda call, target: candidates(call, target)[0],
        pack=pack,
        candidates=candidates,
        traffic=traffic,
    )
}
