"""pipeline, extract, classify and `Model.fit` are killed (SIGKILL) at random moments, up to three times, and asked again for the same.

They must end with what one ends with that nothing has happened to. Whatever a killed one leaves is whole or absent: a checkpoint, features and a
classifier that can be read are those of an undisturbed run, of this epoch or an earlier one, and a saved model is the old one or the new one.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from scripts import exits, extract, train

import nbcnn
from nbcnn.classify import classifier
from nbcnn.classify.features import INDEX as FEATURES
from nbcnn.classify.features import read_features
from nbcnn.cli import classify, pipeline
from nbcnn.files import lock
from nbcnn.files.errors import UsageError
from nbcnn.train import checkpoint, plots

_kept = tempfile.TemporaryDirectory(prefix="campaign-commands-good-")
TINY = ("--dataset", "shapes", "--model", "small-autoencoder", "--mode", "cpu", "--limit", "60", "--batch", "20", "--epochs", "2", "--quiet")
MODEL = "model.safetensors"


@dataclass(frozen=True)
class Work:
    """What is killed. `ready` makes what it needs in a folder, `do` does the work there, also where one was begun, and returns an exit code.

    whole   raises where what a killed one left is not whole.
    result  what it has made, bit for bit.
    """

    ready: Callable[[Path], object]
    do: Callable[[Path], int]
    whole: Callable[[Path], object]
    result: Callable[[Path], dict[str, Any]]


def attack(seed: int, folder: Path) -> None:
    """Kill one of the four once, twice or three times, then ask again."""
    name = list(WORKS)[seed % len(WORKS)]
    killed(name, random.Random(seed), folder)


def killed(name: str, pick: random.Random, folder: Path) -> None:
    work, (asked, seconds) = WORKS[name], undisturbed(name)
    work.ready(folder)
    for _ in range(pick.randint(1, 3)):
        process = begun(functools.partial(work.do, folder), folder / "said")
        until = time.perf_counter() + pick.uniform(0, seconds)
        while process.is_alive() and time.perf_counter() < until:
            time.sleep(0.002)
        process.kill()
        process.join()
        work.whole(folder)
    process = begun(functools.partial(work.do, folder), folder / "said")
    process.join(300)
    assert process.exitcode == 0, f"{name}: asked again it ends with exit code {process.exitcode}: {(folder / 'said').read_text()[-500:]}"
    found = work.result(folder)
    different = ", ".join(key for key in sorted(found.keys() | asked.keys()) if found.get(key) != asked.get(key))
    assert not different, f"{name}: what was killed and asked again differs from the undisturbed one in {different}"
    hidden = [str(path.relative_to(folder)) for path in folder.rglob(".*")]
    assert not hidden, f"{name}: hidden files are left: {hidden}"


@functools.cache
def undisturbed(name: str) -> tuple[dict[str, Any], float]:
    """What the work makes that nothing happens to, and how many seconds it takes."""
    folder, work = Path(_kept.name) / f"{name}-whole", WORKS[name]
    folder.mkdir()
    work.ready(folder)
    process, start = begun(functools.partial(work.do, folder), folder / "said"), time.perf_counter()
    process.join(300)
    assert process.exitcode == 0, (folder / "said").read_text()
    return work.result(folder), time.perf_counter() - start


def begun(do: Callable[[], int], said: Path) -> Any:
    """A forked process that does it, draws no pictures, and says what it says to a file."""

    def forked() -> None:
        with open(said, "w") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
            with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file), undrawn():
                code = do()
        os._exit(code)

    process = get_context("fork").Process(target=forked)
    process.start()
    return process


@contextlib.contextmanager
def undrawn() -> Any:
    with contextlib.ExitStack() as stack:
        for name in ("curves", "reconstructions", "confusion"):
            stack.enter_context(mock.patch.object(plots, name, return_value=None))
        yield


# -- pipeline


def do_pipeline(folder: Path) -> int:
    out = folder / "out"
    words = ["--resume", out, "--quiet"] if (out / "pipeline.json").exists() else [*TINY, "--keep-features", "--machine", "ridge", "--out", out]
    return int(exits(pipeline.main, words))


def whole_pipeline(folder: Path) -> None:
    out = folder / "out"
    if (out / "pipeline.json").exists():
        json.loads((out / "pipeline.json").read_text())
    whole_run(out / "run", undisturbed_pipeline())
    whole_features(out / "features")
    whole_classifier(out / "features" / "classify")


def undisturbed_pipeline() -> Path:
    undisturbed("pipeline")
    return Path(_kept.name) / "pipeline-whole" / "out" / "run"


def pipeline_result(folder: Path) -> dict[str, Any]:
    out = folder / "out"
    report = json.loads((out / "pipeline.json").read_text())["report"]
    return {
        **tensors(out / "run" / checkpoint.LAST),
        **features_result(out / "features"),
        **classifier_result(out / "features" / "classify"),
        "accuracy": report["classify"]["classifiers"]["encoder"]["test_accuracy"],
    }


# -- extract


@functools.cache
def trained() -> Path:
    """A trained run, in a folder."""
    run = Path(_kept.name) / "run"
    with undrawn(), contextlib.redirect_stdout(io.StringIO()):
        assert exits(train, [*TINY, "--out", run]) == 0
    return run


def do_extract(folder: Path) -> int:
    return int(exits(extract, [folder / "run", "--out", folder / "features", "--mirror", "--mode", "cpu", "--batch", "10", "--quiet"]))


def features_result(folder: Path) -> dict[str, Any]:
    found = read_features(folder)
    return {name: getattr(found, name).tobytes() for name in ("train", "test", "train_labels", "test_labels")} | {"sha256": found.sha256}


def whole_features(folder: Path) -> None:
    if (folder / FEATURES).exists():
        read_features(folder)


# -- classify


@functools.cache
def extracted() -> Path:
    folder = Path(_kept.name) / "extracted"
    with undrawn(), contextlib.redirect_stdout(io.StringIO()):
        assert exits(extract, [trained(), "--out", folder, "--mode", "cpu", "--quiet"]) == 0
    return folder


def do_classify(folder: Path) -> int:
    return int(exits(classify.main, [str(folder / "features"), "--device", "cpu", "--jobs", "1", "--portable", "--quiet"]))


def classifier_result(folder: Path) -> dict[str, Any]:
    return tensors(folder / "classifier.safetensors")


def whole_classifier(folder: Path) -> None:
    if (folder / "classifier.safetensors").exists():
        classifier.load(folder / "classifier.safetensors")
    if (folder / "classify.json").exists():
        json.loads((folder / "classify.json").read_text())


# -- fit


def do_fit(folder: Path) -> int:
    """Train into the first folder that is free, and save the model over what an earlier one saved."""
    run = next(folder / f"run{number}" for number in range(9) if not (folder / f"run{number}" / "config.json").exists())
    rng = np.random.default_rng(0)
    model = nbcnn.Model([nbcnn.Conv2d(4, 3), nbcnn.ReLU(), nbcnn.Flatten(), nbcnn.Linear(3)], "cross_entropy", mode="cpu", seed=1)
    x, y = rng.integers(0, 256, (16, 3, 8, 8), np.uint8), rng.integers(0, 3, 16)
    model.fit(x, y, epochs=4, batch_size=4, validation_data=(x, y), run=run, verbose=0)
    for _ in range(5):
        model.save(folder / MODEL)
    (folder / "done").write_text(run.name)
    return 0


def whole_fit(folder: Path) -> None:
    undisturbed("fit")
    for run in folder.glob("run*"):
        whole_run(run, Path(_kept.name) / "fit-whole" / "run0")
        try:
            with lock.writing(run):
                pass
        except lock.Held as error:
            raise AssertionError(f"a dead owner's folder stays closed: {error}") from None
        if (run / "config.json").exists():
            with contextlib.suppress(UsageError):
                nbcnn.Model([nbcnn.Flatten(), nbcnn.Linear(3)], "cross_entropy", mode="cpu").fit(
                    np.zeros((2, 3, 8, 8), np.uint8), [0, 1], run=run, verbose=0
                )
                raise AssertionError("a folder with a run was trained into again")
    if (folder / MODEL).exists():
        assert tensors(folder / MODEL) == tensors(Path(_kept.name) / "fit-whole" / MODEL), "a saved model is neither the old nor the new one"


def fit_result(folder: Path) -> dict[str, Any]:
    run = folder / (folder / "done").read_text()
    return tensors(run / checkpoint.LAST) | {f"saved {name}": content for name, content in tensors(folder / MODEL).items()}


# -- what they share


def tensors(path: Path) -> dict[str, Any]:
    """The tensors of a sealed file, as bytes."""
    return {name: tensor.tobytes() for name, tensor in checkpoint.load(path)[0].items()}


def whole_run(run: Path, undisturbed_run: Path) -> None:
    """What is in the folder of a run is of an epoch of the undisturbed one, with the same rows so far."""
    rows = rows_of(undisturbed_run)
    found = rows_of(run)
    assert found == rows[: len(found)], f"{run.name} has other rows than the undisturbed run"
    for name in (checkpoint.LAST, checkpoint.BEST):
        if (run / name).exists():
            metadata = checkpoint.load(run / name)[1]
            assert int(metadata["epochs_done"]) <= len(rows)
    if (run / "config.json").exists():
        json.loads((run / "config.json").read_text())


def rows_of(run: Path) -> list[Any]:
    if not (run / "metrics.jsonl").exists():
        return []
    return [
        (row["epoch"], row["step"], row["train_loss"], row["test_loss"]) for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    ]


WORKS = {
    "pipeline": Work(lambda folder: None, do_pipeline, whole_pipeline, pipeline_result),
    "extract": Work(
        lambda folder: shutil.copytree(trained(), folder / "run"),
        do_extract,
        lambda folder: whole_features(folder / "features"),
        lambda folder: features_result(folder / "features"),
    ),
    "classify": Work(
        lambda folder: shutil.copytree(extracted(), folder / "features"),
        do_classify,
        lambda folder: whole_classifier(folder / "features" / "classify"),
        lambda folder: classifier_result(folder / "features" / "classify"),
    ),
    "fit": Work(lambda folder: None, do_fit, whole_fit, fit_result),
}
