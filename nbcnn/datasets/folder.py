"""`folder:PATH`: images in a folder, a subfolder for each class. Read with Pillow, by threads, into one array.

    PATH/cats/*.png, PATH/dogs/*.jpg                 classes cats and dogs; a share of each is set aside for tests
    PATH/train/cats/…, PATH/test/cats/…              training and test images apart (test may also be called val or validation)
    PATH/*.png                                       images without labels
    PATH/images/*.jpg, PATH/masks/*.png              images with the class of every pixel (`nbcnn.datasets.masks`); also below train/ and test/

What becomes of an image is said in `nbcnn.datasets.image_files`; grey if all images are, else colour. All else is an error that names the file.

Test images are chosen by the SHA-256 of their path below PATH, class by class, and this is also the order in both parts: the same on every
machine, and a file that is added moves no other one's place relative to a third.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.datasets import image_files
from nbcnn.datasets import masks as mask_files
from nbcnn.datasets.dataset import DataError, DataMissing, Dataset, DataTooLarge, Log, Masks
from nbcnn.datasets.image_files import SUFFIXES, Header, guarded
from nbcnn.datasets.own import TEST_SHARE, Own
from nbcnn.files.quote import note
from nbcnn.gpu import memory

TESTS = ("test", "val", "validation")
_NAMED = 5
"""Files that a message names; of the others it gives the number."""
_THREADS = min(16, (os.cpu_count() or 1) + 2)
LINE_SECONDS = 5.0


@dataclass(frozen=True)
class File:
    """One image: its path, its path below the data set's folder, the number of its class (0 without classes), and the path of its mask, if any."""

    path: Path
    below: str
    label: int
    mask: Path | None = None

    @property
    def key(self) -> bytes:
        return hashlib.sha256(self.below.encode("utf-8", "surrogateescape")).digest()


def load(own: Own, limit: int | None, log: Log, progress: Log | None) -> Dataset:
    """The images below `own.path`, uint8; `log` is told what is passed over, `progress` how far it is.

    Raises DataMissing, DataTooLarge and other DataErrors.
    """
    root = own.path
    if not root.is_dir():
        raise DataMissing(f"{root} is no folder{'; a file of arrays is npz:' + str(root) if root.is_file() else ''}. Check the path behind folder:")
    classes, train, test = _parts(own, log)
    train, test = train[:limit], test[:limit]
    headers = _each(lambda file: guarded(image_files.header, file.path), [*train, *test], "looking at", progress)
    size = own.size or _one_size([*train, *test], headers)
    channels = 1 if all(header.grey for header in headers) else 3
    planes = channels + (train[0].mask is not None)
    pixels = [header.size[0] * header.size[1] for header in headers]
    decoded = min(image_files.MOST_PIXELS, max(pixels) * min(_THREADS, len(headers))) * image_files.DECODED_BYTES
    _check_memory(len(headers) * planes * size[0] * size[1] + decoded, root)
    images = np.empty((len(headers), channels, *size), np.uint8)

    def read(item: tuple[File, Header, np.ndarray]) -> str | None:
        file, header, target = item
        made = guarded(image_files.read, file.path, channels=channels, fit=own.size, expected=header.size)
        if isinstance(made, str):
            return made
        target[...] = made
        return None

    _each(read, list(zip([*train, *test], headers, images, strict=True)), "reading", progress, pixels)
    masks = _masks([*train, *test], headers, size, own, len(train), log, progress) if train[0].mask else None
    labels = np.array([file.label for file in (*train, *test)], np.int32) if classes else None
    source = f"images below {root.resolve()}, {'grey' if channels == 1 else 'colour'}" + (f", scaled to {size[0]}×{size[1]}" if own.size else "")
    at = len(train)
    return Dataset(
        own.name,
        source,
        images[:at],
        labels[:at] if labels is not None else None,
        images[at:],
        labels[at:] if labels is not None else None,
        classes or None,
        masks,
    )


def _masks(files: Sequence[File], headers: Sequence[Header], size: tuple[int, int], own: Own, at: int, log: Log, progress: Log | None) -> Masks:
    """The masks of `files`, of which the first `at` are for training."""
    made = np.empty((len(files), *size), np.uint8)

    def read(item: tuple[File, Header, np.ndarray]) -> str | None:
        file, header, target = item
        assert file.mask is not None
        mask = guarded(mask_files.read, file.mask, expected=header.size, fit=own.size)
        if isinstance(mask, str):
            return mask
        target[...] = mask
        return None

    pixels = [header.size[0] * header.size[1] for header in headers]
    _each(read, list(zip(files, headers, made, strict=True)), "reading masks of", progress, pixels)
    return mask_files.of(made[:at], made[at:], mask_files.names_in(own.path), str(own.path), log)


def _parts(own: Own, log: Log) -> tuple[tuple[str, ...], list[File], list[File]]:
    """Names of the classes, none without labels; files of the training and the test part, each in the order of their keys."""
    root = own.path
    folders = {entry.name for entry in root.iterdir() if entry.is_dir()}
    tests = [name for name in TESTS if name in folders]
    if "train" in folders and tests:
        if own.test_share is not None:
            raise DataError(f"{root} has its own {tests[0]}/, so a test share says nothing: leave --test-share out")
        if len({mask_files.is_masked(root / part) for part in ("train", tests[0])}) > 1:
            raise DataError(f"train/ and {tests[0]}/ of {root} must both have images/ and masks/, or neither")
        classes, train = _scan(root, root / "train", log)
        names, test = _scan(root, root / tests[0], log)
        if strange := sorted(set(names) - set(classes)):
            raise DataError(f"{root / tests[0]} has classes that train/ has not: {', '.join(strange[:_NAMED])}. Their names must be the same")
        if bool(names) != bool(classes):
            raise DataError(f"train/ and {tests[0]}/ of {root} must both have class folders, or neither")
        if lacking := [name for name in classes if name not in names]:
            log(f"nbcnn: note: {root / tests[0]} has no images of {', '.join(lacking[:_NAMED])}")
        test = [replace(file, label=classes.index(names[file.label]) if names else 0) for file in test]
    elif "train" in folders or "test" in folders:
        raise DataError(
            f"{root} has {'train' if 'train' in folders else 'test'}/ but not the other one: it needs train/ and test/, or class folders only"
        )
    else:
        classes, files = _scan(root, root, log)
        train, test = _shared(files, own.test_share or TEST_SHARE, classes, log)
    for part, files in (("training", train), ("test", test)):
        if not files:
            raise DataMissing(f"{root} leaves no {part} images: it needs at least two images of a class")
    if len(classes) == 1:
        log(f"nbcnn: note: all images of {root} are of one class, {classes[0]}: there is nothing to tell apart, but an autoencoder can be trained")
    return classes, sorted(train, key=lambda file: file.key), sorted(test, key=lambda file: file.key)


def _shared(files: Sequence[File], share: float, classes: Sequence[str], log: Log) -> tuple[list[File], list[File]]:
    """Split off the test images: of each class the first in the order of the keys, `share` of them, at least one, but never all."""
    train: list[File] = []
    test: list[File] = []
    for label in range(max(1, len(classes))):
        own = sorted((file for file in files if file.label == label), key=lambda file: file.key)
        count = min(max(1, round(share * len(own))), len(own) - 1)
        test += own[:count]
        train += own[count:]
        if count == 0 and classes:
            log(f"nbcnn: note: {classes[label]} has one image, which is trained on; none is left to test")
    return train, test


def _scan(root: Path, folder: Path, log: Log) -> tuple[tuple[str, ...], list[File]]:
    """Class names in alphabetical order, and the images of each; no names if `folder` holds images with masks, or images itself and no folders with
    any."""
    if mask_files.is_masked(folder):
        return (), _masked(root, folder, log)
    beside, passed = _images(folder, deep=False)
    subfolders = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    found = {entry.name: _images(entry, deep=True) for entry in subfolders}
    names = tuple(name for name, (paths, _) in found.items() if paths)
    passed += [path for _, others in found.values() for path in others]
    if passed:
        log(f"nbcnn: note: passed over, because they are no images: {_some([path.relative_to(root).as_posix() for path in passed])}")
    if not names:
        if not beside:
            raise DataMissing(f"{folder} holds no images ({', '.join(sorted(SUFFIXES))}), neither itself nor in class folders")
        return (), [File(path, path.relative_to(root).as_posix(), 0) for path in beside]
    if empty := [name for name, (paths, _) in found.items() if not paths]:
        log(f"nbcnn: note: no classes, because they hold no images: {_some(empty)}")
    if beside:
        log(f"nbcnn: note: passed over, because they lie in no class folder: {_some([path.name for path in beside])}")
    return names, [File(path, path.relative_to(root).as_posix(), at) for at, name in enumerate(names) for path in found[name][0]]


def _masked(root: Path, folder: Path, log: Log) -> list[File]:
    """The images below images/ of `folder`, each with the mask of its name below masks/."""
    places = [folder / name for name in (mask_files.IMAGES, mask_files.MASKS)]
    (paths, others), (masks, strange) = (_images(place, deep=True) for place in places)
    if passed := [*others, *strange]:
        log(f"nbcnn: note: passed over, because they are no images: {_some([path.relative_to(root).as_posix() for path in passed])}")

    def by_name(files: list[Path], place: Path) -> dict[str, Path]:
        named: dict[str, Path] = {}
        for path in files:
            name = path.relative_to(place).with_suffix("").as_posix()
            if name in named:
                raise DataError(f"{place} has two files called {name}: a mask is found by its image's name, without the suffix")
            named[name] = path
        return named

    images, known = (by_name(files, place) for files, place in zip((paths, masks), places, strict=True))
    if lacking := [path.relative_to(root).as_posix() for name, path in images.items() if name not in known]:
        raise DataError(f"images without a mask of their name in {places[1]}: {_some(lacking)}")
    if idle := [name for name in known if name not in images]:
        log(f"nbcnn: note: masks of no image in {places[0]}: {_some(idle)}")
    return [File(path, path.relative_to(root).as_posix(), 0, known[name]) for name, path in images.items()]


def _images(folder: Path, deep: bool) -> tuple[list[Path], list[Path]]:
    """The images in `folder`, and below it if `deep`, and the other files; hidden ones are neither."""
    paths = []
    for where, folders, names in os.walk(folder, onerror=_raise):
        for name in (where, *folders, *names):
            note(name)
        folders[:] = sorted(name for name in folders if deep and not name.startswith("."))
        paths += [Path(where, name) for name in sorted(names) if not name.startswith(".") and name not in ("Thumbs.db", "desktop.ini")]
    return [path for path in paths if path.suffix.lower() in SUFFIXES], [path for path in paths if path.suffix.lower() not in SUFFIXES]


def _raise(error: OSError) -> None:
    raise error


def _one_size(files: Sequence[File], headers: Sequence[Header]) -> tuple[int, int]:
    sizes = Counter(header.size for header in headers)
    if len(sizes) == 1:
        return headers[0].size
    examples = [
        f"{files[at].below} {size[0]}×{size[1]}" for size, at in ((size, [h.size for h in headers].index(size)) for size, _ in sizes.most_common(2))
    ]
    raise DataError(f"the images are of {len(sizes)} sizes (height×width), such as {' and '.join(examples)}: --size 64 makes them all 64×64")


def _check_memory(needed: int, root: Path) -> None:
    free = memory.available()
    if needed > free:
        raise DataTooLarge(
            f"the images of {root} take {needed / 2**30:.1f} GiB as pixels, {free / 2**30:.1f} GiB of host memory are free: "
            "use a smaller --size or --limit, or save them as .npy files, which npz:FOLDER reads from the disk as it goes"
        )


def _each(work: Callable[[Any], Any], items: Sequence[Any], doing: str, progress: Log | None, pixels: Sequence[int] | None = None) -> list[Any]:
    """`work` on each of `items`, by threads. What comes back as text is an error; raises DataError with the first few.

    pixels  that the work on each item decodes: of large images no more threads take part than may decode at once. The C library keeps much of what a
            thread has freed for that thread, so each of sixteen threads that decode one large image by turns would keep a part of its size.
    """
    results: list[Any] = [None] * len(items)
    groups: dict[int, list[int]] = {}
    for number in range(len(items)):
        threads = _THREADS if pixels is None else min(_THREADS, max(1, image_files.MOST_PIXELS // pixels[number]))
        groups.setdefault(threads if threads == _THREADS else 1 << threads.bit_length() - 1, []).append(number)
    done, started = 0, time.perf_counter()
    told = started
    from concurrent.futures import ThreadPoolExecutor  # with logging, and few runs have images of their own

    for threads, numbers in groups.items():
        with ThreadPoolExecutor(threads, thread_name_prefix="nbcnn-reader") as pool:
            for number, result in zip(numbers, pool.map(work, [items[number] for number in numbers]), strict=True):
                results[number], done, now = result, done + 1, time.perf_counter()
                if progress and now - told >= LINE_SECONDS:
                    told = now
                    progress(f"{doing} images: {done:,} of {len(items):,}, {(len(items) - done) * (now - started) / done:.0f} s left")
    errors = [result for result in results if isinstance(result, str)]
    if errors:
        count = "1 image cannot" if len(errors) == 1 else f"{len(errors):,} images cannot"
        more = f"\n  and {len(errors) - _NAMED:,} more" if len(errors) > _NAMED else ""
        listed = "\n  ".join(errors[:_NAMED])
        raise DataError(f"{count} be used:\n  {listed}{more}\nRepair them, or take them out of the folder.")
    return results


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:_NAMED]) + (f" and {len(listed) - _NAMED:,} more" if len(listed) > _NAMED else "")
