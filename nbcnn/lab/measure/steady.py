"""This module warms the GPU up: work runs back to back until its time and the SM clock stand still.

A GPU that nobody uses lowers its clocks (an H200 without a process on it: 345 instead of 1,980 MHz), and heavy work lowers them again
once the power limit is reached; what is timed in between is another GPU. So windows of 50 ms are compared: when over the last five
neither the median time of a call nor the SM clock has moved by 1 %, the state is steady. (cubecl's benchmarks hold a plateau of 250 ms
for the same reason.)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from nbcnn.lab.measure.clocks import clock_of, throttles

WINDOW = 0.05
"""Seconds of one window."""
PLATEAU = 5
"""Windows that must agree."""
CHANGE = 0.01
"""How far they may be apart, as a part of the smallest."""
MIN_SECONDS, MAX_SECONDS = 0.5, 5.0
"""Seconds of warm-up at least and at most."""


class Work(Protocol):
    """Something to time.

    repeat   run n calls, wait for them, and return the milliseconds of one.
    enqueue  start n calls and return at once (nothing on a host): keeps a GPU busy while the host does something else.
    """

    label: str

    def repeat(self, n: int) -> float: ...

    def enqueue(self, n: int) -> None: ...


@dataclass(frozen=True)
class Window:
    """Seconds since the first launch, median milliseconds of a call, the shortest and longest, and the SM clock (None: unknown)."""

    at: float
    ms: float
    least: float
    most: float
    sm_mhz: float | None


@dataclass(frozen=True)
class Warm:
    """The state that warming up ended in: `steady` or not, after how many seconds, milliseconds of a call, clock, what throttles."""

    steady: bool
    seconds: float
    ms: float
    sm_mhz: float | None
    throttles: frozenset[str]
    windows: tuple[Window, ...]


def stands_still(windows: Sequence[Window]) -> bool:
    """True if the last `PLATEAU` windows agree within `CHANGE`, in time and (where it is known) in clock."""
    last = windows[-PLATEAU:]
    if len(last) < PLATEAU:
        return False
    series = [[window.ms for window in last], [window.sm_mhz for window in last if window.sm_mhz is not None]]
    return all(max(values) - min(values) < CHANGE * min(values) for values in series if values)


def warm_up(works: Sequence[Work], watch: Any, seconds: float | None = None, bounds: tuple[float, float] | None = None) -> Warm:
    """Run `works` in turn until they are steady, or for `seconds` (0: once).

    `bounds` are the shortest and the longest time in seconds; None means `MIN_SECONDS`, `MAX_SECONDS`.
    """
    start = time.perf_counter()
    least, most = bounds or (MIN_SECONDS, MAX_SECONDS)
    for work in works:
        work.repeat(1)
    calls = [_calls(work) for work in works]
    windows: list[Window] = []
    while True:
        begin = time.perf_counter()
        spent: list[float] = []
        while not spent or time.perf_counter() - begin < WINDOW:
            spent.append(sum(work.repeat(n) for work, n in zip(works, calls, strict=True)))
        now = time.perf_counter()
        clock = clock_of(watch.since(begin))
        windows.append(Window(now - start, median(spent), min(spent), max(spent), clock))
        elapsed, still = now - start, stands_still(windows)
        done = elapsed >= seconds if seconds is not None else (elapsed >= least and still) or elapsed >= most
        if done:
            return Warm(still, elapsed, windows[-1].ms, clock, throttles(watch.since(begin)), tuple(windows))


def _calls(work: Work, milliseconds: float = 5.0) -> int:
    """Calls that fill about `milliseconds`: long enough that the gap between two repetitions does not cool anything down."""
    return int(min(1000, max(1, milliseconds / max(work.repeat(1), 1e-4))))
