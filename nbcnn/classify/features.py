"""This module reads features on disk, which `nbcnn extract` writes (`feature_writer.py`) and `nbcnn classify` uses.

A folder with, for each split of "train" and "test":

    train_features.npy      float32 (n, F), one row per image in the data set's order; read memory-mapped
    train_labels.npy        int32 (n,); absent if the data set has no labels
    train_mirrored.npy      float32 (n, F), the same of the mirrored images; only after `extract --mirror`
    features.json           where all of it came from, and the SHA-256 of every array; written last

With storage "csv" the arrays are `features_train.csv` and `features_test.csv` instead: one line per image, its label (-1 if
there is none), then its F values, printed so that they read back as the same float32. Mirrored images are stored as npy only.

A folder without mirrored images is of version 1 of the format, one with them of version 2, which earlier programs refuse.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.datasets import DataCorrupt, DataMissing
from nbcnn.files import document, npy, regular
from nbcnn.files.quote import quoted

SPLITS = ("train", "test")
STORAGES = ("npy", "csv")
FORMAT, INDEX = "nbcnn-features", "features.json"
VERSION, MIRRORED_VERSION = 1, 2
_AGAIN = "Extract the features again: python extract_features.py RUN"
HEADER_BYTES = 128
# A float32 takes 15 characters and a comma at the most ("-1.23456789e-38,"), about 11 in the mean.
CSV_BYTES_PER_VALUE = 16
_MOST_VALUES = 1 << 46
_SPLIT = {"count": int, "sha256": str, "labels_sha256": (str, None), "mirrored_sha256?": str}
ORIGIN_FORM = {
    **dict.fromkeys(("run", "checkpoint", "checkpoint_sha256", "dataset", "source", "mode"), str),
    **{"classes": ([str], None), "image_shape": [int], "code_shape": [int], "gpu": (str, None), "precision?": str, "model?": (str, None)},
    "layer?": (str, None),
}
"""The form of `Origin.noted`, in the index of features and in a classifier's file."""
_FORM = {
    "storage": str,
    "width": int,
    "splits": {"train": _SPLIT, "test": _SPLIT},
    "sha256": str,
    "origin": ORIGIN_FORM,
}
CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Origin:
    """Where features came from.

    `run` is the run folder, `checkpoint` the file in it with `checkpoint_sha256`; `source` says where the images were found;
    `classes` is None for a data set without labels; `code_shape` is the shape of one image's code before it was flattened.
    `precision` is fp32 for features that were written before there were others. `model` is the name of the network whose encoder made
    them (`nbcnn.nn.models.MODELS`), None for features that were written before they said so. `layer` is the layer whose output they are
    (`extract --at`), None for the code of a ready-made model.
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
    layer: str | None = None

    def noted(self) -> dict[str, Any]:
        """The origin as a JSON object, without a layer that is None: earlier programs know no `layer`."""
        return {name: value for name, value in asdict(self).items() if name != "layer" or value is not None}


@dataclass(frozen=True)
class Features:
    """Features of a data set: float32 (n, F) arrays (memory-mapped if stored as npy), int32 labels or None.

    `train_mirrored`, `test_mirrored` are the features of the mirrored images, None where they were not extracted. `sha256` identifies features
    and labels, whatever they were stored as.
    """

    train: np.ndarray
    test: np.ndarray
    train_labels: np.ndarray | None
    test_labels: np.ndarray | None
    origin: Origin
    sha256: str
    train_mirrored: np.ndarray | None = None
    test_mirrored: np.ndarray | None = None


def identity(splits: dict[str, dict[str, Any]]) -> str:
    """One hash for features and labels of both splits."""
    return hashlib.sha256(json.dumps([splits[name] for name in SPLITS], sort_keys=True).encode()).hexdigest()


def place_of(run: Path, dataset: str) -> Path | None:
    """Where features of `run` on a data set go by default: features/DATASET, or features/DATASET-RUN where that holds those of another run.

    None if both do.
    """
    for place in (Path("features") / dataset, Path("features") / f"{dataset}-{run.resolve().name}"):
        try:
            other = Path(document.load(place / INDEX)["origin"]["run"])
        except (OSError, ValueError, LookupError, TypeError):  # nothing is there that anybody could read
            return place
        if other.resolve() == run.resolve():
            return place
    return None


def read_features(folder: str | os.PathLike[str], *, verify: bool = True) -> Features:
    """The features in `folder`. `verify` reads every value once, for NaN and for the SHA-256 in `features.json`.

    Raises DataMissing if there are no finished features; DataCorrupt for a file that is truncated, altered or not ours, for
    NaN or Inf, and for labels that do not fit the features.
    """
    folder = Path(folder)
    index = _read_index(folder)
    arrays: dict[str, tuple[np.ndarray, np.ndarray | None, np.ndarray | None]] = {}
    origin = _read_origin(index)
    for name in SPLITS:
        features, labels = (_read_npy if index["storage"] == "npy" else _read_csv)(folder, name, index)
        if labels is not None and origin.classes is not None and labels.size and not 0 <= labels.min() <= labels.max() < len(origin.classes):
            bad = int(np.flatnonzero((labels < 0) | (labels >= len(origin.classes)))[0])
            raise DataCorrupt(folder / INDEX, 0, f"{name} image {bad} has label {labels[bad]}, there are {len(origin.classes)} classes", _AGAIN)
        mirrored = _map(mirrored_path(folder, name), "<f4", features.shape) if _has_mirrored(index) else None
        if verify:
            _verify(folder, name, index, features, labels, mirrored)
        arrays[name] = features, labels, mirrored
    (train, train_labels, train_mirrored), (test, test_labels, test_mirrored) = arrays["train"], arrays["test"]
    return Features(train, test, train_labels, test_labels, origin, index["sha256"], train_mirrored, test_mirrored)


def mirrored_path(folder: Path, split: str) -> Path:
    """The file of the features of the mirrored images of `split`."""
    return folder / f"{split}_mirrored.npy"


def _has_mirrored(index: dict[str, Any]) -> bool:
    return index["version"] == MIRRORED_VERSION


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
            _verify(self._folder, "train", index, found.train, found.train_labels, found.train_mirrored)
            _verify(self._folder, "test", index, found.test, found.test_labels, found.test_mirrored)
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        """Wait until every value was read; raises DataCorrupt if they are not what features.json describes. May be called again."""
        self._thread.join()
        if self._error is not None:
            raise self._error


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    if not path.is_file():
        if (folder / "images.txt").is_file():
            raise DataMissing(f"{folder} has features of image files, which have no labels. Of a labelled data set: python extract_features.py RUN")
        what = "is not there" if not folder.exists() else f"has no {INDEX}: no features were written there, or not to the end"
        raise DataMissing(f"{folder} {what}. To make them: python extract_features.py RUN")
    try:
        index = document.load(path)
        document.fits(index, {"format": str, "version": int}, '"features"')
        if index["format"] != FORMAT:
            raise ValueError(f'"format" is {quoted(index["format"])}, not {FORMAT!r}')
        if index["version"] not in (VERSION, MIRRORED_VERSION):
            raise ValueError(f'"version" is {quoted(index["version"])}, this program reads {VERSION} and {MIRRORED_VERSION}')
        document.fits(index, _FORM, '"features"')
        counts = [index["splits"][name]["count"] for name in SPLITS]
        if index["storage"] not in STORAGES or index["width"] < 1 or min(counts) < 0 or max(counts) * index["width"] >= _MOST_VALUES:
            raise ValueError('"storage", "width" or "count" is not one of ours')
        mirrored = _has_mirrored(index)
        if any(("mirrored_sha256" in index["splits"][name]) != mirrored for name in SPLITS) or (mirrored and index["storage"] != "npy"):
            raise ValueError('"version", "storage" and "mirrored_sha256" do not go together')
        if index["sha256"] != identity(index["splits"]):
            raise ValueError('"sha256" does not follow from "splits"')
        check_origin(index["origin"])
        if any((index["splits"][name]["labels_sha256"] is None) != (index["origin"]["classes"] is None) for name in SPLITS):
            raise ValueError("labels and class names go together")
    except ValueError as error:
        raise DataCorrupt(path, 0, f"not a description of features ({error})", _AGAIN) from error
    return index


def check_origin(origin: dict[str, Any]) -> None:
    """Raise ValueError unless `origin`, of ORIGIN_FORM, names what an `Origin` has, with shapes that are some."""
    known = {field.name for field in fields(Origin)}
    if not origin.keys() <= known:
        raise ValueError(f'"origin" must name exactly {", ".join(sorted(known))}')
    if len(origin["image_shape"]) != 3 or not all(0 < extent < 1 << 16 for extent in (*origin["image_shape"], *origin["code_shape"])):
        raise ValueError('"image_shape" or "code_shape" of "origin" is no shape')


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
    """A read-only memory map of an npy file that must be `dtype` and `shape`, and hold nothing else."""
    try:
        with regular.opened(path) as file:
            nbytes = regular.size(file)
            found = npy.header(file, nbytes)
    except FileNotFoundError:
        raise DataMissing(f"{path} is missing beside {INDEX}. {_AGAIN}") from None
    except npy.NpyError as error:
        raise DataCorrupt(path, 0, str(error), _AGAIN) from None
    except OSError as error:
        raise DataCorrupt(path, 0, f"cannot be read ({error.strerror})", _AGAIN) from None
    if found.dtype != np.dtype(dtype) or found.columns or found.shape != shape:
        order = " by columns" if found.columns else ""
        raise DataCorrupt(path, 0, f"holds {found.dtype.name} {found.shape}{order}, {INDEX} says {np.dtype(dtype).name} {shape}", _AGAIN)
    return npy.mapped(path, found)


def _read_csv(folder: Path, name: str, index: dict[str, Any]) -> tuple[np.ndarray, np.ndarray | None]:
    path = folder / f"features_{name}.csv"
    count, width = index["splits"][name]["count"], index["width"]
    if not path.is_file():
        raise DataMissing(f"{path} is missing beside {INDEX}. {_AGAIN}")
    nbytes, most = path.stat().st_size, count * (width + 1) * CSV_BYTES_PER_VALUE
    if nbytes > most or (count and not nbytes):
        raise DataCorrupt(path, 0, f"has {nbytes:,} bytes; {count} lines of {width + 1} values have 1 to {most:,}", _AGAIN)
    table = np.empty((0, width + 1), np.float32)
    try:
        if count:
            with regular.opened(path) as file:
                table = np.loadtxt(file, np.float32, delimiter=",", ndmin=2, comments=None, encoding="ascii")
    except ValueError as error:
        raise DataCorrupt(path, 0, f"not a table of numbers ({error})", _AGAIN) from error
    if table.shape != (count, width + 1):
        raise DataCorrupt(path, 0, f"holds {len(table)} lines of {table.shape[1]} values, {INDEX} says {count} of {width + 1}", _AGAIN)
    if index["splits"][name]["labels_sha256"] is None:
        return table[:, 1:], None
    labels = table[:, 0]
    if not (np.abs(labels) < 1 << 24).all():
        raise DataCorrupt(path, 0, f"the label of {name} image {int(np.argmin(np.abs(labels) < 1 << 24))} is no small number", _AGAIN)
    return table[:, 1:], labels.astype(np.int32)


def _verify(
    folder: Path, name: str, index: dict[str, Any], features: np.ndarray, labels: np.ndarray | None, mirrored: np.ndarray | None = None
) -> None:
    """Raise DataCorrupt unless all values are finite and hash to what `index` says."""
    split, npy = index["splits"][name], index["storage"] == "npy"
    path = folder / (f"{name}_features.npy" if npy else f"features_{name}.csv")
    _verify_values(path, f"{name} image", features, split["sha256"], npy)
    if mirrored is not None:
        _verify_values(mirrored_path(folder, name), f"mirrored {name} image", mirrored, split["mirrored_sha256"], npy)
    if labels is not None and hashlib.sha256(np.ascontiguousarray(labels, "<i4").data).hexdigest() != split["labels_sha256"]:
        raise DataCorrupt(path, 0, f"the {name} labels are not those that {INDEX} describes (their SHA-256 differs)", _AGAIN)


def _verify_values(path: Path, what: str, features: np.ndarray, sha256: str, npy: bool) -> None:
    digest, width = hashlib.sha256(), features.shape[1]
    for start, rows in _chunks(features):
        if not np.isfinite(rows).all():
            row, column = np.argwhere(~np.isfinite(rows))[0]
            offset = HEADER_BYTES + 4 * ((start + int(row)) * width + int(column)) if npy else 0
            raise DataCorrupt(path, offset, f"value {column} of {what} {start + row} is {rows[row, column]}", _AGAIN)
        digest.update(np.ascontiguousarray(rows, "<f4").data)
    if digest.hexdigest() != sha256:
        raise DataCorrupt(path, 0, f"is not the file that {INDEX} describes (its SHA-256 differs)", _AGAIN)


def _chunks(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, rows) pieces of about 16 MiB."""
    rows = max(1, CHUNK_BYTES // (4 * array.shape[1]))
    for start in range(0, len(array), rows):
        yield start, array[start : start + rows]
