"""This module decides where the operands are when a timed call begins: in no cache, in the caches, or where training would leave them.

hot     every call works on the same operands: what fits into the second-level cache stays there.
rotate  calls walk through enough sets of operands that each was evicted since its last use: at least three times the cache in all.
cold    a buffer of twice the cache is overwritten before every call, outside the timed part. (Triton and NVBench flush so too.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import cycle, islice
from math import gcd
from typing import Any

import numpy as np

from nbcnn.gpu import driver
from nbcnn.gpu.language import SIMULATOR, cuda, jit
from nbcnn.lab.measure.timing import by_events, stretch_ms, timer_of
from nbcnn.ops.kernel.call import Launch
from nbcnn.ops.ptx.vector import store4

CACHES = ("cold", "hot", "rotate")
FLUSH_AT_LEAST = 128 * 2**20
MOST_SETS = 64
"""Sets of operands that `rotate` makes at most: of less than a twentieth of the cache each, some stay in it."""
MAX_BUSY_LAUNCHES = 200
"""Launches that `enqueue` makes at most, one by one: five milliseconds of the host's time."""
THREADS = 256
SPAN = 16 * 4 * THREADS
"""Elements that a block fills: sixteen groups of four per thread."""


def cache_bytes(device: Any) -> int:
    """Bytes of the GPU's second-level cache; 32 MiB are taken for a host's last level."""
    on_host = device.name == "host" or SIMULATOR
    return 32 * 2**20 if on_host else driver.device().attribute("L2_CACHE_SIZE")


def sets_for(nbytes: int, device: Any) -> int:
    """Sets of operands of `nbytes` each that together are three times the cache, at least two."""
    return int(max(2, min(MOST_SETS, -(-3 * cache_bytes(device) // max(1, nbytes)))))


@cache
def fill_kernel() -> Any:
    """x[i] = value for all i; count is a multiple of SPAN.

    grid    count / SPAN, block THREADS
    owns    thread: sixteen groups of four, 4·THREADS elements apart
    moves   4·count bytes, all written
    """

    @jit()
    def fill_cache_kernel(x, value):
        start = cuda.blockIdx.x * SPAN + 4 * cuda.threadIdx.x
        for group in range(16):
            store4(x, start + group * 4 * THREADS, value, value, value, value)

    return fill_cache_kernel


class Flush:
    """Overwrites twice the cache of `device`: enqueued on its stream, or done at once on a host."""

    def __init__(self, device: Any) -> None:
        nbytes = 4 * SPAN if SIMULATOR else max(FLUSH_AT_LEAST, 2 * cache_bytes(device))
        count = -(-nbytes // (4 * SPAN)) * SPAN
        self._device, self._buffer = device, device.empty(count, "float32")
        self._launch = None if device.name == "host" else Launch(fill_kernel(), count // SPAN, THREADS, (self._buffer, np.float32(0)))

    def __call__(self) -> None:
        if self._launch is None:
            self._buffer.fill(0)
        else:
            self._launch.run(self._device.stream)


class Calls:
    """Launches as work to be timed (`steady.Work`): `sets[i]` are the launches of one call on the i-th operands.

    graph   n calls are captured once as one CUDA graph and replayed, instead of launched from Python one by one.
    flush   run before every call, outside the timed part (then every call is timed alone, with an event before and behind it).
    capture launches -> a function that replays them; None: as a graph of `device`.
    """

    def __init__(
        self,
        label: str,
        device: Any,
        sets: Sequence[Sequence[Any]],
        *,
        graph: bool = False,
        flush: Callable[[], None] | None = None,
        capture: Callable[[Sequence[Any]], Callable[[], None]] | None = None,
    ) -> None:
        self.label, self._device, self._flush = label, device, flush
        self._capture = capture or device.replayable
        self._sets = [list(launches) for launches in sets]
        self._graph = graph and by_events(device)
        self._next = 0
        self._replays: dict[int, Iterator[Callable[[], None]]] = {}
        self._timer = timer_of(device)
        self.host_ms = 0.0
        """Milliseconds that the host needed to launch one call, in the last repetition."""

    def _walk(self, n: int) -> list[Any]:
        """The launches of the next n calls."""
        count = len(self._sets)
        launches = [launch for at in range(n) for launch in self._sets[(self._next + at) % count]]
        self._next = (self._next + n) % count
        return launches

    def _ready(self, n: int) -> Callable[[], None]:
        """A function that starts n calls."""
        if not self._graph:
            stream = getattr(self._device, "stream", 0)
            launches = self._walk(n)

            def run() -> None:
                for launch in launches:
                    launch.run(stream)

            return run
        if n not in self._replays:
            # A graph holds the addresses that it was captured with: as many graphs as it takes to walk through all sets.
            count = len(self._sets)
            self._replays[n] = cycle([self._capture(self._walk(n)) for _ in range(count // gcd(count, n) if n < count else 1)])
        return next(self._replays[n])

    def enqueue(self, n: int) -> None:
        """Start about n calls without waiting for them; nothing on a host."""
        if self._replays:
            size = next(iter(self._replays))
            for _ in range(-(-n // size)):
                next(self._replays[size])()
        elif by_events(self._device):
            for launch in islice(self._walk(n), MAX_BUSY_LAUNCHES):
                launch.run(self._device.stream)

    def repeat(self, n: int) -> float:
        """Run n calls; milliseconds of one. On a GPU between two events, on a host by its clock."""
        return sum(self._once(1) for _ in range(n)) / n if self._flush else self._once(n)

    def _once(self, n: int) -> float:
        start_all = self._ready(n)
        self._device.synchronize()
        if self._flush:
            self._flush()

        def run() -> None:
            start = time.perf_counter()
            start_all()
            self.host_ms = (time.perf_counter() - start) * 1e3 / n

        return stretch_ms(run, self._timer) / n
