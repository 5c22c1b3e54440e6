"""This module handles SIGINT and SIGTERM: a training remembers the first until it can save, and leaves at once at the second.

Elsewhere either unwinds the program, so that temporary files and worker processes go with it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, ClassVar, NoReturn, Self

_NOTICE = b"\nnbcnn: interrupted: %s; Ctrl-C again quits now\n"


class Interrupted(BaseException):
    """The first signal raises this inside `Interrupts.at_once`. It is no Exception, so that no handler on the way swallows it."""


class _Signals:
    """A context that handles SIGINT and SIGTERM; outside of the main thread it does nothing.

    A signal that the process ignores (as under nohup) stays ignored. `signal` is the first that came.
    """

    handled: ClassVar[int] = 0
    """Calls of the handlers of all contexts since the last `Unwinding` was entered."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore the handlers that were installed before."""
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        raise NotImplementedError


class Interrupts(_Signals):
    """A context in which the first SIGINT or SIGTERM only sets `signal`.

    The second is left to the previous handlers, which from then on have both; where these let it pass, it raises KeyboardInterrupt or
    SystemExit(143).
    """

    def __init__(self) -> None:
        super().__init__()
        self._raising = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        _Signals.handled += 1
        if self.signal is not None:
            previous = self._previous.get(number)
            self.restore()
            if callable(previous):
                previous(number, frame)
            _leave(number)
        self.signal = number
        # Not print(): a handler may run in the middle of one, and buffered streams are not reentrant. Nobody may be there to read it.
        with suppress(OSError):
            os.write(2, _NOTICE % (b"saving" if self._raising else b"finishing this step and saving"))
        if self._raising:
            raise Interrupted

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A context in which the first signal (also one that came before) raises Interrupted: for long work that may be abandoned."""
        if self.signal is not None:
            raise Interrupted
        self._raising = True
        try:
            yield
        finally:
            self._raising = False


class Unwinding(_Signals):
    """A context in which each SIGINT raises KeyboardInterrupt and each SIGTERM SystemExit(143); `signal` is the first that came.

    Whatever leaves the context then, leaves it for the signal: C code on the way may make an ImportError of what was raised in it. `again` is
    called at the second signal, also where a training has handled the first: what runs may catch all that is raised.
    """

    def __init__(self, again: Callable[[int], None] = lambda number: None) -> None:
        super().__init__()
        self._again = again

    def __enter__(self) -> Self:
        super().__enter__()
        _Signals.handled = 0
        if self._previous:
            self._hook = sys.unraisablehook
            sys.unraisablehook = self._once_more
        return self

    def restore(self) -> None:
        if self._previous and sys.unraisablehook == self._once_more:
            sys.unraisablehook = self._hook
        super().restore()

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.signal = self.signal or number
        _Signals.handled += 1
        if _Signals.handled > 1:
            self._again(number)
        _leave(number)

    def _once_more(self, caught: Any) -> None:
        """Python swallows what is raised in a finalizer, for instance of an import's lock: the signal is sent again when that has ended."""
        if self.signal is None or not isinstance(caught.exc_value, KeyboardInterrupt | SystemExit):
            self._hook(caught)
            return
        again = threading.Timer(0.01, os.kill, (os.getpid(), self.signal))
        again.daemon = True
        again.start()


class _Pressed(KeyboardInterrupt):
    """What SIGINT raises in place of KeyboardInterrupt, because `python -m` ends by SIGINT, whatever exit code is chosen, once
    KeyboardInterrupt itself has left an exec(), as of a dataclass."""


def _leave(number: int) -> NoReturn:
    raise _Pressed if number == signal.SIGINT else SystemExit(128 + number)
