"""Tests of clocks, steadiness, sampling: what makes a time trustworthy, tried on work whose times are known."""

from __future__ import annotations

import time

import numpy as np
import pytest

from nbcnn.lab.measure import clocks, sampling, steady
from nbcnn.lab.measure.clocks import Reading, Watch
from nbcnn.lab.measure.steady import Warm, Window, stands_still, warm_up


class Fake:
    """Work that takes what `times` says, one value a repetition, the last one for ever."""

    label = "fake"

    def __init__(self, times, sleep=0.0):
        self.times, self.at, self.sleep, self.filled = list(times), -1, sleep, 0

    def repeat(self, n):
        self.at += 1
        time.sleep(self.sleep)
        return self.times[min(self.at, len(self.times) - 1)]

    def enqueue(self, n):
        self.filled += 1


class Clock:
    """In the place of the module time: it moves by what is slept, however busy the machine is."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Clocks:
    """A watch that gives the readings of `script` one after another, the last one for ever."""

    source = "script"

    def __init__(self, *script):
        self.script, self.at = script, -1

    def since(self, moment):
        self.at += 1
        return [self.script[min(self.at, len(self.script) - 1)]]


def reading(mhz, *reasons):
    return Reading(time.perf_counter(), mhz, 40.0, 300.0, frozenset(reasons))


WARM = Warm(True, 0.5, 1.0, 1980.0, frozenset(), ())


def windows(*pairs):
    return [Window(0.05 * i, ms, ms, ms, mhz) for i, (ms, mhz) in enumerate(pairs)]


def test_a_line_of_nvidia_smi_is_a_reading():
    found = clocks.parse("1980, 31, 92.27, 0x0000000000000044")
    assert (found.sm_mhz, found.temperature, found.watts) == (1980.0, 31.0, 92.27)
    assert found.reasons == {"power cap", "hardware thermal slowdown"}
    assert clocks.parse("1980, [N/A], 92, 0x0") is None
    assert clocks.parse("") is None


def test_only_some_reasons_slow_work_down():
    assert clocks.throttles([reading(345, "idle"), reading(1700, "power cap", "sync boost")]) == {"power cap"}
    assert clocks.clock_of([reading(1), reading(3), reading(2)]) == 2
    assert clocks.clock_of([]) is None


def test_a_watch_reads_at_ten_hertz_or_more():
    class Source:
        source, closed, reads = "test", False, 0

        def read(self):
            self.reads += 1
            return reading(1000 + self.reads)

        def close(self):
            self.closed = True

    source = Source()
    with Watch(None, source) as watch:
        start = time.perf_counter()
        time.sleep(0.5)
        assert len(watch.since(start)) >= 5
        assert len(watch.since(time.perf_counter() + 9)) == 1, "nothing so new: the newest there is"
    assert source.closed


@pytest.mark.parametrize(
    ("pairs", "still"),
    [
        ([(1.0, 1980)] * 4, False),
        ([(1.0, 1980)] * 5, True),
        ([(9.0, 345)] * 9 + [(1.0, 1980)] * 5, True),
        ([(1.0, 1980)] * 4 + [(1.02, 1980)], False),
        ([(1.0, 1980)] * 4 + [(1.0, 1950)], False),
        ([(1.0, None)] * 5, True),
        ([(1.0, 1980)] * 4 + [(1.004, 1965)], True),
    ],
)
def test_steady_means_that_time_and_clock_stand_still(pairs, still):
    assert stands_still(windows(*pairs)) is still


def test_warming_up_waits_for_the_clock(monkeypatch):
    monkeypatch.setattr(steady, "WINDOW", 0.002)
    monkeypatch.setattr(steady, "MIN_SECONDS", 0.02)
    ramp = Clocks(*(reading(mhz) for mhz in (345, 345, 700, 1200, 1700, 1980)))
    warm = warm_up([Fake([1.0], 0.001)], ramp)
    assert warm.steady
    assert warm.sm_mhz == 1980
    assert [w.sm_mhz for w in warm.windows[:6]] == [345, 345, 700, 1200, 1700, 1980]
    assert warm.seconds >= 0.02


def test_what_never_settles_is_called_not_steady(monkeypatch):
    monkeypatch.setattr(steady, "WINDOW", 0.001)
    monkeypatch.setattr(steady, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(steady, "MAX_SECONDS", 0.05)
    warm = warm_up([Fake(np.linspace(1, 50, 2000), 0.001)], Clocks(reading(1980)))
    assert not warm.steady
    assert warm.seconds == pytest.approx(0.05, abs=0.05)


def test_a_fixed_warmup_is_as_long_as_asked(monkeypatch):
    monkeypatch.setattr(steady, "WINDOW", 0.001)
    assert warm_up([Fake([1.0], 0.001)], Clocks(reading(1980)), 0.0).seconds < 0.05
    assert warm_up([Fake([1.0], 0.001)], Clocks(reading(1980)), 0.06).seconds >= 0.06


def test_sampling_ends_when_the_median_is_known():
    found = sampling.sample([Fake([1.0], 1e-4)], 10, WARM, Clocks(reading(1980)))
    assert sampling.LEAST <= len(found.ms) < 3000
    assert found.steady
    assert found.gpu == {"sm_mhz": 1980, "temperature": 40.0, "watts": 300.0, "throttles": [], "other_processes": None}


def test_noise_is_sampled_longer_but_not_for_ever():
    noise = np.random.default_rng(0).lognormal(0, 0.5, 4000)
    found = sampling.sample([Fake(noise, 1e-3)], 1, WARM, Clocks(reading(1980)), cap=0.3)
    assert len(found.ms) > sampling.LEAST
    long = sampling.sample([Fake([1.0], 0.05)], 1, WARM, Clocks(reading(1980)), cap=0.1)
    assert len(long.ms) == sampling.FEWEST


def test_a_slow_drift_is_not_steady(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(sampling, "time", clock)
    monkeypatch.setitem(globals(), "time", clock)
    slower = np.repeat(np.linspace(1, 1.4, 40), 20)
    found = sampling.sample([Fake(slower, 1e-3)], 1, WARM, Clocks(reading(1980)), cap=0.4)
    assert not found.steady
    assert len(found.ms) > 10 * sampling.LEAST, "its first intervals were narrow"
    noise = np.random.default_rng(3).normal(1, 0.05, 1000)
    assert not sampling.drifts(noise)
    assert sampling.drifts(noise + np.repeat([0, 0.05], 500))


def test_a_set_with_a_falling_clock_is_thrown_away():
    work = Fake([1.0] * 8 + [2.0] * sampling.FEWEST + [1.0])
    found = sampling.sample([work], 1, WARM, Clocks(reading(1980), reading(1500), reading(1980)), cap=0.05)
    assert found.discarded == 1
    assert found.ms.max() == 1.0, "the slow ones were in that set"
    assert found.steady
    hot = sampling.sample([Fake([1.0])], 1, WARM, Clocks(reading(1980, "hardware slowdown"), reading(1980)), cap=0.05)
    assert hot.discarded == 1


def test_throttling_that_was_there_when_warm_discards_nothing():
    capped = Warm(True, 1.0, 1.0, 1500.0, frozenset({"power cap"}), ())
    found = sampling.sample([Fake([1.0])], 1, capped, Clocks(reading(1500, "power cap")), cap=0.05)
    assert (found.discarded, found.steady) == (0, True)
    assert found.gpu["throttles"] == ["power cap"]


def test_a_clock_that_stays_down_is_said(monkeypatch):
    found = sampling.sample([Fake([1.0])], 1, WARM, Clocks(reading(1000)), cap=0.05)
    assert found.discarded == sampling.DISCARDS
    assert not found.steady


def test_the_gpu_has_something_to_do_while_the_host_thinks():
    work = Fake([1.0])
    sampling.sample([work], 1, WARM, Clocks(reading(1980)), cap=0.05)
    assert work.filled >= 1


def test_the_interval_of_a_median_holds_it_95_times_of_100():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(400):
        low, high, _ = sampling.median_interval(rng.exponential(1.0, 41))
        hits += low <= np.log(2) <= high
    # 380 expected; the standard deviation of that count is √(400·0.95·0.05) = 4.4.
    assert hits >= 380 - 4 * 4.4


def test_paired_ratios_are_not_fooled_by_drift():
    rng = np.random.default_rng(2)
    drift = np.linspace(1, 2, 200)
    a, b = 1.5 * drift * (1 + 0.01 * rng.standard_normal(200)), drift * (1 + 0.01 * rng.standard_normal(200))
    ratio, low, high = sampling.ratio_interval(a, b)
    assert low < 1.5 < high
    assert high - low < 0.01
    assert ratio == pytest.approx(1.5, rel=0.01)
