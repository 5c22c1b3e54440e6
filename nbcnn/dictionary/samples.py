"""Samples: patches as rows, on the host or on a GPU, and what a whitening and k-means ask of them.

A GPU has them as rows of `pitch` values, a multiple of 16 of which those behind the last are zeros: products then read whole tiles. They never leave
it: means, covariances, thresholds and atoms are small, and one core that reads 500 MB of patches takes longer than all products of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from nbcnn.files.threads import in_threads, slices
from nbcnn.ops.images.draw import launch_draw_windows, launch_normal_contrast
from nbcnn.ops.images.draw import normal_contrast as normalise_contrast
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.products.gemm import launch_gemm_nt
from nbcnn.ops.svm import process
from nbcnn.ops.svm.rows import PARTS, launch_moments

PART = 1 << 15
"""Samples that a thread of the host works on at a time."""
WHOLE = 16
"""Values of a row on a GPU are a multiple of this many: a k-tile of `gemm`."""


def in_parts(work: Callable[[slice], Any], count: int, part: int = PART) -> list[Any]:
    """What `work` returns for each part of `count` samples, in threads: one core cannot keep the memory busy."""
    return in_threads(work, slices(count, part))


def normalised(rows: np.ndarray) -> np.ndarray:
    """Rows of length 1, float32; rows of zeros stay."""
    made = np.empty(rows.shape, np.float32)

    def scale(at: slice) -> None:
        lengths = np.sqrt(np.einsum("ij,ij->i", rows[at], rows[at]))
        made[at] = rows[at] / np.maximum(lengths, 1e-12)[:, None]

    in_parts(scale, len(rows))
    return made


class HostSamples:
    """Samples (count, width), float32, in the memory of the host: the reference."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, (self.count, self.width) = values, values.shape

    def normalise_contrast(self, norm: float) -> None:
        """Give every sample the mean 0, and divide it by √(variance + norm)."""
        in_parts(lambda at: normalise_contrast(self.values[at], width=self.width, norm=norm), self.count)

    def centre(self) -> np.ndarray:
        """Take off the mean of all samples; returns it, float32 (width,)."""
        sums = in_parts(lambda at: self.values[at].sum(0, dtype=np.float64), self.count)
        mean = np.asarray(sum(sums) / self.count).astype(np.float32)
        in_parts(lambda at: np.subtract(self.values[at], mean, out=self.values[at]), self.count)
        return mean

    def covariance(self) -> np.ndarray:
        """The mean of x xᵀ, float64 (width, width), of samples that are centred already. Terms are added in float32 by parts."""
        found = np.zeros((self.width,) * 2)
        for at in slices(self.count, PART):
            found += self.values[at].T @ self.values[at]
        return found / self.count

    def mapped(self, matrix: np.ndarray) -> HostSamples:
        """The samples matrix·x, scaled to length 1; matrix (width, width) float32."""
        return HostSamples(normalised(self.values @ matrix.T))

    def rows(self, which: np.ndarray) -> np.ndarray:
        """The samples of these numbers, float32 (n, width)."""
        return self.values[which]

    def products(self, atoms: np.ndarray, count: int) -> np.ndarray:
        """atoms·x of the first `count` samples, float32 (atoms, count)."""
        return np.asarray(atoms @ self.values[:count].T, np.float32)


class GpuSamples:
    """The same on a GPU: `values` is a flat array of `count` rows of `pitch` values, of which `width` count."""

    def __init__(self, device: Any, count: int, width: int) -> None:
        self.device, self.count, self.width = device, count, width
        self.pitch = WHOLE * ceil_div(width, WHOLE)
        self.values = device.empty(count * self.pitch, "float32")
        self._order: Any = None

    @classmethod
    def of(cls, values: np.ndarray, device: Any) -> GpuSamples:
        """Samples of the host, (count, width) float32, copied."""
        made = cls(device, *values.shape)
        for at in slices(made.count, PART):
            made.device.upload(made.values[at.start * made.pitch : at.stop * made.pitch], made.padded(values[at]))
        return made

    @property
    def order(self) -> Any:
        """0, 1, 2, …: where `ops/svm` finds the samples."""
        if self._order is None:
            self._order = self.uploaded(np.arange(self.count, dtype=np.int32))
        return self._order

    def uploaded(self, values: np.ndarray) -> Any:
        """`values` in an array on the device."""
        array = self.device.empty(values.size, values.dtype.name)
        self.device.upload(array, values)
        return array

    def downloaded(self, array: Any, *shape: int) -> np.ndarray:
        """A host copy of the first elements of `array`, in this shape."""
        found: np.ndarray = self.device.download(array[: int(np.prod(shape))])
        return found.reshape(shape)

    def padded(self, rows: np.ndarray) -> np.ndarray:
        """Rows of `width` values as float32 rows of `pitch`."""
        made = np.zeros((len(rows), self.pitch), np.float32)
        made[:, : self.width] = rows
        return made

    def normalise_contrast(self, norm: float) -> None:
        launch_normal_contrast(self.values, self.count, self.width, self.pitch, norm).run(self.device.stream)

    def centre(self) -> np.ndarray:
        sums, squares = (self.device.empty(PARTS * self.pitch, "float64") for _ in range(2))
        about = self.uploaded(np.zeros(self.pitch))
        launch_moments(self.values, self.order, about, sums, squares, self.count, self.pitch, self.pitch, PARTS).run(self.device.stream)
        mean = np.asarray(self.downloaded(sums, PARTS, self.pitch).sum(0) / self.count).astype(np.float32)
        there = self.uploaded(mean)
        process.launch_centred(self.values, self.order, there, self.values, self.count, self.pitch, self.pitch).run(self.device.stream)
        self.device.synchronize()
        return mean[: self.width]

    def covariance(self) -> np.ndarray:
        parts = process.parts_of(self.pitch)
        sums = self.uploaded(np.zeros(parts * self.pitch**2))
        process.launch_channel_products(self.values, sums, self.count, self.pitch, 1).run(self.device.stream)
        upper = np.triu(self.downloaded(sums, parts, self.pitch, self.pitch).sum(0))[: self.width, : self.width]
        return np.asarray((upper + np.triu(upper, 1).T) / self.count)

    def mapped(self, matrix: np.ndarray) -> GpuSamples:
        made = GpuSamples(self.device, self.count, self.width)
        square = np.zeros((self.pitch, self.pitch), np.float32)
        square[: self.width, : self.width] = matrix
        there, zeros = self.uploaded(square), self.uploaded(np.zeros(self.pitch, np.float32))
        launch_gemm_nt(self.values, there, made.values, self.count, self.pitch, self.pitch).run(self.device.stream)
        process.launch_unit_rows(made.values, self.order, zeros, self.count, self.pitch, self.pitch).run(self.device.stream)
        self.device.synchronize()
        return made

    def rows(self, which: np.ndarray) -> np.ndarray:
        there, zeros = self.uploaded(which.astype(np.int32)), self.uploaded(np.zeros(self.pitch, np.float32))
        made = self.device.empty(len(which) * self.pitch, "float32")
        process.launch_centred(self.values, there, zeros, made, len(which), self.pitch, self.pitch).run(self.device.stream)
        return self.downloaded(made, len(which), self.pitch)[:, : self.width]

    def products(self, atoms: np.ndarray, count: int) -> np.ndarray:
        count = min(count, self.count)
        there, made = self.uploaded(self.padded(atoms)), self.device.empty(len(atoms) * count, "float32")
        launch_gemm_nt(there, self.values, made, len(atoms), count, self.pitch).run(self.device.stream)
        return self.downloaded(made, len(atoms), count)


Samples = HostSamples | GpuSamples


def samples_of(values: np.ndarray, device: Any) -> Samples:
    """Samples of the host where `device` computes; on the host the array itself."""
    return GpuSamples.of(values, device) if device.name == "gpu" else HostSamples(values)


def places(shape: tuple[int, ...], window: tuple[int, int], count: int, random: np.random.Generator) -> np.ndarray:
    """Image, row and column of `count` windows of maps of `shape` (N, C, H, W), drawn at random: (3, count)."""
    n, _, h, w = shape
    return np.stack([random.integers(0, extent, count) for extent in (n, h - window[0] + 1, w - window[1] + 1)])


def drawn_on_gpu(
    device: Any,
    blocks: Iterable[tuple[Any, tuple[int, ...]]],
    images: int,
    window: tuple[int, int],
    count: int,
    random: np.random.Generator,
    scale: Sequence[Any],
) -> GpuSamples:
    """`statistics.drawn_of_all` of blocks on the GPU: (flat array, its shape (N, C, H, W)).

    With scale = (shift, factor), numbers or one for each channel, a value becomes (value − shift)·factor.
    """
    seen = given = 0
    made: GpuSamples | None = None
    for block, shape in blocks:
        if made is None:
            made = GpuSamples(device, count, shape[1] * window[0] * window[1])
            shift, factor = (made.uploaded(np.full(shape[1], values, np.float32)) for values in scale)
        seen += shape[0]
        due = count * seen // images
        if due > given:
            where = made.uploaded(places(shape, window, due - given, random).astype(np.int32))
            target = made.values[given * made.pitch : due * made.pitch]
            launch_draw_windows(block, where, shift, factor, target, due - given, (shape[1], shape[2], shape[3]), window, made.pitch).run(
                device.stream
            )
            device.synchronize()  # before the block and the places go
        given = due
    assert made is not None
    return made
