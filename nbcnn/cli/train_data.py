"""This module gives train.py images and series as one class: the session's data, the layers that fit, the pictures to draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from nbcnn import datasets
from nbcnn.cli import loading, own_model, recipes, train_loss
from nbcnn.cli.loading import crc
from nbcnn.datasets import own
from nbcnn.datasets.augment import Augment
from nbcnn.datasets.dataset import VOID, Dataset
from nbcnn.datasets.normalisation import Normalisation
from nbcnn.files.errors import UsageError
from nbcnn.nn import models
from nbcnn.nn.corruption import KSparse, MaskSquares, Noise
from nbcnn.nn.graphs import Graph
from nbcnn.nn.layer import sized
from nbcnn.nn.whitening import Whiten
from nbcnn.plan.graph import Buf, Tape, named, names, trace
from nbcnn.train.callbacks import ClassesOfPixels, Classification, Forecasts, Pictures, Plots


@dataclass(frozen=True)
class Material:
    """train, test  what `TrainingSession` takes; for series the test of every epoch is on the validation months.
    shape  of one example. noun  what there are `count` and `test_count` of. checksum  of what is trained on, in words. others  CRC-32 of the rest.
    layers  the network of the flags. labels, test_labels  classes of images that have them, int32 (M), or of their pixels, uint8 (M, H, W).
    pictures  the callback that draws them, given a title and the net. normalisation  what --normalise found, None without it.
    short  the name as a part of file names and titles. note  what the user is told of a network that was chosen for the data.
    """

    name: str
    source: str
    train: Any
    test: Any
    shape: tuple[int, ...]
    noun: str
    test_noun: str
    checksum: str
    others: int
    layers: Any
    data: Any
    labels: Any = None
    test_labels: Any = None
    normalisation: Normalisation | None = None
    note: str = ""

    @property
    def short(self) -> str:
        return own.short(self.name)

    @property
    def count(self) -> int:
        return len(self.train)

    @property
    def test_count(self) -> int:
        return len(self.test)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes that the labels number."""
        named: tuple[str, ...] | None = self.data.masks.classes if self.segmented else getattr(self.data, "classes", None)
        return named

    @property
    def segmented(self) -> bool:
        """Whether the labels are of pixels."""
        return self.labels is not None and self.labels.ndim == 3

    def pictures(self, title: str, net: Any) -> Pictures:
        if self.noun == "windows":
            return Forecasts(title, self.data)
        if self.segmented:
            return ClassesOfPixels(title, net, self.test, self.test_labels, self.classes)
        return Classification(title, net, self.data) if self.layers[-1].needs_labels else Plots(title, self.test[:8])


def material(flags: SimpleNamespace, read: loading.Reading | None = None, function: Callable[..., Any] | None = None) -> Material:
    """The data set and the network that the flags name. Raises DataError.

    `read` gives the images where they are being read already, and `function` makes the layers where a custom --model is known already.
    """
    if flags.dataset in datasets.SERIES:
        return _series(flags)
    loaded = read() if read else loading.load(flags)
    data = loaded.data
    images = data.train_images
    note = recipes.on_digits(flags) if data.name == "digits" else ""
    layers = _network(flags, data, function)
    pixels = getattr(layers[-1], "needs_labels", False) and (flags.model == "unet" or own_model.is_own(flags.model))
    pixels = pixels and bool(_plane(layers, images.shape[1:]))
    note = "\n".join(filter(None, (note, recipes.on_images(flags, data.name, len(images), pixels))))
    if pixels and data.masks is None:
        raise UsageError(
            f"--model {flags.model} classifies pixels, and {data.name} has no masks: --dataset shapes has some, and so has folder:PATH with "
            "images/ and masks/ in it"
        )
    if pixels and data.masks and data.masks.has_void and flags.ignore_index is None:
        flags.ignore_index = VOID
    layers = harder(train_loss.with_loss(layers, flags), flags)
    if getattr(layers[-1], "needs_labels", False) and not pixels and data.classes is None:
        raise UsageError(
            f"--model {flags.model} classifies, and {data.name} has no labels: --dataset digits and shapes have some and need no internet; "
            "cifar10 is downloaded; the files of mnist and fashion-mnist are put into --data-dir by hand (data/README.md)"
        )
    labels, others = {"labels": data.train_labels, "test_labels": data.test_labels}, loaded.others_crc
    if pixels and data.masks:
        labels = {"labels": data.masks.train, "test_labels": data.masks.test}
        others = crc(data.test_images, *labels.values())
    checksum = f"{len(images)} images, CRC-32 {loaded.train_crc:08x}"
    normalisation = Normalisation.of(images) if flags.normalise else None
    return Material(
        data.name,
        data.source,
        images,
        data.test_images,
        images.shape[1:],
        "images",
        "test images",
        checksum,
        others,
        layers,
        data,
        **labels,
        normalisation=normalisation,
        note=note,
    )


def _network(flags: SimpleNamespace, data: Dataset, function: Callable[..., Any] | None) -> Any:
    """The layers that --model names, for images and classes of `data`."""
    shape = data.train_images.shape[1:]
    if own_model.is_own(flags.model):
        return own_model.layers_of(flags.model, shape, function)
    if flags.model == "unet":
        # Masks decide what it is for, unless --loss does.
        if flags.loss == "cross-entropy" or (flags.loss in train_loss.OF_SERIES and data.masks):
            return models.MODELS["unet"](*shape, classes=len(data.masks.classes) if data.masks else 2)
        return models.MODELS["unet"](*shape)
    classes = {"classes": len(data.classes)} if own.is_own(data.name) and data.classes else {}
    return models.MODELS[flags.model](*shape, **classes)


def _plane(layers: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """(H, W) of the network's output where that is an image, of which every pixel has a class; else ()."""
    if isinstance(layers, Graph):
        made = layers.sized(shape)
        output = made.shapes()[made.outputs[0]]
    else:
        *body, _ = sized(layers, shape)
        y, _ = trace(Tape(training=False), named(body), Buf("x", (1, *shape)))
        output = y.shape[1:]
    return output[1:] if len(output) == 3 else ()


def harder(layers: Any, flags: SimpleNamespace) -> Any:
    """`layers`, a list or a graph, with those that --whiten, --noise, --mask and --sparse put in: in front, and behind a ready-made model's code.

    Raises UsageError for --sparse where it is not known which layer makes the code, and for --sparse of a graph.
    """
    if flags.sparse:
        if flags.model not in models.CODES:
            raise UsageError(
                f"--sparse stands behind the code, and which layer of {flags.model} makes one is not known: put KSparse among its layers"
            )
        if isinstance(layers, Graph):
            raise UsageError(f"--sparse stands between the layers of a list, and {flags.model} is a graph: call KSparse in a model of your own")
        at = names(layers).index(models.code(flags.model)) + 1
        layers = [*layers[:at], KSparse(flags.sparse), *layers[at:]]
    front: list[Any] = [Whiten()] if flags.whiten else []
    front += [Noise(flags.noise)] if flags.noise else []
    front += [MaskSquares(flags.mask)] if flags.mask else []
    return layers.behind(front) if isinstance(layers, Graph) else [*front, *layers]


def streaming(flags: SimpleNamespace) -> dict[str, Any]:
    """What --augment and --resident are for `TrainingSession`."""
    return {"augment": Augment.parse(flags.augment or ""), "resident": {"auto": None, "yes": True, "no": False}[flags.resident]}


def _series(flags: SimpleNamespace) -> Material:
    data = replace(datasets.load_series(flags.dataset, data_dir=flags.data_dir, limit=flags.limit), loss=flags.loss)
    train, validation = data.windows("train"), data.windows("validation")
    features, length = train.shape
    options = {"wide": flags.width, "blocks": flags.blocks, "kernel_init": flags.kernel_init, "loss": flags.loss, "unit": data.unit}
    layers = models.s4convd(features, taps=length, **options)
    checksum = f"{len(train)} windows, CRC-32 {data.checksum():08x}"
    others = crc(data.starts["validation"], data.starts["test"])
    return Material(data.name, data.source, train, validation, train.shape, "windows", "validation windows", checksum, others, layers, data)
