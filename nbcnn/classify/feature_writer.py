"""This module writes features on disk, in the format of `features.py`: rows as they come, and everything in its place at the end."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from nbcnn.classify.features import (
    CHUNK_BYTES,
    CSV_BYTES_PER_VALUE,
    FORMAT,
    HEADER_BYTES,
    INDEX,
    MIRRORED_VERSION,
    SPLITS,
    STORAGES,
    VERSION,
    Origin,
    identity,
    mirrored_path,
)
from nbcnn.files import regular
from nbcnn.files.atomic import DiskFull, named, replace_bytes, temporary
from nbcnn.files.quote import quoted

AHEAD = 8
"""Blocks that wait to be hashed and written: the GPU makes the next ones meanwhile. Blocks that stay in memory anyway may all wait."""
SYNC_BYTES = 256 << 20
"""Bytes after which the disk is asked to keep what it has, so that little is left to wait for at the end."""


class FeatureWriter:
    """Writes one split of `count` rows of `width` features into `folder`; a context manager.

        with FeatureWriter(folder, "train", 50000, 8192, labels=a) as train, FeatureWriter(folder, "test", 10000, 8192, labels=b) as test:
            train.write(0, block)                   # rows in order, each once
            …
            publish(folder, origin, train, test)

    With `mirrored` the rows are those of the mirrored images, without labels and never as csv. Everything goes to temporary names (`partial`)
    until `publish`; leaving the context without it removes them, and features that were in the folder before stay as they were. Whoever writes
    holds the folder (`nbcnn.files.lock`).

    One thread hashes the blocks and another writes them, beside what the caller does: of 2 GB hashing takes 1.4 s, writing 0.5 s and the disk
    as long again, computing 0.3 s. `ahead` blocks may wait for each. An error of theirs is raised by a later `write`, or by `publish`.

    Raises ValueError for labels of another count, an unknown storage, or mirrored images as csv; DiskFull if the folder's file system has
    not the room.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        split: str,
        count: int,
        width: int,
        *,
        labels: np.ndarray | None = None,
        storage: str = "npy",
        mirrored: bool = False,
        ahead: int = AHEAD,
    ) -> None:
        if split not in SPLITS or storage not in STORAGES:
            raise ValueError(f"split must be one of {SPLITS} and storage one of {STORAGES}, got {quoted(split)} and {quoted(storage)}")
        if mirrored and (storage != "npy" or labels is not None):
            raise ValueError("features of mirrored images are stored as npy, without labels: those are the images' own")
        if labels is not None and labels.shape != (count,):
            raise ValueError(f"{count} {split} images need {count} labels, got {labels.shape}")
        self.folder, self.split, self.count, self.width, self.storage = Path(folder), split, count, width, storage
        self.labels = None if labels is None else np.ascontiguousarray(labels, "<i4")
        named = self.folder / (f"{split}_features.npy" if storage == "npy" else f"features_{split}.csv")
        self.path = mirrored_path(self.folder, split) if mirrored else named
        self.partial = temporary(self.path)
        self.rows = 0
        self._ahead = ahead
        self._hash = hashlib.sha256()
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"nbcnn-{what}") for what in ("hash", "write")]
        self._waiting: deque[Future[None]] = deque()
        self._unsynced = 0
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
        per_value = 4 if self.storage == "npy" else CSV_BYTES_PER_VALUE
        return HEADER_BYTES + self.count * (self.width * per_value + 12)

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
        """Append `block`, (n, width) floats, the rows from `offset` on; rows come in order. The block must not be changed afterwards.

        Raises ValueError if they do not, or if they do not fit; DiskFull if the disk did not hold these or earlier ones.
        """
        if offset != self.rows or block.ndim != 2 or block.shape[1] != self.width or offset + len(block) > self.count:
            raise ValueError(
                f"{self.split}: rows {offset} to {offset + len(block)} of shape {block.shape} after {self.rows} of ({self.count}, {self.width})"
            )
        block = np.ascontiguousarray(block, "<f4")
        for thread, work in zip(self._threads, (self._hash_block, self._write_block), strict=True):
            self._waiting.append(thread.submit(work, offset, block))
        self._settle(2 * self._ahead)
        self.rows += len(block)

    def _hash_block(self, offset: int, block: np.ndarray) -> None:
        self._hash.update(block.data)

    def _write_block(self, offset: int, block: np.ndarray) -> None:
        if self.storage == "npy":
            self._file.write(block.data)
            self._unsynced += block.nbytes
            if self._unsynced >= SYNC_BYTES:
                self._unsynced = 0
                self._file.flush()
                os.fsync(self._file.fileno())
            return
        labels = np.full(self.count, -1) if self.labels is None else self.labels
        for label, row in zip(labels[offset:].tolist(), block, strict=False):
            self._file.write((self._line % (label, *row.tolist())).encode())

    def _settle(self, left: int = 0) -> None:
        """Wait until at most `left` blocks wait to be hashed or written. Raises what a thread raised."""
        while len(self._waiting) > left:
            try:
                self._waiting.popleft().result()
            except OSError as error:
                raise self._explained(error) from error

    def adopt(self, end: int) -> None:
        """Take the rows up to `end` as other ranks wrote them (`FeaturePart`), by reading them back. Raises ValueError if they are not there."""
        self._settle()
        with regular.opened(self.partial) as file:
            file.seek(HEADER_BYTES + 4 * self.rows * self.width)
            left = 4 * (end - self.rows) * self.width
            while left:
                block = file.read(min(left, CHUNK_BYTES))
                if not block:
                    raise ValueError(f"{self.split}: another rank's rows are missing; is {self.folder} the same folder for all ranks?")
                self._hash.update(block)
                left -= len(block)
        self.rows = end

    def _explained(self, error: OSError) -> OSError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DiskFull(f"{self.path} needs {self.nbytes:,} bytes and the disk is full; features already in {self.folder} are untouched")
        return OSError(error.errno, f"cannot be saved ({error.strerror or error})", str(self.path))

    def _finish(self) -> dict[str, Any]:
        """Make the temporary file durable and describe it. Raises ValueError if rows are missing."""
        if self.rows != self.count:
            raise ValueError(f"{self.split}: {self.rows} of {self.count} rows were written")
        self._settle()
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise self._explained(error) from error
        labels = None if self.labels is None else hashlib.sha256(self.labels.data).hexdigest()
        return {"count": self.count, "sha256": self._hash.hexdigest(), "labels_sha256": labels}

    def _abandon(self) -> None:
        for thread in getattr(self, "_threads", ()):
            thread.shutdown(wait=True, cancel_futures=True)
        if file := getattr(self, "_file", None):
            # On a full disk the buffer cannot be flushed; the file goes away anyway.
            with contextlib.suppress(OSError):
                file.close()
        with contextlib.suppress(OSError):
            self.partial.unlink(missing_ok=True)

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._abandon()


class FeaturePart:
    """The rows from `first` on that a rank writes into the npy file that rank 0's `FeatureWriter` has begun, as `partial`; on disk when this
    context ends."""

    def __init__(self, partial: Path, split: str, first: int, width: int) -> None:
        self.split, self.rows, self._width, self._path = split, first, width, partial
        self._file = open(partial, "r+b")  # noqa: SIM115
        self._file.seek(HEADER_BYTES + 4 * first * width)

    def write(self, offset: int, block: np.ndarray) -> None:
        """Append rows like `FeatureWriter.write`."""
        if offset != self.rows or block.shape[1:] != (self._width,):
            raise ValueError(f"{self.split}: rows {offset} of shape {block.shape} where row {self.rows} of {self._width} values is due")
        self._file.write(np.ascontiguousarray(block, "<f4").data)
        self.rows += len(block)

    def __enter__(self) -> FeaturePart:
        return self

    def __exit__(self, *_: object) -> None:
        with named(self._path), self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


def publish(
    folder: str | os.PathLike[str],
    origin: Origin,
    train: FeatureWriter,
    test: FeatureWriter,
    mirrored: tuple[FeatureWriter, FeatureWriter] | None = None,
) -> str:
    """Put the written splits and their description in place of what `folder` held; return the features' SHA-256.

    `mirrored` are the writers of the mirrored training and test images.

    `features.json` comes last: until it describes the new arrays, readers report the folder as damaged instead of mixing
    old and new. Raises ValueError if rows are missing or the splits do not belong together, DiskFull as `FeatureWriter`.
    """
    if train.width != test.width or train.storage != test.storage or (train.labels is None) != (test.labels is None):
        raise ValueError("training and test features differ in width, storage, or in having labels")
    if mirrored and [(each.count, each.width) for each in mirrored] != [(each.count, each.width) for each in (train, test)]:
        raise ValueError("features of the mirrored images differ in count or width from those of the images")
    if (origin.classes is None) != (train.labels is None):
        raise ValueError("labels and class names go together")
    folder = Path(folder)
    writers = {"train": train, "test": test}
    splits = {name: writer._finish() for name, writer in writers.items()}
    for name, writer in zip(SPLITS, mirrored or (), strict=False):
        splits[name]["mirrored_sha256"] = writer._finish()["sha256"]
    index: dict[str, Any] = {
        "format": FORMAT,
        "version": MIRRORED_VERSION if mirrored else VERSION,
        "storage": train.storage,
        "dtype": "float32",
        "width": train.width,
        "splits": splits,
        "sha256": identity(splits),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "origin": origin.noted(),
    }
    for name, writer in writers.items():
        with named(writer.path):
            os.replace(writer.partial, writer.path)
        if writer.storage == "npy" and writer.labels is not None:
            replace_bytes(folder / f"{name}_labels.npy", _npy_bytes(writer.labels))
    for writer in mirrored or ():
        with named(writer.path):
            os.replace(writer.partial, writer.path)
    replace_bytes(folder / INDEX, (json.dumps(index, indent=1) + "\n").encode())
    for name in SPLITS:
        stale = [f"features_{name}.csv"] if train.storage == "npy" else [f"{name}_features.npy", f"{name}_labels.npy"]
        if train.labels is None:
            stale.append(f"{name}_labels.npy")
        if not mirrored:
            stale.append(mirrored_path(folder, name).name)
        for file in stale:
            (folder / file).unlink(missing_ok=True)
    return index["sha256"]


def _npy_bytes(array: np.ndarray) -> bytes:
    from io import BytesIO

    buffer = BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=False)
    return buffer.getvalue()
