"""Sums over the images of a batch: out[row][c] = factor · Σ_n partials[row, n, c], each in a fixed order."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.kernel.call import Launch
from nbcnn.ops.kernel.loops import power_of_two
from nbcnn.ops.norms.plane import WIDEST, column_sum

AT_ONCE = 8
"""Images that a block adds side by side, at most."""


@cache
def rows_kernel(rows: int, columns: int, threads: int) -> Any:
    in_column = column_sum(columns, threads)
    COLUMNS, THREADS, STRIDE = columns, threads, threads // columns

    @jit()
    def evonorm_rows_kernel(partials, a, b, c, d, N, C):
        """out[c] = Σ_n partials[row, n, c] for row = blockIdx.y and out = a, b, c or d.

        grid (⌈C/columns⌉, rows), block up to 256; owns: per block up to 32 channels of a row, per thread every eighth image of one.
        shared 4 bytes per thread; moves 4·N·C bytes per row.
        """
        values = cuda.shared.array(THREADS, f4)
        tid = cuda.threadIdx.x
        row = cuda.blockIdx.y
        channel = cuda.blockIdx.x * COLUMNS + (tid & COLUMNS - 1)
        total = 0.0
        for n in range(tid // COLUMNS, N if channel < C else 0, STRIDE):
            total += partials[(row * N + n) * C + channel]
        total = in_column(values, total)
        if tid < COLUMNS and channel < C:
            if row == 0:
                a[channel] = total
            elif row == 1:
                b[channel] = total
            elif row == 2:
                c[channel] = total
            elif rows > 3:
                d[channel] = total

    return evonorm_rows_kernel


def launch_rows(partials: Any, outs: tuple[Any, ...], images: int, channels: int) -> Launch:
    """The launch that fills `outs` (two to four arrays of `channels`) from partials (rows, images, channels)."""
    arrays = (*outs, outs[-1], outs[-1])[:4]
    columns = min(power_of_two(channels), WIDEST)
    threads = columns * min(power_of_two(images), AT_ONCE)
    args = (partials, *arrays, np.int32(images), np.int32(channels))
    return Launch(rows_kernel(len(outs), columns, threads), (-(-channels // columns), len(outs)), threads, args)
