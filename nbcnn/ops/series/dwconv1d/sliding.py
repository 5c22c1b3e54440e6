"""The inner loop of variant best: twelve results per thread, over a window of elements that slides through registers.

    acc[m] += Σ_i factor[i] · element[i+m+shift]        m < 12

Four products on, the window has moved by one quad of elements: a step loads that quad and a quad of factors, 16 bytes each, and
does 48 multiply-adds, four times as long as the loads take. The window is a ring: nothing is moved, the steps of one iteration differ in
where they begin. `shift` (0 to 3) lets elements lie in shared memory where 16-byte loads want them, whatever the first tap is.

Twelve is three quads, an odd number, so eight threads twelve elements apart in one row meet all banks; and so do rows whose
pitch is an odd number of quads.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.kernel.call import blocks
from nbcnn.ops.kernel.loops import within
from nbcnn.ops.kernel.stored import scalar_io, vector_load_if
from nbcnn.ops.ptx.shuffle import WARP
from nbcnn.ops.ptx.vector import shared_load4, shared_load4_any, shared_store4
from nbcnn.ops.series.dwconv1d.series import Correlation

RESULTS = 12
"""Results of a thread."""
ROWS = WARP
"""Rows that a block stages at once: a lane works in a row of its own."""
OVERRUN = 8
"""Elements that the window may be loaded beyond the last one used."""
MOST_SEGMENTS = 8
AT_ONCE = 4
"""Rows of which a thread has loads in flight."""


@dataclass(frozen=True)
class Sliding:
    """`segments` warps per block, so tiles of 12·segments elements; a row is one tile of a series, `pack` tiles of one series lie in
    neighbouring rows; a weight gradient is summed in `split` parts."""

    segments: int
    pack: int
    split: int = 1

    @property
    def length(self) -> int:
        """Elements of a tile."""
        return RESULTS * self.segments

    def tiles(self, g: Correlation) -> int:
        """Blocks of rows that the tiles of one series give, `pack` at a time."""
        return blocks(blocks(g.L, self.length), self.pack)

    def batches(self, g: Correlation) -> int:
        """Blocks of rows that the series of one channel give."""
        return blocks(g.N, ROWS // self.pack)


def choose(g: Correlation, split: int = 1) -> Sliding:
    """The segments that waste least of their last tile and of the halos; few series give up lanes to more tiles of each."""

    def cost(segments: int) -> tuple[int, int]:
        tile = RESULTS * segments
        return blocks(g.L, tile) * (tile + RESULTS), -segments

    segments, pack = min(range(1, MOST_SEGMENTS + 1), key=cost), 1
    while pack < blocks(g.L, RESULTS * segments) and g.N * pack <= ROWS // 2:
        pack *= 2
    return Sliding(segments, pack, split)


def odd_quads(width: int) -> int:
    """The smallest pitch from `width` on that is an odd number of quads."""
    return 4 * (blocks(width, 4) | 1)


@functools.cache
def slide(shift: int) -> Any:
    """A device function run(acc, shared, at_factor, at, first, last): the sum above over i = first .. last − 1.

    first is a multiple of four; up to three factors from `last` on count too. Elements start at `at`, factors at `at_factor`. A lane without a series
    reads factors that nobody has written, and the window runs ahead of the elements: neither reaches a result.
    """
    WINDOW_QUADS = -(-(RESULTS + 3 + shift) // 4)
    WINDOW = 4 * WINDOW_QUADS

    def step(q: int) -> Any:
        BEGIN, FREE, AHEAD, PLACE = 4 * q + shift, 4 * q, 4 * (q + WINDOW_QUADS), 4 * q

        @jit(device=True)
        def multiply(acc, window, shared, at_factor, at, i):
            k0, k1, k2, k3 = shared_load4_any(shared, at_factor + i + PLACE)
            for m in range(RESULTS):
                acc[m] += k0 * window[(BEGIN + m) % WINDOW]
                acc[m] += k1 * window[(BEGIN + m + 1) % WINDOW]
                acc[m] += k2 * window[(BEGIN + m + 2) % WINDOW]
                acc[m] += k3 * window[(BEGIN + m + 3) % WINDOW]
            window[FREE], window[FREE + 1], window[FREE + 2], window[FREE + 3] = shared_load4_any(shared, at + i + AHEAD)

        return multiply

    def then(before: Any, q: int) -> Any:
        multiply, PLACE = step(q), 4 * q

        @jit(device=True)
        def both(acc, window, shared, at_factor, at, i, last):
            before(acc, window, shared, at_factor, at, i, last)
            if i + PLACE < last:
                multiply(acc, window, shared, at_factor, at, i)

        return both

    only = step(0)

    @jit(device=True)
    def begin(acc, window, shared, at_factor, at, i, last):
        only(acc, window, shared, at_factor, at, i)

    iteration = functools.reduce(then, range(1, WINDOW_QUADS), begin)

    @jit(device=True)
    def run(acc, shared, at_factor, at, first, last):
        if first < last:
            window = cuda.local.array(WINDOW, f4)
            for q in range(WINDOW_QUADS):
                a, b, c, d = shared_load4(shared, at + first + 4 * q)
                window[4 * q], window[4 * q + 1], window[4 * q + 2], window[4 * q + 3] = a, b, c, d
            i = first
            while i < last:
                iteration(acc, window, shared, at_factor, at, i, last)
                i += WINDOW

    return run


@functools.cache
def stage_rows(kind: str, vector: bool, warps: int, pack: int, tile: int) -> Any:
    """A device function with which `warps` warps stage 32 rows of `width` elements, as float32; `vector`: L is a multiple of four.

    stage(shared, at, pitch, source, n0, part0, first, width, N, C, c, L, warp, lane): row r holds series n0 + r // pack from element
    (part0 + r % pack)·tile + first on, zeros outside. With `vector`, first and width are multiples of four.
    """
    load, _ = scalar_io(kind)
    load4_if = vector_load_if(kind)
    SHIFT, MASK, STEP, STAGED = pack.bit_length() - 1, pack - 1, 4 if vector else 1, 4 * AT_ONCE

    @jit(device=True)
    def one(source, at, wanted):
        return load(source, at) if wanted else 0.0

    @jit(device=True)
    def stage(shared, at, pitch, source, n0, part0, first, width, N, C, c, L, warp, lane):
        values = cuda.local.array(STAGED, f4)
        s = STEP * lane
        while s < width:
            r = warp
            while r < ROWS:
                for b in range(AT_ONCE):
                    row = r + b * warps
                    n = n0 + (row >> SHIFT)
                    p = (part0 + (row & MASK)) * tile + first + s
                    # As an unsigned number a negative place lies beyond any length.
                    inside = (row < ROWS) & (n < N) & within(p, L)
                    if vector:
                        v0, v1, v2, v3 = load4_if(source, (n * C + c) * L + p, inside)
                        values[4 * b], values[4 * b + 1], values[4 * b + 2], values[4 * b + 3] = v0, v1, v2, v3
                    else:
                        values[4 * b] = one(source, (n * C + c) * L + p, inside)
                for b in range(AT_ONCE):
                    row = r + b * warps
                    if row < ROWS:
                        to = at + row * pitch + s
                        if vector:
                            shared_store4(shared, to, values[4 * b], values[4 * b + 1], values[4 * b + 2], values[4 * b + 3])
                        else:
                            shared[to] = values[4 * b]
                r += AT_ONCE * warps
            s += STEP * WARP

    return stage
