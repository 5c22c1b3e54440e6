"""Group normalisation: y = weight·(x − μ)/√(σ² + eps) + bias, μ and σ² of a group of channels of one image; the same in training and inference.

A group is `channels / groups` neighbouring channels; as many groups as channels make it an instance normalisation. weight and bias are of a channel,
and may be left out. With g = dy, h = weight·g, x̂ = (x − μ)·rstd, rstd = 1/√(σ² + eps), K = H·W·(channels of a group):

    dbias = Σ g        dweight = Σ g·x̂        dx = rstd·(h − Σ_group h/K − x̂·Σ_group h·x̂/K)

The kernels are those of batch normalisation (batch_*.py), but for which statistic a channel has: moments or sums of chunks, which lie
within an image, then a small kernel for the groups, then a pass that begins where the one before it ended, so that part of it is still in the
second-level cache. Threads load 16 bytes at a time whatever the groups are. As there, the mean is kept as one float32.

Sources: Y. Wu, K. He, "Group Normalization", arXiv:1803.08494; D. Ulyanov et al., "Instance Normalization", arXiv:1607.08022.

    groupnorm_fprop   x (N,C,H,W)[, weight, bias (C)] -> y, mean, rstd (N·groups)                         groups, eps
    groupnorm_grads   dy, x[, weight], mean, rstd -> dx[, dweight, dbias]                                 groups
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import SIMULATOR, cuda, f4, jit
from nbcnn.ops.activations.activation import passed_on
from nbcnn.ops.kernel import maps
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.case import Case, Gradient, label_of, normal
from nbcnn.ops.kernel.loops import power_of_two, quotient
from nbcnn.ops.kernel.reduce import group_reduction, plus
from nbcnn.ops.kernel.share import IN_FLIGHT, Extent, Share, floats_io, lanes_io, place_of, share_of_images, statistic_of_group
from nbcnn.ops.kernel.stored import kinds
from nbcnn.ops.kernel.traffic import Traffic, once, size
from nbcnn.ops.norms import batch_backward, batch_forward
from nbcnn.ops.norms.batch_forward import CHANNEL_THREADS
from nbcnn.ops.norms.plane import column_sum, inverse_deviation, rstd_of
from nbcnn.plan.op import Op

Array = np.ndarray

GROUP_THREADS = 8 if SIMULATOR else 128
"""Threads of a block that goes group by group."""
MOST_THREADS = 4 if SIMULATOR else 32
"""Threads that share a group, at most."""


def groupnorm_fprop(x: Array, *operands: Array, groups: int, eps: float) -> None:
    """y = x̂·weight + bias, and the statistics mean, rstd that the gradients want; operands: [weight, bias,] y, mean, rstd."""
    *affine, y, mean, rstd = operands
    away, lead = _from_first(x.reshape(len(x), groups, -1))
    offset = away.mean(2, keepdims=True)
    away = away - offset
    mean[...] = (lead + offset).reshape(-1)
    rstd[...] = inverse_deviation(np.square(away).mean(2) + eps).reshape(-1)
    normal = (away * rstd.reshape(len(x), groups, 1)).reshape(x.shape)
    y[...] = normal * affine[0][:, None, None] + affine[1][:, None, None] if affine else normal


def groupnorm_grads(dy: Array, x: Array, *operands: Array, groups: int) -> None:
    """dx, dweight, dbias from dy and what the forward pass read and kept; operands: [weight,] mean, rstd, dx[, dweight, dbias]."""
    weight, mean, rstd, dx, *grads = operands if len(operands) > 3 else (np.ones(x.shape[1], x.dtype), *operands)
    away = x.reshape(len(x), groups, -1) - mean.reshape(len(x), groups, 1)
    scale = rstd.reshape(len(x), groups, 1)
    normal, h = away * scale, (dy * weight[:, None, None]).reshape(away.shape)
    dx[...] = (scale * (h - h.mean(2, keepdims=True) - normal * (h * normal).mean(2, keepdims=True))).reshape(x.shape)
    if grads:
        grads[0][...], grads[1][...] = (dy * normal.reshape(x.shape)).sum((0, 2, 3)), dy.sum((0, 2, 3))


def _from_first(x: Array) -> tuple[Array, Array]:
    """x minus the first element along the last axis, and that (…, 1)."""
    return x - x[..., :1], x[..., :1]


@cache
def statistics_kernel(threads: int) -> Any:
    """`threads`: those that share a group, a power of two."""
    together = group_reduction(threads, plus)
    THREADS, GROUPS = GROUP_THREADS, GROUP_THREADS // threads

    @jit()
    def groupnorm_statistics_kernel(partials, mean, rstd, count, C, group, per, chunk, chunks, eps):
        """mean, rstd = 1/√(variance + eps) of every group of an image, from the moments (2,C,chunks) of its chunks (Chan's formula).

        grid ⌈N·groups/groups of a block⌉, block 128; owns: a few threads per group; shared 8 bytes per thread; moves 8·C·chunks bytes.
        source: T. Chan, G. Golub, R. LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
        """
        means = cuda.shared.array(THREADS, f4)
        squares = cuda.shared.array(THREADS, f4)
        tid = cuda.threadIdx.x
        number = cuda.blockIdx.x * GROUPS + tid // threads
        n, first, items = place_of_group(number, count, C, group, per)
        lead, total = partials[first * chunks + n * per], 0.0
        for i in range(tid & threads - 1, items, threads):
            total += partials[(first + i // per) * chunks + n * per + i % per] - lead
        offset = together(means, total) / max(items, 1)
        total = 0.0
        for i in range(tid & threads - 1, items, threads):
            at = (first + i // per) * chunks + n * per + i % per
            away = partials[at] - lead - offset
            total += partials[C * chunks + at] + chunk * away * away
        total = together(squares, total)
        if tid & threads - 1 == 0 and number < count:
            mean[number] = lead + offset
            rstd[number] = rstd_of(total / (items * chunk) + eps)

    return groupnorm_statistics_kernel


@jit(device=True)
def place_of_group(number, count, C, group, per):
    """Image and first channel of a group, and how many chunks its channels have together; none of a group beyond the last."""
    groups = quotient(C, group)
    n = quotient(number, groups)
    items = group * per if number < count else 0
    return (n, (number - n * groups) * group, items) if number < count else (0, 0, items)


@cache
def pulls_kernel(threads: int, affine: bool) -> Any:
    """`threads`: those that share a group, a power of two."""
    together = group_reduction(threads, plus)
    THREADS, GROUPS = GROUP_THREADS, GROUP_THREADS // threads

    @jit()
    def groupnorm_pulls_kernel(partials, weight, rstd, pulls, count, C, group, per, K, chunks):
        """pulls (2,N·groups) = rstd·Σ h/K, rstd³·Σ h·(x − μ)/K of every group, from Σ g, Σ g·(x − μ) of its chunks (2,C,chunks).

        grid ⌈N·groups/groups of a block⌉, block 128; owns: a few threads per group; shared 8 bytes per thread; moves 8·C·chunks bytes.
        """
        plain = cuda.shared.array(THREADS, f4)
        centred = cuda.shared.array(THREADS, f4)
        tid = cuda.threadIdx.x
        number = cuda.blockIdx.x * GROUPS + tid // threads
        n, first, items = place_of_group(number, count, C, group, per)
        pull, slope = 0.0, 0.0
        for i in range(tid & threads - 1, items, threads):
            c = first + i // per
            at = c * chunks + n * per + i % per
            factor = 1.0
            if affine:
                factor = weight[c]
            pull += factor * partials[at]
            slope += factor * partials[C * chunks + at]
        pull, slope = together(plain, pull), together(centred, slope)
        if tid & threads - 1 == 0 and number < count:
            scale = rstd[number]
            pulls[number] = scale * pull / K
            pulls[count + number] = scale * scale * scale * slope / K

    return groupnorm_pulls_kernel


@cache
def wgrad_kernel() -> Any:
    THREADS = CHANNEL_THREADS
    in_block = column_sum(1, THREADS)

    @jit()
    def groupnorm_wgrad_kernel(partials, rstd, dweight, dbias, C, group, per, chunks):
        """dbias = Σ g, dweight = Σ_n rstd·Σ g·(x − μ) of every channel over its chunks.

        grid C, block 256; owns: one block per channel; shared 4 bytes per thread; moves 8·C·chunks bytes.
        """
        values = cuda.shared.array(THREADS, f4)
        tid, c = cuda.threadIdx.x, cuda.blockIdx.x
        plain, centred = 0.0, 0.0
        for b in range(tid, chunks, THREADS):
            plain += partials[c * chunks + b]
            centred += rstd[b // per * (C // group) + c // group] * partials[(C + c) * chunks + b]
        plain, centred = in_block(values, plain), in_block(values, centred)
        if tid == 0:
            dbias[c], dweight[c] = plain, centred

    return groupnorm_wgrad_kernel


@cache
def dgrad_kernel(kind: str, share: Share, affine: bool) -> Any:
    (load, store), place = lanes_io(kind, share.width), place_of(share.last)
    load_floats, _ = floats_io(share.width)
    WIDTH, COLUMNS, ROWS, THREADS = share.width, share.columns, share.rows, share.threads
    FLIGHT, FLOATS = IN_FLIGHT, IN_FLIGHT * share.width

    @jit(device=True)
    def make(grads, values, at, means, factors, pulls, slopes):
        for q in range(WIDTH):
            values[at + q] = factors[q] * grads[at + q] - pulls[q] - slopes[q] * (values[at + q] - means[q])

    @jit(launch_bounds=(THREADS, 2))
    def groupnorm_dgrad_kernel(dy, x, weight, mean, rstd, pulls, dx, count, M, C, HW, chunk, group):
        """dx = rstd·(weight·g − Σ h/K − (x − μ)·rstd²·Σ h·(x − μ)/K); pulls (2,N·groups) as `groupnorm_pulls_kernel` makes them.

        grid (tiles of channels, chunks), block up to 256; owns: one block per chunk, the last ones first, per thread `width` channels of every
        ROWS-th pixel of it. shared none; moves 12·x bytes.
        """
        grads = cuda.local.array(FLOATS, f4)
        values = cuda.local.array(FLOATS, f4)
        means = cuda.local.array(WIDTH, f4)
        factors = cuda.local.array(WIDTH, f4)
        offsets = cuda.local.array(WIDTH, f4)
        slopes = cuda.local.array(WIDTH, f4)
        weights = cuda.local.array(WIDTH, f4)
        tid = cuda.threadIdx.x
        row = tid // COLUMNS
        c = (cuda.blockIdx.x * COLUMNS + (tid - row * COLUMNS)) * WIDTH
        near = min(c, C - WIDTH)
        first = (cuda.gridDim.y - 1 - cuda.blockIdx.y) * chunk
        last = min(first + chunk, M) if c < C else 0
        if affine:
            load_floats(weight, near, weights)
        for q in range(WIDTH):
            at = statistic_of_group(first, near + q, C, HW, group)
            means[q], factors[q], offsets[q], slopes[q] = mean[at], rstd[at], pulls[at], pulls[count + at]
            factors[q] = factors[q] * weights[q] if affine else factors[q]
        m = first + row
        while m + (FLIGHT - 1) * ROWS < last:
            for j in range(FLIGHT):
                here = place(m + j * ROWS, c, C, HW)
                load(dy, here, grads, j * WIDTH)
                load(x, here, values, j * WIDTH)
            for j in range(FLIGHT):
                make(grads, values, j * WIDTH, means, factors, offsets, slopes)
                store(dx, place(m + j * ROWS, c, C, HW), values, j * WIDTH)
            m += FLIGHT * ROWS
        while m < last:
            here = place(m, c, C, HW)
            load(dy, here, grads, 0)
            load(x, here, values, 0)
            make(grads, values, 0, means, factors, offsets, slopes)
            store(dx, here, values, 0)
            m += ROWS

    return groupnorm_dgrad_kernel


@dataclass(frozen=True)
class _Sizes:
    """How a call's images are stored, their share and grid; channels of a group, groups of all images, chunks of an image, threads of a group."""

    kind: str
    share: Share
    extent: Extent
    group: int
    count: int
    per: int

    @property
    def threads(self) -> int:
        return min(power_of_two(self.group * self.per), MOST_THREADS)

    @property
    def blocks(self) -> int:
        """Blocks of a kernel that goes group by group."""
        return blocks(self.count, GROUP_THREADS // self.threads)

    @property
    def partials(self) -> int:
        """Float32 of two numbers of every channel and chunk."""
        return 2 * self.extent.channels * self.extent.chunks

    def scalars(self, *names: str) -> tuple[np.int32, ...]:
        """The numbers of these names as kernels take them."""
        known = {**vars(self.extent), **vars(self), "K": self.group * self.extent.plane}
        return tuple(np.int32(known[name]) for name in names)


def _sizes(call: Call, image: int) -> _Sizes:
    shape, groups, kind = call.in_shapes[image], call.attrs["groups"], kinds(call)[0]
    share, extent = share_of_images(shape, call.layout, kind)
    return _Sizes(kind, share, extent, shape[1] // groups, shape[0] * groups, extent.chunks // shape[0])


_IMAGE = ("pixels", "channels", "plane", "chunk")
"""(M, C, H·W, chunk) as kernels take them."""


def bind_fprop(call: Call) -> list[Launch]:
    """Three launches: moments of the chunks, statistics of the groups, y."""
    at, affine = _sizes(call, 0), len(call.ins) > 1
    x, (y, mean, rstd) = call.ins[0], call.outs
    weight, bias = call.ins[1:] if affine else (mean, mean)
    partials, grid, eps = call.scratch[: 4 * at.partials].view(np.float32), at.extent.grid, np.float32(call.attrs["eps"])
    image, threads = at.scalars(*_IMAGE), at.share.threads
    of_groups = (partials, mean, rstd, *at.scalars("count", "channels", "group", "per", "chunk", "chunks"), eps)
    apply = batch_forward.apply_kernel(at.kind, at.share, maps.same, False, False, True, affine)
    return [
        Launch(batch_forward.moments_kernel(at.kind, at.share), grid, threads, (x, partials, *image, *at.scalars("channels"))),
        Launch(statistics_kernel(at.threads), at.blocks, GROUP_THREADS, of_groups),
        Launch(apply, grid, threads, (x, x, weight, bias, mean, rstd, y, *image, *at.scalars("group"), eps, *at.scalars("channels", "channels"))),
    ]


def bind_grads(call: Call) -> list[Launch]:
    """Four launches: sums of the chunks, of the groups, of the channels (if there are parameters), dx."""
    at, affine, (dy, x, *_, mean, rstd) = _sizes(call, 1), len(call.ins) > 4, call.ins
    weight, dx = call.ins[2] if affine else mean, call.outs[0]
    floats = call.scratch[: scratch_grads(call)].view(np.float32)
    partials, pulls = floats[: at.partials], floats[at.partials :]
    image, group, grid, threads = at.scalars(*_IMAGE), at.scalars("group"), at.extent.grid, at.share.threads
    sums = batch_backward.sums_kernel(at.kind, at.share, passed_on, False, True)
    of_groups = (partials, weight, rstd, pulls, *at.scalars("count", "channels", "group", "per", "K", "chunks"))
    of_channels = (partials, rstd, *call.outs[1:], *at.scalars("channels", "group", "per", "chunks"))
    made = [
        Launch(sums, grid, threads, (dy, dy, x, dy, weight, weight, mean, rstd, dy, partials, *image, *group, *at.scalars("channels", "channels"))),
        Launch(pulls_kernel(at.threads, affine), at.blocks, GROUP_THREADS, of_groups),
    ]
    if affine:
        made.append(Launch(wgrad_kernel(), at.extent.channels, CHANNEL_THREADS, of_channels))
    args = (dy, x, weight, mean, rstd, pulls, dx, *at.scalars("count"), *image, *group)
    return [*made, Launch(dgrad_kernel(at.kind, at.share, affine), grid, threads, args)]


def scratch_fprop(call: Call) -> int:
    """Bytes of two numbers of every channel and chunk."""
    return 4 * _sizes(call, 0).partials


def scratch_grads(call: Call) -> int:
    """Bytes of two numbers of every channel and chunk, and of every group."""
    at = _sizes(call, 1)
    return 4 * at.partials + 8 * at.count


def traffic_fprop(call: Call) -> list[Traffic]:
    """x; partials, the means twice; x and the statistics, y."""
    x, partials, kept = size(call, "in", 0), scratch_fprop(call), 2 * size(call, "out", 1)
    affine = sum(size(call, "in", at) for at in range(1, len(call.in_shapes)))
    return [once(x, partials), Traffic(3 * partials // 2, kept, partials), once(x + kept + affine, size(call, "out", 0))]


def traffic_grads(call: Call) -> list[Traffic]:
    """dy and x; partials; partials once more, if there are parameters; dy and x, dx."""
    at, both, kept = _sizes(call, 1), size(call, "in", 0) + size(call, "in", 1), 2 * size(call, "in", len(call.in_shapes) - 1)
    partials, pulls, channel = 4 * at.partials, 8 * at.count, 4 * at.extent.channels if len(call.in_shapes) > 4 else 0
    made = [once(both + kept // 2, partials), once(partials + kept // 2 + channel, pulls)]
    if channel:
        made.append(once(partials + kept // 2, 2 * channel))
    return [*made, once(both + kept + pulls + channel, size(call, "out", 0))]


HOST = {Op("groupnorm", "fprop"): host(groupnorm_fprop), Op("groupnorm", "grads"): host(groupnorm_grads)}
OPS = {
    Op("groupnorm", "fprop"): Impl(bind_fprop, scratch_fprop, maps.supports, traffic=traffic_fprop),
    Op("groupnorm", "grads"): Impl(bind_grads, scratch_grads, maps.supports, traffic=traffic_grads),
}
GRADIENTS = {Op("groupnorm", "grads"): Gradient(Op("groupnorm", "fprop"), lambda ins, outs, v: (v, *ins[:2], *outs[1:]), beside=(1, 1))}

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
        yield Case(Op("groupnorm", "fprop"), label, (x, weight, bias), (image, kept, kept), {"groups": groups, "eps": 1e-5}, terms)
        yield Case(Op("groupnorm", "grads"), label, (dy, x, weight, *statistics), (image, channel, channel), {"groups": groups}, terms)


def real_cases() -> Iterator[Case]:
    """Groups that share a warp, and images larger than a block."""
    yield from cases((((16, 64, 28, 28), 32), ((4, 12, 33, 31), 3)))
