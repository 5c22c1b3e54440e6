"""Masks: images of classes, one for each image of a data set, in which a pixel's value is the number of its class.

    PATH/images/a.jpg, PATH/masks/a.png          the mask of an image has its name, below masks/ as below images/, whatever the suffix
    PATH/classes.txt                             names of the classes, one per line, from class 0 on; without it the classes are called by number

A mask is grey (2, 4, 8 or 16 bits), black and white, or of palette colours, of which the index counts. 255 is no class (`dataset.VOID`), but where
masks hold nothing else than 0 and 255: that is class 1 of two, as usual for figure and ground. Where the images are scaled and cut, so are the masks,
each pixel by its nearest neighbour: a class between two classes means nothing.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.datasets import image_files
from nbcnn.datasets.dataset import VOID, DataError, Log, Masks
from nbcnn.files import atomic, regular
from nbcnn.files.quote import brief, printable

IMAGES, MASKS, CLASSES = "images", "masks", "classes.txt"
"""Names of the two folders, and of the file beside them."""
LONGEST = 1 << 20
"""Bytes of the file of names at most."""
_MODES = ("1", "L", "P", "I", "I;16", "I;16L", "I;16B", "I;16N")


def is_masked(folder: Path) -> bool:
    """Whether a folder holds images with masks."""
    return (folder / IMAGES).is_dir() and (folder / MASKS).is_dir()


def read(path: Path, expected: tuple[int, int], fit: tuple[int, int] | None = None) -> np.ndarray:
    """The mask in a file, uint8 (H, W), of the size `fit` (height, width) where that is given.

    `expected` is the size of its image. Raises what Pillow does, and ValueError for what is no mask of it; `image_files.guarded` says them in words.
    """
    from PIL import Image, ImageOps

    with image_files.opened(path) as opened:
        if opened.format == "JPEG":
            raise ValueError("a JPEG file does not keep the values of its pixels, which are classes here; save masks as PNG")
        if opened.mode not in _MODES:
            raise ValueError(f"a pixel of a mask is one number, its class; this image is {opened.mode}, save it as grey or with a palette")
        step = _step(opened)
        with image_files.decoding(opened):
            image = ImageOps.exif_transpose(opened)
            size = (image.height, image.width)
            if size != expected:
                raise ValueError(f"it is {size[0]}×{size[1]}, and its image {expected[0]}×{expected[1]} (height×width): both must be of one size")
            if fit and size != fit:
                image = ImageOps.fit(image, (fit[1], fit[0]), Image.Resampling.NEAREST)
            values = np.asarray(image)
    if values.dtype == bool:
        return values.astype(np.uint8) * np.uint8(VOID)
    if values.min() < 0 or values.max() > VOID:
        raise ValueError(f"its values go from {values.min()} to {values.max()}; classes are 0 to {VOID - 1}, and {VOID} is none")
    return values.astype(np.uint8) // np.uint8(step)


def _step(image: Any) -> int:
    """What Pillow multiplies the values of an image by that is not decoded yet: grey of 2 and 4 bits is stretched to 0 … 255."""
    how = image.tile[0][3] if image.tile else ""
    return {"L;2": 85, "L;4": 17}.get(how if isinstance(how, str) else str(how[0]) if how else "", 1)


DISTINCT = (
    *("000000", "F3C300", "875692", "F38400", "A1CAF1", "BE0032", "C2B280", "848482", "008856", "E68FAC", "0067A5"),
    *("F99379", "B3446C", "882D17", "8DB600", "654522", "E25822", "2B3D26"),
)
"""Black, and seventeen colours that are easy to tell apart: those of K. L. Kelly, "Twenty-two colors of maximum contrast", 1965, but four."""


def palette() -> np.ndarray:
    """A colour for each of 256 classes, uint8 (256, 3), class 0 black: `DISTINCT`, then those of PASCAL VOC, the bits of a number by turns on red,
    green and blue.
    """
    number, colours = np.arange(256), np.zeros((256, 3), np.int64)
    for bit in range(8):
        colours |= (number[:, None] >> (3 * bit + np.arange(3)) & 1) << (7 - bit)
    colours[: len(DISTINCT)] = [tuple(bytes.fromhex(colour)) for colour in DISTINCT]
    return colours.astype(np.uint8)


def write(path: Path, mask: np.ndarray, size: tuple[int, int] | None = None) -> None:
    """Put a mask, uint8 (H, W), as a PNG with `palette` in place of `path`, whole or not at all; a pixel's value is its class.

    size  (height, width) of the image of which the mask is, scaled until it covered H×W and cut at the centre: the mask is put back to where it was,
          by nearest neighbours, and what was cut off is `VOID`. None: as it is.
    """
    from PIL import Image

    made = Image.frombytes("P", mask.shape[::-1], np.ascontiguousarray(mask).tobytes())
    if size and size != mask.shape:
        (height, width), (high, wide) = size, mask.shape
        scale = min(height / high, width / wide)
        inner = (max(1, round(wide * scale)), max(1, round(high * scale)))
        whole = Image.new("P", (width, height), VOID)
        whole.paste(made.resize(inner, Image.Resampling.NEAREST), ((width - inner[0]) // 2, (height - inner[1]) // 2))
        made = whole
    made.putpalette(palette().tobytes())
    content = io.BytesIO()
    made.save(content, format="PNG")
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.replace_bytes(path, content.getvalue())


def names_in(folder: Path) -> tuple[str, ...] | None:
    """The names of the classes beside the folders, None without a file of them. Raises DataError for one that is no text or names a class twice."""
    path = folder / CLASSES
    if not path.is_file():
        return None
    try:
        names = tuple(printable(line.strip(), "") for line in regular.read(path, LONGEST).decode("utf-8-sig").splitlines() if line.strip())
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no text: {brief(error)}. It needs the name of a class in each line") from None
    if len(set(names)) < len(names) or not 2 <= len(names) <= VOID:
        raise DataError(f"{path} must name 2 to {VOID} classes, each once, one per line; it has {len(names)} lines of {len(set(names))} names")
    return names


def of(train: np.ndarray, test: np.ndarray, names: tuple[str, ...] | None, where: str, log: Log) -> Masks:
    """Masks of the values that files or arrays hold, uint8 (M, H, W) each; `names` of the classes, None counts them.

    Where they hold nothing but 0 and 255, 255 becomes 1. Raises DataError, which begins with `where`, for values that are no class.
    """
    used = np.flatnonzero(sum(np.bincount(masks.reshape(-1), minlength=VOID + 1) for masks in (train, test)))
    if used.tolist() == [0, VOID] and (names is None or len(names) == 2):
        log(f"nbcnn: note: the masks of {where} hold 0 and {VOID} alone: {VOID} is taken for class 1")
        return Masks(np.minimum(train, 1), np.minimum(test, 1), names or ("background", "figure"))
    highest = int(max((value for value in used if value != VOID), default=0))
    if names is not None and highest >= len(names):
        raise DataError(f"{where}: the masks hold class {highest}, and there are names of {len(names)} classes, 0 to {len(names) - 1}")
    if names is None and not highest:
        raise DataError(f"{where}: the masks hold {' and '.join(map(str, used))} alone, which is one class: there is nothing to tell apart")
    return Masks(train, test, names or tuple(map(str, range(highest + 1))))
