"""Image files as arrays, decoded by Pillow: of `folder:PATH`, of `nbcnn predict` and of `nbcnn extract --images` alike.

What becomes of an image: turned as its EXIF data say; several frames: the first; 16 bits: rounded to 8 (v/257); transparent parts: on white, where
four channels are not wanted; with a size scaled until it covers that, then cut at the centre, so that nothing is stretched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm"))
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's mode for so many channels."""
_GREY = frozenset(("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N"))
_ORIENTATION, _SIDEWAYS = 0x0112, range(5, 9)


@dataclass(frozen=True)
class Header:
    """What a file says of its image before it is read: size (height, width) once turned upright, and whether it is grey."""

    size: tuple[int, int]
    grey: bool


def header(path: Path) -> Header:
    """The header of an image file. Raises what Pillow does, and ValueError for pixels that are floats; `guarded` says them in words."""
    from PIL import Image

    with Image.open(path) as image:
        width, height = image.size
        # For EXIF data, Pillow would look behind the pixels of a PNG file, and so read them all.
        sideways = (image.format != "PNG" or "exif" in image.info) and image.getexif().get(_ORIENTATION) in _SIDEWAYS
        if image.mode == "F":
            raise ValueError("its pixels are floats; save it with 8 or 16 bits, or the arrays as npz:")
        return Header((width, height) if sideways else (height, width), image.mode in _GREY)


def read(path: Path, channels: int, fit: tuple[int, int] | None = None, expected: tuple[int, int] | None = None) -> np.ndarray:
    """The image in a file, uint8 (channels, H, W), of the size `fit` (height, width) where that is given.

    expected  the size that its header had. Raises as `header`, and ValueError where the file has another size than `expected`.
    """
    from PIL import Image, ImageOps

    with Image.open(path) as opened:
        if opened.mode == "F":
            raise ValueError("its pixels are floats; save it with 8 or 16 bits")
        image: Any = ImageOps.exif_transpose(opened)
        if expected and (image.height, image.width) != expected:
            raise ValueError("its size changed since a moment ago; the folder changes while it is read")
        if image.mode == "I" or image.mode.startswith("I;"):
            image = _eight_bits(image)
        image = (image if channels == 4 else _flat(image)).convert(MODES[channels])
        if fit and (image.height, image.width) != fit:
            image = ImageOps.fit(image, (fit[1], fit[0]), Image.Resampling.BILINEAR)
        pixels = np.asarray(image, np.uint8)
        return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def guarded(work: Callable[..., Any], path: Path, **options: Any) -> Any:
    """What `work` makes of `path`, or what is wrong with that file, as text."""
    from PIL import Image, UnidentifiedImageError

    try:
        return work(path, **options)
    except FileNotFoundError:
        return f"{path}: it was there a moment ago; the folder changes while it is read"
    except UnidentifiedImageError:
        return f"{path}: it is no image, or of a kind that Pillow does not know"
    except Image.DecompressionBombError as error:
        return f"{path}: {error}"
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError) as error:
        # Pillow raises all of these for damaged files.
        return f"{path}: {str(error) or type(error).__name__}"


def _eight_bits(image: Any) -> Any:
    """An image of 16 bits a pixel as one of 8."""
    from PIL import Image

    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise ValueError(f"its values go from {values.min()} to {values.max()}; 16 bits hold 0 to 65535")
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


def _flat(image: Any) -> Any:
    """`image` without transparency, on white."""
    from PIL import Image

    if not image.has_transparency_data:
        return image
    grey = image.mode in _GREY
    front = image.convert("RGBA")
    back = Image.new("RGBA", image.size, (255, 255, 255, 255))
    back.alpha_composite(front)
    return back.convert("L" if grey else "RGB")
