"""Views of an image, itself, mirrored and shifted, over which a network's outputs are averaged when it predicts (test-time augmentation).

Averages over mirrored and cropped views are as old as A. Krizhevsky, I. Sutskever, G. E. Hinton, "ImageNet classification with deep convolutional
neural networks", 2012; the weights are those of K. Jordan, arXiv:2404.00498.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nbcnn.files import numerals
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import nearest
from nbcnn.run.net import Net

FORMS = "flip, shift:N"


@dataclass(frozen=True)
class Views:
    """flip   the mirror image counts as much as the image.
    shift  the image moved by so many pixels down and right, and up and left, its borders reflected, count together as much as the image in its place.

    Raises UsageError for other values.

    >>> Views.parse("flip,shift:1")
    Views(flip=True, shift=1)
    """

    flip: bool = False
    shift: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.shift, bool) or not isinstance(self.shift, int) or self.shift < 0:
            raise UsageError(f"shift is a number of pixels, 0 or more, got {quoted(self.shift)}")

    def __bool__(self) -> bool:
        return bool(self.flip or self.shift)

    @classmethod
    def parse(cls, text: str | Views) -> Views:
        """Views in words with commas between them: flip, shift:1. Raises UsageError."""
        if isinstance(text, Views):
            return text
        if not isinstance(text, str):
            raise UsageError(f"views must be words such as 'flip,shift:1', got {quoted(text)}")
        values: dict[str, int] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, colon, value = part.partition(":")
            if name not in ("flip", "shift") or (name == "flip" and colon):
                raise UsageError(f"no view {quoted(part)} (there are {FORMS}){nearest(name, ('flip', 'shift'))}")
            if name in values:
                raise UsageError(f"{name} stands twice in {quoted(text)}")
            try:
                values[name] = numerals.whole(value) if name == "shift" else 1
            except ValueError:
                raise UsageError(f"{quoted(part)} needs a number of pixels, as in shift:1") from None
        return cls(bool(values.get("flip")), values.get("shift", 0))

    def check(self, shape: tuple[int, ...], outputs: Sequence[tuple[int, ...]]) -> None:
        """Raise UsageError unless examples of `shape` are images that can be shifted so far, and all `outputs` are vectors."""
        if not self:
            return
        if len(shape) != 3:
            raise UsageError(f"views mirror and shift images (C, H, W); these examples are {shape}")
        if self.shift >= min(shape[1:]):
            raise UsageError(f"views shift:{self.shift} leaves nothing of images of {shape[1]}×{shape[2]}: it must be below {min(shape[1:])}")
        if any(len(output) != 1 for output in outputs):
            raise UsageError(f"views average vectors, of classes or values; this network makes images {outputs[0]}, which move with their inputs")

    def predict(self, net: Net, images: np.ndarray, batch: int) -> np.ndarray:
        """The mean of the outputs of `net` for the views of `images`, float32, in batches of `batch`; added in float32 in the order of `of`."""
        self.check(net.input_shape, net.output_shapes)
        if not self:
            return net.predict(images, batch)
        return np.asarray(sum(np.float32(weight) * net.predict(view, batch) for weight, view in self.of(images)), np.float32)

    def of(self, images: np.ndarray) -> Iterator[tuple[float, np.ndarray]]:
        """Yield every view of `images` (M, C, H, W), as an array of the same shape and dtype, with its weight; the weights sum to 1."""
        places = [images]
        if self.shift:
            padded = np.pad(images, ((0, 0), (0, 0), *((self.shift, self.shift),) * 2), mode="reflect")
            height, width, ahead = *images.shape[2:], 2 * self.shift
            places += [padded[:, :, :height, :width], padded[:, :, ahead:, ahead:]]
        for at, place in enumerate(places):
            weight = 1.0 if len(places) == 1 else 0.25 if at else 0.5
            if self.flip:
                yield weight / 2, np.ascontiguousarray(place[:, :, :, ::-1])
            yield weight / (2 if self.flip else 1), np.ascontiguousarray(place)


PLAIN = Views()
"""Images as they are."""
