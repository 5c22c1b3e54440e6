"""Image files as arrays, decoded by Pillow: of `folder:PATH`, of `nbcnn predict` and of `nbcnn extract --images` alike.

What becomes of an image: turned as its EXIF data say; several frames: the first; 16 bits: rounded to 8 (v/257); transparent parts: on white, where
four channels are not wanted; with a size scaled until it covers that, then cut at the centre, so that nothing is stretched.

Files may be anybody's: they must be regular ones, of the formats that `SUFFIXES` name (Pillow would start an interpreter of PostScript for another),
and all threads together decode at most `MOST_PIXELS` at a time. A larger JPEG file is decoded at a half, a quarter or an eighth of its size, where
that still covers the size that is wanted.
"""

from __future__ import annotations

import struct
import sys
import threading
import warnings
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
"""Pixels of an image at most. Decoded, turned and converted they take less than 1 GB: three copies of 4 bytes per pixel."""
_HEAVY = {"WEBP": 2}
"""How many pixels one counts as, by the format: libwebp holds the picture four times."""
DECODED_BYTES = 12
"""Bytes that a pixel takes while it is decoded."""
_ROWS = 256
"""Rows that are rounded, or put on white, at a time."""
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's mode for so many channels."""
_GREY = frozenset(("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N"))
_ORIENTATION, _SIDEWAYS = 0x0112, range(5, 9)
_SWAPPED = {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}
_LOWER = {f"{name};16{order}": f"{name};16{other}" for name in ("RGB", "RGBA", "RGBX", "CMYK") for order, other in _SWAPPED.items()}
"""Pillow decodes the upper byte of colours of 16 bits. By the name of such a form of pixels, the form that takes the lower byte for the upper one."""
_GREY_AND_ALPHA = "LA;16B"
"""Two numbers of 16 bits, which as a form of pixels `RGBA` are upper and lower bytes by turns."""


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

    # `decoding` refuses in words what has too many pixels. Once: with every change of its filters Python forgets what it has warned of.
    if ("ignore", None, Image.DecompressionBombWarning, None, 0) not in warnings.filters:
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    with regular.opened(path) as file, Image.open(file, formats=FORMATS) as image:
        if image.format == "TIFF":
            # Newer versions of Pillow open a TIFF file that lies on its side with the size that it has upright, and decode plain pixels by it.
            tags: Any = getattr(image, "tag_v2", {})
            image._size = (tags.get(_TIFF_SIZE[0], image.width), tags.get(_TIFF_SIZE[1], image.height))
        yield image


@contextmanager
def decoding(image: Any, fit: tuple[int, int] | None = None) -> Iterator[None]:
    """A context in which `image`, which is open, may be decoded; `fit` is the size that it will be scaled to. Its pixels are gone afterwards.

    Raises ValueError for too many pixels.
    """
    width, height = image.size
    if width * height > MOST_PIXELS and fit:
        image.draft(image.mode, (max(fit), max(fit)))
    weight = _HEAVY.get(image.format, 1)
    count = image.width * image.height * weight
    if count > MOST_PIXELS:
        kind = f"{image.format} images" if weight > 1 else "images"
        raise ValueError(f"it has {width}×{height} pixels, and {kind} of at most {MOST_PIXELS // weight:,} pixels are decoded: scale it down")
    with _ROOM.held(count):
        try:
            yield
        finally:
            image.close()  # while the room is held: what opened the image still refers to it


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
        return Header(_upright(image), image.mode in _GREY or _forms(image) == [_GREY_AND_ALPHA])


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
            forms = _forms(image)
            if any(form in _LOWER or form == _GREY_AND_ALPHA for form in forms):
                _round(image, path)
            ImageOps.exif_transpose(image, in_place=True)
            if image.mode == "I" or image.mode.startswith("I;"):
                image = _eight_bits(image)
            image = image if channels == 4 else _flat(image, MODES[channels])
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
    """An image of 16 bits per pixel as one of 8."""
    from PIL import Image

    values = np.asarray(image)
    if values.min() < 0 or values.max() > 65535:
        raise ValueError(f"its values go from {values.min()} to {values.max()}; 16 bits hold 0 to 65535")
    made = np.empty(values.shape, np.uint8)
    for at, row in enumerate(values):
        made[at] = (row.astype(np.int32) + 128) // 257
    return Image.fromarray(made)


def _forms(image: Any) -> list[str]:
    """Pillow's names of the forms of pixels in the parts of a file whose image is not decoded yet."""
    return [str(how[0] if isinstance(how, tuple) else how) for *_, how in image.tile]


def _round(image: Any, path: Path) -> None:
    """Decode colours, or grey with alpha, of 16 bits, and round them: Pillow alone takes their upper bytes.

    path  of the file, which is decoded a second time for the lower bytes. Raises what Pillow does.
    """
    from PIL import Image

    with opened(path) as other:
        pairs = _forms(other) == [_GREY_AND_ALPHA]
        other.tile = [tile._replace(args=_lower(tile.args)) for tile in other.tile]
        for box in _strips(image):
            low = np.asarray(other.crop(box), np.int16)
            high = low[..., [0, 0, 0, 2]] if pairs else np.asarray(image.crop(box), np.int16)
            low = low[..., [1, 1, 1, 3]] if pairs else low
            # 256·high + low, divided by 257, is high + (low − high)/257.
            image.paste(Image.fromarray((high + (low - high + 128) // 257).astype(np.uint8), image.mode), box[:2])
        other.close()


def _lower(how: Any) -> Any:
    """What tells a decoder of Pillow to take the lower bytes."""
    if isinstance(how, tuple):
        return (_lower(how[0]), *how[1:])
    return "RGBA" if how == _GREY_AND_ALPHA else _LOWER[how]


def _strips(image: Any) -> Iterator[tuple[int, int, int, int]]:
    """Boxes of `_ROWS` rows."""
    for top in range(0, image.height, _ROWS):
        yield 0, top, image.width, min(top + _ROWS, image.height)


def _flat(image: Any, mode: str) -> Any:
    """`image` without transparency, on white, in `mode`; as it is where nothing in it is transparent."""
    from PIL import Image

    if not image.has_transparency_data:
        return image
    made = Image.new(mode, image.size)
    for box in _strips(image):  # the whole image as RGBA, white and their sum would take 12 bytes per pixel more
        front = image.crop(box).convert("RGBA")
        white = Image.new("RGBA", front.size, (255, 255, 255, 255))
        made.paste(Image.alpha_composite(white, front).convert(mode), box[:2])
    return made
