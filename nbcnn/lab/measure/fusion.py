"""This module times the cases of the study of fused kernels, ours beside PyTorch's and Triton's, called from Python and replayed as a CUDA graph.

    latency      of one call, from the median of calls between two events: "host" launches each from Python, "graph" replays
    memory       bytes of operands, results and scratch (PyTorch: what its allocator held at most during a call, operands included)
    throughput   the work's own items (flop, elements, images) in a second
    efficiency   attainable ÷ measured time; attainable is the longer of flop at the datasheet's peak of the precision and compulsory bytes at
                 the bandwidth that a large copy reaches here and now

Operands rotate past the second-level cache wherever 64 sets of them are enough for that (`caches.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from nbcnn.lab.measure import ceilings
from nbcnn.lab.measure.caches import Calls, cache_bytes
from nbcnn.lab.measure.clocks import Reading, clock_of
from nbcnn.lab.measure.op import Prepared, timed_in_turn
from nbcnn.lab.measure.sampling import FALLEN, drifts
from nbcnn.lab.measure.steady import warm_up
from nbcnn.run.peaks import peaks_of

LAUNCHES = ("host", "graph")
TARGET_MS = 2.0
"""One repetition lasts about so long, but has at most `MAX_CALLS` calls."""
MAX_CALLS = 100
WARM_SECONDS = 0.1
"""Before one case and way to launch: the GPU is warm from the case before. Too short to tell a steady state by, so `stood_still` asks the samples."""
FEWEST_OF_CONV = 0.25
"""Part of a convolution's products that some algorithm gets by with: those of Winograd's F(4×4, 3×3)."""


@dataclass(frozen=True)
class Variant:
    """One way to do a work. `works(graph)` makes what is timed; the first variant of a case that is called a peer's is the ratio's base."""

    label: str
    works: Callable[[bool], Any]
    precision: str
    memory: int | None
    error: float | None = None


@dataclass(frozen=True)
class Case:
    """A row of a study's picture: its name, compulsory flop and bytes of one call, items and their unit, and the variants in turn."""

    name: str
    flops: int
    moved: int
    items: int
    unit: str
    variants: tuple[Variant, ...]
    missing: tuple[str, ...] = ()
    """Variants that are left out, each with the reason."""
    fewest: float = 1.0
    """Part of `flops` that no algorithm gets by without."""


@dataclass(frozen=True)
class Roof:
    """flop/s by precision (datasheet) and byte/s (a large copy, measured; and the datasheet's); bytes of the second-level cache."""

    flops: dict[str, float]
    bandwidth: float
    datasheet_bandwidth: float = float("inf")
    cache: int = 0

    def attainable_ms(self, case: Case, precision: str) -> float:
        """Milliseconds below which a call cannot be."""
        return max(case.flops / self.peak(precision), case.moved / self.bandwidth) * 1e3

    def peak(self, precision: str) -> float:
        """flop/s of a precision; those of fp32 where it is unknown."""
        return self.flops.get(precision, self.flops["fp32"])

    def impossible(self, case: Case, precision: str, milliseconds: float) -> str | None:
        """None, or in words why no call takes so little: then something else was timed.

        It would do what no algorithm avoids faster than the datasheet's peak, or move what no cache held faster than the datasheet's memory.
        """
        least = max(case.fewest * case.flops / self.peak(precision), (case.moved - self.cache) / self.datasheet_bandwidth) * 1e3
        if milliseconds >= least:
            return None
        return f"{milliseconds * 1e3:.2f} µs, but the datasheet allows no less than {least * 1e3:.2f}: a fault of the measurement, not a figure"


def roof(device: Any, watch: Any) -> Roof:
    """The roof of this GPU; the copy is measured, which takes a second."""
    probe = ceilings.copying(device)
    milliseconds = median(ceilings.timed(probe, device, watch, 0.3).ms[:, 0])
    peaks = peaks_of(device)
    bandwidth = probe.work / (milliseconds / 1e3)
    if peaks is None:
        return Roof({"fp32": float("inf")}, bandwidth)
    return Roof(dict(peaks.flops), bandwidth, peaks.bandwidth, cache_bytes(device))


def ours(label: str, prepared: Prepared) -> Variant:
    """A verified op of ours."""
    call = prepared.bounds[0].call
    arrays = [*call.ins, *call.outs, call.packed, call.scratch]
    memory = sum(array.size * array.dtype.itemsize for array in arrays if array is not None)
    return Variant(label, lambda graph: replace(prepared, label=label).work("rotate", graph=graph), prepared.row.precision, memory, prepared.error)


Link = tuple[Prepared, dict[int, int]]
"""An op of a chain, and which of its inputs (position) are the first output of which earlier link (index)."""


def chained(label: str, links: Sequence[Link]) -> Variant:
    """Several ops that run one after the other, set by set."""
    prepared = [op for op, _ in links]
    sets: list[list[Any]] = []
    counted: dict[int, int] = {}
    for at in range(min(len(op.bounds) for op in prepared)):
        calls: list[Any] = []
        launches: list[Any] = []
        for op, sources in links:
            bound = op.bounds[at].reading({position: calls[link].outs[0] for position, link in sources.items()})
            calls.append(bound.call)
            launches += bound.launches
        sets.append(launches)
        if at == 0:
            arrays = (array for call in calls for array in (*call.ins, *call.outs, call.packed, call.scratch) if array is not None)
            counted = {id(array): array.size * array.dtype.itemsize for array in arrays}
    device, precision = prepared[0].device, prepared[0].row.precision
    error = max(op.error for op in prepared)
    return Variant(label, lambda graph: Calls(label, device, sets, graph=graph), precision, sum(counted.values()), error)


def measure(cases: Iterator[Case], device: Any, watch: Any, seconds: float, study: str, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Rows for every case, launch and variant; `seconds` is the cap for one case and launch."""
    limit = roof(device, watch)
    for case in cases:
        for reason in case.missing:
            say(f"{case.name}: {reason}")
        for launch in LAUNCHES:
            yield from _rows(case, launch, limit, watch, seconds, study, say)
        say(case.name)


def _rows(case: Case, launch: str, limit: Roof, watch: Any, seconds: float, study: str, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    works = [variant.works(launch == "graph") for variant in case.variants]
    warm = warm_up(works, watch, min(WARM_SECONDS, seconds))
    calls = int(max(2, min(MAX_CALLS, TARGET_MS / max(warm.ms / len(works), 1e-4))))
    found = timed_in_turn(works, calls, warm, watch, seconds)
    rows = []
    for variant, measured in zip(case.variants, found, strict=True):
        part = "alone" in variant.label  # a part of the case's work may take less than the whole can
        fault = None if part else limit.impossible(case, variant.precision, measured.timing.median)
        if fault:
            say(f"FAULT: {case.name}, {variant.label}, {launch}: {fault}")
        else:
            rows.append((variant, measured))
    peers = [(variant, measured) for variant, measured in rows if not variant.label.startswith("nbcnn")]
    for variant, measured in rows:
        timing = measured.timing
        alike = [peer for peer in peers if peer[0].precision == variant.precision]
        base = next((found for _, found in alike or peers), None)
        attainable = limit.attainable_ms(case, variant.precision)
        yield {
            "study": study,
            "case": case.name,
            "variant": variant.label,
            "launch": launch,
            "precision": variant.precision,
            "ms": timing.as_dict(),
            "memory_bytes": variant.memory,
            "throughput": case.items / timing.median * 1e3,
            "unit": case.unit,
            "attainable_ms": attainable,
            "efficiency": attainable / timing.median,
            "percent_of_peak": 100 * case.flops / (timing.median / 1e3) / limit.peak(variant.precision),
            "times_the_peer": None if base is None else base.timing.median / timing.median,
            "error": variant.error,
            "calls": calls,
            **measured.samples.gpu,
            "steady": stood_still(measured.samples.ms[:, measured.column], measured.samples.readings),
        }


def stood_still(milliseconds: np.ndarray, readings: Sequence[Reading]) -> bool:
    """True if neither time (`drifts`) nor clock moved while it was measured: no reading of the SM clock is below `FALLEN` of the median one."""
    clock = clock_of(readings)
    return not drifts(milliseconds) and all(clock is None or reading.sm_mhz >= FALLEN * clock for reading in readings)
