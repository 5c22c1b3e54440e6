"""Depthwise convolution: each channel has one filter of its own (groups = C = K of `grouped.py`), at the speed of memory.

A depthwise convolution does R·S products for each element that it reads, too few to be worth anything but reading each element from memory once.
So a thread walks down the image: it owns four neighbouring channels (NHWC; else one) of one or two columns and keeps their R·S weights in registers.
A step of the walk reads the next rows of the source, as wide as the windows of its columns, adds their products to the sums of all target rows that
they reach, stores the rows that are complete, and moves the other sums up. Neighbouring columns belong to neighbouring threads and come from L1.
The rows of the steps to come are loaded before those at hand are multiplied: what is in flight is what bounds the speed (docs/log/cuda-cores.md).

The input gradient is a walk, too. `depthwise_walk.py` has the numbers of both, `depthwise_wgrad.py` the weight gradient. Filters packed for both
are `[tap][channel]`, so that channels are read four at a time. Where the GPU has cp.async and channels lie in fours, `depthwise_stream.py` comes
first: these kernels are for NCHW, other channels, large filters, and GPUs before compute capability 8.0.

Source of the walk: rolling sums, as in the separable filters of V. Podlozhnyuk, "Image convolution with CUDA", NVIDIA, 2007; here over all taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit, u4
from nbcnn.gpu.target import Target
from nbcnn.ops.conv.depthwise_walk import Pass, Walk, inside, pass_of
from nbcnn.ops.kernel import maps
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks
from nbcnn.ops.kernel.cost import STREAM, Speed, microseconds
from nbcnn.ops.kernel.loops import ceil_div, unrolled, within
from nbcnn.ops.kernel.stored import PAIRS, scalar_io, vector_io
from nbcnn.ops.kernel.traffic import Traffic, element, outputs, size
from nbcnn.ops.kernel.windows import split
from nbcnn.ops.ptx.vector import load1_if, load4_if, load_halves4_if
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel
from nbcnn.plan.storage import HALVES

THREADS = 128
MOST_TAPS = 121
"""Taps of a filter, which lie in registers."""
QUAD_TAPS = 25
"""Taps of a filter at most where a thread takes four channels."""
PAIR_TAPS = 9
"""Taps of a filter at most where a thread takes two columns."""
IN_FLIGHT = 32
"""32-bit registers for what a thread has loaded and not yet multiplied."""
RESIDENT = 512
"""Threads that a multiprocessor holds at a time, at 128 registers each."""
START_STEPS = 8
"""Steps that weights, addresses and the first loads of a strip cost."""


@dataclass(frozen=True)
class Strip:
    """Steps of a walk that one thread takes, how many of them it loads at once, and its columns."""

    length: int
    together: int
    columns: int


@dataclass(frozen=True)
class Held:
    """How `lanes` elements stored as `kind` lie in registers between load and use: four halves are two words, all else is float32.

    load(array, i, wanted, into, at)   into[at …] = the elements from i on, zeros where `wanted` is 0
    unpack(values, to, words, at)      values[to …] = the elements at words[at …], float32
    """

    kind: Any
    words: int
    load: Any
    unpack: Any


@cache
def held(lanes: int, kind: str) -> Held:
    """How a thread holds what it loads."""
    if lanes == 4 and kind in HALVES:
        low, high = PAIRS[kind][:2]

        @jit(device=True)
        def load_pairs(array, i, wanted, into, at):
            into[at], into[at + 1] = load_halves4_if(array, i, wanted)

        @jit(device=True)
        def unpack_pairs(values, to, words, at):
            values[to], values[to + 1] = low(words[at]), high(words[at])
            values[to + 2], values[to + 3] = low(words[at + 1]), high(words[at + 1])

        return Held(u4, 2, load_pairs, unpack_pairs)
    load1, _ = scalar_io(kind)

    @jit(device=True)
    def load_quad(array, i, wanted, into, at):
        into[at], into[at + 1], into[at + 2], into[at + 3] = load4_if(array, i, wanted)

    @jit(device=True)
    def load_half(array, i, wanted, into, at):
        into[at] = 0.0
        if wanted:
            into[at] = load1(array, i)

    @jit(device=True)
    def load_one(array, i, wanted, into, at):
        into[at] = load1_if(array, i, wanted)

    @jit(device=True)
    def unpack(values, to, words, at):
        for c in range(lanes):
            values[to + c] = words[at + c]

    return Held(f4, lanes, load_quad if lanes == 4 else load_half if kind in HALVES else load_one, unpack)


@cache
def store_lanes(lanes: int, kind: str) -> Any:
    """Device function store(array, i, values, at): the `lanes` elements from i on = values[at …]."""
    if lanes == 4:
        _, store4 = vector_io(kind)

        @jit(device=True)
        def store(array, i, values, at):
            store4(array, i, values[at], values[at + 1], values[at + 2], values[at + 3])
    else:
        _, store1 = scalar_io(kind)

        @jit(device=True)
        def store(array, i, values, at):
            store1(array, i, values[at])

    return store


@cache
def fetch_rows(walk: Walk, lanes: int, kind: str, g: int) -> Any:
    """Device function fetch(x, source, step, last, rows, columns, extent, words): loads the rows of step + g, if that is before `last`.

    source: the offset of the image; rows: (row0, row_step, row_read); columns: (the first, col_read); extent: (H, W, elements between columns).
    """
    hold = held(lanes, kind)
    READS, ACROSS, WORDS, load = walk.reads, walk.across, hold.words, hold.load
    FIRST = g * READS * ACROSS * WORDS

    @jit(device=True)
    def fetch(x, source, step, last, rows, columns, extent, words):
        (row0, row_step, row_read), (column, col_read), (H, W, inner) = rows, columns, extent
        for u in range(READS):
            h = row0 + (step + g) * row_step + u * row_read
            line = source + (h * W + column) * inner
            inside = within(h, H) & (step + g < last)
            for v in range(ACROSS):
                wanted = inside & within(column + v * col_read, W)
                load(x, line + v * col_read * inner, wanted, words, FIRST + (u * ACROSS + v) * WORDS)

    return fetch


@cache
def unpack_step(walk: Walk, lanes: int, kind: str, g: int) -> Any:
    """Device function (values, words): what `fetch_rows` loaded for step g as float32, [row][column][lane]."""
    hold = held(lanes, kind)
    COUNT, WORDS, unpack = walk.reads * walk.across, hold.words, hold.unpack
    FIRST = g * COUNT * WORDS

    @jit(device=True)
    def run(values, words):
        for k in range(COUNT):
            unpack(values, k * lanes, words, FIRST + k * WORDS)

    return run


@cache
def walk_kernel(walk: Walk, kind: str, lanes: int, nhwc: bool, together: int, with_bias: bool) -> Any:
    """The kernel of a walk; source and target are stored as `kind`, a thread owns `lanes` channels."""
    R, S, READS, MAKES, SLOTS, AHEAD = walk.R, walk.S, walk.reads, walk.makes, walk.slots, walk.ahead
    TURN, SIGN, OVER, ACROSS, WIDE, SPREAD, EVEN = walk.turn, walk.sign, walk.over, walk.across, walk.wide, walk.spread, walk.even
    COLUMNS, JUMP, L, TAPS = walk.columns, walk.jump, lanes, walk.R * walk.S
    SUMS, ROW, WEIGHTS, STEP = walk.slots * walk.wide * lanes, walk.wide * lanes, TAPS * lanes, walk.reads * walk.across * lanes
    hold = held(lanes, kind)
    WORD, HELD = hold.kind, together * walk.reads * walk.across * hold.words
    load_weights, store = held(lanes, "float32").load, store_lanes(lanes, kind)

    def compute(g: int) -> Any:
        unpack = unpack_step(walk, lanes, kind, g)

        @jit(device=True)
        def run(words, weights, acc, bias, y, target, step, first, last, rows, column, extent):
            (out_row, out_step), (P, Q, inner) = rows, extent
            values = cuda.local.array(STEP, f4)
            unpack(values, words)
            for r in range(R):
                e = TURN + r * SIGN
                for s in range(S):
                    f = s * SPREAD
                    for j in range(COLUMNS):
                        for c in range(L):
                            value = values[((READS - 1 - e % OVER) * ACROSS + f // EVEN + j * JUMP) * L + c]
                            acc[(e // OVER * WIDE + f % EVEN + j) * L + c] += weights[(r * S + s) * L + c] * value
            if (step + g >= first) & (step + g < last):
                for o in range(MAKES):
                    p = out_row + (step + g) * out_step + o
                    for j in range(WIDE):
                        if within(p, P) & within(column + j, Q):
                            store(y, target + (p * Q + column + j) * inner, acc, o * ROW + j * L)
            for k in range(SLOTS):
                for j in range(ROW):
                    acc[k * ROW + j] = acc[(k + MAKES) * ROW + j] if k + MAKES < SLOTS else bias[j % L]

        return run

    read_all = unrolled([fetch_rows(walk, lanes, kind, g) for g in range(together)])
    compute_all = unrolled([compute(g) for g in range(together)])

    @jit()
    def depthwise_kernel(
        x, w, b, y, count, C, groups, cells, strips, phases, length, steps, H, W, P, Q,
        row0, row_phase, row_step, row_read, col0, col_step, col_read, out_row0, out_step, out_col0,
    ):  # fmt: skip
        """y[n,p,q,c] = b[c] + Σ_{r,s} w[r,s,c] · x[n, row of p and r, column of q and s, c]: the module's walk.

        grid ⌈N·strips·cells·(C/lanes) / 128⌉, block 128; a thread owns `lanes` channels of a cell, one or two columns of y (of dx with a stride: as
        many as the stride), in a strip of `length` steps; neighbours are the next channels (NHWC) or the next columns (NCHW).
        shared none; moves x through L1 as often as windows of cells overlap, the rows above a strip again, weights once per thread, and y once.
        source: see the module.
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        rest, group = split(i, groups)
        rest, cell = split(rest, cells)
        image, strip = split(rest, strips * phases)
        part, phase = split(strip, phases)
        if nhwc:
            inner, channel, lane = C, group * L, group * L
        else:
            _, channel = split(image, C)
            inner, lane = 1, 0
        source, target = image * H * W * inner + lane, image * P * Q * inner + lane
        weights, bias = cuda.local.array(WEIGHTS, f4), cuda.local.array(L, f4)
        acc, words, ahead = cuda.local.array(SUMS, f4), cuda.local.array(HELD, WORD), cuda.local.array(HELD, WORD)
        for t in range(TAPS):
            load_weights(w, t * C + channel, True, weights, t * L)
        for c in range(L):
            bias[c] = b[channel + c] if with_bias else 0.0
        for k in range(SLOTS):
            for j in range(ROW):
                acc[k * ROW + j] = bias[j % L]
        first = part * length
        last = min(first + length, steps)
        rows, columns = (row0 + phase * row_phase, row_step, row_read), (col0 + cell * col_step, col_read)
        out_rows, out_column = (out_row0 + phase, out_step), out_col0 + cell * WIDE
        source_extent, target_extent = (H, W, inner), (P, Q, inner)
        step = first - AHEAD
        read_all(x, source, step, last, rows, columns, source_extent, words)
        while step < last:
            after = step + together
            read_all(x, source, after, last, rows, columns, source_extent, ahead)
            compute_all(words, weights, acc, bias, y, target, step, first, last, out_rows, out_column, target_extent)
            step = after + together
            read_all(x, source, step, last, rows, columns, source_extent, words)
            compute_all(ahead, weights, acc, bias, y, target, after, first, last, out_rows, out_column, target_extent)

    return depthwise_kernel


def lanes_of(call: Call, taps: int, channels: int) -> int:
    """Channels of a thread."""
    return 4 if call.layout == "NHWC" and channels % 4 == 0 and taps <= QUAD_TAPS else 1


def columns_of(call: Call, lanes: int) -> int:
    """Columns of a thread in a convolution: two, which share what they load, where registers hold them."""
    window = (call.out_shapes[0] if call.op == Op("gconv", "wgrad") else call.in_shapes[1])[2:]
    strided = max(call.attrs["stride"]) > 1
    return 2 if lanes == 4 and numel(window) <= PAIR_TAPS and call.attrs["dilation"][1] == 1 and not strided else 1


def together_of(steps: int, loads: int, words: int, registers: int = IN_FLIGHT) -> int:
    """Steps of which `loads` of so many words are issued at once, two such rounds in flight: as many as registers hold, few to fill up the last."""
    most = max(1, min(4, registers // (2 * loads * words)))
    # A step that fills up costs its products; a round that is short leaves less in flight.
    return min(range(1, most + 1), key=lambda g: ceil_div(steps, 2 * g) * 2 * g * (1 + 0.15 / g))


def group_of(groups: int) -> int:
    """Threads side by side along the channels: a power of two from 8 to 32 with the fewest idle lanes, the largest of equal ones."""
    return min((32, 16, 8, 4, 2, 1), key=lambda group: (ceil_div(groups, group) * group * (1 if group >= 8 else 1.5), -group))


def lengths_of(steps: int) -> list[int]:
    """Lengths of strips worth trying: a part of the steps each, the longest first."""
    return sorted({ceil_div(steps, parts) for parts in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)}, reverse=True)


def kind_of(call: Call) -> str:
    """How images of a call are stored."""
    return call.in_dtypes[0] if call.in_dtypes else "float32"


def _count(call: Call, g: Pass, length: int) -> int:
    """Threads of strips of `length` steps."""
    n, c = g.target[:2]
    return n * (c // lanes_of(call, g.walk.R * g.walk.S, c)) * g.cells * g.phases * ceil_div(g.steps, length)


def candidates(call: Call, target: Target) -> list[Strip]:
    """Strips, by the steps that a multiprocessor takes one after another."""
    lanes = lanes_of(call, numel(call.in_shapes[1][2:]), call.out_shapes[0][1])
    columns = columns_of(call, lanes)
    g, words = pass_of(call, columns), held(lanes, kind_of(call)).words
    made = []
    for length in lengths_of(g.steps):
        steps = length + g.walk.ahead
        together = together_of(steps, g.walk.reads * g.walk.across, words)
        waves = ceil_div(_count(call, g, length), RESIDENT * target.multiprocessors)
        made.append((waves * (ceil_div(steps, 2 * together) * 2 * together + START_STEPS), Strip(length, together, columns)))
    return [strip for _, strip in sorted(made, key=lambda each: each[0])]


def tile(call: Call, target: Target) -> Strip:
    """The strips with the least estimated time."""
    return candidates(call, target)[0]


def supports(call: Call, target: Target) -> str | None:
    """None, or the reason in words why a call is not for these kernels."""
    images = (call.in_shapes[0], call.in_shapes[1] if call.op == Op("gconv", "wgrad") else call.out_shapes[0])
    filters = call.out_shapes[0] if call.op == Op("gconv", "wgrad") else call.in_shapes[1]
    groups = call.attrs["groups"]
    if any(shape[1] != groups for shape in images):
        return f"{images[0][1]} → {images[1][1]} channels in {groups} groups are not depthwise"
    if numel(filters[1:]) > MOST_TAPS:
        return f"{numel(filters[1:])} taps are more than {MOST_TAPS}"
    if call.op == Op("gconv", "dgrad") and tuple(call.attrs["stride"]) != (1, 1):
        g = pass_of(call).walk
        lanes = lanes_of(call, g.R * g.S, groups)
        if g.slots * g.wide * lanes > MOST_TAPS:
            return f"a stride of {call.attrs['stride']} with a dilation of {call.attrs['dilation']} has {g.slots * g.wide} sums open"
    return maps.supports(call, target)


def bind(call: Call) -> list[Launch]:
    """x or dy, w[, b] -> y or dx. One launch."""
    strip, (x, w, *bias) = call.tile, call.ins
    g = pass_of(call, strip.columns)
    (_, c, h, v), (_, _, p, q), walk = g.source, g.target, g.walk
    nhwc, lanes = call.layout == "NHWC", lanes_of(call, walk.R * walk.S, c)
    count, strips = _count(call, g, strip.length), ceil_div(g.steps, strip.length)
    kernel = walk_kernel(walk, kind_of(call), lanes, nhwc, strip.together, bool(bias))
    numbers = (count, c, c // lanes if nhwc else 1, g.cells, strips, g.phases, strip.length, g.steps, h, v, p, q)
    where = (g.row0, g.row_phase, g.row_step, g.row_read, g.col0, g.col_step, g.col_read, g.out_row0, g.out_step, g.out_col0)
    # Without bias the kernel has a `b` that it never reads.
    args = (x, call.packed, *(bias or [w]), *call.outs, *map(np.int32, (*numbers, *where)))
    return [Launch(kernel, blocks(count, THREADS), THREADS, args, name=call.op)]


def pack(call: Call) -> np.ndarray:
    """w (C,1,R,S) as [R][S][C]; the taps of dgrad in reverse order where its walk is a convolution."""
    shape = call.in_shapes[1]
    index = np.arange(numel(shape), dtype=np.int32).reshape(shape[0], -1)
    flipped = call.op == Op("gconv", "dgrad") and tuple(call.attrs["stride"]) == (1, 1)
    return np.ascontiguousarray((index[:, ::-1] if flipped else index).T).reshape(-1)


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`: what strips and columns load, most of it out of L1, and the weights of every thread."""
    g = pass_of(call, call.tile.columns)
    (rows, columns), (n, c) = inside(g, call.tile.length), g.source[:2]
    weights = numel(call.in_shapes[1])
    lanes = lanes_of(call, g.walk.R * g.walk.S, c)
    read = element(call) * n * c * rows * columns + 4 * weights // c * lanes * _count(call, g, call.tile.length)
    return [Traffic(read, outputs(call), min(read, size(call, "in", 0) + 4 * weights))]


ROUND_US, ROUND_US_UNPACKED = 0.33, 0.55
"""What a round of a thread waits for its loads and multiplies them, of halves also unpacks them: a thread has one more round in flight, so where
rounds are short less is in flight than memory could bring. Fitted to 54 depthwise convolutions on an H100, 3.1 µs to 144."""
_OVERLAPPED = Speed(STREAM.launch, 1.0, 3)


def estimate(call: Call, target: Target) -> float:
    """Microseconds: what is moved, or the rounds of the threads that run one after another."""
    g, round_us = pass_of(call, call.tile.columns), ROUND_US_UNPACKED if element(call) == 2 else ROUND_US
    waves = ceil_div(_count(call, g, call.tile.length), RESIDENT * target.multiprocessors)
    return microseconds(round_us * waves * ceil_div(call.tile.length + g.walk.ahead, call.tile.together), traffic(call), _OVERLAPPED)


WALK = Impl(bind, supports=supports, tile=tile, pack=pack, candidates=candidates, traffic=traffic, engine="depthwise", estimate=estimate)
