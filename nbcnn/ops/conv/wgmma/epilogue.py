"""This module is the epilogue of a tile's sums: bias, ReLU and rounding in registers, then stores through shared memory, 16 bytes per thread.

The way through shared memory turns the fragments that a warp holds (2 columns of 8 rows each) into whole rows; and pooling, masks and
interleaving are plain work on rows. `words` below are 16 bytes of a row: 8 bfloat16 or 4 float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, jit, u4
from nbcnn.ops.conv.frame.moments import Columns, add_row, finish, words_to_floats
from nbcnn.ops.conv.wgmma.tile import ALIGNMENT, KINDS, WARPGROUP, Tile, pitch, shared_bytes
from nbcnn.ops.kernel.loops import unrolled
from nbcnn.ops.ptx.cvt import bf16_high, bf16_low, bf16x2, bits_float, float_bits, tf32
from nbcnn.ops.ptx.mbarrier import bar_sync
from nbcnn.ops.ptx.shared import load_words_4, store_words_1, store_words_2
from nbcnn.ops.ptx.vector import load4_if, load_halves8_if, store4, store_halves8

_LOADS = 8
"""Loads of 16 bytes that a thread has in flight."""


def _log2(value: int) -> int:
    return value.bit_length() - 1


@cache
def store_pair(kind_name: str) -> Any:
    """Device function (to, a, b): two neighbouring results, rounded to what is stored, to the shared address `to`."""
    BF16, ROUND = KINDS[kind_name].result == 2, kind_name == "tf32"

    @jit(device=True)
    def run(to, a, b):
        if BF16:
            store_words_1(to, bf16x2(a, b))
        elif ROUND:
            store_words_2(to, float_bits(tf32(a)), float_bits(tf32(b)))
        else:
            store_words_2(to, float_bits(a), float_bits(b))

    return run


@cache
def activated(after: Any, count: int) -> Any:
    """Device function (acc): each of a thread's `count` sums becomes what the activation `after`, a device function, makes of it.

    Eight sums a function, with constant indices: the compiler leaves a loop whose body is as long as expm1 or erf, and sums that are found by a
    running index stand in local memory (a stack frame of 256 to 512 bytes).
    """

    def eight(first: int) -> Any:
        A, B, C, D, E, F, G, H = range(first, first + 8)

        @jit(device=True)
        def run(acc):
            acc[A], acc[B], acc[C], acc[D] = after(acc[A]), after(acc[B]), after(acc[C]), after(acc[D])
            acc[E], acc[F], acc[G], acc[H] = after(acc[E]), after(acc[F]), after(acc[G]), after(acc[H])

        return run

    return unrolled([eight(first) for first in range(0, count, 8)]) if after is not None else None


@cache
def put_fragments(tile: Tile, kind_name: str) -> Any:
    """Device function (acc, floor, stage, group, warp, lane): the sums, at least `floor`, rounded to what is stored, as rows at address `stage`."""
    kind = KINDS[kind_name]
    PITCH, EIGHTS, ROWS = pitch(tile, kind), tile.BN // 8, tile.BM // tile.groups
    HALVES, ELEMENT, store = ROWS // 64, kind.result, store_pair(kind_name)

    @jit(device=True)
    def run(acc, floor, stage, group, warp, lane):
        row = group * ROWS + (warp & 3) * 16 + (lane >> 2)
        at = stage + (row * PITCH + (lane & 3) * (2 * ELEMENT))
        for j in range(EIGHTS):
            for half in range(HALVES):
                for h in range(2):
                    v0 = acc[(half * EIGHTS + j) * 4 + 2 * h]
                    v1 = acc[(half * EIGHTS + j) * 4 + 2 * h + 1]
                    v0 = floor if v0 <= floor else v0
                    v1 = floor if v1 <= floor else v1
                    to = at + ((half * 64 + 8 * h) * PITCH + j * 8 * ELEMENT)
                    store(to, v0, v1)

    return run


@cache
def moves(kind_name: str) -> tuple[Any, Any, Any]:
    """Device functions of 16 bytes: load (x, at, wanted) -> four words; keep (word, x word) -> word, zero where x ≤ 0; store (y, at, words)."""
    if KINDS[kind_name].result == 2:

        @jit(device=True)
        def keep_halves(word, x):
            low = word & 0xFFFF if bf16_low(x) > 0.0 else 0
            high = word & 0xFFFF0000 if bf16_high(x) > 0.0 else 0
            return low | high

        return load_halves8_if, keep_halves, store_halves8

    @jit(device=True)
    def load(x, at, wanted):
        a, b, c, d = load4_if(x, at, wanted)
        return float_bits(a), float_bits(b), float_bits(c), float_bits(d)

    @jit(device=True)
    def keep(word, x):
        return word if bits_float(x) > 0.0 else 0

    @jit(device=True)
    def store(y, at, a, b, c, d):
        store4(y, at, bits_float(a), bits_float(b), bits_float(c), bits_float(d))

    return load, keep, store


@cache
def store_rows(tile: Tile, kind_name: str, mask: bool, interleaved: bool) -> Any:
    """Device function (stage, x, y, t, m0, n0, GM, K, Q, r, s, apart, x_apart): rows at `stage` to the pixels m0… of y, channels n0…

    mask: only where x > 0, else 0. interleaved: pixel (i, j) of the tile is pixel (2i + r, 2j + s) of y, whose rows are 2Q long.
    Pixels of y lie `apart` elements from each other, those of x `x_apart`.
    """
    kind = KINDS[kind_name]
    PITCH, THREADS, CHUNK = pitch(tile, kind), tile.groups * WARPGROUP, 16 // kind.result
    # Of a BN that is no power of two some threads have nothing to store.
    CHUNKS, ACROSS = (tile.BN // CHUNK - 1).bit_length(), tile.BN // CHUNK
    STEP, RAGGED = THREADS >> CHUNKS, ACROSS & ACROSS - 1 != 0
    BATCH = min(_LOADS, tile.BM // STEP)
    WORDS, BATCHES, LAST = 4 * BATCH, tile.BM // STEP // BATCH, (1 << CHUNKS) - 1
    load, keep, store = moves(kind_name)

    @jit(device=True)
    def run(stage, x, y, t, m0, n0, GM, K, Q, r, s, apart, x_apart):
        masks = cuda.local.array(WORDS, u4)
        row = t >> CHUNKS
        chunk = t & LAST
        channel = n0 + chunk * CHUNK
        start = stage + (row * PITCH + chunk * 16)
        # A pixel beyond the last, or a channel, fails this one comparison.
        end = GM if channel < K else 0
        if RAGGED:
            end = end if chunk < ACROSS else 0
        for batch in range(BATCHES):
            # All loads of a batch before its stores: else each would wait for the memory by itself.
            if mask:
                for i in range(BATCH):
                    m = m0 + row + (batch * BATCH + i) * STEP
                    masked = m
                    if interleaved:
                        above = m // Q
                        masked = (2 * above + r) * 2 * Q + 2 * (m - above * Q) + s
                    x0, x1, x2, x3 = load(x, masked * x_apart + channel, m < end)
                    masks[4 * i], masks[4 * i + 1], masks[4 * i + 2], masks[4 * i + 3] = x0, x1, x2, x3
            for i in range(BATCH):
                m = m0 + row + (batch * BATCH + i) * STEP
                w0, w1, w2, w3 = load_words_4(start + (batch * BATCH + i) * STEP * PITCH)
                if mask:
                    w0, w1 = keep(w0, masks[4 * i]), keep(w1, masks[4 * i + 1])
                    w2, w3 = keep(w2, masks[4 * i + 2]), keep(w3, masks[4 * i + 3])
                if m < end:
                    pixel = m
                    if interleaved:
                        line = m // Q
                        pixel = (2 * line + r) * 2 * Q + 2 * (m - line * Q) + s
                    store(y, pixel * apart + channel, w0, w1, w2, w3)

    return run


def columns_of(tile: Tile, kind_name: str) -> Columns:
    """How the threads of a tile share its rows for their moments."""
    return Columns(tile.BN, 16 // KINDS[kind_name].result, tile.groups * WARPGROUP)


@cache
def row_moments(tile: Tile, kind_name: str) -> Any:
    """Device function (stage, partials, t, m0, n0, GM, K, chunk, chunks): the moments of the rows at `stage`, which are pixels m0…, as one chunk.

    The shared memory behind the rows is overwritten.
    """
    kind, columns = KINDS[kind_name], columns_of(tile, kind_name)
    PITCH, BM, WIDTH, ACROSS, STEP = pitch(tile, kind), tile.BM, columns.width, columns.across, columns.step
    if BM * PITCH + columns.nbytes > shared_bytes(tile, kind) - ALIGNMENT - 256:
        raise ValueError(f"{tile}: no shared memory is left for the sums of its columns")
    SUMS, ROWS = 2 * WIDTH, BM // STEP
    floats, add, end = words_to_floats(WIDTH), add_row(WIDTH), finish(columns, bar_sync(1, columns.threads))

    @jit(device=True)
    def run(stage, partials, t, m0, n0, GM, K, chunk, chunks):
        leads = cuda.local.array(WIDTH, f4)
        values = cuda.local.array(WIDTH, f4)
        sums = cuda.local.array(SUMS, f4)
        row = t // ACROSS
        at = stage + (t & ACROSS - 1) * 16
        a, b, c, d = load_words_4(at)
        floats(leads, a, b, c, d)
        for k in range(SUMS):
            sums[k] = 0.0
        for i in range(ROWS):
            if m0 + row + i * STEP < GM:
                a, b, c, d = load_words_4(at + (row + i * STEP) * PITCH)
                floats(values, a, b, c, d)
                add(sums, leads, values)
        end(stage + BM * PITCH, leads, sums, partials, t, n0, K, chunk, chunks, min(BM, GM - m0))

    return run


@cache
def largest_of_four(kind_name: str) -> Any:
    """Device function (words, q) -> word q of the largest of four rows of four words, and the row of each channel's maximum (2 bits)."""
    if KINDS[kind_name].result == 2:

        @jit(device=True)
        def run(words, q):
            # Not negative, so ordered as integers; the row in the lower bits lets the first of equals win, and comes out with the maximum.
            low, high = u4(0), u4(0)
            for i in range(4):
                low = max(low, words[4 * i + q] << 16 | 3 - i)
                high = max(high, words[4 * i + q] & 0xFFFF0000 | 3 - i)
            word = low >> 16 | high & 0xFFFF0000
            return word, (3 - (low & 3)) | (3 - (high & 3)) << 2
    else:

        @jit(device=True)
        def run(words, q):
            best, argmax = words[q], 0
            for i in range(1, 4):
                if words[4 * i + q] > best:
                    best, argmax = words[4 * i + q], i
            return best, argmax

    return run


@cache
def store_largest(kind_name: str) -> Any:
    """Device function (words, y, index, at): the largest of four rows of 16 bytes to y[at …], and in which row each was (its argmax) to `index`.

    The rows are the pixels of a window, words[4·i : 4·i + 4] row i, and not negative. index has 2 bits per channel, four channels per byte.
    """
    EIGHT, BITS = KINDS[kind_name].result == 2, 4 if KINDS[kind_name].result == 2 else 2
    largest, store = largest_of_four(kind_name), moves(kind_name)[2]

    @jit(device=True)
    def run(words, y, index, at):
        w0, a0 = largest(words, 0)
        w1, a1 = largest(words, 1)
        w2, a2 = largest(words, 2)
        w3, a3 = largest(words, 3)
        store(y, at, w0, w1, w2, w3)
        argmax = a0 | a1 << BITS | a2 << 2 * BITS | a3 << 3 * BITS
        index[at >> 2] = argmax & 0xFF
        if EIGHT:
            index[(at >> 2) + 1] = argmax >> 8

    return run


@cache
def store_pooled(tile: Tile, kind_name: str) -> Any:
    """Device function (stage, y, index, t, m0, n0, GM, K, Q): the maxima of 2×2 pixels of the rows at `stage`, and where they were.

    The rows are whole pairs of image rows of Q pixels, and not negative. index has 2 bits per channel, four channels per byte.
    """
    kind = KINDS[kind_name]
    PITCH, THREADS, CHUNK = pitch(tile, kind), tile.groups * WARPGROUP, 16 // kind.result
    CHUNKS = _log2(tile.BN // CHUNK)
    STEP = THREADS >> CHUNKS
    WINDOWS, LAST, store = tile.BM // 4 // STEP, (1 << CHUNKS) - 1, store_largest(kind_name)

    @jit(device=True)
    def run(stage, y, index, t, m0, n0, GM, K, Q):
        words = cuda.local.array(16, u4)
        chunk = t & LAST
        channel = n0 + chunk * CHUNK
        across = Q >> 1
        for i in range(WINDOWS):
            pooled = (t >> CHUNKS) + i * STEP
            pair = pooled // across
            row = pair * 2 * Q + (pooled - pair * across) * 2
            if m0 + row < GM and channel < K:
                first = stage + (row * PITCH + chunk * 16)
                below = first + Q * PITCH
                words[0], words[1], words[2], words[3] = load_words_4(first)
                words[4], words[5], words[6], words[7] = load_words_4(first + PITCH)
                words[8], words[9], words[10], words[11] = load_words_4(below)
                words[12], words[13], words[14], words[15] = load_words_4(below + PITCH)
                store(words, y, index, ((m0 >> 2) + pooled) * K + channel)

    return run
