"""This module standardises features as scikit-learn's StandardScaler does, and computes gamma="scale", without float64 copies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_CHUNK_VALUES = 1 << 21


@dataclass(frozen=True)
class Scaler:
    """x ↦ (x - mean) / scale; `mean` and `scale` are float32 (F,)."""

    mean: np.ndarray
    scale: np.ndarray

    def apply(self, rows: np.ndarray) -> None:
        """Scale float32 `rows` (n, F) in place."""
        step = _rows(rows)
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            part -= self.mean
            part /= self.scale


def identity(width: int) -> Scaler:
    """The scaler that changes nothing (`--scale none`)."""
    return Scaler(np.zeros(width, np.float32), np.ones(width, np.float32))


def standard(train: np.ndarray) -> Scaler:
    """Mean 0 and variance 1 for every column of `train` (n, F): two passes in float64, as StandardScaler.

    A column that is constant, up to the rounding of its variance, is only centred (scikit-learn's rule and bound).
    """
    n, width = train.shape
    step = _rows(train)
    chunks = [slice(start, start + step) for start in range(0, n, step)]
    mean = np.zeros(width)
    for chunk in chunks:
        mean += train[chunk].sum(axis=0, dtype=np.float64)
    mean /= n
    variance, correction = np.zeros(width), np.zeros(width)
    for chunk in chunks:
        centred = train[chunk] - mean
        variance += np.einsum("nf,nf->f", centred, centred)
        correction += centred.sum(axis=0)
    variance = (variance - correction**2 / n) / n
    eps = np.finfo(np.float64).eps
    constant = variance <= n * eps * variance + (n * mean * eps) ** 2
    return Scaler(mean.astype(np.float32), np.where(constant, 1, np.sqrt(variance)).astype(np.float32))


def squared_norms(rows: np.ndarray) -> np.ndarray:
    """|x|² of each of `rows` (n, F), summed in float64."""
    return np.einsum("nf,nf->n", rows, rows, dtype=np.float64)


def gamma_scale(rows: list[np.ndarray], norms: list[np.ndarray]) -> float:
    """1 / (F · variance of all values): what `SVC(gamma="scale")` takes, for features that come in parts (1 if they are all equal)."""
    values = sum(part.size for part in rows)
    mean = sum(part.sum(dtype=np.float64) for part in rows) / values
    variance = float(sum(part.sum() for part in norms) / values - mean**2)
    return 1 / (rows[0].shape[1] * variance) if variance > 0 else 1.0


def _rows(array: np.ndarray) -> int:
    return max(1, _CHUNK_VALUES // array.shape[1])
