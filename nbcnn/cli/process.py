"""This module prepares the process of a command: its outputs survive a reader that leaves, and signals end it with a message.

`begin` is called before anything else is imported, by scripts and never by a library; so this module imports little, and nothing of the package.
"""

from __future__ import annotations

import atexit
import errno
import io
import os
import signal
import sys

TYPE_CHECKING = False  # typing itself takes longer to import than all of this
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

ENDED = {signal.SIGINT: "nbcnn: interrupted (SIGINT)", signal.SIGTERM: "nbcnn: terminated (SIGTERM)"}
"""The message of a process that a signal ends."""

PATIENCE = 10.0
"""Seconds for which a process that a signal ended waits for its threads: one that draws a picture needs less."""
_begun = False


class Output(io.FileIO):
    """A standard output that never raises: what cannot be written is dropped, and the first reason for that is kept in `lost`.

    The reader of a pipe may leave (`… | head`), a terminal hang up and the disk of a log be full; a training goes on and saves all the same.
    """

    lost: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.lost = self.lost or error
            return len(data)


def begin() -> None:
    """Give the standard streams to `Output`, and let SIGINT and SIGTERM end this process at once, with 130 or 143.

    There is nothing to be put in order until a command begins: `nbcnn.cli.errors.guarded` takes the signals over then.
    """
    global _begun
    _begun = True
    for number in ENDED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _leave)
    # Python's own end takes longer than it takes to press a key. What it ends with is known by then: the first to be registered runs last.
    atexit.register(_ignore)
    # A file that is opened later must not get the number of a standard stream that was closed (`2>&-`): messages would be written into it.
    while (made := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(made)
    sys.stdout, sys.stderr = _lasting(1, sys.stdout), _lasting(2, sys.stderr)


def end_soon(code: int) -> None:
    """Have a process that `begin` prepared end with `code` after PATIENCE seconds at the latest; it does nothing in another.

    Python waits for its threads before it ends. Where a signal's exception leaves an import, it may leave Python's import lock held, since between
    taking the lock and the block that releases it there is a call; a thread that imports then, such as the one for Matplotlib, never ends.
    """
    if _begun:
        import threading

        last = threading.Timer(PATIENCE, os._exit, (code,))
        last.daemon = True
        last.start()


def unwritten() -> OSError | None:
    """Write what is left for stdout; returns, once, why results did not arrive, and None if they did or their reader had left."""
    sys.stdout.flush()
    buffer = getattr(sys.stdout, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    if not isinstance(raw, Output):
        return None
    lost, raw.lost = raw.lost, None
    return lost if lost and lost.errno not in (errno.EPIPE, errno.EIO) else None


def _lasting(number: int, stream: Any) -> Any:
    """An `Output` in place of `stream` (None if it was closed from the start), with its settings; a stream that is no file stays as it is."""
    if not isinstance(stream, io.TextIOWrapper | None):
        return stream
    raw = Output(number, "w", closefd=False)
    if stream is None:
        return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", "\n")
    stream.flush()
    buffer: Any = raw if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(raw)  # raw: PYTHONUNBUFFERED
    errors = "surrogateescape" if stream.errors == "strict" else stream.errors  # names of files may be any bytes
    return io.TextIOWrapper(buffer, stream.encoding, errors, "\n", stream.line_buffering, stream.write_through)


def _leave(number: int, _: FrameType | None) -> None:
    try:
        os.write(2, f"\n{ENDED[signal.Signals(number)]}\n".encode())
    finally:
        os._exit(128 + number)


def _ignore() -> None:
    for number in ENDED:
        signal.signal(number, signal.SIG_IGN)
