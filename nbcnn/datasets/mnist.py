"""This module reads MNIST, or any set of grey images with labels 0..9 in its idx format, from local files, plain or gzipped.

An idx file starts with two zero bytes, a type byte (8: uint8), the number of dimensions, and each dimension as a big-endian uint32.
Source: Y. LeCun, C. Cortes, C. J. C. Burges, "The MNIST database of handwritten digits", 1998.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO

import numpy as np

from nbcnn.datasets.dataset import DataCorrupt, DataMissing, Dataset
from nbcnn.files import regular

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
REMEDY = "Delete it and get the file again (data/README.md says how)."

LABELS = 10
_LARGEST = 1 << 30
_DEFLATE = 1032
"""Bytes that a byte of a gzipped file can become at the most."""


@dataclass(frozen=True)
class Family:
    """A set in MNIST's format: its title, where it may lie below the data folder, and its classes 0..9."""

    title: str
    source: str
    below: tuple[str, ...]
    classes: tuple[str, ...]


FAMILIES = {
    "mnist": Family("MNIST", "Y. LeCun, C. Cortes, C. J. C. Burges, 1998", ("", "mnist", "MNIST/raw"), tuple("0123456789")),
    # Its files have MNIST's names, so the data folder itself is no place to look for them.
    "fashion-mnist": Family(
        "Fashion-MNIST",
        "H. Xiao, K. Rasul, R. Vollgraf, 2017",
        ("fashion-mnist", "FashionMNIST/raw"),
        ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"),
    ),
}


def load(folder: Path, name: str = "mnist") -> Dataset:
    """The set `name` of `FAMILIES` from one of its places below `folder`. Raises DataMissing or DataCorrupt."""
    family = FAMILIES[name]
    paths = find(folder, name)
    train_images, train_labels = _split(paths[0], paths[1])
    test_images, test_labels = _split(paths[2], paths[3])
    if train_images.shape[1:] != test_images.shape[1:]:
        raise DataCorrupt(paths[2], 8, f"test images are {test_images.shape[2:]}, training images {train_images.shape[2:]}", REMEDY)
    source = f"{family.title} ({family.source}), read from {paths[0].parent}"
    return Dataset(name, source, train_images, train_labels, test_images, test_labels, family.classes)


def find(folder: Path, name: str = "mnist") -> list[Path]:
    """The four files in the order of `FILES`, all in one place. Raises DataMissing, saying what was looked for."""
    family = FAMILIES[name]
    best: list[Path] = []
    places = [folder / part for part in family.below]
    for place in places:
        paths = [path for path in (_file(place, file) for file in FILES) if path is not None]
        if len(paths) == len(FILES):
            return paths
        best = max(best, paths, key=len)
    where = ", ".join(map(str, places[:-1])) + f" and {places[-1]}"
    some = f"\nOnly {', '.join(path.name for path in best)} in {best[0].parent}." if best else ""
    remedy = "\nPut the four files into one of these folders; they are not downloaded (data/README.md says where to get them)."
    raise DataMissing(f"{family.title} was not found: looked in {where} for\n" + "\n".join(f"  {file}[.gz]" for file in FILES) + some + remedy)


def _file(place: Path, name: str) -> Path | None:
    # Some archives unpack to "train-images.idx3-ubyte".
    dotted = name.replace("-idx", ".idx")
    return next((place / form for form in (name, f"{name}.gz", dotted, f"{dotted}.gz") if (place / form).is_file()), None)


def _split(images_path: Path, labels_path: Path) -> tuple[np.ndarray, np.ndarray]:
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise DataCorrupt(labels_path, 4, f"{len(labels):,} labels for the {len(images):,} images of {images_path.name}", REMEDY)
    wrong = np.flatnonzero(labels >= LABELS)
    if wrong.size:
        raise DataCorrupt(labels_path, 8 + int(wrong[0]), f"label {labels[wrong[0]]}; labels are 0..9", REMEDY)
    return images[:, None], labels.astype(np.int32)


def read_idx(path: Path, ndim: int) -> np.ndarray:
    """The uint8 array of `ndim` dimensions in the idx file at `path`. Raises DataCorrupt; offsets count in the uncompressed file."""
    with regular.opened(path) as raw:
        if path.suffix != ".gz":
            return _read_idx(raw, path, ndim, path.stat().st_size)
        with gzip.GzipFile(fileobj=raw) as plain:
            try:
                return _read_idx(plain, path, ndim, path.stat().st_size * _DEFLATE)
            except (gzip.BadGzipFile, zlib.error, EOFError) as error:
                raise DataCorrupt(path, raw.tell(), f"the compressed file is damaged here or shortly before ({error})", REMEDY) from error


def _read_idx(file: IO[bytes] | gzip.GzipFile, path: Path, ndim: int, most: int) -> np.ndarray:
    """Read like `read_idx` from an open file, which has at most `most` bytes when it is not compressed."""
    header = file.read(4 + 4 * ndim)
    magic = bytes((0, 0, 8, ndim))
    if header[:4] != magic:
        raise DataCorrupt(path, 0, f"starts with {header[:4].hex(' ') or 'nothing'}, an idx file of {ndim}-D bytes with {magic.hex(' ')}", REMEDY)
    if len(header) < 4 + 4 * ndim:
        raise DataCorrupt(path, len(header), f"the file ends inside its header of {4 + 4 * ndim} bytes", REMEDY)
    shape = tuple(int.from_bytes(header[4 * d : 4 * d + 4], "big") for d in range(1, ndim + 1))
    count = prod(shape)
    if not 0 < count <= _LARGEST:
        raise DataCorrupt(path, 4, f"the header announces an array of shape {shape}", REMEDY)
    # One byte more than announced: shows a file that is too long, and makes gzip check its checksum. Reading takes memory for all that is
    # asked for, so no more is asked for than there can be.
    body = file.read(min(count, most) + 1)
    if len(body) != count:
        problem = f"more than the {count:,} bytes" if len(body) > count else f"{len(body):,} bytes instead of the {count:,}"
        raise DataCorrupt(path, len(header) + min(len(body), count), f"{problem} that the header announces for shape {shape}", REMEDY)
    return np.frombuffer(body, np.uint8).reshape(shape).copy()
