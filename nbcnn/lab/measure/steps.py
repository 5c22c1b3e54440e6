"""This module times the steps of a training plan where they run: between the others, with what those left in the caches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from nbcnn.gpu.driver import Event
from nbcnn.lab.measure.timing import Timing, sensible_count, stretch_ms, summarise, time_calls, timer_of
from nbcnn.run.program import Program
from nbcnn.run.timeline import wait_launch

AHEAD_MS = 2.0
"""Work that the GPU has before a timed step is enqueued."""
WARM_SECONDS = 1.0


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of every step of a plan, of the whole training step as a CUDA graph, and what an event between two steps costs."""

    steps: list[Timing]
    whole: Timing
    event_ms: float


def time_steps(session: Any, seconds: float = 1.0) -> StepTimes:
    """Time the steps of a session's plan (of a full batch) where they run, and the whole training step.

    They are timed in the training step's CUDA graph, captured once more with an event at every boundary between steps, in one line: small batches,
    whose own graph has a side branch, take longer in sum. Replays of the plain graph go before it: the GPU has not rested, and the clock is warm.
    An event between two kernels keeps the second from starting at once. What that costs is measured, by the same graph with an event only
    before the first step and after the last, and taken off every step.
    The session trains meanwhile; an epoch must have room for a few steps (`epoch_images`).
    """
    per_epoch = session.steps_per_epoch
    until = time.perf_counter() + WARM_SECONDS
    estimate = _whole(session, min(5, per_epoch)).median
    while time.perf_counter() < until:  # few at a time, waited for: of a slow step the host would enqueue minutes before a second is over
        estimate = _whole(session, min(per_epoch, sensible_count(estimate, WARM_SECONDS / 10))).median
    whole = _whole(session, min(per_epoch, sensible_count(estimate, seconds)))
    replays = min(per_epoch - 1, int(AHEAD_MS / whole.median) + 1)
    rounds = int(min(200, max(10, seconds * 1e3 / (2 * (replays + 1) * whole.median))))
    inside, around = _marked(session, inside=True), _marked(session, inside=False)
    rows: list[list[float]] = []
    unbroken: list[list[float]] = []
    for _ in range(rounds):
        for marked, found in ((inside, rows), (around, unbroken)):
            _replays(session, replays)
            session.step(marked.replay)
            found.append(marked.spent())
    inside.close()
    around.close()
    spent = np.array(rows)
    medians = np.median(spent, 0)
    # No event costs more than the shortest step takes; where a step takes 250 ms, as in mode naive, the difference of the two sums is mostly noise.
    event_ms = min(max(0.0, (float(medians.sum()) - float(np.median(unbroken))) / len(medians)), float(medians.min()) / 2)
    return StepTimes([summarise(values) for values in np.maximum(spent - event_ms, 0.0).T], whole, event_ms)


class Marked:
    """A plan's launches in one CUDA graph, with a `Event` before the first step and after each (`inside`), or only after the last.

    Making it runs the launches once.
    """

    def __init__(self, program: Program, inside: bool) -> None:
        self._device, self._moments = program.device, [Event()]
        todo: list[Any] = [*self._moments]
        for at, (_, launches) in enumerate(program.bound, 1):
            todo += launches
            if inside or at == len(program.bound):
                self._moments.append(Event())
                todo.append(self._moments[-1])
        self._graph = program.device.replayable(todo)

    def replay(self, program: Program) -> None:
        """Run the graph, of this very program."""
        self._graph()

    def spent(self) -> list[float]:
        """Milliseconds between neighbouring moments of the last replay, once it is done."""
        self._device.synchronize()
        return [a.until(b) for a, b in pairwise(self._moments)]

    def close(self) -> None:
        """Free the graph and its events."""
        self._graph.close()
        for moment in self._moments:
            moment.close()


def time_alone(session: Any, rounds: int = 7, rest: float = 0.02) -> list[float]:
    """Median milliseconds of every step with a rest before it: the clock is that of a GPU with little to do, as under a profiler.

    Before each the GPU waits until the host has enqueued its launches.
    """
    device, stream, rows = session.net.device, session.net.device.stream, []
    timer = timer_of(device)

    def one_by_one(program: Program) -> None:
        spent = []
        for _, launches in program.bound:
            device.synchronize()
            time.sleep(rest)
            wait_launch(AHEAD_MS).run(stream)
            spent.append(stretch_ms(partial(_run_all, launches, stream), timer))
        rows.append(spent)

    for _ in range(rounds):
        _replays(session, 0)
        session.step(one_by_one)
    return [float(ms) for ms in np.median(rows, 0)]


def _run_all(launches: Sequence[Any], stream: Any) -> None:
    for launch in launches:
        launch.run(stream)


def epoch_images(batch: int) -> int:
    """Images that an epoch should have where single steps are timed: whole batches."""
    return batch * max(8, min(400, 65_536 // batch))


def _marked(session: Any, inside: bool) -> Marked:
    """The training step with moments in it; making it takes one."""
    made: list[Marked] = []
    _replays(session, 0)
    session.step(lambda program: made.append(Marked(program, inside)))
    return made[0]


def _replays(session: Any, count: int) -> None:
    """`count` training steps, and room for one more in the epoch."""
    if session.steps_left <= count:
        session.begin_epoch(0)
    for _ in range(count):
        session.step()


def _whole(session: Any, count: int) -> Timing:
    """`count` training steps in a row."""
    session.begin_epoch(0)
    return time_calls(session.step, session.net.device, count - 1, 0.0)
