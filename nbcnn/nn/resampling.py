"""The layers GlobalAvgPool2d and Resize; MaxPool2d, AvgPool2d and Upsample2d stand in `layers.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nbcnn.files.errors import UsageError
from nbcnn.nn.layers import Built, _linear_map, _NoParams, counts, images
from nbcnn.plan.graph import Buf, Tape


@dataclass(frozen=True)
class GlobalAvgPool2d(_NoParams):
    """The mean of every channel over the whole image, as a vector: no Flatten follows (Lin et al., arXiv:1312.4400).

    Shapes: (N, C, H, W) → (N, C), float32. Raises ShapeError for what is no image, when the network is built. It is torch.nn.AdaptiveAvgPool2d(1)
    with torch.nn.Flatten behind it.

    Example:
        >>> import numpy as np, nbcnn
        >>> model = nbcnn.Model([nbcnn.Conv2d(8, 3), nbcnn.GlobalAvgPool2d(), nbcnn.Linear(10)], mode="cpu").build((3, 8, 8))
        >>> model.predict(np.zeros((5, 3, 8, 8), np.uint8)).shape
        (5, 10)
    """

    kind: ClassVar[str] = "globalpool"

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        n, c, *_ = images(x, scope)
        return _linear_map(tape, x, scope, "global_mean", (n, c))


@dataclass(frozen=True)
class Resize(_NoParams):
    """Larger images: nearest neighbour by whole numbers, or bilinear by 2 (as torch.nn.Upsample with align_corners=False).

    Shapes: (N, C, H, W) → (N, C, a·H, b·W), float32, for the `scale_factor` (a, b), or one int for both.

    mode  "nearest": every pixel becomes a×b pixels. "bilinear", for a scale_factor of 2: a pixel is 9/16 of the nearest one, 3/16 of its neighbours
          below or above and beside, 1/16 of the diagonal one; at the edge the edge counts for what is beyond.
    Raises UsageError for other factors and modes, and, when the network is built, ShapeError for what is no image.

    Example:
        >>> import numpy as np, nbcnn
        >>> wide = nbcnn.Model([nbcnn.Resize((1, 2))], mode="cpu").build((3, 8, 8))
        >>> wide.predict(np.zeros((5, 3, 8, 8), np.uint8)).shape
        (5, 3, 8, 16)
        >>> nbcnn.Model([nbcnn.Resize(mode="bilinear")], mode="cpu").build((3, 8, 8)).net.output_shape
        (3, 16, 16)
    """

    scale_factor: int | tuple[int, int] = 2
    mode: str = "nearest"
    kind: ClassVar[str] = "resize"

    def __post_init__(self) -> None:
        if isinstance(self.scale_factor, list):
            object.__setattr__(self, "scale_factor", tuple(self.scale_factor))
        counts(self, "scale_factor")
        if self.mode not in ("nearest", "bilinear"):
            raise UsageError(f'Resize takes mode="nearest" or "bilinear", got {self.mode!r}')
        if self.mode == "bilinear" and self.scale_factor not in (2, (2, 2)):
            raise UsageError(f"Resize is bilinear by a scale_factor of 2, got {self.scale_factor}; nearest takes any whole numbers")

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        n, c, h, w = images(x, scope)
        down, across = self.scale_factor if isinstance(self.scale_factor, tuple) else (self.scale_factor,) * 2
        shape = (n, c, h * down, w * across)
        if self.mode == "bilinear":
            return _linear_map(tape, x, scope, "bilinear", shape)
        if down == across:
            return _linear_map(tape, x, scope, "upsample", shape, factor=down)
        return _linear_map(tape, x, scope, "repeat", shape, factors=(down, across))
