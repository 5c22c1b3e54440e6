"""Samples on the GPU and the kernel values between them: features come up once, and processing and standardising happen there.

The mirrored kernel (`kernel.py`) is four RBF matrices, added where the first one lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.classify.gpu_processing import OnGpu
from nbcnn.classify.pipeline import Settings, finite
from nbcnn.classify.processing import Processing, run
from nbcnn.classify.scale import Scaler, scaler_of
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.products.gemm import launch_gemm_nt
from nbcnn.ops.products.gram_wgmma import launch_gram
from nbcnn.ops.products.parts import launch_product
from nbcnn.ops.products.rbf import launch_rbf
from nbcnn.ops.svm import mirror, rows

_WIDTH = 64
STAGED_BYTES = 1 << 26
_INDEX_LIMIT = 2**31
_SPARE_VALUES = 1 << 26


@dataclass
class Rows:
    """Samples on the device: `count` rows of `pitch` floats, what products are made of (halves or the rows themselves) and their norms.

    For the mirrored kernel also `mirror`, those of the mirrored images, `apart`, |x − x'|² of every row, and `factors` of a gamma
    (`Kernel.weigh`).
    """

    count: int
    pitch: int
    values: Any
    halves: Any
    exact: np.ndarray
    norms: Any
    scale: float
    mirror: Rows | None = None
    apart: np.ndarray | None = None
    factors: Any = None

    @property
    def largest(self) -> float:
        """The largest |x|², mirrored images included."""
        own = float(self.exact.max(initial=0.0))
        return own if self.mirror is None else max(own, self.mirror.largest)


class Kernel:
    """RBF kernel values on the device, by wgmma where the GPU has it, else by CUDA cores and `rbf`."""

    def __init__(self, device: Any) -> None:
        self.device, self.wgmma = device, device.capability == (9, 0)

    def uploaded(self, values: np.ndarray) -> Any:
        """`values` in an array on the device."""
        array = self.device.empty(values.size, str(values.dtype))
        if values.size:
            self.device.upload(array, values)
        return array

    def bring(self, features: np.ndarray, places: np.ndarray, count: int, pitch: int, progress: Callable[[int], object]) -> Any:
        """`count` rows of zeros with `features` (n, F) at `places`; each value is read once, in order."""
        n, width = features.shape
        target = self.uploaded(np.zeros(0, np.float32)) if not count else self.device.empty(count * pitch, "float32")
        step = max(1, STAGED_BYTES // (4 * width))
        staged, there = self.device.empty(min(n, step) * width, "float32"), self.uploaded(places.astype(np.int32))
        # Rows of room come from one staged row of zeros.
        room = np.setdiff1d(np.arange(count), places).astype(np.int32)
        if len(room):
            empty = self.uploaded(np.zeros(width * len(room), np.float32))
            rows.launch_place_rows(empty, self.uploaded(room), target, len(room), width, pitch).run(self.device.stream)
        for first in range(0, n, step):
            part = np.ascontiguousarray(features[first : first + step], np.float32)
            self.device.upload(staged[: part.size], part)
            rows.launch_place_rows(staged, there[first:], target, len(part), width, pitch).run(self.device.stream)
            progress(len(part))
        self.device.synchronize()
        return target

    def moments(self, values: Any, places: np.ndarray, width: int, pitch: int) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of every feature of the samples at `places`, float64: two passes, as `scale.measured`."""
        n = len(places)
        parts = min(rows.PARTS, n)
        there, sums, squares = self.uploaded(places.astype(np.int32)), *(self.device.empty(parts * width, "float64") for _ in range(2))

        def added(centre: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            rows.launch_moments(values, there, self.uploaded(centre), sums, squares, n, width, pitch, parts).run(self.device.stream)
            first, second = (self.device.download(array).reshape(parts, width).sum(0) for array in (sums, squares))
            return first, second

        mean = added(np.zeros(width))[0] / n
        correction, variance = added(mean)
        return mean, (variance - correction**2 / n) / n

    def standardise(self, values: Any, places: np.ndarray, scaler: Scaler, pitch: int) -> None:
        """Scale the samples at `places` in place."""
        mean, deviation = self.uploaded(scaler.mean.astype(np.float32)), self.uploaded(scaler.scale)
        there = self.uploaded(places.astype(np.int32))
        rows.launch_standardise(values, there, mean, deviation, len(places), len(scaler.mean), pitch).run(self.device.stream)
        self.device.synchronize()

    def operand(self, sets: list[Any], features: list[np.ndarray], count: int, pitch: int) -> Rows:
        """What kernel values are made from: of `sets`, the rows and for the mirrored kernel those of the mirrored images.

        The list is emptied: rows are let go where halves take their place. Raises ValueError where `features`, from which the rows were made,
        are not finite: their norms are then not, either.
        """
        between = None
        if len(sets) > 1:
            squared = self.device.empty(count, "float64")
            mirror.launch_apart(sets[0], sets[1], squared, count, pitch).run(self.device.stream)
            between = self.device.download(squared)[:count]
        own, *mirrors = (self._operand(sets.pop(0), each, count, pitch) for each in features)
        if mirrors:
            own.mirror, own.apart = mirrors[0], between
        return own

    def weigh(self, samples: Rows, gamma: float) -> None:
        """Make the factors that the mirrored kernel of `gamma` multiplies its sums with."""
        if samples.apart is not None:
            samples.factors = self.uploaded(mirror.factors(samples.apart, gamma))

    def _operand(self, values: Any, features: np.ndarray, count: int, pitch: int) -> Rows:
        device = self.device
        exact, rounded, largest = device.empty(count, "float64"), device.empty(count, "float32"), device.empty(count, "float32")
        rows.launch_norms(values, exact, rounded, largest, count, pitch).run(device.stream)
        squared, most = device.download(exact)[:count], float(device.download(largest)[:count].max(initial=0.0))
        if not np.isfinite(squared).all():
            finite(features)
        if not self.wgmma:
            return Rows(count, pitch, values, None, squared, rounded, 1.0)
        # The largest value becomes one in 2^13 … 2^14: float16 goes to 65,504, and what lies 2^28 below still is no subnormal.
        scale = 2.0 ** (13 - math.floor(math.log2(most))) if most > 0 else 1.0
        halves = device.empty(2 * count * pitch, "uint16")
        rows.launch_halves(values, halves, scale, count * pitch).run(device.stream)
        return Rows(count, pitch, None, halves, squared, rounded, scale)

    def block(self, a: Rows, b: Rows, k: Any, first: tuple[int, int], size: tuple[int, int], pitch: int, gamma: float) -> None:
        """k (M, N) with rows of `pitch` values: kernel values of rows first … of a and of b."""
        if a.mirror is None or b.mirror is None:
            self._rbf(a, b, k, first, size, pitch, gamma, False)
            return
        stream, (M, N) = self.device.stream, size
        whole = a is b and first[0] == first[1] and M == N
        more = [(a, b), (a.mirror, b.mirror)]
        self._rbf(a, b.mirror, k, first, size, pitch, gamma, False)
        if whole:  # the sum over (x', y) is its transpose, and the other two are symmetric: half of the products
            mirror.launch_add_transpose(k, M, pitch).run(stream)
        else:
            more.append((a.mirror, b))
        for x, y in more:
            self._rbf(x, y, k, first, size, pitch, gamma, True)
        mirror.launch_weigh(k, a.factors[first[0] :], b.factors[first[1] :], M, N, pitch, whole).run(stream)

    def _rbf(self, a: Rows, b: Rows, k: Any, first: tuple[int, int], size: tuple[int, int], pitch: int, gamma: float, added: bool) -> None:
        """k = exp(−γ |a − b|²) of these rows, or that added to k."""
        device, (M, N) = self.device, size
        norms = a.norms[first[0] : first[0] + M], b.norms[first[1] : first[1] + N]
        if self.wgmma:
            same = a is b and first[0] == first[1] and M == N
            launch_gram(
                (a.halves, norms[0], a.count),
                (b.halves, norms[1], b.count),
                k,
                (M, N, a.pitch),
                pitch,
                gamma,
                1 / (a.scale * b.scale),
                device.multiprocessors,
                first=first,
                symmetric=same,
                added=added,
            ).run(device.stream)
            return
        if added:
            step = max(1, min(M, _SPARE_VALUES // N))
            spare = device.empty(step * N, "float32")
            for top in range(0, M, step):
                height = min(step, M - top)
                self._rbf(a, b, spare, (first[0] + top, first[1]), (height, N), N, gamma, False)
                mirror.launch_add_values(spare, k[top * pitch :], height, N, pitch).run(device.stream)
            device.synchronize()  # before the spare values go
            return
        step = max(1, (_INDEX_LIMIT - 1) // max(N, a.pitch))
        for top in range(0, M, step):
            height, part = min(step, M - top), k[top * pitch :]
            at = (first[0] + top) * a.pitch, first[1] * b.pitch
            if pitch == N and N * b.pitch < _INDEX_LIMIT:
                launch_gemm_nt(a.values[at[0] :], b.values[at[1] :], part, height, N, a.pitch).run(device.stream)
            else:
                launch_product(a.values, b.values, part, height, N, a.pitch, (a.pitch, b.pitch, pitch), (*at, 0)).run(device.stream)
            launch_rbf(norms[0][top:], norms[1], part, height, N, gamma, pitch).run(device.stream)


def pitch_of(width: int) -> int:
    """Floats of a row of samples with so many features."""
    return _WIDTH * ceil_div(width, _WIDTH)


def scaled_sets(
    kernel: Kernel,
    sets: list[np.ndarray],
    places: np.ndarray,
    count: int,
    pitch: int,
    settings: Settings,
    progress: Callable[[int], object],
    scaler: Scaler | None = None,
) -> tuple[list[Any], Scaler, Processing | None]:
    """Features of images, and perhaps of their mirrored ones, on the device, with the scaler and the fitted steps that they went through.

    They are scaled by `scaler`, or as the first set is; steps of `settings` that are not fitted are fitted on the first set. What is no float32 is
    scaled on the host, before it is rounded, where there are no steps.
    """
    made, process = list[Any](), settings.process
    for features in sets:
        if features.dtype != np.float32:
            finite(features)
            if process is None:
                scaler = scaler or scaler_of(features, settings.scale)
                made.append(kernel.bring(scaler.applied(features), places, count, pitch, progress))
                continue
        values = kernel.bring(features, places, count, pitch, progress)
        try:
            if process is not None:
                process = run(OnGpu(kernel, values, places, pitch, process), process)
            if scaler is None:
                mean, variance = kernel.moments(values, places, features.shape[1], pitch)
                if not (np.isfinite(mean).all() and np.isfinite(variance).all()):
                    finite(features)
                scaler = Scaler.of(mean, variance, len(features), settings.scale)
        except ValueError:
            finite(features)  # which says which value it was that made statistics no numbers
            raise
        kernel.standardise(values, places, scaler, pitch)
        made.append(values)
    assert scaler is not None  # there is at least one set
    return made, scaler, process
