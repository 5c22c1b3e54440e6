"""Data sets of one's own: `folder:PATH` and `npz:PATH`. How they are read stands in the name, so that the name alone reads them again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from nbcnn.files.errors import UsageError

KINDS = ("folder", "npz")
_OPTION = re.compile(r"(size|test-share)=([0-9.x]+)")
TEST_SHARE = 0.1


def is_own(name: str) -> bool:
    """True for folder:PATH and npz:PATH."""
    kind, colon, path = name.partition(":")
    return bool(colon and path) and kind in KINDS


def short(name: str) -> str:
    """A data set's name as a part of file names: of folder:/data/My cats?size=64 it is My-cats."""
    if not is_own(name):
        return name
    return re.sub(r"[^\w.-]+", "-", Own.parse(name).path.stem).strip("-.") or name.partition(":")[0]


@dataclass(frozen=True)
class Own:
    """A folder of images or a file of arrays, and how it is read.

    kind        "folder" or "npz".
    size        (height, width) that images are made to have; None: as they are.
    test_share  the part of the images that is for tests, where the set itself has none; None: TEST_SHARE.
    """

    kind: str
    path: Path
    size: tuple[int, int] | None = None
    test_share: float | None = None

    @classmethod
    def parse(cls, name: str) -> Own:
        """What a name says: folder:PATH, npz:PATH, either with ?size=64x48&test-share=0.2 behind it. Raises UsageError for other values."""
        kind, _, rest = name.partition(":")
        path, mark, words = rest.rpartition("?")
        options = [_OPTION.fullmatch(word) for word in words.split("&")] if mark else []
        if not options or None in options:
            return cls(kind, Path(rest))
        values = {match[1]: match[2] for match in options if match}
        share = values.get("test-share")
        return cls(kind, Path(path), size_of(values["size"]) if "size" in values else None, share_of(share) if share else None)

    @property
    def name(self) -> str:
        """The name that `parse` takes, with the path in full: it means the same in every folder."""
        options = [f"size={self.size[0]}x{self.size[1]}"] if self.size else []
        options += [f"test-share={self.test_share:g}"] if self.test_share is not None else []
        return f"{self.kind}:{self.path.resolve()}" + (f"?{'&'.join(options)}" if options else "")


def named(name: str, size: str | None = None, test_share: float | None = None) -> str:
    """A name of `KINDS` with these options in it, unless it says so itself; other names as they are. Raises UsageError if these get options."""
    if not is_own(name):
        if size or test_share is not None:
            raise UsageError(f"--{'size' if size else 'test-share'} is for --dataset folder:PATH and npz:PATH, not for {name}")
        return name
    own = Own.parse(name)
    if size and own.kind != "folder":
        raise UsageError("--size is for --dataset folder:PATH; arrays of npz:PATH are taken as they are")
    return Own(own.kind, own.path, size_of(size) if size else own.size, own.test_share if test_share is None else share_of(test_share)).name


def size_of(text: str) -> tuple[int, int]:
    """(height, width) from "64" or "48x64". Raises UsageError."""
    match = re.fullmatch(r"(\d{1,5})(?:x(\d{1,5}))?", text)
    height, width = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not height or not width:
        raise UsageError(f"{text!r} is no size of images: 64 means 64×64 pixels, 48x64 means 48 rows of 64")
    return height, width


def share_of(value: str | float) -> float:
    """A part of the images, more than 0 and less than 1. Raises UsageError."""
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise UsageError(f"a test share of {value} is not between 0 and 1")
    return share
