"""This module copies pixels to shared memory for the weight gradient on mma.sync, whatever their alignment: cp.async, zeros outside the image.

Where there is no cp.async, a copy loads its chunk into four registers (`held`), which `land` stores when the products of a step are made.

A tile in shared memory is [pixel][channel], as images lie in memory. Every thread copies one chunk (16 bytes) of a row, for some
consecutive pixels. So it belongs to one tap, and what differs from pixel to pixel is where the window lies: `describe_pixels` works
that out once per step for the whole block, as the offset of the window's corner and a bit for each of its rows and columns inside the image.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, i4, i8, jit, types, u4
from nbcnn.ops.conv.mma.wgrad_tile import CHUNK, DESCRIPTOR, Kind
from nbcnn.ops.ptx.cp_async import cp_async_4, cp_async_16
from nbcnn.ops.ptx.shared import load_words_2, store_words_2, store_words_4
from nbcnn.ops.ptx.words import word_at, words_4_at

u8 = types.uint64

MOST_ROWS = 15
"""Rows (and columns) of a window at most: half a word of bits, of which one is never set."""
NEVER = 1 << MOST_ROWS
"""A bit that no descriptor has."""


@jit(device=True)
def bits_inside(first, count, size):
    """Bit i, i < count ≤ 15, is set where 0 ≤ first + i < size."""
    lowest = min(max(-first, 0), MOST_ROWS)
    end = min(max(size - first, 0), count)
    return (((u4(1) << end) - 1) >> lowest) << lowest


@jit(device=True)
def describe_pixel(to, wanted, n, p, q, apart, H, W, R, S, stride, top, left):
    """Writes the descriptor of output pixel (n, p, q): element offset of its window's corner; bits of rows, and of columns 16 higher."""
    # A barrier of the warp keeps this a branch, which warps that describe nothing skip.
    cuda.syncwarp()
    h, w = p * stride - top, q * stride - left
    bits = bits_inside(h, R, H) | bits_inside(w, S, W) << 16
    store_words_2(to, ((n * H + h) * W + w) * apart, bits if wanted else 0)


@cache
def copy_chunk(kind: Kind, width: int) -> Any:
    """Device function (to, array, base, offset, left, wanted, held, at): 16 bytes of channels from element `offset`, of which `left` exist; or zeros.

    `width` is how many bytes the channels' alignment lets a copy have: 16, 4, or 2, which cp.async has not. They go to shared address `to`, or where
    there is no cp.async to held[at …].
    """
    PIECES, PIECE_ELEMENTS, WIDTH, ELEMENT, HELD = CHUNK // width, width // kind.element, width, kind.element, not kind.asynchronous

    @jit(device=True)
    def at_once(to, array, base, offset, left, wanted, held, at):
        place = base + u8(i8(offset) * ELEMENT)
        if HELD:
            held[at], held[at + 1], held[at + 2], held[at + 3] = words_4_at(place, wanted)
        else:
            cp_async_16(to, place, CHUNK if wanted else 0)

    @jit(device=True)
    def in_words(to, array, base, offset, left, wanted, held, at):
        for e in range(PIECES):
            inside = wanted and left > e * PIECE_ELEMENTS
            place = base + u8(i8(offset + e * PIECE_ELEMENTS) * ELEMENT)
            if HELD:
                held[at + e] = word_at(place, inside)
            else:
                cp_async_4(to + e * WIDTH, place, WIDTH if inside else 0)

    @jit(device=True)
    def read(array, offset, wanted):
        return array[i8(offset)] if wanted else 0

    @jit(device=True)
    def pair(array, offset, left, wanted):
        low, high = read(array, offset, wanted and left > 0), read(array, offset + 1, wanted and left > 1)
        return low | high << 16

    @jit(device=True)
    def in_halves(to, array, base, offset, left, wanted, held, at):
        for e in range(2):
            first, second = offset + 4 * e, offset + (4 * e + 2)
            low, high = pair(array, first, left - 4 * e, wanted), pair(array, second, left - (4 * e + 2), wanted)
            if HELD:
                held[at + 2 * e], held[at + 2 * e + 1] = low, high
            else:
                store_words_2(to + 8 * e, low, high)

    return {16: at_once, 4: in_words, 2: in_halves}[width]


def width_of(channels: int, element: int) -> int:
    """Bytes that every pixel's channels can be copied by."""
    return next(width for width in (16, 4, 2) if channels * element % width == 0)


@cache
def land(kind: Kind, pitch: int, rows: int) -> Any:
    """Device function (to, held): stores `rows` chunks that are held, the first at shared address `to`; nothing where cp.async has copied them."""
    PITCH, ROWS = pitch, 0 if kind.asynchronous else rows

    @jit(device=True)
    def run(to, held):
        for i in range(ROWS):
            store_words_4(to + i * PITCH, held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3])

    return run


@cache
def copy_stationary(kind: Kind, width: int, pitch: int, first: int, end: int) -> Any:
    """Device function (to, array, base, pixel, channel, M, apart, limit, held): rows first … end − 1 of the thread's chunk, from `pixel` on.

    Pixels lie `apart` elements from each other; those from `limit` on are zeros.
    """
    copy, PITCH, FIRST, COUNT = copy_chunk(kind, width), pitch, first, end - first

    @jit(device=True)
    def run(to, array, base, pixel, channel, M, apart, limit, held):
        offset = (pixel + FIRST) * apart + channel
        for i in range(COUNT):
            copy(to + (FIRST + i) * PITCH, array, base, offset, M - channel, pixel + (FIRST + i) < limit, held, 4 * (FIRST + i))
            offset += apart

    return run


@cache
def copy_shifted(kind: Kind, width: int, pitch: int, first: int, end: int) -> Any:
    """Device function (to, array, base, table, delta, left, bits, held): rows first … end − 1 of the thread's chunk, by descriptors.

    delta: elements from a window's corner to the thread's tap and channel; bits: the row and column of the tap in a descriptor.
    """
    copy, PITCH, FIRST, COUNT = copy_chunk(kind, width), pitch, first, end - first

    @jit(device=True)
    def run(to, array, base, table, delta, left, bits, held):
        for i in range(COUNT):
            corner, inside = load_words_2(table + (FIRST + i) * DESCRIPTOR)
            copy(to + (FIRST + i) * PITCH, array, base, i4(corner) + delta, left, (inside & bits) == bits, held, 4 * (FIRST + i))

    return run
