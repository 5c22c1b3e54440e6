"""This module compiles kernels in several processes: Numba holds one lock while it compiles, so threads would wait for each other.

Each worker compiles what it is given and hands it back; this process alone writes the disk cache (`nbcnn.gpu.kernel_cache`),
whose index several writers would spoil.
"""

from __future__ import annotations

import base64
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbcnn
from nbcnn.gpu.compiler import SIMULATOR, adopt, argument_types, compile_apart, loaded_kernel, numba_cuda
from nbcnn.gpu.kernel_cache import locked
from nbcnn.gpu.language import resolved

MOST_WORKERS = 12
WORTH_A_WORKER = 2
"""Kernels a worker should have: starting one takes as long as compiling about that many."""

Job = tuple[Any, tuple[Any, ...]]
"""A kernel as Numba knows it, and the Numba types of its arguments."""


def missing(launches: Iterable[Any]) -> list[Job]:
    """The kernels of `launches` that are neither loaded nor on disk, each once. Those on disk are loaded."""
    jobs: dict[tuple[int, tuple[Any, ...]], Job] = {}
    for launch in launches:
        if SIMULATOR or getattr(launch, "kernel", None) is None:
            continue
        kernel = resolved(launch.kernel)
        types = argument_types(kernel, launch.args)
        key = (id(kernel), types)
        if key not in jobs and not loaded_kernel(kernel, types):
            jobs[key] = (kernel, types)
    return list(jobs.values())


def compile_all(launches: Iterable[Any], say: Callable[[str], None] | None = None) -> int:
    """Compile what `launches` need and has not been compiled before; returns how many kernels that were.

    `say` is told how far it is. What a worker could not do is left to the launch itself, whose error then has a place.
    """
    launches = list(launches)
    if not missing(launches):
        return 0
    with locked():
        # Ranks of one job start together; those that had to wait find what the first compiled.
        return _compile(missing(launches), say)


def _compile(jobs: list[Job], say: Callable[[str], None] | None) -> int:
    workers = min(MOST_WORKERS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, len(jobs) // WORTH_A_WORKER)
    if workers > 1:
        _share_out(jobs, workers, say)
    for at, (kernel, types) in enumerate(jobs):
        if types in kernel.overloads:
            continue
        if say:
            say(f"compiling kernel {at + 1} of {len(jobs)}: {kernel.py_func.__name__}")
        kernel.compile(types)
    return len(jobs)


def _share_out(jobs: list[Job], workers: int, say: Callable[[str], None] | None) -> None:
    """Let `workers` processes take one job after another, until none is left."""
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    lock, done = threading.Lock(), [0]

    started: list[subprocess.Popen[bytes]] = []
    # A worker's own words are nobody's: what fails there fails again here.
    command = [sys.executable, "-m", __name__]
    # The package need not be installed, and the working directory need not be its own.
    paths = [str(Path(nbcnn.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}

    def feed() -> None:
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as worker:
            started.append(worker)
            assert worker.stdin is not None
            assert worker.stdout is not None
            while True:
                try:
                    kernel, types = waiting.get_nowait()
                except queue.Empty:
                    break
                try:
                    worker.stdin.write(_line(pickle.dumps((kernel, types))))
                    worker.stdin.flush()
                except BrokenPipeError:
                    break
                answer = worker.stdout.readline()
                if not answer:
                    break
                with lock:
                    if compiled := base64.b64decode(answer):
                        adopt(kernel, types, compiled)
                    done[0] += 1
                    if say:
                        say(f"compiled {done[0]} of {len(jobs)} kernels in {workers} processes")
            try:
                worker.stdin.close()
            except BrokenPipeError:
                return

    feeders = [threading.Thread(target=feed, daemon=True) for _ in range(workers)]
    try:
        for feeder in feeders:
            feeder.start()
        for feeder in feeders:
            feeder.join()
    finally:
        # An interrupt leaves here: the workers go, and one that is only starting finds nothing to do.
        with suppress(queue.Empty):
            while True:
                waiting.get_nowait()
        for worker in started:
            worker.kill()
    if say and not done[0]:
        say("no worker process could compile; going on in this one")


def _line(content: bytes) -> bytes:
    return base64.b64encode(content) + b"\n"


def main() -> int:
    """A worker: one pickled job a line on stdin, answered by a line on stdout: the kernel, or nothing if it does not compile."""
    numba_cuda()
    for line in sys.stdin.buffer:
        try:
            answer = compile_apart(*pickle.loads(base64.b64decode(line)))  # noqa: S301 - from the process that started this one
        except Exception:  # whatever it is, the parent meets it again where it can say what it was doing
            answer = b""
        sys.stdout.buffer.write(_line(answer))
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
