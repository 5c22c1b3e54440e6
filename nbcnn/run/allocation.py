"""This module checks that plans fit into memory, finds the largest batch that would, and allocates, fills, binds and compiles plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from nbcnn.gpu.arrays import DeviceArray
from nbcnn.gpu.compile_pool import compile_all
from nbcnn.gpu.staging import Staging, staging
from nbcnn.plan.graph import Buf, Plan
from nbcnn.plan.shapes import numel
from nbcnn.run.program import Program

if TYPE_CHECKING:
    from nbcnn.run.net import Net


class MemoryPlanError(RuntimeError):
    """The plan needs more memory than there is; the message says how many GiB, and the largest batch that fits.

    On the command line the exit code is 5. Nothing large is allocated before it is raised, so the program can go on with a smaller batch.

    Example:
        >>> import nbcnn
        >>> def fit(model, x, y, batch_size=1024):
        ...     try:
        ...         return model.fit(x, y, batch_size=batch_size)
        ...     except nbcnn.MemoryPlanError:
        ...         return fit(model, x, y, batch_size // 2)
        >>> nbcnn.MemoryPlanError.exit_code
        5
    """

    exit_code = 5


def check_memory(device: Any, planned: Mapping[str, int], what: str, largest: Callable[[int], int | None] | None = None) -> None:
    """Raise MemoryPlanError if the sum of `planned` bytes is more than `device` has free.

    `largest(free)` gives the largest batch that fits into `free` bytes, None if none does; it is asked only on failure.
    """
    needed, free = sum(planned.values()), device.free_bytes()
    if needed <= free:
        return
    message = f"{what} needs {gib(needed)}, {gib(free)} free"
    fits = largest(free) if largest else None
    raise MemoryPlanError(message + (f"; the largest batch that fits is {fits}" if fits else ""))


def largest_batch(tried: int, planned: Callable[[int], Mapping[str, int]]) -> Callable[[int], int | None]:
    """A function for `check_memory` that searches the largest batch below `tried` whose `planned` bytes fit into a given number."""

    def search(free: int) -> int | None:
        low, high = 0, tried
        while high - low > 1:
            middle = (low + high) // 2
            if sum(planned(middle).values()) <= free:
                low = middle
            else:
                high = middle
        return low or None

    return search


def gib(count: int) -> str:
    """Bytes in words: GiB from one GiB up, else MiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


class Allocated:
    """Plans of `net` in memory: one arena for all of them, an array for each of the caller's Bufs, and a bound program for each plan.

    plans   by any key, which is their program's in `programs`.
    bufs    the Bufs that no layer owns (io, and state of the optimizer and of the data), by the names that `upload` and `download` take.
    values  what some of them hold at first, or arrays on the device (`DeviceArray`) that stand for them; of the others, those whose home is state
            hold zeros, and the rest is not initialised.
    parts   Bufs that are elements [start, stop) of another, of the caller's or of the flat parameters.
    """

    def __init__(
        self,
        net: Net,
        plans: Mapping[Any, Plan],
        bufs: Mapping[str, Buf],
        values: Mapping[str, Any],
        parts: Mapping[Buf, tuple[Buf, int, int]] | None = None,
    ) -> None:
        self.device, self.bufs = net.device, dict(bufs)
        self.arena = self.device.empty(max(plan.arena_bytes for plan in plans.values()), "uint8")
        placed = {name: array for name, array in values.items() if isinstance(array, DeviceArray)}
        self._arrays = {name: placed[name].flat if name in placed else self.device.empty(numel(buf.shape), buf.dtype) for name, buf in bufs.items()}
        self.clear_state(but=values)
        for name, array in values.items():
            if name in placed:
                array.wait(self.device.stream)
            else:
                self.upload(name, array)
        fixed = net.fixed() | {buf: self._arrays[name] for name, buf in bufs.items()}
        fixed |= {part: fixed[owner][start:stop] for part, (owner, start, stop) in (parts or {}).items()}
        self._fixed, self._params = fixed, net.params
        self.programs = {key: Program(plan, net.params, self.arena, fixed) for key, plan in plans.items()}
        self._stagings: dict[tuple[str, str], list[Staging]] = {}

    def add(self, key: Any, plan: Plan) -> Program:
        """Bind and compile one more plan, which nobody could know of before; it has an arena of its own only where the common one is too small."""
        arena = self.arena if plan.arena_bytes <= self.arena.size else self.device.empty(plan.arena_bytes, "uint8")
        made = self.programs[key] = Program(plan, self._params, arena, self._fixed)
        compile_all(made.launches)
        return made

    def compile(self, say: Callable[[str], None] | None = None, also: Iterable[Any] = ()) -> int:
        """Compile what the programs launch, and the launches in `also`; returns how many kernels that were (`compile_pool.compile_all`)."""
        return compile_all([*also, *(launch for program in self.programs.values() for launch in program.launches)], say)

    def close(self) -> None:
        """Let the captured graphs of the programs go, which nothing else does; they must not be running."""
        for program in self.programs.values():
            program.close()

    def clear_state(self, but: Iterable[str] = ()) -> None:
        """Zeros into every Buf whose home is state, except those named in `but`."""
        for name, buf in self.bufs.items():
            if buf.home == "state" and name not in but:
                self.upload(name, np.zeros(buf.shape, buf.dtype))

    def array(self, name: str) -> Any:
        """The flat array of a Buf, on the device."""
        return self._arrays[name]

    @contextmanager
    def staged(self, source: str, target: str) -> Iterator[Staging | None]:
        """Page-locked memory for the arrays of two Bufs, what goes into one and what comes out of the other; None where there is none.

        Every context has its own, and leaves it to the next: within one the last run must have been waited for.
        """
        free = self._stagings.setdefault((source, target), [])
        made = free.pop() if free else staging(self.device, self._arrays[source], self._arrays[target])
        try:
            yield made
        finally:
            if made is not None:
                made.wait()
                free.append(made)

    def upload(self, name: str, values: np.ndarray) -> None:
        """Copy `values` into the array of a Buf; sizes must agree."""
        # On a GPU an array of zero elements has one (`Gpu.empty`).
        if values.size:
            self.device.upload(self._arrays[name], values)

    def download(self, name: str) -> np.ndarray:
        """A host copy of a Buf's array, flat, after everything enqueued has run."""
        return self.device.download(self._arrays[name])[: numel(self.bufs[name].shape)]
