"""This module copies a k-tile to shared memory: the gathered rows of the source, and the rows of the packed filters.

cp.async brings them while the block multiplies. Before compute capability 8.0 there is none: there a thread loads its chunks into registers (*held*),
multiplies, and then *lands* them in shared memory, so that memory works meanwhile.

A row of a k-tile is 128 bytes, eight chunks of 16. Chunk j of row i lies at place j XOR (i mod 8) of its row: then the eight rows that
`ldmatrix` reads together, at the same k, lie in different banks, and so do the eight chunks of a row that are written together.

A thread keeps to one place along k, and copies it for every few rows. Where the channels of the source are a whole number of k-tiles, a
k-tile has one tap (r, s) and all threads count it together; else each thread counts its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, i4, i8, jit, types
from nbcnn.ops.conv.mma.rows import COLUMNS
from nbcnn.ops.conv.mma.tile import ROW_BYTES, Kind, Tile
from nbcnn.ops.kernel.loops import quotient
from nbcnn.ops.ptx.cp_async import cp_async_4, cp_async_16
from nbcnn.ops.ptx.shared import load_words_1, store_words_1, store_words_4
from nbcnn.ops.ptx.words import word_at, words_4_at

u8 = types.uint64
CHUNK = 16


@cache
def source_rows(tile: Tile, kind: Kind, width: int, whole: bool, dilate: int) -> tuple[Any, Any, Any, int]:
    """Device functions start, fetch and land of the source, and how many rows a thread copies.

    start(offsets, masks, tap, table, first, C, S): reads the thread's rows from `table`; tap = (r, s, c) of its place in k-tile `first`
    fetch(slot, x, address, offsets, masks, tap, C, apart, W, R, S, halves, base, held): begins to copy the k-tile at `tap` to shared address `slot`,
    and moves `tap` on by a k-tile. `apart`: elements from one pixel to the next. `halves` is shared memory as uint16, from shared address `base` on.
    land(slot, held): ends it, where cp.async does not. held: four words per row.

    width: elements per copy. whole: C is a multiple of the channels of a k-tile.
    """
    PLACES = kind.channels // width
    STEP = tile.threads // PLACES
    ROWS = tile.BM // STEP
    BM, ES, CHANNELS, BYTES = tile.BM, kind.element, kind.channels, width * kind.element
    copy = cp_async_16 if BYTES == CHUNK else cp_async_4
    SINGLE, HELD = BYTES < 4, not kind.asynchronous

    @jit(device=True)
    def start(offsets, masks, tap, table, first, C, S):
        tid = cuda.threadIdx.x
        place = (tid & PLACES - 1) * width
        k = first * CHANNELS
        if not whole:
            k += place
            place = 0
        number = quotient(k, C)
        tap[0] = quotient(number, S)
        tap[1] = number - tap[0] * S
        tap[2] = k - number * C
        for i in range(ROWS):
            at = table + (quotient(tid, PLACES) + i * STEP) * 4
            offsets[i] = i4(load_words_1(at)) + place
            masks[i] = load_words_1(at + 4 * BM)

    @jit(device=True)
    def advance(tap, C, S):
        if whole:
            c = tap[2] + CHANNELS
            if c == C:
                c = 0
                tap[1] = tap[1] + 1
                if tap[1] == S:
                    tap[1] = 0
                    tap[0] = tap[0] + 1
            tap[2] = c
        else:
            taps = quotient(CHANNELS, C)
            lines = quotient(taps, S)
            c = tap[2] + CHANNELS - taps * C
            s = tap[1] + taps - lines * S
            r = tap[0] + lines
            if c >= C:
                c -= C
                s += 1
            if s >= S:
                s -= S
                r += 1
            tap[0], tap[1], tap[2] = r, s, c

    @jit(device=True)
    def fetch(slot, x, address, offsets, masks, tap, C, apart, W, R, S, halves, base, held):
        tid = cuda.threadIdx.x
        row = quotient(tid, PLACES)
        byte = (tid - row * PLACES) * BYTES
        r, s, c = tap[0], tap[1], tap[2]
        if dilate > 1:
            # With b = the first position mod dilate, a tap is inside only if it divides b + r; then (b + r) / dilate = ⌈r / dilate⌉.
            delta = (quotient(r + (dilate - 1), dilate) * W + quotient(s + (dilate - 1), dilate)) * apart + c
        else:
            delta = (r * W + s) * apart + c
        if not SINGLE:
            for i in range(ROWS):
                inside = (masks[i] >> r) & (masks[i] >> s + COLUMNS) & 1
                if not whole:
                    inside = inside if r < R else 0
                place = address + u8(i8(offsets[i] + delta) * ES)
                at = row + i * STEP
                if HELD and BYTES == CHUNK:
                    held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3] = words_4_at(place, inside)
                elif HELD:
                    held[i] = word_at(place, inside)
                else:
                    to = slot + (at * ROW_BYTES + (((byte >> 4) ^ (at & 7)) << 4) + (byte & 15))
                    copy(to, place, inside * BYTES)
        else:
            # cp.async copies 4 bytes or more; these two bytes go through registers, all of a thread's in flight at once.
            values = cuda.local.array(ROWS, types.uint16)
            for i in range(ROWS):
                inside = (masks[i] >> r) & (masks[i] >> s + COLUMNS) & 1
                values[i] = types.uint16(0)
                if (inside != 0) & (r < R):
                    values[i] = x[offsets[i] + delta]
            for i in range(ROWS):
                at = row + i * STEP
                to = at * ROW_BYTES + (((byte >> 4) ^ (at & 7)) << 4) + (byte & 15)
                halves[slot - base + to >> 1] = values[i]
        advance(tap, C, S)

    @jit(device=True)
    def land(slot, held):
        if HELD and not SINGLE:
            tid = cuda.threadIdx.x
            row = quotient(tid, PLACES)
            byte = (tid - row * PLACES) * BYTES
            for i in range(ROWS):
                at = row + i * STEP
                to = slot + (at * ROW_BYTES + (((byte >> 4) ^ (at & 7)) << 4) + (byte & 15))
                if BYTES == CHUNK:
                    store_words_4(to, held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3])
                else:
                    store_words_1(to, held[i])

    return start, fetch, land, ROWS


@cache
def filter_rows(tile: Tile, kind: Kind) -> tuple[Any, Any, int]:
    """Device functions fetch and land of packed filters, and how many rows a thread copies.

    fetch(slot, address, pitch, rows, held): begins to copy a k-tile to shared address `slot`. address: where the thread's chunk of its first row
    lies; pitch: bytes between filters; rows: filters from the thread's first row on.
    land(slot, held): ends it, where cp.async does not. held: four words per row.
    """
    STEP = tile.threads // 8
    ROWS, HELD = tile.BN // STEP, not kind.asynchronous

    @jit(device=True)
    def fetch(slot, address, pitch, rows, held):
        tid = cuda.threadIdx.x
        row = tid >> 3
        to = slot + (row * ROW_BYTES + (((tid & 7) ^ (row & 7)) << 4))
        for i in range(ROWS):
            place, inside = address + u8(i8(i * STEP) * pitch), i * STEP < rows
            if HELD:
                held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3] = words_4_at(place, inside)
            else:
                cp_async_16(to + i * STEP * ROW_BYTES, place, CHUNK if inside else 0)

    @jit(device=True)
    def land(slot, held):
        if HELD:
            tid = cuda.threadIdx.x
            row = tid >> 3
            to = slot + (row * ROW_BYTES + (((tid & 7) ^ (row & 7)) << 4))
            for i in range(ROWS):
                store_words_4(to + i * STEP * ROW_BYTES, held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3])

    return fetch, land, ROWS
