"""Softmax with cross-entropy, for row n with label l:

    p[n, f] = exp(x[n, f] - max) / Σ exp(x[n, ·] - max)
    loss    = mean over n of  log Σ exp(x[n, ·] - max) - (x[n, l] - max)
    dx      = (p - onehot(l)) / N

Subtracting the row's maximum keeps every exponential in (0, 1]. A label outside 0..F-1 makes the loss NaN, which trips
the non-finite flag of StepState (a kernel cannot raise); its row of dx is then p / N.

    softmax_xent_fprop  logits (N,F), labels (N) int32 -> p (N,F), loss () float64            mean over N
    softmax_xent_dgrad  p, labels -> dlogits
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit, types
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.case import Case, Gradient, Shapes, normal
from nbcnn.ops.kernel.reduce import THREADS, add_partials, block_sum, f8, group_reduction, larger, partial_bytes, plus
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.traffic import Traffic, element, once, outputs, size

NAN = float("nan")


def softmax_xent_fprop(logits: np.ndarray, labels: np.ndarray, p: np.ndarray, loss: np.ndarray) -> None:
    """p (N,F) = softmax of each row of logits (N,F); loss () float64 = mean cross-entropy with labels (N) int32."""
    rows, classes = logits.shape
    np.subtract(logits, logits.max(axis=1, keepdims=True), out=p)
    known = (labels >= 0) & (labels < classes)
    of_label = p[np.arange(rows), np.where(known, labels, 0)].astype(np.float64)
    np.exp(p, out=p)
    total = p.sum(axis=1, keepdims=True)
    np.divide(p, total, out=p)
    loss[...] = np.where(known, np.log(total[:, 0], dtype=np.float64) - of_label, np.nan).mean()


def softmax_xent_dgrad(p: np.ndarray, labels: np.ndarray, dlogits: np.ndarray) -> None:
    """dlogits (N,F) = (p - onehot(labels)) / N."""
    rows, classes = p.shape
    np.copyto(dlogits, p)
    (known,) = np.nonzero((labels >= 0) & (labels < classes))
    dlogits[known, labels[known]] -= 1
    np.multiply(dlogits, 1 / rows, out=dlogits)


@functools.cache
def fprop_kernel(kind: str, group: int) -> Any:
    """The forward kernel with `group` threads a row, a power of two up to 256; logits and p stored as `kind`."""
    load, store = scalar_io(kind)
    rows_per_block = THREADS // group
    group_max, group_sum = group_reduction(group, larger), group_reduction(group, plus)

    @jit()
    def softmax_xent_fprop_kernel(logits, labels, p, rows, classes, scale, total):
        """p = softmax(logits); total[block] = scale · Σ cross-entropy over the rows of the block.

        grid ceil(N / (256 / group)), block 256, a group of threads owns a row; shared 4 KiB; moves 8·N·F bytes of
        float32, and the row twice more from L1: its exponentials are made again once their sum is known, so that p is rounded once.
        """
        maxima = cuda.shared.array(THREADS, types.float32)
        sums = cuda.shared.array(THREADS, types.float32)
        losses = cuda.shared.array(THREADS, types.float64)
        tid = cuda.threadIdx.x
        lane = tid & group - 1
        n = cuda.blockIdx.x * rows_per_block + (tid - lane) // group
        start = n * classes
        # A group without a row has nothing to read, but meets the others at the barriers.
        width = classes if n < rows else 0

        biggest = f4(-math.inf)
        for f in range(lane, width, group):
            biggest = max(biggest, load(logits, start + f))
        biggest = group_max(maxima, biggest)

        whole = 0.0
        for f in range(lane, width, group):
            whole += math.exp(load(logits, start + f) - biggest)
        whole = group_sum(sums, whole)

        for f in range(lane, width, group):
            store(p, start + f, math.exp(load(logits, start + f) - biggest) / whole)

        loss = f8(0)
        if lane == 0 and n < rows:
            label = labels[n]
            if 0 <= label < classes:
                loss = math.log(f8(whole)) - f8(load(logits, start + label) - biggest)
            else:
                loss = f8(NAN)
        value = block_sum(losses, loss)
        if tid == 0:
            total[cuda.blockIdx.x] = scale * value

    return softmax_xent_fprop_kernel


@functools.cache
def dgrad_kernel(kind: str) -> Any:
    """dlogits = scale · (p - onehot(labels)), scale = 1 / N.

    grid ceil(N·F / 256), block 256, a thread owns an element; moves 8·N·F bytes.
    """
    load, store = scalar_io(kind)

    @jit()
    def softmax_xent_dgrad_kernel(p, labels, dlogits, rows, classes, scale):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i < rows * classes:
            row = i // classes
            value = load(p, i)
            if i - row * classes == labels[row]:
                value -= 1.0
            store(dlogits, i, scale * value)

    return softmax_xent_dgrad_kernel


def threads_of_row(classes: int) -> int:
    """Threads of a row: the power of two that covers the classes, at most a whole block."""
    return min(1 << (classes - 1).bit_length(), THREADS)


def _grid(call: Call) -> int:
    rows, classes = call.in_shapes[0]
    return blocks(rows, THREADS // threads_of_row(classes))


def scratch_fprop(call: Call) -> int:
    return partial_bytes(_grid(call))


def bind_fprop(call: Call) -> list[Launch]:
    (logits, labels), (p, loss) = call.ins, call.outs
    rows, classes = call.in_shapes[0]
    kernel, grid = fprop_kernel(kinds(call)[0], threads_of_row(classes)), _grid(call)
    single = grid == 1
    total = loss if single else call.scratch.view(np.float64)
    scale = np.float64(1 / rows if single else 1)
    first = Launch(kernel, grid, THREADS, (logits, labels, p, np.int32(rows), np.int32(classes), scale, total))
    return [first] if single else [first, add_partials(total, grid, 1 / rows, loss)]


def bind_dgrad(call: Call) -> list[Launch]:
    (p, labels), (dlogits,) = call.ins, call.outs
    rows, classes = call.in_shapes[0]
    args = (p, labels, dlogits, np.int32(rows), np.int32(classes), np.float32(1 / rows))
    return [Launch(dgrad_kernel(kinds(call)[0]), blocks(rows * classes, THREADS), THREADS, args)]


def traffic_fprop(call: Call) -> list[Traffic]:
    """Bytes of `bind_fprop`: a row is read three times, and its label's element once more."""
    logits, labels, grid = size(call, "in", 0), size(call, "in", 1), _grid(call)
    picked = call.in_shapes[0][0] * element(call)
    first = Traffic(3 * logits + labels + picked, size(call, "out", 0) + 8 * grid, logits + labels)
    return [first] if grid == 1 else [first, once(8 * grid, 8)]


def traffic_dgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_dgrad`: every element asks for its row's label."""
    p, labels = size(call, "in", 0), size(call, "in", 1)
    return [Traffic(p + labels * call.in_shapes[0][1], outputs(call), p + labels)]


HOST = {"softmax_xent_fprop": host(softmax_xent_fprop), "softmax_xent_dgrad": host(softmax_xent_dgrad)}
OPS = {
    "softmax_xent_fprop": Impl(bind_fprop, scratch_fprop, traffic=traffic_fprop),
    "softmax_xent_dgrad": Impl(bind_dgrad, traffic=traffic_dgrad),
}
GRADIENTS = {"softmax_xent_dgrad": Gradient("softmax_xent_fprop", lambda ins, outs, v: (outs[0].astype(np.float32), ins[1]), loss=True)}


def cases(logits_of: Shapes = ((1, 2), (5, 10), (37, 33))) -> Iterator[Case]:
    """The loss and its gradient: two classes, fewer than a warp, more than a warp."""
    for n, f in logits_of:
        logits, labels = 3 * normal(14, n, f), np.random.default_rng(15).integers(0, f, n).astype(np.int32)
        p = np.exp(logits.astype(np.float64))
        p = (p / p.sum(1, keepdims=True)).astype(np.float32)
        yield Case("softmax_xent_fprop", f"{n}×{f}", (logits, labels), (((n, f), "float32"), ((), "float64")), {}, f)
        yield Case("softmax_xent_dgrad", f"{n}×{f}", (p, labels), (((n, f), "float32"),))
