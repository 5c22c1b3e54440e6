"""Pixels Aᵀ m A + b of a round's products: a thread has one quad of filters all along, and every eighth tile.

What becomes of them is an `End`'s business, for which the plain convolution has the empty one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from nbcnn.cuda import cuda, f4, i4, jit, u4
from nbcnn.ops.conv.onchip.form import FILTERS, FINISHERS, QUADS, STRIPS, Form
from nbcnn.ops.conv.onchip.multiply import swizzled
from nbcnn.ops.conv.thin_shape import unrolled
from nbcnn.ops.ptx.vector import shared_load4, store4

ROWS = FINISHERS // QUADS
"""Tiles that the finishers have at a time."""


@dataclass(frozen=True)
class End:
    """What finishers do with pixels, besides storing them: device functions, and the size of the register array `sums`.

    add(sums, out, made)                                 of a tile's pixels; made: tiles that the thread had before of this image, or part of it
    finish(memory, sums, made, arrays, tid, n, part, eps) when all rounds of image n, or of a part of it, are done
    some(memory, arrays, tid, n, part, slice, eps)       a slice of what is left to do for it, one a round while the next image is multiplied: as
                                                         many as an image has rounds, so that only whole images follow each other
    rest(memory, arrays, thread, n, part, eps)           all of it, by all threads of the block, where none comes after; they have no more
                                                         registers there than those that finish
    leaves: True if anything is left to do, so that these two are called.
    """

    add: Any
    finish: Any
    some: Any
    rest: Any
    sums: int
    leaves: bool


@jit(device=True)
def _nothing(*args):
    pass


PLAIN = End(_nothing, _nothing, _nothing, _nothing, 1, False)
"""The convolution alone."""


@jit(device=True)
def _half(out, m, at):
    """Aᵀ of the four points m of a column, four channels each, to out[at] and out[at + 16]."""
    for q in range(4):
        out[at + q], out[at + 16 + q] = m[q] + m[4 + q] + m[8 + q], m[4 + q] - m[8 + q] - m[12 + q]


@cache
def finishing(form: Form, end: End) -> Any:
    """Device function (memory, sums, bias, z, n, round, tid, made) -> made: pixels of a round, to z and to the end's sums."""
    H, W, TILES, ALL, ALL_STRIPS, OF_LINE, AT = form.H, form.W, form.across, form.tiles, form.strips, form.strips_of_line, form.at_products
    PASSES, add = -(-ALL // ROWS), end.add
    POINT = ALL * FILTERS

    def column(b: int) -> Any:
        @jit(device=True)
        def run(half, memory, at):
            m = cuda.local.array(16, f4)
            for a in range(4):
                of = shared_load4(memory, i4(at + i4((4 * a + b) * POINT)))
                for q in range(4):
                    m[4 * a + q] = of[q]
            _half(half, m, 4 * b)

        return run

    columns = unrolled([column(b) for b in range(4)])

    @jit(device=True)
    def run(memory, sums, bias, z, n, round, tid, made):
        half = cuda.local.array(32, f4)
        out = cuda.local.array(16, f4)
        quad, tile = i4((tid & i4(QUADS - 1)) * i4(4)), i4(u4(tid) // u4(QUADS))
        turn = i4(0)
        while turn < i4(PASSES):
            in_round = i4(u4(tile) // u4(TILES))
            strip = i4(round * i4(STRIPS) + in_round)
            if tile < i4(ALL) and strip < i4(ALL_STRIPS):
                columns(half, memory, i4(i4(AT) + tile * i4(FILTERS) + swizzled(quad, in_round)))
                down = i4(u4(strip) // u4(OF_LINE))
                column = i4(i4(i4(strip - down * i4(OF_LINE)) * i4(TILES) + i4(tile - in_round * i4(TILES))) * i4(2))
                to = i4(i4(i4(i4(n * i4(H) + down * i4(2)) * i4(W)) + column) * i4(FILTERS) + quad)
                for r in range(2):
                    for q in range(4):
                        one, two, three, four = half[16 * r + q], half[16 * r + 4 + q], half[16 * r + 8 + q], half[16 * r + 12 + q]
                        out[8 * r + q], out[8 * r + 4 + q] = one + two + three + bias[q], two - three - four + bias[q]
                    for s in range(2):
                        k = 8 * r + 4 * s
                        store4(z, i4(to + i4((r * W + s) * FILTERS)), out[k], out[k + 1], out[k + 2], out[k + 3])
                add(sums, out, made)
                made = i4(made + i4(1))
            tile = i4(tile + i4(ROWS))
            turn = i4(turn + i4(1))
        return made

    return run
