"""Transposing tiles in shared memory, for the weight gradient in tf32 and fp32; and the bias gradient while at it.

tf32 wgmma takes K-major operands alone, rows of the pixels it sums over; TMA brings rows of channels. Three warps stand between
producer and consumers: one reads a panel of 32 pixels × 32 channels into its registers, one channel per lane, and writes it back to
the same place, one channel per row, in the swizzle that wgmma expects. Neither way do lanes meet in a bank. Barrier `ready[stage]`
then says what `full[stage]` says elsewhere. The stationary operand alone is transposed (`wgrad_registers`).

fp32: an element leaves as two tf32 values, v = high + low within 2^-24·|v|, low in a second plane behind the stage's panels.

A lane then holds 32 pixels of a channel: the bias gradient is the sum of dy's, shared out as in `wgrad_bias`. A shifted dy is read for it alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, i8, jit
from nbcnn.ops.conv.wgmma.ring import next_stage
from nbcnn.ops.conv.wgmma.wgrad_place import panel_place
from nbcnn.ops.conv.wgmma.wgrad_tile import HELPERS, PixelTile
from nbcnn.ops.kernel.loops import ceil_div, split_pixel, unrolled
from nbcnn.ops.ptx.cvt import bits_float, float_bits, tf32
from nbcnn.ops.ptx.mbarrier import mbarrier_arrive, mbarrier_wait
from nbcnn.ops.ptx.shared import load_words_1, store_words_4
from nbcnn.ops.ptx.tma import fence_async_shared

_ALL = 0xFFFFFFFF


@jit(device=True)
def read_panel(values, at, lane):
    """values[0:32]: the pixels of this lane's channel, of the panel at `at`."""
    column = at + ((lane >> 2) * 16 + (lane & 3) * 4)
    for pixel in range(32):
        values[pixel] = bits_float(load_words_1((column ^ (pixel & 7) * 16) + pixel * 128))


@cache
def write_panel(tile: PixelTile) -> Any:
    """Device function (values, at, lane): what all lanes have read to the panel at `at`, one channel per row.

    Of each eight pixels come the even ones first, as `wgrad_registers` wants them.
    """
    SPLIT, LOW = tile.planes == 2, tile.landed_bytes

    @jit(device=True)
    def run(values, at, lane):
        row = at + (lane * 128 + (lane & 7) * 16)
        for q in range(8):
            i = 8 * (q // 2) + q % 2
            a, b, c, d = values[i], values[i + 2], values[i + 4], values[i + 6]
            to = row ^ q * 16
            if SPLIT:
                e, f, g, h = tf32(a), tf32(b), tf32(c), tf32(d)
                store_words_4(to, float_bits(e), float_bits(f), float_bits(g), float_bits(h))
                e, f, g, h = tf32(a - e), tf32(b - f), tf32(c - g), tf32(d - h)
                store_words_4(to + LOW, float_bits(e), float_bits(f), float_bits(g), float_bits(h))
            else:
                store_words_4(to, float_bits(a), float_bits(b), float_bits(c), float_bits(d))

    return run


@cache
def _add_eight(first: int) -> Any:
    """Device function (values, wanted): Σ values[i] over i = first … first + 7 whose bit is set in `wanted`."""
    FIRST = first

    @jit(device=True)
    def run(values, wanted):
        eight = wanted >> FIRST & 0xFF
        # Where an even number of columns makes every other pixel wanted, or none, this is short.
        if eight == 0x55:
            return (values[FIRST] + values[FIRST + 2]) + (values[FIRST + 4] + values[FIRST + 6])
        if eight == 0xAA:
            return (values[FIRST + 1] + values[FIRST + 3]) + (values[FIRST + 5] + values[FIRST + 7])
        total = 0.0
        if eight != 0:
            for i in range(8):
                total += values[FIRST + i] if eight & 1 << i != 0 else 0.0
        return total

    return run


_first, _second, _third, _fourth = (_add_eight(first) for first in (0, 8, 16, 24))


@jit(device=True)
def add_pixels(values, wanted):
    """Σ values[i] over the bits i that are set in `wanted`."""
    return (_first(values, wanted) + _second(values, wanted)) + (_third(values, wanted) + _fourth(values, wanted))


def _panels(tile: PixelTile, bias: str) -> int:
    """Panels of a stage that helper warps read: those that they transpose, and those of a dy that is not."""
    return (tile.BM + (tile.BN if bias == "shifted" else 0)) // tile.panel


@cache
def _transpose_share(tile: PixelTile, bias: str, i: int) -> Any:
    """Device function: transpose panel 3i + warp of a stage; sums[i] += this step's share of the bias gradient."""
    PANEL_BYTES, PANELS_A = tile.panel_bytes, tile.BM // tile.panel
    PANELS = _panels(tile, bias)
    FIRST, SHARE = i * HELPERS, i
    STATIONARY, SHIFTED = bias == "stationary", bias == "shifted"
    write, place = write_panel(tile), panel_place(tile.panel)

    @jit(device=True)
    def wanted_of(r, s, P, Q, odd_rows, odd_columns):
        # Odd taps want even pixels; even taps want pixels as odd or even as the last.
        rows = odd_rows if r & 1 == 0 and P & 1 == 0 else ~odd_rows
        columns = odd_columns if s & 1 == 0 and Q & 1 == 0 else ~odd_columns
        return rows & columns

    @jit(device=True)
    def run(sums, here, lane, warp, due, panel0, panels, C, P, Q, S, odd_rows, odd_columns):
        values = cuda.local.array(32, f4)
        panel = warp + FIRST
        if panel < PANELS_A or (panel < PANELS and due):
            read_panel(values, here + panel * PANEL_BYTES, lane)
            if panel < PANELS_A:
                cuda.syncwarp()
                write(values, here + panel * PANEL_BYTES, lane)
            if STATIONARY and panel < PANELS_A and due:
                sums[SHARE] += add_pixels(values, -1)
            if SHIFTED and panel >= PANELS_A and due:
                r, s, _ = place(panel0 + panel - PANELS_A, panels, C, S)
                sums[SHARE] += add_pixels(values, wanted_of(r, s, P, Q, odd_rows, odd_columns))

    return run


@cache
def _store_share(tile: PixelTile, bias: str, i: int) -> Any:
    """Device function: sums[i] to partials_b[z][column tile][m] where dy is stationary, [z][tap][c] where it is shifted."""
    PANELS_A, PANELS, PANEL = tile.BM // tile.panel, _panels(tile, bias), tile.panel
    FIRST, SHARE = i * HELPERS, i
    STATIONARY, SHIFTED = bias == "stationary", bias == "shifted"
    place = panel_place(tile.panel)

    @jit(device=True)
    def run(sums, partials_b, lane, warp, z, row_tile, column_tile, column_tiles, m0, panel0, panels, M, C, R, S):
        panel = warp + FIRST
        if STATIONARY:
            m = m0 + panel * PANEL + lane
            if panel < PANELS_A and m < M:
                partials_b[i8(z * column_tiles + column_tile) * M + m] = sums[SHARE]
        if SHIFTED:
            column_panel = panel0 + panel - PANELS_A
            r, s, c0 = place(column_panel, panels, C, S)
            c = c0 + lane
            if panel >= PANELS_A and panel < PANELS and column_panel < panels and c < C and row_tile == 0:
                partials_b[i8(z * (R * S) + r * S + s) * C + c] = sums[SHARE]

    return run


@cache
def transposer(tile: PixelTile, bias: str) -> Any:
    """Device function for the helper warps: transpose the panels of every stage, a third of them each; then store the bias gradient's share."""
    STAGE, BK, advance = tile.stage_bytes, tile.BK, next_stage(tile.slots)
    SHARES = ceil_div(_panels(tile, bias), HELPERS)
    STATIONARY, SHIFTED = bias == "stationary", bias == "shifted"
    transpose = unrolled([_transpose_share(tile, bias, i) for i in range(SHARES)])
    store = unrolled([_store_share(tile, bias, i) for i in range(SHARES)])

    @jit(device=True)
    def run(partials_b, ring, full, ready, t, z, first, last, row_tile, column_tile, column_tiles, m0, panel0, panels, M, C, P, Q, R, S):
        lane, warp = t & 31, t >> 5
        sums = cuda.local.array(SHARES, f4)
        for i in range(SHARES):
            sums[i] = 0.0
        next_due = first + column_tile
        stage, parity, step = 0, 0, first
        while step < last:
            odd_rows, odd_columns, due = 0, 0, row_tile == 0
            if STATIONARY:
                due = step == next_due
                next_due = next_due + column_tiles if due else next_due
            if SHIFTED:
                _, p, q = split_pixel(step * BK + lane, P, Q)
                odd_rows, odd_columns = cuda.ballot_sync(_ALL, p & 1), cuda.ballot_sync(_ALL, q & 1)
            mbarrier_wait(full + stage * 8, parity)
            transpose(sums, ring + stage * STAGE, lane, warp, due, panel0, panels, C, P, Q, S, odd_rows, odd_columns)
            # What this warp wrote must be seen by wgmma, which reads past the ordinary path.
            fence_async_shared()
            cuda.syncwarp()
            if lane == 0:
                mbarrier_arrive(ready + stage * 8)
            stage, parity = advance(stage, parity)
            step += 1
        store(sums, partials_b, lane, warp, z, row_tile, column_tile, column_tiles, m0, panel0, panels, M, C, R, S)

    return run
