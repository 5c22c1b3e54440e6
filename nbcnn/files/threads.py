"""Threads for work that NumPy, hashing or the disk does without Python's lock: as many as there are cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_threads(work: Callable[[Item], Any], items: Sequence[Item]) -> list[Any]:
    """What `work` returns for each of `items`, in their order; raises what the first of them that failed raised.

    >>> in_threads(abs, [-2, 1])
    [2, 1]
    """
    count = min(cores(), len(items))
    if count < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(work, items))


def slices(count: int, step: int) -> list[slice]:
    """0 … count − 1 in parts of `step`, of which the last may be smaller.

    >>> slices(5, 3)
    [slice(0, 3, None), slice(3, 5, None)]
    """
    return [slice(first, min(count, first + step)) for first in range(0, count, step)]
