"""This module runs tasks in parallel processes that never outlive the caller, as many as memory allows.

Own processes and pipes instead of a pool, for three promises: Ctrl-C ends them at once, the death of a worker (the kernel
kills when memory runs out) is an error and not a hang, and workers whose parent is gone end by themselves.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, get_context, resource_tracker
from pathlib import Path
from typing import Any

from nbcnn.gpu import memory

MEMORY_BUDGET = 8 << 30
"""Bytes of host memory that all processes together stay under."""


def resident() -> int:
    """Bytes of memory that this process holds, 0 where the system does not say."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


def affordable(per_worker: int) -> int:
    """How many workers of `per_worker` bytes fit beside this process: one per core at most, and at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    room = min(MEMORY_BUDGET - resident(), memory.available())
    return max(1, min(cores, room // per_worker))


def parallel(
    function: Callable[[Any, Any], Any], shared: Any, tasks: Sequence[Any], jobs: int, flag: str = "--jobs"
) -> Generator[tuple[int, Any], None, None]:
    """Yield (position, function(shared, task)) of all `tasks` as they finish; with one job, in this process and in order.

    `function` is a module-level function; it, `shared` and the tasks are pickled. Raises what `function` raised first;
    MemoryError if a worker was killed, which advises a smaller `flag`; RuntimeError if it ended in another way. Closing the generator ends
    the workers.
    """
    if jobs == 1:
        yield from ((at, function(shared, task)) for at, task in enumerate(tasks))
        return
    context = get_context("spawn")
    waiting = iter(enumerate(tasks))
    workers: dict[Any, Any] = {}
    running: dict[Any, int] = {}
    channel: Any
    result: Any
    try:
        for _ in range(min(jobs, len(tasks))):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(theirs, function, shared), daemon=True)
            with _interrupts_wait():
                worker.start()
                workers[ours] = worker
            theirs.close()
            _hand_out(ours, waiting, running)
        while running:
            for channel in connection.wait(list(running)):
                try:
                    good, result = channel.recv()
                except (EOFError, ConnectionError):
                    raise _lost(workers[channel], jobs, flag) from None
                if not good:
                    raise result
                at = running.pop(channel)
                _hand_out(channel, waiting, running)
                yield at, result
    finally:
        for worker in workers.values():
            worker.kill()
        for channel, worker in workers.items():
            channel.close()
            worker.join()


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back; processes started within never see them. Either may reach the whole group, and the parent ends the workers.

    This process handles them at the end of the context, so that no process is started and then forgotten.
    """
    if not hasattr(signal, "pthread_sigmask"):  # no Unix: a thread has no mask there, nor has multiprocessing a resource tracker
        yield
        return
    # Starting the resource tracker's process lifts the mask, so it must run before.
    resource_tracker.ensure_running()
    came: list[int] = []
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        # The mask is this thread's: what another thread of the process gets is still handled in this one.
        handlers = {number: signal.signal(number, lambda number, _: came.append(number)) for number in (signal.SIGINT, signal.SIGTERM)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for number in came:
            signal.raise_signal(number)


def _hand_out(channel: Any, waiting: Iterator[tuple[int, Any]], running: dict[Any, int]) -> None:
    at, task = next(waiting, (None, None))
    if at is not None:
        channel.send(task)
        running[channel] = at


def _lost(worker: Any, jobs: int, flag: str) -> Exception:
    worker.join()
    if worker.exitcode == -getattr(signal, "SIGKILL", 9):
        advice = f"; try {flag} {max(1, jobs // 2)}" if flag else ""
        return MemoryError(f"one of {jobs} worker processes was killed, most likely for memory{advice}")
    return RuntimeError(f"a worker process ended with exit code {worker.exitcode}")


def _serve(channel: Any, function: Callable[[Any, Any], Any], shared: Any) -> None:
    """The main function of a worker: it takes tasks and sends results until the parent closes its end or dies."""
    while True:
        try:
            task = channel.recv()
        except (EOFError, ConnectionError):
            return
        try:
            answer: tuple[bool, Any] = True, function(shared, task)
        except Exception as error:
            answer = False, error
        try:
            channel.send(answer)
        except ConnectionError:
            return
