"""EvoNorm-S0 on slabs held in registers: forward and backward load every element once (held.py)."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.device import constant
from nbcnn.gpu.language import cuda, f4, i4, jit
from nbcnn.ops.activations.sigmoid import divide
from nbcnn.ops.kernel.call import Call, Launch
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.windows import split
from nbcnn.ops.norms.held import Held, adding, frozen, joined, reaching, spread_of, thread_group_of, total_of
from nbcnn.ops.norms.plane import deviation_of
from nbcnn.ops.ptx.fast import LOG2E, exp2, reciprocal
from nbcnn.ops.ptx.grid import arrive, fresh
from nbcnn.ops.ptx.shuffle import WARP, warp_sum

PARTIALS = 3
"""Sums of every plane that the gradients of the parameters are made of."""


@cache
def fprop_kernel(kind: str, layout: str, group: int, channels: int, held: Held) -> Any:
    load, _ = scalar_io(kind)
    threads = thread_group_of(held, layout, group, channels)
    plane_of, elements, fill, put = reaching(kind, threads)
    spread, join = spread_of(threads), joined(threads)
    CHANNELS, GROUP, WIDE, FLOATS, KEPT = held.channels, group, threads.wide, threads.floats, 3 * threads.groups * threads.joint

    @jit(launch_bounds=(held.threads, held.blocks))
    def evonorm_s0_fprop_kernel(x, gamma, beta, v, y, shift, std, C, HW, eps):
        """y = γ·x·σ(v·x)/s + β; shift, std of every group.

        grid (slabs, N), block up to 512; owns: one block per slab of whole groups of an image, per thread up to 32 pixels of a channel, in registers.
        shared 12 bytes per group and warp; moves 8·x bytes. source: arXiv:2004.02967.
        """
        kept = cuda.shared.array(KEPT, f4)
        values = cuda.local.array(FLOATS, f4)
        n, slab = cuda.blockIdx.y, cuda.blockIdx.x
        first = slab * CHANNELS
        channel, _, rank = plane_of(cuda.threadIdx.x)
        start, tail = elements(n, first + channel, rank, C, HW)
        fill(values, x, start, tail)
        own, of = first + channel, channel // GROUP
        lead_at = first + of * GROUP
        lead = load(x, n * C * HW + (lead_at if WIDE else lead_at * HW))
        factor, bias, slope = gamma[own], beta[own], v[own] * -LOG2E
        spread(kept, values, lead, rank, HW)
        cuda.syncthreads()
        mean, variance = join(kept, of, f4(GROUP) * HW)
        s = deviation_of(variance + eps)
        if rank == 0 and channel == of * GROUP:
            at = n * (C // GROUP) + first // GROUP + of
            shift[at], std[at] = mean, s
        factor = divide(factor, s)
        for j in range(FLOATS):
            value = values[j]
            values[j] = factor * value * reciprocal(1.0 + exp2(slope * value)) + bias
        put(y, values, start, tail)

    return evonorm_s0_fprop_kernel


@cache
def grads_kernel(kind: str, layout: str, group: int, channels: int, held: Held) -> Any:
    load, _ = scalar_io(kind)
    threads = thread_group_of(held, layout, group, channels)
    plane_of, elements, fill, put = reaching(kind, threads)
    add, total_at = adding(threads), total_of(threads)
    CHANNELS, GROUP, WIDE, FLOATS, SUMS = (
        held.channels,
        group,
        threads.wide,
        threads.floats,
        PARTIALS * threads.planes * threads.warps,
    )
    ALL, WARPS, THREADS = PARTIALS * held.channels, held.threads // WARP, held.threads
    PASSES = -(-ALL // WARPS)

    @jit(launch_bounds=(held.threads, held.blocks))
    def evonorm_s0_grads_kernel(dy, x, gamma, v, shift, std, dx, partials, dgamma, dbeta, dv, counters, N, C, HW):
        """dx, dgamma, dbeta, dv. Of every plane Σ g, Σ g·p/s, Σ h·x²σ(1−σ)/s go to partials (3,C,N); the last block of a slab's adds them.

        grid (slabs, N), block up to 512; owns: one block per slab of whole groups of an image, per thread up to 32 pixels of a channel, in registers.
        shared 12 bytes per plane and warp; moves 12·x bytes. source: arXiv:2004.02967.
        """
        sums = cuda.shared.array(SUMS, f4)
        last = cuda.shared.array(1, i4)
        values = cuda.local.array(FLOATS, f4)
        grads = cuda.local.array(FLOATS, f4)
        tid = cuda.threadIdx.x
        n, slab = cuda.blockIdx.y, cuda.blockIdx.x
        first = slab * CHANNELS
        channel, _, rank = plane_of(tid)
        start, tail = elements(n, first + channel, rank, C, HW)
        fill(values, x, start, tail)
        fill(grads, dy, start, tail)
        own, of = first + channel, channel // GROUP
        slab_group = n * (C // GROUP) + first // GROUP
        lead_at = first + of * GROUP
        lead, mean = load(x, n * C * HW + (lead_at if WIDE else lead_at * HW)), shift[slab_group + of]
        slope, scale = v[own], divide(1.0, std[slab_group + of])
        factor, sum_g, sum_p, sum_v = gamma[own] * scale, 0.0, 0.0, 0.0
        # What lies behind the plane is zero: it adds nothing.
        for j in range(FLOATS):
            value, g = values[j], grads[j]
            z = slope * value
            e = exp2(-abs(z) * LOG2E)
            near = reciprocal(1.0 + e)
            far = e * near
            sigma, rest = (far, near) if z < 0.0 else (near, far)
            gp, bend = g * value * sigma, value * rest
            sum_g, sum_p, sum_v = sum_g + g, sum_p + gp, sum_v + gp * bend
            grads[j] = factor * g * (sigma + slope * sigma * bend)
        plane = channel
        add(sums, 0, plane, sum_g)
        add(sums, 1, plane, sum_p)
        add(sums, 2, plane, sum_v)
        cuda.syncthreads()
        if tid >= THREADS - WARP:
            # The last warp, which does not count the block in, as that takes a while: the sums that leave the block.
            for at in range(tid - (THREADS - WARP), ALL, WARP):
                which, other = split(at, CHANNELS)
                total, its_scale = total_at(sums, at), divide(1.0, std[slab_group + other // GROUP])
                if which == 1:
                    total *= its_scale
                if which == 2:
                    total *= its_scale * gamma[first + other]
                partials[(which * C + first + other) * N + n] = total
        # The pull of a group: Σ over its channels of γ·Σ g·p, over K·s³.
        pull = 0.0
        for j in range(GROUP):
            other = of * GROUP + j
            pull += gamma[first + other] * total_at(sums, CHANNELS + other)
        pull = divide(pull * scale * scale * scale, f4(GROUP) * HW)
        done = arrive(counters, slab, N)
        if tid == 0:
            last[0] = done
        for j in range(FLOATS):
            grads[j] -= pull * ((values[j] - lead) - mean)
        put(dx, grads, start, tail)
        cuda.syncthreads()
        if last[0] == 1:
            warp, lane = split(tid, WARP)
            for each in range(PASSES):
                at = warp + each * WARPS
                which, other = split(at, CHANNELS)
                total = 0.0
                for image in range(lane, N if at < ALL else 0, WARP):
                    total += fresh(partials, (which * C + first + other) * N + image)
                total = warp_sum(total)
                if lane == 0 and at < ALL:
                    if which == 0:
                        dbeta[first + other] = total
                    elif which == 1:
                        dgamma[first + other] = total
                    else:
                        dv[first + other] = total

    return evonorm_s0_grads_kernel


def bind_fprop(call: Call) -> list[Launch]:
    """One launch."""
    (n, c, h, w), held = call.in_shapes[0], call.tile
    slabs = c // held.channels
    kernel = fprop_kernel(kinds(call)[0], call.layout, c // call.attrs["groups"], frozen(call.layout, c), held)
    sizes = (np.int32(size) for size in (c, h * w))
    return [Launch(kernel, (slabs, n), held.threads, (*call.ins, *call.outs, *sizes, np.float32(call.attrs["eps"])))]


def bind_grads(call: Call) -> list[Launch]:
    """One launch."""
    (n, c, h, w), held = call.in_shapes[1], call.tile
    slabs = c // held.channels
    dx, dgamma, dbeta, dv = call.outs
    partials, counters = call.scratch[: 4 * PARTIALS * n * c].view(np.float32), constant(np.zeros(slabs, np.int32))
    kernel = grads_kernel(kinds(call)[0], call.layout, c // call.attrs["groups"], frozen(call.layout, c), held)
    sizes = (np.int32(size) for size in (n, c, h * w))
    return [Launch(kernel, (slabs, n), held.threads, (*call.ins, dx, partials, dgamma, dbeta, dv, counters, *sizes))]
