"""Global and shared arrays that show every access to a `Watch` (`check.py`) before it is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from nbcnn.gpu.lockstep.numbers import cast
from nbcnn.gpu.lockstep.storage import Global, Memory, Shared

if TYPE_CHECKING:
    from nbcnn.gpu.lockstep.check import Watch


class _Watched(Memory):
    """An array whose accesses a `Watch` sees; what it is an array of comes behind this class in the order of bases."""

    watch: Watch

    def __getitem__(self, i: Any) -> Any:
        self.watch.access(self, self.flat_index(i), 1, False)
        return super().__getitem__(i)

    def __setitem__(self, i: Any, value: Any) -> None:
        self.watch.access(self, self.flat_index(i), 1, True, (cast(value, self.dtype),))
        super().__setitem__(i, value)

    def load(self, at: Any, count: int) -> tuple[Any, ...]:
        self.watch.access(self, at, count, False)
        unwatched = super().__getitem__
        return tuple(unwatched(at + k) for k in range(count))

    def store(self, at: Any, values: tuple[Any, ...]) -> None:
        self.watch.access(self, at, len(values), True, tuple(cast(value, self.dtype) for value in values))
        for k, value in enumerate(values):
            super().__setitem__(at + k, value)


class WatchedGlobal(_Watched, Global):
    """A device array whose accesses a `Watch` sees."""

    def __init__(self, watch: Watch, array: np.ndarray, name: str = "") -> None:
        super().__init__(array, name)
        self.watch, self.extent, self.origin = watch, self.flat.nbytes, 0
        self.address = self.flat.__array_interface__["data"][0]

    def words(self, dtype: np.dtype) -> Any:
        if dtype is self.flat.dtype:
            return self
        return WatchedGlobal(self.watch, super().words(dtype).flat, self.name)


class WatchedShared(_Watched, Shared):
    """A shared array whose accesses a `Watch` sees."""

    def __init__(self, watch: Watch, rows: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> None:
        super().__init__(rows, shape, dtype)
        self.watch, self.extent, self.origin = watch, rows.size, 0
        self.address = id(rows)

    def words(self, dtype: np.dtype) -> Any:
        if dtype is self.flat.dtype:
            return self
        shape = (self.size * self.flat.dtype.itemsize // dtype.itemsize,)
        return WatchedShared(self.watch, self.rows, shape, dtype)
