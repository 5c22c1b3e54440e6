"""This module times training steps and epochs in a row, for `bench step` and `bench epoch` with --iters, --warmup and --graph.

A step reads other images every time, as `rotate` does for an op; so there is no --cache for it but that one. A step is one captured CUDA
graph; launch by launch the host enqueues every kernel, so the difference of the two is what the graph spares.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from nbcnn.lab.measure.sampling import sample, state_of
from nbcnn.lab.measure.steady import Warm
from nbcnn.lab.measure.timing import by_events, stretch_ms, summarise, timer_of, wall_ms
from nbcnn.run.program import Program

COUNTS = (1, 10, 100)
"""Steps in a row where --graph asks for both ways and --iters says nothing."""
EPOCHS = 7
"""Epochs that are measured, at least in three samples."""


def one_by_one(program: Program) -> None:
    """Enqueue every launch of a plan by itself."""
    for launch in program.launches:
        launch.run(program.device.stream)


class Steps:
    """Training steps of a session as work to be timed (`steady.Work`), as graphs or `launched` one kernel after another.

    Where an epoch ends, the next one begins outside the timed part: n steps are timed in as many stretches as it takes.
    """

    def __init__(self, session: Any, launched: bool = False) -> None:
        self.label = "launch by launch" if launched else "one graph a step"
        self._session, self._device = session, session.net.device
        self._run = one_by_one if launched else Program.replay
        self._timer = timer_of(self._device)

    def repeat(self, n: int) -> float:
        """Run n steps; milliseconds of one, between events on a GPU, by the clock on a host."""
        spent, left = 0.0, n
        while left:
            if self._session.steps_left == 0:
                self._session.begin_epoch(0)
            count = min(left, self._session.steps_left)
            self._timer.wait()
            spent += stretch_ms(partial(self._enqueue, count), self._timer)
            left -= count
        return spent / n

    def _enqueue(self, count: int) -> None:
        for _ in range(count):
            self._session.step(self._run)

    def enqueue(self, n: int) -> None:
        """Start up to n steps of what the epoch has left, without waiting; nothing on a host."""
        if by_events(self._device):
            self._enqueue(min(n, self._session.steps_left))


def in_a_row(session: Any, counts: Sequence[int], launched: bool, warm: Warm, watch: Any, cap: float) -> list[dict[str, Any]]:
    """A row for every number of steps, and both ways to run them in turn if `launched` (a host has only one)."""
    works = [Steps(session), *([Steps(session, launched=True)] if launched and session.net.device.name == "gpu" else [])]
    rows: list[dict[str, Any]] = []
    for n in counts:
        found = sample(works, n, warm, watch, cap)
        for at in range(len(works)):
            timing = summarise(list(found.ms[:, at]))
            how = {"iterations": n, "graph": at == 0, "form": f"{n:,} in a row{', launch by launch' if at else ''}"}
            rate = session.batch / timing.median * 1e3
            rows.append(how | {"step_ms": timing.as_dict(), "images_per_second": rate, **found.gpu, "steady": found.steady})
            if at:
                rows[-1]["over_graph"] = timing.median / rows[-2]["step_ms"]["median"]
    return rows


def epochs(session: Any, counts: Sequence[int], warmup: float | None, watch: Any) -> list[dict[str, Any]]:
    """Wall seconds of an epoch, for every number of epochs in a row: permutation, upload, every step, the smaller last batch.

    warmup: seconds of epochs that do not count; None: two epochs, none on a host, where one takes minutes and is measured once.
    """
    device, number = session.net.device, 0
    on_host = device.name == "host"

    def train(n: int) -> None:
        nonlocal number
        for _ in range(n):
            session.begin_epoch(number)
            number += 1
            while session.steps_left:
                session.step()

    def run(n: int) -> float:
        return wall_ms(partial(train, n), device.synchronize) / n

    until = time.perf_counter() + (warmup or 0.0)
    for _ in range(2 if warmup is None and not on_host else 0):
        run(1)
    while time.perf_counter() < until:
        run(1)
    rows = []
    for n in counts:
        begin = time.perf_counter()
        spent = [run(n) for _ in range(1 if on_host else max(3, -(-EPOCHS // n)))]
        timing = summarise(spent).per(1000)  # milliseconds of an epoch as seconds
        rows.append({"iterations": n, "seconds": timing.as_dict(), **state_of(watch.since(begin))})
    return rows
