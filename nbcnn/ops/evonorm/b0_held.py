"""EvoNorm-B0 forward on slabs held in registers (held.py).

"all"         everything in one launch: its blocks meet once, where a channel's statistics are put together, so it must fit on the GPU
"statistics"  of planes; then comes the channels' kernel of b0.py, then
"apply"       y from x and all statistics
"infer"       y from x and the running variance: one launch, nobody waits
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from nbcnn.cuda import constant, cuda, f4, i4, i8, jit, u4
from nbcnn.ops.call import Call, Launch
from nbcnn.ops.evonorm.held import Held, joined, place_of, quads_of, spreads_of, team_of
from nbcnn.ops.ptx.fast import reciprocal
from nbcnn.ops.ptx.grid import receive, send
from nbcnn.ops.ptx.shuffle import WARP, warp_sum_everywhere
from nbcnn.ops.sigmoid import divide
from nbcnn.ops.stored import kinds, scalar_io, vector_io, vector_load_if
from nbcnn.ops.windows import split


@cache
def fprop_kernel(kind: str, layout: str, held: Held, stage: str) -> Any:
    load, _ = scalar_io(kind)
    load4, store4 = vector_io(kind)
    load4_if = vector_load_if(kind)
    team = team_of(held, layout, 1)
    place, quads, spread, join = place_of(team, held.channels), quads_of(team), spreads_of(team), joined(team)
    CHANNELS, IMAGES, LANES, SLOTS, WIDE, FLOATS = held.channels, held.images, team.lanes, held.slots, team.wide, 4 * held.slots
    OWN, WARPS, PLANES, KEPT = 1 if WIDE else 0, held.threads // WARP, team.planes, 3 * team.planes * team.joint
    LONE = not WIDE and team.joint == 1  # a warp has a whole plane
    TURNS, ALL, STATISTICS, APPLY, INFER = -(-CHANNELS // WARPS), stage == "all", stage != "apply", stage != "statistics", stage == "infer"

    @jit(launch_bounds=(held.threads, held.blocks))
    def evonorm_b0_fprop_kernel(x, gamma, beta, v, running, y, shift, std, batch_shift, batch_std, packets, N, C, HW, eps, momentum):
        """y = γ·x/d + β, d = max(s_B, v·x + s_I), and every statistic; running ← (1 − momentum)·running + momentum·(unbiased variance).

        Batch statistics by Chan's formula for planes of one size: mean = the mean of the means, M2 = Σ M2_n + H·W·Σ (mean_n − mean)².
        grid (C/channels, N/images), block up to 512; owns: a block a slab, a thread up to 8 quads, in registers.
        shared 12 bytes a plane and warp; moves 8·x bytes (4·x where only statistics are made). source: arXiv:2004.02967.
        """
        kept = cuda.shared.array(KEPT, f4)
        own_stds = cuda.shared.array(PLANES, f4)
        least = cuda.shared.array(CHANNELS, f4)
        held_x = cuda.local.array(FLOATS, f4)
        leads = cuda.local.array(LANES, f4)
        means = cuda.local.array(LANES, f4)
        owns = cuda.local.array(LANES, f4)
        factors = cuda.local.array(LANES, f4)
        biases = cuda.local.array(LANES, f4)
        slopes = cuda.local.array(LANES, f4)
        tid = i4(cuda.threadIdx.x)
        slab, party = i4(cuda.blockIdx.x), i4(cuda.blockIdx.y)
        first = i4(slab * i4(CHANNELS))
        channel, image, rank = place(tid)
        n = i4(party * i4(IMAGES) + image)
        start, step, tail = quads(n, i4(first + channel), rank, C, HW)
        for i in range(SLOTS - 1):
            held_x[4 * i], held_x[4 * i + 1], held_x[4 * i + 2], held_x[4 * i + 3] = load4(x, start + i8(i) * step)
        i = SLOTS - 1
        held_x[4 * i], held_x[4 * i + 1], held_x[4 * i + 2], held_x[4 * i + 3] = load4_if(x, start + i8(i) * step, tail)
        step_c = i4(1) if WIDE else HW
        # The thread that speaks for a plane: of a team in NCHW, of a channel in NHWC.
        speaks = tid < i4(CHANNELS) if WIDE else rank == i4(0)
        own = i4(first + (min(tid, i4(CHANNELS - 1)) if WIDE else channel))
        at_plane = u4(n * C + own)
        lead, origin, turn = f4(0), f4(0), i4(0)
        if ALL:
            lead, origin = load(x, u4(n * C * HW + own * step_c)), load(x, u4(own * step_c))
            turn = i4(packets[u4(i4(4) * (own * N + n) + i4(1))] + i4(1))
        if STATISTICS:
            for e in range(LANES):
                leads[e] = load(x, u4(n * C * HW + (first + channel + i4(e)) * step_c))
        if APPLY:
            for e in range(LANES):
                at = u4(first + channel + i4(e))
                factors[e], biases[e], slopes[e] = gamma[at], beta[at], v[at]
                if not STATISTICS:
                    owns[e] = std[u4(u4(n * C) + at)]
        if not ALL and APPLY:
            for at in range(tid, i4(CHANNELS), i4(WARPS * WARP)):
                least[at] = f4(math.sqrt(running[first + at] + eps)) if INFER else batch_std[first + at]
        if STATISTICS:
            spread(kept, means, owns, held_x, leads, tail, rank, HW if WIDE else i4(HW >> i4(2)))
            if not LONE:
                cuda.syncthreads()
            mean, variance = f4(0), f4(0)
            if LONE:
                mean, variance = means[0], divide(owns[0], f4(HW))
            elif speaks or not WIDE:
                mean, variance = join(kept, tid if WIDE else i4(image * i4(CHANNELS) + channel), f4(HW))
            s = f4(math.sqrt(variance + eps))
            if not WIDE:
                owns[0] = s
            if speaks:
                if ALL:
                    send(packets, i4(own * N + n), turn, lead - origin + mean, variance)
                if WIDE:
                    own_stds[u4(tid)] = s
                if not INFER:
                    shift[at_plane], std[at_plane] = mean, s
        if ALL:
            warp, lane = split(tid, WARP)
            for round in range(TURNS):
                at = i4(warp + i4(round * WARPS))
                own = i4(first + min(at, i4(CHANNELS - 1)))
                # Welford's way over a lane's planes, Chan's over the lanes.
                count, centre, squares = f4(0), f4(0), f4(0)
                for other in range(lane, N if at < i4(CHANNELS) else i4(0), i4(WARP)):
                    its, its_variance = receive(packets, i4(own * N + other), turn)
                    count += f4(1)
                    away = its - centre
                    centre += divide(away, count)
                    squares += its_variance + away * (its - centre)
                batch_mean = divide(warp_sum_everywhere(count * centre), f4(N))
                away = centre - batch_mean
                variance = divide(warp_sum_everywhere(squares + count * away * away), f4(N))
                if lane == i4(0) and at < i4(CHANNELS):
                    s = f4(math.sqrt(variance + eps))
                    least[u4(at)] = s
                    if party == i4(0):
                        at_channel = u4(own)
                        batch_shift[at_channel], batch_std[at_channel] = batch_mean, s
                        m = f4(N) * f4(HW)
                        running[at_channel] = (f4(1) - momentum) * running[at_channel] + momentum * variance * (m / max(m - f4(1), f4(1)))
        if APPLY:
            cuda.syncthreads()
            for e in range(LANES):
                leads[e] = least[u4(channel + i4(e))]
                if STATISTICS and WIDE:
                    owns[e] = own_stds[u4(channel + i4(e))]
            for i in range(SLOTS):
                if i < SLOTS - 1 or tail:
                    for e in range(4):
                        value = held_x[4 * i + e]
                        d = max(leads[e * OWN], slopes[e * OWN] * value + owns[e * OWN])
                        held_x[4 * i + e] = factors[e * OWN] * (value * reciprocal(d)) + biases[e * OWN]
                    store4(y, start + i8(i) * step, held_x[4 * i], held_x[4 * i + 1], held_x[4 * i + 2], held_x[4 * i + 3])

    return evonorm_b0_fprop_kernel


def launch(call: Call, stage: str) -> Launch:
    """The launch of one stage of evonorm_b0_fprop, or of evonorm_b0_infer."""
    running = call.ins[-1]
    (n, c, h, w), held = call.in_shapes[0], call.tile
    y, shift, std, batch_shift, batch_std = (call.outs[0], *(running,) * 4) if stage == "infer" else call.outs[:5]  # infer touches y alone
    together = stage == "all"
    slabs, parties = c // held.channels, n // held.images
    packets = constant(np.zeros(4 * n * c if together else 1, np.int32))
    sizes = (np.int32(size) for size in (n, c, h * w))
    numbers = np.float32(call.attrs["eps"]), np.float32(call.attrs.get("momentum", 0))
    args = (*call.ins, y, shift, std, batch_shift, batch_std, packets, *sizes, *numbers)
    return Launch(fprop_kernel(kinds(call)[0], call.layout, held, stage), (slabs, parties), held.threads, args, together=together)
