"""This module makes what `classify --baselines` holds features against, of the images that the features are of: pixels, and codes without training.

Both are found by where the features say that they are from (`Origin`): the run's folder, its data set, its checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbcnn.files.quote import brief

if TYPE_CHECKING:
    import numpy as np

    from nbcnn.classify.features import Origin
    from nbcnn.classify.pipeline import Load
    from nbcnn.run.net import Net

PIXELS, RANDOM = "raw pixels", "random encoder"
"""The names of the two in the report."""


def same_images(origin: Origin, source: str, images: np.ndarray, labels: np.ndarray | None, known: np.ndarray | None) -> None:
    """Raise DataMissing unless `labels` begin with those that are `known` of the features, and images are of their shape."""
    import numpy as np

    from nbcnn.datasets import DataMissing

    if images.shape[1:] != origin.image_shape or labels is None or known is None or not np.array_equal(labels[: len(known)], known):
        raise DataMissing(f"{brief(origin.dataset)} ({source}) holds other images than the features were made from; see --data-dir")


def _run_flags(origin: Origin) -> dict[str, Any]:
    """The flags of the run that the features are from; empty if it is gone."""
    from nbcnn.train.runlog import RunError, RunFolder

    try:
        return RunFolder(origin.run).read_config()["flags"]
    except RunError:
        return {}


def data_dir_of(origin: Origin) -> Path:
    """Where the run found its images, or the default if the run is gone."""
    from nbcnn.datasets import DATA_DIR

    return Path(_run_flags(origin).get("data_dir", DATA_DIR))


def untrained_encoder(origin: Origin) -> tuple[list[Any], str]:
    """The layers that made the features, and a note of what was assumed if the features do not name their model.

    Raises UsageError if these layers do not make features of the same shape, or the model is not known.
    """
    from nbcnn.files.errors import UsageError
    from nbcnn.nn import models
    from nbcnn.nn.graphs import wired
    from nbcnn.nn.layer import sized
    from nbcnn.plan.graph import Buf, Tape, trace_nodes

    (channels, *_), run_model, note = origin.image_shape, _run_flags(origin).get("model"), ""
    if origin.model is None:
        known = f"their run {origin.run} says {run_model}" if run_model else "their run is gone, so the autoencoder is assumed"
        note = f"the features do not say which model made them: {known}"
    if model := origin.model or run_model:
        cut = models.code(model)  # refuses a model that is not known
        layers = models.encoder(models.MODELS[model](*origin.image_shape), cut)
    else:
        layers = models.encoder(models.autoencoder(channels, code=origin.code_shape[0]), models.code("autoencoder"))
    layers = sized(layers, origin.image_shape)
    (made, *_), _ = trace_nodes(Tape(training=False), wired(layers), [Buf("x", (1, *origin.image_shape))])
    if made.shape[1:] != origin.code_shape:
        what = f"the encoder of {model or 'the autoencoder'} makes codes of {made.shape[1:]}, these features are of {origin.code_shape}"
        raise UsageError("; ".join(filter(None, (f"--baselines: {what}", note, "extract the features again, or leave --baselines out"))))
    return layers, note


def baselines(
    origin: Origin, data_dir: Path, layers: list[Any], mode: str, train_labels: np.ndarray, test_labels: np.ndarray, mirrored: bool
) -> dict[str, Load]:
    """What makes features of the same images without training: their pixels, and the encoder's `layers` (in `mode`) as they were before.

    If `mirrored`, those of the mirrored images follow.
    Raises DataMissing if the data set that is found has other images than those of `train_labels` and `test_labels`.
    """
    from nbcnn import datasets

    found = datasets.load(origin.dataset, data_dir=data_dir)

    def same(images: np.ndarray, labels: np.ndarray | None, known: np.ndarray) -> np.ndarray:
        same_images(origin, found.source, images, labels, known)
        return images[: len(known)]

    train, test = same(found.train_images, found.train_labels, train_labels), same(found.test_images, found.test_labels, test_labels)
    sets = (train, test, train[..., ::-1], test[..., ::-1]) if mirrored else (train, test)
    return {PIXELS: lambda: tuple(map(_pixels, sets)), RANDOM: lambda: _untrained(origin, layers, mode, sets)}


def _pixels(images: np.ndarray) -> np.ndarray:
    """uint8 (n, C, H, W) -> float32 (n, C·H·W) in 0..1."""
    import numpy as np

    return images.reshape(len(images), -1).astype(np.float32) / np.float32(255)


def _untrained(origin: Origin, layers: list[Any], mode: str, sets: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """The code of uint8 images (n, C, H, W) by the encoder's `layers` with their first weights (seed 0), float32 (n, F).

    An encoder that was fitted to images before it was trained keeps that, so that the control gets the same images.
    """
    from nbcnn.run.net import Net

    net = _forgotten(origin, mode) or Net(layers, origin.image_shape, mode=mode, seed=0)
    return tuple(net.predict(images).reshape(len(images), -1) for images in sets)


def _forgotten(origin: Origin, mode: str) -> Net | None:
    """The encoder of the features' checkpoint with first weights behind the layers that prepare images; None if it has none, or is gone."""
    from nbcnn.nn.description import DescriptionError
    from nbcnn.train import checkpoint, saved_net
    from nbcnn.train.runlog import RunError

    try:
        saved = checkpoint.read(Path(origin.run) / Path(origin.checkpoint).name)
        layers = saved_net.described(saved)["layers"]
        if saved.sha256 != origin.checkpoint_sha256 or not any(getattr(layer, "prepares", False) for layer in layers):
            return None
        layer = saved_net.cut(origin.model or "autoencoder", origin.layer)
        net = saved_net.encoder(saved, layer, mode, None, origin.precision, origin.image_shape)
    except (checkpoint.CheckpointError, DescriptionError, RunError):
        return None
    saved_net.forget(net, 0)
    return net
