"""EvoNorm-B0: in one launch where the batch fits on the GPU at once (b0_held.py); in stages where an image's slab fits
into a block (b0_held.py, b0_held_grads.py); else by the kernels here.

Forward: the planes' statistics, the channels' from these, then y; backward: the planes' sums, the channels' from these, then dx. Blocks
of the first and last of each take a slab of one image (plane.py); of large batches stored NHWC, y is b0_apply.py's.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.gpu.target import Target
from nbcnn.ops.kernel import maps
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks
from nbcnn.ops.kernel.loops import power_of_two
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.norms import b0_apply, b0_held, b0_held_grads, traffic
from nbcnn.ops.norms.b0_batch import by_every_block
from nbcnn.ops.norms.held import Held, slabs_of
from nbcnn.ops.norms.plane import Slab, column_sum, deviation_of, not_negative, plane_position, slab_of, steps
from nbcnn.ops.norms.rows import launch_rows
from nbcnn.ops.ptx.fast import larger
from nbcnn.plan.op import Op

PARTIALS = 4
"""Sums of every plane that the gradients add over the images; a fifth stays the plane's."""
CHANNEL_THREADS = 128


@cache
def planes_kernel(kind: str, slab: Slab) -> Any:
    load, _ = scalar_io(kind)
    position, in_column = plane_position(slab.columns), column_sum(slab.columns, slab.threads)
    ROWS, THREADS = slab.rows, slab.threads

    @jit()
    def evonorm_b0_planes_kernel(x, shift, std, slabs, C, HW, step_c, step_p, eps):
        """shift, std of every plane.

        grid N·slabs, block 32–256; owns: per block up to 32 planes of an image, per thread pixels of one of them.
        shared 4 bytes per thread; moves 4·x bytes (the second read hits L1).
        """
        values = cuda.shared.array(THREADS, f4)
        n, c, row = position(slabs)
        pixels = HW if c < C else 0
        start = n * C * HW + min(c, C - 1) * step_c
        lead = load(x, start)
        total = 0.0
        for p in range(row, pixels, ROWS):
            total += load(x, start + p * step_p) - lead
        offset = in_column(values, total) / HW
        total = 0.0
        for p in range(row, pixels, ROWS):
            centred = load(x, start + p * step_p) - lead - offset
            total += centred * centred
        total = in_column(values, total)
        if c < C and row == 0:
            shift[n * C + c] = offset
            std[n * C + c] = deviation_of(total / HW + eps)

    return evonorm_b0_planes_kernel


@cache
def over_images(kind: str, threads: int) -> Any:
    """Device function (values, x, shift, std, c, N, C, HW, step_c, eps): how far a channel's mean is from its first element, and its variance.

    Chan's formula for planes of one size: mean = the mean of the means, M2 = Σ M2_n + H·W·Σ (mean_n − mean)². Every thread of the
    block must call it, all for one channel c; values: shared, one float32 per thread.
    """
    load, _ = scalar_io(kind)
    THREADS = threads
    in_block = column_sum(1, THREADS)

    @jit(device=True)
    def moments(values, x, shift, std, c, N, C, HW, step_c, eps):
        tid = cuda.threadIdx.x
        lead = load(x, c * step_c)
        total = 0.0
        for n in range(tid, N, THREADS):
            total += load(x, n * C * HW + c * step_c) - lead + shift[n * C + c]
        offset = in_block(values, total) / N
        total = 0.0
        for n in range(tid, N, THREADS):
            away = load(x, n * C * HW + c * step_c) - lead + shift[n * C + c] - offset
            s = std[n * C + c]
            total += not_negative(s * s - eps) + away * away
        return offset, in_block(values, total) / N

    return moments


@cache
def channels_kernel(kind: str, threads: int) -> Any:
    THREADS = threads
    moments = over_images(kind, threads)

    @jit()
    def evonorm_b0_channels_kernel(x, shift, std, running, batch_shift, batch_std, N, C, HW, step_c, eps, momentum):
        """batch_shift, batch_std of every channel; running ← (1 − momentum)·running + momentum·(unbiased variance).

        grid C, block up to 128; owns: one block per channel; shared 4 bytes per thread; moves 12·N·C bytes (and a sector of x for each plane).
        """
        values = cuda.shared.array(THREADS, f4)
        c = cuda.blockIdx.x
        offset, variance = moments(values, x, shift, std, c, N, C, HW, step_c, eps)
        if cuda.threadIdx.x == 0:
            batch_shift[c] = offset
            batch_std[c] = deviation_of(variance + eps)
            m = f4(N) * HW
            running[c] = (1.0 - momentum) * running[c] + momentum * variance * (m / max(m - 1.0, 1.0))

    return evonorm_b0_channels_kernel


@cache
def apply_kernel(kind: str, slab: Slab, infer: bool) -> Any:
    """`infer`: batch holds the running variances instead of the batch's deviations."""
    load, store = scalar_io(kind)
    position, ROWS = plane_position(slab.columns), slab.rows

    @jit()
    def evonorm_b0_apply_kernel(x, gamma, beta, v, std, batch, y, slabs, C, HW, step_c, step_p, eps):
        """y = γ·x/d + β, d = max(s_B, v·x + s_I).

        grid N·slabs, block 32–256; owns: per block up to 32 planes of an image, per thread pixels of one of them.
        shared none; moves 8·x bytes.
        """
        n, c, row = position(slabs)
        if c < C:
            factor, plus, slope, own, least = gamma[c], beta[c], v[c], std[n * C + c], batch[c]
            if infer:
                least = deviation_of(least + eps)
            start = n * C * HW + c * step_c
            for p in range(row, HW, ROWS):
                at = start + p * step_p
                value = load(x, at)
                store(y, at, factor * (value / larger(least, slope * value + own)) + plus)

    return evonorm_b0_apply_kernel


@cache
def sums_kernel(kind: str, slab: Slab) -> Any:
    load, _ = scalar_io(kind)
    position, in_column = plane_position(slab.columns), column_sum(slab.columns, slab.threads)
    ROWS, THREADS = slab.rows, slab.threads

    @jit()
    def evonorm_b0_sums_kernel(dy, x, gamma, v, std, batch_std, partials, own_sums, slabs, N, C, HW, step_c, step_p):
        """partials (4,N,C) = Σ g, Σ g·x/d, Σ M·q·x, Σ (1−M)·q of every plane; own_sums (N,C) = Σ M·q.

        grid N·slabs, block 32–256; owns: per block up to 32 planes of an image, per thread pixels of one of them.
        shared 4 bytes per thread; moves 8·x bytes.
        """
        values = cuda.shared.array(THREADS, f4)
        n, c, row = position(slabs)
        pixels = HW if c < C else 0
        near = min(c, C - 1)
        plane = n * C + near
        factor, slope, own, least = gamma[near], v[near], std[plane], batch_std[near]
        start = n * C * HW + near * step_c
        sum_g, sum_x, sum_v, sum_batch, sum_own = 0.0, 0.0, 0.0, 0.0, 0.0
        for p in range(row, pixels, ROWS):
            at = start + p * step_p
            value, g = load(x, at), load(dy, at)
            reach = slope * value + own
            scale = 1.0 / larger(reach, least)
            part = g * value * scale
            q = part * scale
            # Where one of the two is NaN neither comparison holds, and q, which then is NaN, goes into all sums.
            above, below = reach > least, reach <= least
            sum_g += g
            sum_x += part
            sum_v += 0.0 if below else q * value
            sum_own += 0.0 if below else q
            sum_batch += 0.0 if above else q
        sum_g, sum_x = in_column(values, sum_g), in_column(values, sum_x)
        sum_v, sum_own, sum_batch = in_column(values, sum_v), in_column(values, sum_own), in_column(values, sum_batch)
        if c < C and row == 0:
            every = N * C
            partials[plane] = sum_g
            partials[every + plane] = sum_x
            partials[2 * every + plane] = -factor * sum_v
            partials[3 * every + plane] = -factor * sum_batch
            own_sums[plane] = -factor * sum_own

    return evonorm_b0_sums_kernel


@cache
def dgrad_kernel(kind: str, slab: Slab) -> Any:
    load, store = scalar_io(kind)
    position, ROWS = plane_position(slab.columns), slab.rows

    @jit()
    def evonorm_b0_dgrad_kernel(dy, x, gamma, v, shift, std, batch_shift, batch_std, own_sums, batch_sums, dx, slabs, N, C, HW, step_c, step_p):
        """dx = h·(M·s_I + (1−M)·d)/d² + (Σ_hw M·q)·(x − μ_I)/(k·s_I) + (Σ_nhw (1−M)·q)·(x − μ_B)/(m·s_B).

        grid N·slabs, block 32–256; owns: per block up to 32 planes of an image, per thread pixels of one of them.
        shared none; moves 12·x bytes.
        """
        n, c, row = position(slabs)
        if c < C:
            plane = n * C + c
            factor, slope, own, least = gamma[c], v[c], std[plane], batch_std[c]
            start = n * C * HW + c * step_c
            lead, batch_lead = load(x, start), load(x, c * step_c)
            offset, batch_offset = shift[plane], batch_shift[c]
            pull = own_sums[plane] / (HW * own)
            batch_pull = batch_sums[c] / (f4(N) * HW * least)
            for p in range(row, HW, ROWS):
                at = start + p * step_p
                value, h = load(x, at), factor * load(dy, at)
                reach = slope * value + own
                scale = 1.0 / larger(reach, least)
                direct = h * scale * (own * scale if reach > least else 1.0)
                store(dx, at, direct + pull * (value - lead - offset) + batch_pull * (value - batch_lead - batch_offset))

    return evonorm_b0_dgrad_kernel


def bind_fprop(call: Call) -> list[Launch]:
    """One launch where all blocks fit on the GPU, else planes, then `behind_planes`."""
    if call.tile is not None and call.tile.together:
        return [b0_held.launch(call, "all")]
    if call.tile is not None:
        return [b0_held.launch(call, "statistics"), *behind_planes(call)]
    (x, *_), (_, shift, std, *_) = call.ins, call.outs
    slab, grid, extents = extents_of(call, 0)
    first = Launch(planes_kernel(kinds(call)[0], slab), grid, slab.threads, (x, shift, std, *extents, np.float32(call.attrs["eps"])))
    return [first, *behind_planes(call)]


def behind_planes(call: Call) -> list[Launch]:
    """evonorm_b0_fprop where shift and std of the planes are known: one launch where its blocks had better make the batch's statistics
    themselves (`b0_batch.by_every_block`), else two: channels, y.
    """
    if call.tile is not None and by_every_block(call.in_shapes[0], call.tile):
        return [b0_held.launch(call, "batch")]
    (x, gamma, beta, v, running), (y, shift, std, batch_shift, batch_std, _) = call.ins, call.outs
    slab, grid, extents = extents_of(call, 0)
    n, kind, eps, momentum = call.in_shapes[0][0], kinds(call)[0], np.float32(call.attrs["eps"]), np.float32(call.attrs["momentum"])
    c, hw, step_c = extents[1:4]
    threads = min(power_of_two(n), CHANNEL_THREADS)
    args = (x, shift, std, running, batch_shift, batch_std, np.int32(n), c, hw, step_c, eps, momentum)
    channels = Launch(channels_kernel(kind, threads), int(c), threads, args)
    if b0_apply.serves(call):
        return [channels, b0_apply.launch(call)]
    if call.tile is not None:
        return [channels, b0_held.launch(call, "apply")]
    return [channels, Launch(apply_kernel(kind, slab, False), grid, slab.threads, (x, gamma, beta, v, std, batch_std, y, *extents, eps))]


def bind_infer(call: Call) -> list[Launch]:
    """One launch where slabs can be held, else two: planes, y."""
    if call.tile is not None:
        return [b0_held.launch(call, "infer")]
    (x, gamma, beta, v, running), (y,) = call.ins, call.outs
    slab, grid, extents = extents_of(call, 0)
    kind, eps = kinds(call)[0], np.float32(call.attrs["eps"])
    planes = call.scratch[: scratch_infer(call)].view(np.float32)
    half = planes.size // 2
    shift, std = planes[:half], planes[half:]
    return [
        Launch(planes_kernel(kind, slab), grid, slab.threads, (x, shift, std, *extents, eps)),
        Launch(apply_kernel(kind, slab, True), grid, slab.threads, (x, gamma, beta, v, std, running, y, *extents, eps)),
    ]


def bind_grads(call: Call) -> list[Launch]:
    """One launch where all blocks fit on the GPU, else three: the sums of planes, those of channels, dx."""
    if call.tile is not None and call.tile.together:
        return [b0_held_grads.launch(call, "all")]
    (dy, x, gamma, v, shift, std, batch_shift, batch_std), (dx, dgamma, dbeta, dv) = call.ins, call.outs
    slab, grid, extents = extents_of(call, 1)
    n, c = call.in_shapes[0][:2]
    kind, N, every = kinds(call)[0], np.int32(n), n * c
    slabs, *sizes = extents
    sums = call.scratch[: scratch_grads(call)].view(np.float32)
    at = PARTIALS * every
    partials, own_sums, batch_sums = sums[:at], sums[at : at + every], sums[at + every :]
    rows = launch_rows(partials, (dbeta, dgamma, dv, batch_sums), n, c)
    if call.tile is not None:
        return [b0_held_grads.launch(call, "sums"), rows, b0_held_grads.launch(call, "apply")]
    args = (dy, x, gamma, v, shift, std, batch_shift, batch_std, own_sums, batch_sums, dx, slabs, N, *sizes)
    return [
        Launch(sums_kernel(kind, slab), grid, slab.threads, (dy, x, gamma, v, std, batch_std, partials, own_sums, slabs, N, *sizes)),
        rows,
        Launch(dgrad_kernel(kind, slab), grid, slab.threads, args),
    ]


def scratch_infer(call: Call) -> int:
    """Bytes of the statistics of every plane, where they leave the kernel."""
    n, c = call.in_shapes[0][:2]
    return 8 * n * c if call.tile is None else 0


def scratch_grads(call: Call) -> int:
    """Bytes of the sums of every plane, and of one sum of every channel."""
    if call.tile is not None:
        return b0_held_grads.scratch_grads(call)
    n, c = call.in_shapes[0][:2]
    return 4 * ((PARTIALS + 1) * n + 1) * c


def extents_of(call: Call, image: int) -> tuple[Slab, int, tuple[np.int32, ...]]:
    """The slab, the grid, and (slabs of an image, C, H·W, step_c, step_p)."""
    shape = call.in_shapes[image]
    slab = slab_of(shape, call.layout, 1)
    slabs = blocks(shape[1], slab.columns)
    return slab, shape[0] * slabs, tuple(np.int32(s) for s in (slabs, *steps(call)))


def candidates(call: Call, target: Target) -> list[Held]:
    """Slabs with which the launch fits on the GPU at once: of x, or of x and dy, or of x with dy read twice; then slabs for several launches.

    The simulator runs one block after another: there only the last.
    """
    shape, layout, backward = call.in_shapes[0], call.layout, call.op.direction == "grads"
    tensors = (2, 1) if backward else (1,)
    alone = call.op.direction == "infer" or target.simulated
    at_once = [] if alone else slabs_of(shape, layout, 1, tensors, target.multiprocessors, at_once=True)
    return [*at_once, *slabs_of(shape, layout, 1, tensors, target.multiprocessors)]


def tile(call: Call, target: Target) -> Held | None:
    """The first of `candidates`. The simulator runs a thread as a Python thread: there only a test asks for a slab to be held."""
    return None if target.simulated else next(iter(candidates(call, target)), None)


FPROP = Impl(bind_fprop, supports=maps.supports, tile=tile, candidates=candidates, traffic=traffic.b0_fprop)
INFER = Impl(bind_infer, scratch_infer, maps.supports, tile, candidates=candidates, traffic=traffic.b0_infer)
GRADS = Impl(bind_grads, scratch_grads, maps.supports, tile, candidates=candidates, traffic=traffic.b0_grads)
OPS = {Op("evonorm_b0", "fprop"): FPROP, Op("evonorm_b0", "infer"): INFER, Op("evonorm_b0", "grads"): GRADS}
