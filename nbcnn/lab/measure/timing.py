"""This module times calls: everything is compiled first, the work itself warms the clocks, and an event stands at every boundary.

A `Timer` marks moments between calls: with CUDA events of a device's stream, with PyTorch's (`nbcnn.lab.peers.torch_step`), or with the host's clock.
Every measurement of the laboratory is one of three: `each_ms` of several calls, a `stretch_ms` of work between two moments, or the host's `wall_ms`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from nbcnn.gpu.device import elapsed_ms
from nbcnn.gpu.device import event as new_event
from nbcnn.gpu.language import SIMULATOR

WARM_SECONDS = 0.5
"""An idle H200 runs its SMs at 345 MHz and needs sustained work to reach 1,980 MHz."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call: median, 5th and 95th percentile, least, most, mean; their coefficient of variation; and how many values."""

    median: float
    p5: float
    p95: float
    least: float
    count: int
    most: float
    mean: float
    cv: float

    def per(self, calls: int) -> Timing:
        """The same for one of `calls` equal parts."""
        parts = {name: getattr(self, name) / calls for name in ("median", "p5", "p95", "least", "most", "mean")}
        return replace(self, **parts)

    def as_dict(self) -> dict[str, Any]:
        return {name: value if name == "count" else round(value, 5) for name, value in asdict(self).items()}


def summarise(milliseconds: Sequence[float]) -> Timing:
    """The statistics of single calls."""
    values = np.asarray(milliseconds)
    p5, median, p95 = (float(value) for value in np.percentile(values, [5, 50, 95]))
    mean = float(values.mean())
    return Timing(median, p5, p95, float(values.min()), len(values), float(values.max()), mean, float(values.std()) / mean if mean else 0.0)


@dataclass(frozen=True)
class Timer:
    """What marks moments in a sequence of work.

    moment   makes a moment that is not marked yet: events are made before the work, so that making them takes none of its time.
    mark     marks a moment, behind the work that has been enqueued so far.
    between  gives the milliseconds between two marked moments whose work is done.
    wait     returns when all work that has been enqueued is done.
    """

    moment: Callable[[], Any]
    mark: Callable[[Any], None]
    between: Callable[[Any, Any], float]
    wait: Callable[[], None]


def by_events(device: Any) -> bool:
    """True if moments on `device` are CUDA events; on a host, and in the simulator, work is done when its call returns."""
    return bool(device.name == "gpu" and not SIMULATOR)


def timer_of(device: Any) -> Timer:
    """The timer of a device: events of its stream, so that gaps between launches count, or the host's clock."""
    if not by_events(device):
        return Timer(lambda: [0.0], _look, lambda a, b: (b[0] - a[0]) * 1e3, device.synchronize)
    return Timer(new_event, lambda moment: moment.record(device.stream), elapsed_ms, device.synchronize)


def _look(moment: list[float]) -> None:
    moment[0] = time.perf_counter()


def each_ms(call: Callable[[], Any], count: int, timer: Timer) -> list[float]:
    """Milliseconds of each of `count` calls one after another, with a moment at every boundary."""
    moments = [timer.moment() for _ in range(count + 1)]
    timer.mark(moments[0])
    for moment in moments[1:]:
        call()
        timer.mark(moment)
    timer.wait()
    return [timer.between(a, b) for a, b in pairwise(moments)]


def stretch_ms(run: Callable[[], Any], timer: Timer) -> float:
    """Milliseconds of what `run` enqueues, between one moment before it and one behind it."""
    return each_ms(run, 1, timer)[0]


def wall_ms(run: Callable[[], Any], wait: Callable[[], None]) -> float:
    """Milliseconds by the host's clock until what `run` starts is done, after waiting for what was started earlier."""
    wait()
    start = time.perf_counter()
    run()
    wait()
    return (time.perf_counter() - start) * 1e3


def warm(call: Callable[[], Any], wait: Callable[[], None], seconds: float, at_a_time: int = 4) -> None:
    """Call once, and again until `seconds` have gone by."""
    until = time.perf_counter() + seconds
    call()
    wait()
    while time.perf_counter() < until:
        for _ in range(at_a_time):
            call()
        wait()


def time_calls(call: Callable[[], Any], device: Any, count: int, warm_seconds: float = WARM_SECONDS) -> Timing:
    """Time `count` calls one after another, after warming up for `warm_seconds`."""
    timer = timer_of(device)
    warm(call, timer.wait, warm_seconds)
    return summarise(each_ms(call, count, timer))


def sensible_count(estimate_ms: float, seconds: float = 1.0, least: int = 5, most: int = 300) -> int:
    """How many calls of `estimate_ms` fill about `seconds`."""
    return int(min(most, max(least, seconds * 1e3 / max(estimate_ms, 1e-6))))
