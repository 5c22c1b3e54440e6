"""Processes that fill, read, list, trim and clear one store of compiled kernels at the same time.

It is survived if no call raises, every kernel that is found is whole, and a folder that nobody else can write is never said to be exposed.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
import time
import traceback
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from nbcnn.cli import cache
from nbcnn.gpu import kernel_cache, kernel_store
from nbcnn.gpu.kernel_store import Stored, Wanted
from nbcnn.run.peak_kernels import wait_kernel

ARCHITECTURES = ("75", "80", "86", "89", "90a", "100", "120")
LISTED = SimpleNamespace(arch=None, multiprocessors=None, into=None, models=[], json=True)
"""The flags of `nbcnn cache list --json`."""


def attack(seed: int, folder: Path) -> None:
    """Six processes, for half a second."""
    together(6, 0.5, seed, folder)


def together(processes: int, seconds: float, seed: int, folder: Path) -> None:
    """Raise AssertionError, with a traceback, if a call of one of so many processes raised, or found what it must not."""
    os.chmod(folder, 0o700)
    context = get_context("fork")
    complaints: Any = context.SimpleQueue()
    members = [context.Process(target=_member, args=(seed * 1000 + number, seconds, folder, complaints)) for number in range(processes)]
    for member in members:
        member.start()
    for member in members:
        member.join(seconds + 120)
    hanging = [member for member in members if member.exitcode is None]
    for member in hanging:
        member.kill()
    assert not hanging, f"{len(hanging)} processes hang"
    assert complaints.empty(), complaints.get()
    assert not any(member.exitcode for member in members)


def _member(seed: int, seconds: float, folder: Path, complaints: Any) -> None:
    kernel_store.folder.cache_clear()
    pick, until = random.Random(seed), time.perf_counter() + seconds
    with mock.patch.dict(os.environ, NUMBA_CACHE_DIR=str(folder)), contextlib.redirect_stdout(io.StringIO()):
        try:
            while time.perf_counter() < until:
                _call(pick, folder)
        except Exception:
            complaints.put(traceback.format_exc())
            sys.exit(1)


def _call(pick: random.Random, folder: Path) -> None:
    wanted = Wanted(wait_kernel, ("int32",), pick.choice(ARCHITECTURES))
    key = wanted.key()
    cubin = wanted.arch.encode() * 1000
    way = pick.randrange(20)
    if way < 8:
        header = {"key": key, "name": wanted.name, "module": "m", "types": list(wanted.types), "arch": wanted.arch, "entry": "e"}
        kernel_store.keep(wanted, Stored(header | {"compilers": kernel_store.compilers(), "seconds": 0.5}, cubin), folder)
    elif way < 12:
        found = kernel_store.own(wanted, key)
        assert found is None or found.cubin == cubin
    elif way < 16:
        assert kernel_cache.folder() == folder
    elif way < 17:
        kernel_store.trim(pick.choice([0, 5000]))
    elif way < 18:
        kernel_cache.clear()
    elif way < 19:
        assert kernel_store.summary(folder)["kernels"] <= len(ARCHITECTURES)
    else:
        cache._list(LISTED)
