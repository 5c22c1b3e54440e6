"""Slabs of one image (some channels, all pixels): the threads of a block share one, in both layouts, and add their sums.

A block has COLUMNS × ROWS threads, thread = row·COLUMNS + column: columns walk the channels of the slab, rows its pixels. Element
(c, pixel) of image n lies at n·C·H·W + c·step_c + pixel·step_p. In NCHW a block has one column, so that neighbours read
neighbouring pixels; in NHWC neighbours read neighbouring channels, 32 of them where there are as many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import SIMULATOR, cuda, jit
from nbcnn.ops.kernel.call import Call, Shape
from nbcnn.ops.kernel.loops import power_of_two
from nbcnn.ops.kernel.windows import split

WIDEST = 32
"""Columns of a block at most: neighbouring float32 of a warp's load."""
LARGEST_BLOCK = 256
SMALLEST_BLOCK = 8 if SIMULATOR else 32
ELEMENTS_PER_THREAD = 4
"""Elements that a thread should have before a block gets more threads."""


def inverse_deviation(raised: np.ndarray) -> np.ndarray:
    """1/√(variance + eps), NaN for an infinite one: 0 would make the bias of values whose squares leave float32."""
    with np.errstate(invalid="ignore"):
        return np.asarray(1 / np.sqrt(raised) + 0 * raised)


@jit(device=True)
def rstd_of(raised):
    """`inverse_deviation` of one number."""
    return 1.0 / math.sqrt(raised) + 0.0 * raised


def deviation(raised: np.ndarray) -> np.ndarray:
    """√(variance + eps), NaN for an infinite one: what is divided by infinity would be 0, and the bias be the result."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.sqrt(raised) + 0 * raised)


@jit(device=True)
def deviation_of(raised):
    """`deviation` of one number."""
    return math.sqrt(raised) + 0.0 * raised


@jit(device=True)
def not_negative(value):
    """max(value, 0), but NaN stays NaN: squares that leave float32 must not look like none."""
    return 0.0 if value < 0.0 else value


@dataclass(frozen=True)
class Slab:
    """What a block takes of an image.

    channels  channels of the slab: whole groups. group: channels of a group (1 where every plane is its own).
    columns, threads  of the block, powers of two; more channels than columns are taken in turns, and are then one group.
    """

    channels: int
    group: int
    columns: int
    threads: int

    @property
    def rows(self) -> int:
        return self.threads // self.columns


def slab_of(shape: Shape, layout: str, group: int) -> Slab:
    """The slab for images of logical `shape` (N,C,H,W) with groups of `group` channels."""
    _, c, h, w = shape
    if layout == "NCHW":
        channels, columns = group, 1
    else:
        channels = min(max(WIDEST // group, 1) * group, c)
        columns = min(power_of_two(channels), WIDEST)
    enough = power_of_two(-(-channels * h * w // ELEMENTS_PER_THREAD))
    return Slab(channels, group, columns, min(max(enough, columns, SMALLEST_BLOCK), LARGEST_BLOCK))


def steps(call: Call) -> tuple[int, int, int, int]:
    """(C, H·W, step_c, step_p) of the images of a call."""
    _, c, h, w = call.in_shapes[0]
    return (c, h * w, 1, c) if call.layout == "NHWC" else (c, h * w, h * w, 1)


@cache
def plane_position(columns: int) -> Any:
    """Device function (slabs) -> (image, channel, row) of a thread where every plane is its own group; a last slab goes beyond the last channel."""

    @jit(device=True)
    def position(slabs):
        tid = cuda.threadIdx.x
        n, block = split(cuda.blockIdx.x, slabs)
        return n, block * columns + (tid & columns - 1), tid // columns

    return position


@cache
def slab_position(slab: Slab) -> Any:
    """Device function (slabs, C) -> (image, its slab's first channel, column, row, the number of the thread's group in the slab, channels of the
    slab).
    """
    columns, group, channels, one = slab.columns, slab.group, slab.channels, slab.channels == slab.group

    @jit(device=True)
    def position(slabs, C):
        tid = cuda.threadIdx.x
        column = tid & columns - 1
        n, block = split(cuda.blockIdx.x, slabs)
        first = block * channels
        return n, first, column, tid // columns, 0 if one else column // group, min(channels, C - first)

    return position


@cache
def column_sum(columns: int, threads: int) -> Any:
    """Device function (values, value): the sum of `value` over the rows of the thread's column, the same in each of them.

    values: shared, one float32 per thread. Every thread of the block must call it; the order of addition is a fixed tree.
    """
    half_way = threads // 2

    @jit(device=True)
    def add(values, value):
        tid = cuda.threadIdx.x
        cuda.syncthreads()
        values[tid] = value
        cuda.syncthreads()
        half = half_way
        while half >= columns:
            if tid < half:
                values[tid] += values[tid + half]
            cuda.syncthreads()
            half >>= 1
        return values[tid & columns - 1]

    return add


@cache
def group_sum(slab: Slab) -> Any:
    """Device function (values, value): the sum of `value`, equal in all rows of a column, over the columns of the thread's group."""
    columns, group = slab.columns, slab.group
    one = slab.channels == slab.group

    @jit(device=True)
    def add(values, value):
        column = cuda.threadIdx.x & columns - 1
        first = 0 if one else column // group * group
        last = columns if one else min(first + group, columns)
        cuda.syncthreads()
        if cuda.threadIdx.x < columns:
            values[column] = value
        cuda.syncthreads()
        total = 0.0
        for i in range(first, last):
            total += values[i]
        return total

    return add
