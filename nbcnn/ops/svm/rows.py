"""Samples as rows on the GPU: brought to their places, standardised there, measured, split into float16 halves.

The matrix has rows of `pitch` floats, sorted by class, with room between the classes (`places` says where each sample is). Room is zero and
is left alone.

    place_rows     staged (n, width), places -> rows
    moments        rows, places, a centre -> Σ (x − centre) and Σ (x − centre)² of every feature, in parts, float64
    standardise    rows, places, mean, deviation -> (x − mean) / deviation, in place
    norms          rows -> |x|² (float64 and float32) and the largest |value| of every row
    copy_rows      rows of a panel -> a part of a matrix
    isolate        kernel values -> 0 between the samples and the room behind them, 1 of room with itself
    halves         rows -> float16(s·x) and float16(s·x − float16(s·x))
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, i8, jit, types
from nbcnn.ops.kernel.call import Launch, blocks
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.ptx.cvt import f16, f16_float
from nbcnn.ops.ptx.shuffle import WARP, warp_argmax, warp_sum_everywhere

f8: Any = types.float64
THREADS = 256
COLUMNS = 128
"""Features of a block of `moments`."""
PARTS = 64
"""Parts in which `moments` adds the samples."""


def place_rows(staged: np.ndarray, places: np.ndarray, rows: np.ndarray) -> None:
    """rows[places] = staged, zeros behind the last feature."""
    rows[places] = 0
    rows[places, : staged.shape[1]] = staged


def moments(rows: np.ndarray, places: np.ndarray, centre: np.ndarray, sums: np.ndarray, squares: np.ndarray) -> None:
    """rows (R, pitch), centre (width,) float64 -> sums, squares (parts, width) float64; part p adds samples p, p + parts, …"""
    parts, width = sums.shape
    for part in range(parts):
        away = rows[places[part::parts], :width].astype(np.float64) - centre
        sums[part], squares[part] = away.sum(0), (away**2).sum(0)


def standardise(rows: np.ndarray, places: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> None:
    """rows[places] = (x − mean) / deviation, float32."""
    width = len(mean)
    rows[places, :width] = (rows[places, :width] - mean) / deviation


def norms(rows: np.ndarray, exact: np.ndarray, rounded: np.ndarray, largest: np.ndarray) -> None:
    """|x|² in float64 and rounded to float32, and max |x|, of every row."""
    np.einsum("nf,nf->n", rows, rows, dtype=np.float64, out=exact)
    rounded[...] = exact
    np.abs(rows).max(1, out=largest)


def copy_rows(panel: np.ndarray, part: np.ndarray) -> None:
    """part = panel, (n, w), where `part` is a view of a matrix."""
    part[...] = panel


def isolate(k: np.ndarray, *, real: int) -> None:
    """k (n, n): rows and columns from `real` on become those of the identity."""
    k[real:], k[:, real:] = 0, 0
    k[range(real, len(k)), range(real, len(k))] = 1


def halves(rows: np.ndarray, split: np.ndarray, *, scale: float) -> None:
    """split (2, …) uint16: the bits of float16(scale·x), and of float16 of what that rounds off."""
    scaled = rows * np.float32(scale)
    high = scaled.astype(np.float16)
    split[0] = high.view(np.uint16)
    split[1] = (scaled - high.astype(np.float32)).astype(np.float16).view(np.uint16)


@jit()
def place_rows_kernel(staged, places, rows, width, pitch):
    """rows[places[r]] = staged[r], zeros behind it. grid: staged rows, block 256; owns: one block per row; shared none; moves 4·(width + pitch) per
    row."""
    r = cuda.blockIdx.x
    to = i8(places[r]) * pitch
    for c in range(cuda.threadIdx.x, pitch, THREADS):
        rows[to + c] = staged[i8(r) * width + c] if c < width else 0.0


@jit()
def moments_kernel(rows, places, centre, sums, squares, count, width, pitch, parts):
    """Σ (x − centre), Σ (x − centre)² of 128 features over samples p, p + parts, …, in float64.

    grid (⌈width/128⌉, parts), block 128; owns: one thread per feature of a part; shared none; moves 4 bytes per value. source: the definition.
    """
    c, part = cuda.blockIdx.x * COLUMNS + cuda.threadIdx.x, cuda.blockIdx.y
    if c < width:
        middle, total, square = centre[c], f8(0), f8(0)
        for r in range(part, count, parts):
            away = f8(rows[i8(places[r]) * pitch + c]) - middle
            total += away
            square += away * away
        sums[part * width + c] = total
        squares[part * width + c] = square


@jit()
def standardise_kernel(rows, places, mean, deviation, width, pitch):
    """x = (x − mean) / deviation in place. grid: samples, block 256; owns: one block per row; shared none; moves 8·width bytes per row."""
    to = i8(places[cuda.blockIdx.x]) * pitch
    for c in range(cuda.threadIdx.x, width, THREADS):
        rows[to + c] = (rows[to + c] - mean[c]) / deviation[c]


@jit()
def norms_kernel(rows, exact, rounded, largest, count, pitch):
    """|x|², added in float64, and max |x| of every row. grid ⌈rows/8⌉, block 256; owns: one warp per row; shared none; moves 4·pitch bytes per
    row."""
    lane, row = cuda.threadIdx.x & 31, cuda.blockIdx.x * (THREADS // WARP) + (cuda.threadIdx.x >> 5)
    from_ = i8(min(row, count - 1)) * pitch
    total, most = f8(0), 0.0
    for c in range(lane, pitch, WARP):
        value = rows[from_ + c]
        total += f8(value) * f8(value)
        most = max(most, abs(value))
    total = warp_sum_everywhere(total)
    most, _ = warp_argmax(most, 0)
    if lane == 0 and row < count:
        exact[row] = total
        rounded[row] = total
        largest[row] = most


@jit()
def copy_rows_kernel(source, target, width, from_pitch, from_first, pitch, first):
    """target[first + r·pitch + c] = source[from_first + r·from_pitch + c], c < width.

    grid: rows, block 256; owns: one block per row; shared none; moves 8·width bytes per row.
    """
    row = i8(cuda.blockIdx.x)
    for c in range(cuda.threadIdx.x, width, THREADS):
        target[first + row * pitch + c] = source[from_first + row * from_pitch + c]


@jit()
def isolate_kernel(k, n, real):
    """Rows and columns of k from `real` on become those of the identity. grid (⌈n/256⌉, n − real), block 256; shared none; moves 8 bytes per
    thread."""
    other, room = cuda.blockIdx.x * THREADS + cuda.threadIdx.x, real + cuda.blockIdx.y
    if other < n:
        value = 1.0 if other == room else 0.0
        k[i8(room) * n + other] = value
        if other < real:  # the other columns are those of rows that have a block of their own
            k[i8(other) * n + room] = 0.0


@jit()
def halves_kernel(rows, split, scale, count, stride):
    """split = float16(scale·x) and, `count` further, float16 of the rest. grid: at most 65,535 blocks of 256, which step; moves 8 bytes per value."""
    at = i8(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while at < count:
        value = rows[at] * scale
        high = f16(value)
        split[at] = high
        split[count + at] = f16(value - f16_float(high))
        at += stride


def launch_place_rows(staged: Any, places: Any, rows: Any, count: int, width: int, pitch: int) -> Launch:
    """Launch of `place_rows_kernel`; places int32 (count,)."""
    return Launch(place_rows_kernel, count, THREADS, (staged, places, rows, np.int32(width), np.int32(pitch)))


def launch_moments(rows: Any, places: Any, centre: Any, sums: Any, squares: Any, count: int, width: int, pitch: int, parts: int) -> Launch:
    """Launch of `moments_kernel`; centre (width,), sums and squares (parts·width,), all float64."""
    sizes = (np.int32(value) for value in (count, width, pitch, parts))
    return Launch(moments_kernel, (ceil_div(width, COLUMNS), parts), COLUMNS, (rows, places, centre, sums, squares, *sizes))


def launch_standardise(rows: Any, places: Any, mean: Any, deviation: Any, count: int, width: int, pitch: int) -> Launch:
    """Launch of `standardise_kernel`; mean and deviation float32."""
    return Launch(standardise_kernel, count, THREADS, (rows, places, mean, deviation, np.int32(width), np.int32(pitch)))


def launch_norms(rows: Any, exact: Any, rounded: Any, largest: Any, count: int, pitch: int) -> Launch:
    """Launch of `norms_kernel`; exact float64, rounded and largest float32."""
    return Launch(norms_kernel, blocks(count, THREADS // WARP), THREADS, (rows, exact, rounded, largest, np.int32(count), np.int32(pitch)))


def launch_copy(source: Any, target: Any, count: int, width: int, *, start: tuple[int, int] = (0, 0), to: tuple[int, int] = (0, 0)) -> Launch:
    """Launch of `copy_rows_kernel` of `count` rows; `start` and `to` are (elements from row to row, first element); 0 from row to row is `width`."""
    sizes = (np.int32(start[0] or width), np.int64(start[1]), np.int32(to[0] or width), np.int64(to[1]))
    return Launch(copy_rows_kernel, count, THREADS, (source, target, np.int32(width), *sizes))


def launch_isolate(k: Any, n: int, real: int) -> Launch:
    """Launch of `isolate_kernel`; real < n."""
    return Launch(isolate_kernel, (ceil_div(n, THREADS), n - real), THREADS, (k, np.int32(n), np.int32(real)))


def launch_halves(rows: Any, split: Any, scale: float, count: int) -> Launch:
    """Launch of `halves_kernel` of `count` values; split uint16 of twice as many."""
    grid = min(65_535, blocks(count, THREADS))
    return Launch(halves_kernel, grid, THREADS, (rows, split, np.float32(scale), np.int64(count), np.int64(grid * THREADS)))
