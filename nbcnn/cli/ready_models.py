"""Every kernel that a ready-made model launches with the defaults of its recipe: in training, evaluation, pictures, feature extraction and,
where it has a code, classification.

Nothing of it runs, so a GPU need not be there: plans are made for an architecture and a number of multiprocessors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from nbcnn.classify import ahead
from nbcnn.cli import recipes, train_flags, train_run
from nbcnn.lab.measure.kernels import as_if_on, capability_of
from nbcnn.lab.measure.plans import Absent
from nbcnn.modes import DEFAULT_PRECISION, MODES
from nbcnn.nn import models
from nbcnn.run.allocation import Allocated
from nbcnn.run.net import Net
from nbcnn.run.planning import Training
from nbcnn.run.resident import resident
from nbcnn.run.rows import TENSOR_CORES, Choice
from nbcnn.run.timeline import wait_launch

IMAGES = {
    "autoencoder": (50_000, 10_000, (3, 32, 32)),
    "small-autoencoder": (50_000, 10_000, (3, 32, 32)),
    "mnist-cnn": (60_000, 10_000, (1, 28, 28)),
    "mnist-cnn-b0": (60_000, 10_000, (1, 28, 28)),
}
"""Training images, test images and their shape, of the data set that a model of images is made for: CIFAR-10 and MNIST."""
LARGEST = {(3, 32, 32): (5_000, 5_000), (1, 28, 28): (6_742, 6_265)}
"""Training images of the two largest classes of these data sets, by their shape: a kernel of the classifier depends on it."""
READY = (*IMAGES, "s4convd")
EXTRACTED, PICTURED = 256, 8
"""Images of a batch of `extract_features.py` and of `Net.predict`, and of the picture of reconstructions."""


def launches(model: str, arch: str, multiprocessors: int) -> Iterator[Any]:
    """The launches of `model`, of whose kernels many come several times. Raises DataError for s4convd where its data cannot be read."""
    flags = recipes.fill(train_flags.parse(["--model", model]))
    capability = capability_of(arch)
    mode = "tensorcore" if capability >= TENSOR_CORES else "im2col"
    choice = Choice(MODES[mode, DEFAULT_PRECISION[mode]], "the fastest mode there")
    device = Absent(capability, multiprocessors)
    with as_if_on(arch):
        yield wait_launch(0)
        data = _data(flags)
        net = Net(data.layers, data.shape, choice=choice, device=device)
        sets = {"train": resident(data.train, data.labels), "test": resident(data.test, data.test_labels)}
        training = Training(net, sets, train_run.optimizer(flags), flags.batch, train_run.rates(flags, len(data.train)).size)
        for program in training.allocate(training.plans()).programs.values():
            yield from program.launches
        for batch in _predictions(data, model):
            yield from _predicting(net, batch)
        if model in models.CODES:
            encoder = Net(models.encoder(data.layers, models.code(model)), data.shape, choice=choice, device=device)
            yield from extracting(encoder, len(data.train), len(data.test))
            yield from ahead.launches(capability, LARGEST[data.shape], mirrored=True)
            yield from ahead.launches(capability, LARGEST[data.shape], ridge=True)


def _data(flags: SimpleNamespace) -> Any:
    """Data of the size and form of the model's own, all zeros; for series the data set itself."""
    if flags.model not in IMAGES:
        return _series(flags.model)
    train, test, shape = IMAGES[flags.model]
    layers = models.MODELS[flags.model](*shape)
    classified = layers[-1].needs_labels
    labels = {name: np.zeros(count, np.int32) if classified else None for name, count in (("labels", train), ("test_labels", test))}
    return SimpleNamespace(layers=layers, shape=shape, train=np.zeros((train, *shape), np.uint8), test=np.zeros((test, *shape), np.uint8), **labels)


@cache
def _series(model: str) -> Any:
    """The data of a model of series: its lengths decide. It takes seconds to read, or to generate."""
    from nbcnn.cli import train_data

    return train_data.material(recipes.fill(train_flags.parse(["--model", model])))


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
