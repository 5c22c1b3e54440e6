"""Statistics of groups where neighbouring lanes have neighbouring quads of channels: a warp's share of each group, from its threads' sums."""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import f4, jit
from nbcnn.ops.activations.sigmoid import divide
from nbcnn.ops.ptx.shuffle import WARP, sum_over

QUAD, PIXELS = 4, 4
"""Channels of a thread; pixels of a tile."""
MOMENTS = 3
"""Numbers that a warp has for a group: mean, Σ (x − mean)², count."""


@cache
def spreading(channels: int, group: int, threads: int, first: int) -> Any:
    """Device function (memory, sums, items, tid): of each of the thread's groups what its warp has, to memory[first + …], [moment][group][warp].

    A thread has one quad of `channels` in groups of `group`, of `items` tiles; sums: of each channel a lead, Σ (x − lead), Σ (x − lead)².
    """
    QUADS, GROUP, WARPS, ALL, FIRST = channels // QUAD, group, threads // WARP, channels // group * (threads // WARP), first
    CHANNELS, WIDE = min(GROUP, QUAD), max(GROUP // QUAD, 1)  # channels of a group that a thread has; lanes of a tile that share a group
    PARTS = QUAD // CHANNELS
    across = sum_over(WARP - QUADS | WIDE - 1)

    @jit(device=True)
    def run(memory, sums, items, tid):
        warp, lane = tid // WARP, tid & WARP - 1
        pixels = f4(items * PIXELS)
        share = divide(1.0, max(pixels, 1.0))
        everywhere = across(pixels) * CHANNELS
        for part in range(PARTS):
            total, squares = 0.0, 0.0
            for q in range(CHANNELS * part, CHANNELS * part + CHANNELS):
                total += sums[q] + sums[QUAD + q] * share
            mean = divide(across(total * pixels), max(everywhere, 1.0))
            for q in range(CHANNELS * part, CHANNELS * part + CHANNELS):
                away = sums[q] + sums[QUAD + q] * share - mean
                squares += max(sums[2 * QUAD + q] - sums[QUAD + q] * sums[QUAD + q] * share, 0.0) + pixels * away * away
            squares = across(squares)
            if lane < QUADS and lane & WIDE - 1 == 0:
                group = lane * QUAD // GROUP + part
                at = FIRST + group * WARPS + warp
                memory[at], memory[ALL + at], memory[2 * ALL + at] = mean, squares, everywhere

    return run
