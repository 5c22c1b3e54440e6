"""This module has the calls of one model take turns, whichever threads they come from.

A model computes in one set of buffers: of two predictions at once each would read what the other one wrote. So every call holds the model's lock
from beginning to end. A callback runs in the thread of its `fit`, which holds the lock already, and may call the model.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from nbcnn.files.errors import UsageError
from nbcnn.run.streaming import FEEDER

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound="Turns")


class Turns:
    """What can be called from several threads, and computes for one of them at a time."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._training = False

    @contextmanager
    def _trains(self) -> Iterator[None]:
        """Within, threads that read batches must not call the model."""
        before, self._training = self._training, True
        try:
            yield
        finally:
            self._training = before

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: a lock belongs to its process."""
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_training")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Turns.__init__(self)
        vars(self).update(state)


def in_turn(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """A method of a `Turns` that waits until no other thread is in such a method, and then has the others wait.

    Raises UsageError in the thread that reads batches for the training of this model: the training waits for that thread, so it must not wait for
    the training.
    """

    @functools.wraps(method)
    def alone(self: T, *given: P.args, **named: P.kwargs) -> R:
        if self._training and threading.current_thread().name.startswith(FEEDER):
            raise UsageError(
                f"{method.__name__} was called where fit reads its batches, and the model is being trained: fit waits for the batch, so "
                f"{method.__name__} would deadlock. Call it before fit, or in a callback"
            )
        with self._lock:
            return method(self, *given, **named)

    return alone
