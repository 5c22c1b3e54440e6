"""Pixels Aᵀ m A + b of a round's products: a thread has one quad of filters all along, and every eighth tile.

What becomes of them is an `End`'s business, for which the plain convolution has the empty one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from nbcnn.cuda import cuda, f4, i4, jit, u4
from nbcnn.ops.conv.onchip.form import FILTERS, FINISHERS, KEPT, QUADS, STRIPS, Form
from nbcnn.ops.conv.onchip.multiply import swizzled
from nbcnn.ops.conv.thin_shape import unrolled
from nbcnn.ops.ptx.vector import shared_load4, shared_store4, store4
from nbcnn.ops.traffic import ceil_div

ROWS = FINISHERS // QUADS
"""Tiles that the finishers have at a time."""


@dataclass(frozen=True)
class End:
    """What becomes of the pixels of a round: device functions, and what these ask for.

    add(sums, out, made)   of a tile's pixels; made: tiles that the thread had before in this round
    finish(memory, sums, made, arrays, tid, n, round, turn, eps)
                           when a finisher has made all its pixels of a round of image n; turn: what packets of this launch carry
    sums                   size of the register array of this name
    packets                of a round (`nbcnn.ops.ptx.grid`), of which the kernel's `packets` has those of all rounds in order
    stores, keeps          True if pixels go to z; if they stay in shared memory until `finish` is done with them (`Form.first_kept`), which then
                           also stores them
    """

    add: Any
    finish: Any
    sums: int = 1
    packets: int = 0
    stores: bool = True
    keeps: bool = False


@jit(device=True)
def _nothing(*args):
    pass


PLAIN = End(_nothing, _nothing)
"""The convolution alone."""


@cache
def placing(form: Form) -> Any:
    """Device function (n, round, tile, quad) -> (if the tile is in the image, where products of its point 0 lie, its first pixel's offset)."""
    H, W, TILES, ALL, ALL_STRIPS, OF_LINE, AT = form.H, form.W, form.across, form.tiles, form.strips, form.strips_of_line, form.at_products

    @jit(device=True)
    def run(n, round, tile, quad):
        in_round = i4(u4(tile) // u4(TILES))
        strip = i4(round * i4(STRIPS) + in_round)
        down = i4(u4(strip) // u4(OF_LINE))
        column = i4(i4(i4(strip - down * i4(OF_LINE)) * i4(TILES) + i4(tile - in_round * i4(TILES))) * i4(2))
        to = i4(i4(i4(i4(n * i4(H) + down * i4(2)) * i4(W)) + column) * i4(FILTERS) + quad)
        return tile < i4(ALL) and strip < i4(ALL_STRIPS), i4(i4(AT) + tile * i4(FILTERS) + swizzled(quad, in_round)), to

    return run


@jit(device=True)
def _half(out, m, at):
    """Aᵀ of the four points m of a column, four channels each, to out[at] and out[at + 16]."""
    for q in range(4):
        out[at + q], out[at + 16 + q] = m[q] + m[4 + q] + m[8 + q], m[4 + q] - m[8 + q] - m[12 + q]


@cache
def _making(form: Form) -> Any:
    """Device function (out, memory, at, bias): the four pixels of a tile, four channels each."""
    POINT = form.tiles * FILTERS

    def column(b: int) -> Any:
        @jit(device=True)
        def run(half, memory, at, bias):
            m = cuda.local.array(16, f4)
            for a in range(4):
                of = shared_load4(memory, i4(at + i4((4 * a + b) * POINT)))
                for q in range(4):
                    # Of every pixel the products of point (1, 1) are a part, once: an addition instead of four, rounded with all that comes after.
                    m[4 * a + q] = of[q] + bias[q] if a == 1 and b == 1 else of[q]
            _half(half, m, 4 * b)

        return run

    columns = unrolled([column(b) for b in range(4)])

    @jit(device=True)
    def run(out, memory, at, bias):
        half = cuda.local.array(32, f4)
        columns(half, memory, at, bias)
        for r in range(2):
            for q in range(4):
                one, two, three, four = half[16 * r + q], half[16 * r + 4 + q], half[16 * r + 8 + q], half[16 * r + 12 + q]
                out[8 * r + q], out[8 * r + 4 + q] = one + two + three, two - three - four

    return run


@cache
def storing_pixels(form: Form) -> Any:
    """Device function (array, to, out): the four pixels of a tile, the first one at array[to …]."""
    W = form.W

    @jit(device=True)
    def run(array, to, out):
        store4(array, to, out[0], out[1], out[2], out[3])
        store4(array, i4(to + i4(FILTERS)), out[4], out[5], out[6], out[7])
        store4(array, i4(to + i4(W * FILTERS)), out[8], out[9], out[10], out[11])
        store4(array, i4(to + i4((W + 1) * FILTERS)), out[12], out[13], out[14], out[15])

    return run


@cache
def finishing(form: Form, end: End) -> Any:
    """Device function (memory, sums, bias, z, n, round, tid) -> made: pixels of a round, to z, to where they are kept, to the end's sums."""
    PASSES, POINT, STORES, KEEPS, SUMS = ceil_div(form.tiles, ROWS), form.tiles * FILTERS, end.stores, end.keeps, end.sums
    FIRST = form.first_kept
    place, make, store, add = placing(form), _making(form), storing_pixels(form), end.add

    @jit(device=True)
    def run(memory, sums, bias, z, n, round, tid):
        out = cuda.local.array(16, f4)
        for i in range(SUMS):
            sums[i] = f4(0)
        quad, tile = i4((tid & i4(QUADS - 1)) * i4(4)), i4(u4(tid) // u4(QUADS))
        step, made = i4(0), i4(0)
        while step < i4(PASSES):
            there, at, to = place(n, round, tile, quad)
            if there:
                make(out, memory, at, bias)
                if STORES:
                    store(z, to, out)
                if KEEPS:
                    for p in range(KEPT):
                        shared_store4(memory, i4(at + i4((FIRST + p) * POINT)), out[4 * p], out[4 * p + 1], out[4 * p + 2], out[4 * p + 3])
                add(sums, out, made)
                made = i4(made + i4(1))
            tile = i4(tile + i4(ROWS))
            step = i4(step + i4(1))
        return made

    return run
