"""This package loads data sets: `load(name)` gives uint8 images and labels in memory; each set has one file of this package.

Nothing here unpickles and nothing unpacks an archive. Importing the package brings in NumPy only.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from nbcnn.datasets import cifar10, digits, energy, folder, function, mnist, npz, own, photos, shapes
from nbcnn.datasets.dataset import DataCorrupt, DataError, DataMissing, Dataset, DataTooLarge, Log, Masks
from nbcnn.datasets.series import SeriesDataset
from nbcnn.files import extras
from nbcnn.files.quote import printable, quoted
from nbcnn.files.suggest import nearest

__all__ = [
    "DATA_DIR",
    "NAMES",
    "SERIES",
    "DataCorrupt",
    "DataError",
    "DataMissing",
    "DataTooLarge",
    "Dataset",
    "Masks",
    "SeriesDataset",
    "UnknownDataset",
    "is_known",
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
    print(printable(message), file=sys.stderr, flush=True)


def load(
    name: str,
    *,
    data_dir: str | os.PathLike[str] = DATA_DIR,
    limit: int | None = None,
    download: bool = True,
    log: Log = log_to_stderr,
    progress: bool = True,
) -> Dataset:
    """Data set `name`, one of `NAMES`, or folder:PATH, npz:PATH or file.py:function; `limit` cuts training and test set to that many images each.

    Files are looked for in `data_dir`, and downloads go there; `photos`, `digits` and `shapes` need none. `download=False` or the
    environment variable NBCNN_OFFLINE=1 keeps it from the network. "auto" is CIFAR-10 if it is there or can be had quickly, else
    `digits` (`shapes` without scikit-learn), with a notice through `log`; "cifar10" never is anything else. `progress=False` silences
    downloads, not the notice.

    Behind a path, ?size=64x48&test-share=0.2 says how it is read (`nbcnn.datasets.own`); the name of what comes back has the path in full.

    Raises UnknownDataset, DataMissing, DataCorrupt (both DataError, as is a file without permission), ValueError if `limit` < 1, and
    PackageMissing for `photos` and `digits` without scikit-learn.
    """
    if name not in NAMES and not own.is_own(name):
        raise UnknownDataset(f"no data set {quoted(name)} (there are {', '.join(NAMES)}, folder:PATH, npz:PATH){nearest(name, NAMES)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    allowed = download and os.environ.get(OFFLINE_VARIABLE, "0") in ("", "0")
    try:
        if own.is_own(name):
            return _load_own(own.Own.parse(name), limit, log, log if progress else None).cut(limit)
        return _load(name, Path(data_dir), allowed, log, log if progress else None).cut(limit)
    except OSError as error:
        raise DataError(f"{error.filename or data_dir} cannot be read: {error.strerror or error}. Check the path and its permissions.") from error


def is_known(name: str) -> bool:
    """True for the name of a data set: of `NAMES` or `SERIES`, or of the form of a custom one (`own.FORMS`)."""
    return name in NAMES or name in SERIES or own.is_own(name)


def load_series(name: str, *, data_dir: str | os.PathLike[str] = DATA_DIR, limit: int | None = None) -> SeriesDataset:
    """Data set `name` of `SERIES`, for forecasts; `limit` cuts every part of the year to that many windows.

    Raises UnknownDataset, DataMissing, DataCorrupt (both DataError), ValueError if `limit` < 1.
    """
    if name not in SERIES:
        raise UnknownDataset(f"no data set of series {quoted(name)} (there is {', '.join(SERIES)}){nearest(name, SERIES)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    where = Path(data_dir)
    if where != Path(DATA_DIR) and not where.is_dir():
        raise DataMissing(f"{where} is no folder. Leave --data-dir out to use generated data.")
    return energy.load(where).cut(limit)


def _load_own(given: own.Own, limit: int | None, log: Log, progress: Log | None) -> Dataset:
    if given.kind == "folder":
        return folder.load(given, limit, log, progress)
    return npz.load(given, log, limit) if given.kind == "npz" else function.load(given, log, limit)


def _load(name: str, where: Path, allowed: bool, log: Log, progress: Log | None) -> Dataset:
    match name:
        case "photos":
            return photos.load()
        case "digits":
            return digits.load()
        case "shapes":
            return shapes.load()
        case "mnist" | "fashion-mnist":
            return mnist.load(where, name)
    # A mistyped folder must not become a new one with a download in it; only the default one is made when needed.
    if where != Path(DATA_DIR) and not where.is_dir():
        raise cifar10.missing(where)
    return _auto(where, allowed, log, progress) if name == "auto" else cifar10.load(where, allowed, progress)


def _auto(folder: Path, allowed: bool, log: Log, progress: Log | None) -> Dataset:
    """CIFAR-10 from `folder` or a fast mirror, else `digits`, or `shapes` without scikit-learn, which has the digits.

    Incomplete or damaged files of CIFAR-10 raise: nobody wants them passed over.
    """
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
    if extras.installed("sklearn"):
        chosen, what = digits.load(), "'digits', 1,797 handwritten digits of 8×8 pixels, with labels"
    else:
        chosen, what = shapes.load(), "'shapes', drawn circles, squares and the like, with labels"
        why += f"\nFor handwritten digits: {extras.missing('sklearn')}"
    log(
        f"{bar}\nNOT CIFAR-10: this run uses {what}.\nWhy: {why}\n"
        f"For CIFAR-10, put {cifar10.ARCHIVE} (from {cifar10.MIRRORS[-1]}) into {folder}/,\n"
        f"or run with --dataset cifar10, which waits for slow servers. --dataset photos and shapes need no internet either.\n{bar}"
    )
    return replace(chosen, source=f"{chosen.source}; used because CIFAR-10 was not available")
