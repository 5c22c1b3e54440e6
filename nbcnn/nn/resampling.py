"""This module defines the layers that change how many pixels an image has: pooling and enlarging."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.nn.layer import Built, NoParams, counts, fitting, images, later, linear_map, pair
from nbcnn.plan.graph import Buf, Tape
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel, pooled_extent


@dataclass(frozen=True)
class _Pool(NoParams):
    """Windows over images; `padding` and `ceil_mode` as in PyTorch."""

    kernel_size: int | tuple[int, int] = 2
    stride: int | tuple[int, int] | None = None
    padding: int | tuple[int, int] = later(0)
    ceil_mode: bool = later(False)

    def __post_init__(self) -> None:
        for name in ("kernel_size", "stride", "padding"):
            value = getattr(self, name)
            if isinstance(value, tuple | list):
                # A pair of equals is one number, so that a layer has one description, and its windows the kernels of square ones.
                object.__setattr__(self, name, value[0] if len(value) == 2 and value[0] == value[1] else tuple(value))
        counts(self, "kernel_size", "stride")
        counts(self, "padding", least=0)
        if any(2 * pad > size for pad, size in zip(pair(self.padding), pair(self.kernel_size), strict=True)):
            raise UsageError(f"{type(self).__name__} needs a padding of at most half of the kernel_size {self.kernel_size}, got {self.padding}")

    def shape(self, x: Buf, scope: str) -> tuple[int, ...]:
        """The shape of the output. Raises ShapeError if no window fits."""
        n, c, *extent = images(x, scope)
        size, stride, pad = self.geometry()
        return n, c, *fitting(scope, x, lambda: [pooled_extent(extent[at], size[at], stride[at], pad[at], self.ceil_mode) for at in (0, 1)])

    def geometry(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Size, stride and padding of both axes."""
        return pair(self.kernel_size), pair(self.stride or self.kernel_size), pair(self.padding)

    def square(self, x: Buf, scope: str) -> dict[str, int] | None:
        """The attributes of the ops for square windows that lie inside, where these are such; else None."""
        (size, across), (stride, along), pad = self.geometry()
        inside = self.shape(x, scope) == replace(self, ceil_mode=False).shape(x, scope)
        return {"size": size, "stride": stride} if size == across and stride == along and pad == (0, 0) and inside else None


@dataclass(frozen=True)
class MaxPool2d(_Pool):
    """Maximum over windows of `kernel_size`; ties go to the first in (h, w) order (as torch.nn.MaxPool2d without dilation).

    Shapes: (N, C, H, W) → (N, C, P, Q), float32; P = ⌊(H + 2·padding − kernel_size)/stride⌋ + 1, Q likewise, sizes in pixels.

    `kernel_size`, `stride` (None is `kernel_size`) and `padding` are one int or a pair for (rows, columns); padding, at most half of the
    kernel_size, is never the maximum. `ceil_mode` rounds P and Q up: a last window may hang over the edge. Raises UsageError for other sizes, and,
    when the network is built, ShapeError where the window does not fit.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.MaxPool2d(2)], mode="cpu").build((1, 2, 2)).predict(np.array([[[[0, 0], [255, 0]]]], np.uint8))
        array([[[[1.]]]], dtype=float32)
        >>> nbcnn.Model([nbcnn.MaxPool2d(3, 2, padding=1)], mode="cpu").build((1, 6, 7)).net.output_shape
        (1, 3, 4)
    """

    kind: ClassVar[str] = "pool"

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        shape, attrs = self.shape(x, scope), self.square(x, scope)
        kind = "window_max" if attrs is None else "maxpool"
        used: dict[str, Any] = dict(zip(("size", "stride", "pad"), self.geometry(), strict=True)) if attrs is None else attrs
        y = tape.temp(f"{scope}.y", shape)
        index = tape.temp(f"{scope}.index", shape, "uint8" if numel(pair(self.kernel_size)) <= 256 else "int32")
        tape.emit(Op(kind, "fprop"), [x], [y, index], scope, **used)

        def backward(dy: Buf) -> Buf:
            dx = tape.temp(f"{scope}.dx", x.shape)
            tape.emit(Op(kind, "dgrad"), [dy, index], [dx], scope, **used)
            return dx

        return y, backward


@dataclass(frozen=True)
class AvgPool2d(_Pool):
    """Mean over windows of `kernel_size` (as torch.nn.AvgPool2d).

    Shapes: (N, C, H, W) → (N, C, P, Q), float32; P = ⌊(H + 2·padding − kernel_size)/stride⌋ + 1, Q likewise, sizes in pixels.

    `kernel_size`, `stride` (None is `kernel_size`) and `padding` are one int or a pair for (rows, columns); padding is at most half of the
    kernel_size. `ceil_mode` rounds P and Q up: a last window may hang over the edge. `count_include_pad`: the zeros of the padding count in the
    mean; False takes the mean of what is inside. Raises UsageError for other sizes, and, when the network is built, ShapeError where the window does
    not fit.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.AvgPool2d(2)], mode="cpu").build((1, 2, 2)).predict(np.array([[[[0, 0], [255, 255]]]], np.uint8))
        array([[[[0.5]]]], dtype=float32)
        >>> nbcnn.Model([nbcnn.AvgPool2d((1, 3), ceil_mode=True)], mode="cpu").build((1, 6, 7)).net.output_shape
        (1, 6, 3)
    """

    count_include_pad: bool = later(True)
    kind: ClassVar[str] = "avgpool"

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        shape, attrs = self.shape(x, scope), self.square(x, scope)
        if attrs is not None:
            return linear_map(tape, x, scope, "avgpool", shape, **attrs)
        size, stride, pad = self.geometry()
        return linear_map(tape, x, scope, "window_mean", shape, size=size, stride=stride, pad=pad, padded=self.count_include_pad)


@dataclass(frozen=True)
class Upsample2d(NoParams):
    """Nearest neighbour: every pixel becomes scale_factor×scale_factor pixels.

    Shapes: (N, C, H, W) → (N, C, scale_factor·H, scale_factor·W), float32. Raises UsageError unless `scale_factor` is a whole number of at least 1,
    and, when the network is built, ShapeError for what is no image.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.Upsample2d(2)], mode="cpu").build((3, 8, 8)).predict(np.zeros((5, 3, 8, 8), np.uint8)).shape
        (5, 3, 16, 16)
    """

    scale_factor: int = 2
    kind: ClassVar[str] = "up"

    def __post_init__(self) -> None:
        counts(self, "scale_factor")

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        n, c, h, w = images(x, scope)
        return linear_map(tape, x, scope, "upsample", (n, c, h * self.scale_factor, w * self.scale_factor), factor=self.scale_factor)


@dataclass(frozen=True)
class GlobalAvgPool2d(NoParams):
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
        return linear_map(tape, x, scope, "global_mean", (n, c))


@dataclass(frozen=True)
class Resize(NoParams):
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
    _: KW_ONLY
    mode: str = "nearest"
    kind: ClassVar[str] = "resize"

    def __post_init__(self) -> None:
        if isinstance(self.scale_factor, list):
            object.__setattr__(self, "scale_factor", tuple(self.scale_factor))
        counts(self, "scale_factor")
        if self.mode not in ("nearest", "bilinear"):
            raise UsageError(f'Resize takes mode="nearest" or "bilinear", got {quoted(self.mode)}')
        if self.mode == "bilinear" and self.scale_factor not in (2, (2, 2)):
            raise UsageError(f"Resize is bilinear by a scale_factor of 2, got {self.scale_factor}; nearest takes any whole numbers")

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        n, c, h, w = images(x, scope)
        down, across = self.scale_factor if isinstance(self.scale_factor, tuple) else (self.scale_factor,) * 2
        shape = (n, c, h * down, w * across)
        if self.mode == "bilinear":
            return linear_map(tape, x, scope, "bilinear", shape)
        if down == across:
            return linear_map(tape, x, scope, "upsample", shape, factor=down)
        return linear_map(tape, x, scope, "repeat", shape, factors=(down, across))
