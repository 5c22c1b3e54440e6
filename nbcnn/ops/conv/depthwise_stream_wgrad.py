"""The weight gradient of a depthwise convolution whose loads stream through shared memory (compute capability 8.0, NHWC, channels in fours).

The walk and the sums are those of `depthwise_wgrad.py`. There a thread keeps the loads of the next step in registers, of which it has room for two
steps, and begins every strip with an empty pipeline: small images are a chain of latencies. Here `stages` steps of a thread lie in shared memory,
where cp.async writes them. A thread reads back only what it asked for itself, so no barrier guards the slots. The steps of all of a thread's strips
are one stream: while it multiplies the last rows of one strip, the first rows of the next are on their way. A strip ends with gradients of zero, so
nothing of it is left in the registers of the next.

The threads of a block write their sums side by side into shared memory, and each result is added in the order of the lines. The second launch adds
the blocks' parts in order (`grouped.sum_kernel`), so nothing is atomic and bits repeat.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i4, i8, jit
from nbcnn.gpu.target import Target
from nbcnn.ops.conv import depthwise_stream, depthwise_wgrad
from nbcnn.ops.conv.depthwise import columns_of, group_of, kind_of, lengths_of
from nbcnn.ops.conv.depthwise_stream import (
    LANES,
    START_STEPS,
    Stream,
    copy_rows,
    load_bytes,
    no_room,
    outside,
    refused,
    stages_of,
    take_of,
    u8,
    unroll_of,
)
from nbcnn.ops.conv.depthwise_walk import Pass, Walk, inside, pass_of
from nbcnn.ops.conv.depthwise_wgrad import THREADS, add_step, blocks_of, sums_of
from nbcnn.ops.conv.grouped import launch_sum, sum_traffic
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.loops import ceil_div, step_pixel, unrolled
from nbcnn.ops.kernel.traffic import Traffic, element, size
from nbcnn.ops.kernel.windows import split
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.cp_async import cp_async_commit, cp_async_through, cp_async_wait
from nbcnn.ops.ptx.vector import shared_store4
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

IMAGE, STRIP, CELL, ITEM, LEFT, X_ROW, X_END, X_AT, X_COLUMN, DY_ROW, DY_END, DY_AT, FIELDS = range(13)
"""Where the stream of a thread stands: the strip's image, its number in it, its cell, its number of all, the steps left of it; the next row of x, the
end of those that the strip reads, the row's first element and column; the next row of dy, their end, the row's first element."""


def _stage(walk: Walk, kind: str) -> int:
    """Bytes of a step of a block."""
    return (walk.reads * walk.across + walk.columns) * load_bytes(kind)[1]


def _stages(call: Call, walk: Walk) -> int:
    return stages_of(_stage(walk, kind_of(call)), walk.slots, blocks_of(sums_of(call) * LANES))


@cache
def stream_kernel(walk: Walk, kind: str, stages: int, group: int, with_bias: bool) -> Any:
    """The kernel of a part of the gradient; x and dy are stored as `kind`, `group` threads lie along the channels."""
    READS, SLOTS, ACROSS, L, COLUMNS, STAGES = walk.reads, walk.slots, walk.across, LANES, walk.columns, stages
    LINES, WIDTH, add = THREADS // group, group * LANES, add_step(walk, LANES, with_bias)
    PLACES, LOADS, ROW, STEPS = walk.R * walk.S + with_bias, READS * ACROSS, COLUMNS * LANES, unroll_of(stages, walk.slots)
    (BYTES, LOAD), STAGE = load_bytes(kind), _stage(walk, kind)
    RING_BYTES, SIZE, ALL, VALUES, RING_VALUES = stages * STAGE, BYTES // LANES, PLACES * L, LOADS * L, SLOTS * ROW
    copy_x, copy, take, wait, wait_all = copy_rows(walk, kind), cp_async_through(BYTES), take_of(kind), cp_async_wait(stages - 2), cp_async_wait(0)

    @jit(device=True)
    def enter(at, strips, where, extent):
        """Goes to the first step of the strip that `at` names; one that does not exist has no rows."""
        (own, end, phases, length, steps, walk_steps), (row0, row_phase, row_step, row_read, col0, col_step) = strips, where
        C, H, W, P, Q = extent
        part, phase = at[STRIP], 0
        if phases > 1:
            part, phase = split(at[STRIP], phases)
        first = part * length
        last = min(first + length, steps)
        row, p = row0 + phase * row_phase + (first - (SLOTS - 1)) * row_step, phase + first * phases
        exists = at[ITEM] < end
        at[LEFT], at[X_ROW], at[DY_ROW], at[X_COLUMN] = walk_steps, row, p, col0 + at[CELL] * col_step
        below = row0 + phase * row_phase + (last - 1) * row_step + (READS - 1) * row_read + 1
        at[X_END] = max(min(H, below), 0) if exists else 0
        at[DY_END] = min(P, phase + last * phases) if exists else 0
        at[X_AT] = ((at[IMAGE] * H + row) * W + at[X_COLUMN]) * C + own * L
        at[DY_AT] = ((at[IMAGE] * P + p) * Q + at[CELL] * COLUMNS) * C + own * L

    @jit(device=True)
    def fetch(to, x, dy, at, strips, where, extent, pitches, jumps):
        """Copies of the step at which the stream stands, into the slots at `to`; then the stream goes on."""
        C, _, W, _, Q = extent
        x_step, x_read, x_column, dy_step, row_step, row_read, col_read, phases = pitches
        q = at[CELL] * COLUMNS
        copy_x(to, x, (at[X_ROW], at[X_END]), at[X_AT], at[X_COLUMN], W, (row_read, col_read, x_read, x_column))
        for j in range(COLUMNS):
            wanted = (at[DY_ROW] < at[DY_END]) & (q + j < Q)
            copy(to + (LOADS + j) * LOAD, dy + u8(i8(at[DY_AT] + j * C) * SIZE), BYTES if wanted else 0)
        cp_async_commit()
        at[X_ROW] += row_step
        at[X_AT] += x_step
        at[DY_ROW] += phases
        at[DY_AT] += dy_step
        at[LEFT] -= 1
        if at[LEFT] == 0:
            images, rows, cells, strip_count, cell_count = jumps
            at[ITEM] += LINES
            at[IMAGE], at[STRIP], at[CELL] = step_pixel(at[IMAGE], at[STRIP], at[CELL], images, rows, cells, strip_count, cell_count)
            enter(at, strips, where, extent)

    def step(g: int) -> Any:
        TAKEN, FILLED = g * STAGE, (g - 1) * STAGE

        @jit(device=True)
        def run(slots, behind, x, dy, at, strips, where, extent, pitches, jumps, ring, acc):
            values = cuda.local.array(VALUES, f4)
            wait()
            for k in range(LOADS):
                take(values, k * L, slots + (TAKEN + k * LOAD))
            for j in range(COLUMNS):
                take(ring, (SLOTS - 1) * ROW + j * L, slots + (TAKEN + (LOADS + j) * LOAD))
            # The slots that are filled now were read a step ago.
            fetch(behind if g == 0 else slots + FILLED, x, dy, at, strips, where, extent, pitches, jumps)
            add(values, ring, acc)

        return run

    # As many places at a time as the sums of all threads have room for in place of the ring.
    CHUNK = min(PLACES, RING_BYTES // (4 * THREADS * L))

    def add_places(begin: int) -> Any:
        COUNT = min(CHUNK, PLACES - begin)
        SUMS, LINE = COUNT * WIDTH, COUNT * WIDTH

        @jit(device=True)
        def run(memory, acc, partials, tid, lane, line, C):
            cuda.syncthreads()
            for t in range(COUNT):
                a = (begin + t) * L
                shared_store4(memory, line * LINE + t * WIDTH + lane * L, acc[a], acc[a + 1], acc[a + 2], acc[a + 3])
            cuda.syncthreads()
            for i in range(tid, SUMS, THREADS):
                total = memory[i]
                for other in range(1, LINES):
                    total += memory[other * LINE + i]
                tap = i // WIDTH
                channel = cuda.blockIdx.x * WIDTH + i - tap * WIDTH
                if channel < C:
                    partials[(cuda.blockIdx.y * PLACES + begin + tap) * C + channel] = total

        return run

    step_all, add_all = unrolled([step(g) for g in range(STEPS)]), unrolled([add_places(begin) for begin in range(0, PLACES, CHUNK)])

    @jit(launch_bounds=(THREADS, blocks_of(ALL)))
    def depthwise_stream_wgrad_kernel(
        x, dy, partials, C, groups, cells, strips, phases, length, steps, walk_steps, rounds, items, share, H, W, P, Q,
        row0, row_phase, row_step, row_read, col0, col_step, col_read, images, rows, columns,
    ):  # fmt: skip
        """partials[z,t,c] = Σ over part z of the strips (n,q,strip) of dy[n,p,q,c] · x[n,row,column,c] for tap t = (r,s); of dy alone for t = R·S.

        grid (⌈(C/4)/group⌉, parts), block 256; a block owns group·4 channels and `share` strips; line l of its 256/group lines of threads
        takes every strip of number l modulo 256/group: neighbours are the next channels, then the next columns.
        shared `stages` steps of x and dy of every thread, then the sums of every thread; moves dy once, x through L1 as often as windows of cells
        overlap, and partials once. source: see the module; needs compute capability 8.0.
        rounds: ⌈walk_steps · strips of a line / steps of an iteration⌉; images, rows, columns: from one strip of a line to its next.
        """
        memory = cuda.shared.array(0, f4)
        tid = cuda.threadIdx.x
        lane, line = tid % group, tid // group
        own = cuda.blockIdx.x * group + lane
        acc, ring, at = cuda.local.array(ALL, f4), cuda.local.array(RING_VALUES, f4), cuda.local.array(FIELDS, i4)
        for t in range(ALL):
            acc[t] = 0.0
        for k in range(RING_VALUES):
            ring[k] = 0.0
        begin = cuda.blockIdx.y * share
        end = min(begin + share, items) if own < groups else 0
        at[ITEM] = begin + line
        rest, at[CELL] = split(begin + line, cells)
        at[IMAGE], at[STRIP] = split(rest, strips)
        of_strips, where = (own, end, phases, length, steps, walk_steps), (row0, row_phase, row_step, row_read, col0, col_step)
        extent, jumps = (C, H, W, P, Q), (images, rows, columns, strips, cells)
        pitches = (row_step * W * C, row_read * W * C, col_read * C, phases * Q * C, row_step, row_read, col_read, phases)
        enter(at, of_strips, where, extent)
        x0, dy0 = byte_address_global(x), byte_address_global(dy)
        first = byte_address_shared(memory) + tid * BYTES
        taken, filled = 0, (STAGES - 1) * STAGE
        for ahead in range(STAGES - 1):
            fetch(first + ahead * STAGE, x0, dy0, at, of_strips, where, extent, pitches, jumps)
        for _ in range(rounds):
            step_all(first + taken, first + filled, x0, dy0, at, of_strips, where, extent, pitches, jumps, ring, acc)
            filled = taken + (STEPS - 1) * STAGE
            taken += STEPS * STAGE
            if taken == RING_BYTES:
                taken = 0
        wait_all()
        add_all(memory, acc, partials, tid, lane, line, C)

    return depthwise_stream_wgrad_kernel


def walk_of(g: Pass, length: int) -> int:
    """Steps of a strip. Where it is as long as the image, the last steps, which read rows below the image alone, are left out.

    As many may be left out as steps at the beginning read rows above the image alone: in them what the last left in registers meets zeros.
    """
    walk = g.walk
    if length < g.steps:
        return length + walk.slots - 1

    spare = 0
    while spare < walk.slots - 1 and outside(g, spare - (walk.slots - 1)) and outside(g, g.steps - 1 - spare):
        spare += 1
    return length + walk.slots - 1 - spare


def candidates(call: Call, target: Target) -> list[Stream]:
    """One wave of blocks, or half of one; by the steps that a line takes one after another."""
    columns, groups, sums = columns_of(call, LANES), call.in_shapes[0][1] // LANES, sums_of(call) * LANES
    g, group = pass_of(call, columns), group_of(groups)
    tiles, lines, stages = ceil_div(groups, group), THREADS // group, _stages(call, g.walk)
    made = []
    for length in lengths_of(g.steps):
        items, walk = g.source[0] * g.cells * g.phases * ceil_div(g.steps, length), walk_of(g, length)
        wave = max(1, blocks_of(sums) * target.multiprocessors // tiles)
        for wanted in sorted({wave, ceil_div(wave, 2)}, reverse=True):
            strips = ceil_div(ceil_div(items, wanted), lines)
            made.append((strips * walk + START_STEPS, Stream(length, columns, walk, stages, group, strips * lines, ceil_div(items, strips * lines))))
    return [stream for _, stream in sorted(made, key=lambda each: each[0])]


def tile(call: Call, target: Target) -> Stream:
    """The strips and parts with the fewest steps."""
    return candidates(call, target)[0]


def supports(call: Call, target: Target) -> str | None:
    """None, or the reason in words why a call is not for this kernel."""
    if said := depthwise_wgrad.supports(call, target) or refused(call, call.in_shapes[0][1], numel(call.out_shapes[0][2:])):
        return said
    walk = pass_of(call, columns_of(call, LANES)).walk
    return no_room(_stages(call, walk), _stage(walk, kind_of(call)), target)


def scratch(call: Call) -> int:
    """Bytes of the parts."""
    return 4 * call.tile.parts * sums_of(call) * call.in_shapes[0][1]


def bind(call: Call) -> list[Launch]:
    """x, dy -> dw[, db]. Two launches: parts of the sums, and their sums in order."""
    made, (dw, *db) = call.tile, call.outs
    g, kind = pass_of(call, made.columns), kind_of(call)
    (n, c, h, v), (_, _, p, q), walk = g.source, g.target, g.walk
    partials, strips, groups = call.scratch.view(np.float32), ceil_div(g.steps, made.length) * g.phases, c // LANES
    lines = THREADS // made.group
    rounds = ceil_div(ceil_div(made.share, lines) * made.walk, unroll_of(made.stages, walk.slots))
    kernel = stream_kernel(walk, kind, made.stages, made.group, bool(db))
    numbers = (c, groups, g.cells, strips, g.phases, made.length, g.steps, made.walk, rounds, n * strips * g.cells, made.share, h, v, p, q)
    where = (g.row0, g.row_phase, g.row_step, g.row_read, g.col0, g.col_step, g.col_read)
    jumps = (lines // g.cells // strips, lines // g.cells % strips, lines % g.cells)
    grid, shared = (ceil_div(groups, made.group), made.parts), made.stages * _stage(walk, kind)
    first = Launch(kernel, grid, THREADS, (*call.ins, partials, *map(np.int32, (*numbers, *where, *jumps))), shared, name=call.op)
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


OPS = depthwise_stream.OPS | {
    Op("gconv", "wgrad"): Impl(bind, scratch, supports, tile, needs=(8, 0), candidates=candidates, traffic=traffic, engine="streamed")
}
"""Depthwise convolutions on GPUs with cp.async, before those of `depthwise_wgrad.py`."""
