"""`npz:PATH`: arrays in a .npz file, or in a folder of .npy files.

    train_images, train_labels, test_images, test_labels     also x_train, y_train, x_test, y_test
    images, labels                                           also x, y: a share is set aside for tests
    train_masks, test_masks; masks                           the class of every pixel, (M, H, W), numbers up to 254; 255 is none
    classes                                                  names of the classes, if there are any; mask_classes  those of the masks
    channels_last                                            true for images (M, H, W, C), false for (M, C, H, W), where their shape leaves it open

Of a folder, training and test images that are uint8 or float32 (M, C, H, W) are mapped into memory, and may be larger than it; all else is held
there. What arrays may hold is said in `nbcnn.datasets.arrays`. Nothing is unpickled, and headers are checked before anything is read.
"""

from __future__ import annotations

import lzma
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.datasets import arrays
from nbcnn.datasets.dataset import VOID, DataError, DataMissing, Dataset, DataTooLarge, Log, Masks
from nbcnn.datasets.masks import of as masks_of
from nbcnn.datasets.own import TEST_SHARE, Own
from nbcnn.files import npy, regular
from nbcnn.files.errors import UsageError
from nbcnn.files.masked import refuse_masked
from nbcnn.files.npy import Header, NpyError
from nbcnn.files.quote import brief, printable, quoted
from nbcnn.gpu import memory

NAMES: Mapping[str, tuple[str, ...]] = {
    "train_images": ("train_images", "x_train", "X_train"),
    "train_labels": ("train_labels", "y_train", "Y_train"),
    "test_images": ("test_images", "x_test", "X_test"),
    "test_labels": ("test_labels", "y_test", "Y_test"),
    "images": ("images", "x", "X"),
    "labels": ("labels", "y", "Y"),
    "train_masks": ("train_masks",),
    "test_masks": ("test_masks",),
    "masks": ("masks",),
    "classes": ("classes", "class_names"),
    "mask_classes": ("mask_classes",),
    "channels_last": ("channels_last",),
}
SEED = 0
MOST_CLASSES = 1 << 20
"""Classes at most: each has a name in memory."""
_LONGEST_NAME = 1024
"""Characters of a class's name at most."""
_RATIO = 1040
"""Bytes that deflate makes of one at most: 258 of two bits."""
_DAMAGE = (ValueError, OSError, EOFError, RuntimeError, KeyError, UnicodeError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, NotImplementedError)
"""What reading a damaged archive raises."""


@dataclass(frozen=True)
class Found:
    """An array that is there: its form of a name in `NAMES`, its header, and what reads all of it (None), or rows by their numbers.

    `held` says whether reading all takes memory: a mapped file does not.
    """

    name: str
    header: Header
    read: Callable[[np.ndarray | None], np.ndarray]
    held: bool

    def __len__(self) -> int:
        return self.header.shape[0] if self.header.shape else 0

    def bytes_of(self, rows: int) -> int:
        """Bytes of so many rows."""
        return self.header.nbytes // max(1, len(self)) * rows


Rows = list[np.ndarray | None]
"""The numbers of the rows of a training part and of a test part; None for all."""


def load(own: Own, log: Log, limit: int | None = None) -> Dataset:
    """The arrays at `own.path`, of each part the first `limit` images; `log` is told how masks are read.

    Raises DataMissing, DataTooLarge, and DataError naming the array that cannot be used.
    """
    return made_of(_found(own.path), own, log, limit)


def of_arrays(given: Mapping[str, Any], where: Path) -> dict[str, Found]:
    """The arrays of `NAMES` that a mapping holds, by the first of their names. Raises DataError for a masked one, which came from `where`."""

    def found(name: str) -> Found:
        _checked(where, name, lambda: refuse_masked(given[name], name))
        array = np.asarray(given[name])
        return Found(
            name, npy.Header(array.dtype, array.shape, columns=False, offset=0), lambda rows: array if rows is None else array[rows], held=False
        )

    return {name: found(known) for name, known in _present(given).items()}


def made_of(found: Mapping[str, Found], own: Own, log: Log, limit: int | None = None) -> Dataset:
    """The data set of arrays by the names of `NAMES`, which came from `own`. Raises as `load`."""
    for name, each in found.items():
        _check_form(own.path, name, each)
    last = _whole(own.path, found["channels_last"]) if "channels_last" in found else None
    channels_last = None if last is None else bool(np.all(last))

    def images(each: Found, rows: np.ndarray | None) -> Any:
        return _checked(own.path, each.name, lambda: arrays.images(each.read(rows), channels_last=channels_last, name=each.name))

    if {"train_images", "test_images"} <= found.keys():
        if own.test_share is not None:
            raise DataError(f"{own.path} has test images of its own, so a test share says nothing: leave --test-share out")
        sources = [found["train_images"], found["test_images"]]
        rows: Rows = [None if limit is None or limit >= len(each) else np.arange(limit) for each in sources]
    elif "images" in found:
        sources = 2 * [found["images"]]
        rows = _shared(len(found["images"]), own.test_share or TEST_SHARE, limit, own.path)
    else:
        raise DataMissing(f"{own.path} holds {', '.join(sorted(found)) or 'nothing known'}: it needs train_images and test_images, or images")
    beside = {what: _beside(found, what, sources, own.path) for what in ("labels", "masks")}
    _check_memory(own.path, list(zip(sources, rows, strict=True)))
    train, test = (images(each, which) for each, which in zip(sources, rows, strict=True))
    if train.ndim != 4 or train.shape[1:] != test.shape[1:]:
        raise DataError(f"{own.path}: training images are {train.shape}, test images {test.shape}: they must be (M, C, H, W) of one size")
    if train.dtype != test.dtype:
        raise DataError(f"{own.path}: training images are {train.dtype}, and test images {test.dtype}: save both as uint8, or both as floats")
    source, masks = f"arrays of {own.location}, {train.dtype}", _masks(found, beside["masks"], [train, test], rows, own.path, log)
    labels, classes = _labels(found, beside["labels"], rows, own.path)
    return Dataset(own.name, source, train, labels[0], test, labels[1], classes, masks)


def _check_form(path: Path, name: str, each: Found) -> None:
    """Raise DataError for an array whose header says already that it is none of what `name` must be: before it is read."""
    shape, kind, width = each.header.shape, each.header.dtype.kind, each.header.dtype.itemsize
    what = f"{path}: {each.name} is {each.header.dtype} {quoted(shape)}"
    if name in ("classes", "mask_classes"):
        if (kind == "U" and width > 4 * _LONGEST_NAME) or each.header.nbytes // max(1, width) > MOST_CLASSES:
            raise DataError(f"{what}: there are at most {MOST_CLASSES:,} classes, with names of at most {_LONGEST_NAME:,} characters")
    elif name == "channels_last":
        if each.header.nbytes > 64 or kind not in "biuf":
            raise DataError(f"{what}, and it must be true or false")
    elif name.endswith("images"):
        if kind not in "biuf" or not 2 <= len(shape) <= 4:
            raise DataError(f"{what}: images are bytes (uint8) or floats, (M, C, H, W), (M, H, W, C), or grey (M, H, W)")
    elif name.endswith("labels"):
        if not 1 <= len(shape) <= 2 or shape[1:] > (MOST_CLASSES,) or (kind == "U" and width > 4 * _LONGEST_NAME):
            raise DataError(f"{what}: one class per image is (M,), or one-hot (M, K) of at most {MOST_CLASSES:,} classes")
    elif kind not in "biuf" or not 3 <= len(shape) <= 5:
        raise DataError(f"{what}: one class per pixel is (M, H, W)")


def _check_memory(path: Path, wanted: list[tuple[Found, np.ndarray | None]]) -> None:
    """Raise DataTooLarge if so many rows of the arrays do not fit into host memory."""
    needed = 0
    for each, rows in wanted:
        count = len(each) if rows is None else len(rows)
        fits = each.header.dtype in (np.uint8, np.float32) and not each.header.columns
        if each.held or rows is not None or not fits:
            # What is of another type is held twice while it is converted.
            needed += each.bytes_of(count) * (1 if fits else 2)
    free = memory.available()
    if needed > free:
        raise DataTooLarge(
            f"{path} takes {needed / 2**30:.1f} GiB of host memory, and {free / 2**30:.1f} GiB are free: use a smaller --limit, or save its arrays "
            "as train_images.npy and test_images.npy in a folder, uint8 or float32 (M, C, H, W), which npz:FOLDER reads from the disk as it goes"
        )


def _whole(path: Path, each: Found) -> np.ndarray:
    return _checked(path, each.name, lambda: each.read(None))


def _beside(found: Mapping[str, Found], what: str, images: list[Found], path: Path) -> list[Found]:
    """The arrays of `what`, "labels" or "masks", for training and test images; the same twice for images that are shared out, none without any.

    Raises DataError where one is missing, or has another length than its images.
    """
    names = [what, what] if images[0] is images[1] else [f"train_{what}", f"test_{what}"]
    given = [found[name] for name in names if name in found]
    if len(given) == 1:
        raise DataError(f"{path} has {what} of one part only: it needs train_{what} and test_{what}, or neither")
    for each, own in zip(given, images, strict=False):
        if len(each) != len(own):
            raise DataError(f"{path} has {len(each):,} {each.name} for {len(own):,} images: each image needs one")
    return given


def _masks(found: Mapping[str, Found], given: list[Found], parts: list[np.ndarray], rows: Rows, path: Path, log: Log) -> Masks | None:
    """The class of every pixel of the images `parts`, None where the arrays have none."""
    if not given:
        return None
    _check_memory(path, list(zip(given, rows, strict=True)))
    train, test = (
        _checked(path, each.name, partial(_of_pixels, each, which, images)) for each, which, images in zip(given, rows, parts, strict=True)
    )
    names = _names(path, found.get("mask_classes"))
    if names is not None and not 2 <= len(names) <= VOID:
        raise DataError(f"{path}: mask_classes names {len(names):,} classes, and masks have 2 to {VOID}")
    return masks_of(train, test, names, str(path), log)


def _of_pixels(each: Found, rows: np.ndarray | None, images: np.ndarray) -> np.ndarray:
    return arrays.labels(each.read(rows), len(images), VOID, each.name, images.shape[2:], VOID)


def _labels(
    found: Mapping[str, Found], given: list[Found], rows: Rows, path: Path
) -> tuple[tuple[np.ndarray | None, np.ndarray | None], tuple[str, ...] | None]:
    """Labels of both parts, int32, and the names of the classes: those given, the labels themselves if they are text, else numbers."""
    if not given:
        return (None, None), None
    parts, names = [_whole(path, each) for each in given], _names(path, found.get("classes"))
    if all(part.dtype.kind == "U" and part.ndim == 1 for part in parts):
        for each, part in zip(given, parts, strict=True):
            _checked(path, each.name, partial(npy.texts, part))
        texts, numbers = np.unique(np.concatenate(parts), return_inverse=True)
        parts, names = [numbers[: len(parts[0])], numbers[len(parts[0]) :]], tuple(printable(str(text), "") for text in texts)
    known = MOST_CLASSES if names is None else len(names)
    made = [_checked(path, each.name, partial(arrays.labels, part, len(each), known, each.name)) for each, part in zip(given, parts, strict=True)]
    if names is None:
        names = tuple(map(str, range(max(int(part.max()) for part in made) + 1)))
    train, test = (part if which is None else np.ascontiguousarray(part[which]) for part, which in zip(made, rows, strict=True))
    return (train, test), names


def _names(path: Path, each: Found | None) -> tuple[str, ...] | None:
    """The names of classes in an array, None where there is none."""
    if each is None:
        return None
    values = _whole(path, each)
    made = _checked(path, each.name, lambda: npy.texts(values)) if values.dtype.kind == "U" else tuple(map(str, values.reshape(-1)))
    return tuple(printable(name, "") for name in made)


def _shared(count: int, share: float, limit: int | None, path: Path) -> Rows:
    """The numbers of training and test images of `count`, of each the first `limit`: `share` of them, drawn with a fixed seed, are for tests."""
    tests = min(max(1, round(share * count)), count - 1)
    if tests < 1:
        raise DataError(f"{path} has {'one image' if count else 'no images'}: it needs at least two, one of them for tests")
    order = np.argsort(np.random.Philox(key=SEED).random_raw(count), kind="stable")
    return [order[tests:][:limit], np.sort(order[:tests])[:limit]]


# -- files


def _found(path: Path) -> dict[str, Found]:
    """The arrays of `NAMES` at `path`, by the first of their names; their headers are read, and no more."""
    if path.is_dir():
        files = {file.stem: file for file in path.glob("*.npy")}
        return {name: _checked(path, known, partial(_in_folder, known, files[known])) for name, known in _present(files).items()}
    if not path.exists():
        raise DataMissing(f"{path} is neither a .npz file nor a folder of .npy files. Check the path behind npz:")
    with regular.opened(path) as file:
        if file.read(len(npy.MAGIC)) == npy.MAGIC:
            raise DataError(f"{path} is a single array: save it as images.npy in a folder, with labels.npy beside it, and name the folder")
        try:
            archive = zipfile.ZipFile(file)
        except _DAMAGE as error:
            raise DataError(f"{path} is no .npz file: {brief(error)}. numpy.savez(path, images=…, labels=…) writes one") from None
        with archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            return {
                name: _checked(path, known, partial(_in_archive, known, path, archive, members[known])) for name, known in _present(members).items()
            }


def _in_folder(name: str, path: Path) -> Found:
    with regular.opened(path) as file:
        header = npy.header(file, regular.size(file))

    def read(rows: np.ndarray | None) -> np.ndarray:
        whole = npy.mapped(path, header)
        return whole if rows is None else whole[rows]

    return Found(name, header, read, held=False)


def _in_archive(name: str, path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Found:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise NpyError(f"it is compressed by method {info.compress_type}; numpy.savez and numpy.savez_compressed write 0 and 8")
    if info.file_size > (info.compress_size + 64) * (_RATIO if info.compress_type else 1):
        raise NpyError(f"the archive claims that {info.compress_size:,} bytes hold {info.file_size:,}")
    with archive.open(info) as member:
        header = npy.header(member, info.file_size)  # type: ignore[arg-type]

    def read(rows: np.ndarray | None) -> np.ndarray:
        with regular.opened(path) as file, zipfile.ZipFile(file) as again, again.open(info) as member:
            member.read(header.offset)
            return npy.read_rows(member, header, rows)  # type: ignore[arg-type]

    return Found(name, header, read, held=True)


def _present(names: Mapping[str, object]) -> dict[str, str]:
    """The first form that is there of each of `NAMES`."""
    return {name: form for name, forms in NAMES.items() for form in reversed(forms) if form in names}


def _checked(path: Path, name: str, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except UsageError as error:
        raise DataError(f"{path}: {error}") from None
    except _DAMAGE as error:
        raise DataError(f"{path}: {name} cannot be read: {brief(error)}") from None
