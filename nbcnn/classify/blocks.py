"""This module keeps the kernel matrix on disk. It is symmetric: one block for each two classes i ≤ j, and one for (test images, class j).

With 50,000 images in ten classes it is 5.5 GB + 2 GB of float32. That is too much to hold in memory, but each consumer needs
little at a time: a pair of classes needs three blocks, prediction a few rows. Plain reads and writes, no memory map: a full
disk is then an exception and not a signal, and resident memory is what was asked for.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.files.atomic import DiskFull
from nbcnn.ranks.team import LONG, Team, TeamError


class Blocks:
    """Room for the kernel values of `sizes[c]` training samples of each class c, and of `test_count` test samples.

    `folder` holds the file, which has no name: nothing is left of it when the last process that has it open ends, however it
    ends. Instances can be passed to spawned processes. Row index `len(sizes)` stands for the test samples.

    Raises DiskFull if the folder's file system has not the room.
    """

    def __init__(self, sizes: tuple[int, ...], test_count: int, folder: Path) -> None:
        self.sizes, self.test_count = tuple(sizes), test_count
        self._place()
        free = shutil.disk_usage(folder).free
        if free < self.nbytes:
            raise DiskFull(f"the kernel matrix needs {self.nbytes:,} bytes in {folder}, {free:,} are free; --scratch takes another folder")
        self._folder = folder
        # `close` closes it.
        self._file: Any = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115

    def _place(self) -> None:
        self.test_row = len(self.sizes)
        self._offsets: dict[tuple[int, int], int] = {}
        at = 0
        for j, columns in enumerate(self.sizes):
            for i in (*range(j + 1), self.test_row):
                self._offsets[i, j] = at
                at += 4 * self.rows(i) * columns
        self.nbytes = at

    def share(self, team: Team) -> Blocks:
        """The same file for every rank of `team`, rank 0's, whose values must be there by now; each closes its own.

        Raises TeamError for ranks on several machines: the file has no name.
        """
        if team.size == 1:
            return self
        if team.beside < team.size:
            raise TeamError("ranks on several machines cannot share the kernel matrix: launch classify on one machine")
        path = team.broadcast(f"/proc/{os.getpid()}/fd/{self._file.fileno()}".encode(), LONG)
        if not team.leads:
            self._file.close()
            self._file = open(path, "r+b", buffering=0)  # noqa: SIM115
        team.barrier()
        return self

    def rows(self, i: int) -> int:
        """Samples in row class `i`, which may be `test_row`."""
        return self.test_count if i == self.test_row else self.sizes[i]

    def write(self, i: int, j: int, first: int, values: np.ndarray) -> None:
        """Store `values`, float32 (m, sizes[j]), as rows `first`… of block (i, j), i ≤ j or i = test_row."""
        data, at = np.ascontiguousarray(values).data.cast("B"), self._offset(i, j, first)
        try:
            while data:
                written = os.pwrite(self._file.fileno(), data, at)
                data, at = data[written:], at + written
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(
                    f"the kernel matrix needs {self.nbytes:,} bytes in {self._folder} and the disk is full; --scratch takes another"
                ) from error
            raise

    def read(self, i: int, j: int, first: int, out: np.ndarray) -> None:
        """Fill `out`, float32 (m, sizes[j]) and contiguous, with rows `first`… of block (i, j)."""
        data, at = out.data.cast("B"), self._offset(i, j, first)
        while data:
            count = os.preadv(self._file.fileno(), [data], at)
            if count == 0:
                raise OSError(f"rows of block ({i}, {j}) of the kernel matrix were never written")
            data, at = data[count:], at + count

    def _offset(self, i: int, j: int, first: int) -> int:
        return self._offsets[i, j] + 4 * first * self.sizes[j]

    def close(self) -> None:
        """Give the disk space back."""
        self._file.close()

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"sizes": self.sizes, "test_count": self.test_count, "_folder": self._folder, "_file": reduction.DupFd(self._file.fileno())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._file = os.fdopen(state["_file"].detach(), "r+b", buffering=0)
        self._place()
