"""This module holds what a session trains on, images or windows of series, resident or streamed, and records how a batch is gathered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from nbcnn.datasets.augment import Augment
from nbcnn.datasets.normalisation import Normalisation
from nbcnn.files.errors import UsageError
from nbcnn.plan.graph import Buf, Tape
from nbcnn.plan.shapes import numel
from nbcnn.run import streaming

if TYPE_CHECKING:
    from nbcnn.run.net import Net

Batch = tuple[Buf, Buf]
"""A batch's inputs, and its labels or targets."""


def record_gather(tape: Tape, images: Buf, order: Buf, state: Buf, shape: tuple[int, ...], **attrs: Any) -> Buf:
    """Record the gathering of a batch of `shape` (N, …) out of `images`, uint8 (M, …) or flat float32; `attrs` are the op's (`ops.images.gather`)."""
    x = tape.temp("batch", shape)
    tape.emit("gather", [images, order, state], [x], "input", **{"flip": False} | attrs)
    return x


@dataclass(frozen=True)
class Images:
    """Images (M, C, H, W), or vectors (M, F), uint8 or float32, and int32 labels (M) or None; what the network sees of them is normalised.

    `streamed`: 0 if the images are resident, else how many of them a chunk of a stream has (`nbcnn.run.streaming`).
    """

    images: np.ndarray
    labels: np.ndarray | None = None
    normalisation: Normalisation | None = None
    streamed: int = 0
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
        if net.layers[-1].needs_labels and (self.labels is None or len(self.labels) != len(images)):
            raise UsageError(f"the loss {loss} needs one label per {part} image")
        if net.label_dtype != "int32":
            raise UsageError(f"the loss {loss} needs series with their targets, not images")

    @property
    def ring(self) -> int:
        """Images on the GPU if they are streamed, else 0."""
        return self.streamed * streaming.RING

    @property
    def row_bytes(self) -> int:
        """Bytes of an image."""
        return self.images.dtype.itemsize * numel(self.images.shape[1:])

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that streaming takes."""
        return streaming.host_bytes(self.streamed, self.row_bytes)

    def held(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of what is on the device, by name; float32 images have one axis, so that no row of the op table rounds them."""
        shape = (self.ring or len(self), *self.images.shape[1:])
        dtype = self.images.dtype.name
        return {"images": (shape if dtype == "uint8" else (numel(shape),), dtype), "labels": ((len(self),), "int32")}

    def arrays(self) -> dict[str, np.ndarray]:
        """The content of what is resident, by the names of `held`."""
        labels = {"labels": np.zeros(len(self), np.int32) if self.labels is None else self.labels}
        return labels if self.streamed else {"images": self.images, **labels}

    def record(self, tape: Tape, bufs: Mapping[str, Buf], order: Buf, state: Buf, batch: int, augment: Augment) -> Batch:
        """Record the gathering of a batch from `bufs`, of the names of `held`. Raises UsageError for what `augment` cannot do to them."""
        shape = self.images.shape[1:]
        augment.check(shape)
        normal = self.normalisation.attributes(self.images.dtype.name) if self.normalisation else {}
        ring = {"ring": self.ring} if self.ring else {}
        x = record_gather(tape, bufs["images"], order, state, (batch, *shape), **augment.attributes(), **normal, **ring)
        y = tape.temp("batch labels", (batch,), "int32")
        tape.emit("gather_labels", [bufs["labels"], order, state], [y], "input")
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

    def arrays(self) -> dict[str, np.ndarray]:
        """What is resident, by name; the rows have one axis, so that no row of the op table rounds them."""
        return {"rows": self.windows.rows.reshape(-1), "targets": self.windows.targets, "starts": self.windows.starts}

    def record(self, tape: Tape, bufs: Mapping[str, Buf], order: Buf, state: Buf, batch: int, augment: Augment) -> Batch:
        """Record the gathering of a batch from `bufs`, of the names of `held`. Raises UsageError for any augmentation."""
        augment.check(self.windows.shape)
        x, y = tape.temp("batch", (batch, *self.windows.shape)), tape.temp("batch targets", (batch,))
        tape.emit("gather_windows", [bufs["rows"], bufs["targets"], bufs["starts"], order, state], [x, y], "input")
        return x, y


def resident(data: Any, labels: np.ndarray | None, normalisation: Normalisation | None = None) -> Images | Series:
    """`data` as a resident set: an array of images with `labels`, or windows, which have their own targets."""
    return Images(data, labels, normalisation) if isinstance(data, np.ndarray) else Series(data)
