"""Arrays of the caller as what a network trains on: images (N, C, H, W) or vectors (N, F), uint8 or float32.

Bytes come as they are, and the network sees value/255. Floats, and integers beyond a byte, become float32 (x − low)/(high − low), where low and
high are 0 and 1 if the training data lie between them, else their least and greatest value; later data may lie outside of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.files.errors import UsageError

CHANNELS = (1, 2, 3, 4)
"""What a number of channels can be where it is to be told from a height or a width."""
_BLOCK = 1 << 24


@dataclass(frozen=True)
class Form:
    """The form of one example, learnt from the first data that a network gets.

    shape          (C, H, W) or (F,), as the network takes it.
    channels_last  the caller's images are (H, W, C).
    scale          (low, high) of floats, None for whole numbers from 0 to 255.

    `take(x)` makes uint8 or float32 (N, *shape) of what the caller has. Raises UsageError for examples of another form.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Form((3, 8, 8), channels_last=True).take(np.zeros((5, 8, 8, 3), np.uint8)).shape
        (5, 3, 8, 8)
    """

    shape: tuple[int, ...]
    channels_last: bool = False
    scale: tuple[float, float] | None = None

    def take(self, x: Any, channels_last: bool | None = None) -> np.ndarray:
        """`x`, examples or a single one, as uint8 or float32 (N, *shape). Raises UsageError if they have another form."""
        given = array_of(x)
        last = self.channels_last if channels_last is None else channels_last
        if given.shape in (self.shape, self.outer(last)) or (given.ndim == 2 and self.shape == (1, *given.shape)):
            given = given[None]
        placed = _channels_first(given, last, self.shape)
        if placed.shape[1:] != self.shape:
            raise UsageError(f"this network takes examples of {self.outer(last)}, got an array of {given.shape}")
        return np.ascontiguousarray(_pixels(placed, self.scale))

    def outer(self, channels_last: bool) -> tuple[int, ...]:
        """The shape of an example as the caller has it."""
        return (*self.shape[1:], self.shape[0]) if channels_last and len(self.shape) == 3 else self.shape


def form_of(x: Any, channels_last: bool | None = None, shape: tuple[int, ...] | None = None) -> Form:
    """The form of the examples `x`; `shape` is that of an example where it is known already.

    Raises UsageError for no examples, for shapes that are none of images or vectors, for NaN, and where axes could be either:
    `channels_last` says which then.
    """
    given = array_of(x)
    if given.ndim not in (2, 3, 4) or 0 in given.shape:
        raise UsageError(f"examples must be images (N, C, H, W), (N, H, W, C), (N, H, W), or vectors (N, F), at least one; got {given.shape}")
    last = bool(channels_last)
    if given.ndim == 4 and channels_last is None:
        last = _has_channels_last(given.shape[1:], shape)
    placed = _channels_first(given, last, shape)
    scale = None
    if given.dtype.kind == "f" or (given.dtype.kind in "iu" and given.dtype != np.uint8 and (given.min() < 0 or given.max() > 255)):
        low, high = float(given.min()), float(given.max())
        if not np.isfinite(low + high):
            raise UsageError("the examples hold NaN or Inf")
        scale = (0.0, 1.0) if low >= 0 and high <= 1 else (low, high if high > low else low + 1)
    return Form(placed.shape[1:], last and given.ndim == 4, scale)


def array_of(x: Any) -> np.ndarray:
    """`x` as an array of numbers. Raises UsageError for anything else."""
    try:
        given = np.asarray(x)
    except ValueError as error:
        raise UsageError(f"the examples make no array: {error}") from None
    if given.dtype.kind not in "biuf":
        raise UsageError(f"examples must be numbers, uint8 or floats; got {given.dtype}")
    return given


def _has_channels_last(shape: tuple[int, ...], wanted: tuple[int, ...] | None) -> bool:
    """Whether images of `shape` are (H, W, C). Raises UsageError if they could be both."""
    first, last = shape, (shape[2], shape[0], shape[1])
    if wanted in (first, last) and first != last:
        return wanted == last
    likely = [shape[0] in CHANNELS, shape[2] in CHANNELS]
    if likely == [True, False] or first == last:
        return False
    if likely == [False, True]:
        return True
    raise UsageError(f"images of {shape} could be (C, H, W) or (H, W, C): say which by channels_last=False or channels_last=True")


def _channels_first(given: np.ndarray, channels_last: bool, shape: tuple[int, ...] | None) -> np.ndarray:
    if given.ndim == 3 and (shape is None or len(shape) == 3):
        return given[:, None]
    return given.transpose(0, 3, 1, 2) if given.ndim == 4 and channels_last else given


def seen(pixels: np.ndarray) -> np.ndarray:
    """What a network sees of `Form.take`'s arrays, float64: a byte of 255 is 1."""
    return pixels / (255.0 if pixels.dtype == np.uint8 else 1.0)


def _pixels(x: np.ndarray, scale: tuple[float, float] | None) -> np.ndarray:
    """`x` as uint8, or as float32 from `scale`; by blocks, so that it is not held in float64 as a whole."""
    if x.dtype.kind == "b":
        return x.astype(np.uint8) * np.uint8(255)
    if x.dtype == np.uint8 and scale in (None, (0.0, 1.0)):
        return x
    if x.dtype.kind in "iu" and scale is None and x.min() >= 0 and x.max() <= 255:
        return x.astype(np.uint8)
    low, high = scale or (0.0, 1.0 if x.dtype.kind == "f" else 255.0)
    made, rows = np.empty(x.shape, np.float32), max(1, _BLOCK // max(1, x[:1].size))
    for start in range(0, len(x), rows):
        block = x[start : start + rows].astype(np.float64)
        if not np.isfinite(block).all():
            raise UsageError("the examples hold NaN or Inf")
        made[start : start + rows] = (block - low) / (high - low)
    if not np.isfinite(made).all():
        raise UsageError(f"the examples lie too far outside of the {low:g} to {high:g} of the first ones for float32")
    return made
