"""Uploads that run beside the kernels: page-locked host memory, a stream of its own, and events between the two streams."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbcnn.gpu import driver
from nbcnn.gpu.compiler import SIMULATOR
from nbcnn.plan.storage import numpy_dtype


class Uploads:
    """Copies from the host to arrays of `device` (`nbcnn.gpu.device`), asynchronous on a GPU; on a host, and in the simulator, each is done at once.

    An event is what `mark` and `copy` return: a point that one stream has reached or not. On a host every event is in the past.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._beside = device.name == "gpu" and not SIMULATOR
        self._stream: Any = driver.Stream() if self._beside else None

    def pinned(self, count: int, dtype: str) -> np.ndarray:
        """`count` elements of host memory, 1-D, page-locked where a GPU reads them. Raises MemoryError if there is too little."""
        if not self._beside:
            return np.empty(count, numpy_dtype(dtype))
        return driver.pinned(count, numpy_dtype(dtype))

    def copy(self, target: Any, source: np.ndarray, after: Any = None) -> Any:
        """Copy `source`, which `pinned` made, to `target` of the same size once the event `after` has happened; returns the event of its end."""
        if not self._beside:
            self._device.upload(target, source)
            return None
        if after is not None:
            after.wait(self._stream)
        target.copy_to_device(source, stream=self._stream)
        return self._recorded(self._stream)

    def mark(self) -> Any:
        """The event that everything enqueued so far on the stream of the kernels has run."""
        return self._recorded(self._device.stream) if self._beside else None

    def hold(self, event: Any) -> None:
        """Let the kernels that are enqueued from now on wait for `event`."""
        if event is not None:
            event.wait(self._device.stream)

    def done(self, event: Any) -> bool:
        """True if `event` has happened."""
        return event is None or bool(event.query())

    def synchronize(self) -> None:
        """Wait until no copy is under way."""
        if self._beside:
            self._stream.synchronize()

    def _recorded(self, stream: Any) -> Any:
        event = driver.Event(timing=False)
        event.record(stream)
        return event
