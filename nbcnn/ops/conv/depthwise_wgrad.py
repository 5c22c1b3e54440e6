"""The weight gradient of a depthwise convolution: dw[c,r,s] = Σ_{n,p,q} dy[n,p,q,c] · x[n, row of p and r, column of q and s, c].

The walk is that of `depthwise_walk.py`: a thread owns four neighbouring channels (NHWC; else one) and walks down a column of y. A step reads the
next rows of x, S columns wide, and one element of dy; the last dy's that the rows of x meet stay in registers, and so do all R·S sums. When its
strips are done, the lanes of a warp that own the same channels add their sums by shuffles, and the warps of a block in order through shared
memory. A second launch adds the blocks' parts in order (`grouped.sum_kernel`), so nothing is atomic and bits repeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.gpu.target import Target
from nbcnn.ops.conv.depthwise import (
    WALK,
    columns_of,
    fetch_rows,
    group_of,
    held,
    kind_of,
    lanes_of,
    lengths_of,
    supports,
    together_of,
    unpack_step,
)
from nbcnn.ops.conv.depthwise_walk import Walk, inside, pass_of
from nbcnn.ops.conv.grouped import launch_sum, sum_traffic
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.cost import stream
from nbcnn.ops.kernel.loops import ceil_div, unrolled
from nbcnn.ops.kernel.traffic import Traffic, element, size
from nbcnn.ops.kernel.windows import split
from nbcnn.ops.ptx.shuffle import WARP, sum_over
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

THREADS = 256
WARPS = THREADS // WARP
FEW_SUMS = 64
"""Sums of a thread at most with which two blocks share a multiprocessor: 128 registers per thread."""
LEAST_STEPS = 16
"""Steps of a walk that a thread should have before its sums are added to those of others."""


@dataclass(frozen=True)
class Parts:
    """Strips of `length` steps of `columns` columns, `together` of them loaded at once; `group` threads along the channels; `parts` of the sum."""

    length: int
    together: int
    columns: int
    group: int
    parts: int


def blocks_of(sums: int) -> int:
    """Blocks of threads with so many sums that a multiprocessor holds."""
    return 2 if sums <= FEW_SUMS else 1


@cache
def add_step(walk: Walk, lanes: int, with_bias: bool) -> Any:
    """Device function (values, ring, acc): the products of a step's values of x with the rows of dy in `ring`, the newest last, into acc[tap, lane].

    Then the ring moves on by a row. acc[R·S] is the sum of dy.
    """
    R, S, READS, SLOTS, OVER, ACROSS, L = walk.R, walk.S, walk.reads, walk.slots, walk.over, walk.across, lanes
    COLUMNS, JUMP, TAPS, ROW = walk.columns, walk.jump, R * S, walk.columns * lanes

    @jit(device=True)
    def run(values, ring, acc):
        for r in range(R):
            e = R - 1 - r
            for s in range(S):
                for j in range(COLUMNS):
                    for c in range(L):
                        value = values[((READS - 1 - e % OVER) * ACROSS + s + j * JUMP) * L + c]
                        acc[(r * S + s) * L + c] += ring[e // OVER * ROW + j * L + c] * value
        if with_bias:
            for j in range(COLUMNS):
                for c in range(L):
                    acc[TAPS * L + c] += ring[(SLOTS - 1) * ROW + j * L + c]
        for k in range(SLOTS - 1):
            for c in range(ROW):
                ring[k * ROW + c] = ring[(k + 1) * ROW + c]

    return run


@cache
def wgrad_kernel(walk: Walk, kind: str, lanes: int, nhwc: bool, together: int, group: int, with_bias: bool) -> Any:
    """The kernel of a part of the gradient; x and dy are stored as `kind`, a thread owns `lanes` channels, `group` threads lie along them."""
    S, READS, SLOTS, ACROSS, L, COLUMNS = walk.S, walk.reads, walk.slots, walk.across, lanes, walk.columns
    LINES, ALL, STEP = THREADS // group, (walk.R * S + with_bias) * lanes, READS * ACROSS * lanes
    PLACES, WIDTH, ROW, add = ALL // L, group * lanes, walk.columns * lanes, add_step(walk, lanes, with_bias)
    SHARED, RING = PLACES * WIDTH, SLOTS * ROW
    hold = held(lanes, kind)
    WORD, WORDS, load, unpack_dy = hold.kind, hold.words, hold.load, hold.unpack
    HELD_X, HELD_DY = together * READS * ACROSS * WORDS, together * COLUMNS * WORDS
    same_channels = sum_over(WARP - group)

    def read_dy(g: int) -> Any:
        FIRST = g * COLUMNS * WORDS

        @jit(device=True)
        def run(dy, target, step, first, last, rows, q, extent, words):
            (phase, phases), (P, Q, inner) = rows, extent
            newest = step + g + (SLOTS - 1)
            p = phase + newest * phases
            inside = (newest >= first) & (newest < last) & (p < P)
            for j in range(COLUMNS):
                load(dy, target + (p * Q + q + j) * inner, inside & (q + j < Q), words, FIRST + j * WORDS)

        return run

    def compute(g: int) -> Any:
        FIRST, unpack = g * COLUMNS * WORDS, unpack_step(walk, lanes, kind, g)

        @jit(device=True)
        def run(words, fresh, ring, acc):
            values = cuda.local.array(STEP, f4)
            unpack(values, words)
            for j in range(COLUMNS):
                unpack_dy(ring, (SLOTS - 1) * ROW + j * L, fresh, FIRST + j * WORDS)
            add(values, ring, acc)

        return run

    def over_lanes(t: int) -> Any:
        """The sums of tap t over the lanes of the same channels: without a loop, which the compiler would not unroll around shuffles."""
        FIRST = t * L

        @jit(device=True)
        def one(acc):
            acc[FIRST] = same_channels(acc[FIRST])

        @jit(device=True)
        def four(acc):
            acc[FIRST] = same_channels(acc[FIRST])
            acc[FIRST + 1] = same_channels(acc[FIRST + 1])
            acc[FIRST + 2] = same_channels(acc[FIRST + 2])
            acc[FIRST + 3] = same_channels(acc[FIRST + 3])

        return four if L == 4 else one

    # In rows, because Numba resolves calls within calls by recursion, and runs out of it at about forty.
    add_lanes = unrolled([unrolled([over_lanes(t) for t in range(at, min(at + S, PLACES))]) for at in range(0, PLACES, S)])
    read_x_all = unrolled([fetch_rows(walk, lanes, kind, g) for g in range(together)])
    read_dy_all, compute_all = unrolled([read_dy(g) for g in range(together)]), unrolled([compute(g) for g in range(together)])

    @jit(launch_bounds=(THREADS, blocks_of(ALL)))
    def depthwise_wgrad_kernel(
        x, dy, partials, C, groups, cells, strips, phases, length, steps, items, share, H, W, P, Q,
        row0, row_phase, row_step, row_read, col0, col_step, col_read,
    ):  # fmt: skip
        """partials[z,t,c] = Σ over part z of the strips (n,q,strip) of dy[n,p,q,c] · x[n,row,column,c] for tap t = (r,s); of dy alone for t = R·S.

        grid (⌈(C/lanes)/group⌉, parts), block 256; a block owns group·lanes channels and `share` strips; line l of its 256/group lines of threads
        takes every strip of number l modulo 256/group: neighbours are the next channels, then the next columns.
        shared 4·taps·group·lanes bytes; moves dy once, x through L1 as often as windows of cells overlap, and partials once. source: see the module.
        """
        sums = cuda.shared.array(SHARED, f4)
        tid = cuda.threadIdx.x
        lane, line = tid % group, tid // group
        own = cuda.blockIdx.x * group + lane
        acc, ring = cuda.local.array(ALL, f4), cuda.local.array(RING, f4)
        words, ahead = cuda.local.array(HELD_X, WORD), cuda.local.array(HELD_X, WORD)
        fresh, fresh_ahead = cuda.local.array(HELD_DY, WORD), cuda.local.array(HELD_DY, WORD)
        for t in range(ALL):
            acc[t] = 0.0
        begin = cuda.blockIdx.y * share
        end = min(begin + share, items) if own < groups else 0
        inner = C if nhwc else 1
        for item in range(begin + line, end, LINES):
            rest, cell = split(item, cells)
            n, strip = split(rest, strips * phases)
            part, phase = split(strip, phases)
            image, at = (n, own * L) if nhwc else (n * C + own, 0)
            source, target = image * H * W * inner + at, image * P * Q * inner + at
            for k in range(RING):
                ring[k] = 0.0
            first = part * length
            last = min(first + length, steps)
            rows, columns, q = (row0 + phase * row_phase, row_step, row_read), (col0 + cell * col_step, col_read), cell * COLUMNS
            x_extent, dy_extent, dy_rows = (H, W, inner), (P, Q, inner), (phase, phases)
            step = first - (SLOTS - 1)
            read_x_all(x, source, step, last, rows, columns, x_extent, words)
            read_dy_all(dy, target, step, first, last, dy_rows, q, dy_extent, fresh)
            while step < last:
                after = step + together
                read_x_all(x, source, after, last, rows, columns, x_extent, ahead)
                read_dy_all(dy, target, after, first, last, dy_rows, q, dy_extent, fresh_ahead)
                compute_all(words, fresh, ring, acc)
                step = after + together
                read_x_all(x, source, step, last, rows, columns, x_extent, words)
                read_dy_all(dy, target, step, first, last, dy_rows, q, dy_extent, fresh)
                compute_all(ahead, fresh_ahead, ring, acc)
        add_lanes(acc)
        for warp in range(WARPS):
            if tid // 32 == warp and tid % 32 < group:
                for t in range(PLACES):
                    for c in range(L):
                        at = t * WIDTH + lane * L + c
                        sums[at] = acc[t * L + c] if warp == 0 else sums[at] + acc[t * L + c]
            cuda.syncthreads()
        for at in range(tid, SHARED, THREADS):
            tap = at // WIDTH
            channel = cuda.blockIdx.x * WIDTH + at - tap * WIDTH
            if channel < C:
                partials[(cuda.blockIdx.y * PLACES + tap) * C + channel] = sums[at]

    return depthwise_wgrad_kernel


def _lanes(call: Call) -> int:
    """Channels of a thread."""
    return lanes_of(call, numel(call.out_shapes[0][2:]), call.in_shapes[0][1])


def candidates(call: Call, target: Target) -> list[Parts]:
    """One wave of blocks, or as many as leave each thread enough to do; by the steps that a line takes one after another."""
    lanes = _lanes(call)
    columns, groups, words = columns_of(call, lanes), call.in_shapes[0][1] // lanes, held(lanes, kind_of(call)).words
    g, group = pass_of(call, columns), group_of(groups) if call.layout == "NHWC" else 1
    tiles, lines = ceil_div(groups, group), THREADS // group
    made = []
    for length in lengths_of(g.steps):
        items = g.source[0] * g.cells * g.phases * ceil_div(g.steps, length)
        parts = max(1, min(blocks_of(sums_of(call) * lanes) * target.multiprocessors // tiles, items * length // (lines * LEAST_STEPS)))
        steps = length + g.walk.ahead
        together = together_of(steps, g.walk.reads * g.walk.across + columns, words)
        rounds = ceil_div(ceil_div(items, parts), lines)
        made.append((rounds * (ceil_div(steps, 2 * together) * 2 * together + 2), Parts(length, together, columns, group, parts)))
    return [parts for _, parts in sorted(made, key=lambda each: each[0])]


def tile(call: Call, target: Target) -> Parts:
    """The parts with the fewest steps."""
    return candidates(call, target)[0]


def sums_of(call: Call) -> int:
    """Sums of a channel: its taps, and its bias where that is wanted."""
    return numel(call.out_shapes[0][1:]) + len(call.out_shapes) - 1


def scratch(call: Call) -> int:
    """Bytes of the parts."""
    return 4 * call.tile.parts * sums_of(call) * call.in_shapes[0][1]


def bind(call: Call) -> list[Launch]:
    """x, dy -> dw[, db]. Two launches: parts of the sums, and their sums in order."""
    made, lanes, (dw, *db) = call.tile, _lanes(call), call.outs
    g = pass_of(call, made.columns)
    (n, c, h, v), (_, _, p, q) = g.source, g.target
    partials, strips, groups = call.scratch.view(np.float32), ceil_div(g.steps, made.length), c // lanes
    items = n * g.cells * g.phases * strips
    kernel = wgrad_kernel(g.walk, kind_of(call), lanes, call.layout == "NHWC", made.together, made.group, bool(db))
    numbers = (c, groups, g.cells, strips, g.phases, made.length, g.steps, items, ceil_div(items, made.parts), h, v, p, q)
    where = (g.row0, g.row_phase, g.row_step, g.row_read, g.col0, g.col_step, g.col_read)
    grid = (ceil_div(groups, made.group), made.parts)
    first = Launch(kernel, grid, THREADS, (*call.ins, partials, *map(np.int32, (*numbers, *where))), name=call.op)
    return [first, launch_sum(partials, dw, db, c, sums_of(call), made.parts)]


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`: dy once, what strips and columns load of x, and the parts."""
    g, c = pass_of(call, call.tile.columns), call.in_shapes[0][1]
    rows, columns = inside(g, call.tile.length)
    dy = size(call, "in", 1)
    read = element(call) * numel(call.in_shapes[0][:2]) * rows * columns
    return [
        Traffic(read + dy, scratch(call), min(read, size(call, "in", 0)) + dy),
        sum_traffic(call, call.tile.parts, sums_of(call), c),
    ]


LEAST_US = 12.0
"""What the launches take however small images are: 33 images of 512 channels of 4×4 take 12.3 µs, of 96 of 16×16 16.5 (H100)."""


def estimate(call: Call, target: Target) -> float:
    """Microseconds: what is moved, or what few parts wait for."""
    return float((stream(traffic(call)) ** 4 + LEAST_US**4) ** 0.25)


OPS = {
    Op("gconv", "fprop"): WALK,
    Op("gconv", "dgrad"): WALK,
    Op("gconv", "wgrad"): Impl(bind, scratch, supports, tile, candidates=candidates, traffic=traffic, engine="depthwise", estimate=estimate),
}
"""Depthwise convolutions of every row but `naive`."""
