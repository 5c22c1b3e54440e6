"""This package loads data sets: `load(name)` gives uint8 images and labels in memory; each set has one file of this package.

Nothing here unpickles and nothing unpacks an archive. Importing the package brings in NumPy only.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from nbcnn.datasets import cifar10, digits, energy, mnist, photos, shapes
from nbcnn.datasets.dataset import DataCorrupt, DataError, DataMissing, Dataset, Log
from nbcnn.datasets.series import SeriesDataset
from nbcnn.files.suggest import nearest

__all__ = [
    "DATA_DIR",
    "NAMES",
    "SERIES",
    "DataCorrupt",
    "DataError",
    "DataMissing",
    "Dataset",
    "SeriesDataset",
    "UnknownDataset",
    "load",
    "load_series",
    "log_to_stderr",
]

NAMES = ("auto", "cifar10", "mnist", "fashion-mnist", "photos", "digits", "shapes")
SERIES = ("energy",)
DATA_DIR = "data"
OFFLINE_VARIABLE = "NBCNN_OFFLINE"


class UnknownDataset(ValueError):
    """A name that is no data set; commands exit with `exit_code`, that of a usage error."""

    exit_code = 2


def log_to_stderr(message: str) -> None:
    """Print `message` to stderr."""
    print(message, file=sys.stderr, flush=True)


def load(
    name: str,
    *,
    data_dir: str | os.PathLike[str] = DATA_DIR,
    limit: int | None = None,
    download: bool = True,
    log: Log = log_to_stderr,
    progress: bool = True,
) -> Dataset:
    """Data set `name`, one of `NAMES`; `limit` cuts training and test set to that many images each.

    Files are looked for in `data_dir`, and downloads go there; `photos`, `digits` and `shapes` need none. `download=False` or the
    environment variable NBCNN_OFFLINE=1 keeps it from the network. "auto" is CIFAR-10 if it is there or can be had quickly, else
    `photos`, with a notice through `log`; "cifar10" never is anything else. `progress=False` silences downloads, not the notice.

    Raises UnknownDataset, DataMissing, DataCorrupt (both DataError, as is a file without permission), ValueError if `limit` < 1.
    """
    if name not in NAMES:
        raise UnknownDataset(f"no data set {name!r} (there are {', '.join(NAMES)}){nearest(name, NAMES)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    allowed = download and os.environ.get(OFFLINE_VARIABLE, "0") in ("", "0")
    try:
        return _load(name, Path(data_dir), allowed, log, log if progress else None).cut(limit)
    except OSError as error:
        raise DataError(f"{error.filename or data_dir} cannot be read: {error.strerror or error}. Check the path and its permissions.") from error


def load_series(name: str, *, data_dir: str | os.PathLike[str] = DATA_DIR, limit: int | None = None) -> SeriesDataset:
    """Data set `name` of `SERIES`, for forecasts; `limit` cuts every part of the year to that many windows.

    Raises UnknownDataset, DataMissing, DataCorrupt (both DataError), ValueError if `limit` < 1.
    """
    if name not in SERIES:
        raise UnknownDataset(f"no data set of series {name!r} (there is {', '.join(SERIES)}){nearest(name, SERIES)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    folder = Path(data_dir)
    if folder != Path(DATA_DIR) and not folder.is_dir():
        raise DataMissing(f"{folder} is no folder. Leave --data-dir out to use generated data.")
    return energy.load(folder).cut(limit)


def _load(name: str, folder: Path, allowed: bool, log: Log, progress: Log | None) -> Dataset:
    match name:
        case "photos":
            return photos.load()
        case "digits":
            return digits.load()
        case "shapes":
            return shapes.load()
        case "mnist" | "fashion-mnist":
            return mnist.load(folder, name)
    # A mistyped folder must not become a new one with a download in it; only the default one is made when needed.
    if folder != Path(DATA_DIR) and not folder.is_dir():
        raise cifar10.missing(folder)
    return _auto(folder, allowed, log, progress) if name == "auto" else cifar10.load(folder, allowed, progress)


def _auto(folder: Path, allowed: bool, log: Log, progress: Log | None) -> Dataset:
    """CIFAR-10 from `folder` or a fast mirror, else `photos`. Incomplete or damaged files of CIFAR-10 raise: nobody wants them passed over."""
    where = cifar10.find(folder)
    if where is None and allowed:
        try:
            where = cifar10.fetch(folder, progress, hurried=True)
        except DataMissing as failure:
            why = str(failure)
    elif where is None:
        why = f"It is not in {folder}. {cifar10.OFFLINE}"
    if where is not None:
        return cifar10.read(where)
    if cifar10.holds_pickles(folder):
        why += f"\n{cifar10.PICKLES}"
    bar = "!" * 100
    log(
        f"{bar}\nNOT CIFAR-10: this run uses 'photos', patches of two photographs, without labels.\nWhy: {why}\n"
        f"For CIFAR-10, put {cifar10.ARCHIVE} (from {cifar10.MIRRORS[-1]}) into {folder}/,\n"
        f"or run with --dataset cifar10, which waits for slow servers. --dataset digits has labels and needs no network.\n{bar}"
    )
    chosen = photos.load()
    return replace(chosen, source=f"{chosen.source}; used because CIFAR-10 was not available")
