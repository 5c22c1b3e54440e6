"""This module plays blocks of the correlation kernels on the host, for the protocol of their rings: barriers, TMA and wgmma, but no numbers.

The first lane of every warp is a thread of Python and runs the kernel's own code, in which instructions are played: TMA writes down what it would
have loaded where, wgmma what it would multiply, and at the wait for it that nobody has overwritten that. A block that waits for ever raises Stuck.
"""

from __future__ import annotations

import threading
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

from nbcnn.gpu.language import Description, Function, Intrinsic, Number

_BASE = 1024
_SECONDS = 20


class Stuck(Exception):
    """A warp waits for a barrier whose phase does not end."""


class _Barrier:
    """An mbarrier."""

    def __init__(self, count: int) -> None:
        self.count, self.left, self.bytes, self.ended = count, count, 0, 0

    def close(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.left, self.ended = self.count, self.ended + 1
        assert self.left >= 0


class Sums(list):
    """The sums of a warp: what was multiplied into them, and what of it may still be running."""

    def __init__(self, count: int) -> None:
        super().__init__([0.0] * count)
        self.log: list[Any] = []
        self.groups: list[list[tuple[int, Any]]] = [[]]


def on_host(function: Function) -> Any:
    """A device function that only calculates."""
    return Block(0, 1, 1, {}, {}).code(function)


class Block:
    """One block: `play(kernel, args)` runs it, and `stored` is what it had TMA store.

    sizes: bytes of a load by the name of its instruction. replaced: what is done instead of device functions, by the start of their qualified name,
    with the block before the arguments.
    """

    def __init__(self, number: int, grid: int, warps: int, sizes: dict[str, int], replaced: dict[str, Any]) -> None:
        self.warps, self.sizes, self.replaced = warps, sizes, replaced
        self.changed = threading.Condition()
        self.barriers: dict[int, _Barrier] = {}
        self.memory: dict[int, Any] = {}
        self.stored: list[Any] = []
        self.results: dict[int, Any] = {}
        self.here, self.errors = threading.local(), []
        self.named: dict[str, threading.Barrier] = {}
        self._known: dict[int, Any] = {}
        local, whole = SimpleNamespace(array=lambda count, kind: self._sums(count)), threading.Barrier(warps)
        self.cuda = SimpleNamespace(
            blockIdx=SimpleNamespace(x=number),
            gridDim=SimpleNamespace(x=grid),
            shared=SimpleNamespace(array=lambda *_: None),
            local=local,
            syncthreads=lambda: whole.wait(_SECONDS),
        )

    def play(self, kernel: Function, args: tuple[Any, ...]) -> None:
        def warp(number: int) -> None:
            self.here.sums = None
            try:
                self.code(kernel, number)(*args)
            except BaseException as error:
                with self.changed:
                    self.errors.append(error)
                    self.changed.notify_all()

        threads = [threading.Thread(target=warp, args=(number,), daemon=True) for number in range(self.warps)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * _SECONDS)
        if self.errors:
            raise self.errors[0]

    def _sums(self, count: int) -> Sums:
        self.here.sums = Sums(count)
        return self.here.sums

    # -- the kernel's code with played instructions

    def code(self, function: Function, warp: int = 0) -> Any:
        """A kernel or a device function as Python's, for the first lane of a warp."""
        return self._played(function, SimpleNamespace(**vars(self.cuda), threadIdx=SimpleNamespace(x=32 * warp)))

    def _played(self, value: Any, cuda: Any, known: dict[int, Any] | None = None) -> Any:
        known = {} if known is None else known
        if not isinstance(value, Description):
            return value
        if isinstance(value, Number):
            return int
        if isinstance(value, Intrinsic):
            return self._instruction(value.__name__)
        if not isinstance(value, Function):
            return cuda if repr(value) == "cuda" else SimpleNamespace(uint8=None)
        for name, function in self.replaced.items():
            if value.py_func.__qualname__.startswith(name):
                return lambda *args: function(self, *args)
        if id(value) not in known:
            function = value.py_func
            cells = tuple(CellType() for _ in function.__closure__ or ())
            names: dict[str, Any] = {}
            known[id(value)] = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
            for name in function.__code__.co_names:
                if name in function.__globals__:
                    names[name] = self._played(function.__globals__[name], cuda, known)
            for cell, original in zip(cells, function.__closure__ or (), strict=True):
                cell.cell_contents = self._played(original.cell_contents, cuda, known)
        return known[id(value)]

    def _instruction(self, name: str) -> Any:
        if name.startswith("bar_sync"):
            threads = int(name.rsplit("_", 1)[1])
            with self.changed:
                barrier = self.named.setdefault(name, threading.Barrier(threads // 32))
            return lambda: barrier.wait(_SECONDS)
        if name.startswith("wgmma_m64"):
            return self._multiply
        if name.startswith("wgmma_wait_group"):
            running = 0 if name.endswith("all") else int(name.rsplit("_", 1)[1])
            return lambda *_: self._finish(running)
        if name in self.sizes:
            return lambda to, source, *where: self._load(name, to, source, where)
        known = {
            "byte_address_shared": lambda _: _BASE,
            "byte_address_global": lambda _: 0,
            "mbarrier_init": self._init,
            "mbarrier_arrive": lambda at: self._arrive(at, 0),
            "mbarrier_arrive_expect_tx": self._arrive,
            "mbarrier_try_wait_parity": self._wait,
            "wgmma_commit_group": lambda: self.here.sums.groups.append([]),
            "cp_async_bulk_tensor_4d_store": lambda target, *where: self.stored.append((target, where[:-1], self._result(where[-1]))),
        }
        return known.get(name, lambda *_: None)

    def _init(self, at: int, count: int) -> None:
        self.barriers[at] = _Barrier(count)

    def _arrive(self, at: int, count: int) -> None:
        with self.changed:
            barrier = self.barriers[at]
            barrier.left -= 1
            barrier.bytes += count
            barrier.close()
            self.changed.notify_all()

    def _wait(self, at: int, parity: int) -> None:
        with self.changed:
            # The phase under way has the parity of how many have ended: the one before it has the other.
            if not self.changed.wait_for(lambda: self.errors or self.barriers[at].ended & 1 != parity, _SECONDS) or self.errors:
                raise Stuck(f"barrier {at} of warp's phase {parity}")

    def _load(self, name: str, to: int, source: int, where: tuple[int, ...]) -> None:
        with self.changed:
            at = {"cp_async_bulk_tensor_2d": 2, "cp_async_bulk_tensor_4d": 4, "cp_async_bulk_tensor_4d_im2col": 4}[name]
            self.memory[to] = (source, self.sizes[name], where[:at] + where[at + 1 :])
            barrier = self.barriers[where[at]]
            barrier.bytes -= self.sizes[name]
            barrier.close()
            self.changed.notify_all()

    def _held(self, address: int) -> tuple[int, Any]:
        """(first, what lies there) of the load that filled an address."""
        first = max(at for at in self.memory if at <= address)
        assert address < first + self.memory[first][1]
        return first, self.memory[first]

    def _multiply(self, sums: Sums, a: int, b: int, add: int) -> None:
        operands = [(descriptor & 0x3FFF) << 4 for descriptor in (a, b)]
        for address in operands:
            sums.groups[-1].append(self._held(address))
        if operands[1] % 128 == 0:  # the first of the four products of 128 bytes
            sums.log.append(tuple((address - self._held(address)[0], self._held(address)[1]) for address in operands))

    def _finish(self, running: int) -> None:
        sums = self.here.sums
        ended = len(sums.groups) - 1 - running
        for group in sums.groups[: max(0, ended)]:
            for at, content in group:
                assert self.memory[at] is content, "overwritten while it was multiplied"
        sums.groups = sums.groups[max(0, ended) :]

    def _result(self, at: int) -> Any:
        return self.results[max(first for first in self.results if first <= at)]
