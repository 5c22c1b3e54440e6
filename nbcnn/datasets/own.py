"""Custom data sets: `folder:PATH`, `npz:PATH`, and `file.py:function`, whose result is the data set.

How they are read stands in the name, so that the name alone reads them again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from nbcnn.files import numerals, user_code
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted

KINDS = ("folder", "npz")
FORMS = ("folder:PATH", "npz:PATH", "FILE.py:FUNCTION")
"""How a custom data set is named."""
_OPTION = re.compile(r"(size|test-share)=([0-9.x]+)")
TEST_SHARE = 0.1


def is_own(name: str) -> bool:
    """True for folder:PATH, npz:PATH, and file.py:function or package.module:function."""
    kind, colon, path = name.partition(":")
    return bool(colon and path) and (kind in KINDS or user_code.is_function(_without_options(name)))


def kind_of(path: str) -> str:
    """How a data set in `path` is named, "folder" or "npz"; empty if there is nothing of the kind."""
    try:
        return "folder" if Path(path).is_dir() else "npz" if path.endswith(".npz") and Path(path).is_file() else ""
    except (OSError, ValueError):  # a name that no file can have
        return ""


def _without_options(name: str) -> str:
    """`name` without ?size=…&test-share=… at its end."""
    path, mark, words = name.rpartition("?")
    return path if mark and all(_OPTION.fullmatch(word) for word in words.split("&")) else name


def short(name: str) -> str:
    """A data set's name as a part of file names: of folder:/data/My cats?size=64 it is My-cats, of /data/leaves.py:load it is leaves."""
    if not is_own(name):
        return name
    own = Own.parse(name)
    return re.sub(r"[^\w.-]+", "-", own.path.stem).strip("-.") or own.kind


@dataclass(frozen=True)
class Own:
    """A folder of images, a file of arrays or a function that makes arrays, and how it is read.

    kind        "folder", "npz" or "function".
    path        the folder or the file; of a function in an installed module the module's name.
    size        (height, width) that images are made to have; None: as they are.
    test_share  the part of the images that is for tests, where the set itself has none; None: TEST_SHARE.
    function    the name of the function, "" without one.
    """

    kind: str
    path: Path
    size: tuple[int, int] | None = None
    test_share: float | None = None
    function: str = ""

    @classmethod
    def parse(cls, name: str) -> Own:
        """What a name of `FORMS` says, each perhaps with ?size=64x48&test-share=0.2 behind it. Raises UsageError for other values."""
        plain = _without_options(name)
        values = dict(word.split("=") for word in name[len(plain) + 1 :].split("&") if word)
        kind, _, rest = plain.partition(":")
        size = size_of(values["size"]) if "size" in values else None
        share = share_of(values["test-share"]) if "test-share" in values else None
        if kind in KINDS:
            return cls(kind, Path(rest), size, share)
        path, _, function = plain.rpartition(":")
        return cls("function", Path(path), size, share, function)

    @property
    def location(self) -> str:
        """The path in full, of a function with its name behind it: it means the same in every folder. An installed module has its name alone."""
        if not self.function:
            return str(self.path.resolve())
        return f"{self.path.resolve() if self.path.suffix == '.py' else self.path}:{self.function}"

    @property
    def name(self) -> str:
        """The name that `parse` takes, with the path in full."""
        options = [f"size={self.size[0]}x{self.size[1]}"] if self.size else []
        options += [f"test-share={self.test_share:g}"] if self.test_share is not None else []
        return ("" if self.function else f"{self.kind}:") + self.location + (f"?{'&'.join(options)}" if options else "")


def named(name: str, size: str | None = None, test_share: float | None = None) -> str:
    """A name of `KINDS` with these options in it, unless it says so itself; other names as they are. Raises UsageError if these get options."""
    if not is_own(name):
        if size or test_share is not None:
            raise UsageError(f"--{'size' if size else 'test-share'} is for a custom --dataset ({', '.join(FORMS)}), not for {name}")
        return name
    own = Own.parse(name)
    if size and own.kind != "folder":
        raise UsageError("--size is for --dataset folder:PATH; arrays are taken as they are")
    share = own.test_share if test_share is None else share_of(test_share)
    return replace(own, size=size_of(size) if size else own.size, test_share=share).name


def size_of(text: str) -> tuple[int, int]:
    """(height, width) from "64" or "48x64". Raises UsageError."""
    match = re.fullmatch(r"([0-9]{1,5})(?:x([0-9]{1,5}))?", text)
    height, width = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not height or not width:
        raise UsageError(f"{quoted(text)} is no size of images: 64 means 64×64 pixels, 48x64 means 48 rows of 64")
    return height, width


def share_of(value: str | float) -> float:
    """A part of the images, more than 0 and less than 1. Raises UsageError."""
    try:
        share = numerals.real(str(value))
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise UsageError(f"a test share of {value} is not between 0 and 1")
    return share
