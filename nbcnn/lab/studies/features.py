"""This study, `study features`, answers what the encoder learned: the accuracy of classifiers on features of trained encoders and of controls.

Every encoder is trained by `train.py` as users run it, without labels; its features of the images and of the mirrored ones go to the classifiers in
memory. C or lambda, and gamma, are chosen by a tenth of the training images, once for each encoder and classifier, with the first seed; test images
only judge. With few labels the encoder and the processing still see all training images, whose labels neither needs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.classify import pipeline, ridge
from nbcnn.classify.pipeline import Outcome, Settings
from nbcnn.classify.processing import Processing, parse, prepared
from nbcnn.datasets import Dataset
from nbcnn.lab.studies.quality import command
from nbcnn.nn.models import MODELS
from nbcnn.run.net import Net
from nbcnn.train import checkpoint, saved_net
from nbcnn.train.runlog import RunFolder

PROCESS = "blur+sqrt+cw1+l2"
SPARSE_PROCESS = "blur+blur+sqrt+cw1+l2"
"""Steps for the sparse codes of the recipe `features`."""
BATCH = 500


@dataclass(frozen=True)
class Case:
    """Features that the study classifies: `train` are the flags of the encoder's training, None where the pixels are the features.

    untrained  the encoder gets first weights in place of what it learned.
    process    steps before the kernel; "none": every feature is standardised.
    headline   it is repeated for every seed; the others take the first one.
    needs      (a flag of train, its value) without which there is no such encoder in this version.
    """

    key: str
    name: str
    train: tuple[str, ...] | None
    process: str = "none"
    untrained: bool = False
    headline: bool = False
    needs: tuple[str, str] | None = None


FEATURES = ("--recipe", "features")
CASES = (
    Case("pixels", "raw pixels", None),
    Case("random", "random encoder", (), untrained=True),
    Case("plain", "default recipe", ()),
    Case("plain-processed", "default recipe, processed", (), PROCESS),
    Case("random-whitened", "random encoder, same whitening and processing", FEATURES, SPARSE_PROCESS, untrained=True, headline=True, needs=FEATURES),
    Case("features", "features recipe", FEATURES, SPARSE_PROCESS, headline=True, needs=FEATURES),
    Case("patches", "patches", ("--model", "patches"), "sqrt+cw4+l2", needs=("--model", "patches")),
    Case("patches2", "patches2", ("--model", "patches2"), "sqrt+std+l2", headline=True, needs=("--model", "patches2")),
)
"""By the words that `study features --only` takes, from the least to the most that is done for the features."""
MACHINES = {"svm": ("C-SVC", "C"), "ridge": ("ridge", "lambda")}
"""By the name that `classify --machine` takes: what the table calls it, and the penalty that is searched."""
LABELS = (100, 1_000, 10_000)
"""Numbers of labels beside all of them."""


@dataclass(frozen=True)
class Plan:
    """What a run of the study does.

    data       the images and labels. data_flags are the words by which train.py finds the same ones; more, for trainings by gradients.
    seeds      of encoders and of draws of labels. machines and labels as in `MACHINES` and `LABELS`. searched: training images of a search.
    mirrored   whether the kernel is the mean over mirrored images. device: a `Gpu`, or None for the CPU. scratch: a folder for runs.
    recipes    the recipes that train.py has.
    """

    data: Dataset
    data_flags: tuple[str, ...]
    scratch: Path
    more: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    machines: tuple[str, ...] = ("svm", "ridge")
    labels: tuple[int, ...] = LABELS
    searched: int = 20_000
    mirrored: bool = True
    device: Any = None
    mode: str = "auto"
    recipes: tuple[str, ...] = ()
    say: Callable[[str], None] = print
    runs: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)

    @property
    def sets(self) -> tuple[np.ndarray, ...]:
        """Training and test images, and for the mirrored kernel their mirrored ones."""
        own = self.data.train_images, self.data.test_images
        return own + tuple(images[..., ::-1] for images in own) if self.mirrored else own


def missing(plan: Plan, case: Case) -> str:
    """Why this version has no such encoder; empty if it has."""
    if case.needs is None:
        return ""
    flag, value = case.needs
    return "" if value in (plan.recipes if flag == "--recipe" else MODELS) else f"this version has no {flag} {value}"


def study(plan: Plan, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Rows of every case, seed, classifier and number of labels; a case that cannot be made is a row with the reason."""
    for case in cases:
        if why := missing(plan, case):
            yield {"what": "skipped", "encoder": case.name, "why": why}
            continue
        chosen: dict[str, Settings] = {}
        for seed in plan.seeds if case.headline else plan.seeds[:1]:
            yield from of_seed(plan, case, seed, chosen)


def of_seed(plan: Plan, case: Case, seed: int, chosen: dict[str, Settings]) -> Iterator[dict[str, Any]]:
    """The rows of one encoder; `chosen` are the settings of each classifier, searched where they are not there yet."""
    features, shape, spent = features_of(plan, case, seed)
    labels, test_labels = labels_of(plan.data)
    process = parse(case.process, shape)
    about = {"what": "accuracy", "encoder": case.name, "process": case.process, "seed": seed, "features": int(features[0].shape[1])} | spent
    for machine in plan.machines:
        if machine not in chosen:
            chosen[machine] = searched(plan, features, labels, Settings(scale=process is None, process=process), machine)
        whole = classified(plan, machine, features, labels, chosen[machine])
        yield about | scored(plan, machine, chosen[machine], whole, test_labels, len(labels))
        # With few labels: the steps that were fitted on all training images, which need no labels, or none.
        few = replace(chosen[machine], process=whole.process)
        for count in (each for each in plan.labels if each < len(labels)):
            which = drawn(labels, count, seed)
            part = tuple(each[which] if at % 2 == 0 else each for at, each in enumerate(features))
            outcome = classified(plan, machine, part, labels[which], few)
            yield about | scored(plan, machine, few, outcome, test_labels, count)
        plan.say(f"{case.name}, seed {seed}, {MACHINES[machine][0]}: {(whole.test_predicted == test_labels).mean():.2%}")


def scored(plan: Plan, machine: str, settings: Settings, outcome: Outcome, test_labels: np.ndarray, count: int) -> dict[str, Any]:
    """The row of an outcome, but for what it is of."""
    return {
        "classifier": MACHINES[machine][0],
        "kernel": "mirrored" if plan.mirrored else "rbf",
        "labels": count,
        "accuracy": float((outcome.test_predicted == test_labels).mean()),
        "penalty": settings.ridge if machine == "ridge" else settings.C,
        "gamma": outcome.gamma,
        "seconds": round(sum(outcome.seconds.values()), 3),
    }


def labels_of(data: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """The labels of both splits. Raises ValueError for a data set without."""
    if data.train_labels is None or data.test_labels is None:
        raise ValueError(f"{data.name} has no labels: the study compares classifiers")
    return data.train_labels, data.test_labels


def drawn(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Positions of `count` training samples drawn by `seed`, as many of each class as of any other, up to one."""
    rng = np.random.default_rng(seed)
    queues = [list(rng.permutation(np.flatnonzero(labels == c))) for c in np.unique(labels)]
    made: list[int] = []
    while len(made) < min(count, len(labels)):
        made += [queue.pop() for queue in queues if queue][: count - len(made)]
    return np.sort(np.array(made))


def classified(plan: Plan, machine: str, features: tuple[np.ndarray, ...], labels: np.ndarray, settings: Settings) -> Outcome:
    """What the machine makes of the features, as `nbcnn classify` trains it."""
    if machine == "ridge":
        return ridge.classify(lambda: features, labels, settings=settings, device=plan.device)
    if plan.device is not None:
        from nbcnn.classify import gpu

        return gpu.classify(lambda: features, labels, settings=settings, device=plan.device)
    with tempfile.TemporaryDirectory(dir=plan.scratch) as folder:
        return pipeline.classify(lambda: features, labels, settings=settings, scratch=Path(folder))


def searched(plan: Plan, features: tuple[np.ndarray, ...], labels: np.ndarray, settings: Settings, machine: str) -> Settings:
    """The settings of the highest accuracy on a tenth of so many training images as the plan says."""
    which = drawn(labels, plan.searched, 0)
    penalty = MACHINES[machine][1]

    def trial(load: pipeline.Load, labels: np.ndarray, settings: Settings) -> Outcome:
        return classified(plan, machine, load(), labels, settings)

    found, tried = pipeline.search([each[which] for each in features[::2]], labels[which], settings, ("gamma", penalty), trial, penalty)
    highest = max(each["accuracy"] for each in tried)
    plan.say(f"  {MACHINES[machine][0]}: {len(tried)} settings tried on {len(which):,} training images, {highest:.2%} of a tenth of them")
    return found


def features_of(plan: Plan, case: Case, seed: int) -> tuple[tuple[np.ndarray, ...], tuple[int, ...], dict[str, float]]:
    """Features of the plan's sets of images, float32 (n, F) each; the shape of a code; seconds of training and of extraction."""
    if case.train is None:
        flat = (images.reshape(len(images), -1).astype(np.float32) / np.float32(255) for images in plan.sets)
        return tuple(flat), plan.data.train_images.shape[1:], {"train_seconds": 0.0, "extract_seconds": 0.0}
    trained = run_of(plan, case.train, seed)
    with closing(encoder_of(plan, Path(trained["run"]))) as net:
        if case.untrained:
            saved_net.forget(net, seed + 1)  # not the first weights that training began with
        begun = time.perf_counter()
        made = tuple(code_of(net, images) for images in plan.sets)
        seconds = {"train_seconds": 0.0 if case.untrained else trained["seconds"], "extract_seconds": round(time.perf_counter() - begun, 3)}
        return made, net.output_shape, seconds


def run_of(plan: Plan, flags: tuple[str, ...], seed: int) -> dict[str, Any]:
    """What train.py says of a training with these flags; trained once, also where several cases take it."""
    key = (*flags, seed)
    if key not in plan.runs:
        out = plan.scratch / f"run-{len(plan.runs)}"
        mode = ("--mode", plan.mode) if plan.mode != "auto" else ()
        more = () if "--model" in flags else plan.more  # dictionaries are fitted in one pass, without epochs
        plan.runs[key] = command("train.py", *plan.data_flags, *flags, *mode, *more, "--seed", str(seed), "--out", str(out))
    return plan.runs[key]


def encoder_of(plan: Plan, run: Path) -> Net:
    """The encoder of a run's last checkpoint."""
    folder = RunFolder(run)
    config = folder.read_config()
    layer = saved_net.cut(config["flags"]["model"], None)
    return saved_net.encoder(checkpoint.read(folder.last), layer, plan.mode, None, config["precision"], plan.data.train_images.shape[1:])


def code_of(net: Net, images: np.ndarray) -> np.ndarray:
    """Features (n, F) float32 of images (n, C, H, W)."""
    return net.predict(images, min(BATCH, len(images))).reshape(len(images), -1)


def pictures(plan: Plan, case: Case, folder: Path) -> dict[str, str]:
    """Draw filters, neighbours and the map of a case's features of the first seed into `folder`, which is made; their paths by name."""
    from nbcnn.classify import pictures as drawing

    folder.mkdir(parents=True, exist_ok=True)
    own = replace(plan, mirrored=False, runs=plan.runs)
    features, shape, _ = features_of(own, case, plan.seeds[0])
    weights: dict[str, np.ndarray] = {}
    if case.train is not None:
        with closing(encoder_of(plan, Path(run_of(plan, case.train, plan.seeds[0])["run"]))) as net:
            if case.untrained:
                saved_net.forget(net, plan.seeds[0] + 1)
            weights = net.params.as_dict()
    fitted: Processing | None = parse(case.process, shape)
    if fitted is not None:
        # Statistics of the images that neighbours are looked for among are enough for a picture.
        fitted, _ = prepared(fitted, [features[0][: drawing.SEARCHED]])
    train, test = features
    return drawing.draw(folder, weights, plan.data, fitted, train, test, f"{plan.data.name}, {case.name}")


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows in words: accuracy with all labels, then by number of labels; a mean of several seeds with their standard deviation."""
    lines = [f"{'features of':48}{'labels':>8}" + "".join(f"{name:>18}" for name, _ in MACHINES.values())]
    found = grouped(rows)
    for encoder, count in dict.fromkeys((encoder, count) for encoder, _, count in found):
        cells = "".join(f"{spread(found.get((encoder, name, count), [])):>18}" for name, _ in MACHINES.values())
        lines.append(f"{encoder:48}{count:>8,}{cells}")
    return lines + [f"{row['encoder']}: left out, {row['why']}" for row in rows if row["what"] == "skipped"]


def grouped(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str, int], list[float]]:
    """Accuracies of all seeds by encoder, classifier and number of labels, in the order of the rows."""
    made: dict[tuple[str, str, int], list[float]] = {}
    for row in rows:
        if row["what"] == "accuracy":
            made.setdefault((row["encoder"], row["classifier"], row["labels"]), []).append(row["accuracy"])
    return made


def spread(accuracies: Sequence[float]) -> str:
    """Mean, with the standard deviation and the number of seeds where there are several; empty for none."""
    if not accuracies:
        return ""
    if len(accuracies) == 1:
        return f"{accuracies[0]:.2%}"
    return f"{np.mean(accuracies):.2%} ± {100 * np.std(accuracies, ddof=1):.2f} ({len(accuracies)})"
