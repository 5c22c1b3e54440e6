"""Softmax with cross-entropy whose classes have weights, whose labels are smoothed, and of whose rows some are ignored. For row n with label l:

    z = −log softmax(x[n, ·])                                 one row of F classes is an example, or a pixel of one, as in softmax_xent.py
    row n counts  w[l], and 0 where l is `ignore`
    its loss      (1 − s)·w[l]·z[l] + s/F·Σ_c w[c]·z[c],      0 where it is ignored
    total = Σ_n of what rows count,   loss = Σ_n of their losses / (share·total),   0 where nothing counts

These are the numbers of torch.nn.CrossEntropyLoss (weight, ignore_index, label_smoothing, reduction "mean"), which is NaN where nothing counts:
a batch of masks may well have no labelled pixel, and then has nothing to teach. Label smoothing: C. Szegedy et al., "Rethinking the Inception
architecture for computer vision", arXiv:1512.00567, section 7.

Of several ranks `total` is added up between `xent_total` and the others, and `share` is what a rank's part of the batch counts in the mean of all
ranks: the losses of ranks, weighted by their shares, are the loss of the whole batch. `count` = share·total is what the loss counts in the mean of
an epoch.

    xent_total           labels (N) int32, weights (F+1) -> total (1)                             ignore
    weighted_xent_fprop  logits (N,F), labels, weights, total -> p (N,F), loss () float64, count () float64      smoothing, ignore, share
    weighted_xent_dgrad  p, labels, weights, total -> dlogits                                     smoothing, ignore, share

Of pixels the logits are (B,F,H,W) and the labels (B,H,W). `weights` are those of the classes and, last, their sum. A label that is neither a class
nor `ignore` makes the loss NaN, as in softmax_xent.py; its row counts 0.
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
from nbcnn.ops.kernel.reduce import MAX_BLOCKS, THREADS, block_sum, f8, group_reduction, plus, sum_of
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.traffic import Traffic, element, once, outputs, size
from nbcnn.ops.losses.softmax_xent import NAN, class_of, extents_of, grid_of, group_of, in_rows, like
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

NOTHING = -(2**31)
"""The `ignore` of a loss that ignores no label."""


def _known(labels: np.ndarray, weights: np.ndarray, ignore: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels (N), which of them are ignored, which are classes."""
    flat = labels.reshape(-1)
    ignored = flat == ignore
    return flat, ignored, (flat >= 0) & (flat < weights.size - 1) & ~ignored


def xent_total(labels: np.ndarray, weights: np.ndarray, total: np.ndarray, *, ignore: int) -> None:
    """total (1) = the sum of `weights` at the labels int32 that are classes and not `ignore`."""
    flat, _, known = _known(labels, weights, ignore)
    total[...] = weights[flat[known]].sum(dtype=np.float64)


def weighted_xent_fprop(
    logits: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray,
    total: np.ndarray,
    p: np.ndarray,
    loss: np.ndarray,
    count: np.ndarray,
    *,
    smoothing: float,
    ignore: int,
    share: float,
) -> None:
    """p (N,F) = softmax of each row of logits; loss and count () float64 as above."""
    made = in_rows(logits).copy()
    rows, classes = made.shape
    flat, ignored, known = _known(labels, weights, ignore)
    made -= made.max(axis=1, keepdims=True)
    whole = np.exp(made).sum(axis=1, keepdims=True)
    z = np.log(whole) - made
    np.copyto(p, like(np.exp(made) / whole, p))
    at = np.where(known, flat, 0)
    each = (1 - smoothing) * weights[at] * z[np.arange(rows), at] + smoothing / classes * (z @ weights[:-1])
    each = np.where(known, each, np.where(ignored, 0, np.nan)).astype(np.float64)
    count[...] = share * float(total[0])
    loss[...] = each.sum() / count if count > 0 else 0 * each.sum()


def weighted_xent_dgrad(
    p: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray,
    total: np.ndarray,
    dlogits: np.ndarray,
    *,
    smoothing: float,
    ignore: int,
    share: float,
) -> None:
    """dlogits = (p·((1 − s)·w[l] + s/F·Σw) − (1 − s)·w[l]·onehot(l) − s/F·w) / (share·total), 0 in ignored rows."""
    made = in_rows(p).copy()
    rows, classes = made.shape
    flat, ignored, known = _known(labels, weights, ignore)
    at, spread = np.where(known, flat, 0), smoothing / classes
    own = np.where(known, (1 - smoothing) * weights[at], 0).astype(made.dtype)
    made *= (own + made.dtype.type(spread) * weights[-1])[:, None]
    made[np.arange(rows), at] -= own
    made -= made.dtype.type(spread) * weights[:-1]
    made[ignored] = 0
    counted = share * float(total[0])
    np.multiply(like(made, p), 1 / counted if counted > 0 else 0, out=dlogits)


@jit()
def xent_total_kernel(labels, weights, rows, classes, ignore, partials):
    """partials[block] = Σ weights[label] over the block's rows whose label is a class and not `ignore`, float64.

    grid    min(⌈N / 256⌉, 1024), block 256
    owns    thread: every (256·grid)th row
    shared  2 KiB
    moves   4·N bytes; the weights come from L1
    """
    sums = cuda.shared.array(THREADS, types.float64)
    mine = f8(0)
    n = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    while n < rows:
        label = labels[n]
        if 0 <= label < classes and label != ignore:
            mine += weights[label]
        n += THREADS * cuda.gridDim.x
    value = block_sum(sums, mine)
    if cuda.threadIdx.x == 0:
        partials[cuda.blockIdx.x] = value


@jit()
def xent_total_sum_kernel(partials, count, total):
    """total[0] = Σ partials[:count], rounded to float32.

    grid 1, block 256, owns the sum; shared 2 KiB; moves 8·count bytes.
    """
    value = sum_of(partials, count)
    if cuda.threadIdx.x == 0:
        total[0] = value


@functools.cache
def fprop_kernel(kind: str, group: int, planes: bool) -> Any:
    """The forward kernel with `group` threads per row, a power of two up to 256; logits and p stored as `kind`, in `planes` of a class each or
    not."""
    (load, store), place, reduced = scalar_io(kind), place_of(planes), exponentials(kind, group)
    rows_per_block, group_sum = THREADS // group, group_reduction(group, plus)

    @jit()
    def weighted_xent_fprop_kernel(logits, labels, weights, p, rows, classes, plane, own, spread, ignore, partials):
        """p = softmax(logits); partials[block] = the sum of the losses of the block's rows; own = 1 − s, spread = s/F; `plane` is H·W or 0.

        grid    ⌈N / (256 / group)⌉, block 256
        owns    group of threads: a row
        shared  5 KiB
        moves   8·N·F bytes of float32, and the row twice more from L1
        """
        maxima = cuda.shared.array(THREADS, types.float32)
        sums = cuda.shared.array(THREADS, types.float32)
        smooth = cuda.shared.array(THREADS, types.float32)
        losses = cuda.shared.array(THREADS, types.float64)
        tid = cuda.threadIdx.x
        lane = tid & group - 1
        n = cuda.blockIdx.x * rows_per_block + (tid - lane) // group
        start, step = place(n, classes, plane)
        # A group without a row has nothing to read, but meets the others at the barriers.
        width = classes if n < rows else 0
        biggest, whole = reduced(maxima, sums, logits, start, step, lane, width)

        # A group without a row has no sum to take the logarithm of.
        level, part = (math.log(whole) if n < rows else 0.0), 0.0
        for f in range(lane, width, group):
            below = load(logits, start + f * step) - biggest
            store(p, start + f * step, math.exp(below) / whole)
            part += weights[f] * (level - below)
        part = group_sum(smooth, part)

        loss = f8(0)
        if lane == 0 and n < rows:
            label = labels[n]
            if label == ignore:
                loss = f8(0)
            elif 0 <= label < classes:
                loss = f8(own * weights[label]) * (math.log(f8(whole)) - f8(load(logits, start + label * step) - biggest)) + f8(spread * part)
            else:
                loss = f8(NAN)
        value = block_sum(losses, loss)
        if tid == 0:
            partials[cuda.blockIdx.x] = value

    return weighted_xent_fprop_kernel


@jit()
def weighted_xent_mean_kernel(partials, blocks_of, total, share, loss, count):
    """count = share·total; loss = Σ partials[:blocks_of] / count, 0 where nothing counts.

    grid 1, block 256, owns the sum; shared 2 KiB; moves 8·blocks_of bytes.
    """
    value = sum_of(partials, blocks_of)
    if cuda.threadIdx.x == 0:
        counted = share * f8(total[0])
        count[0] = counted
        # A NaN stays one where nothing counts.
        loss[0] = value / counted if counted > f8(0) else value * f8(0)


@functools.cache
def dgrad_kernel(kind: str, planes: bool) -> Any:
    """The kernel of the gradient; p and dlogits stored as `kind`, in `planes` of a class each or not."""
    (load, store), place = scalar_io(kind), class_of(planes)

    @jit()
    def weighted_xent_dgrad_kernel(p, labels, weights, total, dlogits, rows, classes, plane, own, spread, ignore, share):
        """dlogits = (p·(own·w[l] + spread·Σw) − own·w[l]·onehot(l) − spread·w) / (share·total), 0 in ignored rows.

        grid    ⌈N·F / 256⌉, block 256
        owns    thread: an element
        shared  none
        moves   8·N·F bytes of float32; labels and weights come from L1
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i < rows * classes:
            row, f = place(i, classes, plane)
            label, value, counted = labels[row], 0.0, share * total[0]
            if label != ignore and counted > 0.0:
                mine = own * weights[label] if 0 <= label < classes else 0.0
                value = load(p, i) * (mine + spread * weights[classes]) - spread * weights[f]
                if f == label:
                    value -= mine
                value *= 1.0 / counted
            store(dlogits, i, value)

    return weighted_xent_dgrad_kernel


def _total_grid(call: Call) -> int:
    return min(blocks(numel(call.in_shapes[0]), THREADS), MAX_BLOCKS)


def scratch_total(call: Call) -> int:
    """A float64 per block."""
    return 8 * _total_grid(call)


def bind_total(call: Call) -> list[Launch]:
    """Partial sums of blocks, then their sum."""
    (labels, weights), (total,) = call.ins, call.outs
    grid, partials = _total_grid(call), call.scratch.view(np.float64)
    numbers = (np.int32(numel(call.in_shapes[0])), np.int32(numel(call.in_shapes[1]) - 1), np.int32(call.attrs["ignore"]))
    return [
        Launch(xent_total_kernel, grid, THREADS, (labels, weights, *numbers, partials)),
        Launch(xent_total_sum_kernel, 1, THREADS, (partials, np.int32(grid), total)),
    ]


def scratch_fprop(call: Call) -> int:
    """A float64 per block."""
    return 8 * grid_of(call)


def _smoothed(call: Call) -> tuple[np.float32, np.float32]:
    """What a row's own label counts, and what every class does."""
    smoothing = call.attrs["smoothing"]
    return np.float32(1 - smoothing), np.float32(smoothing / call.in_shapes[0][1])


def bind_fprop(call: Call) -> list[Launch]:
    """The rows, then the mean of their losses."""
    (logits, labels, weights, total), (p, loss, count) = call.ins, call.outs
    rows, classes, plane = extents_of(call)
    kernel, grid, partials = fprop_kernel(kinds(call)[0], group_of(call), plane > 0), grid_of(call), call.scratch.view(np.float64)
    numbers = (np.int32(rows), np.int32(classes), np.int32(plane), *_smoothed(call), np.int32(call.attrs["ignore"]))
    return [
        Launch(kernel, grid, THREADS, (logits, labels, weights, p, *numbers, partials)),
        Launch(weighted_xent_mean_kernel, 1, THREADS, (partials, np.int32(grid), total, np.float64(call.attrs["share"]), loss, count)),
    ]


def bind_dgrad(call: Call) -> list[Launch]:
    """One launch."""
    rows, classes, plane = extents_of(call)
    numbers = (np.int32(rows), np.int32(classes), np.int32(plane), *_smoothed(call))
    args = (*call.ins, *call.outs, *numbers, np.int32(call.attrs["ignore"]), np.float32(call.attrs["share"]))
    return [Launch(dgrad_kernel(kinds(call)[0], plane > 0), blocks(rows * classes, THREADS), THREADS, args)]


def traffic_total(call: Call) -> list[Traffic]:
    """Bytes of `bind_total`: every row asks for its weight."""
    labels, grid = size(call, "in", 0), _total_grid(call)
    return [Traffic(2 * labels, 8 * grid, labels + size(call, "in", 1)), once(8 * grid, 4)]


def traffic_fprop(call: Call) -> list[Traffic]:
    """Bytes of `bind_fprop`: a row is read three times with the weights once, and its label's element and weight once more."""
    logits, labels, grid = size(call, "in", 0), size(call, "in", 1), grid_of(call)
    rows, classes, _ = extents_of(call)
    read = 3 * logits + labels + 4 * rows * classes + rows * (element(call) + 4)
    return [Traffic(read, size(call, "out", 0) + 8 * grid, logits + labels + size(call, "in", 2)), once(8 * grid + 4, 16)]


def traffic_dgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_dgrad`: every element asks for its row's label, that label's weight, its own weight and the total."""
    p, labels = size(call, "in", 0), size(call, "in", 1)
    rows, classes, _ = extents_of(call)
    return [Traffic(p + 16 * rows * classes, outputs(call), p + labels + size(call, "in", 2) + 4)]


HOST = {
    Op("xent_total"): host(xent_total),
    Op("weighted_xent", "fprop"): host(weighted_xent_fprop),
    Op("weighted_xent", "dgrad"): host(weighted_xent_dgrad),
}
OPS = {
    Op("xent_total"): Impl(bind_total, scratch_total, traffic=traffic_total),
    Op("weighted_xent", "fprop"): Impl(bind_fprop, scratch_fprop, traffic=traffic_fprop),
    Op("weighted_xent", "dgrad"): Impl(bind_dgrad, traffic=traffic_dgrad),
}


def _operands(ins: Any, outs: Any, v: np.ndarray) -> tuple[np.ndarray, ...]:
    return outs[0].astype(np.float32), *ins[1:]


GRADIENTS = {Op("weighted_xent", "dgrad"): Gradient(Op("weighted_xent", "fprop"), _operands, loss=True)}


def cases(logits_of: Shapes = ((1, 2), (37, 33), (2, 3, 3, 5))) -> Iterator[Case]:
    """The loss and its gradient: two classes, more than a warp, pixels of three classes; with and without smoothing, some rows ignored, and
    nothing that counts."""
    for shape, smoothing, ignore, share in zip(logits_of, (0.0, 0.1, 0.3), (NOTHING, 0, -100), (1.0, 0.25, 1.0), strict=True):
        random, label = np.random.default_rng(15), f"{label_of(shape)} {smoothing:g} {ignore}"
        logits, classes = 3 * normal(14, *shape), shape[1]
        labels = random.integers(0, classes, (shape[0], *shape[2:])).astype(np.int32)
        labels.reshape(-1)[1::3] = max(ignore, 0) if ignore == NOTHING else ignore
        weights = random.uniform(0.5, 2, classes).astype(np.float32)
        weights = np.append(weights, weights.sum())
        total = np.array([weights[:-1][labels[(labels >= 0) & (labels != ignore)]].sum()], np.float32)
        p = np.exp(logits.astype(np.float64))
        p = (p / p.sum(1, keepdims=True)).astype(np.float32)
        attrs = {"smoothing": smoothing, "ignore": ignore, "share": share}
        loss = ((), "float64")
        yield Case(Op("xent_total"), label, (labels, weights), (((1,), "float32"),), {"ignore": ignore}, labels.size)
        yield Case(Op("weighted_xent", "fprop"), label, (logits, labels, weights, total), ((shape, "float32"), loss, loss), attrs, classes)
        yield Case(Op("weighted_xent", "dgrad"), label, (p, labels, weights, total), ((shape, "float32"),), attrs)
    nothing = np.full_like(labels, ignore)
    none = (logits, nothing, weights, np.zeros(1, np.float32))
    yield Case(Op("weighted_xent", "fprop"), "nothing counts", none, ((shape, "float32"), loss, loss), attrs, classes)
    yield Case(Op("weighted_xent", "dgrad"), "nothing counts", (p, *none[1:]), ((shape, "float32"),), attrs)
