"""This module takes the moments of a tile's results channel by channel, while they lie in shared memory: for a batch normalisation behind.

An engine's epilogue "moments" stores rows as "rows" does, and leaves two numbers of each channel and *chunk* of pixels in scratch: their mean and
Σ (x − mean)², of the values as they are stored. A second, small kernel puts the chunks together (`nbcnn.ops.norms.batch_forward`), in a fixed order:
nothing depends on which block came first.

Threads that stand side by side have neighbouring channels of a row, `width` of them, and every so many rows of the chunk. Their sums are of distances
from the chunk's first pixel, which is one of its values: so a variance loses no digits to a large mean. Lanes of a warp that have the same channels
add theirs by shuffles, warps through shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from nbcnn.gpu.language import jit
from nbcnn.ops.ptx.cvt import bf16_high, bf16_low, bits_float, float_bits
from nbcnn.ops.ptx.shared import load_words_1, store_words_4
from nbcnn.ops.ptx.shuffle import WARP, sum_over


@dataclass(frozen=True)
class Columns:
    """How `threads` threads share rows of `channels` channels: each has `width` neighbouring ones, 16 bytes, of every `step`-th row."""

    channels: int
    width: int
    threads: int

    @property
    def across(self) -> int:
        """Threads of a row, a power of two."""
        return self.channels // self.width

    @property
    def step(self) -> int:
        return self.threads // self.across

    @property
    def slots(self) -> int:
        """Sums of a channel that meet in shared memory: one of each warp that has it."""
        return self.threads // max(self.across, WARP)

    @property
    def nbytes(self) -> int:
        """Shared memory: of each channel its lead, and two sums per slot."""
        return 4 * self.channels * (1 + 2 * self.slots)


@cache
def words_to_floats(width: int) -> Any:
    """Device function (values, a, b, c, d): 16 bytes as four float32, or of `width` 8 as eight bfloat16, to values[0 …]."""
    if width == 4:

        @jit(device=True)
        def run(values, a, b, c, d):
            values[0], values[1], values[2], values[3] = bits_float(a), bits_float(b), bits_float(c), bits_float(d)
    else:

        @jit(device=True)
        def run(values, a, b, c, d):
            values[0], values[1], values[2], values[3] = bf16_low(a), bf16_high(a), bf16_low(b), bf16_high(b)
            values[4], values[5], values[6], values[7] = bf16_low(c), bf16_high(c), bf16_low(d), bf16_high(d)

    return run


@cache
def add_row(width: int) -> Any:
    """Device function (sums, leads, values): the distances of `width` values from their leads, and the squares of these, to sums[0 …]."""
    WIDTH = width

    @jit(device=True)
    def run(sums, leads, values):
        for q in range(WIDTH):
            away = values[q] - leads[q]
            sums[q] += away
            sums[WIDTH + q] += away * away

    return run


@cache
def finish(columns: Columns, barrier: Any) -> Any:
    """Device function (memory, leads, sums, partials, t, n0, K, chunk, chunks, count): the moments of a chunk to partials (2,K,chunks).

    count: its pixels. memory: `columns.nbytes` of shared memory at this address, of the `columns.threads` threads that call it, t the thread among
    them. `barrier` is theirs. Who calls it again puts a barrier between.
    """
    CHANNELS, WIDTH, THREADS, ACROSS, SLOTS = columns.channels, columns.width, columns.threads, columns.across, columns.slots
    SUMS, QUADS, SPAN = 2 * WIDTH, WIDTH // 4, max(ACROSS, WARP)
    across_lanes = sum_over(WARP - ACROSS if ACROSS < WARP else 0)

    @jit(device=True)
    def run(memory, leads, sums, partials, t, n0, K, chunk, chunks, count):
        for k in range(SUMS):
            sums[k] = across_lanes(sums[k])
        at = memory + (t & ACROSS - 1) * (4 * WIDTH)
        if t < ACROSS:
            for j in range(QUADS):
                a, b = float_bits(leads[4 * j]), float_bits(leads[4 * j + 1])
                store_words_4(at + 16 * j, a, b, float_bits(leads[4 * j + 2]), float_bits(leads[4 * j + 3]))
        if t & WARP - 1 < ACROSS:
            to = at + 4 * CHANNELS * (1 + 2 * (t // SPAN))
            for which in range(2):
                for j in range(QUADS):
                    k = which * WIDTH + 4 * j
                    a, b, c, d = float_bits(sums[k]), float_bits(sums[k + 1]), float_bits(sums[k + 2]), float_bits(sums[k + 3])
                    store_words_4(to + 4 * CHANNELS * which + 16 * j, a, b, c, d)
        barrier()
        for n in range(t, CHANNELS, THREADS):
            if n0 + n < K:
                total, squares = 0.0, 0.0
                for slot in range(SLOTS):
                    mine = memory + 4 * (CHANNELS * (1 + 2 * slot) + n)
                    total += bits_float(load_words_1(mine))
                    squares += bits_float(load_words_1(mine + 4 * CHANNELS))
                away = total / count
                partials[(n0 + n) * chunks + chunk] = bits_float(load_words_1(memory + 4 * n)) + away
                partials[(K + n0 + n) * chunks + chunk] = max(squares - total * away, 0.0)

    return run
