"""This module replaces a file so that neither a crash, a signal nor a full disk can cost the old one.

The new content goes to a temporary name in the same folder, is fsynced and renamed over the old file; then the folder is
fsynced, so that the rename itself survives a power cut.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

OLD = 3600.0
"""Seconds after which a temporary file that nobody has written is a killed process's, in a folder that has no lock."""
_NO_FLUSH = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""What a flush of a folder fails with on a file system that knows none."""
_swept: set[Path] = set()
"""Folders whose old temporary files this process has removed."""
_TEMPORARY = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.tmp")


class DiskFull(OSError):
    """There is no room for a file; the message names it and the bytes it needs. The file as it was is untouched."""

    exit_code = 1


def temporary(path: Path) -> Path:
    """A name beside `path` to write to that nobody else has: two writers must not fill one file."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def make_folder(path: Path, flag: str) -> None:
    """Make a folder with those above it, unless it is there. Raises OSError if that cannot be, which says that `flag` chooses another."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"cannot make this folder ({error.strerror}); choose another with {flag}", str(path)) from None


def remove_leftovers(folder: Path, older: float = 0.0) -> None:
    """Remove the temporary files of killed processes that nobody has written for `older` seconds.

    With 0 only for whoever alone writes in `folder` (`nbcnn.files.lock`).
    """
    for path in folder.glob(".*.tmp"):
        with suppress(FileNotFoundError):
            if _TEMPORARY.fullmatch(path.name) and (not older or path.stat().st_mtime < time.time() - older):
                path.unlink()


def replace(path: Path, nbytes: int, write: Callable[[BinaryIO], None]) -> None:
    """Let `write` fill a file of `nbytes` bytes, then put it in place of `path`.

    Raises DiskFull before writing if the folder's file system has not that much room, or when it runs out on the way, and OSError, which names
    `path`, for what else the system refuses. Whatever is raised before the rename, the temporary file is gone and the old file stands.
    """
    partial = temporary(path)
    if path.parent not in _swept:
        _swept.add(path.parent)
        with suppress(OSError):
            remove_leftovers(path.parent, OLD)
    with named(path):
        free = shutil.disk_usage(path.parent).free
    if free < nbytes:
        raise DiskFull(f"{path} needs {nbytes:,} bytes, {free:,} are free; the previous file, if any, is untouched")
    try:
        with open(partial, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):  # of a file system that takes no more changes; the first error says what is wrong
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"{path} needs {nbytes:,} bytes and the disk is full; the previous file, if any, is untouched") from error
        with named(path, "; the previous file, if any, is untouched"):
            raise
    sync_folder(path.parent)


@contextmanager
def named(path: Path, more: str = "") -> Iterator[None]:
    """A context whose errors of the system are about `path`, the file that was to be saved, not about a temporary name or none at all."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DiskFull):
            raise
        raise OSError(error.errno, f"cannot be saved ({error.strerror or error}){more}", str(path)) from error


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk; Windows does that by itself, and opens no folder.

    Some file systems (CIFS, some FUSE) flush files, but know no flush of a folder: the rename is then as safe as they make it.
    """
    if os.name == "nt":
        return
    with named(folder):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        except OSError as error:
            if error.errno not in _NO_FLUSH:
                raise
        finally:
            os.close(opened)


def replace_bytes(path: Path, content: bytes) -> None:
    """Put `content` in place of `path`; raises as `replace`."""

    def write(file: BinaryIO) -> None:
        file.write(content)

    replace(path, len(content), write)
