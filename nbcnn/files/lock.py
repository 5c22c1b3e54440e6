"""This module locks a folder, or one file of it, for one writer at a time, and says who holds the lock.

Two hidden files stand beside what is locked while it is: NAME.lock, which the operating system locks (`filelock`), and NAME, one line of JSON
with the owner's process, host, start and command. The system lets go of a lock whose process has died, whatever killed it, so on one host a dead
owner's lock is simply taken over, with what temporary files it left. Not every file system passes locks on to other hosts: there the owner's
line keeps others out, and only a person can know that a process of another host is gone.

A file system that knows no locks (NFS without its lock daemon, some FUSE) gets a third file, NAME.pid, whose existence is the lock: it names the
owner's process, and whoever finds it looks whether that process still runs.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nbcnn.files import atomic, document
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import brief, word

WRITER = ".writer"
"""The owner's line of a whole folder."""
_LINE = {"pid": int, "host": str, "since": str, "command": str, "began?": str, "boot?": str}
_ATTEMPT_S, _POLL_S = 0.2, 0.02
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
"""What flock fails with on a file system that knows no locks."""


class Held(UsageError):
    """Somebody else writes there; the message says who."""


@contextmanager
def writing(folder: Path, name: str = WRITER, waiting: Callable[[str], None] | None = None) -> Iterator[None]:
    """A context that holds the lock of `folder`, which must exist, or of what `name` stands for in it.

    A second writer raises Held, or with `waiting` calls it with the owner and waits until the first is done. The owner of a whole folder
    removes the temporary files of dead ones. Raises OSError if the folder cannot be written.
    """
    from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

    path = folder / name
    marker = Path(f"{path}.pid")

    with ExitStack() as held:

        def take(lock: BaseFileLock) -> None:
            told = False
            while True:
                try:
                    lock.acquire(timeout=_ATTEMPT_S, poll_interval=_POLL_S)
                except Timeout:
                    if waiting is None:
                        raise Held(_refusal(path, _owner(path))) from None
                    if not told:
                        waiting(f"waiting for {_who(_owner(path))}, which writes in {folder}")
                    told = True
                else:
                    held.callback(lock.release)
                    return

        no_locks = False
        try:
            # filelock's own fallback would delete an existence lock that somebody else holds under the same name.
            take(FileLock(f"{path}.lock", fallback_to_soft=False))
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            no_locks = True
        if no_locks or marker.exists():
            take(SoftFileLock(marker))
        owner = _owner(path)
        # Without locks of the system nothing but its process says that an owner is alive, which had a lock while the file system knew them.
        if owner and not (_is_here(owner) and not (no_locks and _runs(owner))):
            raise Held(_refusal(path, owner))
        # While it is held: whoever has opened NAME.lock already notices that it has no name any more, and tries again. Both are tried, also where
        # Ctrl-C interrupts the first.
        held.callback(_remove, Path(f"{path}.lock"))
        held.callback(_remove, path)
        if name == WRITER:
            atomic.remove_leftovers(folder)
        atomic.replace_bytes(path, (json.dumps(_myself()) + "\n").encode())
        yield


def _remove(file: Path) -> None:
    """Remove a file of a lock. What a folder keeps that takes no more changes is taken over as a dead owner's: the error of the file that could not
    be saved must come out, not this one.
    """
    with suppress(OSError):
        file.unlink(missing_ok=True)


def _myself() -> dict[str, Any]:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    me = os.getpid()
    return {"pid": me, "began": _began(me), "host": socket.gethostname(), "boot": _boot(), "since": since, "command": " ".join(sys.argv)[:200]}


def _began(pid: Any) -> str:
    """When the process `pid` of this machine began, in ticks since the machine's start; empty where there is none, or no /proc."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    return ""


def _runs(owner: dict[str, Any]) -> bool:
    """Whether an owner on this machine still runs, and its number was not given to another process."""
    return bool(owner.get("began")) and owner.get("began") == _began(owner.get("pid"))


def _boot() -> str:
    """What names this start of this machine's kernel, whatever name a container has; empty where it is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _owner(path: Path) -> dict[str, Any]:
    """Who wrote the line at `path`; empty if there is none, or none that can be read."""
    try:
        found: dict[str, Any] = document.load(path)
        document.fits(found, _LINE, str(path))
    except (OSError, document.DocumentError):
        return {}
    return found


def _is_here(owner: dict[str, Any]) -> bool:
    """Whether an owner is, or was, of this machine, whose system knows that its lock is free."""
    return owner.get("host") == socket.gethostname() or bool(_boot() and owner.get("boot") == _boot())


def _who(owner: dict[str, Any]) -> str:
    if not owner:
        return "another process"
    return f"process {owner['pid']} on {word(owner['host'])} (since {word(owner['since'])}: {brief(owner['command'])})"


def _refusal(path: Path, owner: dict[str, Any]) -> str:
    there = path.parent if path.name == WRITER else path
    if owner and not _is_here(owner):
        files = " and ".join(str(file) for file in (path, Path(f"{path}.lock"), Path(f"{path}.pid")) if file.exists())
        remedy = f"that is another host: if the process no longer runs there, remove {files}, and try again"
    else:
        remedy = "wait until it is done, or choose another folder"
    return f"{_who(owner)} is writing in {there}; {remedy}"
