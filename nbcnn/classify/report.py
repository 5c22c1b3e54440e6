"""This module reports a classifier to people and programs: accuracies, confusion matrix, its picture, the model file."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.classify.pipeline import Outcome
from nbcnn.files.atomic import replace_bytes

MODEL_VERSION = 1


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
        "confusion": scores.confusion.tolist(),
        "features": outcome.width,
        "train_samples": len(outcome.train_predicted),
        "test_samples": len(outcome.test_predicted),
        "support_vectors": len(outcome.machine.supports()),
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
    """Test accuracy of each class beside the confusion matrix (rows: true class, columns: predicted class)."""
    cell = max(5, *(len(str(value)) + 1 for value in scores.confusion.ravel()))
    label = max(len(name) for name in names)
    # Names may be long; columns are numbered, rows say which number is which.
    lines = [f"{'true class':<{label + 5}}{'accuracy':>9}   predicted" + "".join(f"{at:>{cell}}" for at in range(len(names)))]
    for at, name in enumerate(names):
        accuracy = "-" if np.isnan(scores.per_class[at]) else f"{scores.per_class[at]:.2%}"
        lines.append(f"{at:>3}  {name:<{label}}{accuracy:>9}{'':12}" + "".join(f"{value:>{cell}}" for value in scores.confusion[at]))
    return "\n".join(lines)


def save_json(path: Path, result: dict[str, Any]) -> None:
    """Write `result` for programs to read."""
    replace_bytes(path, (json.dumps(result, indent=1) + "\n").encode())


def save_model(path: Path, outcome: Outcome, features_sha256: str) -> None:
    """Write the machine as plain arrays (npz, no pickle).

    Pair p decides classes[pairs[p, 0]] (positive) against classes[pairs[p, 1]] by the sum over its slice
    offsets[p]:offsets[p+1] of dual · exp(-gamma |z(x) - z(train[support])|²), plus intercept[p], with z(x) = (x - mean) / scale and
    `support` rows of the training features whose hash is `features_sha256`.
    """
    machine = outcome.machine
    arrays = {
        "version": np.int64(MODEL_VERSION),
        "classes": machine.classes,
        "pairs": np.array(machine.pairs, np.int32),
        "support": np.concatenate([machine.support_positions(at) for at in range(len(machine.pairs))]).astype(np.int32),
        "dual": np.concatenate([pair.dual for pair in machine.machines]),
        "offsets": np.cumsum([0, *(len(pair.support) for pair in machine.machines)]),
        "intercept": np.array([pair.intercept for pair in machine.machines]),
        "mean": outcome.scaler.mean,
        "scale": outcome.scaler.scale,
        "gamma": np.float64(outcome.gamma),
        "C": np.float64(outcome.C),
        "features_sha256": np.array(features_sha256),
    }
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    replace_bytes(path, buffer.getvalue())
