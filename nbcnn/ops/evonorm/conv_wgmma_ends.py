"""What a convolution with its EvoNorm on tensor cores does with its products (conv_wgmma_kernel.py): results out and into sums, sums merged,
the results read back and normalised.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from nbcnn.cuda import cuda, f4, i4, i8, jit, u4
from nbcnn.ops.conv.thin_shape import unrolled
from nbcnn.ops.conv.wgmma.tensor_maps import ROW_BYTES
from nbcnn.ops.conv.wgmma.tile import KINDS, WARPGROUP
from nbcnn.ops.evonorm.conv_wgmma_form import FILTERS, Form
from nbcnn.ops.ptx.cvt import bf16_high, bf16_low, bf16x2, tf32, unknown
from nbcnn.ops.ptx.fast import LOG2E, exp2, reciprocal, tanh
from nbcnn.ops.ptx.ldmatrix import stmatrix_x2_trans
from nbcnn.ops.sigmoid import divide
from nbcnn.ops.stored import vector_io

EACH = 8
"""Accesses that a thread has in flight when it reads back."""


@cache
def finish_tile(form: Form) -> Any:
    """Device function (acc, sums, stage, raw, at, lane, chunk, lines, K): a tile's results, rounded, to the stage or to raw[at …], and into `sums`.

    sums: of this thread's two channels, their number, then of each a lead, Σ (x − lead), Σ (x − lead)². chunk: 16 bytes of a row of the
    stage. lines: those that there are.
    """
    Q, PW, SPARE, BF16 = form.Q, form.PW, form.lines * form.Q, KINDS[form.kind].result == 2

    def eight_columns(j: int) -> Any:
        LINE, COLUMN, AT, WRAPS = 8 * j // PW, 8 * j % PW, 4 * j, 8 * j % PW + 7 >= PW

        @jit(device=True)
        def place(offset):
            line, column = i4(LINE), i4(i4(COLUMN) + offset)
            if WRAPS and column >= i4(PW):
                line, column = i4(line + i4(1)), i4(column - i4(PW))
            return line, column

        @jit(device=True)
        def add(sums, x, y):
            for value, first in ((x, 0), (y, 3)):
                d = value - sums[1 + first]
                sums[2 + first] += d
                sums[3 + first] += d * d

        @jit(device=True)
        def run(acc, sums, stage, raw, at, lane, chunk, lines, K):
            lane = unknown(lane)
            line, column = place(i4((lane & i4(3)) * i4(2)))
            inside = (column < i4(Q)) & (line < lines)
            if BF16:
                low, high = bf16x2(acc[AT], acc[AT + 1]), bf16x2(acc[AT + 2], acc[AT + 3])
                x0, x1, y0, y1 = bf16_low(low), bf16_high(low), bf16_low(high), bf16_high(high)
                to_line, to_column = place(i4(lane & i4(7)))
                row = i4(to_line * i4(Q) + to_column) if (to_column < i4(Q)) & (to_line < lines) else i4(SPARE)
                stmatrix_x2_trans(stage + u4(row * i4(ROW_BYTES)) + u4((chunk ^ (row & i4(7))) << i4(4)), low, high)
            else:
                x0, x1, y0, y1 = tf32(acc[AT]), tf32(acc[AT + 1]), tf32(acc[AT + 2]), tf32(acc[AT + 3])
                if inside:
                    to = i4(at + (line * i4(Q) + column) * K)
                    raw[to], raw[to + K], raw[to + i4(8)], raw[to + K + i4(8)] = x0, x1, y0, y1
            if inside:
                if j == 0 and sums[0] == f4(0):
                    sums[1], sums[4] = x0, y0
                sums[0] += f4(2)
                add(sums, x0, y0)
                add(sums, x1, y1)

        return run

    return unrolled([eight_columns(j) for j in range(form.columns // 8)])


@jit(device=True)
def merge(n, mean, squares, other_n, other_mean, other_squares):
    """Chan's formula: count, mean and Σ (x − mean)² of two sets together."""
    total = n + other_n
    share = divide(other_n, max(total, f4(1)))
    away = other_mean - mean
    return total, mean + away * share, squares + other_squares + away * away * (n * share)


@cache
def merged_lanes(lanes: int) -> Any:
    """Device function (n, mean, squares): of 1, 2 or 4 neighbouring lanes together, in a fixed order; the first lane's bits are those to keep."""

    @jit(device=True)
    def further(n, mean, squares, away):
        other_n, other_mean = cuda.shfl_xor_sync(0xFFFFFFFF, n, away), cuda.shfl_xor_sync(0xFFFFFFFF, mean, away)
        return merge(n, mean, squares, other_n, other_mean, cuda.shfl_xor_sync(0xFFFFFFFF, squares, away))

    @jit(device=True)
    def run(n, mean, squares):
        if lanes > 1:
            n, mean, squares = further(n, mean, squares, 1)
        if lanes > 2:
            n, mean, squares = further(n, mean, squares, 2)
        return n, mean, squares

    return run


@jit(device=True)
def _sigmoid_by_tanh(z):
    """σ(2z) to 2⁻¹², less than half of bfloat16's rounding of 1; one special function where the exact form takes two."""
    return f4(0.5) + f4(0.5) * tanh(z)


@jit(device=True)
def _sigmoid_by_exp2(z):
    """σ(−z/log₂e)."""
    return reciprocal(f4(1) + exp2(z))


@cache
def normaliser(form: Form) -> Any:
    """(raw, y, scales, own_scales, gamma, beta, v, running, k0, t, first, last, K, eps): y of 64 channels of the pixels first … last − 1.

    t: the thread's number in its warpgroup; scales: shared, s of every channel, from own_scales on.
    """
    load, store = vector_io({"bf16": "bfloat16", "tf32": "tfloat32"}[form.kind])
    ACCESSES = EACH * (2 if form.kind == "bf16" else 1)
    FLOATS, QUADS, ROWS, S0 = 4 * ACCESSES, FILTERS // 4, WARPGROUP // (FILTERS // 4), form.end != "b0 infer"
    sigmoid, SCALE = (_sigmoid_by_tanh, 0.5) if form.kind == "bf16" else (_sigmoid_by_exp2, -LOG2E)

    @jit(device=True)
    def run(raw, y, scales, own_scales, gamma, beta, v, running, k0, t, first, last, K, eps):
        held = cuda.local.array(FLOATS, f4)
        factor = cuda.local.array(4, f4)
        slope = cuda.local.array(4, f4)
        plus = cuda.local.array(4, f4)
        least = cuda.local.array(4, f4)
        own = cuda.local.array(4, f4)
        channel = i4((t & i4(QUADS - 1)) * i4(4))
        for e in range(4):
            c = i4(k0 + channel + i4(e))
            own[e] = scales[own_scales + channel + i4(e)]
            factor[e] = gamma[c] / own[e] if S0 else gamma[c]
            slope[e], plus[e] = v[c] * f4(SCALE) if S0 else v[c], beta[c]
            least[e] = f4(0) if S0 else f4(math.sqrt(running[c] + eps))
        pixel = i4(first + i4(u4(t) // u4(QUADS)))
        while pixel < last:
            at = i8(pixel) * i8(K) + i8(k0 + channel)
            for i in range(ACCESSES):
                # Beyond the last pixel the thread's first is read once more: loads without branches, all in flight.
                here = at + i8(i * ROWS) * i8(K) if pixel + i4(i * ROWS) < last else at
                held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3] = load(raw, here)
            for i in range(ACCESSES):
                for e in range(4):
                    x = held[4 * i + e]
                    if S0:
                        held[4 * i + e] = factor[e] * x * sigmoid(slope[e] * x) + plus[e]
                    else:
                        held[4 * i + e] = factor[e] * divide(x, max(least[e], slope[e] * x + own[e])) + plus[e]
                if pixel + i4(i * ROWS) < last:
                    store(y, at + i8(i * ROWS) * i8(K), held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3])
            pixel = i4(pixel + i4(ACCESSES * ROWS))

    return run
