"""EvoNorm-B0 backward on slabs held in registers (held.py).

"all"    everything in one launch: every block waits for the other planes of its channels, so it must fit on the GPU
"sums"   of planes; then rows.py adds them over the images, then
"apply"  dx from x, dy and the sums
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.device import constant
from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.activations.sigmoid import divide
from nbcnn.ops.kernel.call import Call, Launch
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.windows import split
from nbcnn.ops.norms.held import (
    Held,
    adding,
    block_position,
    frozen,
    grid_of,
    reaching,
    thread_group_of,
    total_of,
)
from nbcnn.ops.ptx.fast import larger, reciprocal
from nbcnn.ops.ptx.grid import receive, send
from nbcnn.ops.ptx.shuffle import WARP, warp_sum

PARTIALS = 5
"""Sums of every plane that the gradients are made of: four to add over the images, one that stays the plane's."""


@cache
def grads_kernel(kind: str, layout: str, channels: int, held: Held, stage: str) -> Any:
    load, _ = scalar_io(kind)
    threads = thread_group_of(held, layout, 1, channels)
    plane_of, elements, fill, put = reaching(kind, threads)
    add, total_at = adding(threads), total_of(threads)
    CHANNELS, IMAGES, WIDE, FLOATS, WARPS = held.channels, held.images, threads.wide, threads.floats, held.threads // WARP
    BOTH, PLANES, SUMS = held.tensors > 1, threads.planes, PARTIALS * threads.planes * threads.warps
    PASSES, TOGETHER, MAKES, APPLIES = -(-CHANNELS // WARPS), stage == "all", stage != "apply", stage != "sums"
    block = block_position(WIDE)

    @jit(launch_bounds=(held.threads, held.blocks))
    def evonorm_b0_grads_kernel(dy, x, gamma, v, shift, std, batch_shift, batch_std, dx, dgamma, dbeta, dv, partials, batch_sums, messages, N, C, HW):
        """dx, dgamma, dbeta, dv. Σ g, Σ g·x/d, Σ M·q·x, Σ (1−M)·q of planes go to the channel's other blocks in two messages per plane.

        In stages: these and Σ M·q in partials (5,N,C), and Σ (1−M)·q of channels in batch_sums.
        grid N/images × C/channels, block up to 512; owns: one block per slab, per thread up to 32 pixels of a channel, in registers.
        shared 20 bytes per plane and warp; moves 12·x bytes (16 if dy is read again, from L2; 20 in stages). source: arXiv:2004.02967.
        """
        sums = cuda.shared.array(SUMS, f4)
        pulls = cuda.shared.array(CHANNELS, f4)
        values = cuda.local.array(FLOATS, f4)
        grads = cuda.local.array(FLOATS, f4)
        tid = cuda.threadIdx.x
        slab, image_group = block()
        first = slab * CHANNELS
        channel, image, rank = plane_of(tid)
        n, own = image_group * IMAGES + image, first + channel
        plane = image * CHANNELS + channel
        start, tail = elements(n, own, rank, C, HW)
        fill(values, x, start, tail)
        fill(grads, dy, start, tail)
        at_channel, at_plane, lead_at = own, n * C + own, own if WIDE else own * HW
        factor, slope, s, least = gamma[at_channel], v[at_channel], std[at_plane], batch_std[at_channel]
        sequence, own_sum, batch_sum = 0, 0.0, 0.0
        if TOGETHER:
            sequence = messages[8 * (own * N + n) + 1] + 1
        if MAKES:
            sum_g, sum_x, sum_v, sum_batch, sum_own = 0.0, 0.0, 0.0, 0.0, 0.0
            # Behind the plane x and dy are zero, and add nothing.
            for j in range(FLOATS):
                value, g = values[j], grads[j]
                reach = slope * value + s
                scale = reciprocal(larger(reach, least))
                part = g * value * scale
                q = part * scale
                inside = 0.0 if reach <= least else q  # q also where one of the two is NaN, which then is in every sum
                sum_g, sum_x, sum_v = sum_g + g, sum_x + part, sum_v + inside * value
                sum_batch, sum_own = sum_batch + (q - inside), sum_own + inside
            add(sums, 0, plane, sum_g)
            add(sums, 1, plane, sum_x)
            add(sums, 2, plane, sum_v)
            add(sums, 3, plane, sum_batch)
            add(sums, 4, plane, sum_own)
            cuda.syncthreads()
            own_sum = -factor * total_at(sums, 4 * PLANES + plane)
            if rank == 0:
                sum_g, sum_x = total_at(sums, plane), total_at(sums, PLANES + plane)
                sum_v, sum_batch = -factor * total_at(sums, 2 * PLANES + plane), -factor * total_at(sums, 3 * PLANES + plane)
                if TOGETHER:
                    send(messages, 2 * (own * N + n), sequence, sum_batch, sum_g)
                    send(messages, 2 * (own * N + n) + 1, sequence, sum_x, sum_v)
                else:
                    every = N * C
                    partials[at_plane], partials[every + at_plane] = sum_g, sum_x
                    partials[2 * every + at_plane], partials[3 * every + at_plane] = sum_v, sum_batch
                    partials[4 * every + at_plane] = own_sum
        warp, lane = split(tid, WARP)
        if TOGETHER:
            for each in range(PASSES):
                at = warp + each * WARPS
                its, total = first + min(at, CHANNELS - 1), 0.0
                for other in range(lane, N if at < CHANNELS else 0, WARP):
                    pull, _ = receive(messages, 2 * (its * N + other), sequence)
                    total += pull
                total = warp_sum(total)
                if lane == 0 and at < CHANNELS:
                    pulls[at] = total
            cuda.syncthreads()
            batch_sum = pulls[channel]
        if APPLIES:
            if not TOGETHER:
                own_sum, batch_sum = partials[4 * N * C + at_plane], batch_sums[at_channel]
            # The numbers are read again: else the compiler keeps what it made of them and every x above in registers.
            factor, slope, s, least = gamma[at_channel], v[at_channel], std[at_plane], batch_std[at_channel]
            lead, origin = load(x, n * C * HW + lead_at), load(x, lead_at)
            pull, batch_pull = divide(own_sum, HW * s), divide(batch_sum, f4(N) * HW * least)
            both, offset = pull + batch_pull, pull * shift[at_plane] + batch_pull * (batch_shift[at_channel] - (lead - origin))
            if not BOTH:
                fill(grads, dy, start, tail)
            for j in range(FLOATS):
                value, h = values[j], factor * grads[j]
                reach = slope * value + s
                scale = reciprocal(larger(reach, least))
                values[j] = h * scale * (s * scale if reach > least else 1.0) + (both * (value - lead) - offset)
            put(dx, values, start, tail)
        if TOGETHER and image_group == 0:
            for each in range(PASSES):
                at = warp + each * WARPS
                its, all_g, all_x, all_v = first + min(at, CHANNELS - 1), 0.0, 0.0, 0.0
                for other in range(lane, N if at < CHANNELS else 0, WARP):
                    message = 2 * (its * N + other)
                    _, one_g = receive(messages, message, sequence)
                    one_x, one_v = receive(messages, message + 1, sequence)
                    all_g, all_x, all_v = all_g + one_g, all_x + one_x, all_v + one_v
                all_g, all_x, all_v = warp_sum(all_g), warp_sum(all_x), warp_sum(all_v)
                if lane == 0 and at < CHANNELS:
                    dbeta[its], dgamma[its], dv[its] = all_g, all_x, all_v

    return evonorm_b0_grads_kernel


def scratch_grads(call: Call) -> int:
    """Bytes of five sums of every plane and one of every channel, in stages; the one launch keeps its messages."""
    n, c = call.in_shapes[0][:2]
    return 0 if call.tile.together else 4 * (PARTIALS * n + 1) * c


def launch(call: Call, stage: str) -> Launch:
    """The launch of one stage of evonorm_b0_grads."""
    (n, c, h, w), held = call.in_shapes[1], call.tile
    slabs, image_groups, together = c // held.channels, n // held.images, stage == "all"
    dx = call.outs[0]
    sums = dx if together else call.scratch[: scratch_grads(call)].view(np.float32)  # the one launch touches neither
    partials, batch_sums = (sums, sums) if together else (sums[: PARTIALS * n * c], sums[PARTIALS * n * c :])
    messages = constant(np.zeros(8 * n * c if together else 1, np.int32))
    args = (*call.ins, *call.outs, partials, batch_sums, messages, *(np.int32(size) for size in (n, c, h * w)))
    grid = grid_of(call.layout, slabs, image_groups)
    return Launch(grads_kernel(kinds(call)[0], call.layout, frozen(call.layout, c), held, stage), grid, held.threads, args, together=together)
