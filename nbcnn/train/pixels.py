"""Scores of classified examples and pixels: counts of true and found classes, and what follows from them, by class and as means."""

from __future__ import annotations

from collections.abc import Sequence

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


def by_class(counts: np.ndarray) -> dict[str, np.ndarray]:
    """Precision, recall, F1 and intersection over union of every class, float64 (classes,): NaN where there is nothing to divide by.

    `counts` are those of `counts_of`. Precision is the share of what was found to be of a class that is; recall the share of the class that was
    found; F1 = 2·precision·recall/(precision + recall).

    >>> {name: scores.tolist() for name, scores in by_class(np.array([[3, 1], [0, 4]])).items()}
    {'precision': [1.0, 0.8], 'recall': [0.75, 1.0], 'f1': [0.8571428571428571, 0.8888888888888888], 'iou': [0.75, 0.8]}
    """
    right, found, true = counts.diagonal().astype(np.float64), counts.sum(0), counts.sum(1)

    def share(whole: np.ndarray, part: np.ndarray = right) -> np.ndarray:
        return np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)

    return {"precision": share(found), "recall": share(true), "f1": share(found + true, 2 * right), "iou": share(found + true - right)}


def class_lines(counts: np.ndarray, names: Sequence[str], pixels: bool = False) -> list[str]:
    """A table of the scores by class, one line each, and their means below it; of `pixels` with the intersection over union."""
    scores, width = by_class(counts), max(10, *(len(name) for name in names))
    shown = ("precision", "recall", "f1", *(("iou",) if pixels else ()))
    lines = [f"{'true class':<{width}}" + "".join(f"{name:>11}" for name in shown) + f"{'pixels' if pixels else 'examples':>12}"]

    def cell(value: float) -> str:
        return f"{'-':>11}" if np.isnan(value) else f"{value:>11.2%}"

    for at, name in enumerate(names):
        lines.append(f"{name:<{width}}" + "".join(cell(scores[what][at]) for what in shown) + f"{counts[at].sum():>12,}")
    means = [cell(float(np.nanmean(scores[what])) if not np.isnan(scores[what]).all() else np.nan) for what in shown]
    return [*lines, f"{'mean':<{width}}" + "".join(means) + f"{counts.sum():>12,}"]
