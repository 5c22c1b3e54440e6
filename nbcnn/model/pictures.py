"""Image files for a trained network: which files are meant, and each in the channels and the size that the network takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from nbcnn.datasets import image_files
from nbcnn.datasets.image_files import SUFFIXES
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import note


def files_in(paths: Sequence[Path | str]) -> list[Path]:
    """The image files among `paths`, and those in folders among them, by name. Raises UsageError for a path that is not there, or no image."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found += sorted(each for each in path.rglob("*") if each.suffix.lower() in SUFFIXES and each.is_file())
        elif path.is_file():
            found.append(path)
        else:
            raise UsageError(f"{path} is no regular file" if path.exists() else f"there is no file or folder {path}")
    if not found:
        raise UsageError(f"no image in {', '.join(map(str, paths))}: files end with {', '.join(sorted(SUFFIXES))}")
    for path in found:
        note(path)
    return found


def read(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """One file as uint8 (C, H, W), as `folder:PATH` with --size reads it: scaled until it covers `shape`, then cut at the centre.

    Raises UsageError for a file that is no image, or of channels that no picture has.
    """
    channels, height, width = shape
    if channels not in image_files.MODES:
        raise UsageError(f"the network takes {channels} channels, and pictures have 1, 3 or 4")
    made = image_files.guarded(image_files.read, path, channels=channels, fit=(height, width))
    if isinstance(made, str):
        raise UsageError(made)
    return np.asarray(made)


def read_all(paths: Sequence[Path], shape: tuple[int, ...], problems: list[str]) -> Iterator[tuple[Path, np.ndarray]]:
    """Each of `paths` with its image; what cannot be read is left out, and said in `problems`."""
    for path in paths:
        try:
            yield path, read(path, shape)
        except UsageError as error:
            problems.append(str(error))
