"""Where compiled kernels are kept between runs: one folder per version of the kernels' sources.

Numba finds a cached kernel by its own file, its code and its closure, and does not notice that a device function or an
intrinsic in another file has changed. A folder named after a hash of all sources cannot hold a stale kernel.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import nbcnn

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

KEPT = 3
"""Folders of other versions that stay: switching between branches does not compile everything again."""


def source_hash() -> str:
    """A hash of everything that kernels are made of: nbcnn/ops and nbcnn/gpu."""
    package = Path(nbcnn.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for folder in ("ops", "gpu") for path in (package / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


SOURCES = source_hash()
"""The hash when this module was imported, which is before any kernel's: what is edited later is not what this process compiles."""


def folder() -> Path | None:
    """The folder for this version, made if need be; None where it cannot be written.

    NUMBA_CACHE_DIR, if set, is taken as it is. Otherwise it is nbcnn/kernels-HASH in XDG_CACHE_HOME or ~/.cache.
    """
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nbcnn"
    path = Path(chosen) if chosen else root / f"kernels-{SOURCES}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            return None
        if not chosen:
            os.utime(path)
            _forget_old(root)
    except OSError:
        return None
    return path


@contextmanager
def locked() -> Iterator[None]:
    """Within, no other process of this user compiles: Numba's index of cached kernels does not stand several writers at once.

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
    by_use = sorted(root.glob("kernels-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in by_use[KEPT + 1 :]:
        shutil.rmtree(path, ignore_errors=True)
