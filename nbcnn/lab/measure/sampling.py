"""This module takes samples of all variants in turn until the median is known, in sets that a falling clock cannot spoil.

A repetition times n calls of every variant, A B C C B A A B C …: drift of clock or temperature meets all of them alike, and ratios are
taken within a repetition. Repetitions come in sets; when the clock fell during one, or throttling began, the whole set is thrown
away. Sampling ends when 95 % of the chance of the median lies within 1 % and its two halves agree, but not before `LEAST` repetitions and
`SPAN` seconds: what drifts slowly looks still for a moment. Or it ends after `cap` seconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.lab.measure.clocks import Reading, clock_of, throttles
from nbcnn.lab.measure.steady import Warm, Work

LEAST = 20
"""Repetitions, unless they would take longer than the cap."""
FEWEST = 5
"""Repetitions even then."""
WIDTH = 0.01
"""Width of the median's 95 % interval at which sampling ends, as a part of the median."""
SET_SECONDS = 0.1
SPAN = 0.25
"""Seconds that repetitions are spread over, unless the cap is less: several sets, each with its own look at the clock."""
FALLEN = 0.98
"""A set counts only if the SM clock stayed above this part of the steady one."""
DISCARDS = 5
"""Sets thrown away before what comes next is kept after all, and called not steady."""
BUSY_MS = 5.0
"""Work that keeps the GPU busy while the host looks at a set."""


@dataclass(frozen=True)
class Samples:
    """Milliseconds of a call, (repetitions, variants), and how the GPU was meanwhile.

    steady     the warm-up reached a steady state, no set that counts had a falling clock or new throttling, and times do not drift.
    discarded  sets that were thrown away.
    """

    ms: np.ndarray
    steady: bool
    discarded: int
    readings: tuple[Reading, ...]

    @property
    def gpu(self) -> dict[str, Any]:
        """`state_of` the readings."""
        return state_of(self.readings)


def state_of(readings: Sequence[Reading]) -> dict[str, Any]:
    """SM clock (MHz), highest temperature (°C), median power (W), throttle reasons, most other processes on the GPU; None where unknown."""
    return {
        "sm_mhz": clock_of(readings),
        "temperature": max((reading.temperature for reading in readings), default=None),
        "watts": float(np.median([reading.watts for reading in readings])) if readings else None,
        "throttles": sorted(throttles(readings)),
        "other_processes": max((reading.others for reading in readings if reading.others is not None), default=None),
    }


def spoilt(readings: Sequence[Reading], warm: Warm) -> bool:
    """True if the clock fell below `FALLEN` of the steady one, or something throttles that did not then."""
    if warm.sm_mhz is not None and any(reading.sm_mhz < FALLEN * warm.sm_mhz for reading in readings):
        return True
    return bool(throttles(readings) - warm.throttles)


def sample(works: Sequence[Work], n: int, warm: Warm, watch: Any, cap: float = 3.0) -> Samples:
    """Time `n` calls of every work again and again, until their medians are known or `cap` seconds are over."""
    for work in works:
        work.repeat(n)  # not counted: graphs are captured, and what that takes the GPU spends idle
    works[0].repeat(_busy_calls(works[0].repeat(1)))
    start = time.perf_counter()
    kept: list[list[float]] = []
    seen: list[Reading] = []
    discarded, count, clean = 0, FEWEST, True
    while True:
        begin = time.perf_counter()
        rows = [in_turn(works, n, backwards=turn % 2 == 1) for turn in range(count)]
        took = time.perf_counter() - begin
        works[0].enqueue(_busy_calls(rows[-1][0]))
        readings = watch.since(begin)
        bad = spoilt(readings, warm)
        if bad and discarded < DISCARDS:
            discarded += 1
        else:
            clean = clean and not bad
            kept += rows
            seen += readings
        elapsed = time.perf_counter() - start
        enough = len(kept) >= LEAST and elapsed >= SPAN and all(known(np.array(column)) for column in zip(*kept, strict=True))
        if enough or (elapsed >= cap and len(kept) >= FEWEST):
            still = not any(drifts(np.array(column)) for column in zip(*kept, strict=True))
            return Samples(np.array(kept), warm.steady and clean and still, discarded, tuple(seen))
        count = int(max(1, min(10_000, SET_SECONDS / max(took / count, 1e-7))))


def in_turn(works: Sequence[Work], n: int, backwards: bool) -> list[float]:
    """One repetition of every work, in order or the other way round: who comes behind whom must not matter either."""
    if backwards:
        return [work.repeat(n) for work in reversed(works)][::-1]
    return [work.repeat(n) for work in works]


def _busy_calls(milliseconds: float) -> int:
    """Calls of `milliseconds` that keep the GPU busy for `BUSY_MS`."""
    return int(min(1000, max(1, BUSY_MS / max(milliseconds, 1e-4))))


def median_interval(values: np.ndarray) -> tuple[float, float, float]:
    """(low, high, width / median) of the 95 % interval of the median, from order statistics: no distribution is assumed.

    Of R values the median lies between those of rank R/2 ± 0.98·√R (Conover, Practical Nonparametric Statistics, 3.2).
    """
    ordered = np.sort(values)
    count = len(ordered)
    reach = 0.98 * np.sqrt(count)
    low = ordered[max(0, int(np.floor(count / 2 - reach)))]
    high = ordered[min(count - 1, int(np.ceil(count / 2 + reach)))]
    return float(low), float(high), float((high - low) / np.median(ordered))


def known(values: np.ndarray) -> bool:
    """True if the median's 95 % interval is narrower than `WIDTH` and it does not drift."""
    return median_interval(values)[2] < WIDTH and not drifts(values)


def drifts(values: np.ndarray) -> bool:
    """True if the medians of the first and the second half are more than `WIDTH` apart, and their 95 % intervals do not meet."""
    if len(values) < 4:  # two halves of two
        return False
    halves = np.array_split(values, 2)
    (low, high, _), (other_low, other_high, _) = (median_interval(half) for half in halves)
    first, second = (float(np.median(half)) for half in halves)
    return abs(second / first - 1) > WIDTH and (low > other_high or other_low > high)


def ratio_interval(a: np.ndarray, b: np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    """(median, low, high) of a/b, paired within repetitions; the 95 % interval by bootstrap over repetitions."""
    ratios = np.asarray(a) / np.asarray(b)
    rng = np.random.default_rng(seed)
    draws = int(min(2000, max(200, 2_000_000 // len(ratios))))
    medians = np.median(ratios[rng.integers(0, len(ratios), (draws, len(ratios)))], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)
