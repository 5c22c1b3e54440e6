"""This module has what the kernels of series share that a lane holds in registers (whole.py, boxes.py, segments.py): how blocks share the batch,
how a lane takes a whole series of up to 64 elements and makes all its results, and the bytes that are moved.

How a series comes to its lane is not shared. In whole.py a warp's lanes move 32 series of one channel, whose taps they share; in boxes.py TMA moves
32 neighbouring channels of one example, each with taps of its own, into one of two boxes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.kernel.call import Call, blocks
from nbcnn.ops.kernel.traffic import Traffic, element
from nbcnn.ops.ptx.vector import shared_load4, shared_store4
from nbcnn.ops.series.dwconv1d import partials
from nbcnn.ops.series.dwconv1d.series import Correlation
from nbcnn.ops.series.dwconv1d.sliding import RESULTS
from nbcnn.ops.series.dwconv1d.straight import results

LONGEST = 64
"""Elements and taps that registers hold."""


@dataclass(frozen=True)
class Strips:
    """Blocks that share the series of the same channels, and the parts that a weight gradient is summed in; a warp takes a strip of units."""

    parts: int

    @property
    def split(self) -> int:
        """The parts, by the name that other tiles have for them."""
        return self.parts


def fits(g: Correlation) -> bool:
    """True if a lane holds a whole series and the filter is short."""
    return g.L % 4 == 0 and g.L <= LONGEST and g.T <= LONGEST


def fewest_rounds(groups: int, units: int, warps: int, places: int, start: float, most: int) -> int:
    """The parts that finish first: rounds of resident blocks, times the units that each warp takes, and `start` more to begin with.

    groups: of channels, each with `units` of work; places: blocks that the GPU holds at once.
    """

    def cost(parts: int) -> tuple[float, int]:
        return blocks(groups * parts, places) * (blocks(units, parts * warps) + start), parts

    return min(range(1, 1 + min(most, blocks(units, warps))), key=cost)


@functools.cache
def take(length: int) -> Any:
    """A device function take(row, shared, at): row[:length] = shared[at : at+length], 16 bytes at a time."""
    QUADS = length // 4

    @jit(device=True)
    def take_row(row, shared, at):
        for q in range(QUADS):
            a, b, c, d = shared_load4(shared, at + 4 * q)
            row[4 * q], row[4 * q + 1], row[4 * q + 2], row[4 * q + 3] = a, b, c, d

    return take_row


@functools.cache
def convolve(length: int, taps: int, left: int) -> Any:
    """A device function run(row, shared, at_taps, at): shared[at : at+length] = the correlation of `row` with the taps, twelve at a time."""

    def group(first: int) -> Any:
        run, FIRST, KEPT = results(length, taps, left, first), first, min(RESULTS, length - first) // 4

        @jit(device=True)
        def make(row, shared, at_taps, at):
            acc = cuda.local.array(RESULTS, f4)
            for m in range(RESULTS):
                acc[m] = 0.0
            run(acc, row, shared, at_taps)
            for q in range(KEPT):
                shared_store4(shared, at + (FIRST + 4 * q), acc[4 * q], acc[4 * q + 1], acc[4 * q + 2], acc[4 * q + 3])

        return make

    def then(before: Any, first: int) -> Any:
        last = group(first)

        @jit(device=True)
        def both(row, shared, at_taps, at):
            before(row, shared, at_taps, at)
            last(row, shared, at_taps, at)

        return both

    return functools.reduce(then, range(RESULTS, length, RESULTS), group(0))


def traffic(call: Call, g: Correlation) -> list[Traffic]:
    """The source and out once, the filter once per block."""
    one, filters = element(call), 4 * g.C * (g.T + g.skip)
    read = one * g.rows * g.L
    return [Traffic(read + filters * call.tile.parts, g.rows * g.L * element(call, "out"), read + filters)]


def traffic_backward(call: Call, g: Correlation, with_dx: bool) -> list[Traffic]:
    """x and dy once, and for dx the filter once per block and dx once; then the partial sums."""
    one, parts, filters = element(call), call.tile.parts, 4 * g.C * (g.T + g.skip) if with_dx else 0
    read, made = 2 * one * g.rows * g.L, g.rows * g.L * element(call, "out") if with_dx else 0
    first = Traffic(read + filters * parts, made + partials.scratch_bytes(g, parts), read + filters)
    return [first, partials.add_traffic(g, parts)]
