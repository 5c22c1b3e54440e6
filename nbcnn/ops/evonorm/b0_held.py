"""EvoNorm-B0 on slabs held in registers (held.py), in one launch: its blocks meet once, where a channel's statistics or gradients are
put together. So the whole launch must fit on the GPU; larger batches take the three launches of b0.py."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from nbcnn.cuda import constant, cuda, f4, i4, i8, jit
from nbcnn.ops.call import Call, Launch
from nbcnn.ops.evonorm.held import Held, place_of, plane_sums, quads_of, shared_floats, team_of
from nbcnn.ops.ptx.grid import fresh, meet
from nbcnn.ops.ptx.shuffle import WARP, warp_sum_everywhere
from nbcnn.ops.sigmoid import divide
from nbcnn.ops.stored import kinds, scalar_io, vector_io
from nbcnn.ops.windows import split

PARTIALS = 5
"""Sums of every plane that the gradients are made of: four to add over the images, one that stays the plane's."""

OTHERS_OF_GRADS = 72
"""Registers of a thread in NHWC besides what it holds: twenty sums, sixteen numbers of its channels."""


@cache
def fprop_kernel(kind: str, layout: str, held: Held) -> Any:
    load, _ = scalar_io(kind)
    load4, store4 = vector_io(kind)
    team = team_of(held, layout, 1)
    place, quads, sums_of = place_of(team, held.channels), quads_of(team), plane_sums(team, 1)
    SUMS, TOTALS = shared_floats(team, 1)
    CHANNELS, IMAGES, LANES, SLOTS, WIDE, FLOATS = held.channels, held.images, team.lanes, held.slots, team.wide, 4 * held.slots
    OWN, WARPS = 1 if WIDE else 0, held.threads // WARP
    TURNS = -(-CHANNELS // WARPS)

    @jit(launch_bounds=(held.threads, held.blocks))
    def evonorm_b0_fprop_kernel(x, gamma, beta, v, running, y, shift, std, batch_shift, batch_std, kept, counters, parties, N, C, HW, eps, momentum):
        """y = γ·x/d + β, d = max(s_B, v·x + s_I), and every statistic; running ← (1 − momentum)·running + momentum·(unbiased variance).

        Batch statistics by Chan's formula for planes of one size: mean = the mean of the means, M2 = Σ M2_n + H·W·Σ (mean_n − mean)².
        grid (N/images)·(C/channels), block up to 512, all at once; owns: a block a slab, a thread up to 8 quads, in registers.
        shared 4 bytes a plane and warp; moves 8·x bytes. source: arXiv:2004.02967.
        """
        sums = cuda.shared.array(SUMS, f4)
        totals = cuda.shared.array(TOTALS, f4)
        least = cuda.shared.array(CHANNELS, f4)
        held_x = cuda.local.array(FLOATS, f4)
        parts = cuda.local.array(LANES, f4)
        leads = cuda.local.array(LANES, f4)
        means = cuda.local.array(LANES, f4)
        owns = cuda.local.array(LANES, f4)
        tid = i4(cuda.threadIdx.x)
        slab, party = split(i4(cuda.blockIdx.x), parties)
        first = i4(slab * i4(CHANNELS))
        channel, image, rank = place(tid)
        n = i4(party * i4(IMAGES) + image)
        plane = i4(image * i4(CHANNELS) + channel)
        start, step, tail = quads(n, i4(first + channel), rank, C, HW)
        for i in range(SLOTS):
            at = start + i8(i) * step if i < SLOTS - 1 or tail else i8(0)
            held_x[4 * i], held_x[4 * i + 1], held_x[4 * i + 2], held_x[4 * i + 3] = load4(x, at)
        step_c = i4(1) if WIDE else HW
        for e in range(LANES):
            leads[e] = load(x, i4(n * C * HW + (first + channel + i4(e)) * step_c))
            parts[e] = f4(0)
        for i in range(SLOTS):
            if i < SLOTS - 1 or tail:
                for e in range(4):
                    parts[e * OWN] += held_x[4 * i + e] - leads[e * OWN]
        sums_of(sums, totals, parts)
        for e in range(LANES):
            means[e] = totals[plane + i4(e)] / f4(HW)
            owns[e] = leads[e] + means[e]
            parts[e] = f4(0)
        for i in range(SLOTS):
            if i < SLOTS - 1 or tail:
                for e in range(4):
                    centred = held_x[4 * i + e] - owns[e * OWN]
                    parts[e * OWN] += centred * centred
        sums_of(sums, totals, parts)
        every = i4(N * C)
        for e in range(LANES):
            own = i4(first + channel + i4(e))
            variance = totals[plane + i4(e)] / f4(HW)
            owns[e] = f4(math.sqrt(variance + eps))
            if rank == i4(0):
                shift[n * C + own] = means[e]
                std[n * C + own] = owns[e]
                kept[own * N + n] = leads[e] - load(x, i4(own * step_c)) + means[e]
                kept[every + own * N + n] = variance
        meet(counters, slab, parties)

        lane = i4(tid % i4(WARP))
        for turn in range(TURNS):
            at = i4(tid // i4(WARP) + i4(turn * WARPS))
            own = i4(first + min(at, i4(CHANNELS - 1)))
            total = f4(0)
            for other in range(lane, N, i4(WARP)):
                total += fresh(kept, i4(own * N + other))
            mean = warp_sum_everywhere(total) / f4(N)
            total = f4(0)
            for other in range(lane, N, i4(WARP)):
                away = fresh(kept, i4(own * N + other)) - mean
                total += fresh(kept, i4(every + own * N + other)) + away * away
            variance = warp_sum_everywhere(total) / f4(N)
            if lane == i4(0) and at < i4(CHANNELS):
                s = f4(math.sqrt(variance + eps))
                least[at] = s
                if party == i4(0):
                    batch_shift[own] = mean
                    batch_std[own] = s
                    m = f4(N) * f4(HW)
                    running[own] = (f4(1) - momentum) * running[own] + momentum * variance * (m / max(m - f4(1), f4(1)))
        cuda.syncthreads()

        for e in range(LANES):
            own = i4(first + channel + i4(e))
            leads[e], means[e], parts[e] = gamma[own], beta[own], v[own]
        for i in range(SLOTS):
            if i < SLOTS - 1 or tail:
                for e in range(4):
                    value, at_least = held_x[4 * i + e], least[channel + i4(e * OWN)]
                    d = max(at_least, parts[e * OWN] * value + owns[e * OWN])
                    held_x[4 * i + e] = leads[e * OWN] * divide(value, d) + means[e * OWN]
                store4(y, start + i8(i) * step, held_x[4 * i], held_x[4 * i + 1], held_x[4 * i + 2], held_x[4 * i + 3])

    return evonorm_b0_fprop_kernel


@cache
def grads_kernel(kind: str, layout: str, held: Held) -> Any:
    load, _ = scalar_io(kind)
    load4, store4 = vector_io(kind)
    team = team_of(held, layout, 1)
    place, quads, sums_of = place_of(team, held.channels), quads_of(team), plane_sums(team, PARTIALS)
    SUMS, TOTALS = shared_floats(team, PARTIALS)
    CHANNELS, IMAGES, LANES, SLOTS, WIDE, FLOATS = held.channels, held.images, team.lanes, held.slots, team.wide, 4 * held.slots
    OWN, WARPS, PARTS, PLANES, THREADS = 1 if WIDE else 0, held.threads // WARP, PARTIALS * team.lanes, team.planes, held.threads
    BOTH, FLOATS_DY, ALL, KEPT = held.tensors > 1, 4 * held.slots if held.tensors > 1 else 4, (PARTIALS - 1) * held.channels, PARTIALS - 1
    TURNS, SENT = -(-ALL // WARPS), (PARTIALS - 1) * team.planes

    @jit(launch_bounds=(held.threads, held.blocks))
    def evonorm_b0_grads_kernel(dy, x, gamma, v, shift, std, batch_shift, batch_std, dx, dgamma, dbeta, dv, partials, counters, parties, N, C, HW):
        """dx, dgamma, dbeta, dv. Of every plane Σ g, Σ g·x/d, Σ M·q·x, Σ (1−M)·q go to partials (4,C,N), which a slab's blocks add.

        grid (N/images)·(C/channels), block up to 512, all at once; owns: a block a slab, a thread up to 8 quads, in registers.
        shared 20 bytes a plane and warp; moves 12·x bytes (16 if dy is read again, from L2). source: arXiv:2004.02967.
        """
        sums = cuda.shared.array(SUMS, f4)
        totals = cuda.shared.array(TOTALS, f4)
        pulls = cuda.shared.array(CHANNELS, f4)
        held_x = cuda.local.array(FLOATS, f4)
        held_dy = cuda.local.array(FLOATS_DY, f4)
        parts = cuda.local.array(PARTS, f4)
        factors = cuda.local.array(LANES, f4)
        slopes = cuda.local.array(LANES, f4)
        owns = cuda.local.array(LANES, f4)
        leasts = cuda.local.array(LANES, f4)
        tid = i4(cuda.threadIdx.x)
        slab, party = split(i4(cuda.blockIdx.x), parties)
        first = i4(slab * i4(CHANNELS))
        channel, image, rank = place(tid)
        n = i4(party * i4(IMAGES) + image)
        plane = i4(image * i4(CHANNELS) + channel)
        start, step, tail = quads(n, i4(first + channel), rank, C, HW)
        for i in range(SLOTS):
            at = start + i8(i) * step if i < SLOTS - 1 or tail else i8(0)
            held_x[4 * i], held_x[4 * i + 1], held_x[4 * i + 2], held_x[4 * i + 3] = load4(x, at)
            if BOTH:
                held_dy[4 * i], held_dy[4 * i + 1], held_dy[4 * i + 2], held_dy[4 * i + 3] = load4(dy, at)
        for e in range(LANES):
            own = i4(first + channel + i4(e))
            factors[e], slopes[e], owns[e], leasts[e] = gamma[own], v[own], std[n * C + own], batch_std[own]
        for e in range(PARTS):
            parts[e] = f4(0)
        for i in range(SLOTS):
            if i < SLOTS - 1 or tail:
                if not BOTH:
                    held_dy[0], held_dy[1], held_dy[2], held_dy[3] = load4(dy, start + i8(i) * step)
                for e in range(4):
                    value, g = held_x[4 * i + e], held_dy[4 * i * BOTH + e]
                    reach = slopes[e * OWN] * value + owns[e * OWN]
                    scale = divide(f4(1), max(reach, leasts[e * OWN]))
                    part = g * value * scale
                    q = part * scale
                    above = reach > leasts[e * OWN]
                    parts[e * OWN] += g
                    parts[LANES + e * OWN] += part
                    parts[2 * LANES + e * OWN] += q * value if above else f4(0)
                    parts[3 * LANES + e * OWN] += f4(0) if above else q
                    parts[4 * LANES + e * OWN] += q if above else f4(0)
        sums_of(sums, totals, parts)
        for at in range(tid, i4(SENT), i4(THREADS)):
            which, of = i4(at // i4(PLANES)), i4(at % i4(PLANES))
            own, at_image = i4(first + of % i4(CHANNELS)), i4(party * i4(IMAGES) + of // i4(CHANNELS))
            sign = -gamma[own] if which > i4(1) else f4(1)
            partials[(which * C + own) * N + at_image] = sign * totals[at]
        meet(counters, slab, parties)

        lane = i4(tid % i4(WARP))
        for turn in range(TURNS):
            at = i4(tid // i4(WARP) + i4(turn * WARPS))
            which, of = i4(KEPT - 1 - at // i4(CHANNELS)), i4(at % i4(CHANNELS))
            if at < i4(ALL) and (which == i4(KEPT - 1) or party == i4(0)):
                own = i4(first + of)
                total = f4(0)
                for other in range(lane, N, i4(WARP)):
                    total += fresh(partials, i4((which * C + own) * N + other))
                total = warp_sum_everywhere(total)
                if lane == i4(0):
                    if which == i4(0):
                        dbeta[own] = total
                    elif which == i4(1):
                        dgamma[own] = total
                    elif which == i4(2):
                        dv[own] = total
                    else:
                        pulls[of] = total
        cuda.syncthreads()

        # From here on parts: the two slopes of dx along x, what is subtracted from x for each, what they subtract together. The channel's
        # numbers are read again: else the compiler keeps what it made of them and every x above in registers.
        step_c = i4(1) if WIDE else HW
        for e in range(LANES):
            own = i4(first + channel + i4(e))
            factors[e], slopes[e], owns[e], leasts[e] = gamma[own], v[own], std[n * C + own], batch_std[own]
            pull = -factors[e] * totals[i4(4 * PLANES) + plane + i4(e)] / (f4(HW) * owns[e])
            batch_pull = pulls[channel + i4(e)] / (f4(N) * f4(HW) * leasts[e])
            parts[e], parts[LANES + e] = pull, batch_pull
            parts[2 * LANES + e] = load(x, i4(n * C * HW + own * step_c))
            parts[3 * LANES + e] = load(x, i4(own * step_c))
            parts[4 * LANES + e] = pull * shift[n * C + own] + batch_pull * batch_shift[own]
        for i in range(SLOTS):
            if i < SLOTS - 1 or tail:
                if not BOTH:
                    held_dy[0], held_dy[1], held_dy[2], held_dy[3] = load4(dy, start + i8(i) * step)
                for e in range(4):
                    value, h = held_x[4 * i + e], factors[e * OWN] * held_dy[4 * i * BOTH + e]
                    reach = slopes[e * OWN] * value + owns[e * OWN]
                    scale = divide(f4(1), max(reach, leasts[e * OWN]))
                    direct = h * scale * (owns[e * OWN] * scale if reach > leasts[e * OWN] else f4(1))
                    away, batch_away = value - parts[2 * LANES + e * OWN], value - parts[3 * LANES + e * OWN]
                    held_x[4 * i + e] = direct + parts[e * OWN] * away + (parts[LANES + e * OWN] * batch_away - parts[4 * LANES + e * OWN])
                store4(dx, start + i8(i) * step, held_x[4 * i], held_x[4 * i + 1], held_x[4 * i + 2], held_x[4 * i + 3])

    return evonorm_b0_grads_kernel


def scratch_fprop(call: Call) -> int:
    """Bytes of the means and variances of every plane."""
    n, c = call.in_shapes[0][:2]
    return 8 * n * c


def scratch_grads(call: Call) -> int:
    """Bytes of four sums of every plane."""
    n, c = call.in_shapes[0][:2]
    return 4 * (PARTIALS - 1) * n * c


def bind_fprop(call: Call) -> list[Launch]:
    """One launch."""
    kernel, grid, sizes, counters = _bound(call, 0, fprop_kernel)
    *outs, _ = call.outs
    eps, momentum = np.float32(call.attrs["eps"]), np.float32(call.attrs["momentum"])
    kept = call.scratch[: scratch_fprop(call)].view(np.float32)
    return [Launch(kernel, grid, call.tile.threads, (*call.ins, *outs, kept, counters, *sizes, eps, momentum), together=True)]


def bind_grads(call: Call) -> list[Launch]:
    """One launch."""
    kernel, grid, sizes, counters = _bound(call, 1, grads_kernel)
    partials = call.scratch[: scratch_grads(call)].view(np.float32)
    return [Launch(kernel, grid, call.tile.threads, (*call.ins, *call.outs, partials, counters, *sizes), together=True)]


def _bound(call: Call, image: int, factory: Any) -> tuple[Any, int, list[np.int32], Any]:
    """The kernel, its grid, the sizes that it takes, and its counters."""
    (n, c, h, w), held = call.in_shapes[image], call.tile
    slabs, parties = c // held.channels, n // held.images
    sizes = [np.int32(size) for size in (parties, n, c, h * w)]
    return factory(kinds(call)[0], call.layout, held), slabs * parties, sizes, constant(np.zeros(2 * slabs, np.int32))
