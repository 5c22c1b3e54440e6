"""This module holds what a session trains on, images with their targets or windows of series, and records how a batch of it is gathered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from nbcnn.datasets.augment import Augment
from nbcnn.datasets.normalisation import Normalisation
from nbcnn.files.errors import UsageError
from nbcnn.gpu.arrays import DeviceArray
from nbcnn.plan.graph import Buf, Tape
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel
from nbcnn.run import streaming

if TYPE_CHECKING:
    from nbcnn.run.net import Net

Batch = tuple[Buf, Buf | None]
"""A batch's inputs, and its labels or targets; None where the target is the input."""


def record_gather(tape: Tape, images: Buf, order: Buf, state: Buf, shape: tuple[int, ...], **attrs: Any) -> Buf:
    """Record the gathering of a batch of `shape` (N, …) out of `images`, uint8 (M, …) or flat float32; `attrs` are the op's (`ops.images.gather`)."""
    x = tape.temp("batch", shape)
    tape.emit(Op("gather"), [images, order, state], [x], "input", **{"flip": False} | attrs)
    return x


@dataclass(frozen=True)
class Images:
    """Images (M, C, H, W), or vectors (M, F), uint8 or float32, with what the loss compares the outputs with; what the network sees is normalised.

    Images and targets that are values may be arrays in GPU memory (`DeviceArray`), which are then read where they lie.

    targets   classes int32 (M), or of pixels uint8 or int32 (M, H, W); or values, uint8 or float32 (M, *output): a byte of 255 is 1, floats are
              as they are. None: the target is the input.
    classes   the targets are classes.
    streamed  0 if everything is resident, else how many images a chunk of a stream has (`nbcnn.run.streaming`). One class per image is resident
              then too, all other targets are streamed beside their images.
    batches   where examples come from a callable, its batches (`streaming.Batches`); images and targets then have no memory behind them, and say
              their shapes and types.
    """

    images: Any
    targets: Any = None
    normalisation: Normalisation | None = None
    streamed: int = 0
    classes: bool = True
    batches: streaming.Batches | None = None
    noun: ClassVar[str] = "images"

    def __len__(self) -> int:
        return len(self.images)

    def check(self, net: Net, part: str) -> None:
        """Raise UsageError if they are not what `net` takes."""
        images, loss = self.images, type(net.layers[-1]).__name__
        if images.dtype not in (np.uint8, np.float32) or images.shape[1:] != net.input_shape:
            raise UsageError(f"{part} images must be uint8 or float32 (M, {net.input_shape}), got {images.dtype} {images.shape}")
        if not len(images):
            raise UsageError(f"there are no {part} images")
        if net.layers[-1].needs_labels and (self.targets is None or len(self.targets) != len(images)):
            raise UsageError(f"the loss {loss} needs one label per {part} image")
        if net.label_dtype != "int32":
            raise UsageError(f"the loss {loss} needs series with their targets, not images")

    @property
    def ring(self) -> int:
        """Images on the GPU if they are streamed, else 0."""
        return self.streamed * streaming.RING

    @property
    def _beside(self) -> bool:
        """The targets are streamed beside the images, if these are."""
        return self.targets is not None and (self.targets.ndim > 1 or self.batches is not None)

    @property
    def sources(self) -> dict[str, np.ndarray]:
        """The arrays that are streamed, if any are, by the names of `held`."""
        return {"images": self.images} | ({"targets": self.targets} if self.targets is not None and self._beside else {})

    @property
    def row_bytes(self) -> int:
        """Bytes of an image, with its target where that is streamed."""
        return sum(array.dtype.itemsize * numel(array.shape[1:]) for array in self.sources.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that streaming takes."""
        return streaming.host_bytes(self.streamed, self.row_bytes)

    def held(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of what is on the device, by name; float32 images have one axis, so that no row of the op table rounds them."""
        made = {"images": self.images} | ({} if self.targets is None else {"targets": self.targets})
        shapes = {name: (self.ring if self.ring and name in self.sources else len(self), *array.shape[1:]) for name, array in made.items()}
        return {name: ((numel(shapes[name]),) if array.dtype == np.float32 else shapes[name], array.dtype.name) for name, array in made.items()}

    def arrays(self) -> dict[str, np.ndarray]:
        """The content of what is resident, by the names of `held`."""
        made = {"images": self.images} | ({} if self.targets is None else {"targets": self.targets})
        return {name: array for name, array in made.items() if not (self.streamed and name in self.sources)}

    def on_gpu(self) -> frozenset[str]:
        """The names of those arrays of `held` that lie on the GPU already, as arrays of the caller."""
        return frozenset(name for name, array in self.arrays().items() if isinstance(array, DeviceArray))

    def record(self, tape: Tape, bufs: Mapping[str, Buf], order: Buf, state: Buf, batch: int, augment: Augment) -> Batch:
        """Record the gathering of a batch from `bufs`, of the names of `held`. Raises UsageError for what `augment` cannot do to them."""
        shape, targets, tape.examples = self.images.shape[1:], self.targets, (order, state)
        augment.check(shape)
        normal = self.normalisation.attributes(self.images.dtype.name) if self.normalisation else {}
        ring = {"ring": self.ring} if self.ring else {}
        x = record_gather(tape, bufs["images"], order, state, (batch, *shape), **augment.attributes(), **normal, **ring)
        if targets is None:
            return x, None
        # Classes of several outputs are (M, outputs, 1): no pixels, so nothing moves them.
        plane = () if self.classes and targets.shape[2:] == (1,) else targets.shape[1:]
        moved, ring = augment.of_targets(shape, plane, self.classes), ring if self._beside else {}
        if self.classes:
            y = tape.temp("batch labels", (batch, *targets.shape[1:]), "int32")
            tape.emit(Op("gather_labels"), [bufs["targets"], order, state], [y], "input", **moved, **ring)
        else:
            # Vectors are made with one axis, so that no row of the op table rounds them; images are stored as their inputs are.
            made = (batch, *targets.shape[1:])
            y = tape.temp("batch targets", made if targets.ndim == 4 else (numel(made),)).reshaped(made)
            tape.emit(Op("gather"), [bufs["targets"], order, state], [y], "input", **moved, **ring)
        return x, y


@dataclass(frozen=True)
class Series:
    """Windows of series with their targets (`nbcnn.datasets.series.Windows`)."""

    windows: Any
    noun: ClassVar[str] = "windows"

    def __len__(self) -> int:
        return len(self.windows)

    def check(self, net: Net, part: str) -> None:
        """Raise UsageError if they are not what `net` takes."""
        if self.windows.shape != net.input_shape:
            raise UsageError(f"{part} windows are {self.windows.shape}, the network takes {net.input_shape}")
        if net.label_dtype != "float32":
            raise UsageError(f"the loss {type(net.layers[-1]).__name__} does not take the targets of series")

    def held(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of what is on the device, by name."""
        return {name: (array.shape, array.dtype.name) for name, array in self.arrays().items()}

    def on_gpu(self) -> frozenset[str]:
        """No array of series lies on the GPU already."""
        return frozenset()

    def arrays(self) -> dict[str, np.ndarray]:
        """What is resident, by name; the rows have one axis, so that no row of the op table rounds them."""
        return {"rows": self.windows.rows.reshape(-1), "targets": self.windows.targets, "starts": self.windows.starts}

    def record(self, tape: Tape, bufs: Mapping[str, Buf], order: Buf, state: Buf, batch: int, augment: Augment) -> Batch:
        """Record the gathering of a batch from `bufs`, of the names of `held`. Raises UsageError for any augmentation."""
        augment.check(self.windows.shape)
        tape.examples = (order, state)
        x, y = tape.temp("batch", (batch, *self.windows.shape)), tape.temp("batch targets", (batch,))
        tape.emit(Op("gather_windows"), [bufs["rows"], bufs["targets"], bufs["starts"], order, state], [x, y], "input")
        return x, y


def resident(
    data: Any, targets: np.ndarray | None, normalisation: Normalisation | None = None, *, classes: bool = True, batches: Any = None
) -> Images | Series:
    """`data` as a resident set: an array of images with its `targets`, as in `Images`, or windows, which have their own."""
    if isinstance(data, np.ndarray | DeviceArray):
        return Images(data, targets, normalisation, classes=classes, batches=batches)
    return Series(data)
