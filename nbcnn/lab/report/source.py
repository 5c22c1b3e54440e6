"""This module opens the source of a report: a run folder with what was classified from it, and a results file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbcnn.classify import MACHINES
from nbcnn.classify.features import place_of
from nbcnn.datasets import own
from nbcnn.files import document, regular
from nbcnn.files.quote import brief, quoted
from nbcnn.files.suggest import called
from nbcnn.lab.measure import results
from nbcnn.train.runlog import RunError, RunFolder

_CONFIG = {
    **dict.fromkeys(("device", "mode", "precision"), str),
    **{"versions": {str: (str, None)}, "command": (str, [str]), "planned_bytes": {str: int}, "parameters": int, "used_bytes?": {str: (int, None)}},
    "data": {"source?": str, "training_images?": int, "test_images?": int, "training_windows?": int, "validation_windows?": int},
    "classes?": [str],
}
_TIME = {"kernels_ms": {str: float}, "gaps_ms": float, "host_ms": float, "step_ms": float}
_LOSSES = dict.fromkeys(("train_loss", "test_loss", "seconds", "images_per_second"), float)
_ROW = {"epoch": int, "step": int, **_LOSSES, "test_accuracy?": float, "test_iou?": float, "time?": (_TIME, None)}
_FORECAST = {"rmsle": {str: float}, "windows": int}


_SCORES = {"test_accuracy": float, "train_accuracy": float}
_ENCODER = {**_SCORES, "confusion": [[int]], "test_samples": int}


def _unfit(found: dict[str, Any]) -> str | None:
    """What is wrong between the values of a classification."""
    counts, classes = found["classifiers"]["encoder"]["confusion"], found.get("classes")
    if not counts or any(len(row) != len(counts) or min(row) < 0 for row in counts):
        return "has no square confusion matrix of counts"
    if (machine := found.get("machine", "svm")) not in MACHINES:
        return f"is of a machine {quoted(machine)}"
    return "has not as many classes as its confusion matrix" if classes and len(classes) != len(counts) else None


_CLASSIFIED = document.Named(
    "classification",
    {
        **dict.fromkeys(("dataset", "run", "checkpoint_sha256"), str),
        "machine?": str,
        "classes?": ([str], None),
        "classifiers": {str: _SCORES},
        "pictures?": {str: str},
    },
    _unfit,
)
"""What the sections read of config.json, of a line of metrics.jsonl, and of classify.json; results have `nbcnn.lab.measure.schema`."""


@dataclass(frozen=True)
class Missing:
    """Something that was not measured: the command that does, and why it was not where that is known."""

    what: str
    command: str
    why: str = ""


@dataclass(frozen=True)
class Source:
    """A run, results, or both.

    run           the run folder, None for results alone; `config` and `metrics` are its
    classified    the content of classify.json made from one of the run's checkpoints, or None
    forecast      the content of the run's forecast.json, or None
    results       the content of a results file of the run's device, or None; `file` is where it stands
    """

    run: RunFolder | None = None
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    classified: dict[str, Any] | None = None
    forecast: dict[str, Any] | None = None
    results: dict[str, Any] | None = None
    file: Path | None = None

    def sections(self, kind: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """(name, rows, environment) of every section of that kind, names with numbers in their order."""
        for name in results.of_kind(self.results, kind) if self.results else ():
            part = self.results["sections"][name]  # type: ignore[index]
            yield name, part["rows"], part["environment"]

    def has(self, kind: str) -> bool:
        """True if anything of that kind was measured."""
        return any(True for _ in self.sections(kind))

    @property
    def task(self) -> str:
        """What the run's network does: "forecast", "classify", "segment" or "reconstruct"."""
        if "training_windows" in self.config.get("data", {}):
            return "forecast"
        if any("test_iou" in row for row in self.metrics):
            return "segment"
        scored = any("test_accuracy" in row for row in self.metrics)
        scored = scored or str(self.config["flags"]["model"]).startswith(("mnist-cnn", "resnet18", "mobilenet"))
        return "classify" if scored else "reconstruct"

    @property
    def noun(self) -> str:
        """What the run is trained on."""
        return "windows" if self.task == "forecast" else "images"

    @property
    def finished(self) -> bool:
        """The run has all its epochs."""
        return len(self.metrics) >= int(self.config["flags"].get("epochs") or 1)

    @property
    def measured(self) -> bool:
        """Ladder, roofline and benchmarks belong on the page: they are of the autoencoder, and say nothing of another network's run."""
        return not self.run or self.file is not None or self.config["flags"]["model"] == "autoencoder"

    @property
    def device(self) -> str:
        return str(self.config["device"] if self.run else self.results["device"] if self.results else "")


def opened(target: Path, file: Path | None = None, features: Path | None = None) -> Source:
    """The source that `target` names: a run folder, a results file, or a device of nbcnn/lab/results ("nvidia-h200").

    file      the results file beside a run; by default that of the run's device among this project's own, if there is one
    features  the folder of features made from the run; by default where `extract` puts them

    Raises RunError or DocumentError (exit code 3) for what is neither, or damaged.
    """
    ours = results.RESULTS / f"{target.name}.json"
    if not target.exists() and target.parent == Path() and ours.is_file():
        target = ours
    if not target.exists():
        known = ", ".join(sorted(path.stem for path in results.RESULTS.glob("*.json")))
        here = f"devices with results here: {known}" if known else "results of this project's devices are in its repository alone"
        raise RunError(f"{target} is neither a run folder nor a results file; {here}")
    if target.is_file():
        return Source(results=results.load(target), file=target)
    run = RunFolder(target)
    config = run.read_config()
    absent = [name for name in _CONFIG if not name.endswith("?") and name not in config]
    if absent:
        raise RunError(f"{run.config_path} is damaged or of another version: {quoted(absent[0])} is missing")
    document.fits(config, _CONFIG, str(run.config_path))
    metrics = run.rows()
    document.fits(metrics, [_ROW], f"{run.path / 'metrics.jsonl'}")
    ours = results.RESULTS / f"{results.slug(config['device'])}.json"
    found = file or (ours if config["flags"]["model"] == "autoencoder" else None)
    content = results.load(found) if found and (file or found.is_file()) else None
    return Source(run, config, metrics, classification(run, config, features), _forecast(run), content, found if content else None)


def _forecast(run: RunFolder) -> dict[str, Any] | None:
    """forecast.json of a run on series, if there is one."""
    path = run.path / "forecast.json"
    if not path.is_file():
        return None
    found: dict[str, Any] = document.load(path)
    document.fits(found, _FORECAST, str(path))
    return found


def classification(run: RunFolder, config: dict[str, Any], features: Path | None) -> dict[str, Any] | None:
    """classify.json of `features` (by default where `extract` puts them), if it was made from one of the run's checkpoints.

    Raises RunError if `features` is given and is not that.
    """
    folder = features or place_of(run.path, own.short(config["data"]["name"])) or Path("features")
    path = folder / "classify" / "classify.json"
    try:
        found: dict[str, Any] = document.load(path)
        document.fits(found, {"classifiers": {"encoder": _ENCODER}}, str(path))
        document.fits(found, _CLASSIFIED, str(path))
    except (OSError, document.DocumentError) as error:
        if features:
            raise RunError(f"{path} cannot be read ({brief(error)}); {called('classify', features)} writes it") from None
        return None
    hashes = {hashlib.sha256(regular.read(saved)).hexdigest() for saved in (run.best, run.last) if saved.is_file()}
    if found.get("checkpoint_sha256") in hashes:
        return found
    if features:
        raise RunError(f"{path} was not made from a checkpoint of {run.path}, but of {found.get('run')}")
    return None
