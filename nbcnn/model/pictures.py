"""Image files as a network takes them: decoded by Pillow, turned as their EXIF says, in its channels and its size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from nbcnn.files.errors import UsageError

SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"))
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's mode for so many channels."""
MOST_PIXELS = 1 << 28
"""The most that one file may have; a larger one is refused before it is decoded."""


def files_in(paths: Sequence[Path | str]) -> list[Path]:
    """The image files among `paths`, and those in folders among them, by name. Raises UsageError for a path that is not there, or no image."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found += sorted(each for each in path.rglob("*") if each.suffix.lower() in SUFFIXES and each.is_file())
        elif path.is_file():
            found.append(path)
        else:
            raise UsageError(f"there is no file or folder {path}")
    if not found:
        raise UsageError(f"no image in {', '.join(map(str, paths))}: files end with {', '.join(sorted(SUFFIXES))}")
    return found


def read(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """One file as uint8 (C, H, W): grey or colour as the network takes it, transparent parts on white, 16 bits as 8, resized (bilinear).

    Raises UsageError for a file that is no image, or of channels that no picture has.
    """
    from PIL import Image, ImageOps

    channels, height, width = shape
    if channels not in MODES:
        raise UsageError(f"the network takes {channels} channels, and pictures have 1, 3 or 4")
    try:
        with Image.open(path) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                raise UsageError(f"{path} has {opened.width}×{opened.height} pixels, more than {MOST_PIXELS:,}")
            picture = ImageOps.exif_transpose(opened)
            picture.load()
    except UsageError:
        raise
    except Exception as error:  # every decoder fails in its own way
        raise UsageError(f"{path} cannot be read as an image: {error}") from None
    if picture.mode.startswith("I") or picture.mode == "F":
        values = np.asarray(picture, np.float64)
        picture = Image.fromarray((np.clip(values, 0, 65535) / 257).round().astype(np.uint8))
    if channels != 4 and (picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info):
        cut = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", cut.size, "white"), cut)
    picture = picture.convert(MODES[channels])
    if picture.size != (width, height):
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(picture, np.uint8).reshape(height, width, channels).transpose(2, 0, 1)


def read_all(paths: Sequence[Path], shape: tuple[int, ...], problems: list[str]) -> Iterator[tuple[Path, np.ndarray]]:
    """Each of `paths` with its image; what cannot be read is left out, and said in `problems`."""
    for path in paths:
        try:
            yield path, read(path, shape)
        except UsageError as error:
            problems.append(str(error))
