"""TMA and mbarriers: boxes of tensors arrive when the phase of their barrier is waited for, as late as a GPU may let them.

A phase ends at a wait for it, if its arrivals have come and the boxes on their way to it have the bytes that it expects. A wait for a phase that has
ended already lets nothing arrive, so a kernel that waits for one phase too few computes with what lay there before. A box that is to be stored is
read when its group is waited for: what overwrites it before is stored. Tensors are read when a copy is issued.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nbcnn.gpu.lockstep.lanes import NotSimulated, active, lane_array, now
from nbcnn.gpu.lockstep.storage import Faulty, Misaligned, OutOfBounds, Pointer

_BYTE, _WORD, _AXES = np.dtype(np.uint8), np.dtype(np.int64), 4
_UNIT = 128
"""Bytes of which a box begins at a multiple, and within which quads of 16 bytes are swizzled."""


class Stuck(Faulty):
    """A thread waits for what does not come: blocks of the simulator run in step."""

    kind = "stuck"


@dataclass
class _Box:
    """Bytes of a block's shared memory: `to` are their places, in the order of the tensor. `lane` has issued the copy."""

    lane: int
    array: Any
    to: np.ndarray
    values: np.ndarray
    """What arrives; or the elements of the tensor to which a store goes."""
    inside: Any = None
    """Where the box of a store is that part of the tensor."""
    committed: bool = False


@dataclass
class _Barrier:
    """An mbarrier: its phase takes `left` more arrivals and `expected` more bytes; `ended` phases are over."""

    count: int
    left: int
    expected: int = 0
    ended: int = 0
    boxes: list[_Box] = field(default_factory=list)

    def close(self) -> None:
        if self.left == 0 and self.expected == 0 and not self.boxes:
            self.left, self.ended = self.count, self.ended + 1


@dataclass
class Copies:
    """The barriers of the blocks that run together, and the boxes that they store."""

    barriers: dict[tuple[int, int, int], _Barrier] = field(default_factory=dict)
    """By shared array, block and byte."""
    stores: list[_Box] = field(default_factory=list)


def encode(array: np.ndarray, first: int, shape: Any, strides: Any, box: Any, swizzled: bool) -> np.ndarray:
    """The 16 words of a map as `tensor_maps.encode_tiled` describes it: address, element size, axes, swizzle, then four numbers each for `shape`,
    `strides` and `box`.
    """
    size = array.dtype.itemsize
    words = np.ones((4, _AXES), np.int64)
    words[0] = array.ctypes.data + first * size, size, len(shape), swizzled
    words[1:, : len(shape)] = shape, strides, box
    return words.reshape(-1)


@dataclass
class _Map:
    """What a tensor map says: `tensor` is the array, outermost axis first, `box` the extents of a box in the same order."""

    tensor: np.ndarray
    box: tuple[int, ...]
    swizzled: bool

    @staticmethod
    def of(array: Any, at: int) -> _Map:
        words = array.words(_WORD).flat[at // 8 : at // 8 + 16].tolist()
        address, size, axes, swizzled = words[:4]
        if not address:
            raise NotSimulated("a tensor map that the simulator has not made")
        shape, strides, box = (tuple(words[at : at + axes])[::-1] for at in (4, 8, 12))
        nbytes = size * (1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)))
        held = (ctypes.c_uint8 * nbytes).from_address(address)
        tensor: np.ndarray = np.ndarray(shape, f"u{size}", held, strides=tuple(size * stride for stride in strides))
        return _Map(tensor, box, bool(swizzled))

    def parts(self, corner: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """(where in the box, where in the tensor) the part of a box lies that is inside the tensor; `corner` innermost axis first."""
        axes = list(zip(corner[::-1], self.box, self.tensor.shape, strict=True))
        ends = [(max(0, -at), max(0, -at, min(extent, whole - at))) for at, extent, whole in axes]
        return tuple(slice(*each) for each in ends), tuple(slice(at + low, at + high) for (at, *_), (low, high) in zip(axes, ends, strict=True))

    def places(self, address: int, array: Any, lane: int) -> np.ndarray:
        """The bytes of a box at `address` of the shared memory of a lane's block, in the tensor's order. Raises Misaligned, OutOfBounds."""
        nbytes = int(np.prod(self.box)) * self.tensor.itemsize
        if address % _UNIT:
            raise Misaligned(f"byte {address} of a shared array, where a box begins, is no multiple of {_UNIT}: {now.block.whose(lane)}")
        if not 0 <= address <= array.size * array.dtype.itemsize - nbytes:
            raise OutOfBounds(f"a box of {nbytes} bytes at byte {address} of a shared array: {now.block.whose(lane)}")
        to = address + np.arange(nbytes)
        return to ^ (to >> 7 & 7) << 4 if self.swizzled else to


def _each(*operands: Any) -> Iterator[tuple[int, ...]]:
    """(lane, the operands' values) of every active lane; of an address its byte."""
    values = [lane_array(each.offset if isinstance(each, Pointer) else each) for each in operands]
    for lane in active().tolist():
        yield lane, *(int(value[lane]) for value in values)


def _barrier(address: Pointer, block: int, at: int) -> _Barrier:
    found = now.block.tma.barriers.get((id(address.array.rows), block, at))
    if found is None:
        raise Stuck(f"there is no barrier at byte {at} of a shared array of block {now.block.first + block}")
    return found


def init(address: Pointer, count: Any) -> None:
    for lane, at, arrivals in _each(address, count):
        now.block.tma.barriers[id(address.array.rows), int(now.block.number[lane]), at] = _Barrier(arrivals, arrivals)


def arrive(address: Pointer, nbytes: Any = 0) -> None:
    for lane, at, expected in _each(address, nbytes):
        barrier = _barrier(address, int(now.block.number[lane]), at)
        if barrier.left == 0:
            raise Stuck(f"{now.block.whose(lane)} arrives at a barrier whose phase nobody has waited for")
        barrier.left -= 1
        barrier.expected += expected
        barrier.close()


def wait(address: Pointer, parity: Any) -> None:
    lanes = active()
    asked = np.stack([now.block.number[lanes], lane_array(address.offset)[lanes], lane_array(parity)[lanes]])
    for block, at, wanted in np.unique(asked, axis=1).T.tolist():
        barrier = _barrier(address, block, at)
        if barrier.ended & 1 != wanted:
            continue
        while barrier.boxes:
            box = barrier.boxes.pop()
            barrier.expected -= len(box.to)
            _arrive(box)
        barrier.close()
        if barrier.ended & 1 == wanted:
            missing = f"{barrier.left} arrivals and {barrier.expected} bytes are missing"
            raise Stuck(f"block {now.block.first + block} waits for a phase that does not end, {missing}: its threads run in step")


def load(to: Pointer, source: Pointer, *where: Any) -> None:
    """Boxes are on their way to `to`; the last of `where` is the barrier, the others are the corner."""
    *corner, barrier = where
    for lane, address, at, notified, *first in _each(to, source, barrier, *corner):
        made = _Map.of(source.array, at)
        inside, part = made.parts(tuple(first))
        values = np.zeros(made.box, made.tensor.dtype)
        values[inside] = made.tensor[part]
        box = _Box(lane, to.array, made.places(address, to.array, lane), values.reshape(-1).view(np.uint8))
        _shown(box, True)
        _barrier(barrier, int(now.block.number[lane]), notified).boxes.append(box)


def store(target: Pointer, *where: Any) -> None:
    """Boxes are to be stored; the last of `where` is where in shared memory they lie, the others are the corner."""
    *corner, source = where
    for lane, at, address, *first in _each(target, source, *corner):
        made = _Map.of(target.array, at)
        inside, part = made.parts(tuple(first))
        box = _Box(lane, source.array, made.places(address, source.array, lane), made.tensor[part], (made.box, inside))
        _shown(box, False)
        now.block.tma.stores.append(box)


def commit() -> None:
    mine = set(active().tolist())
    for box in now.block.tma.stores:
        box.committed |= box.lane in mine


def wait_stores() -> None:
    mine, left = set(active().tolist()), []
    for box in now.block.tma.stores:
        if box.lane not in mine or not box.committed:
            left.append(box)
            continue
        extents, inside = box.inside
        held = box.array.rows[now.block.number[box.lane]][box.to].view(box.values.dtype).reshape(extents)
        box.values[...] = held[inside]
    now.block.tma.stores = left


def ends() -> None:
    """The blocks have ended: a fault if boxes are still on their way, whose shared memory another block may have by then."""
    boxes = [box for barrier in now.block.tma.barriers.values() for box in barrier.boxes] + now.block.tma.stores
    if boxes:
        raise Stuck(f"{now.block.whose(boxes[0].lane)} ends while a box of its is on its way")


def _arrive(box: _Box) -> None:
    box.array.rows[now.block.number[box.lane]][box.to] = box.values
    _watched(box, lambda watch, array, at, count: watch.landed(array, at, count))


def _shown(box: _Box, writes: bool) -> None:
    """Show the checking mode what a copy will write or read, of the thread that has issued it."""

    def show(watch: Any, array: Any, at: np.ndarray, count: int) -> None:
        watch.access(array, at, count, writes)
        if writes:
            watch.copies(array, at, count, 1)

    _watched(box, show)


def _watched(box: _Box, work: Any) -> None:
    watch, mask = now.block.launch.watch, now.mask
    if watch is None:
        return
    counts, watch.counts = watch.counts, False
    now.mask = np.arange(now.lanes) == box.lane
    try:
        work(watch, box.array.words(_BYTE), np.full(now.lanes, box.to.min()), len(box.to))
    finally:
        now.mask, watch.counts = mask, counts
