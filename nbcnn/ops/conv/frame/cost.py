"""A model of the time that a launch of tiles takes, by which engines choose among them.

A multiprocessor that has `together` blocks takes the tiles of a launch in waves. A step of a tile keeps three things busy: the tensor cores, shared
memory (which TMA writes and wgmma reads), and the way from L2, of which every multiprocessor has a share. The slowest of them is what a step takes;
or, where few blocks leave them idle, the latency of its loads over the number of steps that are in flight. L2 has a limit of its own: the lines that
it gives all multiprocessors a cycle. As these disturb each other, the largest is taken softly, as a p-norm. A tile begins and ends beside: first
loads, epilogue. What one block does then, others on the multiprocessor cover in part; where two warpgroups of a block take tiles alternately
(`turns`), the other's products cover it, unless they are the shorter. No launch is faster than its compulsory bytes out of memory. Launches before
it may bring operands into planes, and one behind it adds up the parts of a split sum.

Rates are cycles and bytes, fitted to measured times of every tile of the convolutions of `bench nets` (`nbcnn.lab.studies.tiles`).
docs/log/tensor-cores.md has the regrets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd, inf

from nbcnn.gpu.target import Target


@dataclass(frozen=True)
class Work:
    """What a launch of tiles asks for.

    tiles       blocks' tiles in all; `together` blocks share a multiprocessor
    steps       of a tile, of which `ahead` are in flight
    tensor      cycles of a step on tensor cores at their full rate; shared: its bytes through shared memory; fetched: its bytes out of L2
    ends        bytes that the epilogue of a tile moves
    memory      compulsory bytes of the launch
    parts       bytes of the parts that a second launch adds, 0 without one
    turns       tiles on which a block works alternately: with 2, the epilogue of one overlaps the products of the other
    exchange    cycles in which a block adds its sums to those of the other blocks of its cluster, beside the epilogue
    before      bytes that launches before it move, 0 without them
    readers     blocks that read the same filters at a time
    padded      how many times the channels there are a step has, where they are no whole steps
    lines       lines of L2 that a step asks for, each of which is a request
    """

    tiles: int
    together: int
    steps: float
    ahead: float
    tensor: float
    shared: float
    fetched: float
    ends: float
    memory: float
    parts: float = 0.0
    turns: int = 1
    exchange: float = 0.0
    before: float = 0.0
    readers: float = 0.0
    padded: float = 1.0
    lines: float = 0.0


@dataclass(frozen=True)
class Rates:
    """What a multiprocessor does in a cycle, and the cycles that things take however small they are.

    tensor      part of the full rate of tensor cores; shared, fetched: bytes per cycle of a multiprocessor
    latency     cycles from asking for the operands of a step to having multiplied them
    start       cycles of a tile besides its steps; ends: bytes of the epilogue a cycle
    covered     part of a tile's beginning and end that other blocks on the multiprocessor cover
    memory      bytes per cycle of the whole GPU
    soft        p of the norm
    second      cycles of a second launch at least; parts: the bytes that it adds a cycle
    first       the fewest cycles of the launches before; before: the bytes that they move a cycle
    crowd       cycles of a step for each reader of the same filters, which L2 serves one after another
    padded      power of `Work.padded` by which the way from L2 is slower
    lines       lines of L2 a cycle for the whole GPU
    """

    tensor: float
    shared: float
    fetched: float
    latency: float
    start: float
    ends: float
    covered: float
    memory: float
    soft: float
    second: float = 0.0
    parts: float = 1.0
    first: float = 0.0
    before: float = 1.0
    crowd: float = 0.0
    padded: float = 0.0
    lines: float = inf


LINE = 128
L2_LINES, PART = 60.0, 0.75
"""Lines that L2 gives all multiprocessors a cycle, and the part of a line's time that one takes besides of which only a part is wanted.

Both are the same for every shape, in bf16 and in fp32. 64 bytes a cycle for each of 132 multiprocessors would be 66 lines. Worked out of times on an
H100: in fp32 a step of 128 pixels of 40 channels, 80 bytes each, takes 128 blocks 3,000 to 3,700 cycles, one of 64 channels, whole lines, 2,000.
With 0.5 in place of 0.75 errors are the same to 0.4 %, and one choice of 350 in fp32 is worse (pooled, 40 to 72 channels at batch 128).
"""


@cache
def lines_of(row: int, part: float = 0.0) -> float:
    """Lines of L2 for a pixel's 128 bytes, on average over pixels that lie `row` bytes apart; one that is wanted in part counts 1 + `part`."""
    total = count = 0.0
    for pixel in range(LINE // gcd(row, LINE)):
        for first in range(pixel * row, (pixel + 1) * row, LINE):
            end, count = min(first + LINE, (pixel + 1) * row), count + 1
            for line in range(first // LINE, -(-end // LINE)):
                whole = first <= line * LINE and (line + 1) * LINE <= end
                total += 1.0 if whole else 1.0 + part
    return total / count


def cycles(work: Work, rates: Rates, target: Target) -> float:
    """Estimated cycles of a launch, of those before it, and of the second one if it has parts."""

    p = rates.soft

    def steps(blocks: int, running: int) -> float:
        busy = (work.tensor / rates.tensor, work.shared / rates.shared, work.fetched * work.padded**rates.padded / rates.fetched)
        idle = (rates.latency / work.ahead, rates.crowd * work.readers, running * work.lines / rates.lines)
        return work.steps * (sum((blocks * each) ** p for each in busy) + sum(each**p for each in idle)) ** (1 / p)

    def ends(blocks: int) -> float:
        return rates.start + blocks * (work.ends / rates.ends + work.exchange)

    def wave(running: int) -> float:
        blocks = -(-running // target.multiprocessors)
        took = steps(blocks, running)
        if work.turns > 1:
            return max(took, (took + ends(blocks)) / work.turns)
        return took + ends(blocks) * (1 - rates.covered * (blocks - 1) / blocks)

    full, rest = divmod(work.tiles, target.multiprocessors * work.together)
    product = full * wave(target.multiprocessors * work.together) + (wave(rest) if rest else 0.0)
    if work.turns > 1:
        product += min(steps(1, target.multiprocessors), ends(1))
    memory = work.memory / rates.memory
    product = (product**p + memory**p) ** (1 / p)
    first = rates.first + work.before / rates.before if work.before else 0.0
    return first + product + (rates.second + work.parts / rates.parts if work.parts else 0.0)


RATES = {
    ("columns", "bf16"): Rates(1.0, 200, 65.5, 2720, 4180, 33.5, 0.143, 3500, 5.24),
    ("patches", "bf16"): Rates(1.0, 200, 50.0, 2470, 200, 25.6, 0.0, 1760, 5.26),
    ("pixels", "bf16"): Rates(1.0, 200, 65.7, 2100, 3760, 115, 0.0, 2360, 3.29, 1670, 1110),
    ("squares", "bf16"): Rates(1.0, 200, 200, 100, 6400, 42.1, 0.633, 1930, 2.88, 300, 1360),
    ("columns", "tf32"): Rates(1.0, 127, 200, 3520, 2940, 31.5, 0.349, 3470, 12),
    ("patches", "tf32"): Rates(1.0, 138, 200, 2020, 200, 66.6, 0.0, 3500, 12),
    ("registers", "tf32"): Rates(1.0, 187, 81.3, 2200, 4320, 27.8, 0.015, 3890, 2.43, 3230, 1760),
    ("columns", "fp32"): Rates(0.75, 132, 137, 3000, 4150, 37.5, 0.162, 1870, 5.24),
    ("pixels", "fp32"): Rates(1.0, 856, 127, 2430, 6940, 7200, 0.0, 2190, 2.31, 1670, 1090, 1870, 1665),
    ("registers", "fp32"): Rates(1.0, 202, 61.5, 9150, 4040, 13.7, 0.1, 1110, 9.1, 5960, 4970),
}
"""By kernel and precision: the correlation by columns and by patches, the weight gradient by pixels (of fp32 by planes), through registers
and by squares; at 1.755 GHz of an H200.

Columns and patches of bf16 are fitted to 2,200 times of 110 correlations, with a mean regret of 0.9 %, 17 % at most; pixels and squares of bf16 to
those of 45 weight gradients; columns and patches of tf32 to 774 times of 42 convolutions, 0.6 % and 7 %. The columns of fp32 have rates of an earlier
fit of bf16, its products counted at their own rate. The weight gradients of fp32 that are products of three planes of bf16 ("pixels") are fitted to
1,500 times of 53 of them on an H100, 0.5 % and 6 %. Those through registers: tf32 to 1,282 times of 90 on an H100 and an H200, 1.4 % and, but for one
behind an upsampling, 15 %; fp32, which are products of two values of tf32, to 687 times of 79 on an H100, 0.4 % and, but for the same, 1 %.
"""


def _measured(*each: float, shared: float = inf, crowd: float = 0.0, padded: float = 0.0, lines: float = inf) -> Rates:
    """Rates beside other engines, by (tensor, fetched, latency, start, ends, memory): shared memory limits few kernels, tile ends do not overlap."""
    tensor, fetched, latency, start, ends, memory = each
    return Rates(tensor, shared, fetched, latency, start, ends, 0.0, memory, 8, crowd=crowd, padded=padded, lines=lines)


BESIDE = {
    ("columns", "bf16"): (2.07, _measured(0.89, 64.3, 100, 365, 27.4, 1370, lines=L2_LINES)),
    ("columns", "tf32"): (1.15, _measured(0.92, 61.6, 1610, 457, 23.8, 1300, crowd=7.1, padded=0.11)),
    ("columns", "fp32"): (2.54, _measured(0.99, 49.1, 191, 1530, 31.5, 1480, lines=L2_LINES)),
    ("patches", "bf16"): (2.61, _measured(0.79, 47.4, 716, 331, 44.9, 1520, crowd=1.04, padded=0.06)),
    ("patches", "tf32"): (3.43, _measured(0.80, 42.9, 979, 118, 146, 1300, crowd=1.75, padded=0.05)),
    ("pixels", "bf16"): (2.97, _measured(1.10, 53.2, 394, 200, 10.8, 1450, lines=L2_LINES)),
    ("squares", "bf16"): (4.00, _measured(0.97, 34.1, 101, 2150, 40, 1450)),
    ("registers", "tf32"): (0.63, _measured(1.10, 43.8, 2950, 3420, 9.18, 1450, shared=129)),
    ("pixels", "fp32"): (4.12, _measured(1.02, 45.3, 256, 2750, 10.0, 1450, lines=L2_LINES)),
    ("registers", "fp32"): (1.97, _measured(1.10, 90.2, 8970, 1850, 11.1, 1450, shared=248)),
}
"""Microseconds of a launch, and rates, by kernel and precision, by which a product is compared with those of other engines.

Fitted to 580 times of the tile that RATES choose, of 570 steps on an H100 whose clock is up to 1.98 GHz; ratios within a step count more than times.
Columns and pixels of two bytes ask L2 for its lines, which are what their steps wait for where channels are no whole lines: without that term the
rms error of columns is 14 instead of 13 % in bf16 and 8.5 instead of 7.7 % in fp32. Times of tf32 show no such wait.
Weight gradients of tf32 that read an operand through registers wait for shared memory, which moves 128 bytes a cycle.
Rates of tiles and these differ as those were fitted to all tiles of large steps on an H200, these to small and large steps beside other engines.
"""
PLANES_US, PLANES = 0.3, 2.7e6
"""Microseconds of a launch that splits operands into planes, and bytes a microsecond that it moves."""
