"""What a block that has all pixels of eight filters of an image does with them: bias, statistics, normalisation, results to memory.

A thread holds some pixels, eight filters each, in registers; which pixels these are, whoever made them says. So the deviation of a plane,
or of a group of one, two, four or eight channels, is known inside the block. What it then writes is the `end`:

    "s0"        y of EvoNorm-S0, z (the convolution's own output, which the gradients want), shift and std of groups
    "s0 infer"  y of EvoNorm-S0 alone
    "planes"    z, shift and std of planes: EvoNorm-B0 in training still wants the other images of the batch
    "b0 infer"  y of EvoNorm-B0 with the running variance
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from nbcnn.cuda import cuda, f4, i4, jit
from nbcnn.ops.evonorm.sigmoid import both_sides
from nbcnn.ops.ptx.shuffle import WARP, warp_sum
from nbcnn.ops.ptx.vector import store4

FILTERS = 8
"""Filters of a block."""


@cache
def finish(end: str, group: int, threads: int, mine: int, pixel: Any) -> Any:
    """Device function (acc, sums, leads, b, gamma, beta, v, running, y, z, shift, std, n, k0, K, P, Q, eps): the end, for image n and filters k0 ….

    acc (mine, 8): the thread's sums, of pixels `pixel(i, P, Q)`, which gives −1 where there is none; thread 0 has pixel 0 first.
    sums, leads: shared, 8 float32 a warp, and 8.
    """
    GROUP, THREADS, MINE = group, threads, mine
    GROUPS, WARPS = FILTERS // GROUP, THREADS // WARP
    S0, RUNNING, KEEPS, NORMALISES = end in ("s0", "s0 infer"), end == "b0 infer", end in ("s0", "planes"), end != "planes"

    @jit(device=True)
    def block_sums(sums, parts):
        """parts[g] becomes its sum over the block, in a fixed order."""
        tid = i4(cuda.threadIdx.x)
        cuda.syncthreads()
        for g in range(GROUPS):
            total = warp_sum(parts[g])
            if tid % i4(WARP) == i4(0):
                sums[tid // i4(WARP) * i4(FILTERS) + i4(g)] = total
        cuda.syncthreads()
        for g in range(GROUPS):
            total = f4(0)
            for w in range(WARPS):
                total += sums[w * FILTERS + g]
            parts[g] = total

    @jit(device=True)
    def run(acc, sums, leads, b, gamma, beta, v, running, y, z, shift, std, n, k0, K, P, Q, eps):
        places = cuda.local.array(MINE, i4)
        parts = cuda.local.array(GROUPS, f4)
        offsets = cuda.local.array(GROUPS, f4)
        values = cuda.local.array(4, f4)
        tid = i4(cuda.threadIdx.x)
        pixels = i4(P * Q)
        for i in range(MINE):
            places[i] = pixel(i, P, Q)
        for i in range(MINE):
            for k in range(FILTERS):
                acc[i * FILTERS + k] += b[k0 + i4(k)]
        if tid == i4(0):
            for k in range(FILTERS):
                leads[k] = acc[k]
        cuda.syncthreads()
        for g in range(GROUPS):
            parts[g] = f4(0)
            for i in range(MINE):
                if places[i] >= i4(0):
                    for k in range(GROUP):
                        parts[g] += acc[i * FILTERS + g * GROUP + k] - leads[g * GROUP]
        block_sums(sums, parts)
        count = f4(GROUP) * f4(pixels)
        for g in range(GROUPS):
            offsets[g] = parts[g] / count
            parts[g] = f4(0)
            for i in range(MINE):
                if places[i] >= i4(0):
                    for k in range(GROUP):
                        centred = acc[i * FILTERS + g * GROUP + k] - leads[g * GROUP] - offsets[g]
                        parts[g] += centred * centred
        block_sums(sums, parts)
        for g in range(GROUPS):
            parts[g] = f4(math.sqrt(parts[g] / count + eps))
            if KEEPS and tid == i4(0):
                at = i4(n * (K // i4(GROUP)) + k0 // i4(GROUP) + i4(g))
                shift[at] = offsets[g]
                std[at] = parts[g]

        for i in range(MINE):
            p = places[i]
            if p >= i4(0):
                at = i4((n * pixels + p) * K + k0)
                for quad in range(FILTERS // 4):
                    to, first = i4(at + i4(quad * 4)), i * FILTERS + quad * 4
                    if KEEPS:
                        store4(z, to, acc[first], acc[first + 1], acc[first + 2], acc[first + 3])
                    if NORMALISES:
                        for k in range(4):
                            channel, s = i4(k0 + i4(quad * 4 + k)), parts[(quad * 4 + k) // GROUP]
                            each = acc[first + k]
                            if S0:
                                sigma, _ = both_sides(v[channel] * each)
                                values[k] = gamma[channel] * each * sigma / s + beta[channel]
                            if RUNNING:
                                d = max(f4(math.sqrt(running[channel] + eps)), v[channel] * each + s)
                                values[k] = gamma[channel] * (each / d) + beta[channel]
                        store4(y, to, values[0], values[1], values[2], values[3])

    return run
