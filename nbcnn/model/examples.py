"""This module makes arrays in the form that a network takes of what a caller gives as examples and targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from itertools import chain
from typing import Any

import numpy as np

from nbcnn.datasets import arrays
from nbcnn.datasets.arrays import Form, Forms, seen
from nbcnn.files.errors import UsageError
from nbcnn.gpu.arrays import DeviceArray, as_device_array
from nbcnn.model import on_gpu
from nbcnn.nn.layer import whole_number
from nbcnn.run.net import Net
from nbcnn.run.streaming import Batches


def from_dataset(x: Any, y: Any, validation: Any, labelled: bool, pixels: bool = False, test: bool = False) -> tuple[Any, Any, Any, str]:
    """x, y, validation data and a name; of a data set (`nbcnn.datasets.Dataset`) its own, `test` its test images; without `labelled` the labels are
    left out, for `pixels` they are its masks. Raises UsageError where it has none."""
    if not hasattr(x, "train_images"):
        return x, y, validation, "arrays"
    if y is not None:
        raise UsageError("a data set has its own labels: leave y out")
    if labelled and pixels and x.masks is None:
        raise UsageError(f"{x.name} has no masks, and the network classifies pixels: give images and masks as x and y")
    labels = (x.masks.train, x.masks.test) if pixels and x.masks else (x.train_labels, x.test_labels)
    train, tests = labels if labelled else (None, None)
    if test:
        return x.test_images, tests, None, x.name
    return x.train_images, train, validation if validation is not None else (x.test_images, tests), x.name


def set_aside(x: Any, y: Any, validation: Any, share: float, several: tuple[bool, bool]) -> tuple[Any, Any, Any]:
    """x and y without the last `share` of their examples, and these as validation data. `several` says whether x and y are arrays in a tuple.

    Raises UsageError for what cannot be divided so.
    """
    if validation is not None:
        raise UsageError("validation_data and validation_split exclude each other: leave one out")
    if hasattr(x, "train_images") or (callable(x) and not hasattr(x, "__array__")):
        what = "a data set has its own test images" if hasattr(x, "train_images") else "x is a callable, whose batches nobody has together"
        raise UsageError(f"validation_split is for arrays, and {what}: leave it out, or give validation_data")
    count = len(x[0]) if several[0] else len(x)
    kept = int(count * (1 - share))
    if not 0 < kept < count:
        raise UsageError(f"validation_split {share:g} of {count:,} examples leaves {kept:,} to train on and {count - kept:,} to validate by")
    targets = y[0] if several[1] and y is not None else y
    if targets is not None and len(targets) != count:
        raise UsageError(f"there are {len(targets):,} targets for {count:,} examples: each example needs one")

    def part(given: Any, many: bool, rows: slice) -> Any:
        return None if given is None else tuple(each[rows] for each in given) if many else given[rows]

    first, last = ((part(x, several[0], rows), part(y, several[1], rows)) for rows in (slice(kept), slice(kept, None)))
    return first[0], first[0] if y is x else first[1], last[0] if y is None or y is x else last


def batches_of(
    start: Callable[[int], Any],
    epoch: int,
    batch_size: int | None,
    steps: int | None,
    learn: Callable[[Any], tuple[Net, Form | Forms]],
    last: bool | None,
) -> tuple[np.ndarray, np.ndarray | None, Batches]:
    """The batches of a callable, and arrays without memory that say the shapes and types of examples and targets.

    `epoch` is the first; `learn` makes the network of the first examples; `last`: images are (N, H, W, C). Raises UsageError for what is no batch.
    """
    opened = start(epoch)
    if not isinstance(opened, Iterable):
        raise UsageError(f"x({epoch}) must return the batches of an epoch, a list or an iterator of them, got {type(opened).__name__}")
    if steps is not None:
        steps = whole_number("fit", "steps_per_epoch", steps)
    elif not isinstance(opened, Sized):
        raise UsageError(f"x({epoch}) has no len(): give the number of batches of an epoch by steps_per_epoch")
    elif not len(opened):
        raise UsageError(f"x({epoch}) is empty: an epoch needs at least one batch")
    steps, items = steps or len(opened), iter(opened)
    first = next(items, None)
    if first is None:
        raise UsageError(f"x({epoch}) gave no batch: an epoch needs at least one")
    x, _ = _pair(first)
    net, form = learn(x)

    def read(item: Any, number: int) -> dict[str, np.ndarray]:
        x, y = _pair(item)
        images = form.take(x, last, f"examples of batch {number + 1}")
        if not len(images):
            raise UsageError(f"batch {number + 1} of the epoch is empty")
        targets = targets_of(net, y, x, len(images), last, f"targets of batch {number + 1}")
        made = {"images": images} | ({} if targets is None else {"targets": targets})
        for name, array in made.items():
            if name in kinds and array.dtype != kinds[name]:
                raise UsageError(f"the {name} of batch {number + 1} are {array.dtype}, of the first {kinds[name]}: give all of one type")
        return made

    kinds: dict[str, np.dtype] = {}
    made = read(first, 0)
    kinds |= {name: array.dtype for name, array in made.items()}
    size = len(made["images"])
    if batch_size not in (None, size):
        raise UsageError(f"batch_size is {batch_size}, and the first batch of x({epoch}) has {size} examples: leave batch_size out")
    hollow = {name: np.broadcast_to(np.zeros((), array.dtype), (steps * size, *array.shape[1:])) for name, array in made.items()}
    return hollow["images"], hollow.get("targets"), Batches(start, read, size, steps, (epoch, chain([first], items)))


def targets_of(net: Net, y: Any, x: Any, count: int, channels_last: bool | None, name: str = "") -> Any:
    """What the loss compares the outputs of `count` examples with, checked; None where that is the input."""
    if len(net.output_shapes) > 1 and (y is not None or net.takes_classes):
        return _targets_of_several(net, y, count, channels_last, name)
    if net.takes_classes:
        if net.plane == (1, 1):
            raise UsageError(f"the network's output is {net.output_shape}, one class per pixel of an image of 1×1: put Flatten() behind it")
        return arrays.labels(y, count, net.output_shape[0], name or "labels", net.plane, net.ignored)
    if net.layers[-1].needs_labels:
        raise UsageError(f"the loss {type(net.layers[-1]).__name__} is for series, which Model does not train; see nbcnn train --model s4convd")
    if isinstance(y, DeviceArray) and y is not x:
        return on_gpu.targets(y, count, net, name or "targets")
    if y is not None and y is not x:
        return arrays.targets(y, count, net.output_shape, channels_last=channels_last, name=name or "targets")
    if net.needs_values:
        raise UsageError(f"the network makes {net.output_shape} of {net.input_shape}, so it cannot have its input as target: give y")
    return None


def _targets_of_several(net: Net, y: Any, count: int, channels_last: bool | None, name: str) -> np.ndarray:
    """The targets of several outputs as one array: classes (N, outputs, 1), or values (N, F), each output's in C, H, W order."""
    shapes = net.output_shapes
    if not isinstance(y, list | tuple) or len(y) != len(shapes):
        raise UsageError(f"the network has {len(shapes)} outputs: give y as a tuple of {len(shapes)} arrays")
    names = [f"{name or 'targets'} of output {at}" for at in range(1, len(shapes) + 1)]
    if net.takes_classes:
        made = [arrays.labels(each, count, shape[0], called) for each, shape, called in zip(y, shapes, names, strict=True)]
        return np.ascontiguousarray(np.stack(made, axis=1)[:, :, None])
    parts = zip(y, shapes, names, strict=True)
    values = [seen(arrays.targets(each, count, shape, channels_last=channels_last, name=called)) for each, shape, called in parts]
    return np.concatenate([each.reshape(count, -1) for each in values], axis=1).astype(np.float32)


def validation_of(net: Net, form: Form | Forms, data: Any, channels_last: bool | None) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Images and targets of `validation_data`, both None without it. Raises UsageError for another form."""
    if data is None:
        return None, None
    if callable(data) and not hasattr(data, "__array__"):
        raise UsageError("validation_data must be arrays; only the training data may be a callable")
    if hasattr(data, "train_images"):
        x, y, *_ = from_dataset(data, None, None, net.layers[-1].needs_labels, len(net.output_shapes) == 1 and bool(net.plane), test=True)
    elif isinstance(data, tuple | list) and len(data) == 2:
        x, y = data
    elif net.takes_classes or isinstance(data, tuple | list):
        raise UsageError("validation_data must be (x, y)")
    else:
        x, y = data, None
    images = form.take(x, channels_last, "validation examples")
    y = np.asarray(y) if isinstance(y, DeviceArray) else y
    return images, targets_of(net, y, x, len(images), channels_last, "validation " + ("labels" if net.takes_classes else "targets"))


def _pair(batch: Any) -> tuple[Any, Any]:
    """x and y of a callable's batch; y is None where it is x alone."""
    if isinstance(batch, tuple) and len(batch) != 2:
        raise UsageError(f"a batch must be (x, y), or x alone, got a tuple of {len(batch)}")
    made = tuple(batch) if isinstance(batch, tuple | list) and len(batch) == 2 else (batch, None)
    if any(isinstance(as_device_array(each, "a batch"), DeviceArray) for each in made):
        raise UsageError("batches of a callable are read from the host: give x.cpu(), or all examples as one array on the GPU")
    return made[0], made[1]
