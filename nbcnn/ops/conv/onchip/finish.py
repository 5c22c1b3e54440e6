"""Pixels Aᵀ m A + b of a round's products: a warp has a strip of tiles, each half of it one quad of filters a lane and every other tile.

Of an odd number of tiles the halves share the last one, a line of pixels each: so all have as much to do. The pixels of a thread stay in its
registers. What becomes of them is an `End`'s business, which for the plain convolution stores them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, i4, i8, jit, u4
from nbcnn.ops.conv.onchip.form import FILTERS, QUADS, STRIPS, Form
from nbcnn.ops.conv.onchip.multiply import swizzled
from nbcnn.ops.kernel.loops import unrolled
from nbcnn.ops.ptx.shuffle import WARP
from nbcnn.ops.ptx.sleep import nanosleep
from nbcnn.ops.ptx.vector import load4, shared_load4, store4

_TILE, _LINE = 16, 8
"""Floats of four channels of a tile's four pixels, and of a line of two."""


@dataclass(frozen=True)
class End:
    """What becomes of the pixels of a round: a device function, and what it asks for.

    begin(memory, arrays, tid)
               before the first round
    add(first, floats)
               makes the device function (memory, x, sums, tid) that has x[first : first + floats], the pixels of a tile or of a line of one, when
               they have been made and stored; `sums` are zeros before the first one of a round
    finish(memory, x, sums, arrays, tid, n, round, turn, last, N, eps, momentum)
               x: the thread's pixels of a round of image n, as `making` and `add` leave them; products are no longer waited for. turn: what packets
               of this launch carry; last: 1 in the block's last round, else 0
    sums       size of the register array of this name
    stores     True if pixels go to z as they are made
    packets    of a round (`nbcnn.ops.ptx.grid`), of which the kernel's `packets` has those of all rounds in order, then what else the end sends
    """

    begin: Any
    add: Callable[[int, int], Any]
    finish: Any
    sums: int = 1
    stores: bool = True
    packets: int = 0


@jit(device=True)
def _nothing(*args):
    pass


PLAIN = End(_nothing, lambda first, floats: _nothing, _nothing)
"""The convolution alone."""


@jit(device=True)
def breathe(last):
    """Let the warps that multiply at shared memory: stores of all pixels in a row hold up their operands, and the compiler would put them so.

    In a block's last round, 1 for `last`, nobody multiplies. Naps of some length gain no more than this one of none (bench/LOG.md).
    """
    if last == i4(0):
        nanosleep(u4(0))


def pixel_floats(form: Form) -> int:
    """Of a thread in a round: four channels of whole tiles, and of a line where halves of a warp share one."""
    return form.across // 2 * _TILE + form.across % 2 * _LINE


@jit(device=True)
def quad_of(tid):
    """The first of the four filters of a finisher."""
    return i4((tid & i4(QUADS - 1)) * i4(4))


@cache
def there(form: Form) -> Any:
    """Device function (round, tid): if the image has the strip of this warp; of the last round it may have fewer."""
    ALL, FULL = form.strips, form.strips % STRIPS == 0

    @jit(device=True)
    def run(round, tid):
        return True if FULL else i4(round * i4(STRIPS) + i4(u4(tid) // u4(WARP))) < i4(ALL)

    return run


def _column(form: Form, b: int) -> Any:
    """Device function (half, memory, at, bias): Aᵀ of the four points of column b, four channels each, to half[4b] and half[16 + 4b]."""
    POINT, BIASED = form.tiles * FILTERS, b == 1

    @jit(device=True)
    def run(half, memory, at, bias):
        one, two = shared_load4(memory, i4(at + i4(b * POINT))), shared_load4(memory, i4(at + i4((4 + b) * POINT)))
        three, four = shared_load4(memory, i4(at + i4((8 + b) * POINT))), shared_load4(memory, i4(at + i4((12 + b) * POINT)))
        for q in range(4):
            # Of every pixel the products of point (1, 1) are a part, once: an addition instead of four, rounded with all that comes after.
            middle = two[q] + bias[q] if BIASED else two[q]
            half[4 * b + q], half[16 + 4 * b + q] = one[q] + middle + three[q], middle - three[q] - four[q]

    return run


def _line_column(form: Form, b: int) -> Any:
    """As `_column` of one line, to half[4b]: m0 + m1 + m2, or m1 − m2 − m3, by sign; at: of the line's first point."""
    POINT, BIASED = form.tiles * FILTERS, b == 1

    @jit(device=True)
    def run(half, memory, at, bias, sign):
        one, two = shared_load4(memory, i4(at + i4(b * POINT))), shared_load4(memory, i4(at + i4((4 + b) * POINT)))
        three = shared_load4(memory, i4(at + i4((8 + b) * POINT)))
        for q in range(4):
            first = one[q] + bias[q] if BIASED else one[q]
            half[4 * b + q] = first + sign * two[q] + sign * three[q]

    return run


@cache
def placing(form: Form) -> Any:
    """Device function (n, round, tid) -> (offset of the thread's first pixel, that of its line of the tile that is shared less this tile's).

    In 64 bits, so that a pixel's distance from the first one becomes a part of the instruction that stores it.
    """
    OF_LINE, LINE, TILE, IMAGE, ROUND = form.strips_of_line, form.W * FILTERS, 2 * FILTERS, form.H * form.W * FILTERS, form.tiles * 4 * FILTERS
    STRIP = form.across * TILE

    @jit(device=True)
    def run(n, round, tid):
        strip, odd = i4(u4(tid) // u4(WARP)), i4(i4(u4(tid) // u4(QUADS)) & i4(1))
        down = i4(u4(strip) // u4(OF_LINE))
        place = i4(down * i4(2 * LINE) + i4(strip - down * i4(OF_LINE)) * i4(STRIP) + quad_of(tid))
        return i8(i4(n * i4(IMAGE) + round * i4(ROUND) + place + odd * i4(TILE))), i8(odd * i4(LINE - TILE))

    return run


def storing_pixel(form: Form, p: int, loads: bool = False) -> Any:
    """Device function (array, x, first, line): the thread's pixel p of `making` to array[n][line][column][filter], or from there if it `loads`;
    first, line: `placing`.
    """
    k, r, s, LOADS = p // 4, p % 4 // 2, p % 2, loads
    WHOLE, AT, I = k < form.across // 2, ((4 * k if k < form.across // 2 else 2 * form.across - 2) + s) * FILTERS + r * form.W * FILTERS, 4 * p

    @jit(device=True)
    def run(array, x, first, line):
        at = (first if WHOLE else first + line) + i8(AT)
        if LOADS:
            x[I], x[I + 1], x[I + 2], x[I + 3] = load4(array, at)
        else:
            store4(array, at, x[I], x[I + 1], x[I + 2], x[I + 3])

    return run


def _across(form: Form, end: End, lines: int, first: int) -> Any:
    """Device function (memory, x, sums, half, tid, z, to, line): the other half of the transform, along lines, to x[first …], z and the end."""
    store = unrolled([storing_pixel(form, p) for p in range(first // 4, first // 4 + 2 * lines)])
    add, LINES, FIRST, STORES = end.add(first, lines * _LINE), lines, first, end.stores

    @jit(device=True)
    def run(memory, x, sums, half, tid, z, to, line):
        for r in range(LINES):
            for q in range(4):
                one, two, three, four = half[16 * r + q], half[16 * r + 4 + q], half[16 * r + 8 + q], half[16 * r + 12 + q]
                x[FIRST + 8 * r + q], x[FIRST + 8 * r + 4 + q] = one + two + three, two - three - four
        if STORES:
            store(z, x, to, line)
        add(memory, x, sums, tid)

    return run


def _tile(form: Form, end: End, k: int) -> Any:
    """Device function (memory, x, sums, bias, at, tid, z, to, line, last): the pixels of the thread's tile k."""
    columns, across = unrolled([_column(form, b) for b in range(4)]), _across(form, end, 2, k * _TILE)
    AT = 2 * k * FILTERS

    @jit(device=True)
    def run(memory, x, sums, bias, at, tid, z, to, line, last):
        half = cuda.local.array(32, f4)
        columns(half, memory, i4(at + i4(AT)), bias)
        across(memory, x, sums, half, tid, z, to, line)
        breathe(last)

    return run


@cache
def making(form: Form, end: End) -> Any:
    """Device function (memory, x, sums, bias, z, n, round, tid, last): the thread's pixels of a round, [tile][line][column][channel of its quad], to
    z and the end; zeros where the image has none.
    """
    WHOLE, HALVED, FLOATS, TILES, AT, SUMS = form.across // 2, form.across % 2, pixel_floats(form), form.across, form.at_products, end.sums
    LINE_OF_POINTS = 4 * form.tiles * FILTERS
    tiles = unrolled([_tile(form, end, k) for k in range(WHOLE)])
    columns, across = unrolled([_line_column(form, b) for b in range(4)]), _across(form, end, 1, WHOLE * _TILE) if HALVED else _nothing
    place, inside = placing(form), there(form)

    @jit(device=True)
    def run(memory, x, sums, bias, z, n, round, tid, last):
        for i in range(SUMS):
            sums[i] = f4(0)
        if inside(round, tid):
            half = cuda.local.array(16, f4)
            strip, odd = i4(u4(tid) // u4(WARP)), i4(i4(u4(tid) // u4(QUADS)) & i4(1))
            first = i4(i4(AT) + i4(strip * i4(TILES * FILTERS)) + swizzled(quad_of(tid), strip))
            to, line = place(n, round, tid)
            tiles(memory, x, sums, bias, i4(first + odd * i4(FILTERS)), tid, z, to, line, last)
            if HALVED:
                shared = i4(first + i4((TILES - 1) * FILTERS) + odd * i4(LINE_OF_POINTS))
                columns(half, memory, shared, bias, f4(1) - f4(2) * f4(odd))
                across(memory, x, sums, half, tid, z, to, line)
        else:
            for i in range(FLOATS):
                x[i] = f4(0)

    return run
