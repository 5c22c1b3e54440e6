"""This module compiles kernels in several processes: compilers hold one lock while they compile, so threads would wait for each other.

A worker is told what a kernel is (`nbcnn.gpu.identity`), makes it again, compiles it without a GPU and answers with the file for the store
(`nbcnn.gpu.kernel_store`), which this process checks, writes and loads. Workers stay until this process ends, so that the next kernels find
them with Numba imported. What takes longest to compile comes first, by the size of its code.
"""

from __future__ import annotations

import atexit
import base64
import json
import os
import queue
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbcnn
from nbcnn.gpu import driver, identity, launching
from nbcnn.gpu.compiler import SIMULATOR
from nbcnn.gpu.kernel_cache import locked
from nbcnn.gpu.kernel_store import Stored, Wanted, compile_now, compilers, find, folder, in_package, keep, key_of, load, own, parsed, trim

MOST_WORKERS = 12
WORTH_A_WORKER = 2
"""Kernels a worker should have: starting one takes as long as compiling about that many."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """A kernel that is to be compiled, and its key; an empty key for one that cannot be kept."""

    wanted: Wanted
    key: str


def missing(launches: Iterable[Any], arch: str | None = None, package: Path | None = None) -> list[Job]:
    """The kernels of `launches` that are neither loaded nor on disk (`package`: in this one), each once. Those on disk are loaded.

    With `arch` nothing is loaded: that is for compiling for a GPU that need not be here.
    """
    jobs: dict[tuple[int, tuple[str, ...]], Job] = {}
    for launch in launches:
        if SIMULATOR or getattr(launch, "kernel", None) is None:
            continue
        types = launching.signature(launch.args)
        if (id(launch.kernel), types) in jobs or (arch is None and types in launch.kernel.loaded):
            continue
        wanted = Wanted(launch.kernel, types, arch or driver.arch())
        key = key_of(wanted) or ""
        stored = (find(wanted, key) if package is None else in_package(wanted, key, package)) if key else None
        if package is not None and stored is not None and stored.header["compilers"] != compilers():
            stored = None  # a package is of one toolkit: what is left of another is replaced
        if stored is not None and arch is None:
            with suppress(driver.DriverError):  # another driver's precompiled kernel: compiled here instead
                load(wanted, stored)
                continue
        if stored is None or arch is None:
            jobs[id(launch.kernel), types] = Job(wanted, key)
    return list(jobs.values())


def compile_all(launches: Iterable[Any], say: Say | None = None) -> int:
    """Compile what `launches` need and has not been compiled before, and load it; returns how many kernels that were.

    `say` is told how far it is. What a worker could not do this process does, whose error then has a place.
    """
    launches = list(launches)
    if not missing(launches):
        return 0
    with nullcontext() if _alone else locked():
        # Ranks of one job start together; those that had to wait find what the first compiled.
        return _compile(missing(launches), say, load)


def compile_for(launches: Iterable[Any], arch: str, target: Path | None = None, say: Say | None = None) -> list[Stored]:
    """Compile what `launches` need on a GPU of `arch`, which need not be here, into `target` or the user's folder; returns what was compiled."""
    made: list[Stored] = []

    def take(wanted: Wanted, stored: Stored) -> None:
        if target is not None:
            keep(wanted, stored, target)
        made.append(stored)

    with locked():
        jobs = missing(launches, arch, target)
        # What this machine's compiler made for the user is as good.
        for job in list(jobs) if target is not None else ():
            if job.key and (stored := own(job.wanted, job.key)) is not None:
                keep(job.wanted, stored, target)
                jobs.remove(job)
        _compile(jobs, say, take)
    return made


def sizes(launches: Iterable[Any], arch: str, target: Path | None = None) -> dict[str, int]:
    """Bytes of each kernel of `launches` for `arch` that is on disk, in the package `target` or where this process looks, by its file's key."""
    found: dict[str, int] = {}
    for launch in launches:
        if getattr(launch, "kernel", None) is not None:
            wanted = Wanted(launch.kernel, launching.signature(launch.args), arch)
            key = key_of(wanted)
            stored = (find(wanted, key) if target is None else in_package(wanted, key, target)) if key else None
            if stored is not None:
                found[stored.header["key"]] = len(stored.content())
    return found


def _compile(jobs: list[Job], say: Say | None, take: Callable[[Wanted, Stored], Any]) -> int:
    began, done = time.perf_counter(), 0
    jobs.sort(key=_effort, reverse=True)
    if _alone:  # those that need the same kernels begin with different ones
        jobs.sort(key=lambda job: zlib.crc32(f"{os.getpid()} {job.key}".encode()))
    answered: set[int] = set()

    def finish(at: int, stored: Stored, where: str) -> None:
        nonlocal done
        answered.add(at)
        done += 1
        if jobs[at].key:
            keep(jobs[at].wanted, stored)
        take(jobs[at].wanted, stored)
        if say:
            seconds = time.perf_counter() - began
            say(f"compiled {done} of {len(jobs)} kernels in {seconds:.1f} s{where}: {stored.header['name']} took {stored.header['seconds']:.1f} s")

    workers = min(MOST_WORKERS, _cores(), len(jobs) // WORTH_A_WORKER)
    if workers > 1:
        _share_out(jobs, workers, lambda at, stored: finish(at, stored, f" in {workers} processes"))
        if say and not answered:
            say("no worker process could compile; going on in this one")
    for at, job in enumerate(jobs):
        if at not in answered:
            if say:
                say(f"compiling kernel {done + 1} of {len(jobs)}: {job.wanted.name}")
            there = find(job.wanted, job.key) if _alone and job.key else None  # another process's, meanwhile
            finish(at, there or compile_now(job.wanted, job.key), "")
    trim()
    return len(jobs)


_alone = False


def compile_alone() -> None:
    """Have this process compile on one core and wait for nobody: it is one of many on a machine, which find in the store what another compiled."""
    global _alone
    _alone = True


def _cores() -> int:
    if _alone:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


# What takes long


def _effort(job: Job) -> float:
    """How long a kernel takes to compile, beside others."""
    return identity.size(job.wanted.kernel)


# Workers


class _Worker:
    """A process that compiles. Raises OSError if it cannot be started."""

    def __init__(self) -> None:
        # The package need not be installed, and the working directory need not be its own.
        paths = [str(Path(nbcnn.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        # It sees no GPU: compiling needs none, and opening one would take memory of it.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
        # A worker's own words are nobody's: what fails there fails again here.
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([sys.executable, "-m", __name__], env=environment, **pipes)

    def ask(self, request: bytes) -> bytes | None:
        """The answer to a line; None from a worker that has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(request + b"\n")
            self.process.stdin.flush()
            return self.process.stdout.readline() or None
        except OSError:
            return None

    def end(self) -> None:
        """Kill it and forget it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                with suppress(OSError):
                    pipe.close()


_idle: list[_Worker] = []
"""Workers that wait for the next kernels."""


def warm_up(kernels: int = 2 * MOST_WORKERS) -> None:
    """Start the workers for about so many kernels, which then import Numba while this process does other things. Without effect on one core."""
    for _ in range(min(MOST_WORKERS, _cores(), kernels // WORTH_A_WORKER) - len(_idle) if _cores() > 1 and not SIMULATOR else 0):
        with suppress(OSError):
            _idle.append(_Worker())


def warm_up_if_empty() -> None:
    """`warm_up` where the store holds next to nothing, so that there will be much to compile."""
    found = folder()
    if found is None or sum(1 for _ in zip(found.glob("*.kernel"), range(8), strict=False)) < 8:
        warm_up()


@atexit.register
def dismiss() -> None:
    """End the workers that wait for kernels."""
    while _idle:
        _idle.pop().end()


def _share_out(jobs: list[Job], workers: int, done: Callable[[int, Stored], None]) -> None:
    """Let `workers` processes take one job after another, until none is left; `done` hears of each that compiled, one at a time."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for at, job in enumerate(jobs):
        if job.key:
            waiting.put(at)
    lock = threading.Lock()
    busy: list[_Worker] = []
    failed: list[BaseException] = []

    def feed() -> None:
        with lock:
            worker = _idle.pop() if _idle else _Worker()
            busy.append(worker)
        while True:
            try:
                at = waiting.get_nowait()
            except queue.Empty:
                break
            wanted, key = jobs[at].wanted, jobs[at].key
            try:
                request = {"recipe": identity.recipe(wanted.kernel), "types": wanted.types, "arch": wanted.arch, "key": key}
            except identity.Unknown:  # this process compiles it
                continue
            answer = worker.ask(json.dumps(request).encode())
            if answer is None:
                return
            stored = parsed(base64.b64decode(answer))
            if stored is not None and stored.header["key"] == key:
                with lock:
                    try:
                        done(at, stored)
                    except BaseException as error:  # loading it failed: for the thread that waits
                        failed.append(error)
                        return
        with lock:
            busy.remove(worker)
            _idle.append(worker)

    feeders = [threading.Thread(target=feed, daemon=True) for _ in range(workers)]
    try:
        for feeder in feeders:
            feeder.start()
        for feeder in feeders:
            feeder.join()
    finally:
        # An interrupt leaves here: the workers that are at work go, and one that is only starting finds nothing to do.
        with suppress(queue.Empty):
            while True:
                waiting.get_nowait()
        for worker in list(busy):
            worker.end()
    if failed:
        raise failed[0]


def main() -> int:
    """A worker: one request per line on stdin, in JSON, answered by a line on stdout: the file for the store in base64, or nothing if the
    kernel does not compile here."""
    from nbcnn.gpu.compiler import numba_cuda

    numba_cuda()
    for line in sys.stdin.buffer:
        try:
            asked = json.loads(line)
            wanted = Wanted(identity.made_again(asked["recipe"]), tuple(asked["types"]), asked["arch"])
            if wanted.key() != asked["key"]:
                raise ValueError("another kernel")
            answer = compile_now(wanted, asked["key"]).content()
        except Exception:  # whatever it is, the parent meets it again where it can say what it was doing
            answer = b""
        sys.stdout.buffer.write(base64.b64encode(answer) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    # As the module that others import, not a second one named __main__.
    from nbcnn.gpu import compile_pool

    sys.exit(compile_pool.main())
