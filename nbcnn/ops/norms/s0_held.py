"""EvoNorm-S0 on slabs held in registers: forward and backward load every element once (held.py)."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.device import constant
from nbcnn.gpu.language import cuda, f4, i4, jit, u4
from nbcnn.ops.activations.sigmoid import divide
from nbcnn.ops.kernel.call import Call, Launch
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.windows import split
from nbcnn.ops.norms.held import Held, adding, elements_of, frozen, joined, loading, place_of, spread_of, storing, team_of, total_of
from nbcnn.ops.ptx.fast import LOG2E, exp2, reciprocal
from nbcnn.ops.ptx.grid import arrive, fresh
from nbcnn.ops.ptx.shuffle import WARP, warp_sum

PARTIALS = 3
"""Sums of every plane that the gradients of the parameters are made of."""


@cache
def fprop_kernel(kind: str, layout: str, group: int, channels: int, held: Held) -> Any:
    load, _ = scalar_io(kind)
    team = team_of(held, layout, group, channels)
    place, elements, fill, put, spread, join = (
        place_of(team),
        elements_of(team),
        loading(kind, team),
        storing(kind, team),
        spread_of(team),
        joined(team),
    )
    CHANNELS, GROUP, WIDE, FLOATS, KEPT = held.channels, group, team.wide, team.floats, 3 * team.groups * team.joint

    @jit(launch_bounds=(held.threads, held.blocks))
    def evonorm_s0_fprop_kernel(x, gamma, beta, v, y, shift, std, C, HW, eps):
        """y = γ·x·σ(v·x)/s + β; shift, std of every group.

        grid (slabs, N), block up to 512; owns: a block a slab of whole groups of an image, a thread up to 32 pixels of a channel, in registers.
        shared 12 bytes a group and warp; moves 8·x bytes. source: arXiv:2004.02967.
        """
        kept = cuda.shared.array(KEPT, f4)
        values = cuda.local.array(FLOATS, f4)
        n, slab = i4(cuda.blockIdx.y), i4(cuda.blockIdx.x)
        first = i4(slab * i4(CHANNELS))
        channel, _, rank = place(i4(cuda.threadIdx.x))
        start, tail = elements(n, i4(first + channel), rank, C, HW)
        fill(values, x, start, tail)
        own, of = u4(first + channel), i4(u4(channel) // u4(GROUP))
        lead_at = i4(first + of * i4(GROUP))
        lead = load(x, u4(n * C * HW + (lead_at if WIDE else lead_at * HW)))
        factor, bias, slope = gamma[own], beta[own], v[own] * f4(-LOG2E)
        spread(kept, values, lead, rank, HW)
        cuda.syncthreads()
        mean, variance = join(kept, of, f4(GROUP) * f4(HW))
        s = f4(math.sqrt(variance + eps))
        if rank == i4(0) and channel == i4(of * i4(GROUP)):
            at = u4(n * i4(u4(C) // u4(GROUP)) + i4(u4(first) // u4(GROUP)) + of)
            shift[at], std[at] = mean, s
        factor = divide(factor, s)
        for j in range(FLOATS):
            value = values[j]
            values[j] = factor * value * reciprocal(f4(1) + exp2(slope * value)) + bias
        put(y, values, start, tail)

    return evonorm_s0_fprop_kernel


@cache
def grads_kernel(kind: str, layout: str, group: int, channels: int, held: Held) -> Any:
    load, _ = scalar_io(kind)
    team = team_of(held, layout, group, channels)
    place, elements, fill, put, add, total_at = (
        place_of(team),
        elements_of(team),
        loading(kind, team),
        storing(kind, team),
        adding(team),
        total_of(team),
    )
    CHANNELS, GROUP, WIDE, FLOATS, SUMS = held.channels, group, team.wide, team.floats, PARTIALS * team.planes * team.warps
    ALL, WARPS, THREADS = PARTIALS * held.channels, held.threads // WARP, held.threads
    TURNS = -(-ALL // WARPS)

    @jit(launch_bounds=(held.threads, held.blocks))
    def evonorm_s0_grads_kernel(dy, x, gamma, v, shift, std, dx, partials, dgamma, dbeta, dv, counters, N, C, HW):
        """dx, dgamma, dbeta, dv. Of every plane Σ g, Σ g·p/s, Σ h·x²σ(1−σ)/s go to partials (3,C,N); the last block of a slab's adds them.

        grid (slabs, N), block up to 512; owns: a block a slab of whole groups of an image, a thread up to 32 pixels of a channel, in registers.
        shared 12 bytes a plane and warp; moves 12·x bytes. source: arXiv:2004.02967.
        """
        sums = cuda.shared.array(SUMS, f4)
        last = cuda.shared.array(1, i4)
        values = cuda.local.array(FLOATS, f4)
        grads = cuda.local.array(FLOATS, f4)
        tid = i4(cuda.threadIdx.x)
        n, slab = i4(cuda.blockIdx.y), i4(cuda.blockIdx.x)
        first = i4(slab * i4(CHANNELS))
        channel, _, rank = place(tid)
        start, tail = elements(n, i4(first + channel), rank, C, HW)
        fill(values, x, start, tail)
        fill(grads, dy, start, tail)
        own, of = u4(first + channel), i4(u4(channel) // u4(GROUP))
        slab_group = i4(n * i4(u4(C) // u4(GROUP)) + i4(u4(first) // u4(GROUP)))
        lead_at = i4(first + of * i4(GROUP))
        lead, mean = load(x, u4(n * C * HW + (lead_at if WIDE else lead_at * HW))), shift[u4(slab_group + of)]
        slope, scale = v[own], divide(f4(1), std[u4(slab_group + of)])
        factor, sum_g, sum_p, sum_v = gamma[own] * scale, f4(0), f4(0), f4(0)
        # What lies behind the plane is zero: it adds nothing.
        for j in range(FLOATS):
            value, g = values[j], grads[j]
            z = slope * value
            e = exp2(-abs(z) * f4(LOG2E))
            near = reciprocal(f4(1) + e)
            far = e * near
            sigma, rest = (far, near) if z < f4(0) else (near, far)
            gp, bend = g * value * sigma, value * rest
            sum_g, sum_p, sum_v = sum_g + g, sum_p + gp, sum_v + gp * bend
            grads[j] = factor * g * (sigma + slope * sigma * bend)
        plane = i4(channel)
        add(sums, i4(0), plane, sum_g)
        add(sums, i4(1), plane, sum_p)
        add(sums, i4(2), plane, sum_v)
        cuda.syncthreads()
        if tid >= i4(THREADS - WARP):
            # The last warp, which does not count the block in, as that takes a while: the sums that leave the block.
            for at in range(i4(tid - i4(THREADS - WARP)), i4(ALL), i4(WARP)):
                which, other = split(at, CHANNELS)
                total, its_scale = total_at(sums, at), divide(f4(1), std[u4(slab_group + i4(u4(other) // u4(GROUP)))])
                if which == i4(1):
                    total *= its_scale
                if which == i4(2):
                    total *= its_scale * gamma[u4(first + other)]
                partials[u4((which * C + first + other) * N + n)] = total
        # The pull of a group: Σ over its channels of γ·Σ g·p, over K·s³.
        pull = f4(0)
        for j in range(GROUP):
            other = i4(of * i4(GROUP) + i4(j))
            pull += gamma[u4(first + other)] * total_at(sums, i4(CHANNELS) + other)
        pull = divide(pull * scale * scale * scale, f4(GROUP) * f4(HW))
        done = arrive(counters, slab, N)
        if tid == i4(0):
            last[0] = done
        for j in range(FLOATS):
            grads[j] -= pull * ((values[j] - lead) - mean)
        put(dx, grads, start, tail)
        cuda.syncthreads()
        if last[0] == i4(1):
            warp, lane = split(tid, WARP)
            for turn in range(TURNS):
                at = i4(warp + i4(turn * WARPS))
                which, other = split(at, CHANNELS)
                total = f4(0)
                for image in range(lane, N if at < i4(ALL) else i4(0), i4(WARP)):
                    total += fresh(partials, i4((which * C + first + other) * N + image))
                total = warp_sum(total)
                if lane == i4(0) and at < i4(ALL):
                    if which == i4(0):
                        dbeta[u4(first + other)] = total
                    elif which == i4(1):
                        dgamma[u4(first + other)] = total
                    else:
                        dv[u4(first + other)] = total

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
