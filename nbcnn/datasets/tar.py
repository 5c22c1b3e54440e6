"""The members of a tar archive, one after the other, in bounded time and memory whatever the archive says.

The `tarfile` of Python reads extended headers of any size into memory and follows a size of −1024 backwards for ever (Python 3.11.7). An
archive of a few small-named files needs none of that: a member is a header of 512 bytes, then its content, filled up to the next 512.
Extended headers are skipped like files, so a name of more than 100 bytes is read cut short, and is none that anybody looks for.

Source: POSIX.1-2017, pax, "ustar Interchange Format"; GNU tar's sizes in base 256 are refused: they begin at 8 GiB.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Protocol

from nbcnn.files.quote import quoted

_BLOCK = 512
_MOST_MEMBERS = 256
_CHUNK = 1 << 16
_REGULAR = (b"0", b"\0")
_EMPTY = (b"1", b"2", b"3", b"4", b"5", b"6")
_OCTAL = re.compile(rb" *([0-7]{1,12})[ \0]*")


class TarError(Exception):
    """It is not an archive, or it is damaged; the message says how."""


class Readable(Protocol):
    """A file, or what decompresses one: `read` returns fewer bytes only at the end."""

    def read(self, size: int, /) -> bytes: ...


class Member:
    """A member: its name, its size in bytes, whether it is a regular file. `read` is good until the next member is asked for."""

    def __init__(self, name: str, size: int, regular: bool, file: Readable) -> None:
        self.name, self.size, self.regular = name, size, regular
        self._file, self._left = file, -(-size // _BLOCK) * _BLOCK

    def read(self) -> bytes:
        """The content. Raises TarError if the archive ends before it does."""
        content = self._take(self.size)
        self.skip()
        return content

    def skip(self) -> None:
        """Pass over what is not read."""
        while self._left:
            self._take(min(self._left, _CHUNK))

    def _take(self, count: int) -> bytes:
        content = self._file.read(count)
        self._left -= len(content)
        if len(content) < count:
            raise TarError(f"the archive ends inside {quoted(self.name)}")
        return content


def members(file: Readable) -> Iterator[Member]:
    """The members of the archive that `file` reads, at most 256. Raises TarError."""
    for number in range(_MOST_MEMBERS + 1):
        header = file.read(_BLOCK)
        if number and (not header or header == bytes(_BLOCK)):
            return
        if len(header) < _BLOCK:
            raise TarError(f"the archive ends {len(header)} bytes into the header of a member" if header else "the archive is empty")
        if number == _MOST_MEMBERS:
            raise TarError(f"the archive has more than {_MOST_MEMBERS} members")
        member = _member(header, file)
        yield member
        member.skip()


def _member(header: bytes, file: Readable) -> Member:
    checksum, size = _number(header[148:156], "checksum"), _number(header[124:136], "size")
    if checksum != sum(header[:148]) + sum(b"        ") + sum(header[156:]):
        raise TarError("the header of a member has a wrong checksum")
    name = _text(header[:100])
    if header[257:263] == b"ustar\0" and header[345]:
        name = f"{_text(header[345:500])}/{name}"
    kind = header[156:157]
    # Links, devices and folders have no content, whatever their size says.
    return Member(name, 0 if kind in _EMPTY else size, kind in _REGULAR, file)


def _number(field: bytes, what: str) -> int:
    digits = _OCTAL.fullmatch(field)
    if digits is None:
        raise TarError(f"the {what} of a member is no octal number: {quoted(field)}")
    return int(digits[1], 8)


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "backslashreplace")
