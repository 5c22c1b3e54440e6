"""This module tests the benchmark on what is known beforehand: a copy, multiply-adds, a wait of known length, an empty launch, a repetition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import SIMULATOR
from nbcnn.lab.measure import ceiling_kernels as kernels
from nbcnn.lab.measure import ceilings
from nbcnn.lab.measure.caches import Calls
from nbcnn.lab.measure.clocks import Watch, clock_of
from nbcnn.lab.measure.sampling import Samples, sample, state_of
from nbcnn.lab.measure.steady import warm_up
from nbcnn.ops.kernel.call import Launch
from nbcnn.run.peaks import lanes, peaks_of

SPIN_NS, SPINS = 100_000 if SIMULATOR else 1_000_000, 10
"""Ten waits of a millisecond between two events: the first one's launch is a fifth of a percent of them."""
COPY_PART = (0.83, 0.94)
"""Part of the datasheet's bandwidth that a copy reaches: 0.83 to 0.94 of an H200's 4.8 TB/s are 4.0 to 4.5 TB/s."""
FMA_PART = 0.90
SPIN_ERROR = 0.02
REPEAT_ERROR = 0.01
BLOCKS = 1 if SIMULATOR else 5


def _row(what: str, value: float, unit: str, wanted: str, ok: bool | None) -> dict[str, Any]:
    """ok None: nothing is expected, the figure is for information."""
    return {"what": what, "value": value, "unit": unit, "wanted": wanted, "ok": ok}


def checks(device: Any) -> Iterator[dict[str, Any]]:
    """One row a figure: what, value, unit, what is wanted, and whether it holds (None: for information)."""
    with Watch(device) as watch:
        yield _alone(watch)
        yield _copy(device, watch)
        yield from _fma(device, watch)
        yield _spin(device, watch)
        yield from _launches(device, watch)
        yield _again(device, watch)


def _alone(watch: Any) -> dict[str, Any]:
    """Somebody else's kernels would be in our times."""
    others = state_of(watch.since(0.0))["other_processes"]
    return _row(
        "other processes on this GPU", float(others or 0), "", "0" if others is not None else "not known", None if others is None else others == 0
    )


def _copy(device: Any, watch: Any) -> dict[str, Any]:
    probe = ceilings.copying(device)
    rate = probe.work / _seconds(ceilings.timed(probe, device, watch))
    peaks = peaks_of(device)
    low, high = (part * peaks.bandwidth for part in COPY_PART) if peaks else (0.0, float("inf"))
    wanted = f"{low / 1e12:.1f} … {high / 1e12:.1f} (of {peaks.bandwidth / 1e12:.1f})" if peaks else ""
    return _row("copy of a large array", rate / 1e12, "TB/s", wanted, low <= rate <= high if peaks else None)


def _fma(device: Any, watch: Any) -> Iterator[dict[str, Any]]:
    """Multiply-adds against 2 · lanes · multiprocessors · clock, the clock taken from the kernel's own counters."""
    probe = ceilings.fma(device)
    found = ceilings.timed(probe, device, watch)
    rate = probe.work / _seconds(found)
    cycles, nanoseconds = device.download(probe.watch)
    clock = cycles / nanoseconds * 1e9
    part = rate / (2 * lanes(device.capability) * device.multiprocessors * clock)
    yield _row("multiply-adds of the clock's peak", part * 100, "%", f"≥ {FMA_PART * 100:.0f}", None if SIMULATOR else bool(FMA_PART <= part <= 1.01))
    yield _row("SM clock by the kernel's counters", clock / 1e6, "MHz", "", None)
    read = clock_of(found.readings)
    if read is not None:
        yield _row(f"SM clock by {watch.source}", read, "MHz", "within 2 % of that", bool(abs(read * 1e6 / clock - 1) <= 0.02))


def _spin(device: Any, watch: Any) -> dict[str, Any]:
    target = device.empty(2, "int64")
    work = Calls("spin", device, [[Launch(kernels.spin_kernel(), 1, 1, (target, np.int64(SPIN_NS)))]])
    found = sample([work], SPINS, warm_up([work], watch), watch, 0.5)
    error = _seconds(found) / (SPIN_NS / 1e9) - 1
    return _row(f"wait of {SPIN_NS / 1e6:g} ms is off by", error * 100, "%", "within ± 2", None if SIMULATOR else bool(abs(error) <= SPIN_ERROR))


def _launches(device: Any, watch: Any) -> Iterator[dict[str, Any]]:
    """Microseconds of an empty kernel: alone, in a row from Python, and in a captured graph."""
    x = device.empty(1, "float32")
    launch = Launch(kernels.empty_kernel(), 1, 1, (x,))
    for what, graph, n in (("one empty launch", False, 1), ("empty launches in a row", False, 100), ("empty launches in a graph", True, 100)):
        work = Calls(what, device, [[launch]], graph=graph)
        found = sample([work], n, warm_up([work], watch, 0.1), watch, 0.5)
        yield _row(what, _seconds(found) * 1e6, "µs", "", None)


def _again(device: Any, watch: Any) -> dict[str, Any]:
    """How far apart the medians of one kernel are, measured three times.

    Each measurement is `BLOCKS` blocks, in turn with those of the others and each once times stand still: what a GPU does for a second
    (another program on the machine, a governor of its clocks) meets all three.
    """
    probe = ceilings.copying(device)
    measurements: list[list[float]] = [[], [], []]
    for _ in range(BLOCKS):
        for values in measurements:
            values.append(_seconds(ceilings.timed(probe, device, watch, seconds=0.1, bounds=(0.0, 1.0))))
    medians = [float(np.median(values)) for values in measurements]
    apart = max(medians) / min(medians) - 1
    return _row("medians of the copy, measured three times, are apart by", apart * 100, "%", "< 1", None if SIMULATOR else bool(apart < REPEAT_ERROR))


def _seconds(found: Samples) -> float:
    return float(np.median(found.ms)) / 1e3


def text(rows: list[dict[str, Any]]) -> str:
    """The rows for people."""
    verdict = {True: "ok", False: "FAILED", None: ""}
    return "\n".join(f"{row['what']:58}{row['value']:12.3f} {row['unit']:5}{row['wanted']:26}{verdict[row['ok']]}".rstrip() for row in rows)
