"""This module stores features on disk: `extract_features.py` writes them and `python -m nbcnn classify` reads them.

A folder with, for each split of "train" and "test":

    train_features.npy      float32 (n, F), one row per image in the data set's order; read memory-mapped
    train_labels.npy        int32 (n,); absent if the data set has no labels
    features.json           where all of it came from, and the SHA-256 of every array; written last

With storage "csv" the arrays are `features_train.csv` and `features_test.csv` instead: one line per image, its label (-1 if
there is none), then its F values, printed so that they read back as the same float32.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from nbcnn.datasets import DataCorrupt, DataMissing
from nbcnn.files import document
from nbcnn.files.atomic import DiskFull, replace_bytes, temporary

SPLITS = ("train", "test")
STORAGES = ("npy", "csv")
_FORMAT, _VERSION, _INDEX = "nbcnn-features", 1, "features.json"
_AGAIN = "Extract the features again: python extract_features.py RUN"
_HEADER_BYTES = 128
# A float32 takes 15 characters and a comma at the most ("-1.23456789e-38,"), about 11 in the mean.
_CSV_BYTES_PER_VALUE = 16
_MOST_VALUES = 1 << 46
_SPLIT = {"count": int, "sha256": str, "labels_sha256": (str, None)}
_FORM = {
    "storage": str,
    "width": int,
    "splits": {"train": _SPLIT, "test": _SPLIT},
    "sha256": str,
    "origin": {
        **dict.fromkeys(("run", "checkpoint", "checkpoint_sha256", "dataset", "source", "mode"), str),
        **{"classes": ([str], None), "image_shape": [int], "code_shape": [int], "gpu": (str, None), "precision?": str, "model?": (str, None)},
    },
}
_NPY_PREAMBLE, _LONGEST_HEADER = 10, 1 << 10
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00(?P<length>..)"
    rb"\{'descr': '(?P<kind>[<>|=]?[a-zA-Z]\d{1,2})', 'fortran_order': (?P<columns>True|False), 'shape': \((?P<shape>[0-9, ]{0,80})\), \} *\n",
    re.DOTALL,
)
"""The header of an npy file of numbers, as NumPy has written it since version 1.0 of the format."""
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Origin:
    """Where features came from.

    `run` is the run folder, `checkpoint` the file in it with `checkpoint_sha256`; `source` says where the images were found;
    `classes` is None for a data set without labels; `code_shape` is the shape of one image's code before it was flattened.
    `precision` is fp32 for features that were written before there were others. `model` is the name of the network whose encoder made
    them (`nbcnn.nn.models.MODELS`), None for features that were written before they said so.
    """

    run: str
    checkpoint: str
    checkpoint_sha256: str
    dataset: str
    source: str
    classes: tuple[str, ...] | None
    image_shape: tuple[int, ...]
    code_shape: tuple[int, ...]
    mode: str
    gpu: str | None
    precision: str = "fp32"
    model: str | None = None


@dataclass(frozen=True)
class Features:
    """Features of a data set: float32 (n, F) arrays (memory-mapped if stored as npy), int32 labels or None.

    `sha256` identifies features and labels, whatever they were stored as.
    """

    train: np.ndarray
    test: np.ndarray
    train_labels: np.ndarray | None
    test_labels: np.ndarray | None
    origin: Origin
    sha256: str


class FeatureWriter:
    """Writes one split of `count` rows of `width` features into `folder`; a context manager.

        with FeatureWriter(folder, "train", 50000, 8192, labels=a) as train, FeatureWriter(folder, "test", 10000, 8192, labels=b) as test:
            train.write(0, block)                   # rows in order, each once
            …
            publish(folder, origin, train, test)

    Everything goes to temporary names (`partial`) until `publish`; leaving the context without it removes them, and features that were
    in the folder before stay as they were. Whoever writes holds the folder (`nbcnn.files.lock`).

    Raises ValueError for labels of another count or an unknown storage, DiskFull if the folder's file system has not the room.
    """

    def __init__(
        self, folder: str | os.PathLike[str], split: str, count: int, width: int, *, labels: np.ndarray | None = None, storage: str = "npy"
    ) -> None:
        if split not in SPLITS or storage not in STORAGES:
            raise ValueError(f"split must be one of {SPLITS} and storage one of {STORAGES}, got {split!r} and {storage!r}")
        if labels is not None and labels.shape != (count,):
            raise ValueError(f"{count} {split} images need {count} labels, got {labels.shape}")
        self.folder, self.split, self.count, self.width, self.storage = Path(folder), split, count, width, storage
        self.labels = None if labels is None else np.ascontiguousarray(labels, "<i4")
        self.path = self.folder / (f"{split}_features.npy" if storage == "npy" else f"features_{split}.csv")
        self.partial = temporary(self.path)
        self.rows = 0
        self._hash = hashlib.sha256()
        self._line = "%d" + ",%.9g" * width + "\n"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check_room()
        try:
            self._file = open(self.partial, "wb")  # noqa: SIM115
            if storage == "npy":
                self._begin_npy()
        except OSError as error:
            self._abandon()
            raise self._explained(error) from error
        except BaseException:
            self._abandon()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of disk that this split takes (an upper bound for csv)."""
        per_value = 4 if self.storage == "npy" else _CSV_BYTES_PER_VALUE
        return _HEADER_BYTES + self.count * (self.width * per_value + 12)

    def _check_room(self) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < self.nbytes:
            raise DiskFull(f"{self.path} needs {self.nbytes:,} bytes, {free:,} are free; features already in {self.folder} are untouched")

    def _begin_npy(self) -> None:
        header = {"descr": "<f4", "fortran_order": False, "shape": (self.count, self.width)}
        np.lib.format.write_array_header_1_0(self._file, header)
        self._file.flush()
        # Reserve everything now: the second split's check then sees what is really left.
        if hasattr(os, "posix_fallocate") and self.count * self.width:
            try:
                os.posix_fallocate(self._file.fileno(), 0, self._file.tell() + 4 * self.count * self.width)
            except OSError as error:
                # File systems without reservation say so in several ways; only "full" is a reason to stop.
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise

    def write(self, offset: int, block: np.ndarray) -> None:
        """Append `block`, (n, width) floats, the rows from `offset` on; rows come in order.

        Raises ValueError if they do not, or if they do not fit; DiskFull if the disk does not hold them.
        """
        if offset != self.rows or block.ndim != 2 or block.shape[1] != self.width or offset + len(block) > self.count:
            raise ValueError(
                f"{self.split}: rows {offset} to {offset + len(block)} of shape {block.shape} after {self.rows} of ({self.count}, {self.width})"
            )
        block = np.ascontiguousarray(block, "<f4")
        self._hash.update(block.data)
        try:
            if self.storage == "npy":
                self._file.write(block.data)
            else:
                labels = np.full(self.count, -1) if self.labels is None else self.labels
                for label, row in zip(labels[offset:].tolist(), block, strict=False):
                    self._file.write((self._line % (label, *row.tolist())).encode())
        except OSError as error:
            raise self._explained(error) from error
        self.rows += len(block)

    def adopt(self, end: int) -> None:
        """Take the rows up to `end` as other ranks wrote them (`FeaturePart`), by reading them back. Raises ValueError if they are not there."""
        with open(self.partial, "rb") as file:
            file.seek(_HEADER_BYTES + 4 * self.rows * self.width)
            left = 4 * (end - self.rows) * self.width
            while left:
                block = file.read(min(left, _CHUNK_BYTES))
                if not block:
                    raise ValueError(f"{self.split}: another rank's rows are missing; is {self.folder} the same folder for all ranks?")
                self._hash.update(block)
                left -= len(block)
        self.rows = end

    def _explained(self, error: OSError) -> OSError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DiskFull(f"{self.path} needs {self.nbytes:,} bytes and the disk is full; features already in {self.folder} are untouched")
        return error

    def _finish(self) -> dict[str, Any]:
        """Make the temporary file durable and describe it. Raises ValueError if rows are missing."""
        if self.rows != self.count:
            raise ValueError(f"{self.split}: {self.rows} of {self.count} rows were written")
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise self._explained(error) from error
        labels = None if self.labels is None else hashlib.sha256(self.labels.data).hexdigest()
        return {"count": self.count, "sha256": self._hash.hexdigest(), "labels_sha256": labels}

    def _abandon(self) -> None:
        if file := getattr(self, "_file", None):
            # On a full disk the buffer cannot be flushed; the file goes away anyway.
            with contextlib.suppress(OSError):
                file.close()
        self.partial.unlink(missing_ok=True)

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._abandon()


class FeaturePart:
    """The rows from `first` on that a rank writes into the npy file that rank 0's `FeatureWriter` has begun, as `partial`; on disk when this
    context ends."""

    def __init__(self, partial: Path, split: str, first: int, width: int) -> None:
        self.split, self.rows, self._width = split, first, width
        self._file = open(partial, "r+b")  # noqa: SIM115
        self._file.seek(_HEADER_BYTES + 4 * first * width)

    def write(self, offset: int, block: np.ndarray) -> None:
        """Append rows like `FeatureWriter.write`."""
        if offset != self.rows or block.shape[1:] != (self._width,):
            raise ValueError(f"{self.split}: rows {offset} of shape {block.shape} where row {self.rows} of {self._width} values is due")
        self._file.write(np.ascontiguousarray(block, "<f4").data)
        self.rows += len(block)

    def __enter__(self) -> FeaturePart:
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


def publish(folder: str | os.PathLike[str], origin: Origin, train: FeatureWriter, test: FeatureWriter) -> str:
    """Put the written splits and their description in place of what `folder` held; return the features' SHA-256.

    `features.json` comes last: until it describes the new arrays, readers report the folder as damaged instead of mixing
    old and new. Raises ValueError if rows are missing or the splits do not belong together, DiskFull as `FeatureWriter`.
    """
    if train.width != test.width or train.storage != test.storage or (train.labels is None) != (test.labels is None):
        raise ValueError("training and test features differ in width, storage, or in having labels")
    if (origin.classes is None) != (train.labels is None):
        raise ValueError("labels and class names go together")
    folder = Path(folder)
    writers = {"train": train, "test": test}
    splits = {name: writer._finish() for name, writer in writers.items()}
    index: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "storage": train.storage,
        "dtype": "float32",
        "width": train.width,
        "splits": splits,
        "sha256": _identity(splits),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "origin": asdict(origin),
    }
    for name, writer in writers.items():
        os.replace(writer.partial, writer.path)
        if writer.storage == "npy" and writer.labels is not None:
            replace_bytes(folder / f"{name}_labels.npy", _npy_bytes(writer.labels))
    replace_bytes(folder / _INDEX, (json.dumps(index, indent=1) + "\n").encode())
    for name in SPLITS:
        stale = [f"features_{name}.csv"] if train.storage == "npy" else [f"{name}_features.npy", f"{name}_labels.npy"]
        if train.labels is None:
            stale.append(f"{name}_labels.npy")
        for file in stale:
            (folder / file).unlink(missing_ok=True)
    return index["sha256"]


def _npy_bytes(array: np.ndarray) -> bytes:
    from io import BytesIO

    buffer = BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _identity(splits: dict[str, dict[str, Any]]) -> str:
    """One hash for features and labels of both splits."""
    return hashlib.sha256(json.dumps([splits[name] for name in SPLITS], sort_keys=True).encode()).hexdigest()


def read_features(folder: str | os.PathLike[str], *, verify: bool = True) -> Features:
    """The features in `folder`. `verify` reads every value once, for NaN and for the SHA-256 in `features.json`.

    Raises DataMissing if there are no finished features; DataCorrupt for a file that is truncated, altered or not ours, for
    NaN or Inf, and for labels that do not fit the features.
    """
    folder = Path(folder)
    index = _read_index(folder)
    arrays: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}
    origin = _read_origin(index)
    for name in SPLITS:
        features, labels = (_read_npy if index["storage"] == "npy" else _read_csv)(folder, name, index)
        if labels is not None and origin.classes is not None and labels.size and not 0 <= labels.min() <= labels.max() < len(origin.classes):
            bad = int(np.flatnonzero((labels < 0) | (labels >= len(origin.classes)))[0])
            raise DataCorrupt(folder / _INDEX, 0, f"{name} image {bad} has label {labels[bad]}, there are {len(origin.classes)} classes", _AGAIN)
        if verify:
            _verify(folder, name, index, features, labels)
        arrays[name] = features, labels
    (train, train_labels), (test, test_labels) = arrays["train"], arrays["test"]
    return Features(train, test, train_labels, test_labels, origin, index["sha256"])


class Verification:
    """The reading of every value of `features`, which `read_features` did not verify, in a thread beside whatever uses them meanwhile.

    Hashing takes a core and the disk; training a machine on a GPU takes neither. `finish` must be called before what was made is believed.
    """

    def __init__(self, folder: Path, features: Features) -> None:
        self._folder, self._features = folder, features
        self._error: BaseException | None = None
        # A daemon: a command that fails or is interrupted meanwhile does not wait for it.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            index, found = _read_index(self._folder), self._features
            for name, values, labels in (("train", found.train, found.train_labels), ("test", found.test, found.test_labels)):
                _verify(self._folder, name, index, values, labels)
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        """Wait until every value was read; raises DataCorrupt if they are not what features.json describes. May be called again."""
        self._thread.join()
        if self._error is not None:
            raise self._error


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / _INDEX
    if not path.is_file():
        what = "is not there" if not folder.exists() else f"has no {_INDEX}: no features were written there, or not to the end"
        raise DataMissing(f"{folder} {what}. To make them: python extract_features.py RUN")
    try:
        index = document.load(path)
        document.fits(index, {"format": str, "version": int}, '"features"')
        if index["format"] != _FORMAT:
            raise ValueError(f'"format" is {index["format"]!r}, not {_FORMAT!r}')
        if index["version"] != _VERSION:
            raise ValueError(f'"version" is {index["version"]!r}, this program reads {_VERSION}')
        document.fits(index, _FORM, '"features"')
        counts = [index["splits"][name]["count"] for name in SPLITS]
        if index["storage"] not in STORAGES or index["width"] < 1 or min(counts) < 0 or max(counts) * index["width"] >= _MOST_VALUES:
            raise ValueError('"storage", "width" or "count" is not one of ours')
        if index["sha256"] != _identity(index["splits"]):
            raise ValueError('"sha256" does not follow from "splits"')
        _check_origin(index["origin"], index["splits"])
    except ValueError as error:
        raise DataCorrupt(path, 0, f"not a description of features ({error})", _AGAIN) from error
    return index


def _check_origin(origin: dict[str, Any], splits: dict[str, Any]) -> None:
    """Raise ValueError unless `origin` goes with the `splits`."""
    known = {field.name for field in fields(Origin)}
    if not origin.keys() <= known:
        raise ValueError(f'"origin" must name exactly {", ".join(sorted(known))}')
    if len(origin["image_shape"]) != 3 or not all(0 < extent < 1 << 16 for extent in (*origin["image_shape"], *origin["code_shape"])):
        raise ValueError('"image_shape" or "code_shape" of "origin" is no shape')
    if any((splits[name]["labels_sha256"] is None) != (origin["classes"] is None) for name in SPLITS):
        raise ValueError("labels and class names go together")


def _read_origin(index: dict[str, Any]) -> Origin:
    stored = index["origin"]
    tuples = {key: tuple(stored[key]) for key in ("classes", "image_shape", "code_shape") if stored[key] is not None}
    return Origin(**{**stored, **tuples})


def _read_npy(folder: Path, name: str, index: dict[str, Any]) -> tuple[np.ndarray, np.ndarray | None]:
    split = index["splits"][name]
    features = _map(folder / f"{name}_features.npy", "<f4", (split["count"], index["width"]))
    if split["labels_sha256"] is None:
        return features, None
    return features, np.array(_map(folder / f"{name}_labels.npy", "<i4", (split["count"],)))


def _map(path: Path, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """A read-only memory map of an npy file that must be `dtype` and `shape`, and hold nothing else.

    Not by np.load, which reads archives and pickles too, and evaluates the header.
    """
    if not path.is_file():
        raise DataMissing(f"{path} is missing beside {_INDEX}. {_AGAIN}")
    with open(path, "rb") as file:
        found = _NPY.match(file.read(_LONGEST_HEADER))
    if found is None:
        raise DataCorrupt(path, 0, "truncated or no npy file of numbers", _AGAIN)
    kind, columns, extents = found["kind"].decode(), found["columns"] == b"True", tuple(int(n) for n in found["shape"].split(b",") if n.strip())
    if kind != dtype or columns or extents != shape:
        order = " by columns" if columns else ""
        raise DataCorrupt(path, 0, f"holds {_words(kind)} {extents}{order}, {_INDEX} says {_words(dtype)} {shape}", _AGAIN)
    nbytes, wanted = path.stat().st_size, found.end() + math.prod(shape) * 4
    if nbytes != wanted or int.from_bytes(found["length"], "little") != found.end() - _NPY_PREAMBLE:
        raise DataCorrupt(path, min(nbytes, wanted), f"truncated or too long: {nbytes:,} bytes, {shape} needs {wanted:,}", _AGAIN)
    return np.memmap(path, dtype, "r", found.end(), shape) if math.prod(shape) else np.empty(shape, dtype)


def _words(kind: str) -> str:
    """NumPy's name of a type."""
    try:
        return np.dtype(kind).name
    except TypeError:
        return kind


def _read_csv(folder: Path, name: str, index: dict[str, Any]) -> tuple[np.ndarray, np.ndarray | None]:
    path = folder / f"features_{name}.csv"
    count, width = index["splits"][name]["count"], index["width"]
    if not path.is_file():
        raise DataMissing(f"{path} is missing beside {_INDEX}. {_AGAIN}")
    nbytes, most = path.stat().st_size, count * (width + 1) * _CSV_BYTES_PER_VALUE
    if nbytes > most or (count and not nbytes):
        raise DataCorrupt(path, 0, f"has {nbytes:,} bytes; {count} lines of {width + 1} values have 1 to {most:,}", _AGAIN)
    table = np.empty((0, width + 1), np.float32)
    try:
        if count:
            table = np.loadtxt(path, np.float32, delimiter=",", ndmin=2, comments=None, encoding="ascii")
    except ValueError as error:
        raise DataCorrupt(path, 0, f"not a table of numbers ({error})", _AGAIN) from error
    if table.shape != (count, width + 1):
        raise DataCorrupt(path, 0, f"holds {len(table)} lines of {table.shape[1]} values, {_INDEX} says {count} of {width + 1}", _AGAIN)
    if index["splits"][name]["labels_sha256"] is None:
        return table[:, 1:], None
    labels = table[:, 0]
    if not (np.abs(labels) < 1 << 24).all():
        raise DataCorrupt(path, 0, f"the label of {name} image {int(np.argmin(np.abs(labels) < 1 << 24))} is no small number", _AGAIN)
    return table[:, 1:], labels.astype(np.int32)


def _verify(folder: Path, name: str, index: dict[str, Any], features: np.ndarray, labels: np.ndarray | None) -> None:
    """Raise DataCorrupt unless all values are finite and hash to what `index` says."""
    split, digest = index["splits"][name], hashlib.sha256()
    path = folder / (f"{name}_features.npy" if index["storage"] == "npy" else f"features_{name}.csv")
    for start, rows in _chunks(features):
        if not np.isfinite(rows).all():
            row, column = np.argwhere(~np.isfinite(rows))[0]
            offset = _HEADER_BYTES + 4 * ((start + int(row)) * index["width"] + int(column)) if index["storage"] == "npy" else 0
            raise DataCorrupt(path, offset, f"value {column} of {name} image {start + row} is {rows[row, column]}", _AGAIN)
        digest.update(np.ascontiguousarray(rows, "<f4").data)
    if digest.hexdigest() != split["sha256"]:
        raise DataCorrupt(path, 0, f"is not the file that {_INDEX} describes (its SHA-256 differs)", _AGAIN)
    if labels is not None and hashlib.sha256(np.ascontiguousarray(labels, "<i4").data).hexdigest() != split["labels_sha256"]:
        raise DataCorrupt(path, 0, f"the {name} labels are not those that {_INDEX} describes (their SHA-256 differs)", _AGAIN)


def _chunks(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, rows) pieces of about 16 MiB."""
    rows = max(1, _CHUNK_BYTES // (4 * array.shape[1]))
    for start in range(0, len(array), rows):
        yield start, array[start : start + rows]
