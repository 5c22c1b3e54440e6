"""This module standardises features as scikit-learn's StandardScaler does, and computes gamma="scale", without float64 copies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.files.threads import in_threads, slices

_CHUNK_VALUES = 1 << 21


@dataclass(frozen=True)
class Scaler:
    """x ↦ (x - mean) / scale; `mean` and `scale` are (F,), float32, or the mean float64 for features that are no float32.

    `spread` is the variance of all values of the training features as they were.
    """

    mean: np.ndarray
    scale: np.ndarray
    spread: float = 1.0

    @classmethod
    def of(cls, mean: np.ndarray, variance: np.ndarray, n: int, scale: bool = True, dtype: Any = np.float32) -> Scaler:
        """From mean and variance of every feature of n samples (float64): to mean 0, and if `scale` to variance 1.

        Without `scale` features are centred all the same: the kernel depends on differences only, and float32 has no digits left for them
        behind a large mean. Where their squares would leave float32, all are divided by one power of two, which `Scaler.gamma` makes up for.
        A feature that is constant, up to the rounding of its variance, is only centred (scikit-learn's rule and bound).
        """
        eps = np.finfo(np.float64).eps
        constant = variance <= n * eps * variance + (n * mean * eps) ** 2
        deviation = np.where(constant, 1, np.sqrt(variance)) if scale else np.full(variance.shape, _unit(float(variance.max(initial=0.0))))
        return cls(mean.astype(dtype), deviation.astype(np.float32), float(variance.mean() + mean.var()))

    def gamma(self, gamma: float, scaled: bool) -> float:
        """The gamma for scaled features that `gamma` is for features as they were, which is itself where they are `scaled` to variance 1."""
        return gamma if scaled else min(gamma * float(self.scale[0]) ** 2, float(np.finfo(np.float32).max))

    def apply(self, rows: np.ndarray) -> None:
        """Scale float32 `rows` (n, F) in place."""
        for which in slices(len(rows), _rows(rows)):
            part = rows[which]
            part -= self.mean
            part /= self.scale

    def taken(self, rows: np.ndarray, index: np.ndarray, exact: bool) -> np.ndarray:
        """Scaled copy of rows[index], float32 (n, F), in C order, by threads; `exact` says that rows are float32 and are scaled as such."""
        made = np.empty((len(index), rows.shape[1]), np.float32)

        def scale(which: slice) -> None:
            if exact:
                np.copyto(made[which], rows[index[which]])
                self.apply(made[which])
            else:
                made[which] = self.applied(rows[index[which]])

        in_threads(scale, slices(len(index), _rows(rows)))
        return made

    def applied(self, rows: np.ndarray) -> np.ndarray:
        """Scaled float32 copy of `rows` (n, F) of any type, whose values are rounded after the mean is gone."""
        made = np.empty(rows.shape, np.float32)
        step = _rows(rows)
        for start in range(0, len(rows), step):
            made[start : start + step] = (rows[start : start + step] - self.mean.astype(np.float64)) / self.scale
        return made


def _unit(variance: float) -> float:
    """The power of two that all features are divided by, whose largest variance is this: 1 where float32 has room for squares of them."""
    return 1.0 if not 0 < variance < math.inf or 2.0**-80 < variance < 2.0**80 else 2.0 ** round(math.log2(variance) / 2)


def measured(train: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of every column of `train` (n, F), float64, in two passes as StandardScaler."""
    n, width = train.shape
    chunks = slices(n, _rows(train))

    # NaN, Inf and what overflows show in the result, and the caller says which value it was.
    def sums(chunk: slice) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(train[chunk].sum(axis=0, dtype=np.float64))

    def squares(chunk: slice) -> tuple[np.ndarray, np.ndarray]:
        with np.errstate(over="ignore", invalid="ignore"):
            centred = train[chunk] - mean
            return np.einsum("nf,nf->f", centred, centred), centred.sum(axis=0)

    # Parts of the sums come from threads and are added in order, so that bits do not depend on how many there are.
    mean = np.zeros(width)
    for each in in_threads(sums, chunks):
        mean += each
    mean /= n
    variance, correction = np.zeros(width), np.zeros(width)
    for square, rest in in_threads(squares, chunks):
        variance += square
        correction += rest
    return mean, (variance - correction**2 / n) / n


def scaler_of(train: np.ndarray, scale: bool) -> Scaler:
    """The scaler of training features (n, F) of any type of numbers."""
    with np.errstate(over="ignore", invalid="ignore"):
        return Scaler.of(*measured(train), len(train), scale, np.float32 if train.dtype == np.float32 else np.float64)


def standard(train: np.ndarray) -> Scaler:
    """Mean 0 and variance 1 for every column of `train` (n, F)."""
    return scaler_of(train, True)


def gamma_of(scaler: Scaler, width: int, mean_square: float, scaled: bool) -> float:
    """gamma="scale": 1 / (F · variance of all values), for scaled features whose columns are centred: their mean square is the variance."""
    variance = mean_square if scaled else scaler.spread
    return scaler.gamma(1 / (width * variance) if variance > 0 else 1.0, scaled)


def squared_norms(rows: np.ndarray) -> np.ndarray:
    """|x|² of each of `rows` (n, F), summed in float64."""
    return np.einsum("nf,nf->n", rows, rows, dtype=np.float64)


def gamma_scale(rows: list[np.ndarray], norms: list[np.ndarray]) -> float:
    """1 / (F · variance of all values): what `SVC(gamma="scale")` takes, for features that come in parts (1 if they are all equal)."""
    values = sum(part.size for part in rows)
    mean = sum(in_threads(lambda part: part.sum(dtype=np.float64), rows)) / values
    variance = float(sum(part.sum() for part in norms) / values - mean**2)
    return 1 / (rows[0].shape[1] * variance) if variance > 0 else 1.0


def _rows(array: np.ndarray) -> int:
    return max(1, _CHUNK_VALUES // array.shape[1])
