"""This module is the epilogue of an input gradient behind a batch normalisation, in the patch kernel: what it adds, and the sums that the norm wants.

The gradient of a norm's output reads two sums of every channel (`nbcnn.ops.norms.batch`): Σ g and Σ g·(x − mean), where g is the gradient behind
the norm's activation and x the norm's input. Here a tile of the gradient is still in registers, so that only x is read for them, which TMA brings to
where the results will be while the products run. A second gradient of the same value (`more`) is what the products are added to; where the sign of a
y says what passes, as at the end of a residual block, its signs wait in registers, one bit each. They come through the same memory, one after
the other, before the products: with two tiles in turn that is while the other tile multiplies.

Each thread finds x, y and `more` where its own results will be, so nothing is exchanged but the sums.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, jit, u4
from nbcnn.ops.activations.activation import passed_on
from nbcnn.ops.activations.table import ACTIVATIONS
from nbcnn.ops.conv.frame.correlation import SQUARE
from nbcnn.ops.conv.wgmma.epilogue import store_pair
from nbcnn.ops.conv.wgmma.patch import WARPS, PatchTile
from nbcnn.ops.conv.wgmma.patch_epilogue import first_line, pair_place, read_pair
from nbcnn.ops.conv.wgmma.tile import KINDS, WARPGROUP
from nbcnn.ops.kernel.loops import unrolled
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES
from nbcnn.ops.ptx.cvt import bf16_high, bf16_low, bf16x2, bits_float, float_bits, tf32, unknown_word
from nbcnn.ops.ptx.ldmatrix import ldmatrix_x4_trans, stmatrix_x4_trans
from nbcnn.ops.ptx.shared import load_words_1, store_words_1
from nbcnn.ops.ptx.shuffle import sum_over


@cache
def take_staged(tile: PatchTile, kind_name: str) -> Any:
    """Device function (acc, stage, warp, lane): what lies in a warpgroup's part of the stage becomes its sums."""
    LINES, EIGHTS, HALVES = tile.BM // tile.groups // SQUARE, tile.BN // 8, tile.BM // tile.groups // 64
    read, place, BF16 = read_pair(kind_name), pair_place(tile, kind_name), KINDS[kind_name].result == 2

    def two_lines(line: int) -> Any:
        TO, I = line * SQUARE * ROW_BYTES, 4 * line

        @jit(device=True)
        def run(acc, at):
            a, b, c, d = ldmatrix_x4_trans(at + TO)
            acc[I], acc[I + 1], acc[I + 2], acc[I + 3] = bf16_low(a), bf16_high(a), bf16_low(b), bf16_high(b)
            acc[I + 4], acc[I + 5], acc[I + 6], acc[I + 7] = bf16_low(c), bf16_high(c), bf16_low(d), bf16_high(d)

        return run

    every_line = unrolled([two_lines(line) for line in range(0, LINES, 2)])

    @jit(device=True)
    def transposed(acc, stage, warp, lane):
        every_line(acc, first_line(stage, warp, lane))

    @jit(device=True)
    def straight(acc, stage, warp, lane):
        for half in range(HALVES):
            for j in range(EIGHTS):
                at = place(stage, warp, lane, half, j)
                for h in range(2):
                    v0, v1 = read(at + 8 * h * ROW_BYTES)
                    if not BF16:
                        # They are rounded, so this changes none. But no load then writes a register that a product reads on its own time.
                        v0, v1 = tf32(v0), tf32(v1)
                    acc[(half * EIGHTS + j) * 4 + 2 * h], acc[(half * EIGHTS + j) * 4 + 2 * h + 1] = v0, v1

    return transposed if tile.swapped else straight


@jit(device=True)
def _passes(y):
    """1 where the ReLU whose output is y passes a gradient: NaN passes, so that it is not hidden."""
    return u4(0) if y <= 0.0 else u4(1)


@cache
def take_signs(tile: PatchTile, kind_name: str) -> Any:
    """Device function (signs, stage, warp, lane): a bit of each of a thread's sums, in their order, 0 where the y in its place is 0 or less."""
    LINES, EIGHTS, HALVES = tile.BM // tile.groups // SQUARE, tile.BN // 8, tile.BM // tile.groups // 64
    WORDS, read, place = sign_words(tile), read_pair(kind_name), pair_place(tile, kind_name)

    @jit(device=True)
    def of_pair(word, at):
        return _passes(bf16_low(word)) << at | _passes(bf16_high(word)) << at + 1

    def two_lines(line: int) -> Any:
        TO, WORD, FIRST = line * SQUARE * ROW_BYTES, 4 * line // 32, 4 * line % 32

        @jit(device=True)
        def run(signs, at):
            a, b, c, d = ldmatrix_x4_trans(at + TO)
            signs[WORD] |= of_pair(a, FIRST) | of_pair(b, FIRST + 2) | of_pair(c, FIRST + 4) | of_pair(d, FIRST + 6)

        return run

    def two_columns(half: int, j: int) -> Any:
        HALF, J, WORD, FIRST = half, j, (half * EIGHTS + j) * 4 // 32, (half * EIGHTS + j) * 4 % 32

        @jit(device=True)
        def run(signs, stage, warp, lane):
            at = place(stage, warp, lane, HALF, J)
            a, b = read(at)
            c, d = read(at + 8 * ROW_BYTES)
            signs[WORD] |= _passes(a) << FIRST | _passes(b) << FIRST + 1 | _passes(c) << FIRST + 2 | _passes(d) << FIRST + 3

        return run

    every_line = unrolled([two_lines(line) for line in range(0, LINES, 2)])
    every_column = unrolled([two_columns(half, j) for half in range(HALVES) for j in range(EIGHTS)])

    @jit(device=True)
    def transposed(signs, stage, warp, lane):
        for word in range(WORDS):
            signs[word] = 0
        every_line(signs, first_line(stage, warp, lane))
        for word in range(WORDS):
            signs[word] = unknown_word(signs[word])

    @jit(device=True)
    def straight(signs, stage, warp, lane):
        for word in range(WORDS):
            signs[word] = 0
        every_column(signs, stage, warp, lane)
        for word in range(WORDS):
            signs[word] = unknown_word(signs[word])

    return transposed if tile.swapped else straight


def sign_words(tile: PatchTile) -> int:
    """Words of the signs of a thread's sums."""
    return -(-(tile.BM // tile.groups * tile.BN // WARPGROUP) // 32)


@cache
def _channel(activation: str) -> Any:
    """Device function (weight, bias, mean, rstd, n) -> mean, factor and bias of channel n, of which z = (x − mean)·factor + bias."""
    OF_X = bool(activation)

    @jit(device=True)
    def run(weight, bias, mean, rstd, n):
        if OF_X:
            return mean[n], weight[n] * rstd[n], bias[n]
        return mean[n], 0.0, 0.0

    return run


@cache
def put_sums(tile: PatchTile, kind_name: str, activation: str, masked: bool) -> Any:
    """Device function (acc, signs, stage, warp, lane, n0, K, weight, bias, mean, rstd, memory, partials, chunk, chunks): results to the stage.

    There x lies. Σ g and Σ g·(x − mean) of every channel and warp go to `memory` (`leave_sums`), of swapped products to partials (2,K,chunks).
    g is the result, before it is rounded, behind `activation`. masked: where its sign is 0 a result is 0.
    """
    gradient, channel, MASKED = ACTIVATIONS[activation].behind({}) if activation else passed_on, _channel(activation), masked
    EIGHTS, HALVES, LINES, BN = tile.BN // 8, tile.BM // tile.groups // 64, tile.BM // tile.groups // SQUARE, tile.BN
    store, read, place = store_pair(kind_name), read_pair(kind_name), pair_place(tile, kind_name)
    over_pixels = sum_over(3)

    @jit(device=True)
    def passed(value, signs, at):
        if MASKED:
            value = value if signs[at // 32] >> at % 32 & 1 else 0.0
        return value

    @jit(device=True)
    def add(sums, which, value, x, mean, factor, bias):
        away = x - mean
        g = gradient(value, away * factor + bias)
        sums[which] += g
        sums[2 + which] += g * away

    def two_lines(line: int) -> Any:
        TO, I, J = line * SQUARE * ROW_BYTES, 4 * line, 4 * line + 4

        @jit(device=True)
        def run(acc, signs, sums, at, m0, f0, b0, m1, f1, b1):
            a, b, c, d = ldmatrix_x4_trans(at + TO)
            v0, v1, v2, v3 = (
                passed(acc[I], signs, I),
                passed(acc[I + 1], signs, I + 1),
                passed(acc[I + 2], signs, I + 2),
                passed(acc[I + 3], signs, I + 3),
            )
            w0, w1, w2, w3 = (
                passed(acc[J], signs, J),
                passed(acc[J + 1], signs, J + 1),
                passed(acc[J + 2], signs, J + 2),
                passed(acc[J + 3], signs, J + 3),
            )
            stmatrix_x4_trans(at + TO, bf16x2(v0, v1), bf16x2(v2, v3), bf16x2(w0, w1), bf16x2(w2, w3))
            add(sums, 0, v0, bf16_low(a), m0, f0, b0)
            add(sums, 0, v1, bf16_high(a), m0, f0, b0)
            add(sums, 1, v2, bf16_low(b), m1, f1, b1)
            add(sums, 1, v3, bf16_high(b), m1, f1, b1)
            add(sums, 0, w0, bf16_low(c), m0, f0, b0)
            add(sums, 0, w1, bf16_high(c), m0, f0, b0)
            add(sums, 1, w2, bf16_low(d), m1, f1, b1)
            add(sums, 1, w3, bf16_high(d), m1, f1, b1)

        return run

    every_line = unrolled([two_lines(line) for line in range(0, LINES, 2)])

    @jit(device=True)
    def transposed(acc, signs, stage, warp, lane, n0, K, weight, bias, mean, rstd, memory, partials, chunk, chunks):
        sums = cuda.local.array(4, f4)
        n = n0 + (warp & 3) * 16 + (lane >> 2)
        m0, f0, b0 = channel(weight, bias, mean, rstd, min(n, K - 1))
        m1, f1, b1 = channel(weight, bias, mean, rstd, min(n + 8, K - 1))
        for k in range(4):
            sums[k] = 0.0
        every_line(acc, signs, sums, first_line(stage, warp, lane), m0, f0, b0, m1, f1, b1)
        for k in range(4):
            sums[k] = over_pixels(sums[k])
        if lane & 3 == 0:
            for which in range(2):
                if n + 8 * which < K:
                    partials[(n + 8 * which) * chunks + chunk] = sums[which]
                    partials[(K + n + 8 * which) * chunks + chunk] = sums[2 + which]

    def two_columns(j: int) -> Any:
        J, BEHIND = j, 4 * 8 * j

        @jit(device=True)
        def run(acc, signs, stage, warp, lane, n0, K, weight, bias, mean, rstd, to_memory):
            sums = cuda.local.array(4, f4)
            n = min(n0 + 8 * J + 2 * (lane & 3), K - 2)
            m0, f0, b0 = channel(weight, bias, mean, rstd, n)
            m1, f1, b1 = channel(weight, bias, mean, rstd, n + 1)
            for k in range(4):
                sums[k] = 0.0
            for half in range(HALVES):
                for h in range(2):
                    to, i = place(stage, warp, lane, half, J) + 8 * h * ROW_BYTES, (half * EIGHTS + J) * 4 + 2 * h
                    x0, x1 = read(to)
                    v0, v1 = passed(acc[i], signs, i), passed(acc[i + 1], signs, i + 1)
                    store(to, v0, v1)
                    add(sums, 0, v0, x0, m0, f0, b0)
                    add(sums, 1, v1, x1, m1, f1, b1)
            # Eight lanes have other rows of the same two columns: each gives half of its sums away and keeps half, until it has one of them.
            centred, second = lane & 16 != 0, lane & 8 != 0
            kept0, given0 = (sums[2], sums[0]) if centred else (sums[0], sums[2])
            kept1, given1 = (sums[3], sums[1]) if centred else (sums[1], sums[3])
            kept0 += cuda.shfl_xor_sync(0xFFFFFFFF, given0, 16)
            kept1 += cuda.shfl_xor_sync(0xFFFFFFFF, given1, 16)
            kept, given = (kept1, kept0) if second else (kept0, kept1)
            kept += cuda.shfl_xor_sync(0xFFFFFFFF, given, 8)
            kept += cuda.shfl_xor_sync(0xFFFFFFFF, kept, 4)
            if lane & 4 == 0:
                store_words_1(to_memory + BEHIND, float_bits(kept))

        return run

    every_column = unrolled([two_columns(j) for j in range(EIGHTS)])

    @jit(device=True)
    def straight(acc, signs, stage, warp, lane, n0, K, weight, bias, mean, rstd, memory, partials, chunk, chunks):
        column = 2 * (lane & 3) + (lane >> 3 & 1)
        to_memory = memory + 4 * (BN * (2 * (warp & 3) + (lane >> 4)) + column)
        every_column(acc, signs, stage, warp, lane, n0, K, weight, bias, mean, rstd, to_memory)

    return transposed if tile.swapped else straight


@cache
def leave_sums(tile: PatchTile) -> Any:
    """Device function (memory, partials, t, n0, K, chunk, chunks): the sums of a warpgroup's warps become a chunk's, partials (2,K,chunks).

    t is the thread in its warpgroup. A barrier of the warpgroup stands before it, and another one before `memory` is written again.
    """
    BN = tile.BN

    @jit(device=True)
    def run(memory, partials, t, n0, K, chunk, chunks):
        for n in range(t, BN, WARPGROUP):
            if n0 + n < K:
                plain, centred = 0.0, 0.0
                for warp in range(WARPS):
                    at = memory + 4 * (BN * 2 * warp + n)
                    plain += bits_float(load_words_1(at))
                    centred += bits_float(load_words_1(at + 4 * BN))
                partials[(n0 + n) * chunks + chunk] = plain
                partials[(K + n0 + n) * chunks + chunk] = centred

    return run
