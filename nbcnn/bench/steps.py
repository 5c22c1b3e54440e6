"""The steps of a training plan timed where they run: between the others, with what those left in the caches."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from nbcnn.bench.timing import Timing, sensible_count, summarise, time_calls
from nbcnn.cuda import cuda
from nbcnn.program import Program
from nbcnn.timeline import wait_launch

AHEAD_MS = 2.0
"""Work that the GPU has before a timed step is enqueued, beyond the time that the host needs to enqueue it."""
WARM_SECONDS = 1.0


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of every step of a plan, of the whole training step as a CUDA graph, and what an event between two steps costs."""

    steps: list[Timing]
    whole: Timing
    event_ms: float


def time_steps(session: Any, seconds: float = 1.0) -> StepTimes:
    """Time the steps of a session's plan (of a full batch) where they run, and the whole training step.

    The launches are those of the graph, enqueued one by one with an event at every boundary between steps. Replays of the graph go
    before them, so many that the host is done enqueuing before the GPU gets there: no step waits for the host, and the clock is warm.
    An event between two kernels keeps the second from starting at once. What that costs is measured, by the same launches with an
    event only before the first and after the last, and taken off every step.
    The session trains meanwhile; an epoch must have room for a few steps (`epoch_images`).
    """
    place, per_epoch = session.net.place, session.steps_per_epoch
    until = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < until:
        _replays(session, per_epoch)
    estimate = _whole(session, min(5, per_epoch)).median
    whole = _whole(session, min(per_epoch, sensible_count(estimate, seconds)))
    replays = min(per_epoch - 1, int((_enqueue_ms(session) + AHEAD_MS) / whole.median) + 1)
    rounds = int(min(200, max(10, seconds * 1e3 / ((replays + 1) * whole.median))))
    rows, unbroken = [], []
    for _ in range(rounds):
        _replays(session, replays)
        rows.append(elapsed(_record(session)))
        _replays(session, replays)
        unbroken += elapsed(_record(session, inside=False))
    place.synchronize()
    spent = np.array(rows)
    event_ms = max(0.0, (float(np.median(spent, 0).sum()) - float(np.median(unbroken))) / spent.shape[1])
    return StepTimes([summarise(values) for values in np.maximum(spent - event_ms, 0.0).T], whole, event_ms)


def time_alone(session: Any, rounds: int = 7, rest: float = 0.02) -> list[float]:
    """Median milliseconds of every step with a rest before it: the clock is that of a GPU with little to do, as under a profiler.

    Before each the GPU waits until the host has enqueued its launches.
    """
    place, stream, rows = session.net.place, session.net.place.stream, []

    def one_by_one(program: Program) -> None:
        spent = []
        for _, launches in program.bound:
            place.synchronize()
            time.sleep(rest)
            pair = (cuda.event(), cuda.event())
            wait_launch(AHEAD_MS).run(stream)
            pair[0].record(stream)
            for launch in launches:
                launch.run(stream)
            pair[1].record(stream)
            spent += elapsed(list(pair))
        rows.append(spent)

    for _ in range(rounds):
        _replays(session, 0)
        session.step(one_by_one)
    return [float(ms) for ms in np.median(rows, 0)]


def epoch_images(batch: int) -> int:
    """Images that an epoch should have where single steps are timed: whole batches."""
    return batch * max(8, min(400, 65_536 // batch))


def record(program: Program, inside: bool = True) -> list[Any]:
    """Enqueue every launch, with an event before the first step and after each, or only after the last; returns the events."""
    stream, events = program.place.stream, [cuda.event()]
    events[0].record(stream)
    for at, (_, launches) in enumerate(program.bound, 1):
        for launch in launches:
            launch.run(stream)
        if inside or at == len(program.bound):
            events.append(cuda.event())
            events[-1].record(stream)
    return events


def elapsed(events: list[Any]) -> list[float]:
    """Milliseconds between neighbouring events, once they have happened."""
    events[-1].synchronize()
    return [float(cuda.event_elapsed_time(a, b)) for a, b in pairwise(events)]


def _record(session: Any, inside: bool = True) -> list[Any]:
    """One training step by `record`."""
    events: list[Any] = []
    session.step(lambda program: events.extend(record(program, inside)))
    return events


def _replays(session: Any, count: int) -> None:
    """`count` training steps, and room for one more in the epoch."""
    if session.steps_left <= count:
        session.begin_epoch(0)
    for _ in range(count):
        session.step()


def _whole(session: Any, count: int) -> Timing:
    """`count` training steps in a row."""
    session.begin_epoch(0)
    return time_calls(session.step, session.net.place, count - 1, 0.0)


def _enqueue_ms(session: Any) -> float:
    """What the host needs to enqueue the launches, the second time."""
    spent = 0.0
    for _ in range(2):
        _replays(session, 0)
        start = time.perf_counter()
        events = _record(session)
        spent = (time.perf_counter() - start) * 1e3
        elapsed(events)
    return spent
