"""The products of a short series written out: a lane has the whole series in registers, so every index is known when the kernel is compiled.

    results    acc[m] += Σ_i k[i] · row[first+m+i−left]          twelve results; the taps come from shared memory, four to a load
    gradient   sums[i] += Σ_t dy[t] · x[t+i−left]                 all taps; x comes from shared memory, four to a load

Only products inside the series are written. They are cut into blocks of at most 48 multiply-adds, a device function each, called one
behind the other: loops that short are unrolled completely, and arrays that only constants index stay in registers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from nbcnn.gpu.language import jit
from nbcnn.ops.ptx.vector import shared_load4
from nbcnn.ops.series.dwconv1d.sliding import RESULTS
from nbcnn.ops.series.dwconv1d.staging import quads

Step = tuple[Any, int]
"""A device function f(acc, row, shared, at), and how much further on than its caller's its `at` is."""
Span = tuple[int, int, int]


@jit(device=True)
def _nothing(acc, row, shared, at):
    pass


def _in_order(steps: Sequence[Step]) -> Any:
    """One device function that calls `steps` one behind the other."""
    while len(steps) > 1:
        padded = [*steps, *[(_nothing, 0)] * (-len(steps) % 6)]
        steps = [(_six(*padded[at : at + 6]), 0) for at in range(0, len(padded), 6)]
    return steps[0][0] if steps else _nothing


def _six(*steps: Step) -> Any:
    (a, A), (b, B), (c, C), (d, D), (e, E), (f, F) = steps

    @jit(device=True)
    def six(acc, row, shared, at):
        a(acc, row, shared, at + A)
        b(acc, row, shared, at + B)
        c(acc, row, shared, at + C)
        d(acc, row, shared, at + D)
        e(acc, row, shared, at + E)
        f(acc, row, shared, at + F)

    return six


@functools.cache
def results(length: int, taps: int, left: int, first: int) -> Any:
    """run(acc, row, shared, at): results first … first+11 of the series `row`; the taps start at shared[at], a multiple of four."""
    own = min(RESULTS, length - first)

    def span(tap: int) -> Span:
        """(first, behind the last) result that tap meets, and the element that it meets for result 0."""
        element = first + tap - left
        return (max(0, -element), min(own, length - element), element) if tap < taps else (0, 0, 0)

    found = [(tap, tuple(span(tap + q) for q in range(4))) for tap in range(0, quads(taps), 4)]
    steps = [(_four_taps(*spans), tap) for tap, spans in found if any(low < high for low, high, _ in spans)]
    return _in_order([*steps, (_nothing, 0)])


@functools.cache
def _four_taps(*spans: Span) -> Any:
    (LOW0, HIGH0, AT0), (LOW1, HIGH1, AT1), (LOW2, HIGH2, AT2), (LOW3, HIGH3, AT3) = spans

    if {span[:2] for span in spans} == {(0, RESULTS)}:

        @jit(device=True)
        def whole_block(acc, row, shared, at):
            k = shared_load4(shared, at)
            for q in range(4):
                for m in range(RESULTS):
                    acc[m] += k[q] * row[AT0 + q + m]

        return whole_block

    @jit(device=True)
    def four_taps(acc, row, shared, at):
        k0, k1, k2, k3 = shared_load4(shared, at)
        for m in range(LOW0, HIGH0):
            acc[m] += k0 * row[AT0 + m]
        for m in range(LOW1, HIGH1):
            acc[m] += k1 * row[AT1 + m]
        for m in range(LOW2, HIGH2):
            acc[m] += k2 * row[AT2 + m]
        for m in range(LOW3, HIGH3):
            acc[m] += k3 * row[AT3 + m]

    return four_taps


@functools.cache
def gradient(length: int, taps: int, left: int) -> Any:
    """run(sums, dy, shared, at): the products of the series `dy` with x, which starts at shared[at], a multiple of four, added to all taps."""

    def span(first: int, element: int) -> Span:
        """(first, behind the last) of dy's elements first … first+11 that meet `element` of x, and the tap of the first of the twelve."""
        tap = element - first + left
        return max(0, tap - taps + 1), min(RESULTS, length - first, tap + 1), tap

    steps: list[Step] = []
    for element in range(0, length, 4):
        for first in range(0, length, RESULTS):
            spans = [span(first, element + q) for q in range(4)]
            if any(low < high for low, high, _ in spans):
                steps.append((_four_elements(first, *spans), element))
    return _in_order([*steps, (_nothing, 0)])


def _four_elements(first: int, *spans: Span) -> Any:
    (LOW0, HIGH0, TAP0), (LOW1, HIGH1, TAP1), (LOW2, HIGH2, TAP2), (LOW3, HIGH3, TAP3) = spans
    FIRST = first

    if {span[:2] for span in spans} == {(0, RESULTS)}:

        @jit(device=True)
        def whole_block(acc, row, shared, at):
            x = shared_load4(shared, at)
            for q in range(4):
                for t in range(RESULTS):
                    acc[TAP0 + q - t] += row[FIRST + t] * x[q]

        return whole_block

    @jit(device=True)
    def four_elements(acc, row, shared, at):
        x0, x1, x2, x3 = shared_load4(shared, at)
        for t in range(LOW0, HIGH0):
            acc[TAP0 - t] += row[FIRST + t] * x0
        for t in range(LOW1, HIGH1):
            acc[TAP1 - t] += row[FIRST + t] * x1
        for t in range(LOW2, HIGH2):
            acc[TAP2 - t] += row[FIRST + t] * x2
        for t in range(LOW3, HIGH3):
            acc[TAP3 - t] += row[FIRST + t] * x3

    return four_elements
