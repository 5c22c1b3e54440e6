"""Scores of classified pixels: counts of true and found classes, and the mean intersection over union that follows from them."""

from __future__ import annotations

import numpy as np


def counts_of(labels: np.ndarray, found: np.ndarray, classes: int, counted: np.ndarray) -> np.ndarray:
    """How many pixels of each true class (row) were found to be of each class (column): int64 (classes, classes).

    `labels`, `found` and `counted` are of one shape; of `labels` only those count that are `counted`, which must be below `classes`.
    """
    pairs = labels[counted].astype(np.int64) * classes + found[counted]
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def mean_iou(counts: np.ndarray) -> float:
    """The mean over classes of their intersection over union: pixels that are of a class and found, by those that are either (Jaccard's index).

    `counts` are those of `counts_of`. Classes that are neither there nor found do not count; 0 where nothing counts.

    >>> mean_iou(np.array([[3, 1, 0], [0, 4, 0], [0, 0, 0]]))
    0.775
    """
    both = counts.diagonal()
    either = counts.sum(0) + counts.sum(1) - both
    there = either > 0
    return float((both[there] / either[there]).mean()) if there.any() else 0.0
