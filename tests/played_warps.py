"""This module plays blocks of the correlation kernels on the host, for the protocol of their rings: barriers, TMA and wgmma, but no numbers.

The first lane of every warp is a thread of Python and runs the kernel's own code, in which instructions are played: TMA writes down what it would
have loaded where, wgmma what it would multiply, and at the wait for it that nobody has overwritten that. A block that waits for ever raises Stuck.
The blocks of a cluster are played together, by `play_cluster`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
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
        self.products = 0
        self.groups: list[list[tuple[int, Any]]] = [[]]


def on_host(function: Function) -> Any:
    """A device function that only calculates."""
    return Block(0, 1, 1, {}, {}).code(function)


class Cluster:
    """What the blocks of a cluster share: their barrier, at which a warp that has ended is not waited for."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks, self.changed, self.phase, self.come, self.gone = blocks, threading.Condition(), 0, 0, 0
        self.warps = sum(block.warps for block in blocks)

    def arrive(self, here: Any) -> None:
        with self.changed:
            here.phase = self.phase
            self.come += 1
            self._close()

    def leave(self) -> None:
        with self.changed:
            self.gone += 1
            self._close()

    def wait(self, here: Any) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase > here.phase, _SECONDS):
                raise Stuck(f"the barrier of a cluster: {self.come} of {self.warps} warps have come, {self.gone} have ended")

    def _close(self) -> None:
        if self.come and self.come + self.gone == self.warps:
            self.phase, self.come = self.phase + 1, 0
            self.changed.notify_all()


def play_cluster(blocks: Sequence[Block], kernel: Function, args: tuple[Any, ...]) -> None:
    """Run blocks of one cluster, by their ranks."""
    cluster = Cluster(blocks)
    for rank, block in enumerate(blocks):
        block.cluster, block.rank = cluster, rank
    started = [block.start(kernel, args) for block in blocks]
    for block, threads in zip(blocks, started, strict=True):
        block.join(threads)


class Block:
    """One block: `play(kernel, args)` runs it, and `stored` is what it had TMA store.

    sizes: bytes of a load by the name of its instruction, or a function of its tensor map. fill: what the sums of a thread are when its products have
    ended, a function of the thread. replaced: what is done instead of device functions, by the start of their qualified name,
    with the block before the arguments.
    """

    def __init__(self, number: int, grid: int, warps: int, sizes: dict[str, Any], replaced: dict[str, Any], fill: Any = None) -> None:
        self.warps, self.sizes, self.replaced = warps, sizes, replaced
        self.changed = threading.Condition()
        self.barriers: dict[int, _Barrier] = {}
        self.memory: dict[int, Any] = {}
        self.stored: list[Any] = []
        self.results: dict[int, Any] = {}
        self.here, self.errors = threading.local(), []
        self.named: dict[str, list[int]] = {}
        self.fill, self.written, self.out, self.left = fill, {}, {}, warps
        self.missed: set[int] = set()
        self.cluster, self.rank = Cluster([self]), 0
        self._known: dict[int, Any] = {}
        local, whole = SimpleNamespace(array=lambda count, kind: self._sums(count)), threading.Barrier(warps)
        self.cuda = SimpleNamespace(
            blockIdx=SimpleNamespace(x=number, y=0),
            gridDim=SimpleNamespace(x=grid),
            shared=SimpleNamespace(array=lambda *_: None),
            local=local,
            syncthreads=lambda: whole.wait(_SECONDS),
            syncwarp=lambda *_: None,
        )

    def play(self, kernel: Function, args: tuple[Any, ...]) -> None:
        self.join(self.start(kernel, args))

    def start(self, kernel: Function, args: tuple[Any, ...]) -> list[threading.Thread]:
        def warp(number: int) -> None:
            self.here.sums, self.here.thread = None, 32 * number
            try:
                self.code(kernel, number)(*args)
            except BaseException as error:
                with self.changed:
                    self.errors.append(error)
                    self.changed.notify_all()
            self.left -= 1
            self.cluster.leave()

        threads = [threading.Thread(target=warp, args=(number,), daemon=True) for number in range(self.warps)]
        for thread in threads:
            thread.start()
        return threads

    def join(self, threads: list[threading.Thread]) -> None:
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
        if name.startswith(("bar_sync", "bar_arrive")):
            waits, (number, threads) = name.startswith("bar_sync"), name.split("_")[2:]
            return lambda: self._meet(number, int(threads) // 32, waits)
        if name.startswith("wgmma_m64"):
            return self._multiply
        if name.startswith("wgmma_wait_group"):
            running = 0 if name.endswith("all") else int(name.rsplit("_", 1)[1])
            return lambda *_: self._finish(running)
        if name in self.sizes:
            return lambda to, source, *where: self._load(name, to, source, where)
        known = {
            "float_bits": lambda value: value,
            "bits_float": lambda value: value,
            "st_shared_b32": lambda at, *words: self._write(at, words),
            "st_shared_v4_b32_at": lambda at, *words: self._write(at, words),
            "ld_shared_v4_b32_at": lambda at: self._read(at),
            "st_global_v2": lambda at, *values: self._put(at // 4, values),
            "st_global_v4": lambda at, *values: self._put(at // 4, values),
            "cluster_rank": lambda: self.rank,
            "cluster_arrive": lambda: self.cluster.arrive(self.here),
            "cluster_arrive_relaxed": lambda: self.cluster.arrive(self.here),
            "cluster_wait": lambda: self.cluster.wait(self.here),
            "address_of_block": lambda at, rank: rank << 32 | at,
            "ld_of_block_v4_if": lambda at, wanted: self._read_block(at >> 32, at & 0xFFFFFFFF) if wanted else ((),) * 4,
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
            size = self.sizes[name](source) if callable(self.sizes[name]) else self.sizes[name]
            assert not self.written, "loaded into memory that has sums"
            self.memory[to] = (source, size, where[:at] + where[at + 1 :])
            barrier = self.barriers[where[at]]
            barrier.bytes -= size
            barrier.close()
            self.changed.notify_all()

    def _held(self, address: int) -> tuple[int, Any]:
        """(first, what lies there) of the load that filled an address."""
        first = max(at for at in self.memory if at <= address)
        assert address < first + self.memory[first][1]
        return first, self.memory[first]

    def _multiply(self, sums: Sums, *of_both: Any) -> None:
        """A product of two descriptors, or of four words and one."""
        *words, _ = of_both
        operands = [(descriptor & 0x3FFF) << 4 for descriptor in (words if len(words) == 2 else words[-1:])]
        sums.products += 1
        self.here.sums = sums
        for address in operands:
            sums.groups[-1].append(self._held(address))
        if operands[-1] % 128 == 0:  # the first of the four products of 128 bytes
            sums.log.append(tuple((address - self._held(address)[0], self._held(address)[1]) for address in operands))

    def _finish(self, running: int) -> None:
        sums = self.here.sums
        ended = len(sums.groups) - 1 - running
        for group in sums.groups[: max(0, ended)]:
            for at, content in group:
                assert self.memory[at] is content, "overwritten while it was multiplied"
        sums.groups = sums.groups[max(0, ended) :]
        if running == 0 and self.fill:
            sums[:] = self.fill(self.here.thread, len(sums))

    def _meet(self, number: str, warps: int, waits: bool) -> None:
        with self.changed:
            barrier = self.named.setdefault(number, [0, 0])
            phase = barrier[1]
            barrier[0] += 1
            if barrier[0] == warps:
                barrier[:] = 0, phase + 1
                self.changed.notify_all()
            elif waits and (not self.changed.wait_for(lambda: self.errors or barrier[1] > phase, _SECONDS) or self.errors):
                raise Stuck(f"named barrier {number}")

    def _write(self, at: int, words: tuple[Any, ...]) -> None:
        """Words to shared memory, over what a load has left there, each place once."""
        with self.changed:
            assert at % (4 * len(words)) == 0
            first = max((first for first in self.memory if first <= at), default=None)
            if first is not None and at < first + self.memory[first][1]:
                source, size, where = self.memory[first]
                self.memory[first] = (source, size, where)
            for i, word in enumerate(words):
                assert at + 4 * i not in self.written
                assert at + 4 * i not in self.missed, "read before it was written"
                self.written[at + 4 * i] = word

    def _read(self, at: int) -> tuple[Any, ...]:
        """Four words of shared memory; nothing where a lane would have written that is not played."""
        assert at % 16 == 0
        with self.changed:
            self.missed |= {at + 4 * i for i in range(4) if at + 4 * i not in self.written}
            return tuple(self.written.get(at + 4 * i, ()) for i in range(4))

    def _put(self, at: int, values: tuple[Any, ...]) -> None:
        """Values to memory, each place once."""
        with self.changed:
            for i, value in enumerate(values):
                assert at + i not in self.out
                self.out[at + i] = value

    def _read_block(self, rank: int, at: int) -> Any:
        other = self.cluster.blocks[rank]
        assert other.left, "a block has ended whose memory is read"
        return other._read(at)

    def _result(self, at: int) -> Any:
        return self.results[max(first for first in self.results if first <= at)]
