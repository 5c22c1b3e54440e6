"""This study answers why a kernel measured alone looks slower than inside a training run, with this GPU's own figures.

Five experiments on one op: the first calls of fresh processes (`fresh`, run before this one opens the GPU); its time and the SM clock from the
first launch on, after a pause; bursts of 1 … 1,000 calls after a pause and warm; the same operands against rotating ones; and what each
writes to DRAM, where ncu may count it. PyTorch's form of the op goes through the same rests and bursts, if it is wanted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from nbcnn.lab.measure import dram
from nbcnn.lab.measure.caches import Calls
from nbcnn.lab.measure.ceiling_kernels import spin_kernel
from nbcnn.lab.measure.clocks import Watch
from nbcnn.lab.measure.op import Choice, Prepared, prepare, timed_in_turn
from nbcnn.lab.measure.opcases import Problem, problem
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
    peer: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """All experiments; what `warmup_report` shows. `sleep` seconds of rest let the clocks fall before every cold start.

    fresh: what `fresh.study` found before. peer: PyTorch's form of the op, too.

    Raises NotTimed if the op fails parity, RuntimeError if PyTorch's result is another.
    """
    asked = problem(op, shape)
    made = prepare(choice, asked)
    device = made.device
    probe = ClockProbe(device) if device.name == "gpu" else None
    with Watch(device) as watch:
        ours = Forms(made.work("hot"), made.work("rotate"), made.work("hot", graph=True))
        theirs = _torch(made, asked, say) if peer else None
        points, cold = rested(ours, len(made.bounds), probe, sleep, say)
        others: dict[str, Any] = (
            {} if theirs is None else dict(zip(("curve", "cold"), rested(theirs, len(made.bounds), probe, sleep, say), strict=True))
        )
        works = [form for forms in (ours, theirs) if forms is not None for form in (forms.hot, forms.rotate)]
        warm = warm_up(works, watch)
        settled = {n: timed_in_turn(works, n, warm, watch, 1.0) for n in ITERATIONS}
    if theirs is not None:
        others |= {"form": theirs.hot.label, "settled": _settled({n: found[2:] for n, found in settled.items()})}
    return {
        "op": op,
        "shape": shape,
        "variant": made.label,
        "sleep": sleep,
        "clock_source": watch.source,
        "fresh": fresh,
        "warm": {"steady": warm.steady, "seconds": warm.seconds, "sm_mhz": warm.sm_mhz},
        "curve": points,
        "cold": cold,
        "settled": _settled({n: found[:2] for n, found in settled.items()}),
        "peer": others or None,
        "model": dram.model(made.step),
        "dram": dram.table_rows(choice.label, op, shape, say) if ncu else [],
    }


@dataclass(frozen=True)
class Forms:
    """One op as work: on the same operands, on rotating ones, and one call as a graph."""

    hot: Calls
    rotate: Calls
    alone: Calls


def _torch(made: Prepared, asked: Problem, say: Callable[[str], None]) -> Forms | None:
    """PyTorch's form of the op, called from Python as most programs do; None, and said, where it has none."""
    from nbcnn.lab.peers import ops as peers

    works = peers.works(made, asked)
    if works is None:
        say(f"PyTorch has no form of {made.op}, so it is no peer here")
        return None
    return Forms(works("hot", False)[0], works("rotate", False)[0], works("hot", True)[0])


def rested(
    forms: Forms, sets: int, probe: ClockProbe | None, sleep: float, say: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The curve after a rest, and bursts of every length, three of each, each after a rest."""
    forms.alone.repeat(1)
    forms.hot.repeat(1)
    forms.rotate.repeat(sets)
    say(f"{forms.hot.label}: resting {sleep:g} s, then {CURVE_SECONDS:g} s from the first launch on")
    points, cold = curve(forms.alone, probe, sleep), []
    for n in ITERATIONS:
        say(f"{forms.hot.label}: resting {sleep:g} s three times, then {n} calls")
        found = [burst(forms.hot, n, probe, sleep) for _ in range(3)]
        cold.append({"iterations": n, **{name: [each[name] for each in found] for name in ("ms", "sm_mhz")}})
    return points, cold


def _settled(found: dict[int, Any]) -> list[dict[str, Any]]:
    """Rows of warm calls on the same and on rotating operands, by how many in a row."""
    return [
        {"iterations": n, "hot": same.timing.as_dict(), "rotate": other.timing.as_dict(), "rotate_over_hot": list(same.against(other))}
        for n, (same, other) in found.items()
    ]


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
    """n calls after a rest, and the clock right after them."""
    time.sleep(sleep)
    return {"ms": work.repeat(n), "sm_mhz": probe.read() if probe else None}
