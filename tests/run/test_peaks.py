"""Tests of what a GPU can do at most: which figures are counted, which follow from the compute capability, and what no driver answers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from nbcnn.check.static import compile_launch
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu import driver
from nbcnn.modes import MODES, only_engine
from nbcnn.ops.kernel.call import Launch
from nbcnn.run import peak_kernels as kernels
from nbcnn.run import peaks

BF16 = MODES["tensorcore", "bf16"]
X, WATCH, TURNS = np.zeros(64, np.float32), np.zeros(2, np.int64), np.int32(4)


@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_tensor_kernels_keep_everything_in_registers(precision):
    for arch in ("80", "120"):
        assert compile_launch(Launch(kernels.mma_kernel(precision), 1, kernels.MMA_THREADS, (X, WATCH, TURNS)), arch).frame_bytes == 0
    report = compile_launch(Launch(kernels.wgmma_kernel(precision), 1, kernels.WGMMA_THREADS, (X, WATCH, TURNS)), "90a")
    assert report.frame_bytes == 0
    assert 0 < report.shared_bytes <= 48 * 1024


def test_which_instruction_and_how_many_lanes_a_gpu_has():
    engines = {capability: peaks.engine_of(capability) for capability in ((7, 0), (7, 5), (8, 0), (8, 7), (9, 0), (10, 3), (11, 0), (12, 1))}
    assert [capability for capability, engine in engines.items() if engine == ""] == [(7, 0)]
    assert [capability for capability, engine in engines.items() if engine == "wgmma"] == [(9, 0)]
    assert peaks.engine_of((9, 0), only_engine(BF16, "mma")) == "mma"
    assert peaks.engine_of((9, 0), only_engine(BF16, "wgmma")) == peaks.engine_of((9, 0), MODES["cudacore", "fp32"]) == "wgmma"
    assert [peaks.lanes(capability) for capability in ((7, 0), (7, 5), (8, 0), (8, 6), (9, 0), (12, 0))] == [64, 64, 64, 128, 128, 128]


class Played:
    """A GPU whose kernels take so many cycles, by its datasheet."""

    def __init__(self, name, capability, multiprocessors, rate):
        self.name, self.device_name, self.capability, self.multiprocessors, self.stream = "gpu", name, capability, multiprocessors, None
        self.rate, self.flops = rate, 0.0

    def empty(self, count, dtype):
        return np.zeros(count, dtype)

    def download(self, array):
        return np.array([self.flops / self.rate if self.rate else 0], np.int64)


@pytest.fixture
def played(monkeypatch):
    """A function (name, capability, multiprocessors, flops per cycle, attributes) -> the peaks of a GPU that is played."""
    monkeypatch.setattr(peaks, "SIMULATOR", False)

    def made(name, capability, multiprocessors, rate, mhz, memory_mhz, bits):
        attributes = {"CLOCK_RATE": mhz * 1000, "MEMORY_CLOCK_RATE": memory_mhz * 1000, "GLOBAL_MEMORY_BUS_WIDTH": bits, "INTEGRATED": 0}
        monkeypatch.setattr(driver, "device", lambda: SimpleNamespace(attribute=attributes.__getitem__))
        gpu = Played(name, capability, multiprocessors, rate)

        def run(launch, stream):
            warps, turns = launch.grid * launch.block // 32, int(launch.args[2])
            gpu.flops = warps * kernels.MMA_TILES * 2 * 16 * 8 * 16 * turns

        monkeypatch.setattr(Launch, "run", run)
        return peaks.peaks_of(gpu)

    return made


def test_a_gpu_has_the_rate_that_it_counts(played):
    """An A40 and a 3090 are of one capability; their datasheets say 149.7 and 71.2 dense bf16 TFLOP/s, 696 and 936 GB/s."""
    a40 = played("A40", (8, 6), 84, 1024, 1740, 7251, 384)
    geforce = played("3090", (8, 6), 82, 512, 1695, 9751, 384)
    assert a40.flops["bf16"] == pytest.approx(149.7e12, rel=1e-3)
    assert geforce.flops["bf16"] == pytest.approx(71.2e12, rel=1e-3)
    assert (a40.flops["tf32"], a40.flops["fp32 split"]) == (a40.flops["bf16"] / 2, a40.flops["bf16"] / 6)
    assert a40.flops["fp32"] == pytest.approx(37.4e12, rel=1e-3)
    assert (a40.bandwidth / 1e9, geforce.bandwidth / 1e9) == (pytest.approx(696, rel=1e-3), pytest.approx(936, rel=1e-3))
    assert a40.engine == "mma"


def test_without_tensor_cores_nothing_is_counted(played):
    v100 = played("V100", (7, 0), 80, 0, 1530, 877, 4096)
    assert v100.flops["fp32"] == v100.flops["bf16"] == pytest.approx(15.7e12, rel=3e-3)
    assert v100.engine == ""


def test_a_gpu_that_answers_nothing_has_no_peaks(played):
    assert played("it runs nothing", (8, 6), 84, 0, 1740, 7251, 384) is None
    assert played("its memory has no clock", (8, 6), 84, 1024, 1740, 0, 384) is None
    assert peaks.peaks_of(gpu_device.Host()) is None


def test_a_real_gpu_counts_what_its_instruction_can(gpu):
    if gpu.capability < (8, 0):
        pytest.skip("needs tensor cores of compute capability 8.0")
    found = peaks.peaks_of(gpu)
    by_mma = peaks.flops_per_cycle(gpu, "mma")
    # One mma.sync of 4,096 flops in 2 to 8 cycles of each of the four parts of a multiprocessor is all that GPUs have had.
    assert 500 <= by_mma <= 4140
    assert peaks.flops_per_cycle(gpu, "mma", "tf32") == pytest.approx(by_mma / 2, rel=0.05)
    if found.engine == "wgmma":
        assert 0.95 * 4096 <= peaks.flops_per_cycle(gpu, "wgmma") <= 1.01 * 4096
        assert 0.75 <= peaks.copied(gpu) / found.bandwidth <= 1.0
