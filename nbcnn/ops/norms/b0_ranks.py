"""EvoNorm-B0 with the batch's statistics taken over all ranks that train together (`--sync-stats`).

The same layer as b0.py cut open where ranks must add something up; a plan puts an all-reduce into each cut:

    evonorm_b0_statistics   planes' statistics, and this rank's of every channel in its row of `parts`, zeros in the other rows
        all-reduce          of parts: then every rank has every row, the same bits
    evonorm_b0_together     the whole batch's from the rows, then y
    evonorm_b0_sums         the gradients' sums; of these `batch`, Σ (1−M)·q, is wanted from all ranks
        all-reduce          of batch, each rank's weighted with its part of the batch, as its gradients are
    evonorm_b0_dgrad        dx

parts (ranks, 4, C) has the number of images, a channel's first element, how far the mean is from it, and the variance: means are
never summed as they are, so they keep their digits under a large offset. dx needs no more: a rank's gradients are those of its own mean loss,
n_r of n images, so its share of the batch's sum over m = n·H·W elements is Σ_r (n_r/n)·batch_r over n_r·H·W, what b0.py's kernel divides by.

The kernels are b0.py's for any shape: two passes over x and one more for y.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.kernel import maps
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks
from nbcnn.ops.kernel.loops import power_of_two
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.traffic import Traffic, element, once, size
from nbcnn.ops.norms.b0 import CHANNEL_THREADS, PARTIALS, apply_kernel, dgrad_kernel, extents_of, over_images, planes_kernel, sums_kernel
from nbcnn.ops.norms.plane import deviation_of
from nbcnn.ops.norms.rows import launch_rows
from nbcnn.plan.op import Op

ROWS = 4
"""Numbers of a rank and channel in `parts`."""


@cache
def part_kernel(kind: str, threads: int) -> Any:
    load, _ = scalar_io(kind)
    THREADS = threads
    moments = over_images(kind, threads)

    @jit()
    def evonorm_b0_part_kernel(x, shift, std, parts, ranks, rank, images, N, C, HW, step_c, eps):
        """parts[rank] = (images, first element, mean − first, variance) of every channel, 0 in the other ranks' rows.

        grid C, block up to 128; owns: one block per channel; shared 4 bytes per thread; moves 12·N·C bytes (and a sector of x for each plane).
        """
        values = cuda.shared.array(THREADS, f4)
        tid, c = cuda.threadIdx.x, cuda.blockIdx.x
        offset, variance = moments(values, x, shift, std, c, N, C, HW, step_c, eps)
        for row in range(tid, ranks * 4, THREADS):
            which, value = row & 3, 0.0
            if row >> 2 == rank:
                value = variance if which == 3 else offset if which == 2 else load(x, c * step_c) if which == 1 else images
            parts[row * C + c] = value

    return evonorm_b0_part_kernel


@cache
def join_kernel(kind: str) -> Any:
    load, _ = scalar_io(kind)

    @jit()
    def evonorm_b0_join_kernel(x, parts, running, batch_shift, batch_std, ranks, C, HW, step_c, eps, momentum):
        """batch_shift (from this rank's first element), batch_std of every channel; running ← (1 − momentum)·running + momentum·(unbiased variance).

        Chan's formula: mean = Σ n_r·mean_r / n, variance = Σ n_r·(variance_r + (mean_r − mean)²) / n. Distances are from rank 0's first
        element, so batch_std and running are the same bits on every rank.
        grid ⌈C/128⌉, block up to 128; owns: one thread per channel; shared none; moves 16·ranks·C bytes.
        """
        c = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if c < C:
            lead, images, mean = parts[C + c], 0.0, 0.0
            for rank in range(0, ranks):
                row = rank * 4 * C + c
                count = parts[row]
                images += count
                mean += count * (parts[row + C] - lead + parts[row + 2 * C])
            mean = mean / images
            variance = 0.0
            for rank in range(0, ranks):
                row = rank * 4 * C + c
                away = parts[row + C] - lead + parts[row + 2 * C] - mean
                variance += parts[row] * (parts[row + 3 * C] + away * away)
            variance = variance / images
            batch_shift[c] = mean + (lead - load(x, c * step_c))
            batch_std[c] = deviation_of(variance + eps)
            m = images * HW
            running[c] = (1.0 - momentum) * running[c] + momentum * variance * (m / max(m - 1.0, 1.0))

    return evonorm_b0_join_kernel


def bind_statistics(call: Call) -> list[Launch]:
    """Two launches: planes, channels."""
    (x,), (shift, std, parts), attrs = call.ins, call.outs, call.attrs
    slab, grid, extents = extents_of(call, 0)
    n, kind, eps = call.in_shapes[0][0], kinds(call)[0], np.float32(attrs["eps"])
    threads = min(power_of_two(n), CHANNEL_THREADS)
    ranks, rank, images = np.int32(attrs["ranks"]), np.int32(attrs["rank"]), np.float32(attrs["images"])
    args = (x, shift, std, parts, ranks, rank, images, np.int32(n), *extents[1:4], eps)
    return [
        Launch(planes_kernel(kind, slab), grid, slab.threads, (x, shift, std, *extents, eps)),
        Launch(part_kernel(kind, threads), int(extents[1]), threads, args),
    ]


def bind_together(call: Call) -> list[Launch]:
    """Two launches: channels, y."""
    (x, gamma, beta, v, running, std, parts), (y, batch_shift, batch_std, _) = call.ins, call.outs
    slab, grid, extents = extents_of(call, 0)
    kind, eps, ranks = kinds(call)[0], np.float32(call.attrs["eps"]), np.int32(call.attrs["ranks"])
    c, hw, step_c = extents[1:4]
    threads = min(power_of_two(int(c)), CHANNEL_THREADS)
    args = (x, parts, running, batch_shift, batch_std, ranks, c, hw, step_c, eps, np.float32(call.attrs["momentum"]))
    return [
        Launch(join_kernel(kind), blocks(int(c), threads), threads, args),
        Launch(apply_kernel(kind, slab, False), grid, slab.threads, (x, gamma, beta, v, std, batch_std, y, *extents, eps)),
    ]


def bind_sums(call: Call) -> list[Launch]:
    """Two launches: the sums of planes, those of channels."""
    (dy, x, gamma, v, std, batch_std), (own, batch, dgamma, dbeta, dv) = call.ins, call.outs
    slab, grid, (slabs, *sizes) = extents_of(call, 1)
    n, c = call.in_shapes[1][:2]
    partials = call.scratch[: scratch_sums(call)].view(np.float32)
    args = (dy, x, gamma, v, std, batch_std, partials, own, slabs, np.int32(n), *sizes)
    return [
        Launch(sums_kernel(kinds(call)[0], slab), grid, slab.threads, args),
        launch_rows(partials, (dbeta, dgamma, dv, batch), n, c),
    ]


def scratch_sums(call: Call) -> int:
    """Bytes of the four sums of every plane that are added over the images."""
    n, c = call.in_shapes[1][:2]
    return 4 * PARTIALS * n * c


def bind_dgrad(call: Call) -> list[Launch]:
    """One launch."""
    (*ins, own, batch), (dx,) = call.ins, call.outs
    slab, grid, (slabs, *sizes) = extents_of(call, 1)
    args = (*ins, own, batch, dx, slabs, np.int32(call.in_shapes[1][0]), *sizes)
    return [Launch(dgrad_kernel(kinds(call)[0], slab), grid, slab.threads, args)]


def _planes(call: Call, at: int) -> tuple[int, int]:
    """Bytes of a number of every plane and of every channel of operand `at`."""
    n, c = call.in_shapes[at][:2]
    return 4 * n * c, 4 * c


def traffic_statistics(call: Call) -> list[Traffic]:
    """Planes: x twice. Channels: every plane's shift twice, its std, its first element twice, and the first of all once more."""
    x, parts, (plane, channel) = size(call, "in", 0), size(call, "out", 2), _planes(call, 0)
    first = element(call) * plane // 4
    return [Traffic(2 * x, 2 * plane, x), Traffic(3 * plane + 2 * first + element(call) * channel // 4, parts, 2 * plane + first)]


def traffic_together(call: Call) -> list[Traffic]:
    """Channels: parts, all but the variances twice; y from x."""
    x, y, parts, (plane, channel) = size(call, "in", 0), size(call, "out", 0), size(call, "in", 6), _planes(call, 0)
    first = element(call) * channel // 4
    return [Traffic(7 * parts // 4 + channel + first, 3 * channel, parts + first), once(x + plane, y)]


def traffic_sums(call: Call) -> list[Traffic]:
    """x, dy and the planes' deviations; then four sums of planes."""
    both, (plane, channel) = size(call, "in", 0) + size(call, "in", 1), _planes(call, 1)
    return [once(both + plane, 5 * plane), once(4 * plane, 4 * channel)]


def traffic_dgrad(call: Call) -> list[Traffic]:
    """x, dy, two statistics and a sum of every plane; dx."""
    both, (plane, _) = size(call, "in", 0) + size(call, "in", 1), _planes(call, 1)
    return [once(both + 3 * plane, size(call, "out", 0))]


OPS = {
    Op("evonorm_b0", "statistics"): Impl(bind_statistics, supports=maps.supports, traffic=traffic_statistics),
    Op("evonorm_b0", "together"): Impl(bind_together, supports=maps.supports, traffic=traffic_together),
    Op("evonorm_b0", "sums"): Impl(bind_sums, scratch_sums, maps.supports, traffic=traffic_sums),
    Op("evonorm_b0", "dgrad"): Impl(bind_dgrad, supports=maps.supports, traffic=traffic_dgrad),
}
