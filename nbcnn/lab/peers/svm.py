"""This script sets the machine of `nbcnn classify` beside scikit-learn's, cuML's and ThunderSVM's, each on the same scaled features, C and gamma.

    python -m nbcnn.lab.peers.svm FEATURES [LIMIT]

Every machine is one against one and stops at the same tolerance, libsvm's 0.001. Each is trained twice, and the second time counts: the first
compiles kernels and starts libraries. Arrays and predictions lie on the host. A peer that is not installed has the reason in its row.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.classify import pipeline
from nbcnn.classify.features import read_features
from nbcnn.datasets.dataset import DataMissing
from nbcnn.files import extras
from nbcnn.gpu.device import cpu_instead

TOLERANCE = 1e-3
PEERS = {
    "scikit-learn": ("sklearn", "sklearn.svm", extras.line("svm")),
    "cuML": ("cuml", "cuml.svm", "pip install cuml-cu13"),
    "ThunderSVM": ("thundersvm", "thundersvm", "pip install thundersvm, or built from its source"),
}
"""By the peer's name the package to look for, the module that has its class `SVC`, and how it is installed."""


def ours(features: tuple[np.ndarray, np.ndarray], labels: np.ndarray) -> pipeline.Outcome:
    """What `nbcnn classify` makes of training and test features (n, F) float32 and labels (n,) int32: on the GPU where there is one."""
    if cpu_instead() is None:
        from nbcnn.classify import gpu

        return gpu.classify(lambda: features, labels, settings=pipeline.Settings())
    with tempfile.TemporaryDirectory() as scratch:
        return pipeline.classify(lambda: features, labels, settings=pipeline.Settings(), scratch=Path(scratch))


def peer(name: str, train: np.ndarray, test: np.ndarray, labels: np.ndarray, C: float, gamma: float) -> tuple[np.ndarray, dict[str, float]]:
    """The classes (m,) that a peer of PEERS predicts of `test` (m, F) after training on `train` (n, F), and its seconds of both stages.

    Raises ImportError where the peer is installed and does not start, such as without a GPU.
    """
    machine = importlib.import_module(PEERS[name][1]).SVC(C=C, gamma=gamma, kernel="rbf", tol=TOLERANCE)
    begun = time.perf_counter()
    machine.fit(train, labels)
    fitted = time.perf_counter()
    predicted = np.asarray(machine.predict(test))
    return predicted, {"fit": fitted - begun, "predict": time.perf_counter() - fitted}


def rows(features: tuple[np.ndarray, np.ndarray], labels: np.ndarray, test_labels: np.ndarray) -> Iterator[dict[str, Any]]:
    """A row for our machine and for each peer: seconds, accuracy, and the share of test samples that it predicts as ours; or `why` there are none."""
    train, test = features
    outcome = _second(lambda: ours(features, labels))
    seconds = {"fit": outcome.seconds["kernel"] + outcome.seconds["fit"], "predict": outcome.seconds["predict"]}
    yield _row("nbcnn", outcome.engine, outcome.test_predicted, seconds, outcome.test_predicted, test_labels)
    train, test = outcome.scaler.applied(train), outcome.scaler.applied(test)
    for name, (package, _, line) in PEERS.items():
        if importlib.util.find_spec(package) is None:
            yield {"machine": name, "why": f"{name} is not installed, so it is no peer here: {line}"}
            continue
        try:
            predicted, seconds = _second(lambda name=name: peer(name, train, test, labels, outcome.C, outcome.gamma))  # type: ignore[misc]
        except Exception as error:  # a library that is there, and has no GPU or not enough memory
            yield {"machine": name, "why": f"{name} failed: {type(error).__name__}: {' '.join(str(error).split())}"}
            continue
        yield _row(name, _version(package), predicted, seconds, outcome.test_predicted, test_labels)


def _second(made: Callable[[], Any]) -> Any:
    made()
    return made()


def _version(package: str) -> str:
    return str(getattr(importlib.import_module(package), "__version__", "unknown version"))


def _row(name: str, what: str, predicted: np.ndarray, seconds: dict[str, float], own: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    timed = {stage: round(took, 4) for stage, took in seconds.items()}
    return {"machine": name, "by": what, **timed, "accuracy": float((predicted == labels).mean()), "as_ours": float((predicted == own).mean())}


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    if "why" in row:
        return str(row["why"])
    times = f"fit {row['fit']:.3f} s, predict {row['predict']:.3f} s"
    return f"{row['machine']} ({row['by']}): {times}, accuracy {row['accuracy']:.4f}, {row['as_ours']:.2%} of predictions as ours"


def main(argv: list[str]) -> int:
    """Print every row for people, then all of them as one line of JSON. The exit code: 0, 2 for wrong arguments, 3 for a folder without features."""
    if not 1 <= len(argv) <= 2 or not all(each.isdecimal() and int(each) > 0 for each in argv[1:]):
        print("nbcnn: error: usage: python -m nbcnn.lab.peers.svm FEATURES [LIMIT], a folder of extract_features.py and a number", file=sys.stderr)
        return 2
    try:
        found, limit = read_features(Path(argv[0]), verify=False), int(argv[1]) if len(argv) > 1 else None
    except DataMissing as error:
        print(f"nbcnn: error: {error}", file=sys.stderr)
        return error.exit_code
    labels, test_labels = found.train_labels, found.test_labels
    if labels is None or test_labels is None:
        print(f"nbcnn: error: {argv[0]} has features without labels: extract them from labelled images", file=sys.stderr)
        return 2
    made = list[dict[str, Any]]()
    for row in rows((np.array(found.train[:limit]), np.array(found.test[:limit])), np.array(labels[:limit]), np.array(test_labels[:limit])):
        made.append(row)
        print(line(row), flush=True)
    print(json.dumps(made))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
