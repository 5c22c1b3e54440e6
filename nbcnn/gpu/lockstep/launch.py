"""Launches: the blocks of a grid run in step, as many at a time as make good use of NumPy, one group after the other.

Blocks are numbered x first, as threads are. That all blocks of a group reach a statement at the same time is one of the orders that a GPU may choose;
the order is the same in every run.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from nbcnn.files.quote import quoted
from nbcnn.gpu.lockstep import tma
from nbcnn.gpu.lockstep.copies import Copies
from nbcnn.gpu.lockstep.lanes import NotSimulated as NotSimulated
from nbcnn.gpu.lockstep.lanes import now
from nbcnn.gpu.lockstep.storage import POISON, Faulty, Global, Shared

LANES = 8192
"""Lanes that run together at most, if that is a block or more: an estimate, of where calls of NumPy are short beside their work."""
WARP = 32
_ONE_AT_A_TIME = threading.RLock()


def _extents(value: Any) -> tuple[int, int, int]:
    parts = tuple(map(int, value)) if isinstance(value, tuple | list) else (int(value),)
    x, y, z = (*parts, 1, 1)[:3]
    return x, y, z


class Blocks:
    """The blocks that run together: numbers of their threads, one element per lane, and their shared memory."""

    def __init__(self, launch: Launching, first: int, count: int) -> None:
        self.launch, self.first, self.count = launch, first, count
        self.block_dim, self.grid_dim, self.threads = launch.block, launch.grid, math.prod(launch.block)
        lane = np.arange(count * self.threads)
        self.number, self.thread = np.divmod(lane, self.threads)
        self.lane_of_warp = (self.thread % WARP).astype(np.int32)
        self.warps = -(-self.threads // WARP)
        self.warp = self.number * self.warps + self.thread // WARP
        x, y, _ = self.block_dim
        self.thread_index = tuple(self._shared(index) for index in (self.thread % x, self.thread // x % y, self.thread // (x * y)))
        x, y, _ = self.grid_dim
        at = first + self.number
        self.block_index = tuple(self._shared(index) for index in (at % x, at // x % y, at // (x * y)))
        self.cluster_rank = self._shared(at % launch.cluster)
        self.exits: Any = None
        """`lanes.Returns` of the kernel, where it has any: the threads that have ended."""
        self.copies = Copies(count * self.threads)
        """What cp.async has issued."""
        self.tma = tma.Copies()
        self.arrays: dict[Any, Any] = {}
        """Shared arrays by where they are made."""
        self.cache: dict[Any, np.ndarray] = {}

    @staticmethod
    def _shared(index: np.ndarray) -> Any:
        """int32 indices; one number where all lanes have the same."""
        return np.int32(index[0]) if index[0] == index[-1] and (index == index[0]).all() else index.astype(np.int32)

    def whose(self, lane: int) -> str:
        """A lane in words."""
        return self.launch.whose(self.first + int(self.number[lane]), int(self.thread[lane]))

    def shared(self, key: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """The shared array of a line of a kernel; of (0,), the one whose bytes the launch says."""
        dynamic = math.prod(shape) == 0
        found = self.arrays.get("dynamic" if dynamic else key)
        if found is None:
            nbytes = self.launch.shared if dynamic else math.prod(shape) * dtype.itemsize
            rows = np.full((self.count, -(-max(nbytes, 1) // 16) * 16), POISON, np.uint8)
            found = rows, nbytes
            self.arrays["dynamic" if dynamic else key] = found
        rows, nbytes = found
        return self.launch.make_shared(rows, (nbytes // dtype.itemsize,) if dynamic else shape, dtype)


class Launching:
    """What a launch is made of."""

    def __init__(self, name: str, grid: Any, block: Any, shared: int, cluster: int = 1) -> None:
        self.name, self.grid, self.block, self.shared, self.cluster = name, _extents(grid), _extents(block), int(shared), cluster
        self.make_global: Callable[..., Any] = Global
        self.make_shared: Callable[..., Any] = Shared
        self.watch: Any = None
        threads = math.prod(self.block)
        if threads > 1024 or min(self.grid + self.block) < 1:
            raise ValueError(f"{name}: no GPU runs a grid of {self.grid} blocks of {self.block} threads")
        if self.grid[0] % cluster:
            raise ValueError(f"{name}: a grid of {self.grid} blocks is not made of clusters of {cluster}")

    def whose(self, block: int, thread: int) -> str:
        """A thread of a block, by their numbers, in words."""
        x, y, _ = self.block
        p, q, _ = self.grid
        return f"thread ({thread % x}, {thread // x % y}, {thread // (x * y)}) of block ({block % p}, {block // p % q}, {block // (p * q)})"

    def groups(self, together: bool) -> list[tuple[int, int]]:
        """(first block, count) of the blocks that run together: whole clusters."""
        blocks = math.prod(self.grid)
        each = blocks if together else max(1, LANES // math.prod(self.block) // self.cluster) * self.cluster
        return [(first, min(each, blocks - first)) for first in range(0, blocks, each)]


watchers: list[Any] = []
"""`check.Watch` objects, of which the last is told what every launch does."""


class Kernel:
    """A kernel, to be launched as `kernel[grid, block, stream, shared_bytes](*args)`."""

    def __init__(self, function: Callable[..., None], options: dict[str, Any]) -> None:
        self.py_func, self.options = function, options

    def __getitem__(self, launch: Any) -> Callable[..., None]:
        grid, block, *rest = launch
        shared = rest[1] if len(rest) > 1 else 0
        return lambda *args: self.launch(grid, block, args, shared)

    def launch(self, grid: Any, block: Any, args: tuple[Any, ...], shared: int = 0, together: bool = False) -> None:
        """Run the kernel to its end. `together`: its blocks wait for each other. Raises what goes wrong in a thread, with its number."""
        launching = Launching(self.py_func.__name__, grid, block, shared, int(self.options.get("cluster") or 1))
        with _ONE_AT_A_TIME, np.errstate(all="ignore"):
            watch = watchers[-1] if watchers else None
            if watch is not None:
                watch.begins(launching, self.py_func, args)
            code = self.py_func.__code__
            names = code.co_varnames[: code.co_argcount]
            given = [self._argument(launching, value, names[i] if i < len(names) else "") for i, value in enumerate(args)]
            before = now.mask, now.empty, now.lanes, now.block
            try:
                for first, count in launching.groups(together):
                    now.block = Blocks(launching, first, count)
                    now.lanes = count * now.block.threads
                    now.mask, now.empty = None, np.zeros(now.lanes, np.bool_)
                    self.py_func(*given)
                    tma.ends()
                    if watch is not None:
                        watch.group_ends()
            except Faulty as error:
                if watch is None:
                    raise
                watch.broke(error)
            finally:
                now.mask, now.empty, now.lanes, now.block = before
            if watch is not None:
                watch.ends()

    @staticmethod
    def _argument(launching: Launching, value: Any, name: str) -> Any:
        if isinstance(value, np.ndarray) and value.ndim:
            return launching.make_global(value, name)
        if isinstance(value, tuple):
            return tuple(Kernel._argument(launching, each, name) for each in value)
        if isinstance(value, np.generic | int | float):
            return value
        raise TypeError(f"a kernel takes arrays and numbers, not {quoted(value)} for {name}")
