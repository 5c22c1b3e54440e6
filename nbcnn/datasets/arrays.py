"""A caller's own arrays as networks take them: images uint8 or float32 (M, C, H, W), labels int32 (M). What is unclear or wrong is an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbcnn.files.errors import UsageError

CHANNELS = 4
"""An axis of so many entries at most is taken for the one of channels: grey, colour, colour with alpha."""


def images(values: Any, *, channels_last: bool | None = None, shape: tuple[int, ...] | None = None, name: str = "images") -> np.ndarray:
    """`values` as uint8 or float32 images (M, C, H, W), or vectors (M, F); C-contiguous. A fitting array, or memory map, is passed on uncopied.

    values         an array, a memory map, or a list of images of one size. Bytes stay bytes (0 … 255); booleans become 0 and 255; other integers
                   must lie in 0 … 255, and become bytes; floats become float32, and must be finite.
    channels_last  True for (M, H, W, C), False for (M, C, H, W). None finds out: from `shape`, or else from which axis has 1 to 4 entries.
    shape          the (C, H, W), or (F,), that a network takes. One image, without the axis M, is then a batch of one.

    Without `shape`, three axes are grey images (M, H, W) and two are vectors (M, F). Raises UsageError for what is empty, ambiguous, of another
    shape, not finite or no number.

    >>> images(np.zeros((10, 28, 28, 3), np.uint8)).shape
    (10, 3, 28, 28)
    """
    given = _one_array(values, name)
    if not given.size:
        raise UsageError(f"there are no {name}: the array is {given.shape}")
    ordered = _channels_first(given, channels_last, shape, name)
    made = _pixels(ordered, name)
    return made if made.flags.c_contiguous else np.ascontiguousarray(made)


def _one_array(values: Any, name: str) -> np.ndarray:
    if isinstance(values, np.ndarray):
        return values
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        parts = [np.asarray(part) for part in values]
        odd = next((at for at, part in enumerate(parts) if part.shape != parts[0].shape), None)
        if odd is not None:
            raise UsageError(f"{name} in a list must be of one size: the first is {parts[0].shape}, number {odd} is {parts[odd].shape}")
        return np.stack(parts) if parts else np.empty(0, np.uint8)
    if hasattr(values, "__array__"):
        return np.asarray(values)
    raise UsageError(f"{name} must be an array or a list of arrays, not {type(values).__name__}")


def _channels_first(array: np.ndarray, channels_last: bool | None, shape: tuple[int, ...] | None, name: str) -> np.ndarray:
    """`array` as (M, C, H, W), perhaps a view, or (M, F)."""
    if shape is not None:
        return _of_shape(array, channels_last, tuple(shape), name)
    if array.ndim == 2:
        return array
    if array.ndim == 3:
        return array[:, None]  # grey
    if array.ndim != 4:
        raise UsageError(f"{name} must be (M, C, H, W), (M, H, W, C), grey (M, H, W) or vectors (M, F), not {array.shape}")
    if channels_last is None:
        first, last = array.shape[1] <= CHANNELS, array.shape[3] <= CHANNELS
        if first == last:
            why = "both its second and its last axis could be channels" if first else "neither its second nor its last axis has 1 to 4 entries"
            raise UsageError(f"{name} are {array.shape}, and {why}: say channels_last=True for (M, H, W, C), channels_last=False for (M, C, H, W)")
        channels_last = last
    return array.transpose(0, 3, 1, 2) if channels_last else array


def _of_shape(array: np.ndarray, channels_last: bool | None, shape: tuple[int, ...], name: str) -> np.ndarray:
    """`array` as (M, *shape): a batch or one image, channels first or last, grey with or without its axis of one."""
    if len(shape) != 3:
        if array.shape[-1:] == shape and array.ndim in (1, 2):
            return array.reshape(-1, *shape)
        raise UsageError(f"{name} are {array.shape}, the network takes vectors (M, {', '.join(map(str, shape))})")
    C, H, W = shape
    found = []
    if channels_last is not True and array.shape[-3:] == (C, H, W):
        found.append(array.reshape(-1, C, H, W))
    if channels_last is not False and array.shape[-3:] == (H, W, C) and not (found and C == H == W == 1):
        found.append(array.reshape(-1, H, W, C).transpose(0, 3, 1, 2))
    if not found and C == 1 and array.shape[-2:] == (H, W) and array.ndim <= 3:
        found.append(array.reshape(-1, 1, H, W))
    if len(found) > 1:
        raise UsageError(f"{name} are {array.shape}, which fits the network channels first and channels last: say channels_last=True or False")
    if not found or array.ndim > 4:
        raise UsageError(f"{name} are {array.shape}, the network takes (M, {C}, {H}, {W}), or (M, {H}, {W}, {C})")
    return found[0]


def _pixels(array: np.ndarray, name: str) -> np.ndarray:
    """`array` as uint8 or float32."""
    kind = array.dtype.kind
    if array.dtype == np.uint8:
        return array
    if kind == "b":
        return np.multiply(array, np.uint8(255), dtype=np.uint8)
    if kind in "iu":
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > 255:
            hint = "divide 16 bits by 65535 and give floats" if low >= 0 and high <= 65535 else "scale them, and give floats"
            raise UsageError(f"{name} are {array.dtype} from {low} to {high}, a byte holds 0 to 255: {hint}")
        return array.astype(np.uint8)
    if kind == "f":
        with np.errstate(over="ignore"):
            made = array.astype(np.float32, copy=False)
        # A finite float64 can be an infinite float32, so the result is looked at.
        if not np.isfinite(made).all():
            at = np.unravel_index(int(np.argmin(np.isfinite(made).reshape(-1))), made.shape)
            raise UsageError(f"{name} hold {array[at]} in number {at[0]}, which is no finite float32: every value must be one")
        return made
    raise UsageError(f"{name} are of dtype {array.dtype}: nbcnn takes bytes (uint8) or floats")


def labels(values: Any, count: int | None = None, classes: int | None = None, name: str = "labels") -> np.ndarray:
    """`values` as class numbers int32 (M), 0 to `classes` − 1 (no upper end where that is None).

    values  integers, booleans, or floats that are whole numbers, (M) or (M, 1); or one-hot rows (M, K), K > 1, of zeros and a single one.
    count   how many there must be: one an image.

    Raises UsageError for what is none of this: soft labels, values with a fraction, text, numbers out of range, another count.

    >>> labels([[0, 1, 0], [1, 0, 0]])
    array([1, 0], dtype=int32)
    """
    array = np.asarray(values)
    if array.dtype.kind in "USO":
        raise UsageError(f"{name} are {array.dtype}; number the classes first: names, numbers = numpy.unique({name}, return_inverse=True)")
    if array.dtype.kind not in "biuf":
        raise UsageError(f"{name} are of dtype {array.dtype}, not numbers of classes")
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim == 2:
        array = _of_one_hot(array, classes, name)
    if array.ndim > 2:
        raise UsageError(
            f"{name} are {array.shape}: a class for each pixel needs a loss of pixels, which nbcnn does not have; give one class an image"
        )
    if array.ndim != 1:
        raise UsageError(f"{name} are {array.shape}, one class an image is (M,)")
    if count is not None and len(array) != count:
        raise UsageError(f"there are {len(array):,} {name} for {count:,} images: each image needs one")
    if array.dtype.kind == "f":
        odd = ~np.isfinite(array) | (array != np.round(np.nan_to_num(array)))
        if odd.any():
            at = int(odd.argmax())
            raise UsageError(
                f"{name}[{at}] is {array[at]}: a class is a whole number; values to be predicted need a loss like MSE, not one of classes"
            )
    if array.size:
        low, high, end = int(array.min()), int(array.max()), classes if classes is not None else 1 << 31
        if low < 0 or high >= end:
            at = int((array < 0).argmax()) if low < 0 else int((array >= end).argmax())
            hint = "; classes are counted from 0" if high == end and low == 1 else ""
            raise UsageError(f"{name}[{at}] is {int(array[at])}, and the {end:,} classes are 0 to {end - 1:,}{hint}")
    return np.ascontiguousarray(array, np.int32)


def _of_one_hot(array: np.ndarray, classes: int | None, name: str) -> np.ndarray:
    if classes is not None and array.shape[1] != classes:
        raise UsageError(f"{name} are {array.shape}: one-hot rows of {array.shape[1]} classes, and there are {classes}")
    wrong = ~((array == 0) | (array == 1)).all(1) | (array.sum(1) != 1)
    if wrong.any():
        at = int(wrong.argmax())
        raise UsageError(f"{name} are {array.shape}, but row {at} is not one-hot (a single 1, zeros else): soft labels need another loss")
    return array.argmax(1)
