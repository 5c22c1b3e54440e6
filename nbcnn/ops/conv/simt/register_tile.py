"""The register-tiled matrix product that every implicit GEMM here is made of: D = A·B, a block owns BM×BN of D.

A block walks the GK axis in tiles of BK. While its threads multiply one tile out of shared memory, the next one is on its
way from global memory into registers; it goes to the *other* half of shared memory, so one barrier per tile is enough:

    fetch tile 0 -> registers -> shared[0]; barrier; load row 0 of shared[0]
    repeat:  fetch tile t+1 -> registers                    global loads in flight behind the FFMAs of …
             multiply rows 0 … BK-2 of shared[t % 2]        … these rows, each loaded while the one before is multiplied
             stash registers -> shared[(t+1) % 2]; barrier
             load row 0 of shared[(t+1) % 2]
             multiply row BK-1, which is in registers       hides the barrier and that load

A thread owns TM×TN outputs as 4×4 patches, TM/4 of them down and TN/4 across, spread over the block tile: the lanes of a
warp then read neighbouring float4s, without bank conflicts, and store neighbouring float4s.

Where A and B come from is a `Loader`'s business (loaders.py): that is where a convolution differs from a plain GEMM.

Source: the hierarchy of CUTLASS (github.com/NVIDIA/cutlass, "Efficient GEMM in CUDA"); register-staged double buffering as
in S. Gray's maxas SGEMM (github.com/NervanaSystems/maxas/wiki/SGEMM).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nbcnn.gpu.language import cuda, f4, i4, i8, jit
from nbcnn.ops.activations.table import applied
from nbcnn.ops.conv.frame.pooling import PATCH, store_pooled, window_offsets
from nbcnn.ops.conv.simt.tiles import Tile
from nbcnn.ops.kernel.loops import in_sequence, quotient
from nbcnn.ops.ptx.vector import load1_if, load4_if, shared_load4, store4


@dataclass(frozen=True)
class Loader:
    """How one operand travels from global memory to a [BK][pitch] tile in shared memory: three device functions.

    start(state, extents, origin, first)         work out, once, what this thread reads (origin: first row or column of the tile)
    fetch(stage, array, state, extents, inside)  issue the loads of one tile into registers (where `inside` is 0, what they read is not used), advance
    stash(stage, shared, begin)                  write the registers to the tile that begins at element `begin` of shared memory

    `ints` and `floats` are the sizes of the register arrays `state` and `stage`.
    """

    start: Callable[..., None]
    fetch: Callable[..., None]
    stash: Callable[..., None]
    pitch: int
    ints: int
    floats: int


def load_row(tile: Tile, k: int, pitch_a: int, pitch_b: int) -> Any:
    """Device function (rows, shared, a, b): the thread's part of row k of the shared tiles at a and b, into registers.

    rows holds two rows, k even and k odd, of TM + TN floats: while one is multiplied, the next is on its way.
    """
    PA, PB = tile.TM // 4, tile.TN // 4
    down, across = tile.BM // PA, tile.BN // PB
    at_a, at_b = k * pitch_a, k * pitch_b
    to_a = k % 2 * (tile.TM + tile.TN)
    to_b = to_a + tile.TM

    @jit(device=True)
    def load(rows, shared, a, b):
        for i in range(PA):
            v = shared_load4(shared, a + (at_a + i * down))
            for q in range(4):
                rows[to_a + 4 * i + q] = v[q]
        for j in range(PB):
            v = shared_load4(shared, b + (at_b + j * across))
            for q in range(4):
                rows[to_b + 4 * j + q] = v[q]

    return load


def multiply_row(tile: Tile, k: int) -> Any:
    """Device function (acc, rows): acc += the outer product of row k, TM·TN FFMAs, down one column and up the next.

    An FFMA reads three registers, and the register file has two banks: three reads take two cycles, unless one of the
    factors is kept from the instruction before. Turning at the end of a column keeps one where a plain double loop would
    read two new ones. (In cuobjdump, `.reuse` marks a kept factor; CUTLASS walks its thread tiles the same way.)
    """
    TM, TN = tile.TM, tile.TN
    at_a = k % 2 * (TM + TN)
    at_b = at_a + TM

    @jit(device=True)
    def multiply(acc, rows):
        for j in range(TN):
            for step in range(TM):
                i = step if j % 2 == 0 else TM - 1 - step
                acc[i * TN + j] += rows[at_a + i] * rows[at_b + j]

    return multiply


def all_but_last_row(tile: Tile, pitch_a: int, pitch_b: int) -> Any:
    """Device function (acc, rows, shared, a, b): multiply the rows 0 … BK-2, each while the next one is loaded."""

    def step(k):
        load, multiply = load_row(tile, k + 1, pitch_a, pitch_b), multiply_row(tile, k)

        @jit(device=True)
        def run(acc, rows, shared, a, b):
            load(rows, shared, a, b)
            multiply(acc, rows)

        return run

    return in_sequence([step(k) for k in range(tile.BK - 1)])


@functools.cache
def thread_corner(tile: Tile) -> Any:
    """Device function () -> (row, column) of this thread's first 4×4 patch within the block tile.

    The lanes of a warp stand 4 down and 8 across in an interleaved order: bit 0 of the lane moves across, bit 1 down, then
    2 and 3 across, 4 down. A 16-byte shared load serves half a warp at once if lanes that differ in bit 0, or in bit 1, read
    the same address; so both the loads of A (equal along a row) and of B (equal along a column) take two passes, not four.
    CUTLASS calls this lane layout RowMajorInterleaved<2>. Where a tile has too few columns, lanes stand 8 down and 4 across, by the same bits.
    """
    ACROSS = tile.across
    DOWN, WX = 32 // ACROSS, tile.BN // tile.TN // ACROSS

    @jit(device=True)
    def corner():
        tid = cuda.threadIdx.x
        of_eight = (tid & 1) | ((tid >> 1) & 6)
        of_four = ((tid >> 1) & 1) | ((tid >> 3) & 2)
        warp = tid >> 5
        row = warp // WX * DOWN + (of_four if ACROSS == 8 else of_eight)
        column = warp % WX * ACROSS + (of_eight if ACROSS == 8 else of_four)
        return row * 4, column * 4

    return corner


@functools.cache
def block_corner(tile: Tile) -> Any:
    """Device function (GN) -> (m0, n0): the first row and column of the block's tile, blockIdx.x walking along GN first."""
    BM, BN = tile.BM, tile.BN

    @jit(device=True)
    def corner(GN):
        tile_m = quotient(cuda.blockIdx.x, quotient(GN + (BN - 1), BN))
        tile_n = cuda.blockIdx.x - tile_m * quotient(GN + (BN - 1), BN)
        return tile_m * BM, tile_n * BN

    return corner


@functools.cache
def block_part(tile: Tile) -> Any:
    """Device function (GK, k_tiles) -> (first, last): the k-tiles first … last-1 that are this block's, by blockIdx.y."""
    BK = tile.BK

    @jit(device=True)
    def part(GK, k_tiles):
        first = cuda.blockIdx.y * k_tiles
        return first, min(first + k_tiles, quotient(GK + (BK - 1), BK))

    return part


def shared_floats(tile: Tile, A: Loader, B: Loader) -> int:
    """Floats of shared memory that `matrix_product` works in: two k-tiles of each operand."""
    return 2 * tile.BK * (A.pitch + B.pitch)


@functools.cache
def matrix_product(tile: Tile, A: Loader, B: Loader) -> Any:
    """Device function (acc, stage_a, stage_b, shared, a, b, extents_a, extents_b, m0, n0, first, last): acc = A·B.

    The sum runs over the k-tiles first … last-1. acc holds TM·TN floats, stage_a and stage_b what their loaders ask for,
    shared `shared_floats`; a barrier stands at the end, so the caller may use it at once.
    """
    AREA_A, HALF = tile.BK * A.pitch, tile.BK * (A.pitch + B.pitch)
    INTS_A, INTS_B, ACC = A.ints, B.ints, tile.TM * tile.TN
    start_a, fetch_a, stash_a, start_b, fetch_b, stash_b = A.start, A.fetch, A.stash, B.start, B.fetch, B.stash
    ROWS = 2 * (tile.TM + tile.TN)
    load_first, multiply_last = load_row(tile, 0, A.pitch, B.pitch), multiply_row(tile, tile.BK - 1)
    multiply_others, corner = all_but_last_row(tile, A.pitch, B.pitch), thread_corner(tile)

    @jit(device=True)
    def run(acc, stage_a, stage_b, shared, a, b, extents_a, extents_b, m0, n0, first, last):
        state_a = cuda.local.array(INTS_A, i4)
        state_b = cuda.local.array(INTS_B, i4)
        for i in range(ACC):
            acc[i] = 0.0
        row, column = corner()
        start_a(state_a, extents_a, m0, first)
        start_b(state_b, extents_b, n0, first)
        fetch_a(stage_a, a, state_a, extents_a, first < last)
        fetch_b(stage_b, b, state_b, extents_b, first < last)
        stash_a(stage_a, shared, 0)
        stash_b(stage_b, shared, AREA_A)
        cuda.syncthreads()
        rows = cuda.local.array(ROWS, f4)
        at_a, at_b = row, column + AREA_A
        load_first(rows, shared, at_a, at_b)
        half = 0
        k_tile = first + 1
        while k_tile <= last:
            # Not inside an `if`: the compiler would sink the loads below the FFMAs that are to hide them.
            fetch_a(stage_a, a, state_a, extents_a, k_tile < last)
            fetch_b(stage_b, b, state_b, extents_b, k_tile < last)
            multiply_others(acc, rows, shared, half + at_a, half + at_b)
            half = HALF - half
            stash_a(stage_a, shared, half)
            stash_b(stage_b, shared, half + AREA_A)
            cuda.syncthreads()
            # The last row is in registers: its FFMAs hide the first loads from the new tile.
            load_first(rows, shared, half + at_a, half + at_b)
            multiply_last(acc, rows)
            k_tile += 1
        cuda.syncthreads()

    return run


@functools.cache
def store_tile(tile: Tile, vector: bool, bias: bool = False, after: Any = None, phases: bool = False, parts: bool = False) -> Any:
    """Device function (acc, out, m0, n0, GM, GN, plane, extra): out[plane][m][n] = acc (+ b[n]) for the thread's outputs inside GM×GN.

    `vector`: GN is a multiple of 4, so that rows of `out` can be written 16 bytes at a time.
    after: None, the device function of an activation, or "mask": zero where `other`, stored like `out`, is not positive (the gradient behind a ReLU).
    phases: row m is pixel m of images of width Q, whose results are phase (r,s) of images twice as large: m = (n,i,j) goes to
    pixel (n, 2i+r, 2j+s). extra: (b, other, phase = 2r+s, Q, …).
    parts: rows of `out` are those of a larger matrix, extra[4] elements apart.
    """
    TM, TN, PA, PB = tile.TM, tile.TN, tile.TM // 4, tile.TN // 4
    down, across = tile.BM // PA, tile.BN // PB
    corner, (ACTIVATES, activate), MASK = thread_corner(tile), applied(after), after == "mask"
    PLANES, MASKS = 4 if phases else 1, 4 * tile.TM

    @jit(device=True)
    def of_whole(extra, GN):
        return extra[4]

    @jit(device=True)
    def of_row(extra, GN):
        return GN

    apart = of_whole if parts else of_row

    @jit(device=True)
    def store(acc, out, m0, n0, GM, GN, plane, extra):
        b, other, phase, Q = extra[:4]
        pitch = apart(extra, GN)
        row, column = corner()
        for j in range(PB):
            n = n0 + column + j * across
            shift = cuda.local.array(4, f4)
            values = cuda.local.array(4, f4)
            masks = cuda.local.array(MASKS, f4)
            if MASK:
                # All loads before the first store: behind a store, each would wait for the one before.
                for i in range(TM):
                    m = m0 + row + (i // 4 * down + i % 4)
                    at = i8(m) * GN + n
                    if vector:
                        v = load4_if(other, at, (m < GM) & (n < GN))
                        masks[4 * i], masks[4 * i + 1], masks[4 * i + 2], masks[4 * i + 3] = v[0], v[1], v[2], v[3]
                    else:
                        for q in range(4):
                            masks[4 * i + q] = load1_if(other, at + i8(q), (m < GM) & (n + q < GN))
            for q in range(4):
                shift[q] = 0.0
                if bias and n + q < GN:
                    shift[q] = b[n + q]
            for i in range(TM):
                m = m0 + row + (i // 4 * down + i % 4)
                if m < GM:
                    to = m
                    if phases:
                        line = quotient(m, Q)
                        # (n·2H + 2i+r)·2W + 2j+s, where line = n·H + i and m - line·W = j.
                        to = (2 * line + (phase >> 1)) * 2 * Q + 2 * (m - line * Q) + (phase & 1)
                    at = (i8(plane) * PLANES * GM + to) * pitch + n
                    p = i * TN + j * 4
                    for q in range(4):
                        values[q] = acc[p + q] + shift[q]
                        if ACTIVATES:
                            values[q] = activate(values[q])
                        if MASK:
                            values[q] = values[q] if masks[4 * i + q] > 0.0 else 0.0
                    if vector:
                        if n < GN:
                            store4(out, at, values[0], values[1], values[2], values[3])
                    else:
                        for q in range(4):
                            if n + q < GN:
                                out[at + i8(q)] = values[q]

    return store


@functools.cache
def pool_tile(tile: Tile, vector: bool, bias: bool) -> Any:
    """Device function like that of `store_tile`, for rows numbered by windows: y and index of relu(acc + b), pooled.

    extra: (b, index, -, -); there is one plane.
    """
    TN, PA, PB = tile.TN, tile.TM // 4, tile.TN // 4
    down, across = tile.BM // PA, tile.BN // PB
    corner, store_window = thread_corner(tile), store_pooled(vector)

    @jit(device=True)
    def store(acc, y, m0, n0, GM, GN, plane, extra):
        b, index = extra[0], extra[1]
        row, column = corner()
        patch = cuda.local.array(PATCH, f4)
        for j in range(PB):
            n = n0 + column + j * across
            for i in range(PA):
                m = m0 + row + i * down
                if (m < GM) & (n < GN):
                    for q in range(4):
                        shift = 0.0
                        if bias and n + q < GN:
                            shift = b[n + q]
                        for t in range(4):
                            patch[4 * t + q] = acc[(4 * i + t) * TN + 4 * j + q] + shift
                    at, byte = window_offsets(m >> 2, n, GN)
                    store_window(patch, y, index, at, byte, GN - n)

    return store
