"""The epilogue of a convolution with its EvoNorm on tensor cores (wgmma_kernel.py): results are stored and summed, the sums merged, and the
results read back and normalised.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, i8, jit, u4
from nbcnn.ops.activations.sigmoid import divide
from nbcnn.ops.conv.wgmma.tile import KINDS, WARPGROUP
from nbcnn.ops.conv_norm.wgmma_form import FILTERS, Form
from nbcnn.ops.kernel.loops import unrolled
from nbcnn.ops.kernel.stored import vector_io
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES
from nbcnn.ops.ptx.cvt import bf16_high, bf16_low, bf16x2, tf32, unknown
from nbcnn.ops.ptx.fast import LOG2E, exp2, larger, reciprocal, tanh
from nbcnn.ops.ptx.ldmatrix import stmatrix_x2_trans
from nbcnn.ops.ptx.shared import load_words_2

MEMORY_ACCESSES = 8
"""Accesses of sixteen bytes that a thread has in flight when it reads back from memory."""
SHARED_ACCESSES = 4
"""Accesses of eight bytes in flight from shared memory, which answers sooner."""

QUADS = FILTERS // 4
"""Threads side by side that normalise a pixel."""
_STORED = {"bf16": "bfloat16", "tf32": "tfloat32"}


@cache
def put_tile(form: Form) -> Any:
    """Device function (acc, sums, stage, spare, raw, at, lane, chunk, lines, K): a tile's results, rounded, to the stage or to raw[at …], and into
    `sums`.

    sums: of this thread's two channels, their number, then of each a lead, Σ (x − lead), Σ (x − lead)². chunk: 16 bytes of a row of the
    stage. spare: a row for what lies outside the image. lines: those of the tile that lie inside the image.
    """
    Q, PW, BF16 = form.Q, form.PW, KINDS[form.kind].result == 2

    def eight_columns(j: int) -> Any:
        LINE, COLUMN, AT, WRAPS = 8 * j // PW, 8 * j % PW, 4 * j, 8 * j % PW + 7 >= PW

        @jit(device=True)
        def place(offset):
            line, column = LINE, COLUMN + offset
            if WRAPS and column >= PW:
                line, column = line + 1, column - PW
            return line, column

        @jit(device=True)
        def add(sums, x, y):
            for value, first in ((x, 0), (y, 3)):
                d = value - sums[1 + first]
                sums[2 + first] += d
                sums[3 + first] += d * d

        @jit(device=True)
        def run(acc, sums, stage, spare, raw, at, lane, chunk, lines, K):
            lane = unknown(lane)
            line, column = place((lane & 3) * 2)
            inside = (column < Q) & (line < lines)
            if BF16:
                low, high = bf16x2(acc[AT], acc[AT + 1]), bf16x2(acc[AT + 2], acc[AT + 3])
                x0, x1, y0, y1 = bf16_low(low), bf16_high(low), bf16_low(high), bf16_high(high)
                to_line, to_column = place(lane & 7)
                row = to_line * Q + to_column
                to = stage + row * ROW_BYTES if (to_column < Q) & (to_line < lines) else spare
                stmatrix_x2_trans(to + ((chunk ^ (row & 7)) << 4), low, high)
            else:
                x0, x1, y0, y1 = tf32(acc[AT]), tf32(acc[AT + 1]), tf32(acc[AT + 2]), tf32(acc[AT + 3])
                if inside:
                    to = at + (line * Q + column) * K
                    raw[to], raw[to + K], raw[to + 8], raw[to + K + 8] = x0, x1, y0, y1
            if inside:
                if j == 0 and sums[0] == 0.0:
                    sums[1], sums[4] = x0, y0
                sums[0] += 2.0
                add(sums, x0, y0)
                add(sums, x1, y1)

        return run

    return unrolled([eight_columns(j) for j in range(form.columns // 8)])


@jit(device=True)
def merge(n, mean, squares, other_n, other_mean, other_squares):
    """Chan's formula: count, mean and Σ (x − mean)² of two sets together."""
    total = n + other_n
    share = divide(other_n, max(total, 1.0))
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
    return 0.5 + 0.5 * tanh(z)


@jit(device=True)
def _sigmoid_by_exp2(z):
    """σ(−z/log₂e)."""
    return reciprocal(1.0 + exp2(z))


@cache
def channel_numbers(form: Form) -> Any:
    """Device function (of, gamma, beta, v, running, k0, t, eps): of the thread's four channels γ, β, the slope and the least divisor, in this order.

    t: the thread's number in its warpgroup.
    """
    S0 = form.epilogue != "b0 infer"
    SCALE = 1.0 if not S0 else 0.5 if form.kind == "bf16" else -LOG2E

    @jit(device=True)
    def run(of, gamma, beta, v, running, k0, t, eps):
        quad = unknown(t) & QUADS - 1  # or all addresses are made at the kernel's start, and kept
        for e in range(4):
            c = k0 + quad * 4 + e
            of[e], of[4 + e], of[8 + e] = gamma[c], beta[c], v[c] * SCALE
            of[12 + e] = 0.0 if S0 else math.sqrt(running[c] + eps)

    return run


@cache
def _reader(form: Form) -> Any:
    """Device function (raw, kept, at, pixel, quad) -> four results: of memory from raw[at] on, or of a pixel that was kept."""
    load, _ = vector_io(_STORED[form.kind])
    TILE = form.lines * form.Q
    GAP = form.stage_bytes // ROW_BYTES - TILE

    @jit(device=True)
    def of_memory(raw, kept, at, pixel, quad):
        return load(raw, at)

    @jit(device=True)
    def of_shared(raw, kept, at, pixel, quad):
        row = u4(pixel)
        if GAP:
            row += row // TILE * GAP
        low, high = load_words_2(kept + row * ROW_BYTES + (((u4(quad) >> 1) ^ (row & 7)) << 4) + ((quad & 1) << 3))
        return bf16_low(low), bf16_high(low), bf16_low(high), bf16_high(high)

    return of_shared if form.kept else of_memory


@cache
def normaliser(form: Form) -> Any:
    """Device function (raw, y, kept, scales, own_scales, of, k0, t, first, pixels, K): y of 64 channels of `pixels` pixels from `first` on.

    t: the thread's number in its warpgroup; kept: where its results lie in shared memory, if they were kept; scales: shared, s of every channel,
    from own_scales on; of: the thread's `channel_numbers`.
    """
    read, (_, store) = _reader(form), vector_io(_STORED[form.kind])
    ACCESSES = SHARED_ACCESSES if form.kept else MEMORY_ACCESSES * (2 if form.kind == "bf16" else 1)
    FLOATS, ROWS, S0 = 4 * ACCESSES, WARPGROUP // QUADS, form.epilogue != "b0 infer"
    sigmoid = _sigmoid_by_tanh if form.kind == "bf16" else _sigmoid_by_exp2

    @jit(device=True)
    def run(raw, y, kept, scales, own_scales, of, k0, t, first, pixels, K):
        held = cuda.local.array(FLOATS, f4)
        own = cuda.local.array(4, f4)
        quad = t & QUADS - 1
        for e in range(4):
            own[e] = scales[own_scales + quad * 4 + e]
            if S0:
                of[e] = divide(of[e], own[e])
        pixel = t // QUADS
        while pixel < pixels:
            at = i8(first + pixel) * K + (k0 + quad * 4)
            for i in range(ACCESSES):
                # Beyond the last pixel the thread's first is read once more: loads without branches, all in flight.
                inside = pixel + i * ROWS < pixels
                here, there = (at + i8(i * ROWS) * K, pixel + i * ROWS) if inside else (at, pixel)
                held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3] = read(raw, kept, here, there, quad)
            for i in range(ACCESSES):
                for e in range(4):
                    x = held[4 * i + e]
                    if S0:
                        held[4 * i + e] = of[e] * x * sigmoid(of[8 + e] * x) + of[4 + e]
                    else:
                        held[4 * i + e] = of[e] * divide(x, larger(of[12 + e], of[8 + e] * x + own[e])) + of[4 + e]
                if pixel + i * ROWS < pixels:
                    store(y, at + i8(i * ROWS) * K, held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3])
            pixel += ACCESSES * ROWS

    return run
