"""Windows of images at given places, as rows: the samples of a whitening or of k-means, and their contrast.

    draw_windows      maps (N,C,H,W) uint8 or float32, places (3,n) int32 -> rows (n, pitch): (x − shift[c])·factor[c] of a window, then zeros
    normal_contrast   rows (n, pitch), of which width are values -> (x − mean) / √(variance + norm), in place

places are images, rows and columns of the windows' first pixels. The values of a window lie in the order (C, R, S), those of a patch of
`images/patches.py`, whose contrast is the same: width − 1 in the denominator.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, i8, jit
from nbcnn.ops.kernel.call import Launch, blocks
from nbcnn.ops.kernel.loops import quotient
from nbcnn.ops.ptx.shuffle import WARP, warp_sum_everywhere

ROWS = 8
"""Rows of a block: a warp each."""


def draw_windows(maps: np.ndarray, places: np.ndarray, shift: np.ndarray, factor: np.ndarray, rows: np.ndarray, *, window: tuple[int, int]) -> None:
    """rows (n, pitch) from maps (N,C,H,W) at `places` (3,n); shift and factor (C,) float32."""
    image, row, column = places
    width = maps.shape[1] * window[0] * window[1]
    windows = np.lib.stride_tricks.sliding_window_view(maps, window, axis=(2, 3))[image, :, row, column].astype(np.float32)  # (n, C, R, S)
    rows[:, :width] = ((windows - shift[:, None, None]) * factor[:, None, None]).reshape(len(rows), width)
    rows[:, width:] = 0


def normal_contrast(rows: np.ndarray, *, width: int, norm: float) -> None:
    """rows (n, pitch): the first `width` values of each without their mean, divided by √(variance + norm)."""
    values = rows[:, :width]
    values -= values.mean(1, keepdims=True)
    values /= np.sqrt(np.einsum("ij,ij->i", values, values) / (width - 1) + norm)[:, None]


@jit()
def draw_windows_kernel(maps, places, shift, factor, rows, count, C, H, W, R, S, pitch):
    """rows[i][(c, r, s)] = (maps[image][c][row + r][column + s] − shift[c])·factor[c], zeros behind.

    grid ⌈count/8⌉, block 256; owns: one warp per row; shared none; moves 4·pitch bytes per row, and reads a window of 1 or 4 bytes per value, whose
    rows of S neighbours share the lines of a cache; source: the definition.
    """
    lane, i = cuda.threadIdx.x & 31, cuda.blockIdx.x * ROWS + (cuda.threadIdx.x >> 5)
    if i < count:
        image, first = places[i], places[count + i] * W + places[2 * count + i]
        for at in range(lane, pitch, WARP):
            line = quotient(at, S)
            c = quotient(line, R)
            value = 0.0
            if c < C:
                pixel = first + (line - c * R) * W + (at - line * S)
                value = (maps[(i8(image) * C + c) * (H * W) + pixel] - shift[c]) * factor[c]
            rows[i8(i) * pitch + at] = value


@jit()
def normal_contrast_kernel(rows, count, width, pitch, norm):
    """x = (x − mean) / √(variance + norm) of every row in place.

    grid ⌈count/8⌉, block 256; owns: one warp per row; shared none; moves 16·width bytes per row, of which 8 come out of a cache; source: the
    definition.
    """
    lane, i = cuda.threadIdx.x & 31, cuda.blockIdx.x * ROWS + (cuda.threadIdx.x >> 5)
    if i < count:
        first = i8(i) * pitch
        total, squares = 0.0, 0.0
        for at in range(lane, width, WARP):
            total += rows[first + at]
        mean = warp_sum_everywhere(total) / width
        for at in range(lane, width, WARP):
            away = rows[first + at] - mean
            squares += away * away
        factor = 1.0 / math.sqrt(warp_sum_everywhere(squares) / (width - 1) + norm)
        for at in range(lane, width, WARP):
            rows[first + at] = (rows[first + at] - mean) * factor


def launch_draw_windows(
    maps: Any, places: Any, shift: Any, factor: Any, rows: Any, count: int, shape: tuple[int, int, int], window: tuple[int, int], pitch: int
) -> Launch:
    """Launch of `draw_windows_kernel`: flat maps of `shape` (C, H, W) with fewer than 2³¹ pixels each, flat places (3·count)."""
    scalars = (np.int32(value) for value in (count, *shape, *window, pitch))
    return Launch(draw_windows_kernel, blocks(count, ROWS), ROWS * WARP, (maps, places, shift, factor, rows, *scalars))


def launch_normal_contrast(rows: Any, count: int, width: int, pitch: int, norm: float) -> Launch:
    """Launch of `normal_contrast_kernel` on a flat array of `count` rows of `pitch` values."""
    args = (rows, np.int32(count), np.int32(width), np.int32(pitch), np.float32(norm))
    return Launch(normal_contrast_kernel, blocks(count, ROWS), ROWS * WARP, args)
