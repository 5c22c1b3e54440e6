"""This module finds packed copies of filters that are mere transpositions, and cuts the copying into tiles (`nbcnn.ops.update.pack_weights`).

An implementation says with an index map where every element of its packed copy comes from (`Impl.pack`). Most maps move a filter bank
(K, C, taps) as a whole: tap t of channel c of filter k goes to k·along_k + c·along_c + slots[t]. Such a copy needs no map of four bytes per element
in memory; a `Placement` says it, and a table of tiles, of which each is the work of a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided

from nbcnn.plan.shapes import numel

ROWS = 32
"""Filters of a tile at most."""
RUN = 288
"""Neighbouring weights of a filter in a tile at most: 32 channels of nine taps."""
TILE = 8
"""Numbers of a tile in the table: first weight, weights from filter to filter, filters, channels, taps, first filter, first channel, where its copies
begin in the table."""
COPY = 4
"""Numbers of a copy in the table before its slots: first element, along_k, along_c, slots. Behind the last copy of a filter bank stands a −1."""


@dataclass(frozen=True)
class Placement:
    """Tap t of channel c of filter k is element k·along_k + c·along_c + slots[t] of the packed copy; at the further slots are zeros.

    Along an axis of one element the step is the size of the copy.
    """

    along_k: int
    along_c: int
    slots: tuple[int, ...]


def placement_of(index: np.ndarray, shape: tuple[int, ...]) -> Placement | None:
    """The placement that the index map of filters of `shape` (K, C, …) says; None if it says something else, or filters do not fit into a tile.

    Example: filters (2, 3, 1, 1) that are transposed.
        >>> placement_of(np.arange(6).reshape(2, 3).T, (2, 3, 1, 1))
        Placement(along_k=1, along_c=2, slots=(0,))
    """
    if len(shape) < 2 or numel(shape[2:]) > RUN:
        return None
    (K, C), T = shape[:2], numel(shape[2:])
    flat = np.ascontiguousarray(index, np.int32).reshape(-1)
    zeros = flat.size - K * C * T
    if zeros < 0 or zeros % (K * C) or flat.size == 0:
        return None
    unsigned = flat.view(np.uint32)  # −1 is the largest number
    (first,) = np.nonzero(unsigned < T)
    if first.size != T:
        return None
    slots = first[np.argsort(flat[first])]
    steps = []
    for extent, weight in ((K, C * T), (C, T)):
        (at,) = np.nonzero(flat == weight) if extent > 1 else (slots[:1] + flat.size,)
        if at.size != 1 or at[0] < slots[0]:
            return None
        steps.append(int(at[0] - slots[0]))

    def at_slot(values: np.ndarray, slot: int) -> np.ndarray | None:
        """The (K, C) elements of `values` from `slot` on; None if they end before."""
        if slot + (K - 1) * steps[0] + (C - 1) * steps[1] >= values.size:
            return None
        return as_strided(values[slot:], (K, C), (values.itemsize * steps[0], values.itemsize * steps[1]))

    wanted = np.arange(0, K * C * T, T, dtype=np.int32).reshape(K, C)
    for tap, slot in enumerate(slots.tolist()):
        found = at_slot(flat, slot)
        if found is None or not np.array_equal(found, wanted + tap):
            return None
    # Each further slot takes K·C zeros; a mask, in which they are struck out, is ten times as fast as sets of their places.
    empty, left, slot = list[int](), flat < 0, 0
    for _ in range(zeros // (K * C)):
        slot += int(left[slot:].argmax())
        found = at_slot(left, slot)
        if found is None or not found.all():
            return None
        found[...] = False
        empty.append(slot)
    if left.any():
        return None
    return Placement(steps[0], steps[1], (*slots.tolist(), *empty))


Bank = tuple[int, tuple[int, ...], Mapping[int, Placement]]
"""Filters that are copied: where they begin in the flat parameters, their shape (K, C, …), and by their first elements the copies."""


def tiles_of(banks: Sequence[Bank]) -> int:
    """How many tiles the filter banks are cut into."""
    return sum(len(_tiles(shape)) for _, shape, _ in banks)


def table(banks: Sequence[Bank]) -> np.ndarray:
    """The tiles of the filter banks, TILE int32 each, largest banks first, and behind them the copies that they name; int32, flat."""
    rows, copies = list[list[int]](), list[int]()
    before = TILE * tiles_of(banks)
    for first, shape, placements in sorted(banks, key=lambda bank: -numel(bank[1])):
        C, T, where = shape[1], numel(shape[2:]), before + len(copies)
        for k, c, filters, channels in _tiles(shape):
            rows.append([first + (k * C + c) * T, C * T, filters, channels, T, k, c, where])
        for start, placement in placements.items():
            copies += [start, placement.along_k, placement.along_c, len(placement.slots), *placement.slots]
        copies.append(-1)
    return np.array([*(number for row in rows for number in row), *copies], np.int32)


def _tiles(shape: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """(first filter, first channel, filters, channels) of every tile."""
    K, C, T = shape[0], shape[1], numel(shape[2:])
    most = RUN // T
    channels = min(C, most if most < 32 else most // 32 * 32)
    return [(k, c, min(ROWS, K - k), min(channels, C - c)) for k in range(0, K, ROWS) for c in range(0, C, channels)]
