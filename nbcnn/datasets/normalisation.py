"""Mean and standard deviation of a data set's channels: the gather kernel subtracts and divides by them while it reads the pixels."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.files.errors import UsageError
from nbcnn.files.masked import refuse_masked
from nbcnn.files.quote import quoted

LARGEST = 1e35
"""Bound of means and deviations, and of 1 / deviation: 255 times it is a float32, which the gather kernel wants."""
_BLOCK = 1 << 24
"""Elements that are added at a time."""


@dataclass(frozen=True)
class Normalisation:
    """What a network sees is (value − mean) / deviation, by channel; a value is a byte divided by 255, or a float as it is.

    mean, deviation  one float per channel, in multiples of 255 where the images are bytes. `of(images)` takes those of images (M, C, H, W), uint8 or
                     float32.
    Raises UsageError unless there are as many means as deviations, all finite and the deviations positive.

    Example:
        >>> import numpy as np
        >>> from nbcnn import Normalisation
        >>> Normalisation.of(np.array([0, 255], np.uint8).reshape(2, 1, 1, 1))
        Normalisation(mean=(0.5,), deviation=(0.5,))
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", _floats(self.mean))
        object.__setattr__(self, "deviation", _floats(self.deviation))
        if not self.mean or len(self.mean) != len(self.deviation):
            raise UsageError(f"a normalisation needs one mean and one deviation a channel, got {len(self.mean)} and {len(self.deviation)}")
        if not all(abs(each) < LARGEST for each in self.mean) or not all(1 / LARGEST < each < LARGEST for each in self.deviation):
            raise UsageError(f"means must be finite and deviations positive, and both within float32, got {self.mean} and {self.deviation}")

    @classmethod
    def of(cls, images: np.ndarray) -> Normalisation:
        """Mean and deviation of the channels of `images` (M, C, H, W), uint8 or float32. A channel of one value has deviation 1.

        Bytes are added as integers, so the result does not depend on how; floats are added in float64, block by block.
        """
        refuse_masked(images, "images")
        channels, each = images.shape[1], math.prod(images.shape[2:])
        exact = images.dtype == np.uint8
        first: Any = np.zeros(channels, np.int64 if exact else np.float64)
        second = first.copy()
        step = max(1, _BLOCK // (channels * each))
        for start in range(0, len(images), step):
            block: Any = images[start : start + step].reshape(-1, channels, each).astype(np.uint32 if exact else np.float64)
            first += block.sum((0, 2), dtype=first.dtype)
            second += (block * block).sum((0, 2), dtype=first.dtype)
        count = len(images) * each
        # Python's integers do not overflow: n·Σx² − (Σx)² has no rounding before the division.
        variances = [(count * s - f * f) / count**2 for f, s in zip(first.tolist(), second.tolist(), strict=True)]
        scale = 255.0 if exact else 1.0
        deviations = [math.sqrt(max(variance, 0.0)) / scale or 1.0 for variance in variances]
        return cls(tuple(f / count / scale for f in first.tolist()), tuple(deviations))

    def attributes(self, dtype: str) -> dict[str, tuple[float, ...]]:
        """`shift` and `factor` of the op `gather` for images of `dtype`, uint8 or float32."""
        scale = 255.0 if dtype == "uint8" else 1.0
        return {"shift": tuple(scale * mean for mean in self.mean), "factor": tuple(1 / (scale * deviation) for deviation in self.deviation)}

    def done(self, images: np.ndarray) -> np.ndarray:
        """What a network sees of `images` (N, C, …), uint8 or float32: float64 of the same shape."""
        by_channel = (1, -1, *(1,) * (images.ndim - 2))
        mean, deviation = (np.array(values).reshape(by_channel) for values in (self.mean, self.deviation))
        return np.asarray((images / (255.0 if images.dtype == np.uint8 else 1.0) - mean) / deviation)

    def undone(self, outputs: np.ndarray) -> np.ndarray:
        """`outputs` (N, C, …) of a network that reconstructs what it sees, as values of pixels, float32."""
        by_channel = (1, -1, *(1,) * (outputs.ndim - 2))
        mean, deviation = (np.array(values, np.float32).reshape(by_channel) for values in (self.mean, self.deviation))
        return np.asarray(outputs * deviation + mean, np.float32)

    def text(self) -> str:
        """The normalisation as one line of JSON, for the metadata of a checkpoint; `parse` reads it."""
        return json.dumps({"mean": self.mean, "deviation": self.deviation})

    @classmethod
    def noted(cls, metadata: Mapping[str, str]) -> Normalisation | None:
        """The normalisation that the metadata of a checkpoint tells of. Raises UsageError if it is no normalisation."""
        return cls.parse(metadata["normalisation"]) if "normalisation" in metadata else None

    @classmethod
    def parse(cls, text: str) -> Normalisation:
        """What `text` wrote. Raises UsageError if it is something else."""
        try:
            read = json.loads(text)
            return cls(tuple(read["mean"]), tuple(read["deviation"]))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{quoted(text)} is no normalisation: {error}") from error


def _floats(values: Iterable[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
