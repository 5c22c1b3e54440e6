"""Group normalisation: y = weight·(x − μ)/√(σ² + eps) + bias, μ and σ² of a group of channels of one image; the same in training and inference.

A group is `channels / groups` neighbouring channels; as many groups as channels make it an instance normalisation. weight and bias are of a channel,
and may be left out. With g = dy, h = weight·g, x̂ = (x − μ)·rstd, rstd = 1/√(σ² + eps), K = H·W·(channels of a group):

    dbias = Σ g        dweight = Σ g·x̂        dx = rstd·(h − Σ_group h/K − x̂·Σ_group h·x̂/K)

A mean is kept as its distance from the first element of its group (its *shift*), so that x − μ keeps its digits under a large offset. A block has
whole groups of one image, so one kernel has statistics, result and gradient; it reads x again for each, out of a cache where the image fits.

Sources: Y. Wu, K. He, "Group Normalization", arXiv:1803.08494; D. Ulyanov et al., "Instance Normalization", arXiv:1607.08022.

    groupnorm_fprop   x (N,C,H,W)[, weight, bias (C)] -> y, shift, rstd (N·groups)                        groups, eps
    groupnorm_grads   dy, x[, weight], shift, rstd -> dx[, dweight, dbias]                                groups
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.kernel import elementwise
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import Case, Gradient, label_of, normal
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.traffic import Traffic, once, size
from nbcnn.ops.kernel.windows import split
from nbcnn.ops.norms.plane import Slab, column_sum, group_sum, slab_of, steps
from nbcnn.ops.norms.rows import launch_rows

Array = np.ndarray

PARTIALS = 2
"""Sums of every plane that the gradients of the parameters are made of."""


def groupnorm_fprop(x: Array, *operands: Array, groups: int, eps: float) -> None:
    """y = x̂·weight + bias, and the statistics shift, rstd that the gradients want; operands: [weight, bias,] y, shift, rstd."""
    *affine, y, shift, rstd = operands
    away, offset = _from_first(x.reshape(len(x), groups, -1))
    shift[...] = offset.reshape(-1)
    rstd[...] = 1 / np.sqrt(np.square(away).mean(2) + eps).reshape(-1)
    normal = (away * rstd.reshape(len(x), groups, 1)).reshape(x.shape)
    y[...] = normal * affine[0][:, None, None] + affine[1][:, None, None] if affine else normal


def groupnorm_grads(dy: Array, x: Array, *operands: Array, groups: int) -> None:
    """dx, dweight, dbias from dy and what the forward pass read and kept; operands: [weight,] shift, rstd, dx[, dweight, dbias]."""
    weight, shift, rstd, dx, *grads = operands if len(operands) > 3 else (np.ones(x.shape[1], x.dtype), *operands)
    away = x.reshape(len(x), groups, -1)
    away = away - away[..., :1] - shift.reshape(len(x), groups, 1)
    scale = rstd.reshape(len(x), groups, 1)
    normal, h = away * scale, (dy * weight[:, None, None]).reshape(away.shape)
    dx[...] = (scale * (h - h.mean(2, keepdims=True) - normal * (h * normal).mean(2, keepdims=True))).reshape(x.shape)
    if grads:
        grads[0][...], grads[1][...] = (dy * normal.reshape(x.shape)).sum((0, 2, 3)), dy.sum((0, 2, 3))


def _from_first(x: Array) -> tuple[Array, Array]:
    """x minus its mean along the last axis, and the mean's distance from the first element (…, 1)."""
    away = x - x[..., :1]
    shift = away.mean(-1, keepdims=True)
    return away - shift, shift


@cache
def fprop_kernel(kind: str, slab: Slab, affine: bool) -> Any:
    load, store = scalar_io(kind)
    in_column, in_group = column_sum(slab.columns, slab.threads), group_sum(slab)
    CHANNELS, GROUP, COLUMNS, ROWS, THREADS = slab.channels, slab.group, slab.columns, slab.rows, slab.threads

    @jit()
    def groupnorm_fprop_kernel(x, weight, bias, y, shift, rstd, slabs, C, HW, step_c, step_p, eps):
        """y = weight·(x − μ)·rstd + bias; shift, rstd of every group.

        grid N·slabs, block 32–256; owns: a block whole groups of an image, a thread pixels of one channel at a time.
        shared 4 bytes a thread; moves 8·x bytes (two further reads of x hit a cache). source: arXiv:1803.08494.
        """
        values = cuda.shared.array(THREADS, f4)
        tid = cuda.threadIdx.x
        column, row = tid & COLUMNS - 1, tid // COLUMNS
        n, block = split(cuda.blockIdx.x, slabs)
        first = block * CHANNELS
        start = n * C * HW
        mine = column // GROUP if CHANNELS > GROUP else 0
        channels = min(CHANNELS, C - first)
        working = column < channels
        lead = load(x, start + (first + mine * GROUP) * step_c) if working else 0.0

        total = 0.0
        for c in range(column, channels, COLUMNS):
            for p in range(row, HW, ROWS):
                total += load(x, start + (first + c) * step_c + p * step_p) - lead
        count = GROUP * HW
        offset = in_group(values, in_column(values, total)) / count

        total = 0.0
        for c in range(column, channels, COLUMNS):
            for p in range(row, HW, ROWS):
                away = load(x, start + (first + c) * step_c + p * step_p) - lead - offset
                total += away * away
        scale = 1.0 / math.sqrt(in_group(values, in_column(values, total)) / count + eps)
        if working and row == 0 and column == mine * GROUP:
            at = n * (C // GROUP) + first // GROUP + mine
            shift[at] = offset
            rstd[at] = scale

        for c in range(column, channels, COLUMNS):
            factor, plus = scale, 0.0
            if affine:
                factor, plus = weight[first + c] * scale, bias[first + c]
            for p in range(row, HW, ROWS):
                at = start + (first + c) * step_c + p * step_p
                store(y, at, (load(x, at) - lead - offset) * factor + plus)

    return groupnorm_fprop_kernel


@cache
def grads_kernel(kind: str, slab: Slab, affine: bool) -> Any:
    load, store = scalar_io(kind)
    in_column, in_group = column_sum(slab.columns, slab.threads), group_sum(slab)
    CHANNELS, GROUP, COLUMNS, ROWS, THREADS = slab.channels, slab.group, slab.columns, slab.rows, slab.threads

    @jit()
    def groupnorm_grads_kernel(dy, x, weight, shift, rstd, dx, partials, slabs, N, C, HW, step_c, step_p):
        """dx; and of every plane Σ g, Σ g·x̂, in partials (2,N,C).

        grid N·slabs, block 32–256; owns: a block whole groups of an image, a thread pixels of one channel at a time.
        shared 4 bytes a thread; moves 12·x bytes (the second read of x and dy hits a cache). source: arXiv:1803.08494.
        """
        values = cuda.shared.array(THREADS, f4)
        tid = cuda.threadIdx.x
        column, row = tid & COLUMNS - 1, tid // COLUMNS
        n, block = split(cuda.blockIdx.x, slabs)
        first = block * CHANNELS
        start = n * C * HW
        mine = column // GROUP if CHANNELS > GROUP else 0
        channels = min(CHANNELS, C - first)
        working = column < channels
        of_group = n * (C // GROUP) + first // GROUP + mine
        scale = rstd[of_group] if working else 0.0
        lead = load(x, start + (first + mine * GROUP) * step_c) if working else 0.0
        offset = shift[of_group] if working else 0.0

        pull, slope = 0.0, 0.0
        for column0 in range(0, channels, COLUMNS):
            c = column0 + column
            inside = c < channels
            sum_g, sum_p = 0.0, 0.0
            for p in range(row, HW if inside else 0, ROWS):
                at = start + (first + c) * step_c + p * step_p
                g = load(dy, at)
                sum_g += g
                sum_p += g * (load(x, at) - lead - offset)
            sum_g = in_column(values, sum_g)
            sum_p = in_column(values, sum_p) * scale
            factor = 1.0
            if affine:
                factor = weight[first + c] if inside else 0.0
                if inside and row == 0:
                    plane = n * C + first + c
                    partials[plane] = sum_g
                    partials[N * C + plane] = sum_p
            pull += factor * sum_g
            slope += factor * sum_p
        count = GROUP * HW
        pull, slope = in_group(values, pull) / count, in_group(values, slope) * scale / count

        for c in range(column, channels, COLUMNS):
            factor = 1.0
            if affine:
                factor = weight[first + c]
            for p in range(row, HW, ROWS):
                at = start + (first + c) * step_c + p * step_p
                store(dx, at, scale * (factor * load(dy, at) - pull - slope * (load(x, at) - lead - offset)))

    return groupnorm_grads_kernel


def bind_fprop(call: Call) -> list[Launch]:
    """One launch."""
    slab, slabs, grid, extents = _extents(call, 0)
    affine, x = len(call.ins) > 1, call.ins[0]
    weight, bias = call.ins[1:] if affine else (x, x)
    args = (x, weight, bias, *call.outs, slabs, *extents, np.float32(call.attrs["eps"]))
    return [Launch(fprop_kernel(kinds(call)[0], slab, affine), grid, slab.threads, args)]


def bind_grads(call: Call) -> list[Launch]:
    """One launch for dx and the sums of every plane, and one that adds these over the images, if there are parameters."""
    slab, slabs, grid, extents = _extents(call, 1)
    n, c = call.in_shapes[1][:2]
    affine, (dy, x, *_, shift, rstd) = len(call.ins) > 4, call.ins
    partials = call.scratch[: scratch_grads(call)].view(np.float32) if affine else shift
    args = (dy, x, call.ins[2] if affine else shift, shift, rstd, call.outs[0], partials, slabs, np.int32(n), *extents)
    first = Launch(grads_kernel(kinds(call)[0], slab, affine), grid, slab.threads, args)
    return [first, launch_rows(partials, (call.outs[2], call.outs[1]), n, c)] if affine else [first]


def scratch_grads(call: Call) -> int:
    """Bytes of the sums of every plane."""
    n, c = call.in_shapes[0][:2]
    return 4 * PARTIALS * n * c if len(call.in_shapes) > 4 else 0


def _extents(call: Call, image: int) -> tuple[Slab, np.int32, int, tuple[np.int32, ...]]:
    """The slab, slabs an image, the grid, and the extents that the kernels take."""
    shape = call.in_shapes[image]
    slab = slab_of(shape, call.layout, shape[1] // call.attrs["groups"])
    slabs = -(-shape[1] // slab.channels)
    return slab, np.int32(slabs), shape[0] * slabs, tuple(np.int32(s) for s in steps(call))


def traffic_fprop(call: Call) -> list[Traffic]:
    """x three times; y, and the groups' statistics."""
    x, statistics = size(call, "in", 0), 2 * size(call, "out", 1)
    return [Traffic(3 * x, size(call, "out", 0) + statistics, x)]


def traffic_grads(call: Call) -> list[Traffic]:
    """x and dy twice; dx, and two sums of planes, which are added over the images."""
    c = call.in_shapes[1][1]
    both, kept, sums = size(call, "in", 0) + size(call, "in", 1), 2 * size(call, "in", len(call.in_shapes) - 1), scratch_grads(call)
    first = Traffic(2 * both + kept, size(call, "out", 0) + sums, both + kept)
    return [first, once(sums, 8 * c)] if sums else [first]


HOST = {"groupnorm_fprop": host(groupnorm_fprop), "groupnorm_grads": host(groupnorm_grads)}
OPS = {
    "groupnorm_fprop": Impl(bind_fprop, supports=elementwise.supports, traffic=traffic_fprop),
    "groupnorm_grads": Impl(bind_grads, scratch_grads, elementwise.supports, traffic=traffic_grads),
}
GRADIENTS = {"groupnorm_grads": Gradient("groupnorm_fprop", lambda ins, outs, v: (v, *ins[:2], *outs[1:]), beside=(1, 1))}

SHAPES = (((1, 1, 5, 7), 1), ((2, 6, 3, 3), 3), ((1, 34, 2, 2), 1), ((1, 34, 3, 2), 17), ((2, 3, 3, 5), 3))
"""(N,C,H,W), groups: one channel; more channels than a warp; a group wider than one; groups of two; instances."""


def cases(shapes: Sequence[tuple[tuple[int, ...], int]] = SHAPES) -> Iterator[Case]:
    """Both passes with parameters, ten deviations from zero."""
    for shape, groups in shapes:
        n, c, h, w = shape
        x, dy = normal(80, *shape) + np.float32(10), normal(81, *shape)
        weight, bias, image, kept, channel = 1 + 0.3 * normal(82, c), normal(83, c), (shape, "float32"), ((n * groups,), "float32"), ((c,), "float32")
        label, terms = f"{label_of(shape)} {groups} groups", h * w * max(c // groups, n)
        statistics = np.empty((2, n * groups), np.float32)
        groupnorm_fprop(x, weight, bias, np.empty_like(x), *statistics, groups=groups, eps=1e-5)
        yield Case("groupnorm_fprop", label, (x, weight, bias), (image, kept, kept), {"groups": groups, "eps": 1e-5}, terms)
        yield Case("groupnorm_grads", label, (dy, x, weight, *statistics), (image, channel, channel), {"groups": groups}, terms)


def real_cases() -> Iterator[Case]:
    """Groups that share a warp, and images larger than a block."""
    yield from cases((((16, 64, 28, 28), 32), ((4, 12, 33, 31), 3)))
