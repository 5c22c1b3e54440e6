"""This module reads the GPU's clock, temperature, power and throttling while it works: through NVML, else nvidia-smi, else not at all.

NVML comes with the driver; its Python bindings with `cuda.bindings` (which numba-cuda needs anyway) or as `pynvml`. A watch reads in a
thread of its own, so that timing never waits for it.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nbcnn.gpu import driver
from nbcnn.gpu.compiler import bindings
from nbcnn.gpu.language import SIMULATOR

PERIOD = 0.05
"""Seconds between two readings."""
REASONS = {
    0x1: "idle",
    0x2: "clocks set by the user",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks",
}
"""NVML's bits for why a clock is not higher."""
THROTTLES = frozenset({"power cap", "hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "power brake"})
"""The reasons that slow work down."""
_QUERY = "clocks.sm,temperature.gpu,power.draw,clocks_throttle_reasons.active"


@dataclass(frozen=True)
class Reading:
    """One look at the GPU: seconds (`time.perf_counter`), SM clock in MHz, °C, W, why the clock is not higher, other processes on it."""

    at: float
    sm_mhz: float
    temperature: float
    watts: float
    reasons: frozenset[str]
    others: int | None = None


def reason_words(bits: int) -> frozenset[str]:
    """NVML's bit mask in words."""
    return frozenset(word for bit, word in REASONS.items() if bits & bit)


class Nvml:
    """Readings through NVML. Raises whatever the bindings raise where the library or the device is missing."""

    source = "NVML"

    def __init__(self, uuid: str) -> None:
        try:
            nvml = bindings("nvml")
        except ImportError:
            self._pynvml(uuid)
            return
        nvml.init_v2()
        handle = nvml.device_get_handle_by_uuid(uuid)
        clock = int(nvml.ClockType.CLOCK_SM)
        self._ask = (
            lambda: nvml.device_get_clock_info(handle, clock),
            lambda: nvml.device_get_temperature_v(handle, 0),
            lambda: nvml.device_get_power_usage(handle),
            lambda: nvml.device_get_current_clocks_event_reasons(handle),
            lambda: len(nvml.device_get_compute_running_processes_v3(handle)),
        )
        self.read()

    def _pynvml(self, uuid: str) -> None:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self._ask = (
            lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            lambda: pynvml.nvmlDeviceGetTemperature(handle, 0),
            lambda: pynvml.nvmlDeviceGetPowerUsage(handle),
            lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
            lambda: len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)),
        )
        self.read()

    def read(self) -> Reading | None:
        clock, temperature, milliwatts, bits, processes = (ask() for ask in self._ask)
        others = max(0, int(processes) - 1)  # one is this process
        return Reading(time.perf_counter(), float(clock), float(temperature), milliwatts / 1e3, reason_words(int(bits)), others)

    def close(self) -> None:
        """Nothing to do: NVML ends with the process."""


class Smi:
    """Readings from one running `nvidia-smi`, a line every 100 ms. Raises OSError if there is none."""

    source = "nvidia-smi"

    def __init__(self, uuid: str) -> None:
        if shutil.which("nvidia-smi") is None:
            raise FileNotFoundError("nvidia-smi is not on the PATH")
        command = ("nvidia-smi", f"--id={uuid}", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", "--loop-ms=100")
        self._running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if self.read() is None:
            self.close()
            raise OSError("nvidia-smi answered nothing that can be read")

    def read(self) -> Reading | None:
        assert self._running.stdout is not None
        return parse(self._running.stdout.readline())

    def close(self) -> None:
        self._running.terminate()
        self._running.wait()


def parse(line: str) -> Reading | None:
    """A line of nvidia-smi (SM clock, temperature, power, bit mask) as a reading; None if it is something else."""
    parts = [part.strip() for part in line.split(",")]
    try:
        clock, temperature, watts = (float(part) for part in parts[:3])
        return Reading(time.perf_counter(), clock, temperature, watts, reason_words(int(parts[3], 16)))
    except (ValueError, IndexError):
        return None


def source_for(device: Any) -> Any:
    """`Nvml` or `Smi` of the GPU that `device` is; None for a host, the simulator, or a GPU that neither can see."""
    if device.name == "host" or SIMULATOR:
        return None
    uuid = driver.device().uuid
    for kind in (Nvml, Smi):
        with suppress(Exception):  # a missing library, a device that it does not show: each binding has errors of its own
            return kind(uuid)
    return None


class Watch:
    """A thread that reads the clocks every `PERIOD` seconds while it is entered (`with Watch(device) as watch:`).

    `source` None finds one for `device`; `watch.source` is its name, None where nothing can be read (then no reading ever comes).
    """

    def __init__(self, device: Any, source: Any = None) -> None:
        self._from = source or source_for(device)
        self.source: str | None = self._from.source if self._from else None
        self._readings: list[Reading] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        if self._from:
            self._read()
            self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stop.set()
        if self._from:
            self._thread.join()
            self._from.close()

    def _read(self) -> None:
        found = self._from.read()
        if found is not None:
            self._readings.append(found)

    def _run(self) -> None:
        while not self._stop.wait(PERIOD):
            self._read()

    def since(self, moment: float) -> list[Reading]:
        """Readings taken after `moment` (`time.perf_counter`); the newest one if none is that new; [] if nothing can be read."""
        newer = [reading for reading in list(self._readings) if reading.at >= moment]
        return newer or list(self._readings)[-1:]


def clock_of(readings: Sequence[Reading]) -> float | None:
    """Median SM clock in MHz; None without readings."""
    clocks = sorted(reading.sm_mhz for reading in readings)
    return clocks[len(clocks) // 2] if clocks else None


def throttles(readings: Sequence[Reading]) -> frozenset[str]:
    """The reasons in `readings` that slow work down."""
    return frozenset().union(*(reading.reasons for reading in readings)) & THROTTLES
