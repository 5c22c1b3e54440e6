"""Global, shared and local arrays as lanes see them, and addresses in the first two.

An access takes an index that all lanes share or one per lane. It raises IndexError where an active lane's index is out of bounds, with the lane; what
inactive lanes have in their place is not looked at. Where several lanes write one element, the last one's value stays.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from nbcnn.gpu.lockstep.lanes import active, lane_array, now
from nbcnn.gpu.lockstep.numbers import I4, I8, U4, U8, cast, where

_UNSIGNED = {I4: U4, I8: U8}
POISON = 0xFF
"""Bytes of shared memory that nobody has written: NaN, or −1."""


class Faulty(Exception):
    """What a thread does that no GPU takes: `kind` is a key of `findings.KINDS`."""

    kind = ""


class OutOfBounds(Faulty, IndexError):
    """An active lane's access outside an array."""

    kind = "out of bounds"


class Misaligned(Faulty, ValueError):
    """An address that is no multiple of the bytes that an instruction moves."""

    kind = "misaligned"


class Unwritten(Faulty, ValueError):
    """An element of a local array that is read before it is written."""

    kind = "uninitialised local"


def _index(i: np.ndarray) -> np.ndarray:
    """Indices of the active lanes (0 for the others), unsigned: a negative one is larger than any array."""
    if now.mask is not None:
        i = np.where(now.mask, i, 0)
    unsigned = _UNSIGNED.get(i.dtype)
    return i if unsigned is None else i.view(unsigned)


class Memory:
    """What arrays of elements in a flat NumPy array have in common."""

    space = ""
    flat: np.ndarray
    size: int
    """Elements that a lane may index."""
    shape: tuple[int, ...]
    name = ""

    def __getitem__(self, i: Any) -> Any:
        raise NotImplementedError

    def __setitem__(self, i: Any, value: Any) -> None:
        raise NotImplementedError

    @property
    def dtype(self) -> np.dtype:
        return self.flat.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def merged(self, mask: np.ndarray, other: Any) -> Any:
        """The array in some lanes, and `other` in the others: it must be the same, or one that has just been made."""
        if other is self or self.is_fresh(other):
            return self
        raise TypeError("a variable is one array in some threads and another in others")

    def is_fresh(self, other: Any) -> bool:
        """True if lanes that have `other` may have this one instead, because they have nothing in it that they could miss."""
        return isinstance(other, Memory) and (other.shape, other.dtype) == (self.shape, self.dtype) and self.is_same(other)

    def is_same(self, other: Any) -> bool:
        """True if both begin at the same byte."""
        first, second = (array.flat.__array_interface__["data"][0] for array in (self, other))
        return bool(first == second)

    def _refuse(self, i: Any) -> None:
        """Raise OutOfBounds for the first active lane whose index `i` is no element."""
        lanes = active()
        if not len(lanes):
            return
        values = lane_array(i)[lanes].astype(np.int64)
        wrong = np.flatnonzero((values < 0) | (values >= self.size))
        at = int(wrong[0]) if len(wrong) else 0
        kind = f"{self.space} array{' ' + self.name if self.name else ''}"
        raise OutOfBounds(f"index {values[at]} of a {kind} of {self.size} elements: {now.block.whose(int(lanes[at]))}")

    def load(self, at: Any, count: int) -> tuple[Any, ...]:
        """`count` elements from `at` on, by one instruction."""
        return tuple(self[at + k] for k in range(count))

    def store(self, at: Any, values: tuple[Any, ...]) -> None:
        """Elements from `at` on, by one instruction."""
        for k, value in enumerate(values):
            self[at + k] = value

    def flat_index(self, i: Any) -> Any:
        """The index into the flat array of a subscript."""
        if type(i) is not tuple:
            return i
        from nbcnn.gpu.lockstep.numbers import add, multiply

        at: Any = 0
        for axis, (part, extent) in enumerate(zip(i, self.shape, strict=True)):
            if type(part) is not int or not 0 <= part < extent:
                _within(self, axis, part, extent)
            at = add(multiply(at, extent), part)
        return at


def _within(array: Any, axis: int, part: Any, extent: int) -> None:
    """Raise OutOfBounds for the first active lane whose index of an axis is beyond it, also where the flat array goes on."""
    lanes = active()
    values = lane_array(part)[lanes] if type(part) is np.ndarray else np.full(len(lanes), int(part))
    wrong = np.flatnonzero((values < 0) | (values >= extent))
    if len(wrong):
        kind = f"{getattr(array, 'space', 'local')} array{' ' + name if (name := getattr(array, 'name', '')) else ''}"
        raise OutOfBounds(f"index {values[wrong[0]]} of axis {axis}, {extent} long, of a {kind}: {now.block.whose(int(lanes[wrong[0]]))}")


class Global(Memory):
    """A device array, one-dimensional, the same in all lanes."""

    space = "global"

    def __init__(self, array: np.ndarray, name: str = "") -> None:
        self.flat = np.asarray(array).reshape(-1)
        if array.size and not np.shares_memory(self.flat, array):
            raise ValueError("a kernel's array must be contiguous")
        self.size, self.shape, self.name = self.flat.size, np.shape(array), name

    def __getitem__(self, i: Any) -> Any:
        if type(i) is tuple:
            i = self.flat_index(i)
        if type(i) is np.ndarray:
            try:
                return self.flat.take(self._known(_index(i)))
            except IndexError:
                self._refuse(i)
        if not 0 <= i < self.size:
            self._refuse(i)
        return self.flat[i]

    def __setitem__(self, i: Any, value: Any) -> None:
        if type(i) is tuple:
            i = self.flat_index(i)
        if type(i) is np.ndarray:
            unsigned = _UNSIGNED.get(i.dtype)
            if unsigned is not None:
                i = i.view(unsigned)
            mask = now.mask
            value = cast(value, self.flat.dtype)
            if mask is not None:
                i = i[mask]
                if type(value) is np.ndarray:
                    value = value[mask]
            try:
                self.flat[self._known(i)] = value
            except IndexError:
                now_i = np.zeros(now.lanes, i.dtype)
                now_i[active()] = i
                self._refuse(now_i.view(np.int64 if i.dtype.itemsize == 8 else np.int32))
            return
        if not 0 <= i < self.size:
            self._refuse(i)
        value = cast(value, self.flat.dtype)
        if type(value) is np.ndarray:
            lanes = active()
            if not len(lanes):
                return
            value = value[lanes[-1]]
        self.flat[i] = value

    def _known(self, i: np.ndarray) -> np.ndarray:
        """Indices, looked at where they have 64 bits: NumPy makes int64 of uint64, so that what was negative would count from the end again.

        They are int64 behind that: NumPy 2.0 refuses to take by uint64.
        """
        if i.dtype is not U8:
            return i
        if i.size and i.max() >= self.size:
            raise IndexError
        return i.view(I8)

    def words(self, dtype: np.dtype) -> Any:
        """The same memory as elements of another type."""
        if dtype is self.flat.dtype:
            return self
        return Global(_as(self.flat, dtype), self.name)


def _as(flat: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A flat array's bytes as whole elements of another type."""
    raw = flat.view(np.uint8)
    return raw[: raw.size // dtype.itemsize * dtype.itemsize].view(dtype)


class Shared(Memory):
    """A shared array: every block has its own; `rows` (blocks, bytes) holds them."""

    space = "shared"

    def __init__(self, rows: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.rows = rows
        self.flat = rows.reshape(-1).view(dtype)
        self.pitch = rows.shape[1] // dtype.itemsize
        self.shape, self.size = shape, math.prod(shape)
        self.base = None if len(rows) == 1 else now.block.number * np.int64(self.pitch)

    def position(self, i: Any) -> Any:
        """Where an index is in the flat array, of all blocks, for the lanes that are active."""
        if type(i) is np.ndarray:
            i = _index(i)
            if i.size and i.max() >= self.size:
                self._refuse(i.view(np.int64 if i.dtype.itemsize == 8 else np.int32) if i.dtype.kind == "u" else i)
            return i if self.base is None else self.base + i.astype(np.int64)
        if not 0 <= i < self.size:
            self._refuse(i)
        return i if self.base is None else self.base + np.int64(i)

    def __getitem__(self, i: Any) -> Any:
        i = self.position(self.flat_index(i) if type(i) is tuple else i)
        return self.flat.take(i) if type(i) is np.ndarray else self.flat[i]

    def __setitem__(self, i: Any, value: Any) -> None:
        i = self.position(self.flat_index(i) if type(i) is tuple else i)
        value, mask = cast(value, self.flat.dtype), now.mask
        if type(i) is not np.ndarray:
            if type(value) is np.ndarray:
                lanes = active()
                if not len(lanes):
                    return
                value = value[lanes[-1]]
        elif mask is not None:
            i = i[mask]
            if type(value) is np.ndarray:
                value = value[mask]
        self.flat[i] = value

    def words(self, dtype: np.dtype) -> Any:
        """The same memory as elements of another type."""
        if dtype is self.flat.dtype:
            return self
        return type(self)(self.rows, (self.size * self.flat.dtype.itemsize // dtype.itemsize,), dtype)


class Local:
    """A thread's own array: of every element the lanes' values, so that a constant index copies nothing."""

    def __init__(self, shape: Any, dtype: np.dtype) -> None:
        self.shape = tuple(map(int, shape)) if isinstance(shape, tuple) else (int(shape),)
        self.size, self.dtype = math.prod(self.shape), dtype
        self.rows: list[Any] = [None] * self.size
        self.born = now.mask

    def __len__(self) -> int:
        return self.shape[0]

    merged = Memory.merged

    def is_fresh(self, other: Any) -> bool:
        """True for an array that the line has made again, in a loop."""
        return isinstance(other, Local) and (other.shape, other.dtype) == (self.shape, self.dtype) and all(row is None for row in self.rows)

    def _at(self, i: Any) -> Any:
        if type(i) is tuple:
            i = Memory.flat_index(self, i)  # type: ignore[arg-type]
        if type(i) is np.ndarray:
            chosen = i if now.mask is None else i[now.mask]
            if chosen.size and chosen[0] == chosen[-1] and (chosen == chosen[0]).all():
                i = int(chosen[0])
            elif chosen.size and not (chosen.min() >= 0 and chosen.max() < self.size):
                i = int(chosen.min()) if chosen.min() < 0 else int(chosen.max())
            else:
                return i
        if not 0 <= i < self.size:
            raise OutOfBounds(f"index {i} of a local array of {self.size} elements: {now.block.whose(int(active()[0]))}")
        return int(i)

    def __getitem__(self, i: Any) -> Any:
        i = self._at(i)
        if type(i) is np.ndarray:
            zero = self.dtype.type(0)
            stack = np.stack([lane_array(zero if row is None else row) for row in self.rows])
            return stack[np.where(now.mask, i, 0) if now.mask is not None else i, np.arange(now.lanes)]
        row = self.rows[i]
        if row is None:
            raise Unwritten(f"element {i} of a local array is read before it is written")
        return row

    def __setitem__(self, i: Any, value: Any) -> None:
        i, value = self._at(i), cast(value, self.dtype)
        if type(i) is np.ndarray:
            lanes = active()
            for k in np.unique(i[lanes]).tolist():
                mask = i == k if now.mask is None else now.mask & (i == k)
                old = self.rows[k]
                self.rows[k] = where(mask, value, self.dtype.type(0) if old is None else old)
            return
        old = self.rows[i]
        self.rows[i] = value if old is None or now.mask is self.born or now.mask is None else where(now.mask, value, old)


class Pointer:
    """A byte address: an array and a distance from its start, that all lanes share or one per lane."""

    __array_ufunc__ = None  # so that NumPy leaves sums to __radd__
    __slots__ = ("array", "offset")

    def __init__(self, array: Any, offset: Any = 0) -> None:
        self.array, self.offset = array, offset

    def __add__(self, more: Any) -> Pointer:
        offset = self.offset
        if type(offset) is np.ndarray or type(more) is np.ndarray:
            return Pointer(self.array, lane_array(offset).astype(np.int64) + lane_array(more).astype(np.int64))
        return Pointer(self.array, int(offset) + int(more))

    __radd__ = __add__

    def __sub__(self, less: Any) -> Any:
        if isinstance(less, Pointer):
            if less.array is not self.array and not self.array.is_same(less.array):
                raise TypeError("a difference of addresses in two arrays")
            return cast(self.offset - less.offset, U4)
        return self + (-less.astype(np.int64) if type(less) is np.ndarray else -int(less))

    def _compare(self, other: Any, compare: Any) -> Any:
        """Whether the addresses compare so, one element per lane where they differ between lanes; two in different arrays are never equal."""
        if not isinstance(other, Pointer):
            return NotImplemented
        if other.array is not self.array and not self.array.is_same(other.array):
            if compare in (operator.eq, operator.ne):
                return compare is operator.ne
            raise TypeError("an order of addresses in two arrays")
        return compare(self.offset, other.offset)

    def __eq__(self, other: object) -> Any:
        return self._compare(other, operator.eq)

    def __ne__(self, other: object) -> Any:
        return self._compare(other, operator.ne)

    def __lt__(self, other: Any) -> Any:
        return self._compare(other, operator.lt)

    def __le__(self, other: Any) -> Any:
        return self._compare(other, operator.le)

    def __gt__(self, other: Any) -> Any:
        return self._compare(other, operator.gt)

    def __ge__(self, other: Any) -> Any:
        return self._compare(other, operator.ge)

    __hash__ = None  # type: ignore[assignment]

    def __and__(self, bits: Any) -> Any:
        """The address with low bits cleared, or its low bits, which are a number: arrays begin at multiples of 1,024 bytes."""
        offset = self.offset & bits
        return offset if 0 <= int(bits) < 1024 else Pointer(self.array, offset)

    def merged(self, mask: np.ndarray, other: Any) -> Pointer:
        """The address in some lanes, and another in the same array in the others."""
        if not isinstance(other, Pointer) or not (other.array is self.array or self.array.is_same(other.array)):
            raise TypeError("an address is one array's in some threads and another's in others")
        return Pointer(self.array, where(mask, self.offset, other.offset))

    def element(self, dtype: np.dtype, count: int) -> tuple[Any, Any]:
        """The array as elements of `dtype`, and the index of the one here. Raises Misaligned: `count` of them move, to a multiple of their bytes."""
        width = dtype.itemsize * count
        offset = self.offset
        if type(offset) is np.ndarray:
            wrong = offset % width != 0
            if now.mask is not None:
                wrong = wrong & now.mask
            if wrong.any():
                lane = int(np.flatnonzero(wrong)[0])
                raise Misaligned(f"byte {offset[lane]} of a {self.array.space} array is no multiple of {width}: {now.block.whose(lane)}")
            return self.array.words(dtype), offset // dtype.itemsize
        if offset % width:
            raise Misaligned(f"byte {offset} of a {self.array.space} array is no multiple of {width}")
        return self.array.words(dtype), offset // dtype.itemsize
