"""EvoNorm-B0 backward on slabs held in registers (held.py).

"all"    everything in one launch: its blocks meet once, where a channel's sums are put together, so it must fit on the GPU
"sums"   of planes; then rows.py adds them over the images, then
"apply"  dx from x, dy and the sums
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from nbcnn.cuda import constant, cuda, f4, i4, i8, jit, u4
from nbcnn.ops.call import Call, Launch
from nbcnn.ops.evonorm.held import Held, place_of, quads_of, sums_of, team_of, total_of
from nbcnn.ops.ptx.fast import reciprocal
from nbcnn.ops.ptx.grid import receive, send
from nbcnn.ops.ptx.shuffle import WARP, warp_sum
from nbcnn.ops.sigmoid import divide
from nbcnn.ops.stored import kinds, scalar_io, vector_io, vector_load_if
from nbcnn.ops.windows import split

PARTIALS = 5
"""Sums of every plane that the gradients are made of: four to add over the images, one that stays the plane's."""

OTHERS = {"NCHW": 40, "NHWC": 72}
"""Registers of a thread besides what it holds; in NHWC it has twenty sums and sixteen numbers of its channels."""


@cache
def grads_kernel(kind: str, layout: str, held: Held, stage: str) -> Any:
    load, _ = scalar_io(kind)
    load4, store4 = vector_io(kind)
    load4_if = vector_load_if(kind)
    team = team_of(held, layout, 1)
    place, quads, add, total_at = place_of(team, held.channels), quads_of(team), sums_of(team, PARTIALS), total_of(team)
    CHANNELS, IMAGES, LANES, SLOTS, WIDE, FLOATS = held.channels, held.images, team.lanes, held.slots, team.wide, 4 * held.slots
    OWN, WARPS, PARTS, PLANES = 1 if WIDE else 0, held.threads // WARP, PARTIALS * team.lanes, team.planes
    BOTH, FLOATS_DY, SUMS = held.tensors > 1, 4 * held.slots if held.tensors > 1 else 4, PARTIALS * team.planes * team.warps
    TURNS, TOGETHER, MAKES, APPLIES = -(-CHANNELS // WARPS), stage == "all", stage != "apply", stage != "sums"

    @jit(launch_bounds=(held.threads, held.blocks))
    def evonorm_b0_grads_kernel(dy, x, gamma, v, shift, std, batch_shift, batch_std, dx, dgamma, dbeta, dv, partials, batch_sums, packets, N, C, HW):
        """dx, dgamma, dbeta, dv. Σ g, Σ g·x/d, Σ M·q·x, Σ (1−M)·q of planes go to the channel's other blocks in two packets a plane.

        In stages: these and Σ M·q in partials (5,N,C), and Σ (1−M)·q of channels in batch_sums.
        grid (C/channels, N/images), block up to 512; owns: a block a slab, a thread up to 8 quads, in registers.
        shared 20 bytes a plane and warp; moves 12·x bytes (16 if dy is read again, from L2; 20 in stages). source: arXiv:2004.02967.
        """
        sums = cuda.shared.array(SUMS, f4)
        own_sums = cuda.shared.array(PLANES, f4)
        pulls = cuda.shared.array(CHANNELS, f4)
        held_x = cuda.local.array(FLOATS, f4)
        held_dy = cuda.local.array(FLOATS_DY, f4)
        parts = cuda.local.array(PARTS, f4)
        factors = cuda.local.array(LANES, f4)
        slopes = cuda.local.array(LANES, f4)
        owns = cuda.local.array(LANES, f4)
        leasts = cuda.local.array(LANES, f4)
        tid = i4(cuda.threadIdx.x)
        slab, party = i4(cuda.blockIdx.x), i4(cuda.blockIdx.y)
        first = i4(slab * i4(CHANNELS))
        channel, image, rank = place(tid)
        n = i4(party * i4(IMAGES) + image)
        plane = i4(image * i4(CHANNELS) + channel)
        start, step, tail = quads(n, i4(first + channel), rank, C, HW)
        for i in range(SLOTS):
            at, there = start + i8(i) * step, i4(1) if i < SLOTS - 1 or tail else i4(0)
            held_x[4 * i], held_x[4 * i + 1], held_x[4 * i + 2], held_x[4 * i + 3] = load4_if(x, at, there)
            if BOTH:
                held_dy[4 * i], held_dy[4 * i + 1], held_dy[4 * i + 2], held_dy[4 * i + 3] = load4_if(dy, at, there)
        # The thread that speaks for a plane: of a team in NCHW, of a channel in NHWC.
        speaks = tid < i4(CHANNELS) if WIDE else rank == i4(0)
        spoken = i4(first + (min(tid, i4(CHANNELS - 1)) if WIDE else channel))
        turn, factor = i4(0), gamma[u4(spoken)]
        if TOGETHER:
            turn = i4(packets[u4(i4(8) * (spoken * N + n) + i4(1))] + i4(1))
        if MAKES:
            for e in range(LANES):
                own = u4(first + channel + i4(e))
                slopes[e], owns[e], leasts[e] = v[own], std[u4(u4(n * C) + own)], batch_std[own]
            for e in range(PARTS):
                parts[e] = f4(0)
            for i in range(SLOTS):
                if not BOTH:
                    there = i4(1) if i < SLOTS - 1 or tail else i4(0)
                    held_dy[0], held_dy[1], held_dy[2], held_dy[3] = load4_if(dy, start + i8(i) * step, there)
                # Behind the plane x and dy are zero, and add nothing.
                for e in range(4):
                    value, g = held_x[4 * i + e], held_dy[4 * i * BOTH + e]
                    reach = slopes[e * OWN] * value + owns[e * OWN]
                    scale = reciprocal(max(reach, leasts[e * OWN]))
                    part = g * value * scale
                    q = part * scale
                    inside = q if reach > leasts[e * OWN] else f4(0)
                    parts[e * OWN] += g
                    parts[LANES + e * OWN] += part
                    parts[2 * LANES + e * OWN] += inside * value
                    parts[3 * LANES + e * OWN] += q - inside
                    parts[4 * LANES + e * OWN] += inside
            add(sums, parts)
            cuda.syncthreads()
            if speaks:
                of = tid if WIDE else plane
                sum_g, sum_x = total_at(sums, of), total_at(sums, i4(PLANES) + of)
                sum_v, sum_batch = -factor * total_at(sums, i4(2 * PLANES) + of), -factor * total_at(sums, i4(3 * PLANES) + of)
                sum_own = -factor * total_at(sums, i4(4 * PLANES) + of)
                own_sums[u4(of)] = sum_own
                if TOGETHER:
                    send(packets, i4(i4(2) * (spoken * N + n)), turn, sum_batch, sum_g)
                    send(packets, i4(i4(2) * (spoken * N + n) + i4(1)), turn, sum_x, sum_v)
                else:
                    at, every = u4(n * C + spoken), u4(N * C)
                    partials[at], partials[u4(every + at)], partials[u4(u4(2) * every + at)] = sum_g, sum_x, sum_v
                    partials[u4(u4(3) * every + at)], partials[u4(u4(4) * every + at)] = sum_batch, sum_own
        warp, lane = split(tid, WARP)
        if TOGETHER:
            for round in range(TURNS):
                at = i4(warp + i4(round * WARPS))
                own, total = i4(first + min(at, i4(CHANNELS - 1))), f4(0)
                for other in range(lane, N if at < i4(CHANNELS) else i4(0), i4(WARP)):
                    pull, _ = receive(packets, i4(i4(2) * (own * N + other)), turn)
                    total += pull
                total = warp_sum(total)
                if lane == i4(0) and at < i4(CHANNELS):
                    pulls[u4(at)] = total
            cuda.syncthreads()
        if APPLIES:
            # From here on parts: dx's slope along x, what is taken off x for it, what both sums take off dx. The channel's numbers are read
            # again: else the compiler keeps what it made of them and every x above in registers.
            step_c = i4(1) if WIDE else HW
            for e in range(LANES):
                own = i4(first + channel + i4(e))
                at, at_plane = u4(own), u4(n * C + own)
                factors[e], slopes[e], owns[e], leasts[e] = gamma[at], v[at], std[at_plane], batch_std[at]
                own_sum = own_sums[u4(plane + i4(e))] if TOGETHER else partials[u4((i4(4) * N + n) * C + own)]
                batch_sum = pulls[u4(channel + i4(e))] if TOGETHER else batch_sums[at]
                pull, batch_pull = divide(own_sum, f4(HW) * owns[e]), divide(batch_sum, f4(N) * f4(HW) * leasts[e])
                lead = load(x, u4(n * C * HW + own * step_c))
                parts[e], parts[LANES + e] = pull + batch_pull, lead
                parts[2 * LANES + e] = pull * shift[at_plane] + batch_pull * (batch_shift[at] - (lead - load(x, u4(own * step_c))))
            for i in range(SLOTS):
                if i < SLOTS - 1 or tail:
                    if not BOTH:
                        held_dy[0], held_dy[1], held_dy[2], held_dy[3] = load4(dy, start + i8(i) * step)
                    for e in range(4):
                        value, h = held_x[4 * i + e], factors[e * OWN] * held_dy[4 * i * BOTH + e]
                        reach = slopes[e * OWN] * value + owns[e * OWN]
                        scale = reciprocal(max(reach, leasts[e * OWN]))
                        direct = h * scale * (owns[e * OWN] * scale if reach > leasts[e * OWN] else f4(1))
                        away = value - parts[LANES + e * OWN]
                        held_x[4 * i + e] = direct + (parts[e * OWN] * away - parts[2 * LANES + e * OWN])
                    store4(dx, start + i8(i) * step, held_x[4 * i], held_x[4 * i + 1], held_x[4 * i + 2], held_x[4 * i + 3])
        if TOGETHER and party == i4(0):
            for round in range(TURNS):
                at = i4(warp + i4(round * WARPS))
                own, sum_g, sum_x, sum_v = i4(first + min(at, i4(CHANNELS - 1))), f4(0), f4(0), f4(0)
                for other in range(lane, N if at < i4(CHANNELS) else i4(0), i4(WARP)):
                    packet = i4(i4(2) * (own * N + other))
                    _, its_g = receive(packets, packet, turn)
                    its_x, its_v = receive(packets, i4(packet + i4(1)), turn)
                    sum_g, sum_x, sum_v = sum_g + its_g, sum_x + its_x, sum_v + its_v
                sum_g, sum_x, sum_v = warp_sum(sum_g), warp_sum(sum_x), warp_sum(sum_v)
                if lane == i4(0) and at < i4(CHANNELS):
                    dbeta[u4(own)], dgamma[u4(own)], dv[u4(own)] = sum_g, sum_x, sum_v

    return evonorm_b0_grads_kernel


def scratch_grads(call: Call) -> int:
    """Bytes of five sums of every plane and one of every channel, in stages; the one launch keeps its packets."""
    n, c = call.in_shapes[0][:2]
    return 0 if call.tile.together else 4 * (PARTIALS * n + 1) * c


def launch(call: Call, stage: str) -> Launch:
    """The launch of one stage of evonorm_b0_grads."""
    (n, c, h, w), held = call.in_shapes[1], call.tile
    slabs, parties, together = c // held.channels, n // held.images, stage == "all"
    dx = call.outs[0]
    sums = dx if together else call.scratch[: scratch_grads(call)].view(np.float32)  # the one launch touches neither
    partials, batch_sums = (sums, sums) if together else (sums[: PARTIALS * n * c], sums[PARTIALS * n * c :])
    packets = constant(np.zeros(8 * n * c if together else 1, np.int32))
    args = (*call.ins, *call.outs, partials, batch_sums, packets, *(np.int32(size) for size in (n, c, h * w)))
    return Launch(grads_kernel(kinds(call)[0], call.layout, held, stage), (slabs, parties), held.threads, args, together=together)
