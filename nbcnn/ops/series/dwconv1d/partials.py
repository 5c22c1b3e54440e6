"""The second half of a weight gradient: sums over parts of the batch, added up in one fixed order instead of by atomics.

The first half leaves partial[part][c][i] in scratch, its taps in the order of `series.py`. Which thread adds what, and when,
depends on nothing but the extents, so a run repeats bit for bit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.gpu.target import Target
from nbcnn.ops.kernel.call import Call, Launch, blocks
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.ops.series.dwconv1d.series import Correlation

OUTPUTS, LANES = 32, 8
"""Weights that a block of the second kernel adds up, and threads that share one."""


@dataclass(frozen=True)
class Strips:
    """How many parts the batch is summed in."""

    split: int


def strips(units: int, per_part: int, target: Target, resident: int) -> Strips:
    """`units` of work in parts: up to four full rounds of `resident` blocks per multiprocessor, where a part is `per_part` blocks."""
    wanted = max(1, min(units, 4 * resident * target.multiprocessors // per_part))
    return Strips(blocks(units, blocks(units, wanted)))  # no part without work


def scratch_bytes(g: Correlation, split: int) -> int:
    """All partial sums, float32."""
    return 4 * split * g.C * g.T


def partial_sums(call: Call) -> Any:
    """The call's scratch as float32."""
    return call.scratch.view(np.float32)


@functools.cache
def total_kernel(flipped: bool, skip: bool) -> Any:
    """The kernel that adds the parts; flipped: w has the last tap first; skip: dd is wanted."""

    @jit()
    def dwconv1d_total_kernel(partial, dw, dd, C, T, left, parts):
        """dw[c,j] = Σ_part partial[part][c][i], i the place of tap j; dd[c] = that of the tap of offset 0.

        grid ⌈CT/32⌉, block 32 outputs × 8 threads, each adds every eighth part; owns: per block 32 weights.
        shared 1 KiB; moves 4·parts·C·T bytes once, and dw (and dd) once.
        """
        sums = cuda.shared.array((LANES, OUTPUTS), f4)
        tid = cuda.threadIdx.x
        lane, share = tid & OUTPUTS - 1, tid // OUTPUTS
        at = cuda.blockIdx.x * OUTPUTS + lane
        total = 0.0
        if at < C * T:
            part = share
            while part < parts:
                total += partial[part * C * T + at]
                part += LANES
        sums[share, lane] = total
        cuda.syncthreads()
        if share == 0 and at < C * T:
            for other in range(1, LANES):
                total += sums[other, lane]
            c = at // T
            tap = at - c * T
            dw[c * T + (T - 1 - tap) if flipped else at] = total
            if skip and tap == left:
                dd[c] = total

    return dwconv1d_total_kernel


def add(g: Correlation, partial: Any, dw: Any, dd: Any, parts: int) -> Launch:
    """The launch that turns `parts` partial sums into dw and, if `g` has a skip, dd."""
    numbers = (np.int32(number) for number in (g.C, g.T, g.left, parts))
    return Launch(total_kernel(g.flipped, g.skip), blocks(g.C * g.T, OUTPUTS), OUTPUTS * LANES, (partial, dw, dd, *numbers))


def add_traffic(g: Correlation, parts: int) -> Traffic:
    """What `add` asks memory for."""
    read = scratch_bytes(g, parts)
    return Traffic(read, 4 * g.C * (g.T + g.skip), read)
