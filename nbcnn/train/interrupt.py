"""SIGINT and SIGTERM. In training the first is remembered until a good moment, the second leaves at once.

Elsewhere either unwinds the program, so that temporary files and worker processes go with it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

_NOTICE = b"\nnbcnn: finishing the training step, then saving; once more to leave at once\n"


class Interrupted(BaseException):
    """Raised inside `Interrupts.at_once` by the first signal. Not an Exception: no handler on the way should swallow it."""


class Interrupts:
    """A context in which the first SIGINT or SIGTERM only sets `signal`; outside of the main thread it does nothing.

    The second signal restores the previous handlers and raises KeyboardInterrupt or SystemExit(143). A signal that the
    process ignores (as under nohup) stays ignored.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._raising = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            self._restore()
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        self.signal = number
        # Not print(): a handler may run in the middle of one, and buffered streams are not reentrant.
        os.write(2, _NOTICE)
        if self._raising:
            raise Interrupted

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within, the first signal (also one that came before) raises Interrupted: for long work that may be abandoned."""
        if self.signal is not None:
            raise Interrupted
        self._raising = True
        try:
            yield
        finally:
            self._raising = False


@contextmanager
def terminable() -> Iterator[None]:
    """Within, SIGTERM unwinds the program as Ctrl-C does (exit code 143); outside of the main thread nothing changes.

    A process that ignores SIGTERM goes on ignoring it.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
        yield
        return

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
