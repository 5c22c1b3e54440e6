"""This module reads CIFAR-10 in its official binary layout: six plain files, or the archive they come in, without unpacking it.

A record is 1 label byte (0..9) and 3,072 pixel bytes: 1,024 red, 1,024 green, 1,024 blue, each row by row. A file holds 10,000 records.
Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009, https://www.cs.toronto.edu/~kriz/cifar.html
"""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path

import numpy as np

from nbcnn.datasets import tar
from nbcnn.datasets.dataset import DataCorrupt, DataMissing, Dataset, Log
from nbcnn.files import regular
from nbcnn.files.quote import quoted

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
FILES = (*TRAIN_FILES, TEST_FILE)
FOLDER = "cifar-10-batches-bin"
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32
RECORDS = 10_000

ARCHIVE = "cifar-10-binary.tar.gz"
ARCHIVE_BYTES = 170_052_171
ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
MIRRORS = (
    # Named by the tests of Swift for TensorFlow's models, and by MindSpore's tutorials.
    "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/cifar-10-binary.tar.gz",
    "https://mindspore-website.obs.cn-north-4.myhuaweicloud.com/notebook/datasets/cifar-10-binary.tar.gz",
    # The home of the data. Last, because it has been throttled to less than 0.1 MB/s since June 2026.
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
)
"""Tried in this order, after those of the environment variable `URLS_VARIABLE`. Size and MD5 decide whether a file is the right one."""
URLS_VARIABLE = "NBCNN_CIFAR10_URLS"

OFFLINE = "Downloading is switched off (NBCNN_OFFLINE or download=False)."
REMEDY = "Delete it and get the binary version again (data/README.md says how)."

# The archive's other members are two small texts; anything larger does not belong there and is not worth decompressing.
_LARGEST_OTHER = 1 << 20
# Six files of others' records may differ in number; ten times as many do not.
_LARGEST_FILE = 10 * RECORDS * RECORD


def find(folder: Path) -> Path | None:
    """The folder with the six files, or the archive, in or right below `folder`; None if there is nothing of CIFAR-10's binary version.

    Raises DataMissing if only some of the six files are there and no archive.
    """
    partial = None
    for place in (folder, folder / FOLDER):
        present = [name for name in FILES if (place / name).is_file()]
        if len(present) == len(FILES):
            return place
        if present:
            partial = place, [name for name in FILES if name not in present]
    if (folder / ARCHIVE).is_file():
        return folder / ARCHIVE
    if partial is not None:
        place, absent = partial
        raise DataMissing(
            f"{place} holds some files of CIFAR-10, but not {', '.join(absent)}. Add them, or remove the others and put {ARCHIVE} there."
        )
    return None


def missing(folder: Path) -> DataMissing:
    """The error for a `folder` in which `find` found nothing: what was looked for, what is there instead, what would be right."""
    if not folder.is_dir():
        there = "which is a file, not a folder" if folder.exists() else "which does not exist"
    else:
        names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
        there = f"which holds {', '.join(names[:8])}{' …' if len(names) > 8 else ''}" if names else "which is empty"
    lines = [
        f"CIFAR-10 was not found in {folder}, {there}. Any one of these would do:",
        f"  {folder / ARCHIVE}   (as downloaded, {ARCHIVE_BYTES:,} bytes)",
        f"  {folder / FOLDER}/   with {TRAIN_FILES[0]} to {TRAIN_FILES[-1]} and {TEST_FILE}",
        f"  {folder}/   with these six files",
    ]
    if holds_pickles(folder):
        lines.append(PICKLES)
    lines.append(f"Get it from {MIRRORS[-1]} (MD5 {ARCHIVE_MD5}), or name the folder where it is with --data-dir,")
    lines.append("or train on embedded data: --dataset photos, digits or shapes.")
    return DataMissing("\n".join(lines))


PICKLES = (
    "The Python version of CIFAR-10 (data_batch_1 … without .bin) is there, but it consists of pickles, which can run code when they "
    f"are loaded: only the binary version ({ARCHIVE}) is read."
)


def holds_pickles(folder: Path) -> bool:
    """Whether `folder` holds the Python version of CIFAR-10, which is not read."""
    python_folder = "cifar-10-batches-py"
    candidates = (folder / "data_batch_1", folder / python_folder, folder / FOLDER / "data_batch_1", folder / "cifar-10-python.tar.gz")
    return any(path.exists() for path in candidates)


def read(where: Path) -> Dataset:
    """The data set from what `find` returned. Raises DataCorrupt with the file and the offset at which it is wrong."""
    if where.is_dir():
        contents = {name: _content(where / name) for name in FILES}
        origin = f"read from the six files in {where}"
    else:
        contents = read_archive(where)
        origin = f"read from {where}"
    train = [records(contents[name], where, name) for name in TRAIN_FILES]
    test = records(contents[TEST_FILE], where, TEST_FILE)
    count = sum(map(len, train))
    source = f"CIFAR-10 (A. Krizhevsky, 2009), {origin}"
    if (count, len(test)) != (len(TRAIN_FILES) * RECORDS, RECORDS):
        source += f"; not the official size: {count:,} training and {len(test):,} test images instead of 50,000 and 10,000"
    return Dataset(
        "cifar10",
        source,
        np.concatenate([part[:, 1:] for part in train]).reshape(-1, *SHAPE),
        np.concatenate([part[:, 0] for part in train]).astype(np.int32),
        np.ascontiguousarray(test[:, 1:]).reshape(-1, *SHAPE),
        test[:, 0].astype(np.int32),
        CLASSES,
    )


def _content(path: Path) -> bytes:
    """The bytes of one of the six files. Raises DataCorrupt if it is too large to be one."""
    with regular.opened(path) as file:
        if (nbytes := regular.size(file)) > _LARGEST_FILE:
            raise DataCorrupt(path, _LARGEST_FILE, f"the file holds {nbytes:,} bytes, official are {RECORDS * RECORD:,}", REMEDY)
        return file.read(nbytes)


def load(folder: Path, download: bool, log: Log | None) -> Dataset:
    """CIFAR-10 from `folder`, downloaded into it first if need be and allowed. Raises DataMissing or DataCorrupt; never falls back."""
    where = find(folder)
    if where is None:
        if not download:
            raise DataMissing(f"{missing(folder)}\n{OFFLINE}")
        if log and holds_pickles(folder):
            log(PICKLES)
        try:
            where = fetch(folder, log, hurried=False)
        except DataMissing as failure:
            raise DataMissing(f"{failure}\n{missing(folder)}") from failure
    return read(where)


def fetch(folder: Path, log: Log | None, *, hurried: bool) -> Path:
    """Download the archive into `folder` and return its path. Slow mirrors are accepted unless `hurried`. Raises DownloadFailed."""
    from nbcnn.datasets import download  # brings in http and ssl, which most runs do not need

    urls = (*os.environ.get(URLS_VARIABLE, "").replace(",", " ").split(), *MIRRORS)
    passes = (download.QUICK,) if hurried else (download.QUICK, download.PATIENT)
    return download.fetch(urls, folder / ARCHIVE, size=ARCHIVE_BYTES, md5=ARCHIVE_MD5, passes=passes, log=log)


def records(content: bytes, where: Path, name: str) -> np.ndarray:
    """The records in `content`, the bytes of file `name` of `where`: uint8 (n, 3073), not copied. Raises DataCorrupt."""
    path = where / name
    tail = len(content) % RECORD
    if not content:
        raise DataCorrupt(path, 0, f"the file is empty; official: {RECORDS * RECORD:,} bytes", REMEDY)
    if tail:
        problem = f"the file ends {tail:,} bytes into a record of {RECORD:,}: it holds {len(content):,} bytes, official are {RECORDS * RECORD:,}"
        raise DataCorrupt(path, len(content) - tail, problem, REMEDY)
    table = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
    wrong = np.flatnonzero(table[:, 0] >= len(CLASSES))
    if wrong.size:
        first = int(wrong[0])
        problem = f"record {first:,} has label {table[first, 0]}; labels are 0..9 ({wrong.size:,} of {len(table):,} records are wrong)"
        raise DataCorrupt(path, first * RECORD, problem, REMEDY)
    return table


def read_archive(path: Path) -> dict[str, bytes]:
    """The bytes of the six files in the .tar.gz at `path`, of exactly `RECORDS` records each; nothing is written anywhere.

    Only regular members named cifar-10-batches-bin/NAME are read; small others are skipped. Raises DataCorrupt for a damaged stream,
    a member of the wrong size, missing or twice there, a large member that does not belong, or a name that points outside.
    """
    wanted = {f"{FOLDER}/{name}": name for name in FILES}
    found: dict[str, bytes] = {}
    with regular.opened(path) as raw, gzip.GzipFile(fileobj=raw) as plain:

        def corrupt(problem: str) -> DataCorrupt:
            return DataCorrupt(path, raw.tell(), problem, REMEDY)

        try:
            for member in tar.members(plain):
                if member.name.startswith("/") or ".." in member.name.split("/"):
                    raise corrupt(f"member {quoted(member.name)} points outside the archive: this is not the official one")
                name = wanted.get(member.name)
                if name is None:
                    if member.size > _LARGEST_OTHER:
                        raise corrupt(f"member {quoted(member.name)} of {member.size:,} bytes does not belong to CIFAR-10's binary version")
                    continue
                if not member.regular or member.size != RECORDS * RECORD or name in found:
                    what = "is there twice" if name in found else f"has {member.size:,} bytes" if member.regular else "is not a regular file"
                    raise corrupt(f"member {quoted(member.name)} {what}; it must be one file of {RECORDS * RECORD:,} bytes")
                found[name] = member.read()
            # What follows the last member carries the checksum of the whole stream.
            plain.read(_LARGEST_OTHER)
        except (tar.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise corrupt(f"the archive is damaged here or shortly before ({error})") from error
    absent = [member for member, name in wanted.items() if name not in found]
    if absent:
        raise DataCorrupt(path, path.stat().st_size, f"the archive ends without {', '.join(absent)}", REMEDY)
    return found
