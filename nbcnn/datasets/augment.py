"""This module describes augmentation: every gathered training image is mirrored, shifted, cut, or changed by a function of the user's, at random.

`nbcnn.ops.images.gather` does it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from nbcnn.files import numerals, user_code
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import nearest
from nbcnn.ops.activations.activation import frozen
from nbcnn.ops.images.gather import ALTERNATE
from nbcnn.ops.images.pixels import Pixels

NAMES = ("flip", "crop", "cutout")
FORMS = "flip, flip:alternate, crop:N, crop:N:reflect, cutout:N, FILE.py:NAME"
ZERO, REFLECT = BORDERS = ("zero", "reflect")


class Augmentation:
    """What classes of `nbcnn.augmentation` have in common; their fields are the parameters of both functions.

    kind  the name that the class was declared by.
    """

    kind: ClassVar[str]
    functions: ClassVar[tuple[Any, Any]]
    """The device functions of the source and of the value; None where there is none."""

    def pixels(self) -> Pixels:
        """What the op that gathers images is told."""
        values = tuple(float(getattr(self, each.name)) for each in fields(self))  # type: ignore[arg-type]
        return Pixels(repr(self), *(function and frozen(function, values) for function in self.functions))


DECLARED: dict[str, type[Augmentation]] = {}
"""What `nbcnn.augmentation` made in this process, by name."""


def made_by(name: str) -> Augmentation:
    """The augmentation that `--augment FILE.py:NAME` means; the file is run. Raises UsageError for another thing than a class of `Augmentation`."""
    found = user_code.function_of(name, "--augment")
    if not isinstance(found, type) or not issubclass(found, Augmentation):
        raise UsageError(f"--augment: {name} is no augmentation: nbcnn.augmentation makes the class of one")
    return found()


@dataclass(frozen=True)
class Augment:
    """flip    True mirrors an image with probability 1/2; "alternate" in every other epoch, from the first or the second on by a coin of the image.
    crop    pads with so many zeros on every side and crops at random: shifts by −crop … crop pixels in both directions.
    border  what a crop has outside of the image: "zero", or "reflect", the image reflected at its outermost pixels.
    cutout  sets a square of this side, whose centre is anywhere in the image, to zero.
    own     an augmentation of the user's (`nbcnn.augmentation`), of what the others made; None without one.

    Random numbers follow from (seed, epoch, image) alone. Zero is what the network sees: black without normalisation, the mean colour with it.
    Raises UsageError for other values.

    >>> Augment.parse("flip,crop:4")
    Augment(flip=True, crop=4, cutout=0, border='zero', own=None)
    >>> Augment.parse("crop:2:reflect").text()
    'crop:2:reflect'
    """

    flip: bool | str = False
    crop: int = 0
    cutout: int = 0
    border: str = ZERO
    own: Augmentation | None = None

    def __post_init__(self) -> None:
        if self.own is not None and not isinstance(self.own, Augmentation):
            raise UsageError(f"an augmentation is words ({FORMS}) or what a class of nbcnn.augmentation makes, got {quoted(self.own)}")
        if self.flip not in (False, True, ALTERNATE):
            raise UsageError(f"flip is False, True or {ALTERNATE!r}, got {quoted(self.flip)}")
        for name in ("crop", "cutout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 15:
                raise UsageError(f"{name} is a number of pixels, 0 or more, as in {name}:4, got {quoted(value)}")
        if self.border not in BORDERS:
            raise UsageError(f"border is {' or '.join(map(repr, BORDERS))}, got {quoted(self.border)}{nearest(str(self.border), BORDERS)}")

    def __bool__(self) -> bool:
        return bool(self.flip or self.crop or self.cutout or self.own)

    @classmethod
    def of(cls, given: Any) -> Augment:
        """An `Augment`, words as of `parse`, or an augmentation of the user's, an object or its class. Raises UsageError for other things."""
        if isinstance(given, Augment):
            return given
        if isinstance(given, str):
            return cls.parse(given)
        return cls(own=given() if isinstance(given, type) and issubclass(given, Augmentation) else given)

    @classmethod
    def parse(cls, text: str, run: bool = True) -> Augment:
        """An augmentation in words with commas between them: flip, flip:alternate, crop:4, cutout:8, FILE.py:NAME, the name of a declared one.

        `run` False checks the words and runs no file; what files name is then left out. Raises UsageError.
        """
        values: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = part.partition(":")
            own = name not in NAMES and (part in DECLARED or user_code.names_function(part, "a custom augmentation is FILE.py:NAME"))
            if name not in NAMES and not own:
                raise UsageError(f"no augmentation {quoted(part)} (there are {FORMS}){nearest(name, NAMES)}")
            name = "own" if own else name
            if name in values:
                raise UsageError(f"{'a function of yours' if own else name} stands twice in {quoted(text)}")
            if own:
                values[name] = (DECLARED[part]() if part in DECLARED else made_by(part)) if run else None
                continue
            if name == "flip":
                values[name] = value or True
                continue
            value, colon, border = value.partition(":")
            try:
                values[name] = numerals.whole(value)
            except ValueError:
                raise UsageError(f"{quoted(part)} needs a number of pixels, as in {name}:4") from None
            if colon:
                if name != "crop" or border not in BORDERS:
                    raise UsageError(f"no augmentation {quoted(part)} (there are {FORMS}){nearest(border, BORDERS)}")
                values["border"] = border
        return cls(**values)

    def text(self) -> str:
        """In the words that `parse` takes; empty if nothing is done."""
        words = ["flip" if self.flip is True else f"flip:{self.flip}"] if self.flip else []
        words += [f"crop:{self.crop}{'' if self.border == ZERO else f':{self.border}'}"] if self.crop else []
        words += [f"cutout:{self.cutout}"] if self.cutout else []
        return ",".join(words + ([repr(self.own)] if self.own else []))

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise UsageError if inputs of `shape` are no images (C, H, W), or are smaller than a shift or the square."""
        if not self:
            return
        if len(shape) != 3:
            what = f"vectors of {shape[0]} values" if len(shape) == 1 else "series"
            raise UsageError(f"{'--flip mirrors' if self.text() == 'flip' else '--augment changes'} images; these are {what}")
        smallest = min(shape[1:])
        for name in ("crop", "cutout"):
            if getattr(self, name) >= smallest:
                raise UsageError(
                    f"--augment {name}:{getattr(self, name)} leaves nothing of images of {shape[1]}×{shape[2]}: it must be below {smallest}"
                )

    def of_targets(self, shape: tuple[int, ...], target: tuple[int, ...], classes: bool) -> dict[str, Any]:
        """The attributes of the op that gathers targets of the shape `target`, for inputs of `shape`: what moves the pixels of an input moves those
        of its target. A class or a vector has none, and is left as it is.

        `classes`: a target's pixels are classes (H, W). Raises UsageError for a crop of those, which would move pixels in that have no class, and
        of images of another size than the inputs.
        """
        if classes and len(target) != 2:
            return {}
        pixels = self.own.pixels().of_targets if self.own else None
        if len(target) < 2 or not (self.flip or self.crop or pixels):
            return {"flip": False}
        if pixels and classes:
            raise UsageError(f"{pixels} may move pixels in from outside of the image, and they have no class: leave it out, flip is possible")
        if pixels and target[1:] != shape[1:]:
            raise UsageError(
                f"{pixels} moves inputs of {shape[1]}×{shape[2]} and targets of {target[1]}×{target[2]} alike, of another scale: leave it out"
            )
        if self.crop and classes and self.border == REFLECT:
            raise UsageError(f"crop:{self.crop}:reflect shifts images, and the classes of their pixels stay: leave crop out, flip is possible")
        if self.crop and classes:
            raise UsageError(f"crop:{self.crop} moves pixels in from outside of the image, and they have no class: leave crop out, flip is possible")
        if self.crop and target[1:] != shape[1:]:
            raise UsageError(
                f"crop:{self.crop} shifts inputs of {shape[1]}×{shape[2]} and targets of {target[1]}×{target[2]} alike, which are of another scale: "
                "leave crop out, flip is possible"
            )
        return {"flip": self.flip} | self._cropped() | ({"own": pixels} if pixels else {})

    def attributes(self) -> dict[str, Any]:
        """The attributes of the op `gather`; `flip` always, the others where they are on."""
        made: dict[str, Any] = {"flip": self.flip} | self._cropped() | ({"cutout": self.cutout} if self.cutout else {})
        return made | ({"own": self.own.pixels()} if self.own else {})

    def _cropped(self) -> dict[str, bool | str | int]:
        made: dict[str, bool | str | int] = {"crop": self.crop} if self.crop else {}
        return made | ({"reflect": True} if self.crop and self.border == REFLECT else {})


def check(text: str) -> None:
    """Raise UsageError for words that are no augmentation; no file is run."""
    Augment.parse(text, run=False)


NOTHING = Augment()
"""Images as they are."""
