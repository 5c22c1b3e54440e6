"""A trained classifier in one file: what `classify` writes, and how it is used on new features and images.

A safetensors file without pickle, sealed and replaced like a checkpoint. Its metadata say which format and version it is, the kernel and its
gamma, C, the processing of features, and where they came from: the encoder's run and checkpoint, and the hashes of both. Pair p decides
classes[pairs[p, 0]] (positive) against classes[pairs[p, 1]] by the sum over offsets[p]:offsets[p+1] of

    dual · exp(−gamma |z(x) − z(training features[support])|²), plus intercept[p], with z(x) = (x − mean) / scale

Of kernel ridge, `dual` is (samples, classes), every training sample takes part, and the class of the largest sum is predicted.

Support vectors are rows of the training features, which are found by the folder and hash in the file; `classify --portable` puts them into the
file instead, 4 bytes a value.

    classifier = load("features/cifar10/classify/classifier.safetensors")
    classifier.predict(features)          # float (n, F) -> class numbers int32 (n,)
    classifier.predict_images(images)     # uint8 (n, C, H, W), by the encoder of the run
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.classify.features import Origin, read_features
from nbcnn.classify.ovo import Machine
from nbcnn.classify.pipeline import Outcome, finite
from nbcnn.classify.ridge import RidgeMachine
from nbcnn.classify.scale import Scaler, squared_norms
from nbcnn.ops.products.rbf import rbf
from nbcnn.train import checkpoint

NAME = "classifier.safetensors"
_FORMAT, _VERSION = "nbcnn-classifier", "1"
_SVC, _RIDGE = "C-SVC, one against one", "kernel ridge"
_ROWS = 256


class ClassifierError(Exception):
    """A classifier's file is missing, damaged, or of another version, or what it refers to is gone; the message names the file."""

    exit_code = 3


@dataclass(frozen=True)
class Classifier:
    """A one-against-one RBF support vector machine on features that `origin` describes.

    `vectors` are the support vectors as they were extracted, float32 (s, F); `dual` is float64 (s, pairs), `intercept` (pairs,).
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

    @property
    def width(self) -> int:
        """Features of a sample."""
        return len(self.scaler.mean)

    def decisions(self, features: np.ndarray) -> np.ndarray:
        """Decision value of every pair (of kernel ridge: of every class), float64 (n, pairs), for features (n, F) of any type of numbers.

        Raises ValueError for features of another width, or that are NaN or Inf.
        """
        features = np.asarray(features)
        if features.ndim != 2 or features.shape[1] != self.width:
            raise ValueError(f"the classifier takes (n, {self.width}) features, got an array of shape {features.shape}")
        finite(features)
        vectors = self.scaler.applied(self.vectors)
        norms, made = squared_norms(vectors).astype(np.float32), np.empty((len(features), self.dual.shape[1]))
        for first in range(0, len(features), _ROWS):
            rows = self.scaler.applied(features[first : first + _ROWS])
            k = rows @ vectors.T
            rbf(squared_norms(rows).astype(np.float32), norms, k, gamma=self.gamma)
            made[first : first + _ROWS] = k.astype(np.float64) @ self.dual + self.intercept
        return made

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Class numbers, int32 (n,), of features (n, F); raises as `decisions`."""
        values = self.decisions(features)
        votes = Machine(self.classes, [], self.pairs, []).vote(values) if self.pairs else self.classes[values.argmax(1)]
        return votes.astype(np.int32)

    def predict_images(self, images: np.ndarray, mode: str = "auto") -> np.ndarray:
        """Class numbers, int32 (n,), of uint8 images (n, C, H, W), by the encoder that made the training features.

        Raises ClassifierError if the run or its checkpoint is gone or is another one by now, ValueError for images of another shape.
        """
        images = np.asarray(images)
        if images.dtype != np.uint8 or images.shape[1:] != self.origin.image_shape:
            shape = "(n, " + ", ".join(map(str, self.origin.image_shape)) + ")"
            raise ValueError(f"the encoder takes uint8 images {shape}, got {images.dtype} of shape {images.shape}")
        blocks = self._encoder(mode).predict_batches(images)
        return self.predict(np.concatenate([block.reshape(len(block), -1) for block in blocks]) if len(images) else np.empty((0, self.width)))

    def _encoder(self, mode: str) -> Any:
        from nbcnn.nn import models
        from nbcnn.nn.params import ParameterError
        from nbcnn.run.net import Net

        path = Path(self.origin.run) / Path(self.origin.checkpoint).name
        try:
            saved = checkpoint.read(path)
            if saved.sha256 != self.origin.checkpoint_sha256:
                raise ClassifierError(f"{path} is not the checkpoint that made the classifier's features: its SHA-256 is another")
            model = self.origin.model
            if model is None or model not in models.MODELS:
                raise ClassifierError(f"the classifier's features are of model {model!r}, which this version does not know")
            layers = models.encoder(models.MODELS[model](*self.origin.image_shape), models.code(model))
            net = Net(layers, self.origin.image_shape, mode=mode)
            net.params.load_dict({name: saved.tensors[f"param.{name}"] for name in net.params.names if f"param.{name}" in saved.tensors})
        except (checkpoint.CheckpointError, ParameterError) as error:
            raise ClassifierError(f"the encoder of the classifier cannot be loaded: {error}") from error
        return net


def save(path: Path, outcome: Outcome, origin: Origin, features: os.PathLike[str], features_sha256: str, vectors: np.ndarray | None = None) -> int:
    """Put the classifier of `outcome` in place of `path`, whole or not at all; returns its bytes.

    `vectors` are the training features (n, F) whose support vectors the file shall hold; without, it names the folder `features`.
    """
    machine = outcome.machine
    support = machine.supports()
    tensors: dict[str, np.ndarray] = {"classes": machine.classes.astype(np.int32), "mean": outcome.scaler.mean, "scale": outcome.scaler.scale}
    if isinstance(machine, RidgeMachine):
        tensors["dual"] = machine.beta
    else:
        tensors |= _pairs_of(machine)
    if vectors is not None:
        tensors["vectors"] = np.ascontiguousarray(vectors[support], np.float32)
    metadata = {
        "format": _FORMAT,
        "version": _VERSION,
        "machine": _RIDGE if isinstance(machine, RidgeMachine) else _SVC,
        "kernel": "rbf",
        "processing": json.dumps(["centre", "scale"]),
        "gamma": repr(outcome.gamma),
        "C": repr(outcome.C),
        "samples": str(len(outcome.train_predicted)),
        "features": str(Path(features).resolve()),
        "features_sha256": features_sha256,
        "origin": json.dumps({field.name: getattr(origin, field.name) for field in fields(Origin)}),
    }
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
    try:
        saved = checkpoint.read(path)
        found = saved.metadata
        if found.get("format") != _FORMAT:
            raise ClassifierError(f"{path} is no classifier of nbcnn; python -m nbcnn classify FEATURES writes one, {NAME}")
        if found.get("version") != _VERSION:
            raise ClassifierError(f"{path} is a classifier of version {found.get('version')}, this program reads {_VERSION}")
        return _made(path, saved.tensors, found, features)
    except checkpoint.CheckpointError as error:
        raise ClassifierError(str(error)) from None
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise ClassifierError(f"{path} is damaged: {type(error).__name__} {error}; classify the features again") from None


def _made(path: Path, tensors: dict[str, np.ndarray], found: dict[str, str], features: str | os.PathLike[str] | None) -> Classifier:
    samples = int(found["samples"])
    if found["machine"] == _RIDGE:
        # As pairs: every class one, to which all samples belong.
        count = len(tensors["classes"])
        tensors["support"], tensors["offsets"] = np.tile(np.arange(samples), count), np.arange(count + 1) * samples
        if tensors["dual"].shape != (samples, count):
            raise ValueError("its arrays do not belong together")
        tensors["dual"], tensors["intercept"], tensors["pairs"] = tensors["dual"].T.reshape(-1), np.zeros(count), np.zeros((count, 2), np.int32)
    elif found["machine"] != _SVC:
        raise ValueError(f"machine {found['machine']!r} is not known")
    pairs, support, offsets = tensors["pairs"], tensors["support"], tensors["offsets"]
    gamma, C, origin = float(found["gamma"]), float(found["C"]), json.loads(found["origin"])
    classes, mean, scale = tensors["classes"], tensors["mean"], tensors["scale"]
    fits = (
        pairs.ndim == 2
        and pairs.shape == (len(tensors["intercept"]), 2)
        and len(offsets) == len(pairs) + 1
        and offsets[0] == 0
        and (np.diff(offsets) >= 0).all()
        and offsets[-1] == len(support) == len(tensors["dual"])
        and (not pairs.size or 0 <= pairs.min() <= pairs.max() < len(classes))
        and (not support.size or 0 <= support.min() <= support.max() < samples)
        and mean.shape == scale.shape == (mean.size,)
        and (scale > 0).all()
        and math.isfinite(gamma)
        and gamma > 0
    )
    if not fits:
        raise ValueError("its arrays do not belong together")
    for name in ("classes", "image_shape", "code_shape"):
        origin[name] = None if origin[name] is None else tuple(origin[name])
    used = np.unique(support)
    vectors = tensors.get("vectors")
    if vectors is None:
        vectors = _vectors(path, Path(features or found["features"]), found["features_sha256"], used)
    if vectors.shape != (len(used), len(mean)):
        raise ValueError(f"support vectors of shape {vectors.shape} where {(len(used), len(mean))} are due")
    dual = np.zeros((len(used), len(pairs)))
    for at in range(len(pairs)):
        part = slice(offsets[at], offsets[at + 1])
        dual[np.searchsorted(used, support[part]), at] = tensors["dual"][part]
    numbered = [] if found["machine"] == _RIDGE else [(int(i), int(j)) for i, j in pairs]
    return Classifier(
        classes, numbered, vectors, dual, tensors["intercept"], Scaler(mean, scale), gamma, C, Origin(**origin), found["features_sha256"]
    )


def _vectors(path: Path, folder: Path, sha256: str, used: np.ndarray) -> np.ndarray:
    """Rows `used` of the training features in `folder`."""
    from nbcnn.datasets import DataCorrupt, DataMissing

    way = "give load() the folder, or classify with --portable"
    try:
        found = read_features(folder, verify=False)
    except (DataMissing, DataCorrupt) as error:
        raise ClassifierError(f"{path} needs the features that it was trained on ({error}); {way}") from None
    if found.sha256 != sha256:
        raise ClassifierError(f"{folder} holds other features than {path} was trained on; {way}")
    return np.ascontiguousarray(found.train[used])
