"""Statistics of groups where neighbouring lanes have neighbouring quads of channels: what a warp has of each, from its threads' sums."""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import f4, i4, jit, u4
from nbcnn.ops.activations.sigmoid import divide
from nbcnn.ops.ptx.shuffle import WARP, sum_over

QUAD, PIXELS = 4, 4
"""Channels of a thread; pixels of a tile."""
MOMENTS = 3
"""Of what a warp has of a group: mean, Σ (x − mean)², count."""


@cache
def spreading(channels: int, group: int, threads: int, first: int) -> Any:
    """Device function (memory, sums, items, tid): of each of the thread's groups what its warp has, to memory[first + …], [moment][group][warp].

    A thread has one quad of `channels` in groups of `group`, of `items` tiles; sums: of each channel a lead, Σ (x − lead), Σ (x − lead)².
    """
    QUADS, GROUP, WARPS, ALL, FIRST = channels // QUAD, group, threads // WARP, channels // group * (threads // WARP), first
    OWN, WIDE = min(GROUP, QUAD), max(GROUP // QUAD, 1)  # channels of a group that a thread has; lanes of a tile that share a group
    PARTS = QUAD // OWN
    across = sum_over(WARP - QUADS | WIDE - 1)

    @jit(device=True)
    def run(memory, sums, items, tid):
        warp, lane = i4(u4(tid) // u4(WARP)), i4(tid & i4(WARP - 1))
        pixels = f4(i4(items * i4(PIXELS)))
        share = divide(f4(1), max(pixels, f4(1)))
        everywhere = across(pixels) * f4(OWN)
        for part in range(PARTS):
            total, squares = f4(0), f4(0)
            for q in range(OWN * part, OWN * part + OWN):
                total += sums[q] + sums[QUAD + q] * share
            mean = divide(across(total * pixels), max(everywhere, f4(1)))
            for q in range(OWN * part, OWN * part + OWN):
                away = sums[q] + sums[QUAD + q] * share - mean
                squares += max(sums[2 * QUAD + q] - sums[QUAD + q] * sums[QUAD + q] * share, f4(0)) + pixels * away * away
            squares = across(squares)
            if lane < i4(QUADS) and lane & i4(WIDE - 1) == i4(0):
                group = i4(u4(lane * i4(QUAD)) // u4(GROUP)) + i4(part)
                at = u4(i4(FIRST) + i4(group * i4(WARPS)) + warp)
                memory[at], memory[u4(u4(ALL) + at)], memory[u4(u4(2 * ALL) + at)] = mean, squares, everywhere

    return run
