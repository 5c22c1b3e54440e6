"""This module declares which arguments of a command are paths, and refuses outputs that would replace what the command reads or a run has kept.

The converter of a path argument says what the path is for; `Parser.parse_args` hands the parsed ones to `complaint`, so every command is checked.
It imports nothing that needs more than the standard library, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from nbcnn.files.quote import note, quoted

RUN, FEATURES, CLASSIFIER, PIPELINE = "config.json", "features.json", "classify.json", "pipeline.json"
KEPT = {
    RUN: (
        "checkpoint-*.safetensors",
        "metrics.csv",
        "metrics.jsonl",
        "forecast.json",
        "curves.png",
        "reconstructions.png",
        "confusion.png",
        "mistakes.png",
        "segmentation.png",
    ),
    FEATURES: ("*_features.npy", "*_mirrored.npy", "*_labels.npy", "features_*.csv"),
    CLASSIFIER: ("classifier.safetensors", "confusion.png"),
    PIPELINE: (),
}
"""By the file that describes a folder of nbcnn, patterns of its other files."""
CALLED = {RUN: "run", FEATURES: "features", CLASSIFIER: "classifier", PIPELINE: "pipeline"}
IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"})
"""A copy of the suffixes of `nbcnn.datasets.image_files`, which takes longer to import than `--help` may."""


@dataclass(frozen=True)
class PathArgument:
    """A converter of an argument that is a path: `use` says what for.

    use       "reads": a file, or a folder of nbcnn (a run, features). "images", "data": every image, or every file, below it may be read, too.
              "file": a file that is written whole. "folder": a folder for files that are written. "amends": a run or pipeline that goes on, which is
              read and written. "keeps": a folder that keeps what it has, whatever that is.
    kind      what the command gets: Path or str.
    own       of a folder that is written: the describing file (a key of KEPT) that may be there already.
    recorded  the path is written into files, which must be text.
    parts     the paths in the text of the argument.
    metavar   how the help calls it, where the flag says nothing else.
    """

    use: str
    kind: Callable[[str], Any] = Path
    own: str = ""
    recorded: bool = False
    parts: Callable[[str], Iterable[str]] = lambda text: (text,)
    metavar: str = "PATH"

    def __call__(self, text: str) -> Any:
        if not text:
            raise argparse.ArgumentTypeError("the path is empty")
        if "\0" in text:
            raise argparse.ArgumentTypeError(f"{quoted(text)} has a zero byte, which no path has")
        if self.recorded and not is_text(text):
            raise argparse.ArgumentTypeError(
                f"{os.fsencode(text)!r} is no UTF-8, and is written into files that are: rename it, or name a link to it"
            )
        for part in self.parts(text):
            note(part)
        return self.kind(text)

    def paths(self, value: Any) -> Iterator[Path]:
        """The paths in a parsed value, which may be a list of values."""
        for each in value if isinstance(value, list) else [value]:
            yield from (Path(part) for part in self.parts(str(each)) if part)


def is_text(name: str) -> bool:
    """Whether a name from the command line or a folder can be written into a file: it is UTF-8 on the disk."""
    return name.isascii() or name == name.encode("utf-8", "ignore").decode()


def with_commas(text: str) -> Iterable[str]:
    """The paths of an argument that takes several."""
    return text.split(",")


def of_function(text: str) -> Iterable[str]:
    """The files of FILE.py:FUNCTION, several with commas between; none of other names."""
    for part in text.split(","):
        where, colon, _ = part.rpartition(":")
        if colon and where.endswith(".py"):
            yield where


def of_dataset(text: str) -> Iterable[str]:
    """The path of folder:PATH, npz:PATH and FILE.py:FUNCTION; none of the name of a data set."""
    kind, colon, path = text.partition(":")
    if colon and kind in ("folder", "npz"):
        return (path, path.partition("?")[0])  # options may stand behind it
    return of_function(text)


READS, READS_TEXT = PathArgument("reads"), PathArgument("reads", str)
WRITES, WRITES_TEXT = PathArgument("file", metavar="FILE"), PathArgument("file", str, metavar="FILE")
FOLDER, FOLDER_TEXT = PathArgument("folder", metavar="DIR"), PathArgument("folder", str, metavar="DIR")
AMENDS, AMENDS_TEXT = PathArgument("amends", metavar="DIR"), PathArgument("amends", str)
KEEPS, KEEPS_TEXT = PathArgument("keeps", metavar="DIR"), PathArgument("keeps", str, metavar="DIR")
IMAGE_FILES = PathArgument("images", str)
FUNCTIONS = PathArgument("reads", str, parts=of_function)
DATASET_TEXT = PathArgument("images", str, parts=of_dataset)
DATA, DATA_TEXT = PathArgument("data", metavar="DIR"), PathArgument("data", str, metavar="DIR")


def recorded(argument: PathArgument) -> PathArgument:
    """The same of a path that the command writes into files."""
    return replace(argument, recorded=True)


def declared(parser: argparse.ArgumentParser) -> dict[str, PathArgument]:
    """The path arguments of a parser, by how the command line calls them."""
    found: dict[str, PathArgument] = {}
    for action in parser._actions:
        argument = getattr(action.type, "path", action.type)
        if isinstance(argument, PathArgument):
            found[action.option_strings[0] if action.option_strings else str(action.metavar or action.dest)] = argument
    return found


def complaint(*parsed: tuple[argparse.ArgumentParser, Any]) -> str:
    """Why the paths that were given exclude each other, or are no place to write; empty where all is well.

    Each of `parsed` is a parser with what it parsed of one command line: `pipeline` has two.
    """
    given: list[tuple[str, PathArgument, Path]] = []
    for parser, values in parsed:
        by_name = {action.option_strings[0] if action.option_strings else str(action.metavar or action.dest): action for action in parser._actions}
        for name, argument in declared(parser).items():
            value = getattr(values, by_name[name].dest, None)
            given += [(name, argument, path) for path in (argument.paths(value) if value is not None else ())]
    inputs = [each for each in given if each[1].use in ("reads", "images", "data", "amends")]
    written: list[tuple[str, Path]] = []
    for name, argument, path in given:
        if argument.use not in ("file", "folder"):
            continue
        found = _file(path, inputs) if argument.use == "file" else _folder(path, argument.own, inputs)
        for other, before in written if argument.use == "file" else ():
            found = found or (f"is what {other} writes" if _same(path, before) else "")
        if found:
            return f"{name} {path} {found}; choose another {argument.use}"
        if argument.use == "file":
            written.append((name, path))
    return ""


def _file(path: Path, inputs: list[tuple[str, PathArgument, Path]]) -> str:
    """What is wrong with writing this file."""
    for name, argument, source in inputs:
        if _same(path, source):
            return f"is what {name} reads"
        read = argument.use == "data" or (argument.use == "images" and path.suffix.lower() in IMAGES)
        if read and path.is_file() and source.is_dir() and _within(path, source):
            return f"is a file in {source}, which {name} reads"
    if path.exists() and not path.is_file() and not path.is_dir():
        return "is no regular file, and would become one"
    for mark, patterns in KEPT.items():
        there = (path.parent / mark).is_file()
        if there and any(fnmatch(path.name, pattern) for pattern in (mark, *patterns)):
            return f"is a file of the {CALLED[mark]} in {path.parent}"
    return ""


def _folder(path: Path, own: str, inputs: list[tuple[str, PathArgument, Path]]) -> str:
    """What is wrong with writing files into this folder."""
    for name, argument, source in inputs:
        if _same(path, source):
            return f"is what {name} reads"
        if argument.use != "images" or not path.is_dir():
            continue
        if source.is_file() and _same(path, source.parent):
            return f"holds {source}, which {name} reads"
        if source.is_dir() and _within(path, source) and any(file.suffix.lower() in IMAGES for file in path.iterdir()):
            return f"holds images in {source}, which {name} reads"
    for mark, patterns in KEPT.items():
        # A file config.json alone may be any program's.
        if mark != own and (path / mark).is_file() and (mark != RUN or any(found for pattern in patterns for found in path.glob(pattern))):
            return f"holds the {CALLED[mark]} that {path / mark} describes"
    return ""


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return _resolved(one) == _resolved(other)


def _within(path: Path, folder: Path) -> bool:
    return _resolved(path).is_relative_to(_resolved(folder))


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # a loop of links
        return path.absolute()
