"""EvoNorm-S0 on slabs held in registers: forward and backward load every element once (held.py)."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from nbcnn.cuda import constant, cuda, f4, i4, i8, jit
from nbcnn.ops.call import Call, Launch
from nbcnn.ops.evonorm.held import Held, group_value, place_of, plane_sums, quads_of, shared_floats, team_of
from nbcnn.ops.evonorm.sigmoid import both_sides
from nbcnn.ops.ptx.grid import arrive, fresh
from nbcnn.ops.ptx.shuffle import WARP, warp_sum
from nbcnn.ops.stored import kinds, scalar_io, vector_io
from nbcnn.ops.windows import split

PARTIALS = 3
"""Sums of every plane that the gradients of the parameters are made of."""


@cache
def fprop_kernel(kind: str, layout: str, group: int, held: Held) -> Any:
    load, _ = scalar_io(kind)
    load4, store4 = vector_io(kind)
    team = team_of(held, layout, group)
    place, quads, sums_of, in_group = place_of(team, held.channels), quads_of(team), plane_sums(team, 1), group_value(team)
    SUMS, TOTALS = shared_floats(team, 1)
    CHANNELS, GROUP, LANES, SLOTS, WIDE, FLOATS = held.channels, group, team.lanes, held.slots, team.wide, 4 * held.slots
    OWN = 1 if WIDE else 0

    @jit(launch_bounds=(held.threads, held.blocks))
    def evonorm_s0_fprop_kernel(x, gamma, beta, v, y, shift, std, slabs, C, HW, eps):
        """y = γ·x·σ(v·x)/s + β; shift, std of every group.

        grid N·slabs, block up to 512; owns: a block a slab of whole groups of an image, a thread up to 8 quads, in registers.
        shared 4 bytes a plane and warp; moves 8·x bytes. source: arXiv:2004.02967.
        """
        sums = cuda.shared.array(SUMS, f4)
        totals = cuda.shared.array(TOTALS, f4)
        held_x = cuda.local.array(FLOATS, f4)
        parts = cuda.local.array(LANES, f4)
        leads = cuda.local.array(LANES, f4)
        means = cuda.local.array(LANES, f4)
        centres = cuda.local.array(LANES, f4)
        tid = i4(cuda.threadIdx.x)
        n, slab = split(i4(cuda.blockIdx.x), slabs)
        first = i4(slab * i4(CHANNELS))
        channel, _, rank = place(tid)
        start, step, tail = quads(n, i4(first + channel), rank, C, HW)
        for i in range(SLOTS):
            at = start + i8(i) * step if i < SLOTS - 1 or tail else i8(0)
            held_x[4 * i], held_x[4 * i + 1], held_x[4 * i + 2], held_x[4 * i + 3] = load4(x, at)
        image = i4(n * C * HW)
        for e in range(LANES):
            own = i4(first + (channel + i4(e)) // i4(GROUP) * i4(GROUP))
            leads[e] = load(x, i4(image + (own if WIDE else own * HW)))
            parts[e] = f4(0)
        for i in range(SLOTS):
            if i < SLOTS - 1 or tail:
                for e in range(4):
                    parts[e * OWN] += held_x[4 * i + e] - leads[e * OWN]
        sums_of(sums, totals, parts)
        elements = f4(GROUP) * f4(HW)
        for e in range(LANES):
            means[e] = in_group(totals, i4(channel + i4(e))) / elements
            centres[e] = leads[e] + means[e]
            parts[e] = f4(0)
        for i in range(SLOTS):
            if i < SLOTS - 1 or tail:
                for e in range(4):
                    centred = held_x[4 * i + e] - centres[e * OWN]
                    parts[e * OWN] += centred * centred
        sums_of(sums, totals, parts)
        groups = i4(C // i4(GROUP))
        for e in range(LANES):
            s = f4(math.sqrt(in_group(totals, i4(channel + i4(e))) / elements + eps))
            own = i4(channel + i4(e))
            if rank == i4(0) and own % i4(GROUP) == i4(0):
                at = i4(n * groups + (first + own) // i4(GROUP))
                shift[at] = means[e]
                std[at] = s
            parts[e] = gamma[first + own] / s
            leads[e] = beta[first + own]
            means[e] = v[first + own]
        for i in range(SLOTS):
            if i < SLOTS - 1 or tail:
                for e in range(4):
                    value = held_x[4 * i + e]
                    sigma, _ = both_sides(means[e * OWN] * value)
                    held_x[4 * i + e] = parts[e * OWN] * value * sigma + leads[e * OWN]
                store4(y, start + i8(i) * step, held_x[4 * i], held_x[4 * i + 1], held_x[4 * i + 2], held_x[4 * i + 3])

    return evonorm_s0_fprop_kernel


@cache
def grads_kernel(kind: str, layout: str, group: int, held: Held) -> Any:
    load, _ = scalar_io(kind)
    load4, store4 = vector_io(kind)
    team = team_of(held, layout, group)
    place, quads, sums_of = place_of(team, held.channels), quads_of(team), plane_sums(team, PARTIALS)
    SUMS, TOTALS = shared_floats(team, PARTIALS)
    CHANNELS, GROUP, LANES, SLOTS, WIDE, FLOATS = held.channels, group, team.lanes, held.slots, team.wide, 4 * held.slots
    OWN, PARTS, ALL, WARPS, THREADS = 1 if WIDE else 0, PARTIALS * team.lanes, PARTIALS * held.channels, held.threads // WARP, held.threads
    TURNS = -(-ALL // WARPS)

    @jit(launch_bounds=(held.threads, held.blocks))
    def evonorm_s0_grads_kernel(dy, x, gamma, v, shift, std, dx, partials, dgamma, dbeta, dv, counters, slabs, N, C, HW):
        """dx, dgamma, dbeta, dv. Of every plane Σ g, Σ g·p/s, Σ h·x²σ(1−σ)/s go to partials (3,N,C); the last block of a slab's adds them.

        grid N·slabs, block up to 512; owns: a block a slab of whole groups of an image, a thread up to 8 quads, in registers.
        shared 12 bytes a plane and warp; moves 12·x bytes. source: arXiv:2004.02967.
        """
        sums = cuda.shared.array(SUMS, f4)
        totals = cuda.shared.array(TOTALS, f4)
        last = cuda.shared.array(1, i4)
        held_x = cuda.local.array(FLOATS, f4)
        held_dy = cuda.local.array(FLOATS, f4)
        parts = cuda.local.array(PARTS, f4)
        factors = cuda.local.array(LANES, f4)
        slopes = cuda.local.array(LANES, f4)
        leads = cuda.local.array(LANES, f4)
        pulls = cuda.local.array(LANES, f4)
        tid = i4(cuda.threadIdx.x)
        n, slab = split(i4(cuda.blockIdx.x), slabs)
        first = i4(slab * i4(CHANNELS))
        channel, _, rank = place(tid)
        start, step, tail = quads(n, i4(first + channel), rank, C, HW)
        for i in range(SLOTS):
            at = start + i8(i) * step if i < SLOTS - 1 or tail else i8(0)
            held_x[4 * i], held_x[4 * i + 1], held_x[4 * i + 2], held_x[4 * i + 3] = load4(x, at)
            held_dy[4 * i], held_dy[4 * i + 1], held_dy[4 * i + 2], held_dy[4 * i + 3] = load4(dy, at)
        image, groups = i4(n * C * HW), i4(C // i4(GROUP))
        for e in range(LANES):
            own = i4(first + channel + i4(e))
            of_group = i4(own // i4(GROUP))
            scale = f4(1) / std[n * groups + of_group]
            leads[e] = load(x, i4(image + (of_group * i4(GROUP) if WIDE else of_group * i4(GROUP) * HW)))
            factors[e] = gamma[own] * scale
            slopes[e] = v[own]
        for e in range(PARTS):
            parts[e] = f4(0)
        for i in range(SLOTS):
            if i < SLOTS - 1 or tail:
                for e in range(4):
                    value, g, slope = held_x[4 * i + e], held_dy[4 * i + e], slopes[e * OWN]
                    sigma, rest = both_sides(slope * value)
                    gp = g * value * sigma
                    parts[e * OWN] += g
                    parts[LANES + e * OWN] += gp
                    parts[2 * LANES + e * OWN] += gp * value * rest
                    held_dy[4 * i + e] = factors[e * OWN] * g * (sigma + slope * value * sigma * rest)
        sums_of(sums, totals, parts)
        for e in range(LANES):
            # The pull of a group: Σ over its channels of γ·Σ g·p, over K·s³.
            own = i4(channel + i4(e))
            at = i4(n * groups + (first + own) // i4(GROUP))
            scale = f4(1) / std[at]
            pull = f4(0)
            for j in range(GROUP):
                other = i4(own // i4(GROUP) * i4(GROUP) + i4(j))
                pull += gamma[first + other] * totals[i4(CHANNELS) + other]
            pulls[e] = pull * scale * scale * scale / (f4(GROUP) * f4(HW))
            slopes[e] = shift[at]
        for i in range(SLOTS):
            if i < SLOTS - 1 or tail:
                for e in range(4):
                    held_dy[4 * i + e] -= pulls[e * OWN] * (held_x[4 * i + e] - leads[e * OWN] - slopes[e * OWN])
                store4(dx, start + i8(i) * step, held_dy[4 * i], held_dy[4 * i + 1], held_dy[4 * i + 2], held_dy[4 * i + 3])
        for at in range(tid, i4(ALL), i4(THREADS)):
            value, own = i4(at // i4(CHANNELS)), i4(first + at % i4(CHANNELS))
            scale = f4(1) / std[n * groups + own // i4(GROUP)]
            total = totals[at]
            if value == i4(1):
                total *= scale
            if value == i4(2):
                total *= scale * gamma[own]
            partials[(value * N + n) * C + own] = total
        done = arrive(counters, slab, N)
        if tid == i4(0):
            last[0] = done
        cuda.syncthreads()
        if last[0] == i4(1):
            lane = i4(tid % i4(WARP))
            for turn in range(TURNS):
                at = i4(tid // i4(WARP) + i4(turn * WARPS))
                value, own = i4(at // i4(CHANNELS)), i4(first + at % i4(CHANNELS))
                total = f4(0)
                for image_at in range(lane, N if at < i4(ALL) else i4(0), i4(WARP)):
                    total += fresh(partials, i4((value * N + image_at) * C + own))
                total = warp_sum(total)
                if lane == i4(0) and at < i4(ALL):
                    if value == i4(0):
                        dbeta[own] = total
                    elif value == i4(1):
                        dgamma[own] = total
                    else:
                        dv[own] = total

    return evonorm_s0_grads_kernel


def bind_fprop(call: Call) -> list[Launch]:
    """One launch."""
    (n, c, h, w), held = call.in_shapes[0], call.tile
    slabs = c // held.channels
    kernel = fprop_kernel(kinds(call)[0], call.layout, c // call.attrs["groups"], held)
    sizes = (np.int32(size) for size in (slabs, c, h * w))
    return [Launch(kernel, n * slabs, held.threads, (*call.ins, *call.outs, *sizes, np.float32(call.attrs["eps"])))]


def bind_grads(call: Call) -> list[Launch]:
    """One launch."""
    (n, c, h, w), held = call.in_shapes[1], call.tile
    slabs = c // held.channels
    dx, dgamma, dbeta, dv = call.outs
    partials, counters = call.scratch[: 4 * PARTIALS * n * c].view(np.float32), constant(np.zeros(2 * slabs, np.int32))
    kernel = grads_kernel(kinds(call)[0], call.layout, c // call.attrs["groups"], held)
    sizes = (np.int32(size) for size in (slabs, n, c, h * w))
    return [Launch(kernel, n * slabs, held.threads, (*call.ins, dx, partials, dgamma, dbeta, dv, counters, *sizes))]
