"""The steps of a training plan timed where they run: between the others, with what those left in the caches."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

from nbcnn.bench.timing import Timing, summarise, time_calls
from nbcnn.cuda import cuda
from nbcnn.program import Program

AHEAD_MS = 2.0
"""Work that the GPU has before a timed step is enqueued, beyond the time that the host needs to enqueue it."""


def time_steps(program: Program, seconds: float = 1.0) -> tuple[list[Timing], Timing]:
    """Milliseconds of every step of a bound plan, and of the whole training step as a CUDA graph.

    The launches are those of the graph, enqueued one by one with an event at every boundary between steps. Replays of the graph go
    before them, so many that the host is done enqueuing before the GPU gets there: no step waits for the host, and the clock is warm.
    """
    place = program.place
    whole = time_calls(program.replay, place, 30, 1.0)
    host = _enqueue_ms(program)
    replays = int((host + AHEAD_MS) / whole.median) + 1
    spent = (replays + 1) * whole.median
    rounds = int(min(200, max(10, seconds * 1e3 / spent)))
    samples: list[list[float]] = [[] for _ in program.bound]
    for _ in range(rounds):
        for _ in range(replays):
            program.replay()
        for at, ms in enumerate(elapsed(record(program))):
            samples[at].append(ms)
    return [summarise(values) for values in samples], whole


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


def _enqueue_ms(program: Program) -> float:
    """What the host needs to enqueue the launches, the second time."""
    for _ in range(2):
        start = time.perf_counter()
        record(program)
        spent = (time.perf_counter() - start) * 1e3
        program.place.synchronize()
    return spent
