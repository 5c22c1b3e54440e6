"""File systems that know no locks, and calls of the system that fail: flock, rename, fsync, open for writing.

Writers of one folder whose flock fails must exclude each other as `writers` asks. A training of which one call fails, or all from some moment on,
must end with exit code 1 and the name of the file, and its continuation with the bits of one that nothing has happened to.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from . import writers
from .kills import undisturbed
from .training import FLAGS, continued, differences, finished, result

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
FAILING = (errno.EIO, errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ESTALE)
CALLS = ("replace", "fsync")
CALLS_A_TRAINING = 40
"""A training makes about so many of each of CALLS."""


def attack(seed: int, folder: Path) -> None:
    pick = random.Random(seed)
    if seed % 2:
        with without_locks(pick.choice(NO_LOCKS)):
            pick.choice((writers.trainings, writers.features, writers.downloads, writers.killed_owners))(pick, folder)
    else:
        failing_calls(pick, folder)


@contextmanager
def without_locks(number: int) -> Iterator[None]:
    """Within, flock fails with this error, as on NFS without its lock daemon."""

    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    with mock.patch.object(fcntl, "flock", flock):
        yield


@contextmanager
def failing(name: str, numbers: range, error: int, met: Path) -> Iterator[None]:
    """Within, the calls `numbers` of the system's function `name` fail with this error; the file `met` then says so."""
    real: Callable[..., Any] = getattr(os, name)
    count = -1

    def call(*given: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        if count in numbers:
            met.touch()
            raise OSError(error, os.strerror(error), *(given if name == "replace" else ()))
        return real(*given, **more)

    with mock.patch.object(os, name, call):
        yield


def failing_calls(pick: random.Random, folder: Path) -> None:
    """One call of a training fails, or all from one on; then it is continued where nothing fails."""
    asked, run, met, said = undisturbed()[0], folder / "run", folder / "met", folder / "said"
    name, first, error = pick.choice(CALLS), pick.randrange(CALLS_A_TRAINING), pick.choice(FAILING)
    numbers = range(first, first + 1) if pick.random() < 0.5 else range(first, 1 << 30)
    what = f"{name} fails with {errno.errorcode[error]} from call {first}, {'once' if len(numbers) == 1 else 'for ever'}"
    words = [*FLAGS, "--out", run]
    code = finished(words, quick=True, within=failing(name, numbers, error, met), said=str(said))
    text = said.read_text()
    if not met.exists():
        assert code == 0, f"{what}, which was never called: exit code {code}, {text}"
    elif code != 0:
        assert code == 1, f"{what}: exit code {code}: {text}"
        line = text[text.rindex("nbcnn: error: ") :] if "nbcnn: error: " in text else ""
        assert line, f"{what}: no sentence in {text}"
        assert str(run) in line, f"{what}: {line!r} does not say which file"
        code = finished(continued(run), quick=True, said=str(said))
        assert code == 0, f"{what}: continued with exit code {code}: {said.read_text()}"
    different = differences(result(run), asked)
    assert not different, f"{what}: the run differs from the undisturbed one in {different}"
    assert not list(run.glob(".*")), f"{what}: hidden files are left"
