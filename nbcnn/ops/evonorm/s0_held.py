"""EvoNorm-S0 on slabs held in registers: forward and backward load every element once (held.py)."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from nbcnn.cuda import constant, cuda, f4, i4, i8, jit, u4
from nbcnn.ops.call import Call, Launch
from nbcnn.ops.evonorm.held import Held, joined, place_of, quads_of, spreads_of, sums_of, team_of, total_of
from nbcnn.ops.ptx.fast import LOG2E, exp2, reciprocal
from nbcnn.ops.ptx.grid import arrive, fresh
from nbcnn.ops.ptx.shuffle import WARP, warp_sum
from nbcnn.ops.sigmoid import divide
from nbcnn.ops.stored import kinds, scalar_io, vector_io, vector_load_if
from nbcnn.ops.windows import split

PARTIALS = 3
"""Sums of every plane that the gradients of the parameters are made of."""


@cache
def fprop_kernel(kind: str, layout: str, group: int, held: Held) -> Any:
    load, _ = scalar_io(kind)
    load4, store4 = vector_io(kind)
    load4_if = vector_load_if(kind)
    team = team_of(held, layout, group)
    place, quads, spread, join = place_of(team, held.channels), quads_of(team), spreads_of(team), joined(team)
    CHANNELS, GROUP, LANES, SLOTS, WIDE, FLOATS = held.channels, group, team.lanes, held.slots, team.wide, 4 * held.slots
    OWN, VALUES, STATISTICS, KEPT, PER = 1 if WIDE else 0, team.values, team.statistics, 3 * team.statistics * team.joint, 4 // team.values

    @jit(launch_bounds=(held.threads, held.blocks))
    def evonorm_s0_fprop_kernel(x, gamma, beta, v, y, shift, std, C, HW, eps):
        """y = γ·x·σ(v·x)/s + β; shift, std of every group.

        grid (slabs, N), block up to 512; owns: a block a slab of whole groups of an image, a thread up to 8 quads, in registers.
        shared 12 bytes a group and warp; moves 8·x bytes. source: arXiv:2004.02967.
        """
        kept = cuda.shared.array(KEPT, f4)
        scales = cuda.shared.array(STATISTICS, f4)
        held_x = cuda.local.array(FLOATS, f4)
        leads = cuda.local.array(VALUES, f4)
        means = cuda.local.array(VALUES, f4)
        squares = cuda.local.array(VALUES, f4)
        factors = cuda.local.array(LANES, f4)
        biases = cuda.local.array(LANES, f4)
        slopes = cuda.local.array(LANES, f4)
        tid = i4(cuda.threadIdx.x)
        n, slab = i4(cuda.blockIdx.y), i4(cuda.blockIdx.x)
        first = i4(slab * i4(CHANNELS))
        channel, _, rank = place(tid)
        start, step, tail = quads(n, i4(first + channel), rank, C, HW)
        image, groups = i4(n * C * HW), i4(u4(C) // u4(GROUP))
        for i in range(SLOTS - 1):
            held_x[4 * i], held_x[4 * i + 1], held_x[4 * i + 2], held_x[4 * i + 3] = load4(x, start + i8(i) * step)
        i = SLOTS - 1
        held_x[4 * i], held_x[4 * i + 1], held_x[4 * i + 2], held_x[4 * i + 3] = load4_if(x, start + i8(i) * step, tail)
        for value in range(VALUES):
            own = i4(first + i4(u4(channel + i4(value * PER)) // u4(GROUP)) * i4(GROUP))
            leads[value] = load(x, u4(image + (own if WIDE else own * HW)))
        for e in range(LANES):
            own = u4(first + channel + i4(e))
            factors[e], biases[e], slopes[e] = gamma[own], beta[own], v[own] * f4(-LOG2E)
        spread(kept, means, squares, held_x, leads, tail, rank, HW if WIDE else i4(HW >> i4(2)))
        cuda.syncthreads()
        elements, statistic = f4(GROUP) * f4(HW), i4(0)
        if tid < i4(STATISTICS) or not WIDE:
            if WIDE:
                statistic = tid
            mean, variance = join(kept, statistic, elements)
            s = f4(math.sqrt(variance + eps))
            squares[0] = divide(f4(1), s)
            if tid < i4(STATISTICS):
                at = u4(n * groups + i4(u4(first) // u4(GROUP)) + tid)
                shift[at], std[at] = mean, s
                if WIDE:
                    scales[tid] = squares[0]
        if WIDE:
            cuda.syncthreads()
            for value in range(VALUES):
                squares[value] = scales[u4(u4(channel + i4(value * PER)) // u4(GROUP))]
        for e in range(LANES):
            factors[e] *= squares[e // PER]
        for i in range(SLOTS):
            if i < SLOTS - 1 or tail:
                for e in range(4):
                    value = held_x[4 * i + e]
                    sigma = reciprocal(f4(1) + exp2(slopes[e * OWN] * value))
                    held_x[4 * i + e] = factors[e * OWN] * value * sigma + biases[e * OWN]
                store4(y, start + i8(i) * step, held_x[4 * i], held_x[4 * i + 1], held_x[4 * i + 2], held_x[4 * i + 3])

    return evonorm_s0_fprop_kernel


@cache
def grads_kernel(kind: str, layout: str, group: int, held: Held) -> Any:
    load, _ = scalar_io(kind)
    load4, store4 = vector_io(kind)
    load4_if = vector_load_if(kind)
    team = team_of(held, layout, group)
    place, quads, add, total_at = place_of(team, held.channels), quads_of(team), sums_of(team, PARTIALS), total_of(team)
    CHANNELS, GROUP, LANES, SLOTS, WIDE, FLOATS = held.channels, group, team.lanes, held.slots, team.wide, 4 * held.slots
    OWN, PARTS, ALL, WARPS, THREADS = 1 if WIDE else 0, PARTIALS * team.lanes, PARTIALS * held.channels, held.threads // WARP, held.threads
    SUMS, STATISTICS, VALUES, PER = PARTIALS * team.planes * team.warps, team.statistics, team.values, 4 // team.values
    TURNS = -(-ALL // WARPS)

    @jit(launch_bounds=(held.threads, held.blocks))
    def evonorm_s0_grads_kernel(dy, x, gamma, v, shift, std, dx, partials, dgamma, dbeta, dv, counters, N, C, HW):
        """dx, dgamma, dbeta, dv. Of every plane Σ g, Σ g·p/s, Σ h·x²σ(1−σ)/s go to partials (3,N,C); the last block of a slab's adds them.

        grid (slabs, N), block up to 512; owns: a block a slab of whole groups of an image, a thread up to 8 quads, in registers.
        shared 12 bytes a plane and warp; moves 12·x bytes. source: arXiv:2004.02967.
        """
        sums = cuda.shared.array(SUMS, f4)
        pulled = cuda.shared.array(STATISTICS, f4)
        last = cuda.shared.array(1, i4)
        held_x = cuda.local.array(FLOATS, f4)
        held_dy = cuda.local.array(FLOATS, f4)
        parts = cuda.local.array(PARTS, f4)
        factors = cuda.local.array(LANES, f4)
        slopes = cuda.local.array(LANES, f4)
        scales = cuda.local.array(VALUES, f4)
        leads = cuda.local.array(VALUES, f4)
        means = cuda.local.array(VALUES, f4)
        tid = i4(cuda.threadIdx.x)
        n, slab = i4(cuda.blockIdx.y), i4(cuda.blockIdx.x)
        first = i4(slab * i4(CHANNELS))
        channel, _, rank = place(tid)
        start, step, tail = quads(n, i4(first + channel), rank, C, HW)
        for i in range(SLOTS - 1):
            held_x[4 * i], held_x[4 * i + 1], held_x[4 * i + 2], held_x[4 * i + 3] = load4(x, start + i8(i) * step)
            held_dy[4 * i], held_dy[4 * i + 1], held_dy[4 * i + 2], held_dy[4 * i + 3] = load4(dy, start + i8(i) * step)
        i = SLOTS - 1
        held_x[4 * i], held_x[4 * i + 1], held_x[4 * i + 2], held_x[4 * i + 3] = load4_if(x, start + i8(i) * step, tail)
        held_dy[4 * i], held_dy[4 * i + 1], held_dy[4 * i + 2], held_dy[4 * i + 3] = load4_if(dy, start + i8(i) * step, tail)
        image, slab_group = i4(n * C * HW), i4(n * i4(u4(C) // u4(GROUP)) + i4(u4(first) // u4(GROUP)))
        for value in range(VALUES):
            of = i4(i4(u4(channel + i4(value * PER)) // u4(GROUP)))
            own = i4(first + of * i4(GROUP))
            scales[value] = std[u4(slab_group + of)]
            leads[value], means[value] = load(x, u4(image + (own if WIDE else own * HW))), shift[u4(slab_group + of)]
        for e in range(LANES):
            factors[e], slopes[e] = gamma[u4(first + channel + i4(e))], v[u4(first + channel + i4(e))]
        for value in range(VALUES):
            scales[value] = divide(f4(1), scales[value])
        for e in range(LANES):
            factors[e] *= scales[e // PER]
        for e in range(PARTS):
            parts[e] = f4(0)
        # What lies behind the plane is zero: it adds nothing.
        for i in range(SLOTS):
            for e in range(4):
                value, g, slope = held_x[4 * i + e], held_dy[4 * i + e], slopes[e * OWN]
                turn = exp2(-abs(slope * value) * f4(LOG2E))
                near = reciprocal(f4(1) + turn)
                far = turn * near
                sigma, rest = (far, near) if slope * value < f4(0) else (near, far)
                gp = g * value * sigma
                bend = value * rest
                parts[e * OWN] += g
                parts[LANES + e * OWN] += gp
                parts[2 * LANES + e * OWN] += gp * bend
                held_dy[4 * i + e] = factors[e * OWN] * g * (sigma + slope * sigma * bend)
        add(sums, parts)
        cuda.syncthreads()
        if tid < i4(STATISTICS) or not WIDE:
            # The pull of a group: Σ over its channels of γ·Σ g·p, over K·s³.
            of = tid if WIDE else i4(0)
            pull = f4(0)
            for j in range(GROUP):
                other = i4(of * i4(GROUP) + i4(j))
                pull += gamma[u4(first + other)] * total_at(sums, i4(CHANNELS) + other)
            scale = divide(f4(1), std[u4(slab_group + of)])
            pull = divide(pull * scale * scale * scale, f4(GROUP) * f4(HW))
            if WIDE:
                pulled[tid] = pull
            else:
                parts[0] = pull
        if tid >= i4(THREADS - WARP):
            # The last warp, which does not count the block in, as that takes a while: the sums that leave the block.
            for at in range(i4(tid - i4(THREADS - WARP)), i4(ALL), i4(WARP)):
                value, of = split(at, CHANNELS)
                total, scale = total_at(sums, at), divide(f4(1), std[u4(slab_group + i4(u4(of) // u4(GROUP)))])
                if value == i4(1):
                    total *= scale
                if value == i4(2):
                    total *= scale * gamma[u4(first + of)]
                partials[u4((value * C + first + of) * N + n)] = total
        done = arrive(counters, slab, N)
        if tid == i4(0):
            last[0] = done
        if WIDE:
            for value in range(VALUES):
                parts[value] = pulled[u4(u4(channel + i4(value * PER)) // u4(GROUP))]
        for i in range(SLOTS):
            if i < SLOTS - 1 or tail:
                for e in range(4):
                    held_dy[4 * i + e] -= parts[e // PER] * ((held_x[4 * i + e] - leads[e // PER]) - means[e // PER])
                store4(dx, start + i8(i) * step, held_dy[4 * i], held_dy[4 * i + 1], held_dy[4 * i + 2], held_dy[4 * i + 3])
        cuda.syncthreads()
        if last[0] == i4(1):
            warp, lane = split(tid, WARP)
            for turn in range(TURNS):
                at = i4(warp + i4(turn * WARPS))
                value, of = split(at, CHANNELS)
                own = u4(first + of)
                total = f4(0)
                for other in range(lane, N if at < i4(ALL) else i4(0), i4(WARP)):
                    total += fresh(partials, i4((value * C + first + of) * N + other))
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
    sizes = (np.int32(size) for size in (c, h * w))
    return [Launch(kernel, (slabs, n), held.threads, (*call.ins, *call.outs, *sizes, np.float32(call.attrs["eps"])))]


def bind_grads(call: Call) -> list[Launch]:
    """One launch."""
    (n, c, h, w), held = call.in_shapes[1], call.tile
    slabs = c // held.channels
    dx, dgamma, dbeta, dv = call.outs
    partials, counters = call.scratch[: 4 * PARTIALS * n * c].view(np.float32), constant(np.zeros(slabs, np.int32))
    kernel = grads_kernel(kinds(call)[0], call.layout, c // call.attrs["groups"], held)
    sizes = (np.int32(size) for size in (n, c, h * w))
    return [Launch(kernel, (slabs, n), held.threads, (*call.ins, dx, partials, dgamma, dbeta, dv, counters, *sizes))]
