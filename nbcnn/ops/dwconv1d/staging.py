"""Filters and series on their way into shared memory, where everything outside a series is zero."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from nbcnn.cuda import f4, i4, jit, u4
from nbcnn.ops.stored import scalar_io


def quads(count: int) -> int:
    """`count` rounded up to a multiple of four."""
    return -(-count // 4) * 4


def bank_pitch(width: int) -> int:
    """The smallest pitch from `width` on, for which 16 lanes of one row and 16 of the next meet all 32 banks: 16 more than a multiple of 32."""
    return -(-(width - 16) // 32) * 32 + 16


def row_loads(length: int, starts: Iterable[int], shift: int, width: int) -> int:
    """Elements inside a series that tiles of `width`, from `start + shift` on, hold together."""
    return sum(max(0, min(length, start + shift + width) - max(0, start + shift)) for start in starts)


@functools.cache
def fill_filter(flipped: bool, skip: bool, threads: int) -> Any:
    """A device function that stages channel c's taps first .. first+count−1 in the order of `series.py`, d added to tap `left`.

    stage(shared, at, w, d, c, T, first, count, left, tid), called by `threads` threads; zeros beyond the last tap.
    """

    @jit(device=True)
    def stage(shared, at, w, d, c, T, first, count, left, tid):
        place = tid
        while place < count:
            i = i4(first + place)
            tap = f4(0)
            if i < T:
                tap = w[u4(c * T + ((T - i4(1) - i) if flipped else i))]
                if skip and i == left:
                    tap += d[u4(c)]
            shared[u4(at + place)] = tap
            place = i4(place + i4(threads))

    return stage


@functools.cache
def fill_row(kind: str, lanes: int) -> Any:
    """A device function that stages `width` elements of a series from `first` on, as float32; called by `lanes` threads.

    stage(shared, at, source, row, first, length, width, lane): the series is source[row : row + length]; length 0 stages zeros.
    """
    load, _ = scalar_io(kind)

    @jit(device=True)
    def stage(shared, at, source, row, first, length, width, lane):
        s = lane
        while s < width:
            p = i4(first + s)
            # As an unsigned number a negative place lies beyond any length.
            shared[u4(at + s)] = load(source, u4(row + p)) if u4(p) < u4(length) else f4(0)
            s = i4(s + i4(lanes))

    return stage
