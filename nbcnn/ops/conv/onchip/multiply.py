"""The warps that multiply: products of two points each, of the tiles of a round with 64 filters, in registers.

Lanes stand four down (a strip of tiles each) and eight across (filters), interleaved as in register_tile.py; a thread has `across` tiles and two
quads of filters of both its points. What it multiplies next, a channel and a point, is on its way from shared memory a step ahead, across stages too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import f4, i4, jit
from nbcnn.ops.conv.onchip.form import CHANNEL_PITCH, CHANNELS, FILTERS, POINTS, ROW, SLOTS, Form
from nbcnn.ops.kernel.loops import in_sequence
from nbcnn.ops.ptx.vector import shared_load4, shared_store4

COLUMNS = 8
"""Filters of a thread."""
RUN = 8
"""Channels that are multiplied without a branch: a whole stage, which leaves the compiler the most to arrange (bench/LOG.md)."""
RUNS = CHANNELS // RUN
"""Of a stage, a power of two."""
POINTS_RUN, FILTERS_RUN = RUN * CHANNEL_PITCH, RUN * POINTS * FILTERS
"""Floats from run to run."""
_STEP = SLOTS + COLUMNS
FACTORS = 2 * RUN * _STEP
"""Floats of a thread's factors, of two points of every channel of a run; few of them at a time are in registers."""


def _load(form: Form, step: int) -> Any:
    """Device function (acc, rows, memory, points, filters): the thread's factors of a step, a channel and a point, into their place in `rows`."""
    TILES, TO, OTHER = form.across, step * _STEP, step * _STEP + SLOTS
    AT_POINTS, AT_FILTERS = step // 2 * CHANNEL_PITCH + step % 2 * ROW, step // 2 * POINTS * FILTERS + step % 2 * FILTERS

    @jit(device=True)
    def run(acc, rows, memory, points, filters):
        low = shared_load4(memory, points + i4(AT_POINTS))
        for q in range(4):
            rows[TO + q] = low[q]
        if TILES > 4:
            high = shared_load4(memory, points + i4(AT_POINTS + 4))
            for q in range(4):
                rows[TO + 4 + q] = high[q]
        left = shared_load4(memory, filters + i4(AT_FILTERS))
        right = shared_load4(memory, filters + i4(AT_FILTERS + FILTERS // 2))
        for q in range(4):
            rows[OTHER + q], rows[OTHER + 4 + q] = left[q], right[q]

    return run


def _multiply(form: Form, step: int) -> Any:
    """As `_load`: the products of a step, along one row and back the next, so that one factor stays (register_tile.py)."""
    TILES, AT = form.across, step * _STEP
    TO, OTHER = step % 2 * form.across * COLUMNS, AT + SLOTS

    @jit(device=True)
    def run(acc, rows, memory, points, filters):
        for i in range(TILES):
            for turn in range(COLUMNS):
                j = turn if i % 2 == 0 else COLUMNS - 1 - turn
                acc[TO + i * COLUMNS + j] += rows[AT + i] * rows[OTHER + j]

    return run


@cache
def products(form: Form) -> tuple[Any, Any, Any]:
    """(first, others, last), device functions (acc, rows, memory, points, filters): the loads of a run's first step; those of every other one, with
    the products of the step before; the first step's of the next run, with the products of this one's last step.
    """
    steps = 2 * RUN
    load, multiply = [_load(form, step) for step in range(steps)], [_multiply(form, step) for step in range(steps)]
    others = in_sequence([in_sequence([load[step + 1], multiply[step]]) for step in range(steps - 1)])
    return load[0], others, in_sequence([load[0], multiply[-1]])


@jit(device=True)
def lane_place(lane):
    """(strip of tiles, first filter) of a lane."""
    across = i4((lane & i4(1)) | ((lane >> i4(1)) & i4(6)))
    return i4(((lane >> i4(1)) & i4(1)) | ((lane >> i4(3)) & i4(2))), i4(across * i4(4))


@jit(device=True)
def swizzled(filter, strip):
    """Where filters from this one on lie in a row of products: lanes that store at once meet every bank once."""
    return i4(filter ^ ((strip & i4(1)) << i4(4)))


@cache
def storing(form: Form) -> Any:
    """Device function (memory, acc, warp, strip, filter): sums to sD[point][tile][filter]."""
    TILES, ALL, AT = form.across, form.tiles, form.at_products

    @jit(device=True)
    def run(memory, acc, warp, strip, filter):
        to = i4(i4(AT) + i4(i4(warp * i4(2 * ALL)) + strip * i4(TILES)) * i4(FILTERS) + swizzled(filter, strip))
        for point in range(2):
            for i in range(TILES):
                for half in range(2):
                    k = (point * TILES + i) * COLUMNS + 4 * half
                    at = i4(to + i4((point * ALL + i) * FILTERS + half * (FILTERS // 2)))
                    shared_store4(memory, at, acc[k], acc[k + 1], acc[k + 2], acc[k + 3])

    return run


@cache
def cleared(form: Form) -> Any:
    """Device function (acc): zeros."""
    ALL = 2 * form.across * COLUMNS

    @jit(device=True)
    def run(acc):
        for i in range(ALL):
            acc[i] = f4(0)

    return run
