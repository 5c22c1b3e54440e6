"""Where the operands of a product over series (N, C, L) come from, as `Loader`s (register_tile.py).

series_columns  B[k][j] = x[j // L][k][j % L]: a row is a channel, a column one hour of one series; neighbours of four are read at once
series_rows     A[m][k] = x[k // L][m][k % L]: a row is a channel, and hours lie along the sum; stored transposed
"""

from __future__ import annotations

import functools

from nbcnn.gpu.language import cuda, jit
from nbcnn.ops.conv.simt.loaders import columns_of_a_tile, stash_columns, stash_rows
from nbcnn.ops.conv.simt.register_tile import Loader
from nbcnn.ops.conv.simt.tiles import Tile
from nbcnn.ops.kernel.loops import quotient
from nbcnn.ops.ptx.vector import load4_if


@functools.cache
def series_columns(tile: Tile, side: int, whole_tiles: bool) -> Loader:
    """Hours of series side by side, channels down the rows. whole_tiles: BK divides the channels.

    extents: (channels, hours of all series, L), L a multiple of 4.
    """
    ACROSS, ROWS, PASSES = columns_of_a_tile(tile, side, 4)
    BK = tile.BK
    # state: the thread's first channel (or beyond the last, if its hour is outside), and its offset

    @jit(device=True)
    def start(state, extents, origin, first):
        channels, hours, L = extents
        tid = cuda.threadIdx.x
        hour = origin + tid % ACROSS * 4
        channel = first * BK + tid // ACROSS
        series = quotient(hour, L)
        state[0] = channel if hour < hours else channels
        state[1] = (series * channels + channel) * L + hour - series * L

    @jit(device=True)
    def fetch(stage, array, state, extents, inside):
        L = extents[2]
        for i in range(PASSES):
            wanted = inside & (state[0] + (0 if whole_tiles else i * ROWS) < extents[0])
            v = load4_if(array, state[1] + i * ROWS * L, wanted)
            stage[4 * i], stage[4 * i + 1], stage[4 * i + 2], stage[4 * i + 3] = v[0], v[1], v[2], v[3]
        if not whole_tiles:
            state[0] = state[0] + BK
        state[1] = state[1] + BK * L

    return Loader(start, fetch, stash_columns(ACROSS, ROWS, PASSES, side, 4), side, 2, PASSES * 4)


@functools.cache
def series_rows(tile: Tile, side: int) -> Loader:
    """Channels down the rows, hours along the sum: a k-tile lies in one series. extents: (channels, L), L a multiple of BK."""
    BK, PITCH, K_THREADS = tile.BK, side + 4, tile.threads // side
    LOADS = BK // (4 * K_THREADS) if K_THREADS else 0
    if side * K_THREADS != tile.threads or 4 * K_THREADS * LOADS != BK:
        raise ValueError(f"{tile}: {tile.threads} threads cannot share {side}×{BK} elements, 4 at a time")
    # state: the hour of the k-tile, the thread's offset, whether its channel exists

    @jit(device=True)
    def start(state, extents, origin, first):
        channels, L = extents
        tid = cuda.threadIdx.x
        channel = origin + tid // K_THREADS
        hour = first * BK
        series = quotient(hour, L)
        state[0] = hour - series * L
        state[1] = (series * channels + channel) * L + state[0] + tid % K_THREADS * 4
        state[2] = 1 if channel < channels else 0

    @jit(device=True)
    def fetch(stage, array, state, extents, inside):
        channels, L = extents
        wanted = inside & (state[2] == 1)
        for j in range(LOADS):
            v = load4_if(array, state[1] + j * 4 * K_THREADS, wanted)
            stage[4 * j], stage[4 * j + 1], stage[4 * j + 2], stage[4 * j + 3] = v[0], v[1], v[2], v[3]
        state[0] = state[0] + BK
        state[1] = state[1] + BK
        if state[0] == L:
            state[0] = 0
            state[1] = state[1] + (channels - 1) * L

    return Loader(start, fetch, stash_rows(K_THREADS, LOADS, PITCH), PITCH, 3, 4 * LOADS)
