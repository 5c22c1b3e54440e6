"""Feature processing: named steps between what an encoder makes and the classifier, fitted on training features and no labels.

    blur    every map with [1 2 1]/4 along both axes, replicated borders: a feature may move by a pixel
    sqrt    sign(x)·√|x|: large values count less
    cwE     channel whitening (ZCA) at every position: minus the mean map, then U (λ + E·mean λ)^(−1/2) Uᵀ of the channels' covariance
    std     every feature minus its mean, over its deviation
    l2      minus the mean, then every sample to unit length

`parse("blur+sqrt+cw1+l2", shape)` gives a `Processing` without statistics; `run` fits it on the first rows that it sees and applies it to them
in place, and from then on only applies it. What an engine has to do for it is a method each: `Host` does them in NumPy, `gpu_processing.OnGpu` by
kernels. Statistics are added in float64, values are float32.

Source: A. Coates, A. Ng, H. Lee, "An analysis of single-layer networks in unsupervised feature learning", AISTATS 2011 (whitening, standardising);
F. Perronnin, J. Sánchez, T. Mensink, "Improving the Fisher kernel for large-scale image classification", ECCV 2010 (signed root, unit length).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from nbcnn.classify.scale import Scaler, measured
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import nearest
from nbcnn.ops.svm import process

STEPS = ("blur", "sqrt", "cw1", "std", "l2")
"""One step of each kind, as it is written."""
_WHITENED = re.compile(r"cw([0-9]+(?:\.[0-9]+)?)")
_OF_MAPS = ("blur", "cw")
_CHUNK_VALUES = 1 << 22


def names_of(text: str) -> tuple[str, ...]:
    """The steps of "blur+sqrt+cw1+l2"; none of "none". Raises UsageError for a step that there is not."""
    if text == "none":
        return ()
    steps = tuple(text.split("+"))
    for step in steps:
        if found := _WHITENED.fullmatch(step):
            if not 0 < float(found[1]) < 1e6:
                raise UsageError(f"step {quoted(step)}: behind cw stands a number above 0, what is added to the variances in units of their mean")
        elif step not in STEPS:
            known = f"{', '.join(STEPS)} (or another number behind cw)"
            raise UsageError(f"no processing step {quoted(step)}{nearest(step, STEPS)}; steps are {known}, joined by +")
    return steps


@dataclass(frozen=True)
class Processing:
    """Steps for features that are codes of `shape`, (C, H, W) or (F,); `arrays` are their statistics, float32, empty before they are fitted.

    `arrays` are named by the place of their step: "2.mean" (F,) and "2.whitener" (C, C) of cwE, "2.scale" (F,) of std.
    """

    steps: tuple[str, ...]
    shape: tuple[int, ...]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The steps as they are written on a command line."""
        return "+".join(self.steps)

    @property
    def width(self) -> int:
        """Features of a sample."""
        return math.prod(self.shape)

    @property
    def maps(self) -> tuple[int, int, int]:
        """Channels, height and width of the features; those that are no maps are channels of one position."""
        channels, height, width = self.shape if len(self.shape) == 3 else (self.width, 1, 1)
        return channels, height, width

    @property
    def fitted(self) -> bool:
        """Whether all statistics are there."""
        return _wanted(self).keys() == self.arrays.keys()

    def checked(self) -> Processing:
        """This, of which all statistics have the right shapes and are finite. Raises ValueError."""
        wanted = _wanted(self)
        for name in wanted.keys() | self.arrays.keys():
            array = self.arrays.get(name)
            if (
                array is None
                or array.dtype != np.float32
                or array.shape != wanted.get(name)
                or not np.isfinite(array).all()
                or (name.endswith(".scale") and array.min() <= 0)
            ):
                raise ValueError(f"statistics {quoted(name)} of processing {self.name} are missing, of another shape, or not finite")
        return self

    def applied(self, rows: np.ndarray) -> np.ndarray:
        """Processed copy, float32, of `rows` (n, F) of any type of numbers. Raises ValueError before it is fitted."""
        if not self.fitted:
            raise ValueError(f"processing {self.name} is not fitted")
        made = np.array(rows, np.float32, order="C")
        run(Host(made, self), self)
        return made


def parse(text: str, shape: Sequence[int]) -> Processing | None:
    """The processing that `text` describes, of codes of `shape`, not fitted; None for "none".

    Raises UsageError for a step that there is not, or that takes maps where `shape` is none of maps.

    Example:
        >>> parse("sqrt+cw1+l2", (128, 8, 8)).steps
        ('sqrt', 'cw1', 'l2')
    """
    steps = names_of(text)
    if not steps:
        return None
    made = tuple(int(extent) for extent in shape)
    if len(made) != 3 and (wrong := [step for step in steps if step.startswith(_OF_MAPS)]):
        raise UsageError(f"step {quoted(wrong[0])} takes maps (C, H, W), the features are of shape {made}; std, sqrt and l2 take those")
    return Processing(steps, made)


def _wanted(processing: Processing) -> dict[str, tuple[int, ...]]:
    """The statistics that the steps need and their shapes."""
    channels, flat = processing.maps[0], (processing.width,)
    made: dict[str, tuple[int, ...]] = {}
    for at, step in enumerate(processing.steps):
        if step in ("std", "l2") or step.startswith("cw"):
            made[f"{at}.mean"] = flat
        if step == "std":
            made[f"{at}.scale"] = flat
        elif step.startswith("cw"):
            made[f"{at}.whitener"] = (channels, channels)
    return made


class Engine(Protocol):
    """What steps are made of, on rows that the engine holds; each works in place. `count` is the number of rows."""

    count: int

    def blur(self) -> None:
        """Blur every map."""

    def signed_root(self) -> None:
        """Take the root of every value's size."""

    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of every feature, float64 (F,)."""

    def covariance(self, mean: np.ndarray) -> np.ndarray:
        """Covariance of the channels over samples and positions, `mean` (F,) taken off; float64 (C, C)."""

    def standardise(self, scaler: Scaler) -> None:
        """Subtract each feature's mean and divide by its standard deviation."""

    def whiten(self, mean: np.ndarray, Z: np.ndarray) -> None:
        """Take `mean` (F,) off and multiply the channels at every position by Z (C, C)."""

    def unit(self, mean: np.ndarray) -> None:
        """Take `mean` (F,) off and give every row unit length."""


def run(engine: Engine, processing: Processing) -> Processing:
    """Process the rows of `engine`, which become the training features of a processing that is not fitted; returns it fitted.

    Raises UsageError for statistics that are not finite: the values are too large for float32.
    """
    arrays, fitting = dict(processing.arrays), not processing.fitted
    for at, step in enumerate(processing.steps):
        mean, scale, whitener = (f"{at}.{what}" for what in ("mean", "scale", "whitener"))
        if step == "blur":
            engine.blur()
            continue
        if step == "sqrt":
            engine.signed_root()
            continue
        if fitting:
            centre, variance = engine.moments()
            _finite(step, centre, variance)
            scaler = Scaler.of(centre, variance, engine.count)
            arrays[mean] = scaler.mean
            if step == "std":
                arrays[scale] = scaler.scale
            elif step != "l2":
                covariance = engine.covariance(scaler.mean)
                _finite(step, covariance)
                arrays[whitener] = whitener_of(covariance, float(step.removeprefix("cw")))
        if step == "std":
            engine.standardise(Scaler(arrays[mean], arrays[scale]))
        elif step == "l2":
            engine.unit(arrays[mean])
        else:
            engine.whiten(arrays[mean], arrays[whitener])
    return replace(processing, arrays=arrays) if fitting else processing


def _finite(step: str, *found: np.ndarray) -> None:
    if not all(np.isfinite(each).all() for each in found):
        raise UsageError(f"processing step {quoted(step)}: the features' means or variances are too large for float32")


def whitener_of(covariance: np.ndarray, share: float) -> np.ndarray:
    """Z = U (λ + share·mean λ)^(−1/2) Uᵀ, float32 (C, C), of a covariance U·diag(λ)·Uᵀ; the identity where all variances are 0."""
    values, vectors = np.linalg.eigh(covariance)
    values = np.maximum(values, 0)
    if not values.any():
        return np.eye(len(covariance), dtype=np.float32)
    return ((vectors / np.sqrt(values + share * values.mean())) @ vectors.T).astype(np.float32)


class Host:
    """Steps in NumPy on `rows`, float32 (n, F); the reference of `gpu_processing.OnGpu`."""

    def __init__(self, rows: np.ndarray, processing: Processing) -> None:
        if rows.shape[1:] != (processing.width,):
            raise ValueError(f"processing {processing.name} takes (n, {processing.width}) features, got an array of shape {rows.shape}")
        self.rows, self.maps, self.count = rows, processing.maps, len(rows)
        self._positions = self.maps[1] * self.maps[2]

    def _parts(self) -> list[np.ndarray]:
        """The numbers of the rows, a few megabytes of them at a time."""
        step = max(1, _CHUNK_VALUES // self.rows.shape[1])
        return [np.arange(first, min(first + step, self.count)) for first in range(0, self.count, step)]

    def _centred(self, which: np.ndarray, mean: np.ndarray) -> np.ndarray:
        packed = np.empty((len(which), len(mean)), np.float32)
        process.centred(self.rows, which, mean, packed)
        return packed.reshape(len(which), self.maps[0], self._positions)

    def blur(self) -> None:
        process.blur(self.rows, np.arange(self.count), shape=self.maps)

    def signed_root(self) -> None:
        process.signed_root(self.rows, np.arange(self.count), width=self.rows.shape[1])

    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        return measured(self.rows)

    def covariance(self, mean: np.ndarray) -> np.ndarray:
        sums = np.zeros((self.maps[0], self.maps[0]))
        for which in self._parts():
            # One product of (C, n·P) instead of one per sample: 50,000 small ones take five times as long.
            wide = self._centred(which, mean).transpose(1, 0, 2).reshape(self.maps[0], -1).astype(np.float64)
            sums += wide @ wide.T
        return sums / max(1, self.count * self._positions)

    def standardise(self, scaler: Scaler) -> None:
        scaler.apply(self.rows)

    def whiten(self, mean: np.ndarray, Z: np.ndarray) -> None:
        for which in self._parts():
            process.whiten(self._centred(which, mean), Z, self.rows, which)

    def unit(self, mean: np.ndarray) -> None:
        process.unit_rows(self.rows, np.arange(self.count), mean)


def prepared(processing: Processing, sets: Sequence[np.ndarray]) -> tuple[Processing, list[np.ndarray]]:
    """`processing` fitted on the first of `sets` (unless it is fitted), and processed float32 copies of all of them, by NumPy."""
    made = []
    for each in sets:
        rows = np.array(each, np.float32, order="C")
        processing = run(Host(rows, processing), processing)
        made.append(rows)
    return processing, made
