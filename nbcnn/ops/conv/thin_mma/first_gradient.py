"""The gradient behind a first layer as fragments A (filters × pixels), straight from global memory into registers.

The GK of one step are the 16 pixels of four windows, in an order that gives lane t of a quad the four pixels of window t. A lane loads
8 neighbouring filters f = 8·g + … of its window at once; rows g and g + 8 of product row tile i are its filters 2i and 2i + 1.
A fragment takes words for (row g, row g + 8): pixels (0,1) in one word, then (2,3), in bf16; each pixel in a word of its own in tf32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from nbcnn.gpu.language import i8, jit
from nbcnn.ops.kernel.loops import unrolled
from nbcnn.ops.ptx.packed import permute_bytes
from nbcnn.ops.ptx.words import load_4_words, load_byte, load_half, load_word

FILTERS = 8
"""Filters of a lane."""


@dataclass(frozen=True)
class Gradient:
    """How a lane reads dy.

    load   (stage, first, dy, index, n, p, q, k, P, Q, K): the window (p,q), filters k …, to stage[first …]; zeros outside.
    masks  (mask, stage, first): what all of the window's filters share.
    take   one function for each row tile i, (rows, stage, first, mask): its words, rows[pixel word · 2 + half], half 0 for row g.
    words, masked  lengths of stage per window and of mask.
    """

    load: Any
    masks: Any
    take: tuple[Any, ...]
    words: int
    masked: int


@functools.cache
def _load_filters(E: int, whole: bool) -> Any:
    """Device function (stage, first, dy, pixel, k, K, wanted): 8 filters of one pixel, 8/E words."""
    WORDS, BYTES = 8 // E, 4 // E

    @jit(device=True)
    def run(stage, first, dy, pixel, k, K, wanted):
        at = (i8(pixel) * K + k) * BYTES
        if whole:
            for v in range(WORDS // 4):
                a = load_4_words(dy, at + i8(16 * v), wanted & (k + 16 * v // BYTES < K))
                stage[first + 4 * v], stage[first + 4 * v + 1], stage[first + 4 * v + 2], stage[first + 4 * v + 3] = a
        else:
            for i in range(WORDS):
                if E == 2:
                    low = load_half(dy, at + i8(4 * i), wanted & (k + 2 * i < K))
                    high = load_half(dy, at + i8(4 * i + 2), wanted & (k + (2 * i + 1) < K))
                    stage[first + i] = low | (high << 16)
                else:
                    stage[first + i] = load_word(dy, at + i8(4 * i), wanted & (k + i < K))

    return run


@functools.cache
def dense(E: int, whole: bool) -> Gradient:
    """dy of the unpooled layer, P×Q pixels; (p,q) numbers 2×2 windows of them."""
    OF_PIXEL = 8 // E
    load_filters = _load_filters(E, whole)

    @jit(device=True)
    def load(stage, first, dy, index, n, p, q, k, P, Q, K):
        for pixel in range(4):
            row, column = 2 * p + pixel // 2, 2 * q + pixel % 2
            inside = (row < P) & (column < Q)
            load_filters(stage, first + pixel * OF_PIXEL, dy, (n * P + row) * Q + column, k, K, inside)

    @jit(device=True)
    def masks(mask, stage, first):
        pass

    def make_take(i: int) -> Any:
        @jit(device=True)
        def take(rows, stage, first, mask):
            if E == 2:
                for pair in range(2):
                    one, other = stage[first + 8 * pair + i], stage[first + 8 * pair + 4 + i]
                    rows[2 * pair] = permute_bytes(one, other, 0x5410)
                    rows[2 * pair + 1] = permute_bytes(one, other, 0x7632)
            else:
                for pixel in range(4):
                    rows[2 * pixel], rows[2 * pixel + 1] = stage[first + 8 * pixel + 2 * i], stage[first + 8 * pixel + 2 * i + 1]

        return take

    return Gradient(load, masks, tuple(make_take(i) for i in range(FILTERS // 2)), 4 * OF_PIXEL, 1)


@functools.cache
def pooled(E: int, whole: bool) -> Gradient:
    """dy behind the pooling, P×Q windows, each value at the pixel that its two bits of the index say, zeros at the other three.

    Masks come from bits by the sign mode of `prmt`, which repeats a byte's highest bit: after the shifts below, the two bits of filter f
    are such bits of the words `places(f)`.
    """
    WORDS = 8 // E
    load_filters = _load_filters(E, whole)

    @jit(device=True)
    def load(stage, first, dy, index, n, p, q, k, P, Q, K):
        inside = (p < P) & (q < Q) & (k < K)
        pixel = (n * P + p) * Q + q
        load_filters(stage, first, dy, pixel, k, K, inside)
        at = i8(pixel) * ((K + 3) >> 2) + (k >> 2)
        if whole:
            stage[first + WORDS] = load_half(index, at, inside)
        else:
            low = load_byte(index, at, inside)
            stage[first + WORDS] = low | (load_byte(index, at + i8(1), inside & (k + 4 < K)) << 8)

    @jit(device=True)
    def masks(mask, stage, first):
        # Row bits of filters 3, 7, 2, 6 at the top of bytes 0 … 3, then those of 1, 5, 0, 4; column bits likewise; their complements.
        places = stage[first + WORDS] | (stage[first + WORDS] << 18)
        mask[0], mask[1] = places, places << 4
        mask[2], mask[3] = places << 1, places << 5
        mask[4], mask[5] = ~mask[2], ~mask[3]

    def make_take(f: int) -> Any:
        HALF, WORD = f % 2, f // E
        # The byte at whose top the bits of filter f are, as a selector with the sign mode, and in which of the two words.
        BYTE, LATE = 8 + f // 4 + (0 if f % 2 else 2), 1 if f % 4 < 2 else 0
        COLUMN, NO_COLUMN = 2 + LATE, 4 + LATE
        FOUR, TWO_AND_TWO, TWICE = 0x1111 * BYTE, 0x1100 * BYTE + 0x11 * (BYTE + 4), 0x3232 if HALF else 0x1010

        @jit(device=True)
        def take(rows, stage, first, mask):
            row = permute_bytes(mask[LATE], mask[LATE], FOUR)
            if E == 2:
                value = permute_bytes(stage[first + WORD], stage[first + WORD], TWICE)
                column = permute_bytes(mask[COLUMN], mask[NO_COLUMN], TWO_AND_TWO)
                rows[HALF] = value & column & ~row
                rows[2 + HALF] = value & column & row
            else:
                value = stage[first + WORD]
                column = permute_bytes(mask[COLUMN], mask[COLUMN], FOUR)
                rows[HALF] = value & ~row & ~column
                rows[2 + HALF] = value & ~row & column
                rows[4 + HALF] = value & row & ~column
                rows[6 + HALF] = value & row & column

        return take

    takes = tuple(unrolled([make_take(2 * i), make_take(2 * i + 1)]) for i in range(FILTERS // 2))
    return Gradient(load, masks, takes, WORDS + 1, 6)
