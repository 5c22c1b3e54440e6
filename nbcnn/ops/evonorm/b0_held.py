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

from nbcnn.cuda import constant, cuda, f4, i4, i8, jit
from nbcnn.ops.call import Call, Launch
from nbcnn.ops.evonorm.held import Held, place_of, plane_sums, quads_of, shared_floats, team_of
from nbcnn.ops.ptx.grid import fresh, meet
from nbcnn.ops.ptx.shuffle import WARP, warp_sum_everywhere
from nbcnn.ops.sigmoid import divide
from nbcnn.ops.stored import kinds, scalar_io, vector_io
from nbcnn.ops.windows import split


@cache
def fprop_kernel(kind: str, layout: str, held: Held, stage: str) -> Any:
    load, _ = scalar_io(kind)
    load4, store4 = vector_io(kind)
    team = team_of(held, layout, 1)
    place, quads, sums_of = place_of(team, held.channels), quads_of(team), plane_sums(team, 1)
    SUMS, TOTALS = shared_floats(team, 1)
    CHANNELS, IMAGES, LANES, SLOTS, WIDE, FLOATS = held.channels, held.images, team.lanes, held.slots, team.wide, 4 * held.slots
    OWN, WARPS = 1 if WIDE else 0, held.threads // WARP
    TURNS, ALL, STATISTICS, APPLY, INFER = -(-CHANNELS // WARPS), stage == "all", stage != "apply", stage != "statistics", stage == "infer"

    @jit(launch_bounds=(held.threads, held.blocks))
    def evonorm_b0_fprop_kernel(x, gamma, beta, v, running, y, shift, std, batch_shift, batch_std, kept, counters, parties, N, C, HW, eps, momentum):
        """y = γ·x/d + β, d = max(s_B, v·x + s_I), and every statistic; running ← (1 − momentum)·running + momentum·(unbiased variance).

        Batch statistics by Chan's formula for planes of one size: mean = the mean of the means, M2 = Σ M2_n + H·W·Σ (mean_n − mean)².
        grid (N/images)·(C/channels), block up to 512; owns: a block a slab, a thread up to 8 quads, in registers.
        shared 4 bytes a plane and warp; moves 8·x bytes (4·x where only statistics are made). source: arXiv:2004.02967.
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
        if STATISTICS:
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
                if rank == i4(0) and not INFER:
                    shift[n * C + own] = means[e]
                    std[n * C + own] = owns[e]
                    if ALL:
                        kept[own * N + n] = leads[e] - load(x, i4(own * step_c)) + means[e]
                        kept[every + own * N + n] = variance
        if ALL:
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
                    total += fresh(kept, i4(N * C + own * N + other)) + away * away
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
        if APPLY:
            if not ALL:
                for at in range(tid, i4(CHANNELS), i4(WARPS * WARP)):
                    least[at] = f4(math.sqrt(running[first + at] + eps)) if INFER else batch_std[first + at]
                cuda.syncthreads()
            for e in range(LANES):
                own = i4(first + channel + i4(e))
                leads[e], means[e], parts[e] = gamma[own], beta[own], v[own]
                if not STATISTICS:
                    owns[e] = std[n * C + own]
            for i in range(SLOTS):
                if i < SLOTS - 1 or tail:
                    for e in range(4):
                        value, at_least = held_x[4 * i + e], least[channel + i4(e * OWN)]
                        d = max(at_least, parts[e * OWN] * value + owns[e * OWN])
                        held_x[4 * i + e] = leads[e * OWN] * divide(value, d) + means[e * OWN]
                    store4(y, start + i8(i) * step, held_x[4 * i], held_x[4 * i + 1], held_x[4 * i + 2], held_x[4 * i + 3])

    return evonorm_b0_fprop_kernel


def scratch_fprop(call: Call) -> int:
    """Bytes of the means and variances of every plane that the one launch passes from block to block."""
    n, c = call.in_shapes[0][:2]
    return 8 * n * c if call.tile.together else 0


def launch(call: Call, stage: str) -> Launch:
    """The launch of one stage of evonorm_b0_fprop, or of evonorm_b0_infer."""
    running = call.ins[-1]
    (n, c, h, w), held = call.in_shapes[0], call.tile
    y, shift, std, batch_shift, batch_std = (call.outs[0], *(running,) * 4) if stage == "infer" else call.outs[:5]  # infer touches y alone
    together = stage == "all"
    slabs, parties = c // held.channels, n // held.images
    kept = call.scratch[: scratch_fprop(call)].view(np.float32) if together else running
    counters = constant(np.zeros(2 * slabs if together else 1, np.int32))
    sizes = (np.int32(size) for size in (parties, n, c, h * w))
    numbers = np.float32(call.attrs["eps"]), np.float32(call.attrs.get("momentum", 0))
    args = (*call.ins, y, shift, std, batch_shift, batch_std, kept, counters, *sizes, *numbers)
    return Launch(fprop_kernel(kinds(call)[0], call.layout, held, stage), slabs * parties, held.threads, args, together=together)
