"""Softmax along axis 1: y[f] = exp(x[f] − max)/Σ exp(x − max); dx[f] = y[f]·(dy[f] − Σ dy·y). A row is an example, a pixel or an hour of one.

Subtracting the row's maximum keeps every exponential in (0, 1]. Source: J. S. Bridle, "Probabilistic interpretation of feedforward classification
network outputs", 1990.

Its logarithm: y[f] = x[f] − max − log Σ exp(x − max); dx[f] = dy[f] − exp(y[f])·Σ dy. The logarithm of what softmax computes would be −∞ where a
probability is too small for float32; this is not.

    softmax_fprop, log_softmax_fprop     x (N,F), (N,C,L) or (N,C,H,W) -> y
    softmax_dgrad, log_softmax_dgrad     dy, y -> dx
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import SIMULATOR, cuda, f4, jit
from nbcnn.ops.kernel import maps
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.case import Case, Gradient, Shapes, label_of, normal
from nbcnn.ops.kernel.loops import power_of_two, quotient
from nbcnn.ops.kernel.reduce import group_reduction, larger, plus
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.traffic import Traffic, size
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

THREADS = 16 if SIMULATOR else 256
LOWEST = np.float32(-np.inf)


def softmax_fprop(x: np.ndarray, y: np.ndarray) -> None:
    """y = softmax of x along axis 1."""
    e = np.exp(x - x.max(1, keepdims=True))
    np.divide(e, e.sum(1, keepdims=True), out=y)


def softmax_dgrad(dy: np.ndarray, y: np.ndarray, dx: np.ndarray) -> None:
    """dx = y·(dy − Σ dy·y), the sum along axis 1."""
    np.multiply(y, dy - (dy * y).sum(1, keepdims=True), out=dx)


def log_softmax_fprop(x: np.ndarray, y: np.ndarray) -> None:
    """y = log softmax of x along axis 1."""
    np.subtract(x, x.max(1, keepdims=True), out=y)
    np.subtract(y, np.log(np.exp(y).sum(1, keepdims=True)), out=y)


def log_softmax_dgrad(dy: np.ndarray, y: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy − exp(y)·Σ dy, the sum along axis 1."""
    np.subtract(dy, np.exp(y) * dy.sum(1, keepdims=True), out=dx)


@functools.cache
def place_of(planes: bool) -> Any:
    """Device function (n, width, plane) -> (first element, step) of row n; `planes`: elements of a row lie `plane` apart."""

    @jit(device=True)
    def apart(n, width, plane):
        return quotient(n, plane) * (width - 1) * plane + n, plane

    @jit(device=True)
    def side_by_side(n, width, plane):
        return n * width, 1

    return apart if planes else side_by_side


@functools.cache
def exponentials(kind: str, group: int) -> Any:
    """Device function (maxima, sums, x, start, step, lane, elements) -> (max x, Σ exp(x − max)) of the elements of a row, of which `group` threads
    each read every `group`th; x stored as `kind`; maxima, sums: shared arrays of one element per thread."""
    load = scalar_io(kind)[0]
    group_max, group_sum = group_reduction(group, larger), group_reduction(group, plus)

    @jit(device=True)
    def reduced(maxima, sums, x, start, step, lane, elements):
        biggest, whole = LOWEST, 0.0
        for f in range(lane, elements, group):
            biggest = max(biggest, load(x, start + f * step))
        biggest = group_max(maxima, biggest)
        for f in range(lane, elements, group):
            whole += math.exp(load(x, start + f * step) - biggest)
        return biggest, group_sum(sums, whole)

    return reduced


@functools.cache
def fprop_kernel(kind: str, group: int, planes: bool, logarithm: bool) -> Any:
    """The kernel with `group` threads per row, a power of two up to a block; x and y stored as `kind`. `logarithm`: of log_softmax."""
    (load, store), place, reduced = scalar_io(kind), place_of(planes), exponentials(kind, group)
    ROWS = THREADS // group

    @jit()
    def softmax_fprop_kernel(x, y, rows, width, plane):
        """y = softmax(x) along the rows, or its logarithm.

        grid ⌈rows / (256 / group)⌉, block 256; owns: a group of threads per row. shared 2 KiB; moves 8·x bytes of float32, and the row twice more
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
        biggest, whole = reduced(maxima, sums, x, start, step, lane, elements)
        for f in range(lane, elements, group):
            z = load(x, start + f * step) - biggest
            store(y, start + f * step, z - math.log(whole) if logarithm else math.exp(z) / whole)

    return softmax_fprop_kernel


@functools.cache
def dgrad_kernel(kind: str, group: int, planes: bool, logarithm: bool) -> Any:
    """The kernel with `group` threads per row, a power of two up to a block; dy, y and dx stored as `kind`. `logarithm`: of log_softmax."""
    (load, store), place, group_sum = scalar_io(kind), place_of(planes), group_reduction(group, plus)
    ROWS = THREADS // group

    @jit()
    def softmax_dgrad_kernel(dy, y, dx, rows, width, plane):
        """dx = y·(dy − Σ dy·y) along the rows; with the logarithm dx = dy − exp(y)·Σ dy.

        grid ⌈rows / (256 / group)⌉, block 256; owns: a group of threads per row. shared 1 KiB; moves 12·x bytes of float32, and dy and y once more
        from a cache.
        """
        sums = cuda.shared.array(THREADS, f4)
        tid = cuda.threadIdx.x
        lane = tid & group - 1
        n = cuda.blockIdx.x * ROWS + (tid - lane) // group
        start, step = place(n, width, plane)
        elements, total = width if n < rows else 0, 0.0
        for f in range(lane, elements, group):
            g = load(dy, start + f * step)
            total += g if logarithm else g * load(y, start + f * step)
        total = group_sum(sums, total)
        for f in range(lane, elements, group):
            g, made = load(dy, start + f * step), load(y, start + f * step)
            store(dx, start + f * step, g - math.exp(made) * total if logarithm else made * (g - total))

    return softmax_dgrad_kernel


def launch(factory: Any, call: Call) -> list[Launch]:
    """One launch of the kernel that `factory` makes for the call's op."""
    shape = call.in_shapes[0]
    width, pixels = shape[1], numel(shape[2:])
    planes = len(shape) == 3 or (len(shape) == 4 and call.layout == "NCHW")
    # One thread where a row lies in planes, so that a warp reads neighbouring pixels.
    group = 1 if planes else min(power_of_two(width), THREADS)
    rows = shape[0] * pixels
    args = (*call.ins, *call.outs, np.int32(rows), np.int32(width), np.int32(pixels))
    kernel = factory(kinds(call)[0], group, planes, call.op.kind == "log_softmax")
    return [Launch(kernel, blocks(rows, THREADS // group), THREADS, args)]


def bind_fprop(call: Call) -> list[Launch]:
    """One launch."""
    return launch(fprop_kernel, call)


def bind_dgrad(call: Call) -> list[Launch]:
    """One launch."""
    return launch(dgrad_kernel, call)


def traffic_fprop(call: Call) -> list[Traffic]:
    """x three times; y."""
    x = size(call, "in", 0)
    return [Traffic(3 * x, size(call, "out", 0), x)]


def traffic_dgrad(call: Call) -> list[Traffic]:
    """dy and y twice, y of the logarithm once; dx."""
    dy, y = size(call, "in", 0), size(call, "in", 1)
    return [Traffic(2 * dy + (1 if call.op.kind == "log_softmax" else 2) * y, size(call, "out", 0), dy + y)]


_REFERENCES = {"softmax": (softmax_fprop, softmax_dgrad), "log_softmax": (log_softmax_fprop, log_softmax_dgrad)}
_FPROP = Impl(bind_fprop, supports=maps.supports, traffic=traffic_fprop)
_DGRAD = Impl(bind_dgrad, supports=maps.supports, traffic=traffic_dgrad)
HOST = {Op(name, path): host(both[at]) for name, both in _REFERENCES.items() for at, path in enumerate(("fprop", "dgrad"))}
OPS = {Op(name, path): impl for name in _REFERENCES for path, impl in (("fprop", _FPROP), ("dgrad", _DGRAD))}
GRADIENTS = {Op(name, "dgrad"): Gradient(Op(name, "fprop"), lambda ins, outs, v: (v, outs[0])) for name in _REFERENCES}


def cases(shapes: Shapes = ((3, 2), (5, 33), (2, 3, 5), (2, 3, 3, 5))) -> Iterator[Case]:
    """Vectors, series and images: two classes, more classes than a warp, rows in planes."""
    for shape in shapes:
        x, dy, out = 3 * normal(18, *shape), normal(19, *shape), ((shape, "float32"),)
        for name, (fprop, _) in _REFERENCES.items():
            y = np.empty(shape)
            fprop(x.astype(np.float64), y)
            yield Case(Op(name, "fprop"), label_of(shape), (x,), out, {}, shape[1])
            yield Case(Op(name, "dgrad"), label_of(shape), (dy, y.astype(np.float32)), out, {}, shape[1])
