"""Softmax with cross-entropy, for row n with label l; a row is an example, or a pixel of one:

    p[n, f] = exp(x[n, f] - max) / Σ exp(x[n, ·] - max)
    loss    = mean over n of  log Σ exp(x[n, ·] - max) - (x[n, l] - max)
    dx      = (p - onehot(l)) / N

Of pixels, (B, F, H, W) with labels (B, H, W), the rows are the N = B·H·W pixels: stored as NHWC they lie like those of a matrix (N, F); as NCHW
element f of a row lies H·W behind element f − 1, and neighbouring threads own neighbouring pixels.

Subtracting the row's maximum keeps every exponential in (0, 1]. A label outside 0..F-1 makes the loss NaN, which trips
the non-finite flag of StepState (a kernel cannot raise); its row of dx is then p / N.

    softmax_xent_fprop  logits (N,F), labels (N) int32 -> p (N,F), loss () float64            mean over N; also (B,F,H,W), (B,H,W)
    softmax_xent_dgrad  p, labels -> dlogits
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, jit, types
from nbcnn.ops.activations.softmax import exponentials, place_of
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.case import Case, Gradient, Shapes, label_of, normal
from nbcnn.ops.kernel.loops import quotient
from nbcnn.ops.kernel.reduce import THREADS, add_partials, block_sum, f8, partial_bytes
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.traffic import Traffic, element, once, outputs, size
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

NAN = float("nan")


def in_rows(array: np.ndarray) -> np.ndarray:
    """`array` (N,F), or (B,F,H,W) as (B·H·W,F); a copy where it must be."""
    return np.moveaxis(array, 1, -1).reshape(-1, array.shape[1])


def like(rows: np.ndarray, array: np.ndarray) -> np.ndarray:
    """The rows of `in_rows` in the shape of `array`."""
    return np.moveaxis(rows.reshape(array.shape[0], *array.shape[2:], -1), -1, 1)


def softmax_xent_fprop(logits: np.ndarray, labels: np.ndarray, p: np.ndarray, loss: np.ndarray) -> None:
    """p (N,F) = softmax of each row of logits (N,F); loss () float64 = mean cross-entropy with labels (N) int32; or of pixels, (B,F,H,W), (B,H,W)."""
    np.copyto(p, logits)
    made, labels = in_rows(p), labels.reshape(-1)
    rows, classes = made.shape
    np.subtract(made, made.max(axis=1, keepdims=True), out=made)
    known = (labels >= 0) & (labels < classes)
    of_label = made[np.arange(rows), np.where(known, labels, 0)].astype(np.float64)
    np.exp(made, out=made)
    total = made.sum(axis=1, keepdims=True)
    np.divide(made, total, out=made)
    np.copyto(p, like(made, p))
    loss[...] = np.where(known, np.log(total[:, 0], dtype=np.float64) - of_label, np.nan).mean()


def softmax_xent_dgrad(p: np.ndarray, labels: np.ndarray, dlogits: np.ndarray) -> None:
    """dlogits = (p - onehot(labels)) / N, of rows or of pixels as above."""
    made, labels = in_rows(p).copy(), labels.reshape(-1)
    rows, classes = made.shape
    (known,) = np.nonzero((labels >= 0) & (labels < classes))
    made[known, labels[known]] -= 1
    np.multiply(like(made, p), 1 / rows, out=dlogits)


@functools.cache
def fprop_kernel(kind: str, group: int, planes: bool = False) -> Any:
    """The forward kernel with `group` threads per row, a power of two up to 256; logits and p stored as `kind`, in `planes` of a class each or
    not."""
    (load, store), place, reduced = scalar_io(kind), place_of(planes), exponentials(kind, group)
    rows_per_block = THREADS // group

    @jit()
    def softmax_xent_fprop_kernel(logits, labels, p, rows, classes, plane, scale, total):
        """p = softmax(logits); total[block] = scale · Σ cross-entropy over the rows of the block; `plane` is H·W where logits lie in planes.

        grid ceil(N / (256 / group)), block 256, a group of threads owns a row; shared 4 KiB; moves 8·N·F bytes of
        float32, and the row twice more from L1: its exponentials are made again once their sum is known, so that p is rounded once.
        """
        maxima = cuda.shared.array(THREADS, types.float32)
        sums = cuda.shared.array(THREADS, types.float32)
        losses = cuda.shared.array(THREADS, types.float64)
        tid = cuda.threadIdx.x
        lane = tid & group - 1
        n = cuda.blockIdx.x * rows_per_block + (tid - lane) // group
        start, step = place(n, classes, plane)
        # A group without a row has nothing to read, but meets the others at the barriers.
        width = classes if n < rows else 0
        biggest, whole = reduced(maxima, sums, logits, start, step, lane, width)

        for f in range(lane, width, group):
            store(p, start + f * step, math.exp(load(logits, start + f * step) - biggest) / whole)

        loss = f8(0)
        if lane == 0 and n < rows:
            label = labels[n]
            if 0 <= label < classes:
                loss = math.log(f8(whole)) - f8(load(logits, start + label * step) - biggest)
            else:
                loss = f8(NAN)
        value = block_sum(losses, loss)
        if tid == 0:
            total[cuda.blockIdx.x] = scale * value

    return softmax_xent_fprop_kernel


@functools.cache
def class_of(planes: bool) -> Any:
    """Device function (i, classes, plane) -> (row, class) of element i; `planes`: elements of a row lie `plane` apart."""

    @jit(device=True)
    def apart(i, classes, plane):
        above = quotient(i, plane)
        image = quotient(above, classes)
        return image * plane + (i - above * plane), above - image * classes

    @jit(device=True)
    def side_by_side(i, classes, plane):
        row = quotient(i, classes)
        return row, i - row * classes

    return apart if planes else side_by_side


@functools.cache
def dgrad_kernel(kind: str, planes: bool = False) -> Any:
    """dlogits = scale · (p - onehot(labels)), scale = 1 / N; with `planes` of one class each, `plane` is H·W.

    grid ceil(N·F / 256), block 256, a thread owns an element; moves 8·N·F bytes.
    """
    (load, store), place = scalar_io(kind), class_of(planes)

    @jit()
    def softmax_xent_dgrad_kernel(p, labels, dlogits, rows, classes, plane, scale):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i < rows * classes:
            row, label = place(i, classes, plane)
            value = load(p, i)
            if label == labels[row]:
                value -= 1.0
            store(dlogits, i, scale * value)

    return softmax_xent_dgrad_kernel


def threads_of_row(classes: int) -> int:
    """Threads of a row: the power of two that covers the classes, at most a whole block."""
    return min(1 << (classes - 1).bit_length(), THREADS)


def extents_of(call: Call) -> tuple[int, int, int]:
    """Rows, classes, and H·W where the elements of a row lie in planes, else 0."""
    shape = call.in_shapes[0]
    pixels = numel(shape[2:])
    return shape[0] * pixels, shape[1], pixels if len(shape) == 4 and call.layout == "NCHW" else 0


def group_of(call: Call) -> int:
    """Threads of a row: one where it lies in planes, so that a warp reads neighbouring pixels."""
    _, classes, plane = extents_of(call)
    return 1 if plane else threads_of_row(classes)


def grid_of(call: Call) -> int:
    return blocks(extents_of(call)[0], THREADS // group_of(call))


def scratch_fprop(call: Call) -> int:
    return partial_bytes(grid_of(call))


def bind_fprop(call: Call) -> list[Launch]:
    (logits, labels), (p, loss) = call.ins, call.outs
    rows, classes, plane = extents_of(call)
    kernel, grid = fprop_kernel(kinds(call)[0], group_of(call), plane > 0), grid_of(call)
    single = grid == 1
    total = loss if single else call.scratch.view(np.float64)
    scale = np.float64(1 / rows if single else 1)
    first = Launch(kernel, grid, THREADS, (logits, labels, p, np.int32(rows), np.int32(classes), np.int32(plane), scale, total))
    return [first] if single else [first, add_partials(total, grid, 1 / rows, loss)]


def bind_dgrad(call: Call) -> list[Launch]:
    (p, labels), (dlogits,) = call.ins, call.outs
    rows, classes, plane = extents_of(call)
    args = (p, labels, dlogits, np.int32(rows), np.int32(classes), np.int32(plane), np.float32(1 / rows))
    return [Launch(dgrad_kernel(kinds(call)[0], plane > 0), blocks(rows * classes, THREADS), THREADS, args)]


def traffic_fprop(call: Call) -> list[Traffic]:
    """Bytes of `bind_fprop`: a row is read three times, and its label's element once more."""
    logits, labels, grid = size(call, "in", 0), size(call, "in", 1), grid_of(call)
    picked = extents_of(call)[0] * element(call)
    first = Traffic(3 * logits + labels + picked, size(call, "out", 0) + 8 * grid, logits + labels)
    return [first] if grid == 1 else [first, once(8 * grid, 8)]


def traffic_dgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_dgrad`: every element asks for its row's label."""
    p, labels = size(call, "in", 0), size(call, "in", 1)
    return [Traffic(p + labels * call.in_shapes[0][1], outputs(call), p + labels)]


HOST = {Op("softmax_xent", "fprop"): host(softmax_xent_fprop), Op("softmax_xent", "dgrad"): host(softmax_xent_dgrad)}
OPS = {
    Op("softmax_xent", "fprop"): Impl(bind_fprop, scratch_fprop, traffic=traffic_fprop),
    Op("softmax_xent", "dgrad"): Impl(bind_dgrad, traffic=traffic_dgrad),
}
GRADIENTS = {Op("softmax_xent", "dgrad"): Gradient(Op("softmax_xent", "fprop"), lambda ins, outs, v: (outs[0].astype(np.float32), ins[1]), loss=True)}


def cases(logits_of: Shapes = ((1, 2), (5, 10), (37, 33), (2, 3, 3, 5))) -> Iterator[Case]:
    """The loss and its gradient: two classes, fewer than a warp, more than a warp; pixels of three classes."""
    for shape in logits_of:
        logits = 3 * normal(14, *shape)
        labels = np.random.default_rng(15).integers(0, shape[1], (shape[0], *shape[2:])).astype(np.int32)
        p = np.exp(logits.astype(np.float64))
        p = (p / p.sum(1, keepdims=True)).astype(np.float32)
        yield Case(Op("softmax_xent", "fprop"), label_of(shape), (logits, labels), ((shape, "float32"), ((), "float64")), {}, shape[1])
        yield Case(Op("softmax_xent", "dgrad"), label_of(shape), (p, labels), ((shape, "float32"),))
