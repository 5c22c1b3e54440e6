"""EvoNorm-B0 backward on slabs held in registers (held.py).

"all"    everything in one launch: its blocks meet once, where a channel's sums are put together, so it must fit on the GPU
"sums"   of planes; then rows.py adds them over the images, then
"apply"  dx from x, dy and the sums
"""

from __future__ import annotations

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

OTHERS = {"NCHW": 40, "NHWC": 72}
"""Registers of a thread besides what it holds; in NHWC it has twenty sums and sixteen numbers of its channels."""


@cache
def grads_kernel(kind: str, layout: str, held: Held, stage: str) -> Any:
    load, _ = scalar_io(kind)
    load4, store4 = vector_io(kind)
    team = team_of(held, layout, 1)
    place, quads, sums_of = place_of(team, held.channels), quads_of(team), plane_sums(team, PARTIALS)
    SUMS, TOTALS = shared_floats(team, PARTIALS)
    CHANNELS, IMAGES, LANES, SLOTS, WIDE, FLOATS = held.channels, held.images, team.lanes, held.slots, team.wide, 4 * held.slots
    OWN, WARPS, PARTS, PLANES, THREADS = 1 if WIDE else 0, held.threads // WARP, PARTIALS * team.lanes, team.planes, held.threads
    BOTH, FLOATS_DY, ALL, KEPT = held.tensors > 1, 4 * held.slots if held.tensors > 1 else 4, (PARTIALS - 1) * held.channels, PARTIALS - 1
    TURNS, TOGETHER, MAKES, APPLIES = -(-ALL // WARPS), stage == "all", stage != "apply", stage != "sums"
    SENT = (PARTIALS - 1 if TOGETHER else PARTIALS) * team.planes

    @jit(launch_bounds=(held.threads, held.blocks))
    def evonorm_b0_grads_kernel(
        dy, x, gamma, v, shift, std, batch_shift, batch_std, dx, dgamma, dbeta, dv, partials, batch_sums, counters, parties, N, C, HW
    ):
        """dx, dgamma, dbeta, dv. Σ g, Σ g·x/d, Σ M·q·x, Σ (1−M)·q of planes go to partials (4,C,N), which a slab's blocks add.

        In stages: these and Σ M·q in partials (5,N,C), and Σ (1−M)·q of channels in batch_sums.
        grid (N/images)·(C/channels), block up to 512; owns: a block a slab, a thread up to 8 quads, in registers.
        shared 20 bytes a plane and warp; moves 12·x bytes (16 if dy is read again, from L2; 20 in stages). source: arXiv:2004.02967.
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
        if MAKES:
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
                place_at = i4((which * C + own) * N + at_image) if TOGETHER else i4((which * N + at_image) * C + own)
                partials[place_at] = sign * totals[at]
        if TOGETHER:
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
        if APPLIES:
            # From here on parts: dx's slope along x, what is taken off x for it, what both sums take off dx. The channel's numbers are read
            # again: else the compiler keeps what it made of them and every x above in registers.
            step_c = i4(1) if WIDE else HW
            for e in range(LANES):
                own = i4(first + channel + i4(e))
                factors[e], slopes[e], owns[e], leasts[e] = gamma[own], v[own], std[n * C + own], batch_std[own]
                own_sum = -factors[e] * totals[i4(4 * PLANES) + plane + i4(e)] if TOGETHER else partials[(i4(4) * N + n) * C + own]
                batch_sum = pulls[channel + i4(e)] if TOGETHER else batch_sums[own]
                pull, batch_pull = own_sum / (f4(HW) * owns[e]), batch_sum / (f4(N) * f4(HW) * leasts[e])
                lead = load(x, i4(n * C * HW + own * step_c))
                parts[e], parts[LANES + e] = pull + batch_pull, lead
                parts[2 * LANES + e] = pull * shift[n * C + own] + batch_pull * (batch_shift[own] - (lead - load(x, i4(own * step_c))))
            for i in range(SLOTS):
                if i < SLOTS - 1 or tail:
                    if not BOTH:
                        held_dy[0], held_dy[1], held_dy[2], held_dy[3] = load4(dy, start + i8(i) * step)
                    for e in range(4):
                        value, h = held_x[4 * i + e], factors[e * OWN] * held_dy[4 * i * BOTH + e]
                        reach = slopes[e * OWN] * value + owns[e * OWN]
                        scale = divide(f4(1), max(reach, leasts[e * OWN]))
                        direct = h * scale * (owns[e * OWN] * scale if reach > leasts[e * OWN] else f4(1))
                        away = value - parts[LANES + e * OWN]
                        held_x[4 * i + e] = direct + (parts[e * OWN] * away - parts[2 * LANES + e * OWN])
                    store4(dx, start + i8(i) * step, held_x[4 * i], held_x[4 * i + 1], held_x[4 * i + 2], held_x[4 * i + 3])

    return evonorm_b0_grads_kernel


def scratch_grads(call: Call) -> int:
    """Bytes of the sums of every plane: four, or in stages five, and one of every channel."""
    n, c = call.in_shapes[0][:2]
    return 4 * (PARTIALS - 1) * n * c if call.tile.together else 4 * (PARTIALS * n + 1) * c


def launch(call: Call, stage: str) -> Launch:
    """The launch of one stage of evonorm_b0_grads."""
    (n, c, h, w), held = call.in_shapes[1], call.tile
    slabs, parties, together = c // held.channels, n // held.images, stage == "all"
    sums = call.scratch[: scratch_grads(call)].view(np.float32)
    partials, batch_sums = (sums, sums) if together else (sums[: PARTIALS * n * c], sums[PARTIALS * n * c :])
    counters = constant(np.zeros(2 * slabs if together else 1, np.int32))
    args = (*call.ins, *call.outs, partials, batch_sums, counters, *(np.int32(size) for size in (parties, n, c, h * w)))
    return Launch(grads_kernel(kinds(call)[0], call.layout, held, stage), slabs * parties, held.threads, args, together=together)
