"""This module multiplies a k-tile in shared memory, warp by warp: fragments by `ldmatrix`, products by `mma.sync`, sums in registers.

float32 operands are split in registers into two tf32, big = rna(x) and small = rna(x − big), which together hold 22 bits of the mantissa;
small·big + big·small + big·big leaves out only the product of the smalls. Tensor cores cut off what they cannot keep of a sum instead of
rounding it, which over a thousand steps adds up to a bias; so each k-tile starts at zero, and is added to the sums by an ordinary, rounding
addition.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, jit, u4
from nbcnn.ops.conv.mma.tile import ROW_BYTES, Kind, Tile
from nbcnn.ops.kernel.loops import in_sequence
from nbcnn.ops.ptx.cvt import bits_float, float_bits, tf32
from nbcnn.ops.ptx.ldmatrix import ldmatrix_x4

STEPS = 4
"""Products of one k-tile, one after another: 32 bytes of k each, 16 halves or 8 tf32."""


@cache
def fragment_corners(tile: Tile) -> Any:
    """Device function () -> byte offsets in a slot of the rows of A and B that this lane addresses, and of its chunks in step 0."""
    WM, ROWS, COLS, BM = tile.WM, tile.BM // tile.WM, tile.BN // tile.WN, tile.BM

    @jit(device=True)
    def run():
        tid = cuda.threadIdx.x
        lane, warp = tid & 31, tid >> 5
        down, across = warp % WM, warp // WM
        # A: rows 0-7 and 8-15 of the first chunk, then of the second. B: both chunks of columns 0-7, then of 8-15.
        row = down * ROWS + (lane & 15)
        column = across * COLS + (lane & 7) + ((lane >> 4) << 3)
        swizzle = lane & 7
        chunk_a = ((lane >> 4) ^ swizzle) << 4
        chunk_b = (((lane >> 3) & 1) ^ swizzle) << 4
        return row * ROW_BYTES, BM * ROW_BYTES + column * ROW_BYTES, chunk_a, chunk_b

    return run


@jit(device=True)
def _split(word):
    """A float32 as two tf32 that add up to it, to 22 bits: what it is rounded to, and what is left."""
    x = bits_float(word)
    big = tf32(x)
    return float_bits(big), float_bits(tf32(x - big))


@cache
def _step(tile: Tile, kind: Kind, k: int) -> Any:
    """Device function (acc, a, b, chunk_a, chunk_b): acc += step k of the k-tile whose rows lie at shared addresses a and b."""
    MI, NI = tile.BM // tile.WM // 16, tile.BN // tile.WN // 8
    PAIRS, WORDS_A, WORDS_B = NI // 2, 4 * MI, 2 * NI
    multiply = kind.multiply

    @jit(device=True)
    def load(fa, fb, a, b, chunk_a, chunk_b):
        # Step k is two chunks further; with the swizzle, that is one XOR.
        at_a, at_b = a + (chunk_a ^ 32 * k), b + (chunk_b ^ 32 * k)
        for i in range(MI):
            fa[4 * i], fa[4 * i + 1], fa[4 * i + 2], fa[4 * i + 3] = ldmatrix_x4(at_a + 16 * ROW_BYTES * i)
        for j in range(PAIRS):
            fb[4 * j], fb[4 * j + 1], fb[4 * j + 2], fb[4 * j + 3] = ldmatrix_x4(at_b + 16 * ROW_BYTES * j)

    if kind.products == 1:

        @jit(device=True)
        def run(acc, a, b, chunk_a, chunk_b):
            fa = cuda.local.array(WORDS_A, u4)
            fb = cuda.local.array(WORDS_B, u4)
            load(fa, fb, a, b, chunk_a, chunk_b)
            for i in range(MI):
                for j in range(NI):
                    o = (i * NI + j) * 4
                    acc[o], acc[o + 1], acc[o + 2], acc[o + 3] = multiply(
                        fa[4 * i], fa[4 * i + 1], fa[4 * i + 2], fa[4 * i + 3], fb[2 * j], fb[2 * j + 1], acc[o], acc[o + 1], acc[o + 2], acc[o + 3]
                    )

        return run

    def sixteen_rows(i):
        @jit(device=True)
        def run(acc, fa, fb, sb, none):
            sa = cuda.local.array(4, u4)
            for q in range(4):
                fa[4 * i + q], sa[q] = _split(fa[4 * i + q])
            for j in range(NI):
                o = (i * NI + j) * 4
                d = multiply(sa[0], sa[1], sa[2], sa[3], fb[2 * j], fb[2 * j + 1], acc[o], acc[o + 1], acc[o + 2], acc[o + 3])
                d = multiply(fa[4 * i], fa[4 * i + 1], fa[4 * i + 2], fa[4 * i + 3], sb[2 * j], sb[2 * j + 1], d[0], d[1], d[2], d[3])
                acc[o], acc[o + 1], acc[o + 2], acc[o + 3] = multiply(
                    fa[4 * i], fa[4 * i + 1], fa[4 * i + 2], fa[4 * i + 3], fb[2 * j], fb[2 * j + 1], d[0], d[1], d[2], d[3]
                )

        return run

    all_rows = in_sequence([sixteen_rows(i) for i in range(MI)])

    @jit(device=True)
    def run_split(acc, a, b, chunk_a, chunk_b):
        fa = cuda.local.array(WORDS_A, u4)
        fb = cuda.local.array(WORDS_B, u4)
        sb = cuda.local.array(WORDS_B, u4)
        load(fa, fb, a, b, chunk_a, chunk_b)
        for q in range(WORDS_B):
            fb[q], sb[q] = _split(fb[q])
        all_rows(acc, fa, fb, sb, 0)

    return run_split


@cache
def multiply_tile(tile: Tile, kind: Kind) -> Any:
    """Device function (acc, a, b, chunk_a, chunk_b): acc += the products of the k-tile whose rows lie at shared addresses a and b."""
    step0, step1, step2, step3 = (_step(tile, kind, k) for k in range(STEPS))

    @jit(device=True)
    def steps(acc, a, b, chunk_a, chunk_b):
        step0(acc, a, b, chunk_a, chunk_b)
        step1(acc, a, b, chunk_a, chunk_b)
        step2(acc, a, b, chunk_a, chunk_b)
        step3(acc, a, b, chunk_a, chunk_b)

    if kind.products == 1:
        return steps
    SUMS = tile.BM * tile.BN // tile.threads

    @jit(device=True)
    def steps_apart(acc, a, b, chunk_a, chunk_b):
        part = cuda.local.array(SUMS, f4)
        for i in range(SUMS):
            part[i] = 0.0
        steps(part, a, b, chunk_a, chunk_b)
        for i in range(SUMS):
            acc[i] += part[i]

    return steps_apart
