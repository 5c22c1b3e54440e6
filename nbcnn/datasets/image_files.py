"""Image files as arrays, decoded by Pillow: of `folder:PATH`, of `nbcnn predict` and of `nbcnn extract --images` alike.

What becomes of an image: turned as its EXIF data say; several frames: the first; 16 bits of grey: rounded to 8 (v/257), of
colours the upper 8, as Pillow decodes them; transparent parts: on white, where
four channels are not wanted; with a size scaled until it covers that, then cut at the centre, so that nothing is stretched.

Files may be anybody's: they must be regular ones, of the formats that `SUFFIXES` name (Pillow would start an interpreter of PostScript for another),
and all threads together decode at most `MOST_PIXELS` at a time. A larger JPEG file is decoded at a half, a quarter or an eighth of its size, where
that still covers the size that is wanted.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.files import regular
from nbcnn.files.quote import brief

SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm"))
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
"""Pillow's names of the formats that `SUFFIXES` stand for."""
MOST_PIXELS = 1 << 26
"""Pixels of an image at most. Decoded, turned and converted they take less than 1 GB: three copies of 4 bytes a pixel."""
DECODED_BYTES = 12
"""Bytes that a pixel takes while it is decoded."""
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's mode for so many channels."""
_GREY = frozenset(("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N"))
_ORIENTATION, _SIDEWAYS = 0x0112, range(5, 9)


@dataclass(frozen=True)
class Header:
    """What a file says of its image before it is read: size (height, width) once turned upright, and whether it is grey."""

    size: tuple[int, int]
    grey: bool


class _Room:
    """How many pixels may be decoded now, by all threads."""

    def __init__(self) -> None:
        self._free, self._changed = MOST_PIXELS, threading.Condition()

    @contextmanager
    def held(self, pixels: int) -> Iterator[None]:
        """A context that begins when so many pixels, at most MOST_PIXELS, fit beside those of other threads."""
        with self._changed:
            self._changed.wait_for(lambda: self._free >= pixels)
            self._free -= pixels
        try:
            yield
        finally:
            with self._changed:
                self._free += pixels
                self._changed.notify_all()


_ROOM = _Room()


_TIFF_SIZE = (256, 257)
"""Tags of the width and the height of a TIFF image as it is stored."""


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The image in a file, as Pillow has it before it is decoded. Raises what Pillow does, and OSError for what is no regular file."""
    from PIL import Image

    with regular.opened(path) as file, Image.open(file, formats=FORMATS) as image:
        if image.format == "TIFF":
            # Newer versions of Pillow open a TIFF file that lies on its side with the size that it has upright, and decode plain pixels by it.
            tags: Any = getattr(image, "tag_v2", {})
            image._size = (tags.get(_TIFF_SIZE[0], image.width), tags.get(_TIFF_SIZE[1], image.height))
        yield image


@contextmanager
def decoding(image: Any, fit: tuple[int, int] | None = None) -> Iterator[None]:
    """A context in which `image`, which is open, may be decoded; `fit` is the size that it will be scaled to.

    Raises ValueError for too many pixels.
    """
    width, height = image.size
    if width * height > MOST_PIXELS and fit:
        image.draft(image.mode, (max(fit), max(fit)))
    count = image.width * image.height
    if count > MOST_PIXELS:
        raise ValueError(f"it has {width}×{height} pixels, and images of at most {MOST_PIXELS:,} pixels are decoded: scale it down")
    with _ROOM.held(count):
        yield


def _upright(image: Any) -> tuple[int, int]:
    """The size (height, width) that an image has once it is turned as its EXIF data say."""
    width, height = image.size
    # For EXIF data, Pillow would look behind the pixels of a PNG file, and so read them all.
    sideways = (image.format != "PNG" or "exif" in image.info) and image.getexif().get(_ORIENTATION) in _SIDEWAYS
    return (width, height) if sideways else (height, width)


def header(path: Path) -> Header:
    """The header of an image file. Raises what Pillow does, and ValueError for pixels that are floats; `guarded` says them in words."""
    with opened(path) as image:
        if image.mode == "F":
            raise ValueError("its pixels are floats; save it with 8 or 16 bits, or the arrays as npz:")
        return Header(_upright(image), image.mode in _GREY)


def read(path: Path, channels: int, fit: tuple[int, int] | None = None, expected: tuple[int, int] | None = None) -> np.ndarray:
    """The image in a file, uint8 (channels, H, W), of the size `fit` (height, width) where that is given.

    expected  the size that its header had. Raises as `header`, and ValueError where the file has another size than `expected`, or too many pixels.
    """
    from PIL import Image, ImageOps

    with opened(path) as image:
        if image.mode == "F":
            raise ValueError("its pixels are floats; save it with 8 or 16 bits")
        if expected and _upright(image) != expected:
            raise ValueError("its size changed since a moment ago; the folder changes while it is read")
        with decoding(image, fit):
            ImageOps.exif_transpose(image, in_place=True)
            if image.mode == "I" or image.mode.startswith("I;"):
                image = _eight_bits(image)
            image = image if channels == 4 else _flat(image)
            image = image if image.mode == MODES[channels] else image.convert(MODES[channels])
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
        return f"{path}: it is no image, or of another format than {', '.join(FORMATS)}"
    except Image.DecompressionBombError:
        return f"{path}: it has more pixels than are decoded, which are {MOST_PIXELS:,}: scale it down"
    except OSError as error:
        return f"{path}: {error.strerror or brief(error)}"
    except (ValueError, EOFError, IndexError, KeyError, TypeError) as error:
        return f"{path}: {brief(error)}"
    except (SyntaxError, ArithmeticError, AttributeError, RuntimeError, AssertionError, struct.error, zlib.error) as error:
        # Pillow raises all of these for damaged files.
        return f"{path}: it is damaged ({brief(error)})"


def _eight_bits(image: Any) -> Any:
    """An image of 16 bits a pixel as one of 8."""
    from PIL import Image

    values = np.asarray(image)
    if values.min() < 0 or values.max() > 65535:
        raise ValueError(f"its values go from {values.min()} to {values.max()}; 16 bits hold 0 to 65535")
    made = np.empty(values.shape, np.uint8)
    for at, row in enumerate(values):
        made[at] = (row.astype(np.int32) + 128) // 257
    return Image.fromarray(made)


def _flat(image: Any) -> Any:
    """`image` without transparency, on white."""
    from PIL import Image

    if not image.has_transparency_data:
        return image
    grey = image.mode in _GREY
    front = image if image.mode == "RGBA" else image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), front).convert("L" if grey else "RGB")
