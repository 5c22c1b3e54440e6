"""Filters and series on their way into shared memory, where everything outside a series is zero."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from nbcnn.gpu.language import cuda, f4, i4, jit
from nbcnn.ops.kernel.loops import within
from nbcnn.ops.kernel.stored import scalar_io, vector_load_if
from nbcnn.ops.ptx.mbarrier import fence_mbarrier_init, mbarrier_init
from nbcnn.ops.ptx.tma import fence_tensor_map
from nbcnn.ops.ptx.vector import shared_store4
from nbcnn.ops.series.dwconv1d.series import Correlation

AT_ONCE = 4
"""Loads of 16 bytes that a lane has in flight."""


def quads(count: int) -> int:
    """`count` rounded up to a multiple of four."""
    return -(-count // 4) * 4


def shift_of(g: Correlation) -> int:
    """By how much the first staged element lies before that of the first tap, so that it is a multiple of four."""
    return -g.left % 4


def bank_pitch(width: int) -> int:
    """The smallest pitch from `width` on, for which 16 lanes of one row and 16 of the next meet all 32 banks: 16 more than a multiple of 32."""
    return -(-(width - 16) // 32) * 32 + 16


def row_loads(length: int, starts: Iterable[int], shift: int, width: int) -> int:
    """Elements inside a series that tiles of `width`, from `start + shift` on, hold together."""
    return sum(max(0, min(length, start + shift + width) - max(0, start + shift)) for start in starts)


@functools.cache
def floats_before(alignment: int) -> Any:
    """A device function: floats from the shared address `base` to the next multiple of `alignment` bytes, where TMA may put a box."""

    @jit(device=True)
    def start(base):
        return i4((alignment - (base & alignment - 1) & alignment - 1) >> 2)

    return start


@jit(device=True)
def init_two_barriers(barrier):
    """Initialise a warp's two barriers, at the shared address `barrier` and 8 bytes further, one for each of its boxes; for one lane."""
    mbarrier_init(barrier, 1)
    mbarrier_init(barrier + 8, 1)
    fence_mbarrier_init()


@jit(device=True)
def open_maps(lane, tid, barrier, first, second):
    """Every warp's two barriers at its `barrier`, and both tensor maps, are ready for TMA behind this; all threads of the block call it.

    A fence a block is enough, and many cost time.
    """
    if lane == 0:
        init_two_barriers(barrier)
    if tid == 0:
        fence_tensor_map(first)
        fence_tensor_map(second)
    cuda.syncthreads()


@functools.cache
def fill_filter(flipped: bool, skip: bool, threads: int) -> Any:
    """A device function that stages channel c's taps first .. first+count−1 in the order of `series.py`, d added to tap `left`.

    stage(shared, at, w, d, c, T, first, count, left, tid), called by `threads` threads; zeros beyond the last tap.
    """

    @jit(device=True)
    def stage(shared, at, w, d, c, T, first, count, left, tid):
        place = tid
        while place < count:
            i = first + place
            tap = 0.0
            if i < T:
                tap = w[c * T + ((T - 1 - i) if flipped else i)]
                if skip and i == left:
                    tap += d[c]
            shared[at + place] = tap
            place += threads

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
            p = first + s
            # As an unsigned number a negative place lies beyond any length.
            shared[at + s] = load(source, row + p) if within(p, length) else 0.0
            s += lanes

    return stage


@functools.cache
def stage_series(kind: str, vector: bool, lanes: int) -> Any:
    """A device function with which `lanes` lanes stage `width` elements of a series from `first` on, as float32, zeros outside.

    stage(shared, at, source, row, first, length, width, lane): the series is source[row : row + length]. `vector`: rows, first and width are
    multiples of four.
    """
    if not vector:
        return fill_row(kind, lanes)
    load4_if, STEP, STAGED = vector_load_if(kind), 4 * lanes, 4 * AT_ONCE

    @jit(device=True)
    def stage(shared, at, source, row, first, length, width, lane):
        values = cuda.local.array(STAGED, f4)
        s = 4 * lane
        while s < width:
            for b in range(AT_ONCE):
                p = first + s + b * STEP
                # As an unsigned number a negative place lies beyond any length.
                inside = (s + b * STEP < width) & within(p, length)
                v0, v1, v2, v3 = load4_if(source, row + p, inside)
                values[4 * b], values[4 * b + 1], values[4 * b + 2], values[4 * b + 3] = v0, v1, v2, v3
            for b in range(AT_ONCE):
                if s + b * STEP < width:
                    to = at + s + b * STEP
                    shared_store4(shared, to, values[4 * b], values[4 * b + 1], values[4 * b + 2], values[4 * b + 3])
            s += AT_ONCE * STEP

    return stage
