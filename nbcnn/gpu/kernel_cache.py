"""This module names the folder in which compiled kernels are kept between runs (`nbcnn.gpu.kernel_store`), one for each version of the sources.

The sources are those that can change code: `ops`, the kernels that measure and the compiler's door. Kernels are run as code, so only a folder is used
in which nobody else can write.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import nbcnn
from nbcnn.files.errors import UsageError

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

KEPT = 3
"""Folders of other versions that stay: switching between branches does not compile everything again."""


SOURCE_PATHS = ("ops/", "gpu/backends/", "gpu/compiler.py", "gpu/language.py", "gpu/typing32.py", "run/peak_kernels.py")
"""What can change the code of a kernel: kernels and device functions, and what makes code of them.

The key of a kernel that is defined elsewhere has its bytecode in it, and so Python's version: another Python's package would not have it.
"""


def source_hash(paths: Sequence[str] = SOURCE_PATHS) -> str:
    """A hash of the sources in `paths` of the package, files and folders that end with a slash: those that can change code."""
    package = str(Path(nbcnn.__file__).parent)
    names = [name for name in paths if os.path.isfile(os.path.join(package, name))]
    for root in (name for name in paths if name.endswith("/")):
        for folder, _, files in os.walk(os.path.join(package, root)):
            names += [os.path.join(os.path.relpath(folder, package), file).replace(os.sep, "/") for file in files if file.endswith(".py")]
    digest = hashlib.sha256()
    for name in sorted(names, key=lambda name: name.split("/")):
        with open(os.path.join(package, name), "rb") as source:  # 220 files: pathlib would take 20 ms more
            content = source.read()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


SOURCES = source_hash()
"""The hash when this module was imported, which is before any kernel's: what is edited later is not what this process compiles."""


def folder() -> Path | None:
    """The folder for this version, made if need be; None where no folder can be written that nobody else writes.

    NUMBA_CACHE_DIR, if set, is taken as it is, or refused: raises UsageError if others can write there. Otherwise it is
    nbcnn/kernels-HASH in XDG_CACHE_HOME or ~/.cache, or in a private folder of the system's temporary one.
    """
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        path = Path(chosen)
        if not _made(path):
            return None
        if reason := exposed(path):
            raise UsageError(
                f"NUMBA_CACHE_DIR is {path}, and {reason}. Kernels are loaded from there as code, so whoever writes there decides what runs. "
                f"Make it yours alone (chmod 700 {path}), name an empty folder of your own, or unset NUMBA_CACHE_DIR to use ~/.cache/nbcnn"
            )
        return path
    roots = [Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nbcnn"]
    if hasattr(os, "geteuid"):
        roots.append(Path(tempfile.gettempdir()) / f"nbcnn-{os.geteuid()}")
    for root in roots:
        path = root / f"kernels-{SOURCES}"
        if all(_made(place) and _closed(place) for place in (root, path)) and not exposed(path):
            with suppress(OSError):
                os.utime(path)
                _forget_old(root)
            return path
    return None


def _made(path: Path) -> bool:
    """Whether `path` is a folder that can be written; made for this user alone if it was not there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return False
    return os.access(path, os.W_OK)


def _closed(path: Path) -> bool:
    """Close `path`, a folder with a name of ours, to others. Earlier versions left that to the umask. False if it is another user's."""
    try:
        if hasattr(os, "geteuid") and path.stat().st_uid != os.geteuid():
            return False
        path.chmod(0o700)
    except OSError:
        return False
    return True


def exposed(path: Path) -> str | None:
    """How others can put something into the folder `path` or have done so, in words; None if they cannot."""
    if not hasattr(os, "geteuid"):  # not a Unix: rights are not in the mode
        return None
    me, own = os.geteuid(), path.stat()
    if own.st_uid != me:
        return "it belongs to another user"
    others = own.st_mode & 0o077
    if others & 0o022:
        return "others may write there"
    for name, found in _entries(path):
        if found.st_uid != me:
            return f"{name} in it belongs to another user"
        # Where nobody else may enter the folder, the modes below do not count: they follow the umask.
        if others and found.st_mode & 0o022 and not stat.S_ISLNK(found.st_mode):
            return f"others may write {name} in it"
    return None


def _entries(path: Path | str) -> Iterator[tuple[str, os.stat_result]]:
    """The path and status of everything below `path`. What another process renames or removes meanwhile is left out: this process never loads it."""
    with suppress(FileNotFoundError), os.scandir(path) as entries:
        for entry in entries:
            found = status(entry.path)
            if found is None:
                continue
            yield entry.path, found
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                yield from _entries(entry.path)


def status(path: Path | str) -> os.stat_result | None:
    """The status of a file, a link's own; None where there is none any more. Other processes rename and remove files of the store at any time."""
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


@contextmanager
def locked() -> Iterator[None]:
    """Within, no other process of this user compiles: ranks of one job start together and need the same kernels, which one of them compiles.

    Without effect where nothing is kept on disk, and on systems and file systems that know no such locks.
    """
    path = folder()
    if path is None or fcntl is None:
        yield
        return
    with open(path / "lock", "w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _forget_old(root: Path) -> None:
    """Delete all but the most recently used folders of other versions."""
    for path, _ in by_use(root.glob("kernels-*"))[KEPT + 1 :]:
        shutil.rmtree(path, ignore_errors=True)


def by_use(paths: Iterable[Path]) -> list[tuple[Path, os.stat_result]]:
    """Paths that are still there, with their status; the last used first."""
    there = [(path, found) for path in paths if (found := status(path)) is not None]
    return sorted(there, key=lambda each: each[1].st_mtime, reverse=True)


def clear() -> tuple[int, int]:
    """Delete every kernel that is kept, of all versions; returns how many, and their bytes. Files that are no kernels stay."""
    place = folder()
    if place is None:
        return 0, 0
    folders = set(place.parent.glob("kernels-*")) if place.name.startswith("kernels-") else {place}
    sizes = []
    for path in (path for each in folders for path in each.glob("*.kernel")):
        with suppress(FileNotFoundError):  # which another process has deleted meanwhile
            nbytes = path.stat().st_size
            path.unlink()
            sizes.append(nbytes)
    return len(sizes), sum(sizes)
