"""Copies by cp.async: what a thread has issued arrives when it waits for it, as late as a GPU may let it.

A copy belongs to the group that its thread commits next, and `wait(n)` lets all groups but the thread's last n arrive. Until then shared memory holds
what was there before, so a kernel that waits for one group too few computes with old numbers. Global memory is read when the copy is issued.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbcnn.gpu.lockstep.lanes import lane_array, now


class Copies:
    """The copies of the lanes of some blocks that are on their way."""

    def __init__(self, lanes: int) -> None:
        self._committed = np.zeros(lanes, np.int64)
        """Groups that every lane has committed."""
        self._running: list[tuple[Any, Any, tuple[Any, ...], np.ndarray, np.ndarray]] = []

    def issue(self, array: Any, at: Any, values: tuple[Any, ...]) -> None:
        """Active lanes copy `values` to the elements of a shared array from `at` on."""
        if hasattr(array, "watch"):
            array.watch.access(array, at, len(values), True, values)
            array.watch.copies(array, lane_array(at), len(values), 1)
        self._running.append((array, lane_array(at), values, _active(), self._committed))

    def commit(self) -> None:
        """Active lanes end a group."""
        self._committed = self._committed + _active()

    def wait(self, running: int) -> None:
        """All groups of the active lanes but their last `running` arrive."""
        mask, mine, left = now.mask, _active(), []
        for array, at, values, lanes, group in self._running:
            done = lanes & mine & (group < self._committed - running)
            if done.any():
                now.mask = done
                _arrive(array, at, values)
            if (rest := lanes & ~done).any():
                left.append((array, at, values, rest, group))
        now.mask, self._running = mask, left


def _active() -> np.ndarray:
    return np.ones(now.lanes, np.bool_) if now.mask is None else now.mask


def _arrive(array: Any, at: Any, values: tuple[Any, ...]) -> None:
    """Store `values`; a watch has counted them when they were issued, and only learns when they were written."""
    watch = getattr(array, "watch", None)
    if watch is None:
        array.store(at, values)
        return
    watch.copies(array, at, len(values), -1)
    watch.counts = False
    try:
        array.store(at, values)
    finally:
        watch.counts = True
