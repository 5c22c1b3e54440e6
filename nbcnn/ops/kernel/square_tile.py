"""Sums of products of a block of 256 threads: a tile of 64×64 of them, STEP terms at a time from shared memory, 4×4 per thread.

A thread owns every 16th row and column: `row` and `column` are its numbers below 16. Operands lie transposed, a term's 64 values side by side, with
one float of room behind them, so that a warp that writes along the terms meets every bank once.
"""

from __future__ import annotations

from typing import Any

from nbcnn.gpu.language import jit, types

f8: Any = types.float64
SIDE, STEP, THREADS = 64, 32, 256
PITCH = SIDE + 1
SHARED = STEP * PITCH
"""Floats of one operand."""


@jit(device=True)
def add_products(acc, left, right, row, column):
    """acc[4·i + j] += Σ_k left[k][row + 16·i] · right[k][column + 16·j], both STEP rows of 64 values in shared memory."""
    for k in range(STEP):
        for i in range(4):
            value = left[k * PITCH + row + 16 * i]
            for j in range(4):
                acc[4 * i + j] += value * right[k * PITCH + column + 16 * j]


@jit(device=True)
def add_products_twice(total, acc, left, right, row, column):
    """Add the sum of these STEP products, made by `add_products` in float32, to `total` in float64."""
    for j in range(16):
        acc[j] = 0.0
    add_products(acc, left, right, row, column)
    for j in range(16):
        total[j] += f8(acc[j])
