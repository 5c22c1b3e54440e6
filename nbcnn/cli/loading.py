"""This module reads the images of a command in a thread of its own, beside the imports and the opening of the GPU that follow.

Reading a file, copying and CRC-32 let other threads run, so of CIFAR-10's 0.3 s next to nothing is left to wait for. What would be downloaded is
not read ahead: a mistake on the command line must not start that.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import numpy as np

from nbcnn import datasets
from nbcnn.datasets import DataError, Dataset, cifar10, own

T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """A data set, the CRC-32 of its training images, and that of its test images and labels."""

    data: Dataset
    train_crc: int
    others_crc: int


Reading = Callable[[], Loaded]
"""Waits for the data and gives it. Raises DataError."""


def load(flags: SimpleNamespace) -> Loaded:
    """Read the images that the flags name. Raises DataError."""
    named = own.named(flags.dataset, flags.size, flags.test_share)
    data = datasets.load(named, data_dir=flags.data_dir, limit=flags.limit, progress=not flags.quiet)
    return Loaded(data, zlib.crc32(data.train_images.data), crc(data.test_images, data.train_labels, data.test_labels))


def reading(flags: SimpleNamespace) -> Reading:
    """Begin to read the images that the flags name, if they are on this machine; the function that comes back waits for them, or reads them.

    What is read is what the flags say now: the thread has a copy, so a later change cannot reach it.
    """
    frozen = SimpleNamespace(**vars(flags))
    return ahead_if_here(frozen.dataset, Path(frozen.data_dir), lambda: load(frozen))


def ahead_if_here(name: str, folder: Path, task: Callable[[], T]) -> Callable[[], T]:
    """`ahead(task)`, which reads the data set `name`, if nothing of it has to be downloaded into `folder`; else `task` itself."""
    return ahead(task) if _is_here(name, folder) else task


def ahead(task: Callable[[], T]) -> Callable[[], T]:
    """Run `task` in a thread; the function that comes back waits for it, and gives or raises what it gave or raised."""
    given: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            given.append(task())
        except BaseException as error:  # for whoever waits
            raised.append(error)

    # No daemon: it imports extension modules, and Python that ends meanwhile ends in a segmentation fault.
    thread = threading.Thread(target=run, name="reading ahead")
    thread.start()

    def result() -> T:
        thread.join()
        if raised:
            raise raised[0]
        return given[0]

    return result


def _is_here(name: str, folder: Path) -> bool:
    """Nothing of the data set has to be downloaded."""
    if name not in ("auto", "cifar10"):
        return name in datasets.NAMES or own.is_own(name)
    try:
        return cifar10.find(folder) is not None
    except (DataError, OSError):  # raised again where the data is asked for
        return False


def crc(*arrays: np.ndarray | None) -> int:
    """CRC-32 of the given arrays, less those that are None."""
    made = 0
    for array in arrays:
        made = zlib.crc32(b"" if array is None else np.ascontiguousarray(array).data, made)
    return made
