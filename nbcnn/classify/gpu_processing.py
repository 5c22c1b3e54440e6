"""Feature processing on the GPU: the steps of `processing.py` on rows that are there already, in place, by the kernels of `ops/svm/process.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.classify.processing import Processing
from nbcnn.classify.scale import Scaler
from nbcnn.ops.svm import process, rows

CHUNK_BYTES = 1 << 26
"""Centred samples that are multiplied at a time: 2,000 of 8,192 features, more than fill an H200."""


class OnGpu:
    """Steps on the samples at `places` of `values`, rows of `pitch` floats on the device of `kernel` (a `gpu.Kernel`)."""

    def __init__(self, kernel: Any, values: Any, places: np.ndarray, pitch: int, processing: Processing) -> None:
        self.kernel, self.device, self.values, self.pitch = kernel, kernel.device, values, pitch
        self.places, self.there = places, kernel.uploaded(places.astype(np.int32))
        self.maps, self.width, self.count = processing.maps, processing.width, len(places)
        self._positions = self.maps[1] * self.maps[2]

    def _run(self, launch: Any) -> None:
        if self.count:
            launch.run(self.device.stream)

    def _chunks(self, mean: np.ndarray) -> Iterator[tuple[int, int, Any]]:
        """(first sample, samples, what is left of them without the mean) for all samples, a chunk at a time."""
        there, step = self.kernel.uploaded(mean.astype(np.float32)), max(1, CHUNK_BYTES // (4 * self.width))
        packed = self.device.empty(min(step, max(1, self.count)) * self.width, "float32")
        for first in range(0, self.count, step):
            n = min(step, self.count - first)
            process.launch_centred(self.values, self.there[first:], there, packed, n, self.width, self.pitch).run(self.device.stream)
            yield first, n, packed
        self.device.synchronize()  # before the chunk goes

    def blur(self) -> None:
        self._run(process.launch_blur(self.values, self.there, self.count, self.maps, self.pitch))

    def signed_root(self) -> None:
        self._run(process.launch_signed_root(self.values, self.there, self.count, self.width, self.pitch))

    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        found: tuple[np.ndarray, np.ndarray] = self.kernel.moments(self.values, self.places, self.width, self.pitch)
        return found

    def covariance(self, mean: np.ndarray) -> np.ndarray:
        channels = self.maps[0]
        parts = process.parts_of(channels)
        sums = self.kernel.uploaded(np.zeros(parts * channels**2))
        for _, n, packed in self._chunks(mean):
            process.launch_channel_products(packed, sums, n, channels, self._positions).run(self.device.stream)
        upper = np.triu(self.device.download(sums)[: parts * channels**2].reshape(parts, channels, channels).sum(0))
        return (upper + np.triu(upper, 1).T) / (self.count * self._positions)

    def standardise(self, scaler: Scaler) -> None:
        mean, scale = self.kernel.uploaded(scaler.mean), self.kernel.uploaded(scaler.scale)
        self._run(rows.launch_standardise(self.values, self.there, mean, scale, self.count, self.width, self.pitch))
        self.device.synchronize()

    def whiten(self, mean: np.ndarray, Z: np.ndarray) -> None:
        there = self.kernel.uploaded(np.ascontiguousarray(Z, np.float32).reshape(-1))
        for first, n, packed in self._chunks(mean):
            launch = process.launch_whiten(packed, there, self.values, self.there[first:], n, self.maps[0], self._positions, self.pitch)
            launch.run(self.device.stream)

    def unit(self, mean: np.ndarray) -> None:
        there = self.kernel.uploaded(mean.astype(np.float32))
        self._run(process.launch_unit_rows(self.values, self.there, there, self.count, self.width, self.pitch))
        self.device.synchronize()
