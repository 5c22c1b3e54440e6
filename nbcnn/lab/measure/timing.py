"""This module times calls: everything is compiled first, the work itself warms the clocks, and an event stands at every boundary."""

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


def time_calls(call: Callable[[], None], device: Any, count: int, warm_seconds: float = WARM_SECONDS) -> Timing:
    """Time `count` calls one after another, after warming up for `warm_seconds`.

    On a GPU by events at every boundary, so that gaps between launches count; on the host by the wall clock.
    """
    until = time.perf_counter() + warm_seconds
    call()
    device.synchronize()
    while time.perf_counter() < until:
        for _ in range(4):
            call()
        device.synchronize()
    if device.name == "host" or SIMULATOR:
        spent = []
        for _ in range(count):
            start = time.perf_counter()
            call()
            spent.append((time.perf_counter() - start) * 1e3)
        return summarise(spent)
    events = [new_event() for _ in range(count + 1)]
    events[0].record(device.stream)
    for event in events[1:]:
        call()
        event.record(device.stream)
    device.synchronize()
    return summarise([elapsed_ms(a, b) for a, b in pairwise(events)])


def sensible_count(estimate_ms: float, seconds: float = 1.0, least: int = 5, most: int = 300) -> int:
    """How many calls of `estimate_ms` fill about `seconds`."""
    return int(min(most, max(least, seconds * 1e3 / max(estimate_ms, 1e-6))))
