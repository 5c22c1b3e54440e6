"""The checking mode: what is wrong with a kernel that a GPU may run without a word, and what its accesses cost.

    from nbcnn.gpu.lockstep.check import checking

    with checking() as found:
        kernel[grid, block](...)
    found.faults            # races, accesses out of bounds, shared memory read before it is written, …
    found.launches[0].lines # of every line: requests of warps, sectors or bank conflicts, bytes

A *race* is two accesses of one byte by two threads, one of them a write, that nothing puts in an order. In a block `syncthreads` does, in a warp
`syncwarp`; between blocks a fence (`threadfence`) behind the write, an atomic update behind the fence, and one of the reader behind that; between
the blocks of a cluster its barrier, which no block may end before if another reads its shared memory. Whoever touches shared memory to which a copy
by cp.async or TMA is on its way has not waited for it, whatever lies there. Messages between blocks (`nbcnn.ops.ptx.grid`) are not looked at.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from nbcnn.gpu.lockstep.findings import Fault, Found, LaunchReport, Line
from nbcnn.gpu.lockstep.lanes import active, lane_array, now
from nbcnn.gpu.lockstep.launch import WARP, Launching, watchers
from nbcnn.gpu.lockstep.storage import Faulty
from nbcnn.gpu.lockstep.watched import WatchedGlobal, WatchedShared

SECTOR, BANKS, BANK = 32, 32, 4
_NOBODY, _MANY = -1, -2
_HERE = os.path.dirname(__file__)
_PTX = os.path.join(os.path.dirname(os.path.dirname(_HERE)), "ops", "ptx")


class _Shadow:
    """Who has last written and read every byte of an array, and when."""

    def __init__(self, nbytes: int) -> None:
        self.writer, self.reader = np.full(nbytes, _NOBODY), np.full(nbytes, _NOBODY)
        self.wrote, self.read = np.zeros(nbytes, np.int64), np.zeros(nbytes, np.int64)
        """The thread's epoch: barriers of its block."""
        self.wrote_warp, self.read_warp = np.zeros(nbytes, np.int64), np.zeros(nbytes, np.int64)
        """Barriers of its warp. `read_warp`: of the last reader."""
        self.readers_warp, self.readers_block = np.full(nbytes, _NOBODY), np.full(nbytes, _NOBODY)
        self.time = np.zeros(nbytes, np.int64)
        """The number of the statement that has written it."""
        self.coming = np.zeros(nbytes, np.int64)
        """Copies by cp.async and TMA that are on their way to it."""
        self.value = np.zeros(nbytes, np.uint8)
        self.updaters = np.full((2, nbytes), _NOBODY)
        """The first and the last thread that has updated a byte by an atomic since the last barrier, and when."""
        self.updated, self.updated_warp = np.zeros(nbytes, np.int64), np.zeros(nbytes, np.int64)


class Watch:
    """Looks at every access of the launches under it."""

    def __init__(self, found: Found) -> None:
        self.found = found
        self._said: set[tuple[str, str]] = set()
        self.quiet, self.counts, self.anything = False, True, False

    # -- a launch

    def begins(self, launching: Launching, function: Any, args: tuple[Any, ...]) -> None:
        """A launch begins: its arrays are watched ones, and nobody has read or written anything."""
        launching.make_global = lambda array, name="": WatchedGlobal(self, array, name)
        launching.make_shared = lambda rows, shape, dtype: WatchedShared(self, rows, shape, dtype)
        launching.watch = self
        self.launching, self.report = launching, LaunchReport(launching.name, launching.grid, launching.block)
        self.found.launches.append(self.report)
        self._lines: dict[tuple[str, str], Line] = {}
        self._shadows: dict[Any, _Shadow] = {}
        self.clock = 0
        blocks = math.prod(launching.grid)
        self.fenced, self.released = np.full(blocks, -1), np.full(blocks, -1)
        """When every block last fenced; and when it had last fenced at its last atomic update."""
        self.released_at, self.acquired_at = np.full(blocks, np.iinfo(np.int64).max), np.full(blocks, -1)
        self.arrived, self.shown = np.full(blocks, -1), np.full(blocks, -1)
        """When every block last arrived at its cluster's barrier with a release; and when it had, at the last one that it waited for."""
        self.waits, self.read_in = np.zeros(blocks, np.int64), np.full(blocks, -1)
        """How often every block has waited for its cluster; and in which of those spans another block last read its shared memory."""
        self.epochs: Any = None
        self._group: Any = None

    def group_ends(self) -> None:
        """The blocks that ran together have ended."""
        gone = np.flatnonzero(self.read_in >= self.waits)
        if len(gone):
            self.fault("race of a cluster", f"{self.launching.whose(int(gone[0]), 0)} ends while another block may yet read its shared memory")
            self.read_in[gone] = -1
        if now.block.first == 0:
            self.report.barriers = int(self._epoch()[0])
            self.report.shared = sum(nbytes for _, nbytes in now.block.arrays.values())
        self._shadows = {key: shadow for key, shadow in self._shadows.items() if key[0] == "global"}

    def broke(self, error: Faulty) -> None:
        """The launch ends with an error of a thread's."""
        frame, line = error.__traceback__, ""
        while frame is not None:
            file = frame.tb_frame.f_code.co_filename
            line = line if file.startswith((_HERE, _PTX)) else f"{file}:{frame.tb_lineno}"
            frame = frame.tb_next
        self.fault(error.kind, str(error), line)

    def ends(self) -> None:
        """The launch has ended: its lines stand in the order of the source."""
        self.report.lines = sorted(
            self._lines.values(), key=lambda line: (line.line.rpartition(":")[0], int(line.line.rpartition(":")[2]), line.what)
        )

    def _epoch(self) -> np.ndarray:
        """Barriers that each block of the group has passed."""
        if self._group is not now.block:
            self._group = now.block
            self.epochs = np.zeros(now.block.count, np.int64)
            self.warp_epochs = np.zeros(now.block.count * now.block.warps, np.int64)
        return self.epochs

    def fault(self, kind: str, text: str, line: str = "") -> None:
        """Add a fault, once for a line."""
        line = line or _line()
        if (kind, line) not in self._said:
            self._said.add((kind, line))
            self.found.faults.append(Fault(kind, line, text))

    # -- barriers, shuffles, atomics

    def barrier(self) -> None:
        """Active lanes are at a barrier of their blocks; a fault if a thread that still runs is not."""
        block, epoch = now.block, self._epoch()
        here = np.ones(now.lanes, np.bool_) if now.mask is None else now.mask
        alive = np.ones(now.lanes, np.bool_) if block.exits is None or block.exits.gone is None else ~block.exits.gone
        come, expected = (np.bincount(block.number[lanes], minlength=block.count) for lanes in (here, alive | here))
        wrong = np.flatnonzero((come > 0) & (come < expected))
        if len(wrong):
            lane = int(np.flatnonzero(alive & ~here & (block.number == wrong[0]))[0])
            self.fault("barrier", f"{come[wrong[0]]} of {expected[wrong[0]]} threads are here, and {block.whose(lane)} is not")
        epoch += come > 0

    def warp_barrier(self) -> None:
        """Active lanes are at a barrier of their warps."""
        self._epoch()
        self.warp_epochs[np.unique(now.block.warp[active()])] += 1

    def fence(self) -> None:
        """Active lanes make what their blocks have written visible to other blocks."""
        blocks = np.unique(now.block.first + now.block.number[active()])
        self.clock += 1
        self.fenced[blocks] = self.clock

    def cluster_arrive(self, releases: bool) -> None:
        """Active lanes are at the barrier of their clusters, what they wrote before is for all to see if they release it."""
        self.clock += 1
        if releases:
            self.arrived[np.unique(now.block.first + now.block.number[active()])] = self.clock

    def cluster_wait(self) -> None:
        """Active lanes wait for their clusters: a barrier of their blocks, too."""
        self.barrier()
        blocks = np.unique(now.block.first + now.block.number[active()])
        self.shown[blocks] = self.arrived[blocks]
        self.waits[blocks] += 1

    def of_block(self, array: Any, at: np.ndarray, owner: np.ndarray) -> None:
        """Active lanes read an element of the shared memory of the blocks `owner`, numbers of the blocks that run together."""
        lanes = active()
        lanes = lanes[owner[lanes] != now.block.number[lanes]]
        shadow, blocks = self._shadow(array), now.block.first + owner[lanes]
        first = at[lanes].astype(np.int64) * array.flat.dtype.itemsize + array.origin + owner[lanes] * array.rows.shape[1]
        places = first[:, None] + np.arange(array.flat.dtype.itemsize)
        hidden = ((shadow.writer[places] == _NOBODY) | (shadow.time[places] >= self.shown[blocks][:, None])).any(1)
        if hidden.any():
            i = int(np.flatnonzero(hidden)[0])
            self.fault(
                "race of a cluster", f"{now.block.whose(int(lanes[i]))} reads element {at[lanes][i]} of another block, which has not released it"
            )
        np.maximum.at(self.read_in, blocks, self.waits[now.block.first + now.block.number[lanes]])

    def copies(self, array: Any, at: Any, count: int, change: int) -> None:
        """Copies of the active lanes to `count` elements from `at` on begin (`change` 1) or arrive (-1)."""
        lanes = active()
        np.add.at(self._shadow(array).coming, self._places(array, np.asarray(at)[lanes].astype(np.int64), count, lanes), change)

    def landed(self, array: Any, at: Any, count: int) -> None:
        """Copies of the active lanes have arrived for all threads that wait for their barrier: what they wrote is in an order with all accesses."""
        self.copies(array, at, count, -1)
        lanes, shadow = active(), self._shadow(array)
        places = self._places(array, np.asarray(at)[lanes].astype(np.int64), count, lanes)
        shadow.wrote[places] = shadow.wrote_warp[places] = -1

    def shuffle(self, index: np.ndarray) -> None:
        """Every active lane reads a register of lane `index`; a fault if that one is not active."""
        self._epoch()
        lanes = active()
        self.report.shuffles += len(np.unique(now.block.warp[lanes]))
        if now.mask is None:
            return
        missing = lanes[~now.mask[index[lanes]]]
        if len(missing):
            lane = int(missing[0])
            self.fault("shuffle", f"{now.block.whose(lane)} asks {now.block.whose(int(index[lane]))}")

    def atomic(self, array: Any, index: Any) -> None:
        """Active lanes update an element, one after the other: each publishes what its block wrote before its fence, and sees what others have."""
        lanes = active()
        blocks = now.block.first + now.block.number[lanes]
        for block in blocks.tolist():
            self.clock += 1
            self.released[block], self.released_at[block], self.acquired_at[block] = self.fenced[block], self.clock, self.clock
        self._count(array, index, 1, "atomic")
        if array.space == "shared" and not self.quiet and len(lanes):
            self._update(array, index, lanes)

    def _update(self, array: Any, index: Any, lanes: Any) -> None:
        """Active lanes update an element of a shared array: a fault if nobody has written it, or another thread without a barrier between."""
        at = np.asarray(lane_array(index))[lanes].astype(np.int64)
        shadow, width, block = self._shadow(array), array.flat.dtype.itemsize, now.block
        places = (at * width + array.origin + block.number[lanes] * array.rows.shape[1])[:, None] + np.arange(width)
        who = block.first * block.threads + lanes
        epoch, warp_epoch = self._epoch()[block.number[lanes]], self.warp_epochs[block.warp[lanes]]
        self._initialised(shadow, places, lanes, at)
        self._ordered(shadow.writer[places], shadow.wrote[places], shadow.wrote_warp[places], shadow.time[places],
                      who, epoch, warp_epoch, lanes, at, "update", "written", array)  # fmt: skip
        fresh = (shadow.updaters[0][places] == _NOBODY) | (shadow.updated[places] < epoch[:, None])
        owners, epochs, warp_epochs = (np.broadcast_to(each[:, None], places.shape) for each in (who, epoch, warp_epoch))
        shadow.updaters[0][places[fresh][::-1]] = owners[fresh][::-1]
        shadow.updaters[1][places], shadow.updated[places], shadow.updated_warp[places] = owners, epochs, warp_epochs

    def _initialised(self, shadow: _Shadow, places: Any, lanes: Any, at: Any) -> None:
        """A fault if nobody has written what the lanes read."""
        never = (shadow.writer[places] == _NOBODY).any(1)
        if never.any():
            i = int(np.flatnonzero(never)[0])
            self.fault("uninitialised", f"element {at[i]}, by {now.block.whose(int(lanes[i]))}")

    # -- accesses

    def access(self, array: Any, index: Any, count: int, writes: bool, values: tuple[Any, ...] = ()) -> None:
        """Active lanes read or write `count` elements from `index` on."""
        if self.quiet:
            return
        lanes = active()
        at = np.asarray(lane_array(index))[lanes].astype(np.int64)
        if not len(lanes) or (at < 0).any() or (at + count > array.size).any():
            return  # which the array itself refuses
        width = array.flat.dtype.itemsize * count
        self._count(array, index, count, "store" if writes else "load")
        shadow = self._shadow(array)
        places = self._places(array, at, count, lanes)
        if (early := (shadow.coming[places] > 0).any(1)).any():
            i = int(np.flatnonzero(early)[0])
            does = "writes" if writes else "reads"
            self.fault("copy", f"{now.block.whose(int(lanes[i]))} {does} element {at[i]} of {_called(array)}, to which a copy is on its way")
        who = now.block.first * now.block.threads + lanes
        epoch, warp = self._epoch()[now.block.number[lanes]], now.block.warp[lanes]
        warp_epoch = self.warp_epochs[warp]
        if not writes and array.space == "shared" and not self.anything:
            self._initialised(shadow, places, lanes, at)
        column = (slice(None), None)
        self._ordered(shadow.writer[places], shadow.wrote[places], shadow.wrote_warp[places], shadow.time[places],
                      who, epoch, warp_epoch, lanes, at, "read" if not writes else "write", "written", array)  # fmt: skip
        for updater in shadow.updaters if array.space == "shared" else ():
            self._ordered(updater[places], shadow.updated[places], shadow.updated_warp[places], shadow.time[places],
                          who, epoch, warp_epoch, lanes, at, "read" if not writes else "write", "updated", array)  # fmt: skip
        if writes:
            self._unread(shadow, places, who, epoch, warp, warp_epoch, lanes, at, array)
            self._alone(places, who, values, array, lanes, at)
            self.clock += 1
            shadow.writer[places] = np.broadcast_to(who[column], places.shape)
            shadow.wrote[places], shadow.wrote_warp[places], shadow.time[places] = epoch[column], warp_epoch[column], self.clock
            shadow.reader[places] = shadow.readers_block[places] = shadow.readers_warp[places] = _NOBODY
            return
        self._note_readers(shadow, places.reshape(-1), *(np.repeat(each, width) for each in (who, epoch, warp, warp_epoch)))

    @staticmethod
    def _places(array: Any, at: np.ndarray, count: int, lanes: np.ndarray) -> np.ndarray:
        """The bytes of `count` elements from `at` on, by lane, as a shadow numbers them."""
        first = at * array.flat.dtype.itemsize + array.origin
        if array.space == "shared":
            first = first + now.block.number[lanes] * array.rows.shape[1]
        return first[:, None] + np.arange(array.flat.dtype.itemsize * count)

    def _note_readers(self, shadow: _Shadow, flat: Any, who: Any, epoch: Any, warp: Any, warp_epoch: Any) -> None:
        """Note who reads the bytes `flat`; what a thread of the same block read before a barrier is forgotten."""
        block = who // now.block.threads
        stale = (shadow.readers_block[flat] == block) & (shadow.read[flat] < epoch)
        for own, noted in ((who, shadow.reader), (warp, shadow.readers_warp), (block, shadow.readers_block)):
            before = np.where(stale, _NOBODY, noted[flat])
            noted[flat] = own
            # Whoever is not the one noted now has read it together with another.
            several = (noted[flat] != own) | ((before != _NOBODY) & (before != own))
            noted[flat[several]] = _MANY
        shadow.read[flat], shadow.read_warp[flat] = epoch, warp_epoch

    def _ordered(self, writer: Any, wrote: Any, wrote_warp: Any, time: Any, who: Any, epoch: Any, warp_epoch: Any, lanes: Any, at: Any,
                 does: str, was: str, array: Any) -> None:  # fmt: skip
        """A fault if another thread has written what the lanes access, and nothing lies between."""
        threads = now.block.threads
        other = (writer >= 0) & (writer != who[:, None])
        if not other.any():
            return
        same_block = writer // threads == (who // threads)[:, None]
        same_warp = same_block & (writer % threads // WARP == (who % threads // WARP)[:, None])
        ordered = (wrote < epoch[:, None]) | (same_warp & (wrote_warp < warp_epoch[:, None]))
        self._say("race", other & same_block & ~ordered, writer, lanes, at, does, was, array)
        writers, mine = np.maximum(writer, 0) // threads, (who // threads)[:, None]
        published = (time < self.released[writers]) & (self.released_at[writers] <= self.acquired_at[mine])
        self._say("race between blocks", other & ~same_block & ~published, writer, lanes, at, does, was, array)

    def _unread(self, shadow: _Shadow, places: Any, who: Any, epoch: Any, warp: Any, warp_epoch: Any, lanes: Any, at: Any, array: Any) -> None:
        """A fault if another thread has read what the lanes now write, and nothing lies between."""
        threads, reader = now.block.threads, shadow.reader[places]
        other = (reader != _NOBODY) & (reader != who[:, None])
        if not other.any():
            return
        readers, mine = shadow.readers_block[places], (who // threads)[:, None]
        same_block = readers == mine
        ordered = (shadow.read[places] < epoch[:, None]) | (
            (shadow.readers_warp[places] == warp[:, None]) & (shadow.read_warp[places] < warp_epoch[:, None])
        )
        published = (readers >= 0) & (self.released_at[np.maximum(readers, 0)] <= self.acquired_at[mine])
        self._say("race between blocks", other & ~same_block & ~published, reader, lanes, at, "write", "read", array)
        self._say("race", other & same_block & ~ordered, reader, lanes, at, "write", "read", array)

    def _alone(self, places: Any, who: Any, values: tuple[Any, ...], array: Any, lanes: Any, at: Any) -> None:
        """A fault if two lanes write one element with one statement, and not the same value."""
        order = np.argsort(at, kind="stable")
        twice = np.flatnonzero(at[order][1:] == at[order][:-1])
        if array.space == "shared":
            block = now.block.number[lanes]
            order = np.lexsort((at, block))
            twice = np.flatnonzero((at[order][1:] == at[order][:-1]) & (block[order][1:] == block[order][:-1]))
        for value in values:
            lane_values = np.asarray(lane_array(value))[lanes][order]
            a, b = lane_values[1:][twice], lane_values[:-1][twice]
            different = twice[~((a == b) | ((a != a) & (b != b)))]
            if len(different):
                i, j = int(order[different[0]]), int(order[different[0] + 1])
                between = "race between blocks" if who[i] // now.block.threads != who[j] // now.block.threads else "race"
                one, other = (now.block.whose(int(lanes[k])) for k in (i, j))
                self.fault(between, f"{one} and {other} write element {at[i]} of {_called(array)} with one statement")
                return

    def _say(self, kind: str, wrong: Any, other: Any, lanes: Any, at: Any, does: str, was: str, array: Any) -> None:
        if not wrong.any():
            return
        i, byte = (int(part[0]) for part in np.nonzero(wrong))
        thread = int(other[i, byte])
        whose = "several threads" if thread < 0 else self.launching.whose(*divmod(thread, now.block.threads))
        verb = f"{does}s"
        self.fault(
            kind, f"{now.block.whose(int(lanes[i]))} {verb} element {at[i]} of {_called(array)}, {was} by {whose}; nothing puts the two in an order"
        )

    def _shadow(self, array: Any) -> _Shadow:
        key = (array.space, array.address)
        found = self._shadows.get(key)
        if found is None or len(found.writer) < array.extent:
            found = self._shadows[key] = _Shadow(array.extent)
        return found

    def _count(self, array: Any, index: Any, count: int, what: str) -> None:
        """Add a statement's requests, bytes and passes to its line."""
        lanes = active()
        if not len(lanes) or not self.counts:
            return
        key = (_line(), f"{array.space} {what}")
        line = self._lines.setdefault(key, Line(*key))
        itemsize = array.flat.dtype.itemsize
        width, warp = itemsize * count, now.block.warp[lanes]
        first = np.asarray(lane_array(index))[lanes].astype(np.int64) * itemsize + array.origin
        requests = len(np.unique(warp))
        line.requests += requests
        line.bytes += width * len(lanes)
        if array.space == "global":
            sectors = np.unique(np.concatenate([warp * 2**40 + (first + part) // SECTOR for part in range(0, width, min(width, SECTOR))]))
            line.passes += len(sectors)
            bytes_of_warp = np.bincount(warp) * width
            distinct = np.bincount(np.unique(warp * 2**40 + first) // 2**40) * width
            line.least += int((-(-np.minimum(bytes_of_warp, distinct) // SECTOR)).sum())
            return
        # 8 bytes per thread are served half a warp at a time, 16 bytes a quarter.
        parts = max(1, width // BANK)
        phase = warp * parts + now.block.lane_of_warp[lanes] // (WARP // min(parts, WARP))
        words = np.unique(np.concatenate([phase * 2**40 + (first + BANK * k) // BANK for k in range(max(1, width // BANK))]))
        banks, in_bank = np.unique(words // 2**40 * BANKS + words % 2**40 % BANKS, return_counts=True)
        order = np.argsort(banks // BANKS, kind="stable")
        phases, starts = np.unique((banks // BANKS)[order], return_index=True)
        line.passes += int(np.maximum.reduceat(in_bank[order], starts).sum())
        line.least += len(phases)


def _called(array: Any) -> str:
    return f"the {array.space} array{' ' + array.name if array.name else ''}"


def _line() -> str:
    """file:line of the kernel's statement that runs."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_HERE, _PTX)):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "?:0"


@contextmanager
def checking() -> Iterator[Found]:
    """Within, every launch is checked and counted. A launch ends at its first access out of bounds or misaligned: that is a fault, not an exception.

    Needs the simulator (NBCNN_SIMULATOR=1): kernels run as lanes only there.
    """
    found = Found()
    watch = Watch(found)
    watchers.append(watch)
    try:
        yield found
    finally:
        watchers.remove(watch)
