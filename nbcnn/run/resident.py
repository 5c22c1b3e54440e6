"""This module keeps a data set resident, images or windows of series, and records how a batch of it is gathered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from nbcnn.files.errors import UsageError
from nbcnn.plan.graph import Buf, Tape

if TYPE_CHECKING:
    from nbcnn.run.net import Net

Batch = tuple[Buf, Buf]
"""A batch's inputs, and its labels or targets."""


def record_gather(tape: Tape, images: Buf, order: Buf, state: Buf, batch: int, flip: bool = False) -> Buf:
    """Record the gathering of `batch` images, as floats in [0, 1], out of the resident uint8 `images` (M, …).

    Raises UsageError for `flip` of vectors.
    """
    if flip and len(images.shape) != 4:
        raise UsageError(f"--flip mirrors images; these are vectors of {images.shape[1]} values")
    x = tape.temp("batch", (batch, *images.shape[1:]))
    tape.emit("gather", [images, order, state], [x], "input", flip=flip)
    return x


@dataclass(frozen=True)
class Images:
    """A resident set of uint8 images (M, C, H, W), or vectors (M, F), and int32 labels (M) or None."""

    images: np.ndarray
    labels: np.ndarray | None = None
    noun: ClassVar[str] = "images"

    def __len__(self) -> int:
        return len(self.images)

    def check(self, net: Net, part: str) -> None:
        """Raise UsageError if they are not what `net` takes."""
        if self.images.dtype != np.uint8 or self.images.shape[1:] != net.input_shape:
            raise UsageError(f"{part} images must be uint8 (M, {net.input_shape}), got {self.images.dtype} {self.images.shape}")
        if net.layers[-1].needs_labels and (self.labels is None or len(self.labels) != len(self.images)):
            raise UsageError(f"the loss {type(net.layers[-1]).__name__} needs one label per {part} image")
        if net.label_dtype != "int32":
            raise UsageError(f"the loss {type(net.layers[-1]).__name__} needs series with their targets, not images")

    def arrays(self) -> dict[str, np.ndarray]:
        """What is resident, by name."""
        return {"images": self.images, "labels": np.zeros(len(self), np.int32) if self.labels is None else self.labels}

    def record(self, tape: Tape, bufs: Mapping[str, Buf], order: Buf, state: Buf, batch: int, flip: bool) -> Batch:
        """Record the gathering of a batch from `bufs`, of the names of `arrays`. Raises UsageError for `flip` of vectors."""
        x = record_gather(tape, bufs["images"], order, state, batch, flip)
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

    def arrays(self) -> dict[str, np.ndarray]:
        """What is resident, by name; the rows have one axis, so that no row of the op table rounds them."""
        return {"rows": self.windows.rows.reshape(-1), "targets": self.windows.targets, "starts": self.windows.starts}

    def record(self, tape: Tape, bufs: Mapping[str, Buf], order: Buf, state: Buf, batch: int, flip: bool) -> Batch:
        """Record the gathering of a batch from `bufs`, of the names of `arrays`. Raises UsageError for `flip`."""
        if flip:
            raise UsageError("--flip mirrors images; these are series")
        x, y = tape.temp("batch", (batch, *self.windows.shape)), tape.temp("batch targets", (batch,))
        tape.emit("gather_windows", [bufs["rows"], bufs["targets"], bufs["starts"], order, state], [x, y], "input")
        return x, y


def resident(data: Any, labels: np.ndarray | None) -> Images | Series:
    """`data` as a resident set: an array of images with `labels`, or windows, which have their own targets."""
    return Images(data, labels) if isinstance(data, np.ndarray) else Series(data)
