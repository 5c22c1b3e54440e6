"""The weight gradient of a depthwise convolution: dw[c,r,s] = Σ_{n,p,q} dy[n,p,q,c] · x[n, row of p and r, column of q and s, c].

The walk is that of `depthwise.py`: a thread owns four neighbouring channels (NHWC; else one) and walks down a column of y. A step reads the
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
from nbcnn.ops.conv.depthwise import WALK, Pass, Walk, convolution, fetch_rows, inside, lanes_of, lengths_of, load_lanes, supports, together_of
from nbcnn.ops.conv.grouped import launch_sum, sum_traffic
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.loops import ceil_div, unrolled
from nbcnn.ops.kernel.traffic import Traffic, element, size
from nbcnn.ops.kernel.windows import split
from nbcnn.ops.ptx.shuffle import WARP, sum_over
from nbcnn.plan.shapes import numel

THREADS = 256
WARPS = THREADS // WARP
BLOCKS = 2
"""Blocks a multiprocessor: what the registers of 36 sums leave room for."""
IN_FLIGHT = 32
"""32-bit registers for loads that a thread has in flight."""
LEAST_STEPS = 16
"""Steps of a walk that a thread should have before its sums are added to those of others."""


@dataclass(frozen=True)
class Parts:
    """Strips of `length` steps, loads of `together` steps in flight, `group` lanes of a warp side by side along the channels, `parts` of the sum."""

    length: int
    together: int
    group: int
    parts: int


@cache
def wgrad_kernel(walk: Walk, kind: str, lanes: int, nhwc: bool, together: int, group: int, with_bias: bool) -> Any:
    """The kernel of a part of the gradient; x and dy are stored as `kind`, a thread owns `lanes` channels, `group` threads lie along them."""
    R, S, READS, SLOTS, OVER, ACROSS, L = walk.R, walk.S, walk.reads, walk.slots, walk.over, walk.across, lanes
    TAPS, LINES, ALL = R * S, THREADS // group, (R * S + with_bias) * lanes
    VALUES, FRESH, RING, WIDTH = together * READS * ACROSS * L, together * lanes, SLOTS * lanes, group * lanes
    PLACES, SHARED = ALL // L, ALL // L * WIDTH
    load, same_channels = load_lanes(lanes, kind), sum_over(WARP - group)

    def read_dy(g: int) -> Any:
        AT = g * L

        @jit(device=True)
        def run(dy, target, step, first, last, rows, q, extent, fresh):
            (phase, phases), (P, Q, inner) = rows, extent
            newest = step + g + (SLOTS - 1)
            p = phase + newest * phases
            load(dy, target + (p * Q + q) * inner, (newest >= first) & (newest < last) & (p < P), fresh, AT)

        return run

    def compute(g: int) -> Any:
        FIRST, AT = g * READS * ACROSS * L, g * L

        @jit(device=True)
        def run(values, fresh, ring, acc):
            for c in range(L):
                ring[(SLOTS - 1) * L + c] = fresh[AT + c]
            for r in range(R):
                e = R - 1 - r
                for s in range(S):
                    for c in range(L):
                        value = values[FIRST + ((READS - 1 - e % OVER) * ACROSS + s) * L + c]
                        acc[(r * S + s) * L + c] += ring[e // OVER * L + c] * value
            if with_bias:
                for c in range(L):
                    acc[TAPS * L + c] += fresh[AT + c]
            for k in range(SLOTS - 1):
                for c in range(L):
                    ring[k * L + c] = ring[(k + 1) * L + c]

        return run

    read_x_all = unrolled([fetch_rows(walk, lanes, kind, g) for g in range(together)])
    read_dy_all, compute_all = unrolled([read_dy(g) for g in range(together)]), unrolled([compute(g) for g in range(together)])

    @jit(launch_bounds=(THREADS, BLOCKS))
    def depthwise_wgrad_kernel(
        x, dy, partials, C, groups, strips, phases, length, steps, items, share, H, W, P, Q,
        row0, row_phase, row_step, row_read, col0, col_step, col_read,
    ):  # fmt: skip
        """partials[z,t,c] = Σ over part z of the strips (n,q,strip) of dy[n,p,q,c] · x[n,row,column,c] for tap t = (r,s); of dy alone for t = R·S.

        grid (⌈(C/lanes)/group⌉, parts), block 256; a block owns group·lanes channels and `share` strips; line l of its 256/group lines of threads
        takes every strip of number l modulo 256/group: neighbours are the next channels, then the next columns.
        shared 4·taps·group·lanes bytes; moves dy once, S/stride times x through L1, and partials once. source: see the module.
        """
        sums = cuda.shared.array(SHARED, f4)
        tid = cuda.threadIdx.x
        lane, line = tid % group, tid // group
        own = cuda.blockIdx.x * group + lane
        acc, ring = cuda.local.array(ALL, f4), cuda.local.array(RING, f4)
        values, fresh = cuda.local.array(VALUES, f4), cuda.local.array(FRESH, f4)
        for t in range(ALL):
            acc[t] = 0.0
        begin = cuda.blockIdx.y * share
        end = min(begin + share, items) if own < groups else 0
        inner = C if nhwc else 1
        for item in range(begin + line, end, LINES):
            rest, q = split(item, Q)
            n, strip = split(rest, strips * phases)
            part, phase = split(strip, phases)
            image, at = (n, own * L) if nhwc else (n * C + own, 0)
            source, target = image * H * W * inner + at, image * P * Q * inner + at
            for k in range(RING):
                ring[k] = 0.0
            first = part * length
            last = min(first + length, steps)
            rows, columns = (row0 + phase * row_phase, row_step, row_read), (col0 + q * col_step, col_read)
            step = first - (SLOTS - 1)
            while step < last:
                read_x_all(x, source, step, rows, columns, (H, W, inner), values)
                read_dy_all(dy, target, step, first, last, (phase, phases), q, (P, Q, inner), fresh)
                compute_all(values, fresh, ring, acc)
                step += together
        for t in range(ALL):
            acc[t] = same_channels(acc[t])
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


def pass_of(call: Call) -> Pass:
    """The walk of the forward pass."""
    (x, dy), attrs = call.in_shapes, call.attrs
    return convolution(x, dy, call.out_shapes[0][2:], tuple(attrs["stride"]), tuple(attrs["dilation"]), tuple(attrs["pad"]))


def group_of(groups: int) -> int:
    """Threads side by side along the channels: a power of two from 8 to 32 with the fewest idle lanes, the largest of equal ones."""
    return min((32, 16, 8, 4, 2, 1), key=lambda group: (ceil_div(groups, group) * group * (1 if group >= 8 else 1.5), -group))


def _shape(call: Call) -> tuple[Pass, int, int]:
    """The pass, channels of a thread, and threads that all channels need."""
    g = pass_of(call)
    lanes = lanes_of(call, g.walk.R * g.walk.S, g.source[1])
    return g, lanes, g.source[1] // lanes


def candidates(call: Call, multiprocessors: int) -> list[Parts]:
    """One wave of blocks, or as many as leave each thread enough to do; strips that are cut only where lines would be idle come first."""
    g, lanes, groups = _shape(call)
    group = group_of(groups) if call.layout == "NHWC" else 1
    tiles, lines = ceil_div(groups, group), THREADS // group
    made = []
    for length in lengths_of(g.steps):
        items = g.source[0] * g.cells * g.phases * ceil_div(g.steps, length)
        most = max(1, BLOCKS * multiprocessors // tiles)
        parts = max(1, min(most, items * length // (lines * LEAST_STEPS)))
        loads = g.walk.reads * g.walk.across + 1
        together = together_of(length + g.walk.ahead, loads, lanes, call.in_dtypes[0] if call.in_dtypes else "float32", IN_FLIGHT)
        idle = ceil_div(items, parts * lines) * parts * lines / items
        made.append(((length + g.walk.ahead) / length * idle, Parts(length, together, group, parts)))
    return [parts for _, parts in sorted(made, key=lambda each: each[0])]


def tile(call: Call, multiprocessors: int) -> Parts:
    """The parts with the fewest steps."""
    return candidates(call, multiprocessors)[0]


def _places(call: Call) -> int:
    """Sums of a channel: its taps, and its bias where that is wanted."""
    return numel(call.out_shapes[0][1:]) + len(call.out_shapes) - 1


def scratch(call: Call) -> int:
    """Bytes of the parts."""
    return 4 * call.tile.parts * _places(call) * call.in_shapes[0][1]


def bind(call: Call) -> list[Launch]:
    """x, dy -> dw[, db]. Two launches: parts of the sums, and their sums in order."""
    (g, lanes, groups), made, (dw, *db) = _shape(call), call.tile, call.outs
    (n, c, h, v), (_, _, p, q) = g.source, g.target
    partials, strips = call.scratch.view(np.float32), ceil_div(g.steps, made.length)
    items = n * g.cells * g.phases * strips
    kind = call.in_dtypes[0] if call.in_dtypes else "float32"
    kernel = wgrad_kernel(g.walk, kind, lanes, call.layout == "NHWC", made.together, made.group, bool(db))
    numbers = (c, groups, strips, g.phases, made.length, g.steps, items, ceil_div(items, made.parts), h, v, p, q)
    where = (g.row0, g.row_phase, g.row_step, g.row_read, g.col0, g.col_step, g.col_read)
    grid = (ceil_div(groups, made.group), made.parts)
    first = Launch(kernel, grid, THREADS, (*call.ins, partials, *map(np.int32, (*numbers, *where))), name=call.op)
    return [first, launch_sum(partials, dw, db, c, _places(call), made.parts)]


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`: dy once, what strips and columns load of x, and the parts."""
    g, (_, c) = pass_of(call), call.in_shapes[0][:2]
    rows, columns = inside(g, call.tile.length)
    dy = size(call, "in", 1)
    read = element(call) * numel(call.in_shapes[0][:2]) * rows * columns
    return [
        Traffic(read + dy, scratch(call), min(read, size(call, "in", 0)) + dy),
        sum_traffic(call, call.tile.parts, _places(call), c),
    ]


OPS = {"gconv_fprop": WALK, "gconv_dgrad": WALK, "gconv_wgrad": Impl(bind, scratch, supports, tile, candidates=candidates, traffic=traffic)}
"""Depthwise convolutions of every row but `naive`."""
