"""This module defines `Dataset`, the images and labels of a data set in memory, and the errors of missing and corrupt data."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from nbcnn.files import document
from nbcnn.files.errors import UsageError, Whole
from nbcnn.files.masked import refuse_masked

Log = Callable[[str], None]
"""Takes one message for people; it may hold several lines."""


class DataError(Exception):
    """The asked data cannot be used; the message says what, where, and what to do. Commands exit with `exit_code`."""

    exit_code = 3


class DataMissing(DataError):
    """Files were looked for and are not there."""


class DataTooLarge(DataError):
    """The data would not fit into host memory."""

    exit_code = 5


class DataCorrupt(Whole, DataError):
    """A file is there and wrong: `path`, and `offset`, the byte of the file at which the problem shows."""

    def __init__(self, path: Path, offset: int, problem: str, remedy: str) -> None:
        super().__init__(f"{path}, byte {offset:,}: {problem}. {remedy}")
        self.path = path
        self.offset = offset


def _check_names(classes: tuple[str, ...] | None) -> None:
    """Raise DataError for a name of a class that no file could hold: not UTF-8, as folders out of old zip files are, or with a zero character."""
    for name in classes or ():
        try:
            document.readable(json.dumps(name), "the name of a class")
        except UsageError as error:
            raise DataError(f"{error}. Rename the class (the folder of its images) in UTF-8") from None


VOID = 255
"""The value of a mask's pixel that is of no class: it is neither trained on nor counted, as in PASCAL VOC and Cityscapes."""


@dataclass(frozen=True)
class Masks:
    """The class of every pixel of a data set's images: uint8 (M, H, W), numbers of `classes`, or VOID where a pixel has no class.

    Raises ValueError for arrays that do not fit this description.
    """

    train: np.ndarray
    test: np.ndarray
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_names(self.classes)
        for each in (self.train, self.test):
            refuse_masked(each, "masks")
        if not 2 <= len(self.classes) <= VOID:
            raise ValueError(f"masks need 2 to {VOID} classes, got {len(self.classes)}")
        for split, masks in (("training", self.train), ("test", self.test)):
            if masks.dtype != np.uint8 or masks.ndim != 3 or not masks.flags.c_contiguous:
                raise ValueError(f"{split} masks must be uint8 (M, H, W), C-contiguous: {masks.dtype} {masks.shape}")
            if ((masks >= len(self.classes)) & (masks != VOID)).any():
                raise ValueError(f"{split} masks have values that are neither one of {len(self.classes)} classes nor {VOID}, which is none")

    def __repr__(self) -> str:
        sizes = " and ".join("×".join(map(str, each.shape)) for each in (self.train, self.test))
        return f"<Masks of {len(self.classes)} classes: {sizes}>"

    @property
    def has_void(self) -> bool:
        """Whether a pixel has no class."""
        return any(bool((masks == VOID).any()) for masks in (self.train, self.test))


@dataclass(frozen=True)
class Dataset:
    """Images of one data set in host memory, training and test apart.

    `train_images` and `test_images` are uint8 (M, C, H, W), C-contiguous, values 0..255, or both float32 as the network is to see them;
    `train_labels` and `test_labels` are int32 (M), or all None with `classes` when the set has no labels. `masks` has the class of every pixel, None
    where the set says none. `source` says in words where the images came from. `name` is what `load` takes to read the same again.

    Raises ValueError if arrays do not fit each other or this description.
    """

    name: str
    source: str
    train_images: np.ndarray
    train_labels: np.ndarray | None
    test_images: np.ndarray
    test_labels: np.ndarray | None
    classes: tuple[str, ...] | None
    masks: Masks | None = None

    def __post_init__(self) -> None:
        _check_names(self.classes)
        if self.train_images.shape[1:] != self.test_images.shape[1:]:
            raise ValueError(f"{self.name}: training images are {self.train_images.shape[1:]}, test images {self.test_images.shape[1:]}")
        if self.train_images.dtype != self.test_images.dtype:
            raise ValueError(f"{self.name}: training images are {self.train_images.dtype}, test images {self.test_images.dtype}")
        for split, images, labels in (
            ("training", self.train_images, self.train_labels),
            ("test", self.test_images, self.test_labels),
        ):
            refuse_masked(images, f"{self.name}: {split} images")
            refuse_masked(labels, f"{self.name}: {split} labels")
            if images.dtype not in (np.uint8, np.float32) or images.ndim != 4 or not images.flags.c_contiguous or images.size == 0:
                raise ValueError(
                    f"{self.name}: {split} images must be uint8 or float32 (M, C, H, W), C-contiguous and not empty: {images.dtype} {images.shape}"
                )
            if (labels is None) != (self.classes is None):
                raise ValueError(f"{self.name}: {split} labels and class names go together")
            if labels is not None and (labels.dtype != np.int32 or labels.shape != images.shape[:1]):
                raise ValueError(f"{self.name}: {split} labels must be int32 ({len(images)},): {labels.dtype} {labels.shape}")
        for images, masks in ((self.train_images, self.masks.train), (self.test_images, self.masks.test)) if self.masks else ():
            if masks.shape != (len(images), *images.shape[2:]):
                raise ValueError(f"{self.name}: masks are {masks.shape} for images of {images.shape}")

    def __repr__(self) -> str:
        size = "×".join(map(str, self.train_images.shape[1:]))
        classes = f", {len(self.classes)} classes" if self.classes else ", no labels"
        masks = f", masks of {len(self.masks.classes)} classes" if self.masks else ""
        counts = f"{len(self.train_images):,} training and {len(self.test_images):,} test images"
        return f"<Dataset {self.name}: {counts} of {size}, {self.train_images.dtype}{classes}{masks}>"

    def cut(self, limit: int | None) -> Dataset:
        """The first `limit` images of each split (all of them if None or fewer). Raises ValueError if `limit` < 1."""
        if limit is None:
            return self
        if limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")

        def first(array: np.ndarray) -> np.ndarray:
            # A copy, so that the rest of a large set can be freed.
            return array if len(array) <= limit else array[:limit].copy()

        return replace(
            self,
            train_images=first(self.train_images),
            train_labels=None if self.train_labels is None else first(self.train_labels),
            test_images=first(self.test_images),
            test_labels=None if self.test_labels is None else first(self.test_labels),
            masks=None if self.masks is None else replace(self.masks, train=first(self.masks.train), test=first(self.masks.test)),
        )
