"""This module reads the headers of npy files: what they claim is held against the length of the file before anything is allocated or mapped.

NumPy's own reader evaluates the header as Python, and asks for the memory that it names; here it is matched by a pattern. Python objects and
records are refused: they run code, or have no one number for an element.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nbcnn.files.quote import quoted, word

MAGIC = b"\x93NUMPY"
LONGEST = 1 << 13
"""Bytes of a header at most; NumPy writes 128 for an array of few axes."""
BLOCK = 1 << 22
"""Bytes that are read at a time."""
_AXES, _EXTENT = 32, 1 << 47


def _item(at: int) -> bytes:
    """A pattern of one entry of a header, the `at`-th."""
    kind, columns, shape = (b"(?P<%s%d>" % (name, at) for name in (b"kind", b"columns", b"shape"))
    return (
        rb"\s*(?:'descr'\s*:\s*'" + kind + rb"[<>|=]?[a-zA-Z?][0-9]{0,9}(?:\[[a-zA-Z]{1,2}\])?)'"
        rb"|'fortran_order'\s*:\s*" + columns + rb"True|False)"
        rb"|'shape'\s*:\s*\(" + shape + rb"[0-9L, ]*)\))\s*"
    )


_HEADER = re.compile(rb"\{" + b",".join(map(_item, range(3))) + rb",?\s*\}\s*")
_OBJECTS = re.compile(rb"'descr'\s*:\s*'[<>|=]?O[0-9]{0,2}'")


class NpyError(ValueError):
    """An npy file is none, or not one of numbers or text; the message says what is wrong with it, but not which file it is."""

    exit_code = 3


@dataclass(frozen=True)
class Header:
    """What an npy file says of its array. `columns` is Fortran's order; the values begin at byte `offset`."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    columns: bool
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


def header(file: BinaryIO, length: int) -> Header:
    """The header at the start of `file`, which has `length` bytes in all. Raises NpyError unless that is exactly what the header claims."""
    start = file.read(12)
    if start[:6] != MAGIC or len(start) < 12:
        raise NpyError("it is no npy file, or a truncated one")
    if start[6] not in (1, 2, 3):
        raise NpyError(f"it is of version {start[6]} of the npy format; 1 to 3 are read")
    wide = start[6] > 1
    count = int.from_bytes(start[8 : 12 if wide else 10], "little")
    if not 2 <= count <= min(LONGEST, length):
        raise NpyError(f"its header claims {count:,} bytes; headers of 2 to {LONGEST:,} are read, and the file has {length:,}")
    text = (b"" if wide else start[10:]) + file.read(count - (0 if wide else 2))
    if len(text) != count:
        raise NpyError(f"its header claims {count:,} bytes, of which {len(text):,} are there: truncated")
    return _parsed(text, (12 if wide else 10) + count, length)


def _parsed(text: bytes, offset: int, length: int) -> Header:
    if _OBJECTS.search(text):
        raise NpyError("it holds Python objects, which are not read because they can run code; save it as numbers")
    match = _HEADER.fullmatch(text)
    found = {name[:-1]: value for name, value in match.groupdict().items() if value is not None} if match else {}
    if len(found) < 3:
        raise NpyError(f"its header is not one of an array of numbers or text: {quoted(text.decode('latin1'))}")
    kind = found["kind"].decode()
    try:
        dtype = np.dtype(kind)
    except (TypeError, ValueError):
        raise NpyError(f"its elements are of the type {quoted(kind)}, which there is not") from None
    if not dtype.itemsize or dtype.hasobject:
        raise NpyError(f"its elements are of the type {quoted(kind)}, which has no bytes")
    extents = [each.strip().rstrip(b"L") for each in found["shape"].split(b",")]
    if extents and not extents[-1]:
        extents.pop()
    if len(extents) > _AXES or not all(each.isdigit() and len(each) <= len(str(_EXTENT)) for each in extents):
        raise NpyError(f"its shape is {quoted(found['shape'].decode())}, which is none")
    made = Header(dtype, tuple(map(int, extents)), found["columns"] == b"True", offset)
    # NumPy multiplies extents without the zeros, in 64 bits.
    if math.prod(max(1, extent) for extent in made.shape) * dtype.itemsize > _EXTENT << 10 or made.offset + made.nbytes != length:
        there = length - offset
        raise NpyError(f"truncated or too long: {word(str(dtype))} {quoted(made.shape)} needs {made.nbytes:,} bytes, and {there:,} are there")
    return made


def mapped(path: Path, made: Header) -> np.ndarray:
    """The array of the file at `path`, whose header is `made`, mapped into memory read-only."""
    if not made.nbytes:
        return np.empty(made.shape, made.dtype)
    return np.memmap(path, made.dtype, "r", made.offset, made.shape, "F" if made.columns else "C")


def read_rows(file: BinaryIO, made: Header, wanted: np.ndarray | None = None) -> np.ndarray:
    """The values behind a header: all, or the rows `wanted`, numbers in any order; of the others no more than a block is held at a time.

    Raises NpyError where the file ends too soon.
    """
    if made.columns or not made.shape or wanted is None:
        whole = np.empty(made.shape, made.dtype, "F" if made.columns else "C")
        _fill(file, whole.reshape(-1, order="F" if made.columns else "C"))
        return whole if wanted is None else whole[wanted]
    taken = np.empty((len(wanted), *made.shape[1:]), made.dtype)
    order = np.argsort(wanted, kind="stable")
    numbers = wanted[order]
    step = max(1, BLOCK * made.shape[0] // max(1, made.nbytes))
    block = np.empty((min(step, made.shape[0]), *made.shape[1:]), made.dtype)
    for first in range(0, int(numbers[-1]) + 1 if len(numbers) else 0, step):
        part = block[: min(step, made.shape[0] - first)]
        _fill(file, part.reshape(-1))
        start, end = np.searchsorted(numbers, (first, first + len(part)))
        taken[order[start:end]] = part[numbers[start:end] - first]
    return taken


def _fill(file: BinaryIO, flat: np.ndarray) -> None:
    """Read `flat`, an array of one axis, as its bytes, block by block: memory is touched only as bytes come."""
    view = flat.view(np.uint8).data if flat.size else memoryview(b"")
    at = 0
    while at < len(view):
        content = file.read(min(BLOCK, len(view) - at))
        if not content:
            raise NpyError(f"it ends after {at:,} of the {len(view):,} bytes of its values: truncated")
        view[at : at + len(content)] = content
        at += len(content)


def texts(values: np.ndarray) -> tuple[str, ...]:
    """The elements of an array of text. Raises NpyError for characters that there are not: Python would end over them."""
    points = np.ascontiguousarray(values).reshape(-1).view(values.dtype.byteorder.replace("=", "<").replace("|", "<") + "u4")
    if (points > sys.maxunicode).any() or ((points >= 0xD800) & (points < 0xE000)).any():
        raise NpyError("it holds characters that there are not")
    return tuple(str(each) for each in values.reshape(-1))
