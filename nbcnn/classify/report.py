"""This module reports what a classifier is worth to people and to programs: accuracies, confusion matrix."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.classify.pipeline import Outcome
from nbcnn.files.atomic import replace_bytes
from nbcnn.train.pixels import by_class


@dataclass(frozen=True)
class Scores:
    """Accuracies in 0..1 (`per_class` is NaN for a class without test samples) and counts (true, predicted) of the test set."""

    train: float
    test: float
    per_class: np.ndarray
    confusion: np.ndarray


def score(outcome: Outcome, train_labels: np.ndarray, test_labels: np.ndarray, classes: int) -> Scores:
    """Compare the predictions of `outcome` with int32 labels below `classes`."""
    confusion = np.zeros((classes, classes), np.int64)
    np.add.at(confusion, (test_labels, outcome.test_predicted), 1)
    counts = confusion.sum(1)
    per_class = np.divide(confusion.diagonal(), counts, out=np.full(classes, np.nan), where=counts > 0)
    return Scores(
        float((outcome.train_predicted == train_labels).mean()), float((outcome.test_predicted == test_labels).mean()), per_class, confusion
    )


def summary(outcome: Outcome, scores: Scores) -> dict[str, Any]:
    """The JSON object of one classifier."""
    return {
        "train_accuracy": scores.train,
        "test_accuracy": scores.test,
        "per_class_accuracy": [None if np.isnan(value) else float(value) for value in scores.per_class],
        **{
            what: [None if np.isnan(value) else float(value) for value in values]
            for what, values in by_class(scores.confusion).items()
            if what != "iou"
        },
        "confusion": scores.confusion.tolist(),
        "features": outcome.width,
        "train_samples": len(outcome.train_predicted),
        "test_samples": len(outcome.test_predicted),
        "support_vectors": len(outcome.machine.supports()),
        "process": outcome.process.name if outcome.process else None,
        "gamma": outcome.gamma,
        "C": outcome.C,
        "seconds": {stage: round(value, 3) for stage, value in outcome.seconds.items()},
        "kernel_from": outcome.engine,
        "processes": outcome.jobs,
        "notes": list(outcome.notes),
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """One line for each classifier: `rows` maps what it was trained on to its `summary`."""
    stages = [*dict.fromkeys(stage for row in rows.values() for stage in row["seconds"]), "total"]
    lines = [f"{'trained on':<16}{'features':>9}{'train':>9}{'test':>9}" + "".join(f"{stage:>10}" for stage in stages)]
    for name, row in rows.items():
        seconds = row["seconds"]
        times = "".join(f"{value:>8.1f} s" for value in (*seconds.values(), sum(seconds.values())))
        lines.append(f"{name:<16}{row['features']:>9,}{row['train_accuracy']:>8.2%} {row['test_accuracy']:>8.2%}{times}")
    return "\n".join(lines)


def class_table(scores: Scores, names: tuple[str, ...]) -> str:
    """Precision, recall and F1 of each class on the test set, and the confusion matrix (rows: true class, columns: predicted class)."""
    cell = max(5, *(len(str(value)) + 1 for value in scores.confusion.ravel()))
    label = max(len(name) for name in names)
    # Names may be long; columns are numbered, rows say which number is which.
    found = by_class(scores.confusion)
    shown = ("precision", "recall", "f1")
    lines = [
        f"{'true class':<{label + 5}}"
        + "".join(f"{what:>10}" for what in shown)
        + "   predicted"
        + "".join(f"{at:>{cell}}" for at in range(len(names)))
    ]
    for at, name in enumerate(names):
        values = "".join(f"{'-':>10}" if np.isnan(found[what][at]) else f"{found[what][at]:>10.2%}" for what in shown)
        lines.append(f"{at:>3}  {name:<{label}}{values}{'':12}" + "".join(f"{value:>{cell}}" for value in scores.confusion[at]))
    return "\n".join(lines)


def save_json(path: Path, result: dict[str, Any]) -> None:
    """Write `result` for programs to read."""
    replace_bytes(path, (json.dumps(result, indent=1) + "\n").encode())
