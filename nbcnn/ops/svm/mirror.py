"""The mirrored kernel's parts: from RBF values of two images and their mirrored ones to K(x, y), the mean of four scaled to a unit diagonal.

    apart            rows and those of the mirrored images -> |x − x'|² of every sample, float64
    factors          |x − x'|² -> s(x) = 1 / √(2 + 2·k(x, x')), on the host
    add_values       k += values, in rows of another pitch
    add_transpose    k += kᵀ: the sum over (x, y') gives that over (x', y)
    weigh            k(x, y) ← s(x)·s(y)·k(x, y)

With d(x) = (1 + k(x, x')) / 2, a quarter of the sum of four over √(d(x)·d(y)) is the sum times s(x)·s(y).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i8, jit, types
from nbcnn.ops.kernel.call import Launch, blocks
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.ptx.shuffle import WARP, warp_sum_everywhere

f8: Any = types.float64
THREADS = 256
SIDE, DOWN = 32, 8
"""Side of a tile of `add_transpose`, and the rows of threads that share it."""
_PITCH = SIDE + 1
_SHARED = SIDE * _PITCH


def apart(rows: np.ndarray, mirrored: np.ndarray, squared: np.ndarray) -> None:
    """|x − x'|² of every row, added in float64."""
    step = max(1, (1 << 21) // max(1, rows.shape[1]))
    for first in range(0, len(rows), step):
        away = rows[first : first + step].astype(np.float64) - mirrored[first : first + step]
        squared[first : first + step] = np.einsum("nf,nf->n", away, away)


def factors(squared: np.ndarray, gamma: float) -> np.ndarray:
    """s(x), float32, of |x − x'|²."""
    return (1 / np.sqrt(2 + 2 * np.exp(-gamma * squared))).astype(np.float32)


def add_values(values: np.ndarray, k: np.ndarray) -> None:
    """k += values, both (M, N)."""
    k += values


def add_transpose(k: np.ndarray) -> None:
    """k += kᵀ, (n, n)."""
    k += k.T.copy()


def weigh(k: np.ndarray, row_factors: np.ndarray, column_factors: np.ndarray, *, unit: bool = False) -> None:
    """k (M, N) times the factor of its row and of its column; with `unit` the diagonal becomes 1."""
    k *= row_factors[:, None]
    k *= column_factors
    if unit:
        k[range(len(k)), range(len(k))] = 1


@jit()
def apart_kernel(rows, mirrored, squared, count, pitch):
    """|x − x'|², added in float64. grid ⌈rows/8⌉, block 256; owns: one warp per row; shared none; moves 8·pitch bytes per row; source: the
    definition."""
    lane, row = cuda.threadIdx.x & 31, cuda.blockIdx.x * (THREADS // WARP) + (cuda.threadIdx.x >> 5)
    from_ = i8(min(row, count - 1)) * pitch
    total = f8(0)
    for c in range(lane, pitch, WARP):
        away = f8(rows[from_ + c]) - f8(mirrored[from_ + c])
        total += away * away
    total = warp_sum_everywhere(total)
    if lane == 0 and row < count:
        squared[row] = total


@jit()
def add_values_kernel(values, k, columns, pitch):
    """k[r·pitch + c] += values[r·columns + c].

    grid: rows, block 256; owns: one block per row; shared none; moves 12 bytes per value; source: the definition.
    """
    row = cuda.blockIdx.x
    for c in range(cuda.threadIdx.x, columns, THREADS):
        k[i8(row) * pitch + c] += values[i8(row) * columns + c]


@jit()
def add_transpose_kernel(k, n, pitch):
    """k += kᵀ in place.

    grid    (⌈n/32⌉, ⌈n/32⌉), of which blocks below the diagonal do nothing; block 32×8.
    owns    one block per tile of 32×32 values and the tile that is its transpose: both are read before either is written.
    shared  2·32·33·4 bytes; moves 8 bytes per value; source: the definition.
    """
    up = cuda.shared.array(_SHARED, f4)
    down = cuda.shared.array(_SHARED, f4)
    across, tall = cuda.threadIdx.x, cuda.threadIdx.y
    left, top = cuda.blockIdx.x * SIDE, cuda.blockIdx.y * SIDE
    if left >= top:
        for j in range(tall, SIDE, DOWN):
            if top + j < n and left + across < n:
                up[j * _PITCH + across] = k[i8(top + j) * pitch + left + across]
            if left + j < n and top + across < n:
                down[j * _PITCH + across] = k[i8(left + j) * pitch + top + across]
        cuda.syncthreads()
        for j in range(tall, SIDE, DOWN):
            if top + j < n and left + across < n:
                k[i8(top + j) * pitch + left + across] = up[j * _PITCH + across] + down[across * _PITCH + j]
            if left > top and left + j < n and top + across < n:
                k[i8(left + j) * pitch + top + across] = down[j * _PITCH + across] + up[across * _PITCH + j]


@jit()
def weigh_kernel(k, row_factors, column_factors, columns, pitch, unit):
    """k[r·pitch + c] *= s_r·s_c; the diagonal becomes 1 if `unit`.

    grid: rows, block 256; owns: one block per row; shared none; moves 8 bytes per value; source: the definition.
    """
    row = cuda.blockIdx.x
    factor = row_factors[row]
    for c in range(cuda.threadIdx.x, columns, THREADS):
        at = i8(row) * pitch + c
        # The two factors first: a symmetric matrix then stays symmetric to the bit.
        k[at] = 1.0 if unit != 0 and c == row else k[at] * (factor * column_factors[c])


def launch_apart(rows: Any, mirrored: Any, squared: Any, count: int, pitch: int) -> Launch:
    """Launch of `apart_kernel`; squared float64 (count,)."""
    return Launch(apart_kernel, blocks(count, THREADS // WARP), THREADS, (rows, mirrored, squared, np.int32(count), np.int32(pitch)))


def launch_add_values(values: Any, k: Any, rows: int, columns: int, pitch: int) -> Launch:
    """Launch of `add_values_kernel`; values (rows, columns) without gaps, k in rows of `pitch` values."""
    return Launch(add_values_kernel, rows, THREADS, (values, k, np.int32(columns), np.int32(pitch)))


def launch_add_transpose(k: Any, n: int, pitch: int) -> Launch:
    """Launch of `add_transpose_kernel`."""
    return Launch(add_transpose_kernel, (ceil_div(n, SIDE), ceil_div(n, SIDE)), (SIDE, DOWN), (k, np.int32(n), np.int32(pitch)))


def launch_weigh(k: Any, row_factors: Any, column_factors: Any, rows: int, columns: int, pitch: int, unit: bool) -> Launch:
    """Launch of `weigh_kernel`; factors float32, from the first row and column of k on."""
    sizes = (np.int32(columns), np.int32(pitch), np.int32(unit))
    return Launch(weigh_kernel, rows, THREADS, (k, row_factors, column_factors, *sizes))
