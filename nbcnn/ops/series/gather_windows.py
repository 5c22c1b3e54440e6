"""Gather windows: a batch of stretches of L hours out of resident series, by the epoch's shuffled order, and what follows them.

    x[n,f,l] = rows[(starts[order[POSITION + n]] + l)·F + f]
    y[n]     = targets[starts[order[POSITION + n]] + L]

All series lie one behind the other in `rows`; a start never lets a window cross from one into the next. `rows` has one axis, so
that a row of lower precision keeps the data set as it is.

    gather_windows    rows (R·F), targets (R), starts (M) int32, order (E) int32, state -> x (N,F,L), y (N)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, i8, jit
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.case import Case, normal
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.traffic import Traffic, once, outputs
from nbcnn.ops.kernel.windows import split
from nbcnn.ops.update.advance import POSITION, example_state
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

THREADS = 256


def gather_windows(
    rows: np.ndarray, targets: np.ndarray, starts: np.ndarray, order: np.ndarray, state: np.ndarray, x: np.ndarray, y: np.ndarray
) -> None:
    """x (N,F,L) and y (N) from rows (R·F) and targets (R) float32, starts (M) and order (E) int32, state (8) int64."""
    count, features, length = x.shape
    first = int(state[POSITION])
    at = starts[order[first : first + count]]
    table = rows.reshape(-1, features)
    x[...] = table[at[:, None] + np.arange(length)].transpose(0, 2, 1)
    y[...] = targets[at + length]


@functools.cache
def gather_windows_kernel(kind: str) -> Any:
    """The kernel that writes x stored as `kind`."""
    _, store = scalar_io(kind)

    @jit()
    def gather_windows_kernel(rows, targets, starts, order, state, x, y, count, F, L):
        """The formulas of the module.

        grid ⌈NFL/256⌉, block 256; a thread owns one x, the first of a window also its y. Writes are contiguous; the reads of a
        window are L·F neighbours, which its F·L threads find in the cache. shared none; moves 8·NFL bytes of float32.
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i < count:
            series, at = split(i, L)
            n, f = split(series, F)
            start = i8(starts[order[state[POSITION] + i8(n)]])
            store(x, i, rows[(start + i8(at)) * i8(F) + i8(f)])
            if f == 0 and at == 0:
                y[n] = targets[start + i8(L)]

    return gather_windows_kernel


def bind(call: Call) -> list[Launch]:
    """One launch."""
    _, features, length = call.out_shapes[0]
    count = numel(call.out_shapes[0])
    args = (*call.ins, *call.outs, np.int32(count), np.int32(features), np.int32(length))
    return [Launch(gather_windows_kernel(kinds(call)[1]), blocks(count, THREADS), THREADS, args)]


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`: the rows of every window, as if no two overlapped, and its target; of starts and order 8 bytes per element, not counted."""
    return [once(4 * sum(numel(shape) for shape in call.out_shapes), outputs(call))]


HOST, OPS = {Op("gather_windows"): host(gather_windows)}, {Op("gather_windows"): Impl(bind, traffic=traffic)}


def cases() -> Iterator[Case]:
    """Three windows of a table of 40 hours."""
    order = np.array([4, 0, 5, 1, 3, 2], np.int32)
    rows, targets, starts = normal(23, 40 * 3), normal(24, 40), np.array([30, 0, 7, 21, 12, 3], np.int32)
    wanted = (((3, 3, 9), "float32"), ((3,), "float32"))
    yield Case(Op("gather_windows"), "3 of 6", (rows, targets, starts, order, example_state()), wanted)
