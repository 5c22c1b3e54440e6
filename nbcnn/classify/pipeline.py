"""This module runs the classifier from features to predictions: scale, kernel matrix, pairs, votes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nbcnn.classify import gram, ovo, pairs
from nbcnn.classify.blocks import Blocks
from nbcnn.classify.kernel import Samples
from nbcnn.classify.processing import Processing, prepared
from nbcnn.classify.scale import Scaler, gamma_of, gamma_scale, scaler_of
from nbcnn.files.errors import UsageError
from nbcnn.ranks.team import ALONE, Team

if TYPE_CHECKING:
    from nbcnn.classify.ridge import RidgeMachine

Load = Callable[[], tuple[np.ndarray, ...]]
"""Gives (train, test) features, or for the mirrored kernel (train, test, mirrored train, mirrored test): those of the mirrored images.

Called once, so that they can be let go before the workers need the memory.
"""

_CHECKED = 1024

Report = Callable[[str, int], gram.Progress]
"""(what is being done, how many units it has) -> what to call with the units done."""


@dataclass(frozen=True)
class Settings:
    """The settings that decide the outcome. `gamma` None means "scale": 1 / (F · variance of the scaled training features).

    C-SVC takes `C`, kernel ridge `ridge`, its λ. Mirrored images take part in neither the scaling nor in gamma="scale".
    `process` are steps before the scaling; they are fitted on the training features, of which mirrored images are none, unless they are fitted.
    """

    C: float = 10.0
    gamma: float | None = None
    scale: bool = True
    ridge: float = 0.1
    process: Processing | None = None


@dataclass(frozen=True)
class Outcome:
    """A trained machine, what it predicts, and the seconds of each stage ("kernel", "fit", "predict").

    `train_predicted`, `test_predicted` are class numbers, int32; decision values are (n, pairs) in the order of `machine.pairs`,
    or of kernel ridge (n, classes). `mirrored` says that the kernel is the mean over mirrored images. `process` are the fitted steps before
    `scaler`, None where there are none.
    """

    machine: ovo.Machine | RidgeMachine
    scaler: Scaler
    gamma: float
    C: float
    width: int
    train_predicted: np.ndarray
    test_predicted: np.ndarray
    test_decisions: np.ndarray
    seconds: dict[str, float]
    engine: str
    jobs: int
    notes: tuple[str, ...] = ()
    mirrored: bool = False
    process: Processing | None = None


def by_class(labels: np.ndarray, count: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """The classes of `count` training samples and each one's positions. Raises ValueError for labels of another count, UsageError for one class."""
    if labels.shape != (count,):
        raise ValueError(f"{count} training samples need {count} labels, got an array of shape {labels.shape}")
    classes = np.unique(labels)
    if len(classes) < 2:
        raise UsageError(f"a classifier needs at least two classes, the {len(labels)} training labels hold {len(classes)}")
    return classes, [np.flatnonzero(labels == c) for c in classes]


def finite(features: np.ndarray) -> None:
    """Raise UsageError, naming the first of them, if a value is NaN or Inf, or too large for float32."""
    for start in range(0, len(features), _CHECKED):
        with np.errstate(over="ignore"):
            wrong = np.argwhere(~np.isfinite(features[start : start + _CHECKED].astype(np.float32, copy=False)))
        if len(wrong):
            row, column = wrong[0]
            value = features[start + row, column]
            raise UsageError(f"feature {column} of sample {start + row} is {value}: a classifier needs finite numbers of float32")


def resolution_note(coefficients: list[np.ndarray], gamma: float, largest: float, advice: str = "a smaller --c or --gamma") -> str:
    """Words for a kernel that float32 cannot resolve: where its rounding, added over a sum's `coefficients`, is a tenth of the margin.

    A kernel value is right to ε·(2 + 4·gamma·|x|²) with |x|² at most `largest`; roundings of different samples are independent.
    """
    rounding = float(np.finfo(np.float32).eps) * (2 + 4 * gamma * largest)
    worst = rounding * max(float(np.sqrt((each**2).sum())) for each in coefficients)
    if worst < 0.1:
        return ""
    return f"the kernel is computed in float32, whose rounding moves decisions by up to {worst:.2g} here (the margin is 1): {advice}"


def classify(
    load: Load,
    train_labels: np.ndarray,
    *,
    settings: Settings,
    scratch: Path,
    jobs: int | None = None,
    report: Report = lambda what, count: lambda done: None,
    team: Team = ALONE,
) -> Outcome:
    """Train on the features that `load` gives, labelled `train_labels` (int32), and predict training and test samples.

    `scratch` is a folder on a disk for the kernel matrix, 4·(n²/2 + n·m) bytes for n training and m test samples; `jobs` None
    takes as many processes as cores and memory allow.
    The other ranks of `team` must call `assist` meanwhile. Raises ValueError for fewer than two classes, DiskFull, MemoryError.
    """
    begun = time.perf_counter()
    train, test, *mirrors = load()
    classes, members = by_class(train_labels, len(train))
    blocks = Blocks(tuple(len(index) for index in members), len(test), scratch)
    width = train.shape[1]
    process, train, test, mirrors = processed(settings, train, test, mirrors)
    with blocks:
        scaler = scaler_of(train, settings.scale)
        if not (np.isfinite(scaler.mean).all() and np.isfinite(scaler.spread)):
            finite(train)
        for part in (test, *mirrors):
            finite(part)
        samples = gram.samples_of(train, members, test, mirrors, scaler)
        del train, test, mirrors[:]
        gamma = gamma_by_scale(samples[:-1], scaler, settings) if settings.gamma is None else scaler.gamma(settings.gamma, settings.scale)
        mirrored, largest = samples[0].mirror is not None, max(part.largest for part in samples[:-1])
        gram.fill(blocks, samples, gamma, report("kernel (BLAS)", blocks.nbytes // 4))
        del samples
        filled = time.perf_counter()

        all_pairs = ovo.all_pairs(len(classes))
        jobs = jobs or pairs.default_jobs(blocks.sizes, len(all_pairs), team)
        mine = f"{len(team.mine(len(all_pairs)))} pairs of this rank, " if team.size > 1 else ""
        done = report(f"fit ({mine}{jobs} processes)", len(team.mine(len(all_pairs))))
        whole = ovo.Machine(classes, members, all_pairs, pairs.solve(blocks.share(team), settings.C, all_pairs, jobs, team, done))
        fitted = time.perf_counter()

        train_values, test_values = ovo.decisions(blocks, whole, report("predict", blocks.nbytes // 4))
        train_predicted, test_predicted = whole.vote(train_values), whole.vote(test_values)
    seconds = {"kernel": filled - begun, "fit": fitted - filled, "predict": time.perf_counter() - fitted}
    notes = tuple(filter(None, (resolution_note([pair.dual for pair in whole.machines], gamma, largest),)))
    values = (train_predicted, test_predicted, test_values)
    return Outcome(whole, scaler, gamma, settings.C, width, *values, seconds, "BLAS", jobs, notes, mirrored, process)


def processed(
    settings: Settings, train: np.ndarray, test: np.ndarray, mirrors: list[np.ndarray]
) -> tuple[Processing | None, np.ndarray, np.ndarray, list[np.ndarray]]:
    """The fitted steps of `settings`, and the features behind them (by NumPy); all as it is where there are none.

    Raises ValueError, naming the first of them, if a value is NaN or Inf.
    """
    if settings.process is None:
        return None, train, test, mirrors
    for part in (train, test, *mirrors):
        finite(part)
    fitted, (train, test, *mirrors) = prepared(settings.process, (train, test, *mirrors))
    return fitted, train, test, mirrors


def gamma_by_scale(train: list[Samples], scaler: Scaler, settings: Settings) -> float:
    """gamma="scale" of scaled training samples that come in parts."""
    if not settings.scale:
        return gamma_of(scaler, train[0].rows.shape[1], 0.0, False)
    return gamma_scale([part.rows for part in train], [part.norms for part in train])


SEARCHED = {"C": (1.0, 3.0, 30.0), "gamma": (0.5, 2.0), "lambda": (0.01, 0.03, 0.3)}
"""What a search tries beside the given settings: values of C or lambda, multiples of the given gamma."""
PENALTIES = {"C": "C", "lambda": "ridge"}
"""The field of `Settings` that weighs errors against smoothness: C of C-SVC, lambda of kernel ridge."""
HELD_OUT = 10
"""One of so many training samples of a class judges the settings of a search."""

Trial = Callable[[Load, np.ndarray, Settings], Outcome]
"""Trains on features and labels with settings; predicts the features that come second."""


def split(labels: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the training samples that a search trains on and of those that judge it: of each class every tenth, drawn at random.

    Raises UsageError for a class of a single sample.
    """
    rng, held = np.random.default_rng(seed), []
    for c in np.unique(labels):
        mine = rng.permutation(np.flatnonzero(labels == c))
        if len(mine) < 2:
            raise UsageError(f"class {c} has one training sample: a search needs one to train on and one to judge by")
        held.append(mine[: max(1, len(mine) // HELD_OUT)])
    judges = np.sort(np.concatenate(held))
    return np.setdiff1d(np.arange(len(labels)), judges), judges


def search(
    features: Sequence[np.ndarray], labels: np.ndarray, settings: Settings, names: tuple[str, ...], trial: Trial, penalty: str = "C"
) -> tuple[Settings, list[dict[str, float]]]:
    """The settings of the highest accuracy on held-out training samples, and what was tried: penalty, gamma and accuracy of each.

    `features` are those of the training samples, and for the mirrored kernel of their mirrored images. `names` ("gamma", and `penalty`: "C" of
    C-SVC or "lambda" of kernel ridge) are searched one after the other, in that order; of equal accuracies the given value, then the one that
    comes first in `SEARCHED` stays. A lambda too small for float32 counts as an accuracy of 0. Test samples take no part. gamma="scale" is
    that of the samples that are trained on.
    """
    inside, judges = split(labels)
    field = PENALTIES[penalty]
    tried: list[dict[str, float]] = []

    def accuracy(which: Settings) -> float:
        try:
            outcome = trial(lambda: tuple(each[part] for each in features for part in (inside, judges)), labels[inside], which)
            found, gamma = float((outcome.test_predicted == labels[judges]).mean()), outcome.gamma / outcome.scaler.gamma(1.0, which.scale)
        except ArithmeticError:
            if not tried:
                raise
            found, gamma = 0.0, which.gamma or tried[0]["gamma"]
        tried.append({penalty: getattr(which, field), "gamma": gamma, "accuracy": found})
        return found

    best, highest = settings, accuracy(settings)
    scale = tried[0]["gamma"]
    for name in ("gamma", penalty):
        if name not in names:
            continue
        start = best
        for value in SEARCHED[name]:
            changed: dict[str, Any] = {"gamma": value * scale} if name == "gamma" else {field: value}
            other = replace(start, **changed)
            if other != start and (found := accuracy(other)) > highest:
                best, highest = other, found
    return best, tried


def assist(train_labels: np.ndarray, test_count: int, *, settings: Settings, scratch: Path, team: Team, jobs: int | None = None) -> None:
    """Solve this rank's part of the pairs while rank 0 is in `classify`; this rank needs no features."""
    classes, sizes = np.unique(train_labels, return_counts=True)
    with Blocks(tuple(sizes.tolist()), test_count, scratch) as blocks:
        all_pairs = ovo.all_pairs(len(classes))
        jobs = jobs or pairs.default_jobs(blocks.sizes, len(all_pairs), team)
        pairs.solve(blocks.share(team), settings.C, all_pairs, jobs, team, lambda done: None)
