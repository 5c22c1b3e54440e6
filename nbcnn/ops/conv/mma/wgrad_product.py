"""Fragments and products of the weight gradient on mma.sync: both operands lie as [pixel][channel], so k runs down the rows.

A warp tile of `stationary` is A of one mma for every 16 channels, four words per lane; one of `shifted` is B of one mma for every eight channels,
two words per lane. They are loaded straight into the registers next to each other that an mma takes:

    bf16, fp16  a transposing ldmatrix brings A for 16 channels, or B for twice eight
    tf32, fp32  A by 8-byte loads at pixels t and t + 4: two channels at once, so rows g and g + 8 stand for channels 2g and 2g + 1;
                B by 4-byte loads

Which channel a row of A stands for matters only when sums are stored. Rows of a tile are padded by 16 and 32 bytes, so that all lanes
that read together find their words in different banks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, i8, jit, u4
from nbcnn.ops.conv.mma import tile
from nbcnn.ops.conv.mma.wgrad_tile import CHUNK, Kind
from nbcnn.ops.kernel import stored
from nbcnn.ops.ptx.cvt import bits_float, float_bits, tf32
from nbcnn.ops.ptx.ldmatrix import ldmatrix_x4_trans
from nbcnn.ops.ptx.shared import load_words_1, load_words_2
from nbcnn.ops.ptx.vector import store2

ROWS = 16
"""Channels of `stationary` that A of an mma holds."""
COLUMNS = 8
"""Channels of `shifted` that B of an mma holds."""


@cache
def lane_offset(kind: Kind, pitch: int, side: str) -> Any:
    """Device function (lane) -> byte offset in a tile of what the lane reads first; side: "A" or "B"."""
    PITCH, TRANSPOSED, WIDTH = pitch, kind.element == 2, 8 if side == "A" else 4
    # Lanes 8i … 8i + 7 point at the rows of matrix i. In A channels change fastest, in B pixels do.
    CHANNEL_BIT, PIXEL_BIT = (3, 4) if side == "A" else (4, 3)

    @jit(device=True)
    def run(lane):
        if TRANSPOSED:
            pixel = (lane & 7) + (((lane >> PIXEL_BIT) & 1) << 3)
            return pixel * PITCH + ((lane >> CHANNEL_BIT) & 1) * CHUNK
        return (lane & 3) * PITCH + (lane >> 2) * WIDTH

    return run


@cache
def load_a(kind: Kind, pitch: int, start: int, end: int, first: int, step: int) -> Any:
    """Device function (words, at): words[first + 4i + e] = word e of A of the i-th 16 channels, start ≤ i < end, for the `step`-th depth."""
    COUNT, FIRST, START = end - start, first + 4 * start, step * kind.depth * pitch + start * ROWS * kind.element
    TRANSPOSED, ACROSS, HALF = kind.element == 2, ROWS * kind.element, 4 * pitch

    @jit(device=True)
    def run(words, at):
        for i in range(COUNT):
            to, place = FIRST + 4 * i, at + (START + i * ACROSS)
            if TRANSPOSED:
                v = ldmatrix_x4_trans(place)
                words[to], words[to + 1], words[to + 2], words[to + 3] = v[0], v[1], v[2], v[3]
            else:
                words[to], words[to + 1] = load_words_2(place)
                words[to + 2], words[to + 3] = load_words_2(place + HALF)

    return run


@cache
def load_b(kind: Kind, pitch: int, start: int, end: int, first: int, step: int) -> Any:
    """Device function (words, at): words[first + 4j + e] = word e of B of the j-th 16 channels, start ≤ j < end; of two mma, two words each."""
    COUNT, FIRST, START = end - start, first + 4 * start, step * kind.depth * pitch + start * 2 * COLUMNS * kind.element
    TRANSPOSED, ACROSS, HALF = kind.element == 2, COLUMNS * kind.element, 4 * pitch

    @jit(device=True)
    def run(words, at):
        for j in range(COUNT):
            to, more = FIRST + 4 * j, START + 2 * j * ACROSS
            if TRANSPOSED:
                v = ldmatrix_x4_trans(at + more)
                words[to], words[to + 1], words[to + 2], words[to + 3] = v[0], v[1], v[2], v[3]
            else:
                words[to] = load_words_1(at + more)
                words[to + 1] = load_words_1(at + (more + HALF))
                words[to + 2] = load_words_1(at + (more + ACROSS))
                words[to + 3] = load_words_1(at + (more + ACROSS + HALF))

    return run


@cache
def multiply(kind: Kind, columns: int, start: int, end: int, a: int, b: int) -> Any:
    """Device function (acc, words): acc += A·B of the i-th 16 rows, start ≤ i < end, and all columns; fragments start at words[a] and words[b].

    Element 4·(i·columns/8 + j) + e of acc is d_e of the mma of the i-th 16 rows and the j-th eight columns.
    """
    MI, NI, A, B, ACC = end - start, columns // COLUMNS, a + 4 * start, b, start * columns // 2
    product = tile.KINDS[kind.name].multiply
    WORDS_A = 4 * MI

    @jit(device=True)
    def run(acc, words):
        for i in range(MI):
            x = A + 4 * i
            for j in range(NI):
                y, o = B + 2 * j, ACC + (i * NI + j) * 4
                d = product(words[x], words[x + 1], words[x + 2], words[x + 3], words[y], words[y + 1], acc[o], acc[o + 1], acc[o + 2], acc[o + 3])
                acc[o], acc[o + 1], acc[o + 2], acc[o + 3] = d[0], d[1], d[2], d[3]

    @jit(device=True)
    def split(high, low, words, first, count):
        for i in range(count):
            value = bits_float(words[first + i])
            upper = tf32(value)
            high[i] = float_bits(upper)
            low[i] = float_bits(tf32(value - upper))

    @jit(device=True)
    def run_split(acc, words):
        high_a = cuda.local.array(WORDS_A, u4)
        low_a = cuda.local.array(WORDS_A, u4)
        high = cuda.local.array(2, u4)
        low = cuda.local.array(2, u4)
        split(high_a, low_a, words, A, WORDS_A)
        zero = 0.0
        for j in range(NI):
            split(high, low, words, B + 2 * j, 2)
            for i in range(MI):
                x, o = 4 * i, ACC + (i * NI + j) * 4
                d = product(low_a[x], low_a[x + 1], low_a[x + 2], low_a[x + 3], high[0], high[1], zero, zero, zero, zero)
                d = product(high_a[x], high_a[x + 1], high_a[x + 2], high_a[x + 3], low[0], low[1], d[0], d[1], d[2], d[3])
                d = product(high_a[x], high_a[x + 1], high_a[x + 2], high_a[x + 3], high[0], high[1], d[0], d[1], d[2], d[3])
                # Tensor cores cut off what falls below a sum's last bit, always towards zero: over thousands of products that
                # shows in float32. So each sum of eight leaves them at once, and is added where additions round.
                for e in range(4):
                    acc[o + e] += d[e]

    return run_split if kind.products == 3 else run


@cache
def add_pixels(kind: Kind, side: str, channels: int, first: int) -> Any:
    """Device function (sums, words): add the pixels of a fragment that starts at words[first] to this lane's sums of `channels` / 8 channels.

    sums[2i + h] is of row g + 8h of A of the i-th 16 channels; sums[j] of column g of B of the j-th eight.
    """
    COUNT, FIRST, PAIRS, OF_A = channels // COLUMNS, first, kind.element == 2, side == "A"
    lower, upper = stored.PAIRS.get(tile.KINDS[kind.name].store, stored.PAIRS["bfloat16"])[:2]

    @jit(device=True)
    def run(sums, words):
        # A barrier of the warp keeps this a branch: it would become predicated instructions, issued in every step.
        cuda.syncwarp()
        for i in range(2 * COUNT):
            word = words[FIRST + i]
            to = i // 4 * 2 + i % 2 if OF_A else i // 2
            if PAIRS:
                sums[to] += lower(word)
                sums[to] += upper(word)
            else:
                sums[to] += bits_float(word)

    return run


@cache
def row_of(kind: Kind) -> Any:
    """Device function (h, g) -> the channel, of 16, that row g + 8h of A stands for."""
    BLOCKS = kind.element == 2

    @jit(device=True)
    def run(h, g):
        return 8 * h + g if BLOCKS else 2 * g + h

    return run


@cache
def store_sums(kind: Kind, rows: int, columns: int) -> Any:
    """Device function (acc, partials, lane, z, m, n, M, GN): a warp's sums to partials[z][m …][n …], which has GN columns."""
    MI, NI, place = rows // ROWS, columns // COLUMNS, row_of(kind)

    @jit(device=True)
    def run(acc, partials, lane, z, m, n, M, GN):
        for i in range(MI):
            for h in range(2):
                row = m + ROWS * i + place(h, lane >> 2)
                if row < M:
                    line = (i8(z) * M + row) * GN
                    for j in range(NI):
                        column = n + COLUMNS * j + (lane & 3) * 2
                        o = (i * NI + j) * 4 + 2 * h
                        if column < GN:
                            store2(partials, line + i8(column), acc[o], acc[o + 1])

    return run
