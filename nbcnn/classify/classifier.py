"""A trained classifier in one file: what `classify` writes, and how it is used on new features and images.

A safetensors file without pickle, sealed and replaced like a checkpoint. Its metadata say which format and version it is, the kernel and its
gamma, C, the processing of features, and where they came from: the encoder's run and checkpoint, and the hashes of both. Pair p decides
classes[pairs[p, 0]] (positive) against classes[pairs[p, 1]] by the sum over offsets[p]:offsets[p+1] of

    dual · exp(−gamma |z(x) − z(training features[support])|²), plus intercept[p], with z(x) = (x − mean) / scale

With the mirrored kernel (`kernel.py`) the exponential is its mean over mirrored images; such a file is of version 2, which earlier programs refuse.
With processing (`processing.py`) z(x) = (p(x) − mean) / scale; such a file is of version 3, whatever its kernel. It names the steps and the shape of
a code, and holds their statistics as "process.2.mean" and the like.
Of kernel ridge, `dual` is (samples, classes), every training sample takes part, and the class of the largest sum is predicted.

Support vectors are rows of the training features, which are found by the folder and hash in the file; `classify --portable` puts them into the
file instead, 4 bytes per value (8 with the mirrored kernel).

    classifier = load("features/cifar10/classify/classifier.safetensors")
    classifier.predict(features)          # float (n, F) -> class numbers int32 (n,); of a mirrored kernel predict(features, mirrored)
    classifier.predict_images(images)     # uint8 (n, C, H, W), by the encoder of the run
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.classify.features import ORIGIN_FORM, Features, Origin, check_origin, read_features
from nbcnn.classify.kernel import Samples, kernel
from nbcnn.classify.ovo import Machine
from nbcnn.classify.pipeline import Outcome, finite
from nbcnn.classify.processing import Processing, parse
from nbcnn.classify.ridge import RidgeMachine
from nbcnn.classify.scale import Scaler
from nbcnn.files import document
from nbcnn.files.masked import refuse_masked
from nbcnn.files.quote import brief, quoted
from nbcnn.nn import models
from nbcnn.nn.arguments import FLOAT32
from nbcnn.run.net import Net
from nbcnn.train import checkpoint, saved_net
from nbcnn.train.runlog import RunError

NAME = "classifier.safetensors"
_FORMAT, _VERSION, _MIRRORED_VERSION, _PROCESSED_VERSION = "nbcnn-classifier", "1", "2", "3"
_VERSIONS = (_VERSION, _MIRRORED_VERSION, _PROCESSED_VERSION)
_PROCESS = "process."
"""What the names of the statistics of processing begin with."""
_RBF, _MIRRORED = "rbf", "rbf, mean over mirrored images"
_SVC, _RIDGE = "C-SVC, one against one", "kernel ridge"
_ROWS = 256


class ClassifierError(Exception):
    """A classifier's file is missing, damaged, or of another version, or what it refers to is gone; the message names the file."""

    exit_code = 3


@dataclass(frozen=True)
class Classifier:
    """A one-against-one RBF support vector machine, or kernel ridge (`pairs` is empty), on features that `origin` describes.

    `vectors` are the support vectors as they were extracted, float32 (s, F); `dual` is float64 (s, pairs), `intercept` (pairs,); of kernel ridge
    (s, classes) and (classes,). `mirrored_vectors` are the features of their mirrored images, None where the kernel is the plain one.
    `process` are the steps before `scaler`, None where there are none.
    """

    classes: np.ndarray
    pairs: list[tuple[int, int]]
    vectors: np.ndarray
    dual: np.ndarray
    intercept: np.ndarray
    scaler: Scaler
    gamma: float
    C: float
    origin: Origin
    features_sha256: str
    mirrored_vectors: np.ndarray | None = None
    process: Processing | None = None

    @property
    def width(self) -> int:
        """Features of a sample."""
        return len(self.scaler.mean)

    @property
    def mirrored(self) -> bool:
        """Whether the kernel is the mean over mirrored images, so that samples need the features of those too."""
        return self.mirrored_vectors is not None

    @cached_property
    def _scaled(self) -> Samples:
        """The support vectors, processed and scaled once."""
        return Samples.of(self._ready(self.vectors), None if self.mirrored_vectors is None else self._ready(self.mirrored_vectors))

    def _ready(self, rows: np.ndarray) -> np.ndarray:
        """What the kernel takes, float32 (n, F), of features (n, F): processed, then scaled."""
        return self.scaler.applied(rows if self.process is None else self.process.applied(rows))

    def decisions(self, features: np.ndarray, mirrored: np.ndarray | None = None) -> np.ndarray:
        """Decision value of every pair (of kernel ridge: of every class), float64 (n, pairs), for features (n, F) of any type of numbers.

        `mirrored` are the features of the mirrored images, which a classifier with the mirrored kernel needs and no other takes.
        Raises ValueError for features of another width, that are NaN or Inf, and for mirrored ones that are missing or not wanted.
        """
        if (mirrored is not None) != self.mirrored:
            raise ValueError(
                "the classifier's kernel is the mean over mirrored images: it takes their features, too"
                if self.mirrored
                else "the classifier takes no features of mirrored images"
            )
        for each in (features, mirrored):
            refuse_masked(each, "features")
        sets = [np.asarray(each) for each in (features, mirrored) if each is not None]
        for each in sets:
            if each.ndim != 2 or each.shape[1] != self.width or len(each) != len(sets[0]):
                raise ValueError(f"the classifier takes (n, {self.width}) features, got an array of shape {each.shape}")
            finite(each)
        made = np.empty((len(sets[0]), self.dual.shape[1]))
        for first in range(0, len(made), _ROWS):
            rows = Samples.of(*(self._ready(each[first : first + _ROWS]) for each in sets))
            made[first : first + _ROWS] = kernel(rows, self._scaled, self.gamma).astype(np.float64) @ self.dual + self.intercept
        return made

    def predict(self, features: np.ndarray, mirrored: np.ndarray | None = None) -> np.ndarray:
        """Class numbers, int32 (n,), of features (n, F); arguments and errors as `decisions`."""
        return self.voted(self.decisions(features, mirrored))

    def voted(self, decisions: np.ndarray) -> np.ndarray:
        """Class numbers, int32 (n,), that decision values speak for: most votes of the pairs, or of kernel ridge the largest value."""
        votes = Machine(self.classes, [], self.pairs, []).vote(decisions) if self.pairs else self.classes[decisions.argmax(1)]
        return votes.astype(np.int32)

    def margins(self, decisions: np.ndarray) -> np.ndarray:
        """How surely each of `classes` beats all others, float64 (n, classes): the least decision value of its pairs, seen from its side, or
        of kernel ridge its value minus the largest of the others. More than 0 for at most one class. Not a probability.
        """
        count = len(self.classes)
        made = np.full((len(decisions), count), np.inf)
        if self.pairs:
            for at, (i, j) in enumerate(self.pairs):
                made[:, i] = np.minimum(made[:, i], decisions[:, at])
                made[:, j] = np.minimum(made[:, j], -decisions[:, at])
            return made
        for c in range(count):
            made[:, c] = decisions[:, c] - np.delete(decisions, c, 1).max(1)
        return made

    def predict_images(self, images: np.ndarray, mode: str = "auto") -> np.ndarray:
        """Class numbers, int32 (n,), of uint8 images (n, C, H, W), by the encoder that made the training features.

        Raises ClassifierError if the run or its checkpoint is gone or is another one by now, ValueError for images of another shape.
        """
        return self.predict(*self.features_of(self.encoder(mode=mode), images))

    def features_of(self, net: Net, images: np.ndarray, batch: int = 256) -> tuple[np.ndarray, ...]:
        """What `predict` takes, float32 (n, F), of uint8 images (n, C, H, W) by the encoder `net`. Raises ValueError for images of another shape."""
        refuse_masked(images, "images")
        images = np.asarray(images)
        if images.dtype != np.uint8 or images.shape[1:] != self.origin.image_shape:
            shape = "(n, " + ", ".join(map(str, self.origin.image_shape)) + ")"
            raise ValueError(f"the encoder takes uint8 images {shape}, got {images.dtype} of shape {images.shape}")
        sets = (images, images[..., ::-1]) if self.mirrored else (images,)
        return tuple(net.predict(each, batch).reshape(len(each), -1) if len(each) else np.empty((0, self.width)) for each in sets)

    def encoder(self, path: Path | None = None, mode: str = "auto", precision: str | None = None) -> Net:
        """The encoder that made the training features, from the checkpoint `path` (None: the one that the file names).

        `precision` None takes that of the features where `mode` has it.
        Raises ClassifierError if the checkpoint is gone, is another one than that, or is of a network that this version does not know.
        """
        from nbcnn.nn.description import DescriptionError

        model = self.origin.model or "autoencoder"  # features that do not name their model are of the time when there was no other
        if self.origin.layer is None and model not in models.CODES:
            raise ClassifierError(f"the classifier's features do not say which layer of the model {quoted(model)} made them: extract them again")
        path = path or Path(self.origin.run) / Path(self.origin.checkpoint).name
        try:
            saved = checkpoint.read(path)
            if saved.sha256 != self.origin.checkpoint_sha256:
                raise ClassifierError(
                    f"{path} is not the checkpoint that made the classifier's features: its SHA-256 is {saved.sha256[:12]}…, "
                    f"theirs is {self.origin.checkpoint_sha256[:12]}…. Extract the features of this one and classify them again"
                )
            layer = saved_net.cut(model, self.origin.layer)
            return saved_net.encoder(saved, layer, mode, precision, self.origin.precision, self.origin.image_shape)
        except (checkpoint.CheckpointError, DescriptionError, RunError) as error:
            raise ClassifierError(f"the encoder of the classifier cannot be loaded: {error}") from error


def save(
    path: Path,
    outcome: Outcome,
    origin: Origin,
    features: os.PathLike[str],
    features_sha256: str,
    vectors: np.ndarray | None = None,
    mirrored_vectors: np.ndarray | None = None,
) -> int:
    """Put the classifier of `outcome` in place of `path`, whole or not at all; returns its bytes.

    `vectors` are the training features (n, F) whose support vectors the file shall hold, and `mirrored_vectors` those of the mirrored images
    where the kernel needs them; without, the file names the folder `features`. Raises ValueError where only one of them is given and both are due.
    """
    if (vectors is not None and outcome.mirrored) != (mirrored_vectors is not None):
        raise ValueError("vectors and mirrored vectors go together, and with the mirrored kernel")
    machine = outcome.machine
    support = machine.supports()
    tensors: dict[str, np.ndarray] = {"classes": machine.classes.astype(np.int32), "mean": outcome.scaler.mean, "scale": outcome.scaler.scale}
    if isinstance(machine, RidgeMachine):
        tensors["dual"] = machine.beta
    else:
        tensors |= _pairs_of(machine)
    process, version = outcome.process, _MIRRORED_VERSION if outcome.mirrored else _VERSION
    if process is not None:
        tensors |= {f"{_PROCESS}{name}": array for name, array in process.arrays.items()}
        version = _PROCESSED_VERSION
    if vectors is not None:
        tensors["vectors"] = np.ascontiguousarray(vectors[support], np.float32)
    if mirrored_vectors is not None:
        tensors["mirrored_vectors"] = np.ascontiguousarray(mirrored_vectors[support], np.float32)
    metadata = {
        "format": _FORMAT,
        "version": version,
        "machine": _RIDGE if isinstance(machine, RidgeMachine) else _SVC,
        "kernel": _MIRRORED if outcome.mirrored else _RBF,
        "processing": json.dumps([*(process.steps if process else ()), "centre", "scale"]),
        "gamma": repr(outcome.gamma),
        "C": repr(outcome.C),
        "samples": str(len(outcome.train_predicted)),
        "features": str(Path(features).resolve()),
        "features_sha256": features_sha256,
        "origin": json.dumps(origin.noted()),
    }
    if process is not None:
        metadata |= {"process": process.name, "code_shape": json.dumps(process.shape)}
    return checkpoint.save(path, tensors, metadata)


def _pairs_of(machine: Machine) -> dict[str, np.ndarray]:
    return {
        "pairs": np.array(machine.pairs, np.int32),
        "support": np.concatenate([machine.support_positions(at) for at in range(len(machine.pairs))]).astype(np.int32),
        "dual": np.concatenate([pair.dual for pair in machine.machines]).astype(np.float64),
        "offsets": np.cumsum([0, *(len(pair.support) for pair in machine.machines)]).astype(np.int64),
        "intercept": np.array([pair.intercept for pair in machine.machines]),
    }


def load(path: str | os.PathLike[str], features: str | os.PathLike[str] | None = None) -> Classifier:
    """The classifier in the file `path`. Support vectors are read from the file, or else from the folder `features` (None: the one that it names).

    Raises ClassifierError (exit code 3) for a file that is missing, damaged or of another version, and for features that are gone or others.
    """
    path = Path(path)
    if not path.exists():
        raise ClassifierError(f"there is no file {path}: python -m nbcnn classify FEATURES writes a classifier, {NAME}")
    try:
        saved = checkpoint.read(path)
        found = saved.metadata
        if found.get("format") != _FORMAT:
            raise ClassifierError(f"{path} is no classifier of nbcnn; python -m nbcnn classify FEATURES writes one, {NAME}")
        if found.get("version") not in _VERSIONS:
            raise ClassifierError(f"{path} is a classifier of version {quoted(found.get('version'))}, this program reads {', '.join(_VERSIONS)}")
        return _made(path, saved.tensors, found, features)
    except checkpoint.CheckpointError as error:
        raise ClassifierError(str(error)) from None
    except KeyError as error:
        raise ClassifierError(f"{path} is damaged: it lacks {brief(error)}; classify the features again") from None
    except ValueError as error:
        raise ClassifierError(f"{path} is damaged: {brief(error)}; classify the features again") from None


_TENSORS = {
    **{"classes": ("i4", 1), "mean": ("f4 f8", 1), "scale": ("f4", 1), "dual": ("f8", 1), "intercept": ("f8", 1)},
    **{"pairs": ("i4", 2), "support": ("i4", 1), "offsets": ("i8", 1), "vectors": ("f4", 2), "mirrored_vectors": ("f4", 2)},
}
"""Types and number of axes of the tensors of a file; of kernel ridge `dual` has two axes."""
_OF_PAIRS = ("intercept", "pairs", "support", "offsets")
_OPTIONAL = ("vectors", "mirrored_vectors")


def _check(tensors: Mapping[str, np.ndarray], found: Mapping[str, str]) -> dict[str, Any]:
    """The origin in the notes `found` of a file. Raises ValueError for notes and tensors of another form, KeyError for those that are missing."""
    ridge = found["machine"] == _RIDGE
    if found["machine"] not in (_RIDGE, _SVC):
        raise ValueError(f"machine {quoted(found['machine'])} is not known")
    # The versions before processing say by themselves which kernel they have.
    mirrored = found["kernel"] == _MIRRORED
    if found["kernel"] not in (_RBF, _MIRRORED) or (found["version"] != _PROCESSED_VERSION and mirrored != (found["version"] == _MIRRORED_VERSION)):
        raise ValueError(f"kernel {quoted(found['kernel'])} is not known")
    for name in ("features", "features_sha256"):
        found[name]
    for name, (kinds, axes) in _TENSORS.items():
        if name not in tensors and (name in _OPTIONAL or (ridge and name in _OF_PAIRS)):
            continue
        tensor = tensors[name]
        if tensor.dtype.str[1:] not in kinds.split() or tensor.ndim != axes + (ridge and name == "dual"):
            raise ValueError(f"{name} is {tensor.dtype} {quoted(tensor.shape)}")
    origin = document.parse(found["origin"], "its note of the features' origin")
    document.fits(origin, ORIGIN_FORM, "origin")
    check_origin(origin)
    classes = tensors["classes"]
    if len(classes) < 2 or (np.diff(classes) <= 0).any() or classes[0] < 0 or (origin["classes"] and classes[-1] >= len(origin["classes"])):
        raise ValueError("its classes are no ascending numbers of named ones")
    return dict(origin)


def _number(found: Mapping[str, str], name: str, below: float = math.inf) -> float:
    try:
        made = float(found[name])
    except ValueError:
        made = math.nan
    if not 0 < made < below:
        raise ValueError(f"{name} is {quoted(found[name])}, and must be a number above 0")
    return made


def _made(path: Path, tensors: dict[str, np.ndarray], found: dict[str, str], features: str | os.PathLike[str] | None) -> Classifier:
    origin, mirrored = _check(tensors, found), found["kernel"] == _MIRRORED
    samples, gamma, C = int(_number(found, "samples", 1 << 31)), _number(found, "gamma", FLOAT32), _number(found, "C")
    if found["machine"] == _RIDGE:
        # As pairs: every class one, to which all samples belong.
        count = len(tensors["classes"])
        if tensors["dual"].shape != (samples, count):
            raise ValueError("its arrays do not belong together")
        tensors["support"], tensors["offsets"] = np.tile(np.arange(samples), count), np.arange(count + 1) * samples
        tensors["dual"], tensors["intercept"], tensors["pairs"] = tensors["dual"].T.reshape(-1), np.zeros(count), np.zeros((count, 2), np.int32)
    pairs, support, offsets = tensors["pairs"], tensors["support"], tensors["offsets"]
    classes, mean, scale = tensors["classes"], tensors["mean"], tensors["scale"]
    fits = (
        pairs.shape == (len(tensors["intercept"]), 2)
        and len(offsets) == len(pairs) + 1
        and offsets[0] == 0
        and (np.diff(offsets) >= 0).all()
        and offsets[-1] == len(support) == len(tensors["dual"])
        and (not pairs.size or 0 <= pairs.min() <= pairs.max() < len(classes))
        and (not support.size or 0 <= support.min() <= support.max() < samples)
        and mean.shape == scale.shape
        and (scale > 0).all()
    )
    if not fits:
        raise ValueError("its arrays do not belong together")
    for name in ("classes", "image_shape", "code_shape"):
        origin[name] = None if origin[name] is None else tuple(origin[name])
    used = np.unique(support)
    vectors, mirrored_vectors = tensors.get("vectors"), tensors.get("mirrored_vectors")
    if vectors is None:
        stored = _features(path, Path(features or found["features"]), found["features_sha256"])
        vectors = np.ascontiguousarray(stored.train[used])
        mirrored_vectors = None if stored.train_mirrored is None or not mirrored else np.ascontiguousarray(stored.train_mirrored[used])
    if (mirrored_vectors is not None) != mirrored:
        raise ValueError("the kernel and the vectors of mirrored images do not go together")
    for each in (vectors, mirrored_vectors):
        if each is not None and each.shape != (len(used), len(mean)):
            raise ValueError(f"support vectors of shape {each.shape} where {(len(used), len(mean))} are due")
    dual = np.zeros((len(used), len(pairs)))
    for at in range(len(pairs)):
        part = slice(offsets[at], offsets[at + 1])
        dual[np.searchsorted(used, support[part]), at] = tensors["dual"][part]
    numbered = [] if found["machine"] == _RIDGE else [(int(i), int(j)) for i, j in pairs]
    machine = (classes, numbered, vectors, dual, tensors["intercept"], Scaler(mean, scale), gamma, C)
    process = _process_of(tensors, found, len(mean)) if found["version"] == _PROCESSED_VERSION else None
    return Classifier(*machine, Origin(**origin), found["features_sha256"], mirrored_vectors, process)


def _process_of(tensors: dict[str, np.ndarray], found: dict[str, str], width: int) -> Processing:
    """The fitted steps in a file of features of `width` values. Raises ValueError."""
    shape = document.parse(found["code_shape"], "its note of the shape of a code")
    document.fits(shape, [int], "code_shape")
    process = parse(found["process"], shape)
    if process is None or process.width != width:
        raise ValueError(f"processing {quoted(found['process'])} does not go with {width} features")
    arrays = {name.removeprefix(_PROCESS): array for name, array in tensors.items() if name.startswith(_PROCESS)}
    return replace(process, arrays=arrays).checked()


def _features(path: Path, folder: Path, sha256: str) -> Features:
    """The features in `folder`, which the classifier in `path` was trained on."""
    from nbcnn.datasets import DataCorrupt, DataMissing

    classify = "python -m nbcnn classify FEATURES"
    way = f"classify the features again ({classify}), with --portable if the file is to work without them; in Python load(file, folder) takes others"
    try:
        found = read_features(folder, verify=False)
    except (DataMissing, DataCorrupt) as error:
        raise ClassifierError(f"{path} needs the features that it was trained on ({error}); {way}") from None
    if found.sha256 != sha256:
        raise ClassifierError(f"{folder} holds other features than {path} was trained on; {way}")
    return found
