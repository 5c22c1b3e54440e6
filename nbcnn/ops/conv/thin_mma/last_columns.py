"""This module makes the operand of a last layer's backward: for every wide pixel, the thin gradients that its taps meet, as columns (r,s,k).

    plain    D[m][(r,s,k)] = dy[n, h+r−R/2, w+s−R/2, k]
    folded   D[m][(r,s,k)] = Σ dy[n, 2h+r−1+i, 2w+s−1+j, k] over i, j ∈ {0,1}     (behind an upsampling, R = 3)

with m = (n,h,w) a wide pixel and dy 0 outside. Taps count backwards: column (r,s,k) meets w[k,:,R−1−r,R−1−s]. Neither the columns
of a plain layer nor the box sums of a folded one are ever in global memory: a block makes those of a few pixels in shared memory.

`fetch` streams the wide images past them. A thread copies the 16 bytes that it will use into slots of its own, several steps
ahead, and so no barrier is needed and no register waits for memory.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from nbcnn.gpu.language import cuda, f4, i8, jit, types
from nbcnn.gpu.target import Target
from nbcnn.ops.conv.thin_mma.last_shape import COLUMNS, LastLayer, word_elements
from nbcnn.ops.kernel.loops import power_of_two, split_pixel, unrolled, within
from nbcnn.ops.kernel.traffic import windows
from nbcnn.ops.ptx.cp_async import cp_async_16, cp_async_commit
from nbcnn.ops.ptx.cvt import bf16_low, bf16x2, bits_float, float_bits, tf32
from nbcnn.ops.ptx.shared import store_half_words_1, store_words_1
from nbcnn.ops.ptx.words import load_half, load_word

u8 = types.uint64
STEP = 16
"""Pixels of a warp's step."""
SLOTS = 4
"""16-byte slots of a thread in a step: its two pixels in each half of the step."""
WARPS = 8
_LEAST_PIXELS = 32


@dataclass(frozen=True)
class LastTile:
    """CW warps side by side across the channels, PW down the pixels; PX pixels between two barriers.

    `stages` steps are in flight for each warp, `resident` blocks are to fit on a multiprocessor, `blocks` share the pixels.
    """

    CW: int
    PW: int
    PX: int
    stages: int
    resident: int
    blocks: int

    @property
    def threads(self) -> int:
        return 32 * self.CW * self.PW

    @property
    def slot_bytes(self) -> int:
        """Shared memory for the slots of all threads."""
        return self.stages * SLOTS * 16 * self.threads


def channel_blocks(layer: LastLayer, precision: str) -> int:
    """Warps that cover all channels, 32·E each."""
    return -(-layer.C // (32 * word_elements(precision)))


def grid_y(layer: LastLayer, precision: str, tile: LastTile) -> int:
    """Blocks that share the channels of a pixel."""
    return -(-channel_blocks(layer, precision) // tile.CW)


def last_tile(layer: LastLayer, precision: str, target: Target) -> LastTile:
    """Two blocks per multiprocessor; fewer pixels between barriers while that leaves multiprocessors without work."""
    CW = min(WARPS, power_of_two(channel_blocks(layer, precision)))
    PX = 128 * word_elements(precision)
    while PX > _LEAST_PIXELS and layer.pixels < 2 * target.multiprocessors * PX:
        PX //= 2
    PW = min(WARPS // CW, PX // STEP)
    wide = -(-channel_blocks(layer, precision) // CW)
    blocks = max(1, min(-(-layer.pixels // PX), 2 * target.multiprocessors // wide))
    return LastTile(CW, PW, PX, 4, 2, blocks)


def columns_pitch(E: int, PX: int, by_pixel: bool) -> int:
    """Bytes from one row of the columns to the next: an odd number of 16 bytes, so that eight rows lie in different banks."""
    return (COLUMNS if by_pixel else PX) * 4 // E + 16


def columns_bytes(E: int, PX: int, by_pixel: bool) -> int:
    """Bytes of the columns of PX pixels."""
    return (PX if by_pixel else COLUMNS) * columns_pitch(E, PX, by_pixel)


@functools.cache
def next_pixels(of_warp: int, steps: int) -> Any:
    """Device function (ahead, left, stride) -> where the step of pixels behind that at `ahead` begins, and how many of its chunk are left then.

    A warp takes `steps` steps, of_warp pixels, of a chunk; its chunks begin `stride` pixels apart.
    """

    @jit(device=True)
    def run(ahead, left, stride):
        ahead, left = ahead + STEP, left - 1
        if left == 0:
            ahead, left = ahead + stride - of_warp, steps
        return ahead, left

    return run


@functools.cache
def next_stage(stage: int, ring: int) -> Any:
    """Device function (at, first) -> the stage behind that at `at`, of a ring of `ring` bytes that begins at the shared address `first`."""

    @jit(device=True)
    def run(at, first):
        at += stage
        return first if at == first + ring else at

    return run


@functools.cache
def columns_of(E: int, R: int, K: int, F: int, PX: int, threads: int, by_pixel: bool, sums: bool) -> Any:
    """Device function build(to, dy, m0, M, H, W, total): the columns of pixels m0 … m0+PX−1 at shared address `to`, zeros from M on.

    by_pixel: a row holds a pixel's columns (operand of dgrad), else a column's pixels (of wgrad; in tf32 the pixels of a group of eight
    in the order 0 2 4 6 1 3 5 7, as a thread's slots hold neighbours). sums: add the middle tap, which meets every gradient once, to
    total[i]; a warp's i-th sum belongs to filter (32·warp + i·threads) / PX.
    """
    BYTES, PITCH, SIDE = 4 // E, columns_pitch(E, PX, by_pixel), R + F - 1
    BACK, TASKS, ALL, MIDDLE = (R // 2 if F == 1 else 1), -(-PX * K // threads), PX * K, R // 2
    SPREAD = not by_pixel and E == 1
    TILE_AT, TILE_COLUMN = (PITCH, BYTES) if by_pixel else (BYTES, PITCH)
    FOLDED, TAPS_K, CELLS = F == 2, K, SIDE * SIDE

    @jit(device=True)
    def value(dy, at, wanted):
        if E == 2:
            return bf16_low(load_half(dy, i8(at) * 2, wanted))
        return bits_float(load_word(dy, i8(at) * 4, wanted))

    @jit(device=True)
    def put(address, x):
        if E == 2:
            store_half_words_1(address, bf16x2(x, 0.0))
        else:
            store_words_1(address, float_bits(tf32(x)))

    def make_task(i: int) -> Any:
        @jit(device=True)
        def task(to, dy, m0, M, H, W, total):
            e = cuda.threadIdx.x + i * threads
            if e < ALL:
                k, pixel = e // PX, e % PX
                m = m0 + pixel
                n, h, w = split_pixel(m, H, W)
                rows, columns = F * H, F * W
                p0, q0 = F * h - BACK, F * w - BACK
                cells = cuda.local.array(CELLS, f4)
                for r in range(SIDE):
                    for s in range(SIDE):
                        p, q = p0 + r, q0 + s
                        # As unsigned numbers, negative coordinates lie beyond any extent.
                        inside = within(p, rows) & within(q, columns) & (m < M)
                        cells[r * SIDE + s] = value(dy, ((n * rows + p) * columns + q) * TAPS_K + k, inside)
                place = pixel
                if SPREAD:
                    place = (pixel & -8) | ((pixel & 1) << 2) | ((pixel >> 1) & 3)
                at = to + place * TILE_AT + k * TILE_COLUMN
                for r in range(R):
                    for s in range(R):
                        c = cells[r * SIDE + s]
                        if FOLDED:
                            c += cells[r * SIDE + s + 1] + (cells[(r + 1) * SIDE + s] + cells[(r + 1) * SIDE + s + 1])
                        if sums and r == MIDDLE and s == MIDDLE:
                            total[i] += c
                        put(at + (r * R + s) * TAPS_K * TILE_COLUMN, c)

        return task

    return unrolled([make_task(i) for i in range(TASKS)])


@functools.cache
def fetch_of(E: int, threads: int) -> Any:
    """Device function fetch(to, x, m, M, C, channel): one step of a thread, pixels m, m+1, m+8, m+9, 4·E channels from `channel` on.

    Closes a group of copies. Pixels from M on and channels from C on arrive as zeros.
    """
    BYTES, NEXT = 4 // E, 16 * threads

    @jit(device=True)
    def fetch(to, x, m, M, C, channel):
        for v in range(SLOTS):
            pixel = m + (8 * (v // 2) + v % 2)
            wanted = 16 if (pixel < M) & (channel < C) else 0
            cp_async_16(to + v * NEXT, x + u8(i8(pixel * C + channel) * BYTES), wanted)
        cp_async_commit()

    return fetch


def gradient_reads(layer: LastLayer) -> int:
    """Elements of dy that the columns of all pixels are made of: those of a pixel's window that lie inside."""
    side, back = layer.R + layer.F - 1, layer.R // 2 if layer.F == 1 else 1
    down = windows(layer.H, side, layer.F * layer.H, layer.F, back)[0]
    across = windows(layer.W, side, layer.F * layer.W, layer.F, back)[0]
    return layer.N * layer.K * down * across
