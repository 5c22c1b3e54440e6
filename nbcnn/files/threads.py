"""Threads for work that NumPy, hashing or the disk does without Python's lock: as many as there are cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from threading import Thread
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


class LeftBehind:
    """One thread that does its work in order, like a ThreadPoolExecutor of one; a program that ends does not wait for it.

    It is for code of others that may hang: Python waits for the threads of a ThreadPoolExecutor even after Ctrl-C.

    >>> thread = LeftBehind("adder")
    >>> thread.submit(sum, [1, 2]).result()
    3
    >>> thread.shutdown(wait=True)
    """

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        """The future of `work(*given)`."""
        future: Future[Any] = Future()
        self._work.put((future, work, given))
        return future

    def shutdown(self, wait: bool) -> None:
        """End the thread when what was submitted is done; wait for that, or not."""
        self._work.put(None)
        if wait:
            self._thread.join()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, work, given = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(*given))
                except BaseException as error:
                    future.set_exception(error)
            del item, future, work, given


def slices(count: int, step: int) -> list[slice]:
    """0 … count − 1 in parts of `step`, of which the last may be smaller.

    >>> slices(5, 3)
    [slice(0, 3, None), slice(3, 5, None)]
    """
    return [slice(first, min(count, first + step)) for first in range(0, count, step)]
