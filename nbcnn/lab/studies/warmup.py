"""This study answers why a kernel measured alone looks slower than inside a training run, with this GPU's own figures.

Five experiments on one op: the first calls of fresh processes (`fresh`, run before this one opens the GPU); its time and the SM clock from the
first launch on, after a pause; bursts of 1 … 1,000 calls after a pause and warm; the same operands against rotating ones; and what each
writes to DRAM, where ncu may count it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from nbcnn.lab.measure import dram
from nbcnn.lab.measure.caches import Calls
from nbcnn.lab.measure.ceiling_kernels import spin_kernel
from nbcnn.lab.measure.clocks import Watch
from nbcnn.lab.measure.op import Choice, prepare, timed_in_turn
from nbcnn.lab.measure.opcases import problem
from nbcnn.lab.measure.steady import warm_up
from nbcnn.ops.kernel.call import Launch

ITERATIONS = (1, 10, 100, 1000)
CURVE_SECONDS = 3.0
CLOCK_NS = 30_000
"""Length of the wait in which the kernel's own counters give the clock."""


class ClockProbe:
    """The SM clock in MHz, from cycles and nanoseconds that a short waiting kernel counts: it sees the clock of this moment."""

    def __init__(self, device: Any) -> None:
        self._device, self._target = device, device.empty(2, "int64")
        self._launch = Launch(spin_kernel(), 1, 1, (self._target, np.int64(CLOCK_NS)))
        self.read()

    def read(self) -> float:
        self._launch.run(self._device.stream)
        cycles, nanoseconds = self._device.download(self._target)
        return float(cycles / nanoseconds * 1e3)


def study(
    choice: Choice,
    op: str,
    shape: str,
    *,
    sleep: float = 5.0,
    ncu: bool = False,
    fresh: dict[str, Any] | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """All experiments; what `warmup_report` shows. `sleep` seconds of rest let the clocks fall before every cold start.

    fresh: what `fresh.study` found before.

    Raises NotTimed if the op fails parity.
    """
    made = prepare(choice, problem(op, shape))
    device = made.device
    probe = ClockProbe(device) if device.name == "gpu" else None
    with Watch(device) as watch:
        hot, rotate = made.work("hot"), made.work("rotate")
        alone = made.work("hot", graph=True)
        alone.repeat(1)
        hot.repeat(1)
        rotate.repeat(len(made.bounds))
        say(f"resting {sleep:g} s, then {CURVE_SECONDS:g} s from the first launch on")
        points = curve(alone, probe, sleep)
        cold = {}
        for n in ITERATIONS:
            say(f"resting {sleep:g} s three times, then {n} calls")
            cold[n] = [burst(hot, n, probe, sleep) for _ in range(3)]
        warm = warm_up([hot, rotate], watch)
        settled = {n: timed_in_turn([hot, rotate], n, warm, watch, 1.0) for n in ITERATIONS}
    return {
        "op": op,
        "shape": shape,
        "variant": made.label,
        "sleep": sleep,
        "clock_source": watch.source,
        "fresh": fresh,
        "warm": {"steady": warm.steady, "seconds": warm.seconds, "sm_mhz": warm.sm_mhz},
        "curve": points,
        "cold": [{"iterations": n, "ms": [each["ms"] for each in found], "sm_mhz": [each["sm_mhz"] for each in found]} for n, found in cold.items()],
        "settled": [
            {"iterations": n, "hot": same.timing.as_dict(), "rotate": other.timing.as_dict(), "rotate_over_hot": list(same.against(other))}
            for n, (same, other) in settled.items()
        ],
        "model": dram.model(made.step),
        "dram": dram.table_rows(choice.label, op, shape, say) if ncu else [],
    }


def curve(work: Calls, probe: ClockProbe | None, sleep: float) -> list[dict[str, Any]]:
    """After a rest: seconds since the first launch, milliseconds of a call, SM clock; every call for 20 ms, then medians of 2 ms of calls.

    `work` replays one call as a graph, so that it is the GPU's time and not the host's that is seen to change.
    """
    time.sleep(sleep)
    points: list[dict[str, Any]] = []
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < CURVE_SECONDS:
        calls = 1 if elapsed < 0.02 or not points else int(min(1000, max(1, 2.0 / max(points[-1]["ms"], 1e-3))))
        ms = median(work.repeat(1) for _ in range(calls))
        points.append({"at": time.perf_counter() - start, "ms": ms, "sm_mhz": probe.read() if probe else None})
    return points


def burst(work: Calls, n: int, probe: ClockProbe | None, sleep: float) -> dict[str, Any]:
    """n calls after a rest, and the clock right behind them."""
    time.sleep(sleep)
    return {"ms": work.repeat(n), "sm_mhz": probe.read() if probe else None}
