"""This module keeps features in memory, from the encoder to the kernel matrix without the disk; `features.py` has the same on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from nbcnn.classify.feature_writer import FeatureWriter, publish
from nbcnn.classify.features import SPLITS, Features, Origin, identity
from nbcnn.files.quote import brief

Opened = tuple[list[tuple[np.ndarray, ...]], np.ndarray, np.ndarray, Origin, str, Callable[[], str]]
"""Features in a list of one, to be taken out and freed; labels of training and test images; origin; hash; what waits for the hash and gives it."""


class Rows:
    """The rows of one set of features, float32 (count, width), written in order like those of a `FeatureWriter` and hashed in a thread beside.

    With `file` the writer of the same set gets them too, and does the hashing. Raises ValueError for rows that are not the next ones.
    """

    def __init__(self, split: str, count: int, width: int, file: FeatureWriter | None = None) -> None:
        self.split, self.rows = split, 0
        self.array: np.ndarray | None = np.empty((count, width), np.float32)
        self._file, self._hash = file, hashlib.sha256()
        self._waiting: list[Future[None]] = []
        self._thread = None if file else ThreadPoolExecutor(1, thread_name_prefix="nbcnn-hash")

    def write(self, offset: int, block: np.ndarray) -> None:
        """Take `block`, (n, width) floats, as the rows from `offset` on."""
        assert self.array is not None, "the rows were taken out"
        part = self.array[offset : offset + len(block)]
        if offset != self.rows or part.shape != block.shape:
            raise ValueError(f"{self.split}: rows {offset} of shape {block.shape} where row {self.rows} of {self.array.shape} is due")
        part[:] = block
        if self._file is not None:
            self._file.write(offset, part)
        elif self._thread is not None:
            self._waiting.append(self._thread.submit(self._hash.update, part.data))
        self.rows += len(block)

    def sha256(self) -> str:
        """The hash of all rows, when they are hashed."""
        for each in self._waiting:
            each.result()
        self._waiting.clear()
        return self._hash.hexdigest()

    def close(self) -> None:
        """End the thread; what waits to be hashed is dropped."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)


class Kept:
    """Features of a data set in memory: training and test set, and of four sets those of the mirrored images; a context manager.

    `files` are their writers, in the same order, if the features are to be on disk as well; `publish` puts the files in place in a thread
    beside what follows.
    """

    def __init__(self, origin: Origin, labels: tuple[np.ndarray | None, ...], rows: list[Rows], files: list[FeatureWriter] | None = None) -> None:
        self.origin, self.labels, self.rows, self.files = origin, labels, rows, files or []
        self._publishing: Future[str] | None = None
        self._sha256 = ""

    def opened(self) -> Opened:
        """What a classifier is trained on: the arrays in a list of one, to be taken out and freed; labels; origin; no hash yet, and what waits
        for it. The arrays are given out once. Raises DataMissing where the data set has no labels."""
        from nbcnn.datasets import DataMissing

        arrays: list[np.ndarray] = []
        train_labels, test_labels = self.labels
        if train_labels is None or test_labels is None:
            raise DataMissing(f"{brief(self.origin.dataset)} has no labels to classify by; --dataset digits and cifar10 have")
        for each in self.rows:
            assert each.array is not None, "the features were taken out"
            arrays.append(each.array)
            each.array = None
        return [tuple(arrays)], train_labels, test_labels, self.origin, "", self.sha256

    def publish(self, folder: Any) -> None:
        """Begin to put the files in place (`feature_writer.publish`), if there are any."""
        if self.files:
            train, test, *mirrored = self.files
            pool = ThreadPoolExecutor(1, thread_name_prefix="nbcnn-publish")
            self._publishing = pool.submit(publish, folder, self.origin, train, test, (mirrored[0], mirrored[1]) if mirrored else None)
            pool.shutdown(wait=False)

    def sha256(self) -> str:
        """What identifies the features, equal to that of their files, when they are hashed and the files in place. Raises as `publish`."""
        if self._publishing is not None:
            self._sha256 = self._publishing.result()
        elif not self._sha256:
            splits: dict[str, dict[str, Any]] = {}
            for name, rows, labels in zip(SPLITS, self.rows, self.labels, strict=False):
                hashed = None if labels is None else hashlib.sha256(np.ascontiguousarray(labels, "<i4").data).hexdigest()
                splits[name] = {"count": rows.rows, "sha256": rows.sha256(), "labels_sha256": hashed}
            for name, rows in zip(SPLITS, self.rows[len(SPLITS) :], strict=False):
                splits[name]["mirrored_sha256"] = rows.sha256()
            self._sha256 = identity(splits)
        return self._sha256

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: object) -> None:
        if self._publishing is not None:  # the writers must not go while their files are put in place
            self._publishing.exception()
        for rows in self.rows:
            rows.close()


def opened(features: Features, mirrored: bool = True) -> Opened:
    """`Kept.opened` of features that were read and verified."""
    sets: tuple[np.ndarray, ...] = (features.train, features.test)
    if mirrored and features.train_mirrored is not None and features.test_mirrored is not None:
        sets += (features.train_mirrored, features.test_mirrored)
    assert features.train_labels is not None
    assert features.test_labels is not None
    return [sets], features.train_labels, features.test_labels, features.origin, features.sha256, lambda: features.sha256
