"""`npz:PATH`: arrays in a .npz file, or in a folder of .npy files, which are mapped into memory and so may be larger than it.

    train_images, train_labels, test_images, test_labels     also x_train, y_train, x_test, y_test
    images, labels                                           also x, y: a share is set aside for tests
    train_masks, test_masks; masks                           the class of every pixel, (M, H, W), numbers up to 254; 255 is none
    classes                                                  names of the classes, if there are any; mask_classes  those of the masks
    channels_last                                            true for images (M, H, W, C), false for (M, C, H, W), where their shape leaves it open

What arrays may hold is said in `nbcnn.datasets.arrays`. Nothing is unpickled.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from nbcnn.datasets import arrays
from nbcnn.datasets.dataset import VOID, DataError, DataMissing, Dataset, Log, Masks
from nbcnn.datasets.masks import of as masks_of
from nbcnn.datasets.own import TEST_SHARE, Own
from nbcnn.files.errors import UsageError

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


def load(own: Own, log: Log) -> Dataset:
    """The arrays at `own.path`; `log` is told how masks are read. Raises DataMissing, and DataError naming the array that cannot be used."""
    found = _read(own.path)
    channels_last = bool(np.all(found["channels_last"])) if "channels_last" in found else None

    def images(name: str) -> np.ndarray:
        return _checked(own.path, name, partial(arrays.images, found[name], channels_last=channels_last, name=name))

    if {"train_images", "test_images"} <= found.keys():
        if own.test_share is not None:
            raise DataError(f"{own.path} has test images of its own, so a test share says nothing: leave --test-share out")
        train, test = images("train_images"), images("test_images")
        given = found.get("train_labels"), found.get("test_labels")
        if (given[0] is None) != (given[1] is None):
            raise DataError(f"{own.path} has labels of one part only: it needs train_labels and test_labels, or neither")
    elif "images" in found:
        whole = images("images")
        train, test, given = _shared(whole, found.get("labels"), own.test_share or TEST_SHARE, own.path)
    else:
        raise DataMissing(f"{own.path} holds {', '.join(sorted(found)) or 'nothing known'}: it needs train_images and test_images, or images")
    if train.ndim != 4 or train.shape[1:] != test.shape[1:]:
        raise DataError(f"{own.path}: training images are {train.shape}, test images {test.shape}: they must be (M, C, H, W) of one size")
    source, masks = f"arrays of {own.path.resolve()}, {train.dtype}", _masks(found, own, train, test, log)
    if given[0] is None:
        return Dataset(own.name, source, train, None, test, None, None, masks)
    (train_labels, test_labels), classes = _labels(given, (len(train), len(test)), found.get("classes"), own.path)
    return Dataset(own.name, source, train, train_labels, test, test_labels, classes, masks)


def _masks(found: Mapping[str, np.ndarray], own: Own, train: np.ndarray, test: np.ndarray, log: Log) -> Masks | None:
    """The class of every pixel of `train` and `test`, None where the arrays have none."""
    given = found.get("train_masks"), found.get("test_masks")
    if "masks" in found and "images" in found:
        given = _shared(found["masks"], None, own.test_share or TEST_SHARE, own.path)[:2]
    if given[0] is None and given[1] is None:
        return None
    if given[0] is None or given[1] is None:
        raise DataError(f"{own.path} has masks of one part only: it needs train_masks and test_masks, or neither")
    parts = [
        _checked(own.path, name, partial(arrays.labels, part, len(images), VOID, name, images.shape[2:], VOID))
        for part, images, name in zip(given, (train, test), ("train_masks", "test_masks"), strict=True)
    ]
    names = found.get("mask_classes")
    return masks_of(parts[0], parts[1], None if names is None else tuple(map(str, np.asarray(names).reshape(-1))), str(own.path), log)


def _read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of `NAMES` at `path`, by the first of their names."""
    if path.is_dir():
        files = {file.stem: file for file in path.glob("*.npy")}
        return {
            name: _checked(path, known, partial(np.load, files[known], mmap_mode="r", allow_pickle=False)) for name, known in _present(files).items()
        }
    if not path.is_file():
        raise DataMissing(f"{path} is neither a .npz file nor a folder of .npy files. Check the path behind npz:")
    try:
        loaded = np.load(path, allow_pickle=False)
    except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"{path} is no .npz file: {error}. numpy.savez(path, images=…, labels=…) writes one") from None
    if isinstance(loaded, np.ndarray):
        raise DataError(f"{path} is a single array: save it as images.npy in a folder, with labels.npy beside it, and name the folder")
    with loaded:
        return {name: _checked(path, known, partial(loaded.__getitem__, known)) for name, known in _present(dict.fromkeys(loaded.files)).items()}


def _present(names: Mapping[str, object]) -> dict[str, str]:
    """The first form that is there of each of `NAMES`."""
    return {name: form for name, forms in NAMES.items() for form in reversed(forms) if form in names}


def _checked(path: Path, name: str, work: Callable[[], np.ndarray]) -> np.ndarray:
    try:
        return work()
    except UsageError as error:
        raise DataError(f"{path}: {error}") from None
    except (ValueError, OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        pickled = "pickle" in str(error)
        why = "it holds Python objects, which are not read because they can run code; save it as numbers" if pickled else str(error)
        raise DataError(f"{path}: {name} cannot be read: {why}") from None


def _shared(
    images: np.ndarray, labels: np.ndarray | None, share: float, path: Path
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray | None, np.ndarray | None]]:
    """Training and test images, and their labels: `share` of them, drawn with a fixed seed, are for tests. Mapped arrays are read whole."""
    count = min(max(1, round(share * len(images))), len(images) - 1)
    if count < 1:
        raise DataError(f"{path} has one image: it needs at least two, one of them for tests")
    if labels is not None and len(labels) != len(images):
        raise DataError(f"{path} has {len(labels):,} labels for {len(images):,} images: each image needs one")
    order = np.argsort(np.random.Philox(key=SEED).random_raw(len(images)), kind="stable")
    test, train = np.sort(order[:count]), order[count:]
    parts = (None, None) if labels is None else (labels[train], labels[test])
    return np.ascontiguousarray(images[train]), np.ascontiguousarray(images[test]), parts


def _labels(
    given: tuple[np.ndarray | None, np.ndarray | None], counts: tuple[int, int], names: np.ndarray | None, path: Path
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[str, ...]]:
    """Labels of both parts, int32, and the names of the classes: those given, the labels themselves if they are text, else numbers."""
    parts = [np.asarray(part) for part in given]
    if all(part.dtype.kind == "U" and part.ndim == 1 for part in parts):
        texts, numbers = np.unique(np.concatenate(parts), return_inverse=True)
        parts, names = [numbers[: len(parts[0])], numbers[len(parts[0]) :]], texts
    known = None if names is None else len(np.asarray(names).reshape(-1))
    train, test = (
        _checked(path, name, partial(arrays.labels, part, count, known, name))
        for part, count, name in zip(parts, counts, ("train_labels", "test_labels"), strict=True)
    )
    if names is None:
        return (train, test), tuple(map(str, range(int(max(train.max(), test.max())) + 1)))
    return (train, test), tuple(str(name) for name in np.asarray(names).reshape(-1))
