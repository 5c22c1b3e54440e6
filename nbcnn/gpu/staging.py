"""This module takes a batch to the device and its result back through page-locked memory: the host enqueues all of it, and waits once.

Copies from and to memory that may be paged out wait for the stream before and behind them: three round trips of several microseconds each around
kernels that take as long for one image. Here a batch is copied into page-locked memory first; copy, kernels and copy back then lie on the stream, and
the host may fill the memory of the next batch meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbcnn.gpu import driver
from nbcnn.gpu.compiler import SIMULATOR

MOST_BYTES = 64 << 20
"""A batch and its result of more bytes are copied straight from and to the caller's memory: page-locked memory is taken from all other programs."""


class Staging:
    """Page-locked memory for a batch that goes to `source`, an array of `device`, and for the result that comes back from `target`.

    Raises MemoryError if there is too little of it.
    """

    def __init__(self, device: Any, source: Any, target: Any) -> None:
        self._stream, self._source, self._target = device.stream, source, target
        self._given, self._found = driver.pinned(source.size, source.dtype), driver.pinned(target.size, target.dtype)
        self._end = driver.Event(timing=False)

    def run(self, values: np.ndarray, work: Callable[[], Any]) -> None:
        """Enqueue the copy of `values`, then what `work` enqueues, then the copy back."""
        np.copyto(self._given.reshape(values.shape), values)
        self._source.copy_to_device(self._given, stream=self._stream)
        work()
        self._target.copy_to_pinned(self._found, stream=self._stream)
        self._end.record(self._stream)

    def wait(self) -> np.ndarray:
        """The result, flat, when it is there; the next `run` writes over it."""
        self._end.synchronize()
        return self._found


def staging(device: Any, source: Any, target: Any) -> Staging | None:
    """Staging for a batch and its result; None on a host, for large batches, and where no page-locked memory is left."""
    if device.name != "gpu" or SIMULATOR or source.nbytes + target.nbytes > MOST_BYTES:
        return None
    try:
        return Staging(device, source, target)
    except MemoryError:
        return None
