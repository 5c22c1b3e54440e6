"""A user's augmentation of gathered images: functions of single numbers that say where a pixel is taken from, and what becomes of its value.

    x'[c, h, w] = value(x[c, r, s], c, h, w, a, b, c', d),   (r, s) = source(h, w, H, W, a, b, c', d) to the nearest pixel;
    x'[c, h, w] = 0 where (r, s) lies outside the image, and where x is zero padding or cut out

a, b, c', d are the image's own four numbers of the epoch, uniform in [0, 1): the upper 24 bits of the words of stream 3 (`gather`). x is what flip,
crop and cutout made of the image, as the network sees it: normalised, or a byte over 255. Functions take and give float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nbcnn.gpu.language import f4, jit, u4
from nbcnn.gpu.lockstep.arrays import on_arrays
from nbcnn.ops.update.random import words_of

STREAM = 3
DROPPED_BITS = 8
UNIT = np.float32(2**-24)
HALF = np.float32(0.5)


@dataclass(frozen=True)
class Pixels:
    """The device functions of an augmentation, without their parameters, which are frozen in; None is a function that changes nothing."""

    name: str
    source: Any = None
    value: Any = None

    def __str__(self) -> str:
        return self.name

    @property
    def of_targets(self) -> Pixels | None:
        """What is done to a target: it is moved as its input is, and its values stay."""
        return replace(self, value=None) if self.source else None


@jit(device=True)
def unit_of(word):
    """A word as a number of [0, 1)."""
    return (word >> DROPPED_BITS) * UNIT


@jit(device=True)
def number(n):
    """A row, a column or a channel as functions of the user's take it."""
    return f4(n)


@jit(device=True)
def rounded(at):
    """A half more than what a function of the user's returned: its whole part is the nearest pixel."""
    return f4(at) + HALF


@jit(device=True)
def whole(at):
    """The whole part of a number that is not negative, as uint32."""
    return u4(at)


def units_of(index: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, ...]:
    """The four numbers of each of the images `index`, (N, 1, 1, 1) float32."""
    return tuple(((word >> np.uint32(DROPPED_BITS)).astype(np.float32) * UNIT).reshape(-1, 1, 1, 1) for word in words_of(index, state, STREAM))


def applied(pixels: Pixels, batch: np.ndarray, outside: np.ndarray, units: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    """`batch` (N, C, H, W), float32 and zero where `outside` (N, H, W) says so, after the augmentation; and where it is zero then."""
    N, C, H, W = batch.shape
    image, row, column = np.arange(N)[:, None, None], np.arange(H, dtype=np.float32)[:, None], np.arange(W, dtype=np.float32)
    if pixels.source:
        operands = np.broadcast_arrays(row, column, *(unit[:, 0] for unit in units), np.empty((N, 1, 1), np.float32))[:-1]
        found = on_arrays(pixels.source)(*operands[:2], np.float32(H), np.float32(W), *operands[2:])
        rows, columns = (np.asarray(each, np.float32) + HALF for each in found)
        beyond = ~((rows >= 0) & (rows < H) & (columns >= 0) & (columns < W))  # of NaN, too
        r, s = (np.where(beyond, 0, each).astype(np.intp) for each in (rows, columns))
        outside = beyond | outside[image, r, s]
        batch = batch[image, :, r, s].transpose(0, 3, 1, 2)  # (N, H, W, C) before
    if pixels.value:
        channel = np.arange(C, dtype=np.float32)[:, None, None]
        batch = on_arrays(pixels.value)(*np.broadcast_arrays(batch, channel, row, column, *units))
    return np.where(outside[:, None], np.float32(0), batch), outside
