"""Opening what is read: regular files alone. A FIFO would be waited for, a device has no end."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO


class _File(io.BufferedReader):
    """A file of which no more is asked for than is there: Python allocates what is asked for, and that may be a number of the file's own."""

    def read(self, count: int | None = -1, /) -> bytes:
        left = max(0, size(self) - self.tell())
        return super().read(left if count is None or count < 0 else min(count, left))


def opened(path: Path | str) -> BinaryIO:
    """The file at `path`, open for reading bytes. Raises OSError, also for what is no regular file (after its links)."""
    # Without O_NONBLOCK the opening of a FIFO waits for somebody who writes.
    try:
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        if error.errno != errno.ENXIO:  # which a socket answers, and a device that is not there
            raise
        raise _irregular(path) from None
    try:
        mode = os.fstat(number).st_mode
        if not stat.S_ISREG(mode):
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            raise _irregular(path)
        return _File(io.FileIO(number, "rb"))
    except BaseException:
        os.close(number)
        raise


def _irregular(path: Path | str) -> OSError:
    return OSError(errno.EINVAL, "it is no regular file", str(path))


def size(file: BinaryIO) -> int:
    """The bytes of an open file."""
    return os.fstat(file.fileno()).st_size


def read(path: Path | str, most: int | None = None) -> bytes:
    """The content of the file at `path`. Raises OSError, also for what is no regular file and for more than `most` bytes."""
    with opened(path) as file:
        if most is not None and size(file) > most:
            raise OSError(errno.EFBIG, f"it has {size(file):,} bytes, and at most {most:,} are read", str(path))
        # As many as are asked for are allocated at once.
        return file.read(size(file))
