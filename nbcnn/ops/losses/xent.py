"""Softmax with cross-entropy. For row n with label l, where a row of F classes is an example, or a pixel of one:

    p[n, f] = exp(x[n, f] − max) / Σ exp(x[n, ·] − max)
    z[n, f] = −log p[n, f]
    loss    = mean over n of z[n, l],   dx = (p − onehot(l)) / N

Weighted, its classes have weights, its labels are smoothed, and some of its rows are ignored:

    row n counts  w[l], and 0 where l is `ignore`
    its loss      (1 − s)·w[l]·z[l] + s/F·Σ_c w[c]·z[c],      0 where it is ignored
    total = Σ_n of what rows count,   loss = Σ_n of their losses / (share·total),   0 where nothing counts

These are the numbers of torch.nn.CrossEntropyLoss (weight, ignore_index, label_smoothing, reduction "mean"), which is NaN where nothing counts:
a batch of masks may well have no labelled pixel, and then has nothing to teach. Label smoothing: C. Szegedy et al., "Rethinking the Inception
architecture for computer vision", arXiv:1512.00567, section 7.

Of several ranks `total` is added up between `xent_total` and the others, and `share` is what a rank's part of the batch counts in the mean of all
ranks: the losses of ranks, weighted by their shares, are the loss of the whole batch. `count` = share·total is what the loss counts in the mean of
an epoch.

    softmax_xent_fprop   logits (N,F), labels (N) int32 -> p (N,F), loss () float64
    softmax_xent_dgrad   p, labels -> dlogits
    xent_total           labels (N) int32, weights (F+1) -> total (1)                             ignore
    weighted_xent_fprop  logits (N,F), labels, weights, total -> p (N,F), loss () float64, count () float64      smoothing, ignore, share
    weighted_xent_dgrad  p, labels, weights, total -> dlogits                                     smoothing, ignore, share

Of pixels the logits are (B,F,H,W) and the labels (B,H,W). Stored as NHWC their rows lie like those of a matrix (N,F); as NCHW element f of a row lies
H·W behind element f − 1, and neighbouring threads own neighbouring pixels. `weights` are those of the classes and, last, their sum.

Subtracting the row's maximum keeps every exponential in (0, 1]. A label that is neither a class nor `ignore` makes the loss NaN, which trips the
non-finite flag of StepState (a kernel cannot raise); its row of dx is then p / N, and weighted it counts 0.
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
from nbcnn.ops.kernel.maps import launch_map, supports
from nbcnn.ops.kernel.reduce import MAX_BLOCKS, THREADS, add_partials, block_sum, f8, group_reduction, partial_bytes, plus, sum_of
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.traffic import Traffic, element, once, outputs, size
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

NAN = float("nan")
NOTHING = -(2**31)
"""The `ignore` of a loss that ignores no label."""


def in_rows(array: np.ndarray) -> np.ndarray:
    """`array` (N,F), or (B,F,H,W) as (B·H·W,F); a copy where it must be."""
    return np.moveaxis(array, 1, -1).reshape(-1, array.shape[1])


def like(rows: np.ndarray, array: np.ndarray) -> np.ndarray:
    """The rows of `in_rows` in the shape of `array`."""
    return np.moveaxis(rows.reshape(array.shape[0], *array.shape[2:], -1), -1, 1)


def _known(labels: np.ndarray, classes: int, ignore: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels (N), which of them are ignored, which are classes."""
    flat = labels.reshape(-1)
    ignored = flat == ignore
    return flat, ignored, (flat >= 0) & (flat < classes) & ~ignored


def _losses(logits: np.ndarray, labels: np.ndarray, p: np.ndarray, ignore: int) -> tuple[np.ndarray, ...]:
    """Makes p; z (N,F), a class of every row, its −log softmax in float64, and 0 in the rows that count, or are ignored, else NaN."""
    made = in_rows(logits)
    made = made - made.max(axis=1, keepdims=True)
    flat, ignored, known = _known(labels, made.shape[1], ignore)
    e = np.exp(made)
    whole = e.sum(axis=1, keepdims=True)
    np.copyto(p, like(e / whole, p))
    at = np.where(known, flat, 0)
    own = np.log(whole[:, 0], dtype=np.float64) - made[np.arange(len(made)), at]
    return np.log(whole) - made, at, own, np.where(known | ignored, 0, np.nan)


def softmax_xent_fprop(logits: np.ndarray, labels: np.ndarray, p: np.ndarray, loss: np.ndarray) -> None:
    """p (N,F) = softmax of each row of logits (N,F); loss () float64 = mean cross-entropy with labels (N) int32; or of pixels, (B,F,H,W), (B,H,W)."""
    _, _, own, wrong = _losses(logits, labels, p, NOTHING)
    loss[...] = (own + wrong).mean()


def softmax_xent_dgrad(p: np.ndarray, labels: np.ndarray, dlogits: np.ndarray) -> None:
    """dlogits = (p - onehot(labels)) / N, of rows or of pixels as above."""
    made = in_rows(p).copy()
    flat, _, known = _known(labels, made.shape[1], NOTHING)
    made[known, flat[known]] -= 1
    np.multiply(like(made, p), 1 / len(made), out=dlogits)


def xent_total(labels: np.ndarray, weights: np.ndarray, total: np.ndarray, *, ignore: int) -> None:
    """total (1) = the sum of `weights` at the labels int32 that are classes and not `ignore`."""
    flat, _, known = _known(labels, weights.size - 1, ignore)
    total[...] = weights[flat[known]].sum(dtype=np.float64)


def weighted_xent_fprop(
    logits: np.ndarray, labels: np.ndarray, weights: np.ndarray, total: np.ndarray, p: np.ndarray, loss: np.ndarray, count: np.ndarray,
    *, smoothing: float, ignore: int, share: float,
) -> None:  # fmt: skip
    """p (N,F) = softmax of each row of logits; loss and count () float64 as above."""
    z, at, own, wrong = _losses(logits, labels, p, ignore)
    each = (1 - smoothing) * weights[at] * own + smoothing / z.shape[1] * (z @ weights[:-1])
    each = np.where(labels.reshape(-1) == ignore, 0, each + wrong)
    count[...] = share * float(total[0])
    loss[...] = each.sum() / count if count > 0 else 0 * each.sum()


def weighted_xent_dgrad(
    p: np.ndarray, labels: np.ndarray, weights: np.ndarray, total: np.ndarray, dlogits: np.ndarray, *, smoothing: float, ignore: int, share: float
) -> None:
    """dlogits = (p·((1 − s)·w[l] + s/F·Σw) − (1 − s)·w[l]·onehot(l) − s/F·w) / (share·total), 0 in ignored rows."""
    made = in_rows(p).copy()
    rows, classes = made.shape
    flat, ignored, known = _known(labels, classes, ignore)
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


@functools.cache
def fprop_kernel(kind: str, group: int, planes: bool, weighted: bool) -> Any:
    """The forward kernel with `group` threads per row, a power of two up to 256; logits and p stored as `kind`, in `planes` of a class each or
    not."""
    (load, store), place, reduced = scalar_io(kind), place_of(planes), exponentials(kind, group)
    ROWS, group_sum = THREADS // group, group_reduction(group, plus)

    @jit()
    def xent_fprop_kernel(logits, labels, weights, p, rows, classes, plane, own, spread, ignore, scale, total):
        """p = softmax(logits); total[block] = scale · Σ of the losses of the block's rows; own = 1 − s, spread = s/F; `plane` is H·W or 0.

        grid    ⌈N / (256 / group)⌉, block 256
        owns    group of threads: a row
        shared  4 KiB, weighted 5
        moves   8·N·F bytes of float32, and the row twice more from L1: its exponentials are made again once their sum is known, so that p is
                rounded once
        """
        maxima = cuda.shared.array(THREADS, types.float32)
        sums = cuda.shared.array(THREADS, types.float32)
        losses = cuda.shared.array(THREADS, types.float64)
        tid = cuda.threadIdx.x
        lane = tid & group - 1
        n = cuda.blockIdx.x * ROWS + (tid - lane) // group
        start, step = place(n, classes, plane)
        # A group without a row has nothing to read, but meets the others at the barriers.
        width = classes if n < rows else 0
        biggest, whole = reduced(maxima, sums, logits, start, step, lane, width)

        # Nor has it a sum to take the logarithm of.
        level, part = (math.log(whole) if weighted and n < rows else 0.0), 0.0
        for f in range(lane, width, group):
            below = load(logits, start + f * step) - biggest
            store(p, start + f * step, math.exp(below) / whole)
            if weighted:
                part += weights[f] * (level - below)
        if weighted:
            smooth = cuda.shared.array(THREADS, types.float32)
            part = group_sum(smooth, part)

        loss = f8(0)
        if lane == 0 and n < rows:
            label = labels[n]
            if 0 <= label < classes:
                loss = math.log(f8(whole)) - f8(load(logits, start + label * step) - biggest)
                if weighted:
                    loss = f8(own * weights[label]) * loss + f8(spread * part)
            else:
                loss = f8(NAN)
            if weighted and label == ignore:
                loss = f8(0)
        value = block_sum(losses, loss)
        if tid == 0:
            total[cuda.blockIdx.x] = scale * value

    return xent_fprop_kernel


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
def _class_of(planes: bool) -> Any:
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


@jit(device=True)
def _settings(labels, weights, total, numbers):
    return labels, weights, total, numbers


@functools.cache
def _gradient(planes: bool, weighted: bool) -> Any:
    """Device function (i, (p,), settings, common) -> dlogits of element i."""
    place = _class_of(planes)

    @jit(device=True)
    def plain(i, elements, settings, common):
        labels, _, _, (classes, plane, scale, _, _, _, _, _) = settings
        row, f = place(i, classes, plane)
        value = elements[0]
        if f == labels[row]:
            value -= 1.0
        return scale * value

    @jit(device=True)
    def of_weights(i, elements, settings, common):
        labels, weights, total, (classes, plane, own, spread, ignore, share, _, _) = settings
        row, f = place(i, classes, plane)
        label, value, counted = labels[row], 0.0, share * total[0]
        if label != ignore and counted > 0.0:
            mine = own * weights[label] if 0 <= label < classes else 0.0
            value = elements[0] * (mine + spread * weights[classes]) - spread * weights[f]
            if f == label:
                value -= mine
            value *= 1.0 / counted
        return value

    return of_weights if weighted else plain


def extents_of(call: Call) -> tuple[int, int, int]:
    """Rows, classes, and H·W where the elements of a row lie in planes, else 0."""
    shape = call.in_shapes[0]
    pixels = numel(shape[2:])
    return shape[0] * pixels, shape[1], pixels if len(shape) == 4 and call.layout == "NCHW" else 0


def _group(call: Call) -> int:
    """Threads of a row: one where it lies in planes, so that a warp reads neighbouring pixels; else the power of two that covers the classes."""
    _, classes, plane = extents_of(call)
    return 1 if plane else min(1 << (classes - 1).bit_length(), THREADS)


def _grid(call: Call) -> int:
    return blocks(extents_of(call)[0], THREADS // _group(call))


def _total_grid(call: Call) -> int:
    return min(blocks(numel(call.in_shapes[0]), THREADS), MAX_BLOCKS)


def _smoothed(call: Call) -> tuple[Any, ...]:
    """What a row's own label counts, what every class does, and the label that counts nothing."""
    smoothing = call.attrs["smoothing"]
    return np.float32(1 - smoothing), np.float32(smoothing / call.in_shapes[0][1]), np.int32(call.attrs["ignore"])


def bind_total(call: Call) -> list[Launch]:
    """Partial sums of blocks, then their sum."""
    (labels, weights), (total,) = call.ins, call.outs
    grid, partials = _total_grid(call), call.scratch.view(np.float64)
    numbers = (np.int32(numel(call.in_shapes[0])), np.int32(numel(call.in_shapes[1]) - 1), np.int32(call.attrs["ignore"]))
    return [Launch(xent_total_kernel, grid, THREADS, (labels, weights, *numbers, partials)), add_partials(partials, grid, 1, total)]


def bind_fprop(call: Call) -> list[Launch]:
    """The rows, then the mean of their losses; of one block of rows without weights in one launch."""
    (logits, labels, *given), (p, loss, *count) = call.ins, call.outs
    (rows, classes, plane), grid, weighted = extents_of(call), _grid(call), bool(given)
    alone = grid == 1 and not weighted
    total = loss if alone else call.scratch.view(np.float64)
    # Without weights the kernel reads none, and the labels stand in for them.
    numbers = (
        np.int32(rows),
        np.int32(classes),
        np.int32(plane),
        *(_smoothed(call) if weighted else (np.float32(1), np.float32(0), np.int32(NOTHING))),
    )
    args = (logits, labels, given[0] if weighted else labels, p, *numbers, np.float64(1 / rows if alone else 1), total)
    first = Launch(fprop_kernel(kinds(call)[0], _group(call), plane > 0, weighted), grid, THREADS, args)
    if weighted:
        mean = (total, np.int32(grid), given[1], np.float64(call.attrs["share"]), loss, *count)
        return [first, Launch(weighted_xent_mean_kernel, 1, THREADS, mean)]
    return [first] if alone else [first, add_partials(total, grid, 1 / rows, loss)]


def bind_dgrad(call: Call) -> list[Launch]:
    """One launch; a thread has one element, of which a label is looked up."""
    (rows, classes, plane), weighted = extents_of(call), len(call.ins) > 2
    numbers = (*_smoothed(call), np.float32(call.attrs["share"])) if weighted else (np.float32(1 / rows),)
    name, extents = f"{'weighted' if weighted else 'softmax'}_xent_dgrad_kernel", (np.int32(classes), np.int32(plane))
    how: dict[str, Any] = {"reads": 1, "prelude": _settings, "arrays": call.ins[1:], "indexed": True, "single": True}
    return launch_map(name, _gradient(plane > 0, weighted), call, *extents, *numbers, **how)


def traffic_total(call: Call) -> list[Traffic]:
    """Bytes of `bind_total`: every row asks for its weight."""
    labels, grid = size(call, "in", 0), _total_grid(call)
    return [Traffic(2 * labels, 8 * grid, labels + size(call, "in", 1)), once(8 * grid, 4)]


def traffic_fprop(call: Call) -> list[Traffic]:
    """Bytes of `bind_fprop`: a row is read three times, and its label's element once more; weighted with the weights once, its label's twice."""
    logits, labels, grid, (rows, classes, _) = size(call, "in", 0), size(call, "in", 1), _grid(call), extents_of(call)
    read, distinct, p = 3 * logits + labels + rows * element(call), logits + labels, size(call, "out", 0)
    if len(call.in_shapes) > 2:
        read, distinct = read + 4 * rows * (classes + 1), distinct + size(call, "in", 2)
        return [Traffic(read, p + 8 * grid, distinct), once(8 * grid + 4, 16)]
    return [Traffic(read, p + 8 * grid, distinct), *([once(8 * grid, 8)] if grid > 1 else [])]


def traffic_dgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_dgrad`: every element asks for its row's label; weighted also for that label's weight, its own weight and the total."""
    p, labels, (rows, classes, _) = size(call, "in", 0), size(call, "in", 1), extents_of(call)
    asked, more = (16, size(call, "in", 2) + 4) if len(call.in_shapes) > 2 else (4, 0)
    return [Traffic(p + asked * rows * classes, outputs(call), p + labels + more)]


HOST = {
    Op("softmax_xent", "fprop"): host(softmax_xent_fprop),
    Op("softmax_xent", "dgrad"): host(softmax_xent_dgrad),
    Op("xent_total"): host(xent_total),
    Op("weighted_xent", "fprop"): host(weighted_xent_fprop),
    Op("weighted_xent", "dgrad"): host(weighted_xent_dgrad),
}
_DGRAD = Impl(bind_dgrad, supports=supports, traffic=traffic_dgrad)
OPS = {
    Op("softmax_xent", "fprop"): Impl(bind_fprop, lambda call: partial_bytes(_grid(call)), traffic=traffic_fprop),
    Op("softmax_xent", "dgrad"): _DGRAD,
    Op("xent_total"): Impl(bind_total, lambda call: 8 * _total_grid(call), traffic=traffic_total),
    Op("weighted_xent", "fprop"): Impl(bind_fprop, lambda call: 8 * _grid(call), traffic=traffic_fprop),
    Op("weighted_xent", "dgrad"): _DGRAD,
}


def _operands(ins: Any, outs: Any, v: np.ndarray) -> tuple[np.ndarray, ...]:
    return outs[0].astype(np.float32), *ins[1:]


GRADIENTS = {Op(name, "dgrad"): Gradient(Op(name, "fprop"), _operands, loss=True) for name in ("softmax_xent", "weighted_xent")}


def cases(logits_of: Shapes = ((1, 2), (5, 10), (37, 33), (2, 3, 3, 5))) -> Iterator[Case]:
    """Both losses and their gradients: two classes, fewer than a warp, more than a warp; pixels of three classes. Weighted: with smoothing and
    without, some rows ignored, and nothing that counts."""
    loss = ((), "float64")
    for shape, smoothing, ignore, share in zip(logits_of, (0.0, 0.1, 0.1, 0.3), (NOTHING, 1, 0, -100), (1.0, 1.0, 0.25, 1.0), strict=False):
        random, logits, classes, label = np.random.default_rng(15), 3 * normal(14, *shape), shape[1], label_of(shape)
        labels = random.integers(0, classes, (shape[0], *shape[2:])).astype(np.int32)
        p = np.exp(logits.astype(np.float64))
        p = (p / p.sum(1, keepdims=True)).astype(np.float32)
        yield Case(Op("softmax_xent", "fprop"), label, (logits, labels), ((shape, "float32"), loss), {}, classes)
        yield Case(Op("softmax_xent", "dgrad"), label, (p, labels), ((shape, "float32"),))
        label, labels = f"{label} {smoothing:g} {ignore}", labels.copy()
        labels.reshape(-1)[1::3] = max(ignore, 0) if ignore == NOTHING else ignore
        weights = random.uniform(0.5, 2, classes).astype(np.float32)
        weights = np.append(weights, weights.sum())
        total = np.array([weights[:-1][labels[(labels >= 0) & (labels != ignore)]].sum()], np.float32)
        attrs = {"smoothing": smoothing, "ignore": ignore, "share": share}
        yield Case(Op("xent_total"), label, (labels, weights), (((1,), "float32"),), {"ignore": ignore}, labels.size)
        yield Case(Op("weighted_xent", "fprop"), label, (logits, labels, weights, total), ((shape, "float32"), loss, loss), attrs, classes)
        yield Case(Op("weighted_xent", "dgrad"), label, (p, labels, weights, total), ((shape, "float32"),), attrs)
    none = (logits, np.full_like(labels, ignore), weights, np.zeros(1, np.float32))
    yield Case(Op("weighted_xent", "fprop"), "nothing counts", none, ((shape, "float32"), loss, loss), attrs, classes)
    yield Case(Op("weighted_xent", "dgrad"), "nothing counts", (p, *none[1:]), ((shape, "float32"),), attrs)
