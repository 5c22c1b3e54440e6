"""Pointwise convolution of series on CUDA cores (row `cudacore`, fp32), straight from (N,C,L): no transpose before or behind it.

    fprop  y[n][k][l]  = Σ_c w[k][c] · x[n][c][l] (+ b[k])        GM, GN, GK = K, NL, C
    dgrad  dx[n][c][l] = Σ_k w[k][c] · dy[n][k][l]                GM, GN, GK = C, NL, K
    wgrad  dw[k][c]    = Σ_(n,l) dy[n][k][l] · x[n][c][l]         GM, GN, GK = K, C, NL        db[k] = Σ_(n,l) dy[n][k][l]

fprop and dgrad are products whose columns are the hours of all series: a row of the right factor is a channel, and lies in memory in
pieces of L. wgrad sums along the hours of two tables of channels. Multiplying is no business of a series: conv/simt/register_tile.py. A
weight gradient has few tiles and a long sum, which is cut into as many parts as the GPU holds blocks at once; they are added in order
by conv/frame/split.py.

Transposing series into images and back, as pwconv1d.py does, moves 2·(C + K)·NL floats more in every pass: with 128 → 256 channels of
16,384·48 hours 2.4 GB, which take as long as half of the products.

Source: as conv/simt/register_tile.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i8, jit
from nbcnn.gpu.target import Target
from nbcnn.ops.conv.frame.split import launch_sum_filters, sum_filters_traffic
from nbcnn.ops.conv.simt import im2col
from nbcnn.ops.conv.simt.im2col import padded
from nbcnn.ops.conv.simt.im2col_wgrad import with_sums
from nbcnn.ops.conv.simt.loaders import matrix
from nbcnn.ops.conv.simt.register_tile import block_corner, block_part, matrix_product, shared_floats, store_tile, thread_corner
from nbcnn.ops.conv.simt.tiles import EFFICIENCY, Product, Tile, cycles, ranked
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.loops import ALIGNMENT, ceil_div, quotient
from nbcnn.ops.kernel.refusals import too_large
from nbcnn.ops.kernel.tiles import unsplit
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.ops.ptx.vector import store4
from nbcnn.ops.series.loaders import series_columns, series_rows
from nbcnn.ops.series.pwconv1d import as_convolution
from nbcnn.plan.op import Op

ALONG = 4
"""fprop and dgrad move so many hours at a time: L is a multiple of it."""
WHOLE = 16
"""L is a multiple of a k-tile in wgrad."""


@functools.cache
def store_series(tile: Tile, bias: bool) -> Any:
    """Device function (acc, out, b, m0, n0, GM, GN, L): out[n // L][m][n % L] = acc (+ b[m]) for the thread's outputs inside GM×GN."""
    TM, TN, PA, PB = tile.TM, tile.TN, tile.TM // 4, tile.TN // 4
    down, across = tile.BM // PA, tile.BN // PB
    corner = thread_corner(tile)

    @jit(device=True)
    def store(acc, out, b, m0, n0, GM, GN, L):
        row, column = corner()
        shift = cuda.local.array(TM, f4)
        for i in range(TM):
            m = m0 + row + (i // 4 * down + i % 4)
            shift[i] = 0.0
            if bias and m < GM:
                shift[i] = b[m]
        for j in range(PB):
            n = n0 + column + j * across
            series = quotient(n, L)
            begin = series * GM * L + n - series * L
            for i in range(TM):
                m = m0 + row + (i // 4 * down + i % 4)
                if m < GM and n < GN:
                    p = i * TN + j * 4
                    at = begin + m * L
                    store4(out, at, acc[p] + shift[i], acc[p + 1] + shift[i], acc[p + 2] + shift[i], acc[p + 3] + shift[i])

    return store


@functools.cache
def hours_product(tile: Tile, whole_tiles: bool, bias: bool) -> Any:
    A, B = matrix(tile, tile.BM, 4, whole_tiles), series_columns(tile, tile.BN, whole_tiles)
    product, store, part = matrix_product(tile, A, B), store_series(tile, bias), block_part(tile)
    BM, BN, ACC, FLOATS_A, FLOATS_B, MEMORY = tile.BM, tile.BN, tile.TM * tile.TN, A.floats, B.floats, shared_floats(tile, A, B)

    @jit(launch_bounds=(tile.threads, tile.blocks_per_multiprocessor))
    def hours_product_kernel(w, x, b, y, GM, GN, GK, pitch, L, k_tiles):
        """y[n // L][m][n % L] = Σ_k w[k][m] · x[n // L][k][n % L] (+ b[m]).

        gemm: GM channels made, GN = N·L hours, GK channels summed; w has rows of `pitch` floats (GM rounded up to 4).
        grid: tiles of BM×BN, those of the same hours one behind the other; owns: per block BM×BN, per thread TM×TN.
        shared: 2·BK·(BM + BN)·4 bytes; moves per block: 4·GK·(BM + BN) + 4·BM·BN bytes. needs: L a multiple of 4.
        """
        tiles_m = quotient(GM + (BM - 1), BM)
        tile_n = quotient(cuda.blockIdx.x, tiles_m)
        m0, n0 = (cuda.blockIdx.x - tile_n * tiles_m) * BM, tile_n * BN
        first, last = part(GK, k_tiles)
        shared = cuda.shared.array(MEMORY, f4, ALIGNMENT)
        acc = cuda.local.array(ACC, f4)
        stage_a = cuda.local.array(FLOATS_A, f4)
        stage_b = cuda.local.array(FLOATS_B, f4)
        product(acc, stage_a, stage_b, shared, w, x, (GK, pitch), (GK, GN, L), m0, n0, first, last)
        store(acc, y, b, m0, n0, GM, GN, L)

    return hours_product_kernel


@functools.cache
def channels_product(tile: Tile, vector_out: bool, bias: bool) -> Any:
    plain, B = series_rows(tile, tile.BM), series_rows(tile, tile.BN)
    A = with_sums(plain, 1) if bias else plain
    product, store = matrix_product(tile, A, B), store_tile(tile, vector_out)
    corner, part = block_corner(tile), block_part(tile)
    BM, ACC, FLOATS_A, FLOATS_B, MEMORY = tile.BM, tile.TM * tile.TN, A.floats, B.floats, shared_floats(tile, A, B)
    SUM, LANES = plain.floats, tile.threads // tile.BM

    @jit(launch_bounds=(tile.threads, tile.blocks_per_multiprocessor))
    def channels_product_kernel(dy, x, dw, db, K, C, GK, L, k_tiles):
        """dw[z][k][c] = Σ_(n,l) dy[n][k][l] · x[n][c][l], db[z][k] = Σ_(n,l) dy[n][k][l], over part z of the GK = N·L hours.

        gemm: GM, GN = K, C. grid: (tiles of BM×BN, parts of k_tiles·BK hours); owns: per block BM×BN, per thread TM×TN.
        shared: 2·BK·(BM + BN + 8)·4 bytes; moves per block: 4·GK/parts·(BM + BN) + 4·BM·BN bytes. needs: L a multiple of BK.
        """
        m0, n0 = corner(C)
        first, last = part(GK, k_tiles)
        plane = cuda.blockIdx.y
        shared = cuda.shared.array(MEMORY, f4, ALIGNMENT)
        acc = cuda.local.array(ACC, f4)
        stage_a = cuda.local.array(FLOATS_A, f4)
        stage_b = cuda.local.array(FLOATS_B, f4)
        if bias:
            stage_a[SUM] = 0.0
        product(acc, stage_a, stage_b, shared, dy, x, (K, L), (C, L), m0, n0, first, last)
        store(acc, dw, m0, n0, K, C, plane, (dw, dw, 0, L))
        if bias and n0 == 0:
            # LANES neighbouring threads have parts of one channel's sum.
            tid = cuda.threadIdx.x
            shared[tid] = stage_a[SUM]
            cuda.syncthreads()
            if tid < BM and m0 + tid < K:
                total = 0.0
                for lane in range(LANES):
                    total += shared[tid * LANES + lane]
                db[i8(plane) * K + (m0 + tid)] = total

    return channels_product_kernel


def extents(call: Call) -> tuple[int, int, int]:
    """GM, GN, GK of a call."""
    if call.op.direction == "wgrad":
        (n, c, length), (_, k, _) = call.in_shapes
        return k, c, n * length
    (n, summed, length), (_, made, _) = call.in_shapes[0], call.out_shapes[0]
    return made, n * length, summed


def _length(call: Call) -> int:
    return call.in_shapes[0][2]


def bind(call: Call) -> list[Launch]:
    """fprop: x, w[, b] -> y; dgrad: dy, w -> dx. One launch."""
    (GM, GN, GK), tile = extents(call), call.tile
    x, b = call.ins[0], call.ins[2] if len(call.ins) == 3 else None
    kernel = hours_product(unsplit(tile), GK % tile.BK == 0, b is not None)
    sizes = map(np.int32, (GM, GN, GK, padded(GM), _length(call), tile.k_tiles(GK)))
    return [Launch(kernel, tile.grid(GM, GN), tile.threads, (call.packed, x, x if b is None else b, *call.outs, *sizes), name=call.op)]


def bind_wgrad(call: Call) -> list[Launch]:
    """x, dy -> dw[, db]: the parts of the product, and their sum."""
    (GM, GN, GK), tile, (x, dy) = extents(call), call.tile, call.ins
    dw, db = call.outs[0], call.outs[1] if len(call.outs) == 2 else None
    parts = call.scratch.view(np.float32)
    parts_b = parts[tile.split * GM * GN :]
    sizes = map(np.int32, (GM, GN, GK, _length(call), tile.k_tiles(GK)))
    kernel = channels_product(unsplit(tile), GN % 4 == 0, db is not None)
    product = Launch(kernel, tile.grid(GM, GN), tile.threads, (dy, x, parts, parts_b, *sizes), name=call.op)
    return [product, launch_sum_filters(parts, parts_b, dw, db, GM, GN, 1, tile.split)]


def scratch_wgrad(call: Call) -> int:
    """Bytes of the parts of dw, and those of db behind them."""
    GM, GN, _ = extents(call)
    return 4 * call.tile.split * (GM * GN + GM)


def _refusal(call: Call, multiple: int) -> str | None:
    if _length(call) % multiple:
        return f"series of {_length(call)} are no multiple of {multiple}"
    return too_large(*call.in_shapes, *call.out_shapes, what="a tensor of series")


def supports_hours(call: Call, target: Target) -> str | None:
    """None, or the reason in words."""
    return _refusal(call, ALONG)


def supports_wgrad(call: Call, target: Target) -> str | None:
    """None, or the reason in words."""
    return _refusal(call, WHOLE)


def hours_tiles(GM: int, GN: int, GK: int, target: Target) -> list[Tile]:
    """Every tile of a product over hours, the least estimated time first."""
    return [tile for tile in ranked(Product(GM, GN, GK), target) if tile.split == 1]


def candidates(call: Call, target: Target) -> Sequence[Tile]:
    """Every tile of fprop and dgrad, the least estimated time first."""
    return hours_tiles(*extents(call), target)


def candidates_wgrad(call: Call, target: Target) -> Sequence[Tile]:
    """Every tile, its parts in one wave or two of the blocks that the GPU holds at once; the least estimated time first."""
    GM, GN, GK = extents(call)
    product, made = Product(GM, GN, GK, always_sums=True), []
    for tile in EFFICIENCY:
        k_tiles = ceil_div(GK, tile.BK)
        for waves in (1, 2):
            parts = max(1, min(k_tiles, waves * tile.blocks_per_multiprocessor * target.multiprocessors // tile.grid(GM, GN)[0]))
            made.append(replace(tile, split=ceil_div(k_tiles, ceil_div(k_tiles, parts))))
    return sorted(dict.fromkeys(made), key=lambda tile: cycles(tile, product, target))


def pack(call: Call) -> np.ndarray:
    """w (K,C) with the channels summed down its rows, rows padded to 4."""
    inner = as_convolution(call, "NHWC")
    return im2col.pack_fprop(inner) if call.op.direction == "fprop" else im2col.pack_dgrad(inner)


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`: series once per row of tiles, weights once per column of tiles."""
    (GM, GN, GK), tile = extents(call), call.tile
    read = 4 * GK * (GN * ceil_div(GM, tile.BM) + padded(GM) * ceil_div(GN, tile.BN))
    return [Traffic(read, 4 * GM * GN, 4 * GK * (GN + padded(GM)))]


def traffic_wgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_wgrad`: dy once per column of tiles, x once per row of tiles."""
    (GM, GN, GK), tile, bias = extents(call), call.tile, len(call.out_shapes) == 2
    read = 4 * GK * (GM * ceil_div(GN, tile.BN) + GN * ceil_div(GM, tile.BM))
    product = Traffic(read, 4 * tile.split * (GM * GN + GM * bias), 4 * GK * (GM + GN))
    return [product, sum_filters_traffic(GM, GN, 1, tile.split, bias)]


def _first(candidates: Any) -> Any:
    return lambda call, target: candidates(call, target)[0]


_HOURS = Impl(bind, supports=supports_hours, tile=_first(candidates), pack=pack, candidates=candidates, traffic=traffic)
OPS: dict[Op, Impl] = {
    Op("pwconv1d", "fprop"): _HOURS,
    Op("pwconv1d", "dgrad"): _HOURS,
    Op("pwconv1d", "wgrad"): Impl(
        bind_wgrad, scratch_wgrad, supports=supports_wgrad, tile=_first(candidates_wgrad), candidates=candidates_wgrad, traffic=traffic_wgrad
    ),
}
"""The three passes, for series of whole loads."""
