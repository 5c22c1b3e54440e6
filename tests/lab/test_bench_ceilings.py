"""Tests of the kernels that measure what a GPU can do: lean, run by the simulator, and judged against what is known."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import assert_lean, on_every_arch

from nbcnn.gpu import device as gpu_device
from nbcnn.lab.measure import caches, ceilings, selftest, steady
from nbcnn.lab.measure import ceiling_kernels as kernels
from nbcnn.lab.measure.caches import SPAN, Calls, Flush, fill_kernel
from nbcnn.lab.measure.clocks import Watch
from nbcnn.ops.kernel.call import Launch
from nbcnn.run.peaks import Ceilings

X, WATCH, TURNS = np.zeros(64, np.float32), np.zeros(2, np.int64), np.int32(4)
FMA = Launch(kernels.fma_kernel(), 1, kernels.FMA_THREADS, (X, WATCH, np.float32(1), np.float32(0), TURNS))


@on_every_arch
def test_kernels_keep_everything_in_registers(arch):
    assert_lean(FMA, arch, 32)
    assert_lean(Launch(kernels.spin_kernel(), 1, 1, (WATCH, np.int64(9))), arch)
    assert_lean(Launch(kernels.empty_kernel(), 1, 1, (X,)), arch)
    assert_lean(Launch(fill_kernel(), 1, caches.THREADS, (X, np.float32(0))), arch)


def test_multiply_adds_are_counted_right(device):
    """x ← x·1 + 1, turns · UNROLLED times, from x + chain in each of CHAINS chains, then their sum."""
    if not gpu_device.SIMULATOR:
        pytest.skip("1,024 threads are enough in the simulator; `bench selftest` runs the real size")
    x, watch = device.empty(2, "float32"), device.empty(2, "int64")
    device.upload(x, np.array([0.0, 10.0], np.float32))
    Launch(kernels.fma_kernel(), 1, 2, (x, watch, np.float32(1), np.float32(1), np.int32(3))).run(device.stream)
    chains, steps = kernels.CHAINS, 3 * kernels.UNROLLED
    wanted = [chains * (first + steps) + sum(range(chains)) for first in (0, 10)]
    assert device.download(x).tolist() == wanted
    assert (device.download(watch) > 0).all()


def test_a_flush_writes_all_of_its_buffer(device):
    if not gpu_device.SIMULATOR:
        pytest.skip("the simulator fills one block")
    flush = Flush(device)
    assert device.download(flush._buffer).size == SPAN
    device.upload(flush._buffer, np.ones(SPAN, np.float32))
    flush()
    assert not device.download(flush._buffer).any()


def test_a_wait_lasts_as_long_as_it_says(device):
    target = device.empty(2, "int64")
    work = Calls("spin", device, [[Launch(kernels.spin_kernel(), 1, 1, (target, np.int64(3_000_000)))]])
    work.repeat(1)
    assert work.repeat(2) >= 3.0
    assert device.download(target)[1] >= 3_000_000


def test_ceilings_are_rates(gpu, monkeypatch):
    for name, value in (("MIN_SECONDS", 0.0), ("MAX_SECONDS", 0.01), ("WINDOW", 0.001)):
        monkeypatch.setattr(steady, name, value)
    found = ceilings.measure(gpu)
    assert set(found) == ({"fp32", "copy"} if gpu.capability < (8, 0) else {"fp32", "tf32", "bf16", "copy"})
    assert all(rate > 0 for rate in found.values())


def test_a_ceilings_first_launch_does_not_count(monkeypatch):
    """A run of half a millisecond is repeated until the 10 to 50 µs before the first one are a hundredth."""
    monkeypatch.setattr(ceilings, "Calls", lambda *made: "work")
    seen = []
    for ms, runs in ((0.5, 10), (3.0, 2), (9.0, 1)):
        warm = steady.Warm(True, 0.5, ms, 1980.0, frozenset(), ())
        monkeypatch.setattr(ceilings, "warm_up", lambda works, watch, bounds, warm=warm: warm)
        monkeypatch.setattr(ceilings, "sample", lambda works, n, *more: seen.append(n))
        ceilings.timed(ceilings.Probe(FMA, 1), None, None)
        assert seen.pop() == runs


def test_three_measurements_are_taken_in_blocks(monkeypatch):
    """A GPU that is 4 % slower for one block of the fifteen does not change any of the medians."""
    monkeypatch.setattr(selftest, "SIMULATOR", False)
    monkeypatch.setattr(selftest, "BLOCKS", 5)
    monkeypatch.setattr(ceilings, "copying", lambda device: None)
    seconds = [1.0] * 15
    for slow, ok in (({7}, True), ({1, 4, 7}, False)):
        times = iter([1.04 if at in slow else one for at, one in enumerate(seconds)])
        monkeypatch.setattr(ceilings, "timed", lambda probe, device, watch, **how: Found(next(times)))  # noqa: B023
        assert selftest._again(None, None)["ok"] is ok


def test_the_copy_is_judged_by_the_datasheet(monkeypatch):
    monkeypatch.setattr(selftest, "peaks_of", lambda device: Ceilings({}, 4.8e12))
    for rate, ok in ((4.2e12, True), (3.0e12, False), (4.79e12, False)):
        monkeypatch.setattr(ceilings, "copying", lambda device: ceilings.Probe(None, 1 << 30))
        monkeypatch.setattr(ceilings, "timed", lambda probe, device, watch, rate=rate: Found((1 << 30) / rate))
        row = selftest._copy(None, None)
        assert row["ok"] is ok
        assert row["value"] == pytest.approx(rate / 1e12)
        assert ("FAILED" in selftest.text([row])) is not ok


class Found:
    """Samples of one time."""

    readings = ()

    def __init__(self, seconds):
        self.ms = np.full((5, 1), seconds * 1e3)


def test_multiply_adds_are_judged_by_the_kernels_own_clock(monkeypatch):
    class Device:
        capability, multiprocessors = (9, 0), 132

        def download(self, array):
            return np.array([1_700_000, 1_000_000])  # 1,700 MHz

    monkeypatch.setattr(selftest, "SIMULATOR", False)
    peak = 2 * 128 * 132 * 1.7e9
    for part, ok in ((0.95, True), (0.85, False), (1.2, False)):
        monkeypatch.setattr(ceilings, "fma", lambda device: ceilings.Probe(None, int(1e12)))
        monkeypatch.setattr(ceilings, "timed", lambda probe, device, watch, part=part: Found(1e12 / (part * peak)))
        rows = list(selftest._fma(Device(), Watch(gpu_device.Host())))
        assert rows[0]["ok"] is ok
        assert rows[0]["value"] == pytest.approx(100 * part)
        assert rows[1]["value"] == pytest.approx(1700)
