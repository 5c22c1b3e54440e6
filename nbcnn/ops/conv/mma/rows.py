"""The rows of a block's tile: which pixel of the source each begins at, which taps stay inside, which pixel of the target it is.

Worked out once per block, one thread per row, into three words in shared memory; everyone reads the rows it needs from there.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, jit, u4
from nbcnn.ops.conv.frame.pooling import window_pixel
from nbcnn.ops.conv.mma.tile import Tile
from nbcnn.ops.kernel.loops import quotient
from nbcnn.ops.ptx.shared import store_words_1

LARGEST_FILTER = 16
"""Rows and columns of a filter: the mask of a row has one bit for each."""
COLUMNS = LARGEST_FILTER
"""The mask of a row: bit r says that tap row r lies inside the source, bit COLUMNS + s that tap column s does."""


@cache
def _inside(dilate: int) -> Any:
    """Device function (first, taps, size) -> bits of the taps t for which (first + t) / dilate is a position below `size`."""

    @jit(device=True)
    def run(first, taps, size):
        bits = 0
        for t in range(LARGEST_FILTER):
            at = u4(first + t)
            inside = (at <= u4((size - 1) * dilate)) & (t < taps)
            if dilate > 1:
                inside &= at % u4(dilate) == 0
            bits |= 1 << t if inside else 0
        return bits

    return run


@cache
def _floor(dilate: int) -> Any:
    """Device function (first) -> ⌊first / dilate⌋ for first ≥ −LARGEST_FILTER."""

    @jit(device=True)
    def run(first):
        if dilate == 1:
            return first
        return quotient(first + dilate * LARGEST_FILTER, dilate) - LARGEST_FILTER

    return run


@cache
def put_rows(tile: Tile, dilate: int, pooled: bool) -> Any:
    """Device function (table, m0, GM, apart, H, W, P, Q, R, S, stride, top, left, up, r, s): the table of the rows m0 … m0 + BM − 1.

    Three words per row, BM rows of one after BM rows of the other: the offset in the source of the row's first pixel (for negative
    coordinates, where it would be), the mask, and the target pixel, −1 beyond the last row. up is 1 where phase (r, s) writes every
    second pixel, else 0.
    """
    BM, THREADS = tile.BM, tile.threads
    PASSES = -(-BM // THREADS)
    inside, floor = _inside(dilate), _floor(dilate)

    @jit(device=True)
    def run(table, m0, GM, apart, H, W, P, Q, R, S, stride, top, left, up, r, s):
        for i in range(PASSES):
            row = cuda.threadIdx.x + i * THREADS
            m = m0 + row
            offset, mask, target = 0, 0, -1
            if m < GM:
                if pooled:
                    n, p, q = window_pixel(m, P, Q)
                else:
                    line = quotient(m, Q)
                    n = quotient(line, P)
                    p = line - n * P
                    q = m - line * Q
                h = p * stride - top
                w = q * stride - left
                offset = ((n * H + floor(h)) * W + floor(w)) * apart
                mask = inside(h, R, H) | inside(w, S, W) << COLUMNS
                if up > 0:
                    target = (n * 2 * P + 2 * p + r) * 2 * Q + 2 * q + s
                else:
                    target = m
            if row < BM:
                at = table + row * 4
                store_words_1(at, offset)
                store_words_1(at + 4 * BM, mask)
                store_words_1(at + 8 * BM, target)

    return run
