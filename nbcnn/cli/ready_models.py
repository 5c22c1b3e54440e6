"""Every kernel that a ready-made model launches with the defaults of its recipe: in training, evaluation, pictures, feature extraction and,
where it has a code, classification.

Nothing of it runs, so a GPU need not be there: plans are made for an architecture and a number of multiprocessors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from nbcnn.classify import ahead
from nbcnn.cli import recipes, train_data, train_flags, train_run
from nbcnn.cli.loading import Loaded
from nbcnn.datasets import Dataset
from nbcnn.lab.measure.kernels import target_of
from nbcnn.lab.measure.plans import Absent
from nbcnn.modes import MODES
from nbcnn.nn import models, whitening
from nbcnn.run import peaks
from nbcnn.run.allocation import Allocated
from nbcnn.run.net import Net
from nbcnn.run.planning import Training
from nbcnn.run.resident import resident
from nbcnn.run.rows import Choice, fastest, on_tensor_cores
from nbcnn.run.timeline import wait_launch

_COLOUR, _DIGITS = ("cifar10", 50_000, 10_000, (3, 32, 32)), ("mnist", 60_000, 10_000, (1, 28, 28))
IMAGES = {
    "autoencoder": _COLOUR,
    "small-autoencoder": _COLOUR,
    "mnist-cnn": _DIGITS,
    "mnist-cnn-b0": _DIGITS,
    "resnet18": _COLOUR,
    "mobilenet": _COLOUR,
    "unet": _COLOUR,
}
"""The data set that a model of images is made for, its training images, test images and their shape."""
LARGEST: dict[tuple[int, ...], tuple[int, int]] = {(3, 32, 32): (5_000, 5_000), (1, 28, 28): (6_742, 6_265)}
"""Training images of the two largest classes of these data sets, by their shape: a kernel of the classifier depends on it."""
READY = (*IMAGES, "s4convd")
"""The ready-made models that are trained; those of `nbcnn.plan.names.FITTED` are fitted to the images in one pass."""
EXTRACTED, PICTURED = 256, 8
"""Images of a batch of `extract_features.py` and of `Net.predict`, and of the picture of reconstructions."""


def launches(model: str, arch: str, multiprocessors: int) -> Iterator[Any]:
    """The launches of `model`, of whose kernels many come several times. Raises DataError for s4convd where its data cannot be read."""
    data, flags = _material(model)
    target = target_of(arch, multiprocessors)
    choice = Choice(MODES[fastest(target.capability)], "the fastest mode there")
    device = Absent(target)
    yield wait_launch(0)
    if engine := peaks.engine_of(target.capability, choice.row):
        yield peaks.tensor(device, engine, on_tensor_cores(target.capability)[0], 1, 1)[0]  # what --explain measures
    net = Net(data.layers, data.shape, choice=choice, device=device, normalisation=data.normalisation)
    labels = (data.labels, data.test_labels) if net.takes_classes else (None, None)
    splits = zip(("train", "test"), (data.train, data.test), labels, strict=True)
    sets = {split: resident(images, classes, net.normalisation, classes=net.takes_classes) for split, images, classes in splits}
    augment = train_data.streaming(flags)["augment"]
    rates = train_run.rates(flags, len(data.train)).size
    factors = whitening.fixed(data.layers) | train_run.factors(flags, net)
    augment = replace(augment, flip=augment.flip or flags.flip)
    training = Training(net, sets, train_run.optimizer(flags), flags.batch, rates, augment, factors=factors, ema=flags.ema)
    for program in training.allocate(training.plans()).programs.values():
        yield from program.launches
    for batch in _predictions(data, model):
        yield from _predicting(net, batch)
    if model in models.CODES:
        layers = models.encoder(data.layers, models.code(model))
        encoder = Net(layers, data.shape, choice=choice, device=device, normalisation=data.normalisation)
        yield from extracting(encoder, len(data.train), len(data.test))
        yield from ahead.launches(target.capability, LARGEST[data.shape], mirrored=True)
        yield from ahead.launches(target.capability, LARGEST[data.shape], ridge=True)


@cache
def _material(model: str) -> tuple[train_data.Material, SimpleNamespace]:
    """What `train.py --model` trains on, and its flags: data of the size and form of the model's own, all zeros; for series the data set itself.

    Made once: the lengths of series decide, and to read or to generate them takes seconds.
    """
    flags = recipes.fill(train_flags.parse(["--model", model]))
    if model not in IMAGES:
        return train_data.material(flags), flags
    name, train, test, shape = IMAGES[model]
    images = [np.zeros((count, *shape), np.uint8) for count in (train, test)]
    labels = [np.zeros(count, np.int32) for count in (train, test)]
    data = Dataset(name, "zeros", images[0], labels[0], images[1], labels[1], tuple("0123456789"))
    return train_data.material(flags, lambda: Loaded(data, 0, 0)), flags


def _predictions(data: Any, model: str) -> list[int]:
    """The batches of a run's predictions: of reconstructions for a picture, or of all test images for their classes."""
    if model not in IMAGES:
        return []
    return sorted({EXTRACTED, len(data.test) % EXTRACTED} - {0}) if data.layers[-1].needs_labels else [PICTURED]


def extracting(encoder: Net, train: int, test: int, dtype: str = "uint8") -> Iterator[Any]:
    """The launches of an extraction from so many training and test images."""
    batch = min(EXTRACTED, train)
    for size in sorted({batch, train % batch, test % batch} - {0}):
        yield from _predicting(encoder, size, dtype)


def _predicting(net: Net, batch: int, dtype: str = "uint8") -> list[Any]:
    recorded = net.record_predict(batch, dtype)
    return list(Allocated(net, {"predict": net.lower(recorded)}, recorded.io, {}).programs["predict"].launches)
