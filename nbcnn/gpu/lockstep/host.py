"""The host's side of the simulator: device arrays, which are NumPy arrays in the host's memory, and events.

It has of `numba.cuda` what `nbcnn.gpu.device` and the tests ask of Numba's simulator.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np


class DeviceArray(np.ndarray):
    """A device array: kernels take it, the host copies to it and from it."""

    def copy_to_host(self, ary: np.ndarray | None = None, stream: Any = 0) -> np.ndarray:
        """A fresh host copy, or `ary` filled."""
        if ary is None:
            return np.array(self, copy=True, subok=False)
        np.copyto(ary, self.view(np.ndarray))
        return ary

    def copy_to_device(self, ary: Any, stream: Any = 0) -> None:
        """Fill with the values of `ary`, of the same size."""
        source = np.asarray(ary)
        if source.size != self.size:
            raise ValueError(f"{source.size} values for a device array of {self.size}")
        np.copyto(self.view(np.ndarray), source.reshape(self.shape))


def device_array(shape: Any, dtype: Any = np.float64, stream: Any = 0) -> DeviceArray:
    """An uninitialised device array."""
    return np.empty(shape, dtype).view(DeviceArray)


def to_device(values: Any, stream: Any = 0, to: DeviceArray | None = None) -> DeviceArray:
    """A copy of host `values`."""
    if to is not None:
        to.copy_to_device(values)
        return to
    return np.array(values, copy=True).view(DeviceArray)


class Event:
    """A moment."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def record(self, stream: Any = 0) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        """What is recorded is past."""

    def wait(self, stream: Any = 0) -> None:
        """What is recorded is past."""

    def query(self) -> bool:
        return True


def event(timing: bool = True) -> Event:
    return Event()


def event_elapsed_time(before: Event, behind: Event) -> float:
    """Milliseconds between two events."""
    return (behind.at - before.at) * 1e3


def synchronize() -> None:
    """A launch is done when its call returns."""
