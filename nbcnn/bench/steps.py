"""The steps of a training plan timed where they run: between the others, with what those left in the caches."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

from nbcnn.bench.timing import Timing, sensible_count, summarise, time_calls
from nbcnn.cuda import cuda
from nbcnn.program import Program

AHEAD_MS = 2.0
"""Work that the GPU has before a timed step is enqueued, beyond the time that the host needs to enqueue it."""
WARM_SECONDS = 1.0


def time_steps(session: Any, seconds: float = 1.0) -> tuple[list[Timing], Timing]:
    """Milliseconds of every step of a session's plan (of a full batch), and of the whole training step as a CUDA graph.

    The launches are those of the graph, enqueued one by one with an event at every boundary between steps. Replays of the graph go
    before them, so many that the host is done enqueuing before the GPU gets there: no step waits for the host, and the clock is warm.
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
    samples: list[list[float]] = [[] for _ in session.program.bound]
    for _ in range(rounds):
        _replays(session, replays)
        for at, ms in enumerate(elapsed(_record(session))):
            samples[at].append(ms)
    place.synchronize()
    return [summarise(values) for values in samples], whole


def epoch_images(batch: int) -> int:
    """Images that an epoch should have where single steps are timed: whole batches."""
    return batch * max(8, min(400, 65_536 // batch))


def record(program: Program) -> list[Any]:
    """Enqueue every launch, with an event before the first step and after each; returns the events."""
    stream = program.place.stream
    events = [cuda.event() for _ in range(len(program.bound) + 1)]
    events[0].record(stream)
    for event, (_, launches) in zip(events[1:], program.bound, strict=True):
        for launch in launches:
            launch.run(stream)
        event.record(stream)
    return events


def elapsed(events: list[Any]) -> list[float]:
    """Milliseconds between neighbouring events, once they have happened."""
    events[-1].synchronize()
    return [float(cuda.event_elapsed_time(a, b)) for a, b in pairwise(events)]


def _record(session: Any) -> list[Any]:
    """One training step by `record`."""
    events: list[Any] = []
    session.step(lambda program: events.extend(record(program)))
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
