"""This module loads the wide side of a thin weight gradient (thin/wgrad.py) into a thread's registers: as it lies, or out of a pooling.

An iteration of a slice is 2·DEPTH pixels: while one half is multiplied, the other is on its way. `plain` walks over pixels in
steps of SLICES. `pooled` reads the gradient behind a 2×2 pooling: the four pixels of a window, one after the other, have
one value and one index between them, and the value counts for the pixel that the index names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nbcnn.gpu.language import i8, jit
from nbcnn.ops.ptx.vector import load4


@dataclass(frozen=True)
class Wide:
    """Device functions for TM channels in groups of four, STEP apart, of the pixels of one slice.

    load(stage, places, half, wide, index, c, C, m, last)  issue the loads of half an iteration that begins at pixel m
    take[d](values, stage, places)                         the TM values of pixel d of the iteration
    distance[d]                                            pixels from the iteration's first to pixel d
    first                                                  pixels between the slices' first pixels

    `floats` and `ints` are the sizes of the register arrays `stage` and `places`.
    """

    load: Callable[..., None]
    take: list[Any]
    distance: list[int]
    first: int
    floats: int
    ints: int


def plain(TM: int, STEP: int, SLICES: int, DEPTH: int) -> Wide:
    """Pixels m, m + SLICES, … of images stored line by line."""
    VM = TM // 4

    @jit(device=True)
    def load(stage, places, half, wide, index, c, C, m, last):
        # Beyond the last pixel the last one is read again, and multiplied by a thin side of zeros.
        for d in range(DEPTH):
            first = i8(min(m + d * SLICES, last)) * C
            for v in range(VM):
                k = half * DEPTH * TM + d * TM + 4 * v
                f = load4(wide, first + min(c + v * STEP, C - 4))
                stage[k], stage[k + 1], stage[k + 2], stage[k + 3] = f

    def make_take(d):
        @jit(device=True)
        def take(values, stage, places):
            for i in range(TM):
                values[i] = stage[d * TM + i]

        return take

    iteration = range(2 * DEPTH)
    return Wide(load, [make_take(d) for d in iteration], [d * SLICES for d in iteration], 1, 2 * DEPTH * TM, 1)


def pooled(TM: int, STEP: int, SLICES: int, DEPTH: int) -> Wide:
    """Pixels numbered window by window (pooling.py); DEPTH is a multiple of 4, so that a half is whole windows."""
    if DEPTH % 4:
        raise ValueError(f"half an iteration of {DEPTH} pixels is not whole windows of 4")
    VM, WINDOWS = TM // 4, DEPTH // 4

    @jit(device=True)
    def load(stage, places, half, wide, index, c, C, m, last):
        for d in range(WINDOWS):
            window = i8(min((m >> 2) + d * SLICES, last >> 2))
            for v in range(VM):
                k = (half * WINDOWS + d) * VM + v
                channel = min(c + v * STEP, C - 4)
                f = load4(wide, window * C + channel)
                stage[4 * k], stage[4 * k + 1], stage[4 * k + 2], stage[4 * k + 3] = f
                places[k] = index[window * i8(C >> 2) + i8(channel >> 2)]

    def make_take(d):
        AT, PLACE = d // 4 * VM, d % 4

        @jit(device=True)
        def take(values, stage, places):
            for v in range(VM):
                for q in range(4):
                    here = ((places[AT + v] >> 2 * q) & 3) == PLACE
                    values[4 * v + q] = stage[4 * (AT + v) + q] if here else 0.0

        return take

    iteration = range(2 * DEPTH)
    distance = [d // 4 * 4 * SLICES + d % 4 for d in iteration]
    return Wide(load, [make_take(d) for d in iteration], distance, 4, 2 * WINDOWS * TM, 2 * WINDOWS * VM)
