"""This module scores forecasts: the root mean squared logarithmic error (RMSLE) of a network beside those of naive forecasts.

last value   the reading of the hour before
day before   the reading of 24 hours before
weekly mean  the mean of the readings at this hour in the last 7 days
ridge        linear regression with an L2 penalty on everything a window holds
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from nbcnn.datasets.series import WINDOW, SeriesDataset, Windows

PENALTY = 1.0
RIDGE_WINDOWS = 200_000
"""Training windows that the ridge is fitted on at most: it has 193 coefficients."""
_CHUNK = 8192


def rmsle(predicted: np.ndarray, truth: np.ndarray) -> float:
    """√ mean (predicted − truth)², both log(1 + reading)."""
    return float(np.sqrt(np.square(predicted - truth).mean()))


def stretch(data: SeriesDataset, part: str, hours: int = 168) -> Windows:
    """Windows whose targets are hours in a row: up to `hours` of one meter, around the first window of `part`, for a picture."""
    windows = data.windows(part)
    first = int(windows.starts[0])
    wanted = np.sort(data.all_starts[part][np.abs(data.all_starts[part] - first) < hours])
    at = int(np.searchsorted(wanted, first))
    # The run of neighbours without a gap around the first window.
    breaks = np.flatnonzero(np.diff(wanted) != 1)
    low = int(breaks[breaks < at].max()) + 1 if (breaks < at).any() else 0
    high = int(breaks[breaks >= at].min()) + 1 if (breaks >= at).any() else len(wanted)
    return replace(windows, starts=wanted[low:high][:hours])


def baselines(data: SeriesDataset, part: str = "test") -> dict[str, float]:
    """RMSLE of the naive forecasts on the windows of `part`."""
    truth = data.truth(part)
    return {name: rmsle(predicted, truth) for name, predicted in naive_forecasts(data, part).items()}


def naive_forecasts(data: SeriesDataset, part: str) -> dict[str, np.ndarray]:
    """log(1 + reading) by every naive forecast, (W)."""
    at = data.starts[part] + WINDOW
    week = np.stack([_reading(data, at, 24 * day) for day in range(1, 8)])
    # Where a reading is missing, or the series begins later, the mean is over the others; the day before is always there.
    weekly = np.nanmean(week, axis=0)
    return {
        "last value": np.log1p(np.maximum(_reading(data, at, 1), 0)),
        "day before": np.log1p(np.maximum(week[0], 0)),
        "weekly mean": np.log1p(np.maximum(weekly, 0)),
        "ridge": ridge(data, part),
    }


def _reading(data: SeriesDataset, at: np.ndarray, hours: int) -> np.ndarray:
    """The readings `hours` before the rows `at`, float64; NaN before the first row of all."""
    before = at - hours
    return np.where(before >= 0, data.meters[np.maximum(before, 0)].astype(np.float64), np.nan)


def ridge(data: SeriesDataset, part: str) -> np.ndarray:
    """log(1 + reading) by a ridge regression fitted on the training windows, (W)."""
    width = data.rows.shape[1] * WINDOW + 1
    gram, moment = PENALTY * np.eye(width), np.zeros(width)
    gram[-1, -1] = 0  # the intercept is free
    for table, target in _tables(data, "train", RIDGE_WINDOWS):
        gram += table.T @ table
        moment += table.T @ target
    weights = np.linalg.lstsq(gram, moment, rcond=None)[0]
    outputs = np.concatenate([table @ weights for table, _ in _tables(data, part, None)])
    return np.maximum(outputs * data.deviation + data.mean, 0)


def _tables(data: SeriesDataset, part: str, limit: int | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Windows as rows of a float64 table with a one at the end, and their standardised targets, chunk by chunk."""
    windows = data.windows(part)
    count = len(windows) if limit is None else min(limit, len(windows))
    for first in range(0, count, _CHUNK):
        which = slice(first, min(first + _CHUNK, count))
        flat = windows.series(which).reshape(which.stop - first, -1)
        yield np.column_stack([flat, np.ones(len(flat))]).astype(np.float64), data.rows[windows.starts[which] + WINDOW, 0].astype(np.float64)
