"""A caller's own arrays as networks take them: images uint8 or float32 (M, C, H, W), vectors (M, F), labels, and values to be predicted.

What is unclear or wrong is an error. `images`, `labels` and `targets` take arrays as they are; `Form` remembers how the first examples were, so
that later ones are taken alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.files.errors import UsageError
from nbcnn.files.masked import refuse_masked
from nbcnn.files.quote import quoted
from nbcnn.files.warn import warn

CHANNELS = 4
"""An axis of so many entries at most is taken for the one of channels: grey, colour, colour with alpha."""
LARGE = 10.0
"""The root mean square of floats from which a word is said: standardised ones have 1, bytes as floats about 100."""
_BLOCK = 1 << 24
"""Elements that are scaled at a time."""


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
    ordered, _ = _channels_first(_some(values, name), channels_last, shape, name)
    made = _pixels(ordered, name)
    return made if made.flags.c_contiguous else np.ascontiguousarray(made)


def one_array(values: Any, name: str) -> np.ndarray:
    """`values`, an array or a list of arrays, as one array of numbers. Raises UsageError for anything else; `name` says what they are."""
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        for part in values:
            refuse_masked(part, name)
        try:
            parts = [np.asarray(part) for part in values]
        except ValueError as error:
            raise UsageError(f"{name} make no array: {error}") from None
        odd = next((at for at, part in enumerate(parts) if part.shape != parts[0].shape), None)
        if odd is not None:
            raise UsageError(f"{name} in a list must be of one size: the first is {parts[0].shape}, number {odd} is {parts[odd].shape}")
        values = np.stack(parts) if parts else np.empty(0, np.uint8)
    elif not hasattr(values, "__array__"):
        raise UsageError(f"{name} must be an array or a list of arrays, not {type(values).__name__}")
    refuse_masked(values, name)
    array = values if isinstance(values, np.ndarray) else np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise UsageError(f"{name} are of dtype {array.dtype}: nbcnn takes bytes (uint8) or floats")
    return array


def _some(values: Any, name: str) -> np.ndarray:
    array = one_array(values, name)
    if not array.size:
        raise UsageError(f"there are no {name}: the array is {array.shape}")
    return array


def _channels_first(array: np.ndarray, channels_last: bool | None, shape: tuple[int, ...] | None, name: str) -> tuple[np.ndarray, bool]:
    """`array` as (M, C, H, W), perhaps a view, or (M, F); and whether its channels were last."""
    if shape is not None:
        return _of_shape(array, channels_last, tuple(shape), name)
    if array.ndim == 2:
        return array, False
    if array.ndim == 3:
        return array[:, None], False  # grey
    if array.ndim != 4:
        raise UsageError(f"{name} must be (M, C, H, W), (M, H, W, C), grey (M, H, W) or vectors (M, F), not {array.shape}")
    if channels_last is None:
        first, last = array.shape[1] <= CHANNELS, array.shape[3] <= CHANNELS
        if first == last and array.shape[1:] != (1, 1, 1):
            why = "both its second and its last axis could be channels" if first else "neither its second nor its last axis has 1 to 4 entries"
            raise UsageError(f"{name} are {array.shape}, and {why}: say channels_last=True for (M, H, W, C), channels_last=False for (M, C, H, W)")
        channels_last = last and not first
    return (array.transpose(0, 3, 1, 2), True) if channels_last else (array, False)


def _of_shape(array: np.ndarray, channels_last: bool | None, shape: tuple[int, ...], name: str) -> tuple[np.ndarray, bool]:
    """`array`, a batch or one image, as (M, *shape), and whether its channels were last; grey images may lack their axis of one."""
    if len(shape) != 3:
        if array.shape[-1:] == shape and array.ndim in (1, 2):
            return array.reshape(-1, *shape), False
        raise UsageError(f"{name} are {array.shape}, and for this network they must be vectors (M, {_place(shape)})")
    C, H, W = shape
    found = []
    if channels_last is not True and array.shape[-3:] == (C, H, W):
        found.append((array.reshape(-1, C, H, W), False))
    if channels_last is not False and array.shape[-3:] == (H, W, C) and not (found and C == H == W == 1):
        found.append((array.reshape(-1, H, W, C).transpose(0, 3, 1, 2), True))
    if not found and C == 1 and array.shape[-2:] == (H, W) and array.ndim <= 3:
        found.append((array.reshape(-1, 1, H, W), False))
    if len(found) > 1:
        raise UsageError(f"{name} are {array.shape}, which fits the network channels first and channels last: say channels_last=True or False")
    if not found or array.ndim > 4:
        raise UsageError(f"{name} are {array.shape}, and for this network they must be (M, {C}, {H}, {W}), or (M, {H}, {W}, {C})")
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
    return _float32(array, name)


def _float32(array: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        made = array.astype(np.float32, copy=False)
    # A finite float64 can be an infinite float32, so the result is looked at; by blocks, since it may be a memory map larger than memory.
    rows = max(1, _BLOCK // max(1, made[:1].size))
    for start in range(0, len(made), rows):
        finite = np.isfinite(made[start : start + rows])
        if not finite.all():
            place = np.unravel_index(int(np.argmin(finite.reshape(-1))), finite.shape)
            at = (start + int(place[0]), *map(int, place[1:]))
            raise UsageError(f"{name} hold {array[at]} in number {at[0]}, which is no finite float32: every value must be one")
    return made


@dataclass(frozen=True)
class Form:
    """The form of one example, learnt from the first data that a network gets.

    shape          (C, H, W) or (F,), as the network takes it.
    channels_last  the caller's images are (H, W, C).
    scale          (low, high), the numbers that become 0 and 1: (0, 1) of floats; None for whole numbers from 0 to 255.
    span           (least, greatest) of the first floats; None where they lie between 0 and 1.
    known          whether the first data said so: an imported network takes floats as they are, of a range that its file does not tell.

    Bytes come as they are, and the network sees value/255. Floats are taken as they are. Integers beyond a byte become float32
    (x − low)/(high − low), where low and high are the least and the greatest of the first data; later data may lie outside of them. To a network of
    floats beyond 0 to 1 bytes are numbers from 0 to 255.

    `take(x)` makes uint8 or float32 (N, *shape) of what the caller has. Raises UsageError for examples of another form, and warns (UserWarning) of
    values that lie outside of the first data's range by more than its width: bytes for a network of standardised floats, floats up to 255 for one
    of bytes. Where the range is not known, nothing is warned of.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Form((3, 8, 8), channels_last=True).take(np.zeros((5, 8, 8, 3), np.uint8)).shape
        (5, 3, 8, 8)
    """

    shape: tuple[int, ...]
    channels_last: bool = False
    scale: tuple[float, float] | None = None
    span: tuple[float, float] | None = None
    known: bool = True

    @classmethod
    def noted(cls, shape: tuple[int, ...], told: Mapping[str, Any]) -> Form:
        """The form that a file tells of, as `note` made it. Raises ValueError for a scale or span that is no two ascending numbers within float32."""
        ends: dict[str, tuple[float, float] | None] = {}
        for name in ("scale", "span"):
            given = told.get(name)
            if given and not (len(given) == 2 and given[0] < given[1] and all(abs(end) < np.finfo(np.float32).max for end in given)):
                raise ValueError(f"the {name} of the examples is {quoted(given)}, and must be two ascending numbers within float32")
            ends[name] = (float(given[0]), float(given[1])) if given else None
        if told.get("scale") == []:
            return cls(shape, bool(told.get("channels_last")), (0.0, 1.0), known=False)
        return cls(shape, bool(told.get("channels_last")), ends["scale"], ends["span"])

    def note(self) -> dict[str, Any]:
        """The form, but its shape, for a file: `scale` is empty where it is not known, and `span` is there where it is not None."""
        made = {"channels_last": self.channels_last, "scale": [] if not self.known else list(self.scale) if self.scale else None}
        return made | ({"span": list(self.span)} if self.span else {})

    @property
    def bytes_are_parts(self) -> bool:
        """Whether a byte of 255 means 1: to a network of bytes, and of floats from 0 to 1."""
        return self.scale in (None, (0.0, 1.0)) and self.span is None

    def take(self, x: Any, channels_last: bool | None = None, name: str = "examples") -> np.ndarray:
        """`x`, examples or a single one, as uint8 or float32 (N, *shape); no examples are taken too. Raises UsageError for another form."""
        given = one_array(x, name)
        if channels_last is None and given.shape[-3:] == self.outer(self.channels_last):
            channels_last = self.channels_last
        if not given.size:
            return np.empty((0, *self.shape), np.uint8 if self.scale is None else np.float32)
        placed, _ = _channels_first(given, channels_last, self.shape, name)
        self._warn(placed, name)
        if placed.dtype == np.uint8 and self.bytes_are_parts:
            return np.ascontiguousarray(placed)
        return np.ascontiguousarray(_scaled(placed, self.scale, name))

    def words(self) -> str:
        """The range of the first data, and how the network sees it."""
        if not self.known:
            return "floats as they are"
        if self.scale is None:
            return "bytes, of which 255 is 1"
        if self.scale == (0.0, 1.0):
            low, high = self.span or self.scale
            return f"floats from {low:.4g} to {high:.4g}, as they are"
        return "numbers from {:.4g} to {:.4g}, which become 0 to 1".format(*self.scale)

    def _warn(self, x: np.ndarray, name: str) -> None:
        """Say so where values of `x` are of another scale than the first data's."""
        if not self.known:
            return
        if self.bytes_are_parts and (x.dtype.kind == "b" or x.dtype == np.uint8):
            return  # a byte of 255 is 1
        low, high = self.span or self.scale or ((0.0, 1.0) if x.dtype.kind == "f" else (0.0, 255.0))
        least, most, width = float(x.min()), float(x.max()), high - low
        if np.isfinite(least + most) and (least < low - width or most > high + width):
            warn(
                f"{name} lie from {least:.4g} to {most:.4g}, and the network was trained on {self.words()}: "
                "scale them as those were, or results mean nothing"
            )

    def outer(self, channels_last: bool) -> tuple[int, ...]:
        """The shape of an example as the caller has it."""
        return (*self.shape[1:], self.shape[0]) if channels_last and len(self.shape) == 3 else self.shape


@dataclass(frozen=True)
class Forms:
    """The forms of the inputs of a network that has several: an example is a vector of all of them, each in C, H, W order.

    Where all are bytes, so is the vector; else bytes become floats, value/255.
    """

    parts: tuple[Form, ...]

    def words(self) -> str:
        """The ranges of the first data, input by input."""
        return "; ".join(f"input {at}: {part.words()}" for at, part in enumerate(self.parts, 1))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape (F,) of an example as the network takes it."""
        return (sum(int(np.prod(part.shape)) for part in self.parts),)

    def take(self, x: Any, channels_last: bool | None = None, name: str = "examples") -> np.ndarray:
        """`x`, an array for each input, as uint8 or float32 vectors (N, F). Raises UsageError for other forms, or arrays of different lengths."""
        if not isinstance(x, list | tuple) or len(x) != len(self.parts):
            raise UsageError(f"{name} must be {len(self.parts)} arrays, one for each input, in a tuple or a list")
        made = [part.take(each, channels_last, f"{name} of input {at}") for at, (part, each) in enumerate(zip(self.parts, x, strict=True), 1)]
        if len({len(each) for each in made}) > 1:
            raise UsageError(f"{name} of several inputs must be as many: there are {', '.join(f'{len(each):,}' for each in made)}")
        if any(each.dtype != np.uint8 for each in made):
            made = [seen(each).astype(np.float32) for each in made]
        return np.concatenate([each.reshape(len(each), -1) for each in made], axis=1)


def form_of(x: Any, channels_last: bool | None = None, shape: tuple[int, ...] | None = None, name: str = "examples") -> Form:
    """The form of the examples `x`; `shape` is that of an example where it is known already.

    Raises UsageError for no examples, for shapes that are none of images or vectors, for NaN, and where axes could be either:
    `channels_last` says which then. Warns (UserWarning) of floats much larger than 1.
    """
    given = _some(x, name)
    placed, last = _channels_first(given, channels_last, shape, name)
    if given.dtype == np.uint8 or given.dtype.kind == "b":
        return Form(placed.shape[1:], last)
    low, high = float(given.min()), float(given.max())
    if not np.isfinite(low + high):
        raise UsageError(f"{name} hold NaN or Inf")
    span = (low, high if high > low else low + 1)
    if given.dtype.kind != "f":
        return Form(placed.shape[1:], last, None if low >= 0 and high <= 255 else span)
    if low >= 0 and high <= 1:
        return Form(placed.shape[1:], last, (0.0, 1.0))
    some = given[: max(1, _BLOCK // max(1, given[:1].size))]
    if np.sqrt(np.mean(np.square(some, dtype=np.float64))) > LARGE:
        warn(
            f"{name} are floats from {low:.4g} to {high:.4g} and are taken as they are, and networks learn best from values of about 1: divide "
            "images by 255 or give them as uint8, and standardise other numbers, (x - mean) / deviation"
        )
    return Form(placed.shape[1:], last, (0.0, 1.0), span)


def seen(pixels: np.ndarray) -> np.ndarray:
    """What a network sees of `Form.take`'s arrays, float64: a byte of 255 is 1."""
    return pixels / (255.0 if pixels.dtype == np.uint8 else 1.0)


def _scaled(x: np.ndarray, scale: tuple[float, float] | None, name: str) -> np.ndarray:
    """`x` as uint8, or as float32 from `scale`; by blocks, so that it is not held in float64 as a whole."""
    if x.dtype.kind == "b":
        return x.astype(np.uint8) * np.uint8(255)
    if x.dtype.kind in "iu" and scale is None and x.min() >= 0 and x.max() <= 255:
        return x.astype(np.uint8)
    low, high = scale or (0.0, 1.0 if x.dtype.kind == "f" else 255.0)
    made, rows = np.empty(x.shape, np.float32), max(1, _BLOCK // max(1, x[:1].size))
    for start in range(0, len(x), rows):
        block = x[start : start + rows].astype(np.float64)
        if not np.isfinite(block).all():
            raise UsageError(f"{name} hold NaN or Inf")
        made[start : start + rows] = (block - low) / (high - low)
    if not np.isfinite(made).all():
        raise UsageError(f"{name} lie too far outside of the {low:g} to {high:g} of the first ones for float32")
    return made


def labels(
    values: Any,
    count: int | None = None,
    classes: int | None = None,
    name: str = "labels",
    plane: tuple[int, ...] = (),
    ignore: int | None = None,
) -> np.ndarray:
    """`values` as class numbers, 0 to `classes` − 1 (no upper end where that is None): int32 (M), or of pixels (M, H, W).

    values  integers, booleans, or floats that are whole numbers, (M) or (M, 1); or one-hot rows (M, K), K > 1, of zeros and a single one.
            Of pixels (M, H, W), (M, 1, H, W), or (M, H, W, 1); or one-hot (M, K, H, W), or (M, H, W, K).
    count   how many there must be: one per image.
    plane   (H, W) where every pixel has a class, which are then uint8 if there are 256 classes or fewer; () for one class per image.
    ignore  a number that labels may have besides, for what the loss ignores.

    Raises UsageError for what is none of this: soft labels, values with a fraction, text, numbers out of range, another count, another size, and
    for what could be one-hot along either of two axes.

    >>> labels([[0, 1, 0], [1, 0, 0]])
    array([1, 0], dtype=int32)
    """
    of_each = f"one class per pixel is (M, {plane[0]}, {plane[1]})" if plane else "one class per image is (M,)"
    if values is None:
        raise UsageError(f"there are no {name}, and the loss needs them: {of_each}")
    refuse_masked(values, name)
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise UsageError(f"{name} make no array: {error}") from None
    if array.dtype.kind in "USO":
        raise UsageError(f"{name} are {array.dtype}; number the classes first: names, numbers = numpy.unique({name}, return_inverse=True)")
    if array.dtype.kind not in "biuf":
        raise UsageError(f"{name} are of dtype {array.dtype}, not numbers of classes")
    if array.ndim == 2 + len(plane):
        array = _of_one_hot(array, classes, plane, name)
    if array.shape[1:] != plane or not array.ndim:
        hint = "; a class for each pixel is for networks whose output is (classes, H, W)" if not plane and array.ndim > 2 else ""
        raise UsageError(f"{name} are {array.shape}, {of_each}{hint}")
    if count is not None and len(array) != count:
        raise UsageError(f"there are {len(array):,} {name} for {count:,} images: each image needs one")
    if array.dtype.kind == "f":
        odd = ~np.isfinite(array) | (array != np.round(np.nan_to_num(array)))
        if odd.any():
            at = _first(odd)
            raise UsageError(
                f"{name}[{_place(at)}] is {array[at]}: a class is a whole number; values to be predicted need a loss like MSE, not one of classes"
            )
    taken = array if ignore is None else array[array != ignore]
    if taken.size:
        low, high, end = int(taken.min()), int(taken.max()), classes if classes is not None else 1 << 31
        if low < 0 or high >= end:
            at = _first((array < 0 if low < 0 else array >= end) & (array != ignore if ignore is not None else True))
            hint = "; classes are counted from 0" if high == end and low == 1 else ""
            raise UsageError(f"{name}[{_place(at)}] is {int(array[at])}, and the {end:,} classes are 0 to {end - 1:,}{hint}")
    small = plane and classes is not None and classes <= 256 and 0 <= (ignore or 0) < 256
    return np.ascontiguousarray(array, np.uint8 if small else np.int32)


def _of_one_hot(array: np.ndarray, classes: int | None, plane: tuple[int, ...], name: str) -> np.ndarray:
    """`array`, which has an axis more than labels, without it; unchanged where neither its second nor its last axis can be left out."""
    axes = [axis for axis in sorted({1, array.ndim - 1}) if (array.shape[1:axis] + array.shape[axis + 1 :]) == plane]
    if not axes:
        return array
    if single := [axis for axis in axes if array.shape[axis] == 1]:
        return array.squeeze(single[0])
    wrong = {axis: ~((array == 0) | (array == 1)).all(axis) | (array.sum(axis) != 1) for axis in axes}
    fits = [axis for axis in axes if not wrong[axis].any()]
    if len(fits) > 1:
        raise UsageError(f"{name} are {array.shape}, one-hot along their second and their last axis: give {name}.argmax(1) or {name}.argmax(-1)")
    axis = fits[0] if fits else axes[0]
    if classes is not None and array.shape[axis] != classes:
        raise UsageError(f"{name} are {array.shape}: one-hot rows of {array.shape[axis]} classes, and there are {classes}")
    if not fits:
        at = _place(_first(wrong[axis]))
        raise UsageError(f"{name} are {array.shape}, but row {at} is not one-hot (a single 1, zeros else): soft labels need another loss")
    return array.argmax(axis)


def _first(where: np.ndarray) -> tuple[int, ...]:
    """The index of the first True."""
    return tuple(int(at) for at in np.unravel_index(int(where.argmax()), where.shape))


def _place(index: tuple[int, ...]) -> str:
    return ", ".join(map(str, index))


def targets(values: Any, count: int, shape: tuple[int, ...], *, channels_last: bool | None = None, name: str = "targets") -> np.ndarray:
    """`values` as what a network with outputs of `shape` is to predict: vectors float32 (M, F), or images uint8 or float32 (M, C, H, W).

    values         vectors: numbers, taken as they are, (M, F); where F is 1 also (M). Images: as `images`, so a byte of 255 stands for 1.
    count          how many there must be: one per example.

    Raises UsageError for another shape or count, for NaN and Inf, for what is no number.

    >>> targets([1, 2, 4], 3, (1,)).shape
    (3, 1)
    """
    if values is None:
        raise UsageError(f"there are no {name}, and the network is to predict (M, {_place(shape)})")
    array = one_array(values, name)
    if shape == (1,) and array.ndim == 1:
        array = array[:, None]
    if array.ndim < len(shape) or (len(shape) == 1 and array.shape[1:] != shape):
        hint = '; for classes, the loss is "cross_entropy"' if array.ndim == 1 and array.dtype.kind in "iu" else ""
        raise UsageError(f"{name} are {array.shape}, and the network's output is (M, {_place(shape)}){hint}")
    made = images(array, channels_last=channels_last, shape=shape, name=name) if len(shape) == 3 else np.ascontiguousarray(_float32(array, name))
    if len(made) != count:
        raise UsageError(f"there are {len(made):,} {name} for {count:,} examples: each example needs one")
    return made
