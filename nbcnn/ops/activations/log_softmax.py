"""The logarithm of softmax along axis 1: y[f] = x[f] − max − log Σ exp(x − max); dx[f] = dy[f] − exp(y[f])·Σ dy. Rows as in softmax.py.

The logarithm of what softmax.py computes would be −∞ where a probability is too small for float32; this is not.

    log_softmax_fprop     x (N,F), (N,C,L) or (N,C,H,W) -> y
    log_softmax_dgrad     dy, y -> dx
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.activations import softmax
from nbcnn.ops.activations.softmax import LOWEST, THREADS, place_of
from nbcnn.ops.kernel import elementwise
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import Case, Gradient, Shapes, label_of, normal
from nbcnn.ops.kernel.reduce import group_reduction, larger, plus
from nbcnn.ops.kernel.stored import scalar_io
from nbcnn.ops.kernel.traffic import Traffic, size


def log_softmax_fprop(x: np.ndarray, y: np.ndarray) -> None:
    """y = log softmax of x along axis 1."""
    np.subtract(x, x.max(1, keepdims=True), out=y)
    np.subtract(y, np.log(np.exp(y).sum(1, keepdims=True)), out=y)


def log_softmax_dgrad(dy: np.ndarray, y: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy − exp(y)·Σ dy, the sum along axis 1."""
    np.subtract(dy, np.exp(y) * dy.sum(1, keepdims=True), out=dx)


@functools.cache
def fprop_kernel(kind: str, group: int, planes: bool) -> Any:
    """The kernel with `group` threads a row, a power of two up to a block; x and y stored as `kind`."""
    (load, store), place = scalar_io(kind), place_of(planes)
    group_max, group_sum = group_reduction(group, larger), group_reduction(group, plus)
    ROWS = THREADS // group

    @jit()
    def log_softmax_fprop_kernel(x, y, rows, width, plane):
        """y = log softmax(x) along the rows.

        grid ⌈rows / (256 / group)⌉, block 256; owns: a group of threads a row. shared 2 KiB; moves 8·x bytes of float32, and the row twice more
        from a cache.
        """
        maxima = cuda.shared.array(THREADS, f4)
        sums = cuda.shared.array(THREADS, f4)
        tid = cuda.threadIdx.x
        lane = tid & group - 1
        n = cuda.blockIdx.x * ROWS + (tid - lane) // group
        start, step = place(n, width, plane)
        # A group without a row has nothing to read, but meets the others at the barriers.
        elements = width if n < rows else 0
        biggest, whole = LOWEST, 0.0
        for f in range(lane, elements, group):
            biggest = max(biggest, load(x, start + f * step))
        biggest = group_max(maxima, biggest)
        for f in range(lane, elements, group):
            whole += math.exp(load(x, start + f * step) - biggest)
        whole = group_sum(sums, whole)
        for f in range(lane, elements, group):
            store(y, start + f * step, load(x, start + f * step) - biggest - math.log(whole))

    return log_softmax_fprop_kernel


@functools.cache
def dgrad_kernel(kind: str, group: int, planes: bool) -> Any:
    """The kernel with `group` threads a row, a power of two up to a block; dy, y and dx stored as `kind`."""
    (load, store), place, group_sum = scalar_io(kind), place_of(planes), group_reduction(group, plus)
    ROWS = THREADS // group

    @jit()
    def log_softmax_dgrad_kernel(dy, y, dx, rows, width, plane):
        """dx = dy − exp(y)·Σ dy along the rows.

        grid ⌈rows / (256 / group)⌉, block 256; owns: a group of threads a row. shared 1 KiB; moves 12·x bytes of float32, and dy once more from a
        cache.
        """
        sums = cuda.shared.array(THREADS, f4)
        tid = cuda.threadIdx.x
        lane = tid & group - 1
        n = cuda.blockIdx.x * ROWS + (tid - lane) // group
        start, step = place(n, width, plane)
        elements, total = width if n < rows else 0, 0.0
        for f in range(lane, elements, group):
            total += load(dy, start + f * step)
        total = group_sum(sums, total)
        for f in range(lane, elements, group):
            store(dx, start + f * step, load(dy, start + f * step) - math.exp(load(y, start + f * step)) * total)

    return log_softmax_dgrad_kernel


def bind_fprop(call: Call) -> list[Launch]:
    """One launch."""
    return softmax.launch(fprop_kernel, call)


def bind_dgrad(call: Call) -> list[Launch]:
    """One launch."""
    return softmax.launch(dgrad_kernel, call)


def traffic_dgrad(call: Call) -> list[Traffic]:
    """dy twice, y once; dx."""
    dy, y = size(call, "in", 0), size(call, "in", 1)
    return [Traffic(2 * dy + y, size(call, "out", 0), dy + y)]


HOST = {"log_softmax_fprop": host(log_softmax_fprop), "log_softmax_dgrad": host(log_softmax_dgrad)}
OPS = {
    "log_softmax_fprop": Impl(bind_fprop, supports=elementwise.supports, traffic=softmax.traffic_fprop),
    "log_softmax_dgrad": Impl(bind_dgrad, supports=elementwise.supports, traffic=traffic_dgrad),
}
GRADIENTS = {"log_softmax_dgrad": Gradient("log_softmax_fprop", lambda ins, outs, v: (v, outs[0]))}


def cases(shapes: Shapes = ((3, 2), (5, 33), (2, 3, 5), (2, 3, 3, 5))) -> Iterator[Case]:
    """Vectors, series and images: two classes, more classes than a warp, rows in planes."""
    for shape in shapes:
        x, dy, out = 3 * normal(47, *shape), normal(48, *shape), ((shape, "float32"),)
        y = np.empty(shape)
        log_softmax_fprop(x.astype(np.float64), y)
        yield Case("log_softmax_fprop", label_of(shape), (x,), out, {}, shape[1])
        yield Case("log_softmax_dgrad", label_of(shape), (dy, y.astype(np.float32)), out, {}, shape[1])
