"""Depthwise convolutions whose loads stream through shared memory (compute capability 8.0, NHWC, channels in fours): fprop and dgrad.

The walk and its sums are those of `depthwise.py`. There a thread keeps the loads of the next steps in registers, of which it has room for two to
four steps, and begins every strip with an empty pipeline: small images are a chain of latencies. Here `stages` steps of a thread lie in shared
memory, where cp.async writes them. A thread reads back only what it asked for itself, so no barrier guards the slots. A block stays, its threads
take strip after strip with the same weights, and the steps of all of a thread's strips are one stream: while it multiplies the last rows of one
strip, the first rows of the next are on their way. `depthwise_stream_wgrad.py` has the weight gradient.

Source of the walk: see `depthwise.py`; of the slots that are filled while others are read: CUTLASS' multistage pipelines for sm_80.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i4, i8, jit, types
from nbcnn.gpu.target import Target
from nbcnn.ops.conv import depthwise
from nbcnn.ops.conv.depthwise import QUAD_TAPS, columns_of, group_of, held, kind_of, lengths_of, pack, store_lanes
from nbcnn.ops.conv.depthwise_walk import Pass, Walk, inside, pass_of
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.cost import STREAM, moved
from nbcnn.ops.kernel.loops import ceil_div, step_pixel, unrolled, within
from nbcnn.ops.kernel.stored import PAIRS
from nbcnn.ops.kernel.traffic import Traffic, element, outputs, size
from nbcnn.ops.kernel.windows import split
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.cp_async import cp_async_commit, cp_async_through, cp_async_wait
from nbcnn.ops.ptx.cvt import bits_float
from nbcnn.ops.ptx.shared import load_words_2, load_words_4
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel
from nbcnn.plan.storage import HALVES, ITEMSIZE

u8 = types.uint64
THREADS = 256
LANES = 4
"""Channels of a thread."""
IN_FLIGHT, RING, ROOM = 40 * 1024, 75 * 1024, 100 * 1024
"""Bytes that a block should have in flight if two share a multiprocessor, those of its slots at most if they are a whole number of periods, and those
at most if they are not. A block that is alone has twice as many."""
MOST_STAGES = 10
START_STEPS = 6
"""Steps that a block's first loads and its sums cost."""

FEW_REGISTERS = 64
"""Weights and open sums of a thread at most with which two blocks share a multiprocessor: 128 registers per thread."""


@dataclass(frozen=True)
class Stream:
    """Strips of `length` rows of `columns` columns, `walk` steps each; `stages` steps of a thread in shared memory; `share` strips of a block, whose
    threads lie along the channels in groups of `group`; `parts` of the sum."""

    length: int
    columns: int
    walk: int
    stages: int
    group: int
    share: int
    parts: int


def load_bytes(kind: str) -> tuple[int, int]:
    """Bytes of a load, four channels, of a thread and of a block."""
    load = LANES * ITEMSIZE[kind]
    return load, load * THREADS


def stages_of(stage: int, period: int, blocks: int) -> int:
    """Steps in shared memory, of `stage` bytes per block each; 1 if there is no room for more. After `period` steps rows lie in the same
    registers."""
    times = 3 - blocks
    wanted = min(ceil_div(times * IN_FLIGHT, stage) + 1, MOST_STAGES)
    whole = ceil_div(wanted, period) * period
    return whole if whole <= MOST_STAGES and whole * stage <= times * RING else max(1, min(wanted, times * ROOM // stage))


def unroll_of(stages: int, period: int) -> int:
    """Steps of an iteration of the loop: a period, in which nothing is moved between registers, or one where slots do not come out even."""
    return period if stages % period == 0 else 1


@cache
def take_of(kind: str) -> Any:
    """Device function take(values, to, address): values[to …] = the four channels in the slot at a shared address, as float32."""
    if kind in HALVES:
        lower, upper = PAIRS[kind][:2]

        @jit(device=True)
        def take(values, to, address):
            low, high = load_words_2(address)
            values[to], values[to + 1], values[to + 2], values[to + 3] = lower(low), upper(low), lower(high), upper(high)
    else:

        @jit(device=True)
        def take(values, to, address):
            a, b, c, d = load_words_4(address)
            values[to], values[to + 1], values[to + 2], values[to + 3] = bits_float(a), bits_float(b), bits_float(c), bits_float(d)

    return take


@cache
def copy_rows(walk: Walk, kind: str) -> Any:
    """Device function copy(to, x, rows, line, column, extent, reads): asks for the elements of a step, in the slots from address `to` on.

    rows: (the first, one behind the last that may be read), line: offset of the first row's first element, column: the first; extent: columns of x;
    reads: (rows, columns) from one read to the next, then the same in elements.
    """
    READS, ACROSS, (BYTES, LOAD) = walk.reads, walk.across, load_bytes(kind)
    SIZE, copy = BYTES // LANES, cp_async_through(BYTES)

    @jit(device=True)
    def run(to, x, rows, line, column, W, reads):
        (row, end), (row_read, col_read, x_read, x_column) = rows, reads
        for u in range(READS):
            row_inside = within(row + u * row_read, end)
            for v in range(ACROSS):
                wanted = row_inside & within(column + v * col_read, W)
                copy(to + (u * ACROSS + v) * LOAD, x + u8(i8(line + u * x_read + v * x_column) * SIZE), BYTES if wanted else 0)

    return run


def no_room(stages: int, stage: int, target: Target) -> str | None:
    """None, or that shared memory cannot hold the steps, in words."""
    if stages < 2:
        return f"steps of {stage} bytes do not stream: shared memory holds one"
    limit = target.shared_of_block
    return f"{stages} steps need {stages * stage} bytes of shared memory, a block has {limit}" if stages * stage > limit else None


# Where the stream of a thread stands, on the side of its loads and on that of its sums: the strip's image, its number in it, its cell, its number of
# all, the steps left of it. Then the next row of x, one behind the last row that the strip reads, the row's first element, the first column; or the
# next row of y, the first row that the strip makes and how many, the row's first element, the first column.
IMAGE, STRIP, CELL, ITEM, LEFT, X_ROW, X_END, X_AT, X_COLUMN, LOADING = range(10)
Y_ROW, Y_FIRST, Y_ROWS, Y_AT, Y_COLUMN, MAKING = range(5, 11)


def _stage(walk: Walk, kind: str) -> int:
    """Bytes of a step of a block."""
    return walk.reads * walk.across * load_bytes(kind)[1]


def blocks_of(walk: Walk) -> int:
    """Blocks that a multiprocessor holds."""
    return 2 if (walk.R * walk.S + walk.slots * walk.wide) * LANES <= FEW_REGISTERS else 1


def _stages(walk: Walk, kind: str) -> int:
    return stages_of(_stage(walk, kind), walk.ahead + 1, blocks_of(walk))


@cache
def stream_kernel(walk: Walk, kind: str, stages: int, group: int, with_bias: bool) -> Any:
    """The kernel of a walk; source and target are stored as `kind`, `group` threads lie along the channels."""
    R, S, READS, MAKES, SLOTS, STEPS = walk.R, walk.S, walk.reads, walk.makes, walk.slots, unroll_of(stages, walk.ahead + 1)
    TURN, SIGN, OVER, ACROSS, WIDE, SPREAD, EVEN = walk.turn, walk.sign, walk.over, walk.across, walk.wide, walk.spread, walk.even
    COLUMNS, JUMP, L, TAPS, LINES, STAGES = walk.columns, walk.jump, LANES, walk.R * walk.S, THREADS // group, stages
    SUMS, ROW, WEIGHTS, LOADS = walk.slots * walk.wide * LANES, walk.wide * LANES, TAPS * LANES, READS * ACROSS
    (BYTES, LOAD), STAGE, VALUES = load_bytes(kind), _stage(walk, kind), LOADS * LANES
    RING_BYTES = stages * STAGE
    copy_x, take, wait, wait_all = copy_rows(walk, kind), take_of(kind), cp_async_wait(stages - 2), cp_async_wait(0)
    load_weights, store = held(LANES, "float32").load, store_lanes(LANES, kind)

    @jit(device=True)
    def rows_of(strip, strips):
        """(phase, first step, one behind the last) of a strip of an image."""
        _, phases, length, steps, _ = strips
        part, phase = strip, 0
        if phases > 1:
            part, phase = split(strip, phases)
        first = part * length
        return phase, first, min(first + length, steps)

    @jit(device=True)
    def go_on(at, jumps):
        """Names the line's next strip."""
        images, rows, columns, of_image, cells = jumps
        at[ITEM] += LINES
        at[IMAGE], at[STRIP], at[CELL] = step_pixel(at[IMAGE], at[STRIP], at[CELL], images, rows, columns, of_image, cells)

    @jit(device=True)
    def enter(at, strips, where, extent):
        """Goes to the first loads of a strip; one that does not exist has no rows."""
        (end, _, length, _, walk_steps), (row0, row_phase, row_step, row_read, col0, col_step, _) = strips, where
        own, C, H, W, _, _ = extent
        image, cell, (phase, first, last) = at[IMAGE], at[CELL], rows_of(at[STRIP], strips)
        top = row0 + phase * row_phase
        row, column = top + (first - (walk_steps - length)) * row_step, col0 + cell * col_step
        at[LEFT], at[X_ROW], at[X_COLUMN] = walk_steps, row, column
        at[X_END] = max(min(H, top + (last - 1) * row_step + (READS - 1) * row_read + 1), 0) if at[ITEM] < end else 0
        at[X_AT] = ((image * H + row) * W + column) * C + own * L

    @jit(device=True)
    def begin(at, acc, bias, strips, makes, extent):
        """Goes to the first sums of a strip, and sets them to the bias."""
        (end, _, length, _, walk_steps), (out_row0, out_step, out_col0), (own, C, _, _, P, Q) = strips, makes, extent
        image, cell, (phase, first, last) = at[IMAGE], at[CELL], rows_of(at[STRIP], strips)
        top = out_row0 + phase
        lowest = max(top + first * out_step, 0)
        row, column = top + (first - (walk_steps - length)) * out_step, out_col0 + cell * WIDE
        at[LEFT], at[Y_ROW], at[Y_FIRST], at[Y_COLUMN] = walk_steps, row, lowest, column
        at[Y_ROWS] = max(min(P, top + last * out_step) - lowest, 0) if at[ITEM] < end else 0
        at[Y_AT] = ((image * P + row) * Q + column) * C + own * L
        for k in range(SLOTS):
            for j in range(ROW):
                acc[k * ROW + j] = bias[j % L]

    @jit(device=True)
    def fetch(to, x, at, strips, where, extent, pitches, jumps):
        """Copies of the step at which the loads stand, into the slots at `to`; then they go on."""
        W, col_read, (x_step, x_read, x_column, _), (_, _, row_step, row_read, _, _, _) = extent[3], where[6], pitches, where
        copy_x(to, x, (at[X_ROW], at[X_END]), at[X_AT], at[X_COLUMN], W, (row_read, col_read, x_read, x_column))
        cp_async_commit()
        at[X_ROW] += row_step
        at[X_AT] += x_step
        at[LEFT] -= 1
        if at[LEFT] == 0:
            go_on(at, jumps)
            enter(at, strips, where, extent)

    def step(g: int) -> Any:
        TAKEN, FILLED = g * STAGE, (g - 1) * STAGE

        @jit(device=True)
        def run(slots, behind, x, y, at, of, weights, acc, bias, strips, where, makes, extent, pitches, jumps):
            values = cuda.local.array(VALUES, f4)
            wait()
            for k in range(LOADS):
                take(values, k * L, slots + (TAKEN + k * LOAD))
            # The slots that are filled now were read a step ago.
            fetch(behind if g == 0 else slots + FILLED, x, at, strips, where, extent, pitches, jumps)
            for r in range(R):
                e = TURN + r * SIGN
                for s in range(S):
                    f = s * SPREAD
                    for j in range(COLUMNS):
                        for c in range(L):
                            value = values[((READS - 1 - e % OVER) * ACROSS + f // EVEN + j * JUMP) * L + c]
                            acc[(e // OVER * WIDE + f % EVEN + j) * L + c] += weights[(r * S + s) * L + c] * value
            C, Q = extent[1], extent[5]
            for o in range(MAKES):
                for j in range(WIDE):
                    if within(of[Y_ROW] + o - of[Y_FIRST], of[Y_ROWS]) & within(of[Y_COLUMN] + j, Q):
                        store(y, of[Y_AT] + (o * Q + j) * C, acc, o * ROW + j * L)
            for k in range(SLOTS):
                for j in range(ROW):
                    acc[k * ROW + j] = acc[(k + MAKES) * ROW + j] if k + MAKES < SLOTS else bias[j % L]
            of[Y_ROW] += makes[1]
            of[Y_AT] += pitches[3]
            of[LEFT] -= 1
            if of[LEFT] == 0:
                go_on(of, jumps)
                begin(of, acc, bias, strips, makes, extent)

        return run

    step_all = unrolled([step(g) for g in range(STEPS)])

    @jit(launch_bounds=(THREADS, blocks_of(walk)))
    def depthwise_stream_kernel(
        x, w, b, y, C, groups, cells, of_image, phases, length, steps, walk_steps, rounds, items, share, H, W, P, Q,
        row0, row_phase, row_step, row_read, col0, col_step, col_read, out_row0, out_step, out_col0, images, rows, columns,
    ):  # fmt: skip
        """y[n,p,q,c] = b[c] + Σ_{r,s} w[r,s,c] · x[n, row of p and r, column of q and s, c]: the walk of `depthwise.py`.

        grid (⌈(C/4)/group⌉, parts), block 256; a block owns group·4 channels and `share` strips; line l of its 256/group lines of threads takes every
        strip of number l modulo 256/group: neighbours are the next channels, then the next columns.
        shared `stages` steps of x of every thread; moves x through L1 as often as windows of cells overlap, the rows above a strip again, weights
        once per thread, and y once. source: see the module; needs compute capability 8.0.
        rounds: ⌈walk_steps · strips of a line / steps of an iteration⌉; images, rows, columns: from one strip of a line to its next.
        """
        memory = cuda.shared.array(0, f4)
        tid = cuda.threadIdx.x
        lane, line = tid % group, tid // group
        own = cuda.blockIdx.x * group + lane
        at, of = cuda.local.array(LOADING, i4), cuda.local.array(MAKING, i4)
        weights, bias, acc = cuda.local.array(WEIGHTS, f4), cuda.local.array(L, f4), cuda.local.array(SUMS, f4)
        start = cuda.blockIdx.y * share
        end = min(start + share, items) if own < groups else 0
        strips, where = (end, phases, length, steps, walk_steps), (row0, row_phase, row_step, row_read, col0, col_step, col_read)
        makes, extent, jumps = (out_row0, out_step, out_col0), (own, C, H, W, P, Q), (images, rows, columns, of_image, cells)
        pitches = (row_step * W * C, row_read * W * C, col_read * C, out_step * Q * C)
        rest, cell = split(start + line, cells)
        image, strip = split(rest, of_image)
        at[ITEM], at[IMAGE], at[STRIP], at[CELL] = start + line, image, strip, cell
        of[ITEM], of[IMAGE], of[STRIP], of[CELL] = start + line, image, strip, cell
        enter(at, strips, where, extent)
        source = byte_address_global(x)
        first = byte_address_shared(memory) + tid * BYTES
        for ahead in range(STAGES - 1):
            fetch(first + ahead * STAGE, source, at, strips, where, extent, pitches, jumps)
        channel = min(own, groups - 1) * L
        for t in range(TAPS):
            load_weights(w, t * C + channel, True, weights, t * L)
        for c in range(L):
            bias[c] = b[channel + c] if with_bias else 0.0
        begin(of, acc, bias, strips, makes, extent)
        taken, filled = 0, (STAGES - 1) * STAGE
        for _ in range(rounds):
            step_all(first + taken, first + filled, source, y, at, of, weights, acc, bias, strips, where, makes, extent, pitches, jumps)
            filled = taken + (STEPS - 1) * STAGE
            taken += STEPS * STAGE
            if taken == RING_BYTES:
                taken = 0
        wait_all()

    return depthwise_stream_kernel


def walk_of(g: Pass, length: int) -> int:
    """Steps of a strip. Where it is as long as the image, the first steps, which read rows outside the image alone, are left out.

    Only steps that complete no row may be left out: one that does stores the bias, even if it reads no row of the image.
    """
    steps = length + g.walk.ahead
    while length >= g.steps and steps > length and outside(g, length - steps):
        steps -= 1
    return steps


def outside(g: Pass, step: int) -> bool:
    """True if a step reads no row of the image, in any phase."""
    rows = [g.row0 + f * g.row_phase + step * g.row_step + u * g.row_read for f in range(g.phases) for u in range(g.walk.reads)]
    return not any(0 <= row < g.source[2] for row in rows)


def candidates(call: Call, target: Target) -> list[Stream]:
    """One wave of blocks; by the steps that a line takes one after another."""
    columns, groups = columns_of(call, LANES), call.out_shapes[0][1] // LANES
    g, group = pass_of(call, columns), group_of(groups)
    lines, wave = THREADS // group, max(1, blocks_of(g.walk) * target.multiprocessors // ceil_div(groups, group))
    made = []
    for length in lengths_of(g.steps):
        items, walk = g.source[0] * g.cells * g.phases * ceil_div(g.steps, length), walk_of(g, length)
        strips = ceil_div(ceil_div(items, wave), lines)
        stream = Stream(length, columns, walk, _stages(g.walk, kind_of(call)), group, strips * lines, ceil_div(items, strips * lines))
        made.append((strips * walk + START_STEPS, stream))
    return [stream for _, stream in sorted(made, key=lambda each: each[0])]


def tile(call: Call, target: Target) -> Stream:
    """The strips with the fewest steps."""
    return candidates(call, target)[0]


def refused(call: Call, channels: int, taps: int) -> str | None:
    """None, or that channels or taps of a call are not for kernels that stream, in words."""
    if call.layout != "NHWC" or channels % LANES:
        return f"{channels} channels in {call.layout} do not lie in fours"
    return f"{taps} taps are more than {QUAD_TAPS}" if taps > QUAD_TAPS else None


def supports(call: Call, target: Target) -> str | None:
    """None, or the reason in words why a call is not for this kernel."""
    if said := depthwise.supports(call, target) or refused(call, call.out_shapes[0][1], numel(call.in_shapes[1][2:])):
        return said
    walk, kind = pass_of(call, columns_of(call, LANES)).walk, kind_of(call)
    return no_room(_stages(walk, kind), _stage(walk, kind), target)


def bind(call: Call) -> list[Launch]:
    """x or dy, w[, b] -> y or dx. One launch."""
    made, (x, w, *bias), kind = call.tile, call.ins, kind_of(call)
    g = pass_of(call, made.columns)
    (n, c, h, v), (_, _, p, q), walk = g.source, g.target, g.walk
    of_image, lines = ceil_div(g.steps, made.length) * g.phases, THREADS // made.group
    rounds = ceil_div(ceil_div(made.share, lines) * made.walk, unroll_of(made.stages, walk.ahead + 1))
    kernel = stream_kernel(walk, kind, made.stages, made.group, bool(bias))
    numbers = (c, c // LANES, g.cells, of_image, g.phases, made.length, g.steps, made.walk, rounds, n * of_image * g.cells, made.share, h, v, p, q)
    where = (g.row0, g.row_phase, g.row_step, g.row_read, g.col0, g.col_step, g.col_read, g.out_row0, g.out_step, g.out_col0)
    jumps = (lines // g.cells // of_image, lines // g.cells % of_image, lines % g.cells)
    grid, shared = (ceil_div(c // LANES, made.group), made.parts), made.stages * _stage(walk, kind)
    # Without bias the kernel has a `b` that it never reads.
    args = (x, call.packed, *(bias or [w]), *call.outs, *map(np.int32, (*numbers, *where, *jumps)))
    return [Launch(kernel, grid, THREADS, args, shared, name=call.op)]


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`: what strips and columns load, most of it out of L1, and the weights of every thread."""
    made, weights = call.tile, 4 * numel(call.in_shapes[1])
    g = pass_of(call, made.columns)
    (rows, columns), (n, c) = inside(g, made.length), g.source[:2]
    read = element(call) * n * c * rows * columns + weights * made.parts * (THREADS // made.group)
    return [Traffic(read, outputs(call), min(read, size(call, "in", 0) + weights))]


FILLING_US = 0.6
"""What it takes until the ring of rows is full: 33 images of 512 channels of 4×4 take 2.8 µs, by one thread per strip 2.2 (H100)."""


def estimate(call: Call, target: Target) -> float:
    """Microseconds. A step takes as long whether there are channels for all threads or not, and half as long where it loads a row and completes none:
    144 channels in strips of 16 rows of 18 steps take 1.18 times what is moved."""
    made, groups = call.tile, call.out_shapes[0][1] // LANES
    idle = (1 + made.walk / made.length) / 2 * ceil_div(groups, made.group) * made.group / groups
    return STREAM.launch + FILLING_US + idle * moved(traffic(call))


_WALK = Impl(
    bind, supports=supports, tile=tile, pack=pack, needs=(8, 0), candidates=candidates, traffic=traffic, engine="streamed", estimate=estimate
)
OPS = {Op("gconv", "fprop"): _WALK, Op("gconv", "dgrad"): _WALK}
"""Depthwise convolutions and their input gradients on GPUs with cp.async, before those of `depthwise.py`."""
