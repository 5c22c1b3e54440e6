"""This module is the epilogue of the patch kernel, a warpgroup at a time: mask or ReLU, rounding, and stores through shared memory.

The stage holds squares (64 pixels) of 64 bfloat16 or 32 float32 channels, rows of 128 bytes, swizzled: 16 bytes c of row i lie at c ^ (i mod 8).
TMA stores a square at a time, and leaves out what is outside the images. The mask comes the same way: TMA loads x to where the results will be.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, jit, u4
from nbcnn.ops.conv.frame.correlation import SQUARE
from nbcnn.ops.conv.frame.moments import Columns, add_row, finish, words_to_floats
from nbcnn.ops.conv.wgmma.epilogue import store_largest, store_pair
from nbcnn.ops.conv.wgmma.patch import PatchTile
from nbcnn.ops.conv.wgmma.tile import KINDS, WARPGROUP
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES
from nbcnn.ops.ptx.cvt import bf16_high, bf16_low, bf16x2, bits_float, float_bits, tf32
from nbcnn.ops.ptx.ldmatrix import ldmatrix_x4_trans, stmatrix_x4_trans
from nbcnn.ops.ptx.shared import load_words_1, load_words_2, load_words_4, store_words_1
from nbcnn.ops.ptx.shuffle import sum_over

BLOCK_BYTES = SQUARE * SQUARE * ROW_BYTES


@cache
def read_pair(kind_name: str) -> Any:
    """Device function (at) -> two neighbouring values of the stage, as float32."""
    if KINDS[kind_name].result == 2:

        @jit(device=True)
        def run(at):
            word = load_words_1(at)
            return bf16_low(word), bf16_high(word)
    else:

        @jit(device=True)
        def run(at):
            a, b = load_words_2(at)
            return bits_float(a), bits_float(b)

    return run


@cache
def pair_place(tile: PatchTile, kind_name: str) -> Any:
    """Device function (stage, warp, lane, half, j) -> where a thread's columns 8·j + 2·(lane mod 4) and the next of its first row of a square lie.

    The second row is 8 rows further down.
    """
    kind = KINDS[kind_name]
    COLUMNS, BF16 = tile.BN * kind.result // ROW_BYTES, kind.result == 2

    @jit(device=True)
    def run(stage, warp, lane, half, j):
        row = (warp & 3) * 16 + (lane >> 2)
        swizzle = lane >> 2
        pair = lane & 3
        if BF16:
            at = stage + (half * COLUMNS + j // 8) * BLOCK_BYTES + ((j % 8 ^ swizzle) << 4) + (pair << 2)
        else:
            chunk = 2 * (j % 4) + (pair >> 1)
            at = stage + (half * COLUMNS + j // 4) * BLOCK_BYTES + ((chunk ^ swizzle) << 4) + ((pair & 1) << 3)
        return at + row * ROW_BYTES

    return run


@jit(device=True)
def first_line(stage, warp, lane):
    """Where a lane's matrix of the first two lines lies, as `ldmatrix` and `stmatrix` of transposed matrices want it (`put_transposed`)."""
    pixel = lane & 7
    chunk = 2 * (warp & 3) + ((lane >> 3) & 1)
    return stage + (((lane >> 4) * SQUARE + pixel) * ROW_BYTES + ((chunk ^ pixel) << 4))


@cache
def put_fragments(tile: PatchTile, kind_name: str, mask: bool) -> Any:
    """Device function (acc, floor, stage, warp, lane): a warpgroup's sums, at least `floor`, rounded, to its part of the stage.

    mask: zero where the stage holds x ≤ 0.
    """
    EIGHTS, HALVES = tile.BN // 8, tile.BM // tile.groups // 64
    place, read, store = pair_place(tile, kind_name), read_pair(kind_name), store_pair(kind_name)

    @jit(device=True)
    def run(acc, floor, stage, warp, lane):
        for half in range(HALVES):
            for j in range(EIGHTS):
                at = place(stage, warp, lane, half, j)
                for h in range(2):
                    to = at + 8 * h * ROW_BYTES
                    v0 = at_least(acc[(half * EIGHTS + j) * 4 + 2 * h], floor)
                    v1 = at_least(acc[(half * EIGHTS + j) * 4 + 2 * h + 1], floor)
                    if mask:
                        x0, x1 = read(to)
                        v0, v1 = passed(v0, x0), passed(v1, x1)
                    store(to, v0, v1)

    return run


@cache
def put_transposed(tile: PatchTile, kind_name: str, mask: bool) -> Any:
    """`put_fragments` of sums whose rows are filters and whose columns are pixels: transposed on the way to the stage.

    Eight pixels of a line are eight rows of the stage. In bfloat16 a warp stores 16 filters of two lines at once; float32, which no instruction
    transposes, goes word by word, each to a bank of its own.
    """
    LINES = tile.BM // tile.groups // SQUARE

    @jit(device=True)
    def in_words(acc, floor, stage, warp, lane):
        at = first_line(stage, warp, lane)
        for pair in range(LINES // 2):
            to = at + pair * (2 * SQUARE * ROW_BYTES)
            a0, a1, b0, b1 = acc[8 * pair], acc[8 * pair + 1], acc[8 * pair + 2], acc[8 * pair + 3]
            c0, c1, d0, d1 = acc[8 * pair + 4], acc[8 * pair + 5], acc[8 * pair + 6], acc[8 * pair + 7]
            a0, a1, b0, b1 = at_least(a0, floor), at_least(a1, floor), at_least(b0, floor), at_least(b1, floor)
            c0, c1, d0, d1 = at_least(c0, floor), at_least(c1, floor), at_least(d0, floor), at_least(d1, floor)
            if mask:
                a, b, c, d = ldmatrix_x4_trans(to)
                a0, a1, b0, b1 = passed(a0, bf16_low(a)), passed(a1, bf16_high(a)), passed(b0, bf16_low(b)), passed(b1, bf16_high(b))
                c0, c1, d0, d1 = passed(c0, bf16_low(c)), passed(c1, bf16_high(c)), passed(d0, bf16_low(d)), passed(d1, bf16_high(d))
            stmatrix_x4_trans(to, bf16x2(a0, a1), bf16x2(b0, b1), bf16x2(c0, c1), bf16x2(d0, d1))

    @jit(device=True)
    def in_floats(acc, floor, stage, warp, lane):
        block = stage + ((warp & 3) >> 1) * BLOCK_BYTES
        chunk = 4 * (warp & 1) + (lane >> 4)
        word = ((lane >> 2) & 3) << 2
        for j in range(LINES):
            for e in range(2):
                pixel = 2 * (lane & 3) + e
                row = block + ((j // SQUARE * 2) * BLOCK_BYTES + (j % SQUARE * SQUARE + pixel) * ROW_BYTES + word)
                for h in range(2):
                    to = row + ((chunk + 2 * h ^ pixel) << 4)
                    value = at_least(acc[4 * j + 2 * h + e], floor)
                    if mask:
                        value = passed(value, bits_float(load_words_1(to)))
                    store_words_1(to, float_bits(tf32(value)))

    return in_words if KINDS[kind_name].result == 2 else in_floats


@jit(device=True)
def at_least(value, floor):
    """The larger of two; NaN stays."""
    return floor if value <= floor else value


@jit(device=True)
def passed(value, x):
    """The gradient behind a ReLU of x."""
    return value if x > 0.0 else 0.0


@cache
def square_place(tile: PatchTile) -> Any:
    """Device function (square) -> where square number `square` of a tile is: squares to its left, above it, and images before its own.

    They go from left to right and then down; down and then to the right where products are swapped, so that those of a strip are neighbours.
    """
    ACROSS, DOWN = (tile.TW // SQUARE).bit_length() - 1, (tile.TH // SQUARE).bit_length() - 1

    @jit(device=True)
    def by_lines(square):
        return square & (1 << ACROSS) - 1, (square >> ACROSS) & (1 << DOWN) - 1, square >> ACROSS + DOWN

    @jit(device=True)
    def by_strips(square):
        return (square >> DOWN) & (1 << ACROSS) - 1, square & (1 << DOWN) - 1, square >> ACROSS + DOWN

    return by_strips if tile.swapped else by_lines


def columns_of(tile: PatchTile, kind_name: str) -> Columns:
    """How a warpgroup's threads share its rows for their moments."""
    return Columns(tile.BN, 16 // KINDS[kind_name].result, WARPGROUP)


@cache
def square_moments(tile: PatchTile, kind_name: str, barrier: Any) -> Any:
    """Device function (stage, memory, partials, t, n0, K, chunk, chunks): the moments of a warpgroup's squares at `stage`, as one chunk.

    t is the thread in its warpgroup, `barrier` the warpgroup's.
    """
    kind, columns = KINDS[kind_name], columns_of(tile, kind_name)
    HALVES, COLUMNS, WIDTH = tile.BM // tile.groups // 64, tile.BN * kind.result // ROW_BYTES, columns.width
    ACROSS, STEP, SUMS, ITEMS, COUNT = columns.across, columns.step, 2 * WIDTH, 64 // columns.step, tile.BM // tile.groups
    floats, add, end = words_to_floats(WIDTH), add_row(WIDTH), finish(columns, barrier)

    @jit(device=True)
    def run(stage, memory, partials, t, n0, K, chunk, chunks):
        leads = cuda.local.array(WIDTH, f4)
        values = cuda.local.array(WIDTH, f4)
        sums = cuda.local.array(SUMS, f4)
        mine = t & ACROSS - 1
        inner = mine & 7
        first = stage + (mine >> 3) * BLOCK_BYTES
        a, b, c, d = load_words_4(first + (inner << 4))
        floats(leads, a, b, c, d)
        for k in range(SUMS):
            sums[k] = 0.0
        for half in range(HALVES):
            for i in range(ITEMS):
                row = t // ACROSS + i * STEP
                a, b, c, d = load_words_4(first + (half * COLUMNS * BLOCK_BYTES + row * ROW_BYTES + ((inner ^ (row & 7)) << 4)))
                floats(values, a, b, c, d)
                add(sums, leads, values)
        end(memory, leads, sums, partials, t, n0, K, chunk, chunks, COUNT)

    return run


@cache
def filter_moments(tile: PatchTile, kind_name: str) -> Any:
    """Device function (acc, partials, warp, lane, n0, K, chunk, chunks): of sums whose rows are filters, the moments of a warpgroup's pixels.

    Four lanes have all pixels of two filters, so nothing goes through shared memory. The results are rounded as `put_transposed` stores them; there
    is no ReLU between a convolution and its norm.
    """
    LINES, COUNT, BF16 = tile.BM // tile.groups // SQUARE, tile.BM // tile.groups, KINDS[kind_name].result == 2
    over_pixels = sum_over(3)

    @jit(device=True)
    def stored(a, b):
        if BF16:
            word = bf16x2(a, b)
            a, b = bf16_low(word), bf16_high(word)
        else:
            a, b = tf32(a), tf32(b)
        return a, b

    @jit(device=True)
    def keep(partials, n, K, chunk, chunks, lead, total, squares):
        away = total / COUNT
        partials[n * chunks + chunk] = lead + away
        partials[(K + n) * chunks + chunk] = max(squares - total * away, 0.0)

    @jit(device=True)
    def run(acc, partials, warp, lane, n0, K, chunk, chunks):
        first, _ = stored(acc[0], acc[1])
        second, _ = stored(acc[2], acc[3])
        first, second = cuda.shfl_sync(0xFFFFFFFF, first, lane & 28), cuda.shfl_sync(0xFFFFFFFF, second, lane & 28)
        total0, squares0, total1, squares1 = 0.0, 0.0, 0.0, 0.0
        for j in range(LINES):
            a, b = stored(acc[4 * j], acc[4 * j + 1])
            c, d = stored(acc[4 * j + 2], acc[4 * j + 3])
            a, b, c, d = a - first, b - first, c - second, d - second
            total0 += a + b
            total1 += c + d
            squares0 += a * a + b * b
            squares1 += c * c + d * d
        total0, squares0, total1, squares1 = over_pixels(total0), over_pixels(squares0), over_pixels(total1), over_pixels(squares1)
        n = n0 + (warp & 3) * 16 + (lane >> 2)
        if lane & 3 == 0:
            if n < K:
                keep(partials, n, K, chunk, chunks, first, total0, squares0)
            if n + 8 < K:
                keep(partials, n + 8, K, chunk, chunks, second, total1, squares1)

    return run


@cache
def store_pooled(tile: PatchTile, kind_name: str) -> Any:
    """Device function (stage, y, index, t, square, image, h0, w0, n0, N, P, Q, K): maxima of 2×2 pixels of a warpgroup's squares.

    t is the thread in its warpgroup, `square` the warpgroup's first in the tile. The results are not negative. index: 2 bits per channel,
    four channels per byte.
    """
    kind = KINDS[kind_name]
    HALVES, COLUMNS, CHUNK = tile.BM // tile.groups // 64, tile.BN * kind.result // ROW_BYTES, 16 // kind.result
    CHUNKS = (tile.BN // CHUNK).bit_length() - 1
    ITEMS, LAST = (HALVES * 16 << CHUNKS) // WARPGROUP, (1 << CHUNKS) - 1
    place, store = square_place(tile), store_largest(kind_name)

    @jit(device=True)
    def run(stage, y, index, t, square, image, h0, w0, n0, N, P, Q, K):
        words = cuda.local.array(16, u4)
        for i in range(ITEMS):
            item = t + i * WARPGROUP
            chunk = item & LAST
            pooled = (item >> CHUNKS) & 15
            half = item >> CHUNKS + 4
            ph, pw = pooled >> 2, pooled & 3
            here = stage + ((half * COLUMNS + (chunk >> 3)) * BLOCK_BYTES + (ph * 16 + pw * 2) * ROW_BYTES)
            # Rows 16·ph + 2·pw and the next are 2·pw and 2·pw + 1 modulo 8, eight rows further down the same.
            even = here + (((chunk & 7) ^ (pw * 2)) << 4)
            odd = here + ROW_BYTES + (((chunk & 7) ^ (pw * 2 + 1)) << 4)
            words[0], words[1], words[2], words[3] = load_words_4(even)
            words[4], words[5], words[6], words[7] = load_words_4(odd)
            words[8], words[9], words[10], words[11] = load_words_4(even + 8 * ROW_BYTES)
            words[12], words[13], words[14], words[15] = load_words_4(odd + 8 * ROW_BYTES)
            right, below, further = place(square + half)
            column = ((w0 + right * SQUARE) >> 1) + pw
            line = ((h0 + below * SQUARE) >> 1) + ph
            n = image + further
            channel = n0 + chunk * CHUNK
            if n < N and channel < K:
                store(words, y, index, ((n * (P >> 1) + line) * (Q >> 1) + column) * K + channel)

    return run
