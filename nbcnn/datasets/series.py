"""This module keeps a data set of hourly series: one table of rows, and windows into it for each part of the year."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import numpy as np

from nbcnn.datasets.dataset import DataError

WINDOW = 48
"""Hours that a forecast sees."""
TRAIN_DAYS, VALIDATION_DAYS = 213, 61
"""Days of a leap year: January to July for training, August and September for validation; the rest is for the test."""
PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Windows:
    """Windows of `length` rows, each followed by the row that is to be forecast.

    rows     (R, F) float32: all series, one behind the other.
    targets  (R) float32: what is to be forecast, by row.
    starts   (W) int32: the first row of each window; starts + length is its target's.
    """

    rows: np.ndarray
    targets: np.ndarray
    starts: np.ndarray
    length: int = WINDOW

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def shape(self) -> tuple[int, int]:
        """(F, L) of one window."""
        return self.rows.shape[1], self.length

    def series(self, which: slice = slice(None)) -> np.ndarray:
        """The chosen windows as float32 (W, F, L)."""
        at = self.starts[which, None] + np.arange(self.length)
        return np.ascontiguousarray(self.rows[at].transpose(0, 2, 1))


@dataclass(frozen=True)
class SeriesDataset:
    """Readings of meters with the weather, hour by hour.

    rows     (R, F) float32: log(1 + reading), then the other features, each less its mean over the training months, by its deviation.
    meters   (R) float32: the readings themselves; NaN where none was taken.
    starts   first rows of the windows of `train`, `validation` and `test`, shuffled, so that the first ones are a fair sample;
             `all_starts` are those before `cut`.
    mean, deviation  of log(1 + reading) in the training months: what undoes the first feature.
    change   root mean square of the first feature's change from the last hour of a window to its target, in the training months.
    """

    name: str
    source: str
    features: tuple[str, ...]
    rows: np.ndarray
    meters: np.ndarray
    starts: dict[str, np.ndarray]
    all_starts: dict[str, np.ndarray]
    mean: float
    deviation: float
    change: float
    loss: str = "log-mse"

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(starts):,} {part}" for part, starts in self.starts.items())
        return f"<SeriesDataset {self.name}: {counts} windows of {len(self.features)} features>"

    def windows(self, part: str) -> Windows:
        """The windows of a part. Targets are readings for rmsle; for log-mse the change of the logarithm since the hour before,
        in multiples of `change`: a network that has learnt nothing is as good as the last value, and errors are those of the logarithm.
        """
        if self.loss != "log-mse":
            return Windows(self.rows, self.meters, self.starts[part])
        return Windows(self.rows, _changes(self.rows) / np.float32(self.change), self.starts[part])

    @property
    def unit(self) -> float:
        """A middling reading: rmsle predicts multiples of it."""
        return float(np.expm1(self.mean))

    def logs(self, outputs: np.ndarray, windows: Windows) -> np.ndarray:
        """log(1 + reading) that the outputs (W) of a network trained for `loss` mean on `windows`, (W), never below 0."""
        values = outputs.reshape(-1).astype(np.float64)
        if self.loss != "log-mse":
            return np.log1p(np.maximum(values * self.unit, 0))
        last = self.rows[windows.starts + windows.length - 1, 0]
        return np.maximum((last + values * self.change) * self.deviation + self.mean, 0)

    def truth(self, part: str) -> np.ndarray:
        """log(1 + reading) of the targets of a part, (W)."""
        return np.log1p(np.maximum(self.meters[self.starts[part] + WINDOW].astype(np.float64), 0))

    def checksum(self) -> int:
        """CRC-32 of rows and training windows."""
        return zlib.crc32(self.starts["train"].tobytes(), zlib.crc32(np.ascontiguousarray(self.rows).data))

    def cut(self, limit: int | None) -> SeriesDataset:
        """At most `limit` windows per part."""
        return self if limit is None else replace(self, starts={part: starts[:limit].copy() for part, starts in self.starts.items()})


def assemble(name: str, source: str, meters: np.ndarray, weather: np.ndarray, site_of: np.ndarray, features: tuple[str, ...]) -> SeriesDataset:
    """The data set of `meters` (S, H) and `weather` (sites, H, F−1), float32, NaN where a value is missing; H hours of a leap year.

    Missing weather is that of the hour before. A window and its target lie in one part of the year and miss no reading.
    Raises DataError if a part has no window.
    """
    count, hours = meters.shape
    weather = _filled(weather)
    logs = np.log1p(np.maximum(meters, 0))
    last = min(24 * TRAIN_DAYS, hours)
    if not np.isfinite(logs[:, :last]).any():
        raise DataError(f"{name}: no reading in the train months. Check the files, or use whole years.")
    rows = np.empty((count, hours, 1 + weather.shape[2]), np.float32)
    rows[:, :, 0] = logs
    rows[:, :, 1:] = weather[site_of]
    seen = rows[:, :last].reshape(-1, rows.shape[2])
    mean, deviation = (np.asarray(of(seen, 0, dtype=np.float64)) for of in (np.nanmean, np.nanstd))
    rows = ((rows - mean) / np.where(deviation > 0, deviation, 1)).astype(np.float32).reshape(count * hours, -1)
    present = np.isfinite(rows).all(1) & np.isfinite(meters.reshape(-1))
    rows[~present] = 0  # no window holds them
    edges = (0, 24 * TRAIN_DAYS, 24 * (TRAIN_DAYS + VALIDATION_DAYS), hours)
    random = np.random.Generator(np.random.Philox(key=np.array([0, 0], np.uint64)))
    starts = {}
    for part, first, stop in zip(PARTS, edges, edges[1:], strict=False):
        starts[part] = random.permutation(_whole(present.reshape(count, hours), first, max(first, min(stop, hours))))
        if not len(starts[part]):
            raise DataError(f"{name}: no {WINDOW + 1} hours in a row without a gap in the {part} months. Check the files, or use whole years.")
    change = float(np.sqrt(np.square(_changes(rows)[starts["train"] + WINDOW], dtype=np.float64).mean())) or 1.0
    return SeriesDataset(name, source, features, rows, meters.reshape(-1), starts, starts, float(mean[0]), float(deviation[0]) or 1.0, change)


def _changes(rows: np.ndarray) -> np.ndarray:
    """The first feature of every row less that of the row before, (R)."""
    return np.diff(rows[:, 0], prepend=rows[:1, 0])


def _whole(present: np.ndarray, first: int, stop: int) -> np.ndarray:
    """First rows (int32) of the WINDOW + 1 hours in a row that are all present, within the hours first..stop of every series."""
    inside = np.cumsum(np.pad(present[:, first:stop], ((0, 0), (1, 0))), axis=1)
    if stop - first <= WINDOW:
        return np.empty(0, np.int32)
    series, hour = np.nonzero(inside[:, WINDOW + 1 :] - inside[:, : -(WINDOW + 1)] == WINDOW + 1)
    return (series * present.shape[1] + first + hour).astype(np.int32)


def _filled(weather: np.ndarray) -> np.ndarray:
    """Missing values replaced by those of the hour before; at the start by the first there is; 0 where there is none at all."""
    made = weather.copy()
    for way in (made, made[:, ::-1]):
        for hour in range(1, way.shape[1]):
            gap = np.isnan(way[:, hour])
            way[:, hour][gap] = way[:, hour - 1][gap]
    return np.nan_to_num(made)
