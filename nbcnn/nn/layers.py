"""This module defines the layers of images and vectors: convolutions, Linear, Flatten, Residual. `layer.py` says what a layer is.

`convolve.py` records the convolutions. The layers of series, activations, norms and the rest have modules of their own.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from nbcnn.files.errors import UsageError
from nbcnn.nn.convolve import check_padding, conv_by_engine, convolved, even, padding_of, sides_of
from nbcnn.nn.convolve import padded_images as padded_images
from nbcnn.nn.graphs import Layer
from nbcnn.nn.layer import Built, NoParams, Param, counts, fitting, images, known, later, linear_map, pair, parameters, sized, states, unsized
from nbcnn.nn.layer import constant as constant
from nbcnn.plan.graph import Buf, Named, ShapeError, Tape, named, trace
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import ConvShape, numel


@dataclass(frozen=True)
class Conv2d(Layer):
    """2-D convolution (cross-correlation) with zero padding, as torch.nn.Conv2d.

    Shapes: (N, in_channels, H, W) → (N, out_channels, P, Q), float32; P = ⌊(H + padding above and below − dilation·(R − 1) − 1)/stride⌋ + 1, Q alike.

    `kernel_size`: (R, S), or one int for both; `stride` and `dilation` are ints or pairs (rows, columns), in pixels; `padding` is an int, a pair,
    (top, bottom, left, right), "same" (at stride 1, height and width stay) or "valid" (none); `bias` is optional. `groups` divides both numbers of
    channels: each group of filters reads its own channels, one each where `groups` is in_channels (depthwise). `in_channels` None is the input's.
    Parameters: weight (out_channels, in_channels/groups, R, S) and bias (out_channels,). The engines of a mode compute what has one stride, where
    borders are uneven of a padded copy, depthwise kernels what has one channel a group, and a general kernel, which is many times slower, the rest.
    Raises UsageError for sizes below 1, a negative padding, or groups that do not divide, and, when the network is built, ShapeError where the window
    does not fit.

    Example, which keeps height and width:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.Conv2d(4, 3, padding=1)], mode="cpu").build((3, 8, 8)).predict(np.zeros((5, 3, 8, 8), np.uint8)).shape
        (5, 4, 8, 8)
    """

    out_channels: int
    kernel_size: int | tuple[int, int] = 3
    _: KW_ONLY
    stride: int | tuple[int, int] = 1
    padding: int | str | tuple[int, ...] = 0
    bias: bool = True
    dilation: int | tuple[int, int] = later(1)
    groups: int = later(1)
    in_channels: int | None = unsized()
    kind: ClassVar[str] = "conv"
    orders: ClassVar[tuple[str, ...]] = (
        "in_channels out_channels kernel_size stride padding dilation groups bias",
        "out_channels kernel_size stride padding bias",
    )
    size_of_input: ClassVar[str] = "in_channels"

    def __post_init__(self) -> None:
        if isinstance(self.kernel_size, list):
            object.__setattr__(self, "kernel_size", tuple(self.kernel_size))
        for name in ("stride", "dilation"):
            object.__setattr__(self, name, even(getattr(self, name)))
        counts(self, "out_channels", "kernel_size", "stride", "dilation", "groups", "in_channels")
        object.__setattr__(self, "padding", even(padding_of(self)))
        check_padding(self)
        if self.out_channels % self.groups or (self.in_channels or 0) % self.groups:
            raise UsageError(f"Conv2d needs groups that divide its channels, got {self.in_channels} → {self.out_channels} in {self.groups} groups")

    @property
    def general(self) -> bool:
        """Whether it takes more than the engines of convolution do: groups, dilation, or strides and paddings that differ."""
        return self.groups > 1 or self.dilation != 1 or isinstance(self.stride, tuple) or isinstance(self.padding, tuple)

    @property
    def borders(self) -> tuple[int, int, int, int]:
        """The padding as (top, bottom, left, right)."""
        return sides_of(self.padding)

    def params(self) -> dict[str, Param]:
        shape = (self.out_channels, known(self) // self.groups, *pair(self.kernel_size))
        fan_in = numel(shape[1:])
        made = {"weight": Param(shape, fan_in)}
        return made | {"bias": Param((self.out_channels,), fan_in, bias=True)} if self.bias else made

    def shape(self, x: Buf, scope: str, doubled: bool = False) -> ConvShape:
        """The convolution of `x`, or of the doubled `x`, of a layer that is not general. Raises ShapeError if `x` does not fit."""
        n, c, h, w = self._taken(x, scope)
        r, s = pair(self.kernel_size)
        h, w = (2 * h, 2 * w) if doubled else (h, w)
        stride, pad = pair(self.stride)[0], self.borders[0]
        return fitting(scope, x, lambda: ConvShape(n, c, h, w, self.out_channels, r, s, stride, pad))

    def _taken(self, x: Buf, scope: str) -> tuple[int, int, int, int]:
        n, c, h, w = images(x, scope)
        if c != self.in_channels:
            raise ShapeError(f"{scope} takes {self.in_channels} channels, got {c} (its input is {x.shape})")
        return n, c, h, w

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        if not self.general:
            return conv_by_engine(self, tape, x, scope, self.shape(x, scope))
        self._taken(x, scope)
        return convolved(self, tape, x, scope, pair(self.kernel_size), pair(self.stride), pair(self.dilation), self.borders)


@dataclass(frozen=True)
class ConvTranspose2d(Layer):
    """2-D transposed convolution, the gradient of a Conv2d by its input, as torch.nn.ConvTranspose2d.

    Shapes: (N, in_channels, H, W) → (N, out_channels, P, Q), float32; P = (H − 1)·stride − padding above and below + dilation·(R − 1) + 1 +
    output_padding, Q likewise.

    `kernel_size`: (R, S), or one int for both; `stride`, `dilation` and `output_padding`, which is below `stride`, are ints or pairs (rows, columns),
    in pixels; `padding`, which takes so much off the result, is an int, a pair, or (top, bottom, left, right); `bias` is optional. `groups` divides
    both numbers of channels: each group of filters reads and makes its own. `in_channels` None is the input's. Parameters: weight (in_channels,
    out_channels/groups, R, S) and bias (out_channels,). The engines of a mode compute what has one group, no dilation, one stride and one padding;
    one general kernel for all modes computes the rest. Raises UsageError for sizes below 1, a negative padding, an output_padding that is too large,
    or groups that do not divide, and, when the network is built, ShapeError where nothing is left.

    Example, which doubles height and width:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.ConvTranspose2d(4, 2, stride=2)], mode="cpu").build((3, 8, 8)).predict(np.zeros((5, 3, 8, 8), np.uint8)).shape
        (5, 4, 16, 16)
    """

    out_channels: int
    kernel_size: int | tuple[int, int] = 3
    _: KW_ONLY
    stride: int | tuple[int, int] = 1
    padding: int | tuple[int, ...] = 0
    output_padding: int | tuple[int, int] = 0
    bias: bool = True
    dilation: int | tuple[int, int] = later(1)
    groups: int = later(1)
    in_channels: int | None = unsized()
    kind: ClassVar[str] = "convt"
    orders: ClassVar[tuple[str, ...]] = (
        "in_channels out_channels kernel_size stride padding output_padding groups bias dilation",
        "out_channels kernel_size stride padding output_padding bias",
    )
    size_of_input: ClassVar[str] = "in_channels"

    def __post_init__(self) -> None:
        if isinstance(self.kernel_size, list):
            object.__setattr__(self, "kernel_size", tuple(self.kernel_size))
        for name in ("stride", "padding", "output_padding", "dilation"):
            object.__setattr__(self, name, even(getattr(self, name)))
        counts(self, "out_channels", "kernel_size", "stride", "dilation", "groups", "in_channels")
        counts(self, "output_padding", least=0)
        check_padding(self)
        if any(more >= step for more, step in zip(pair(self.output_padding), pair(self.stride), strict=True)):
            raise UsageError(f"ConvTranspose2d needs an output_padding below its stride, got {self.output_padding} and {self.stride}")
        if self.out_channels % self.groups or (self.in_channels or 0) % self.groups:
            raise UsageError(
                f"ConvTranspose2d needs groups that divide its channels, got {self.in_channels} → {self.out_channels} in {self.groups} groups"
            )

    @property
    def general(self) -> bool:
        """Whether it takes more than the engines of convolution do: groups, dilation, or numbers that differ between axes or sides."""
        uneven = any(isinstance(each, tuple) for each in (self.stride, self.padding, self.output_padding))
        return self.groups > 1 or self.dilation != 1 or uneven

    @property
    def borders(self) -> tuple[int, int, int, int]:
        """The padding as (top, bottom, left, right)."""
        return sides_of(self.padding)

    def params(self) -> dict[str, Param]:
        shape = (known(self), self.out_channels // self.groups, *pair(self.kernel_size))
        # PyTorch too takes the second and the further axes for the fan-in.
        fan_in = numel(shape[1:])
        made = {"weight": Param(shape, fan_in)}
        return made | {"bias": Param((self.out_channels,), fan_in, bias=True)} if self.bias else made

    def _made(self, x: Buf, scope: str) -> tuple[int, int]:
        """(P, Q). Raises ShapeError if nothing is left."""
        window, stride, dilation, more = map(pair, (self.kernel_size, self.stride, self.dilation, self.output_padding))
        top, bottom, left, right = self.borders
        p, q = (
            (x.shape[2 + at] - 1) * stride[at] - off + dilation[at] * (window[at] - 1) + 1 + more[at]
            for at, off in enumerate((top + bottom, left + right))
        )
        if min(p, q) < 1:
            raise ShapeError(f"{scope}: a padding of {self.padding} leaves nothing of {p + top + bottom}×{q + left + right} (its input is {x.shape})")
        return p, q

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        n, c, *_ = images(x, scope)
        if c != self.in_channels:
            raise ShapeError(f"{scope} takes {self.in_channels} channels, got {c} (its input is {x.shape})")
        p, q = self._made(x, scope)
        made: tuple[int, ...] = (n, self.out_channels, p, q)
        kind, attrs = "conv", dict[str, Any]()
        if self.general:
            top, _, left, _ = self.borders
            kind = "gconv"
            attrs = {"groups": self.groups, "stride": pair(self.stride), "dilation": pair(self.dilation), "pad": (top, left)}
        else:
            window, step, pad = pair(self.kernel_size), pair(self.stride)[0], self.borders[0]
            made = fitting(scope, x, lambda: ConvShape(n, self.out_channels, p, q, c, *window, step, pad)).x_shape
            attrs = {"stride": step, "pad": pad}
        params = self.params()
        weight = tape.param(scope, "weight", params["weight"].shape)
        bias = tape.param(scope, "bias", params["bias"].shape) if self.bias else None
        y = tape.temp(f"{scope}.y", made)
        tape.emit(Op(kind, "dgrad"), [x, weight], [y], scope, **attrs)
        if bias is not None:
            product, y = y, tape.temp(f"{scope}.y", y.shape)
            tape.emit(Op("bias", "fprop"), [product, bias], [y], scope)

        def backward(dy: Buf) -> Buf:
            if bias is not None:
                tape.emit(Op("bias", "wgrad"), [dy], [tape.grad(bias)], scope)
            # The convolution that this is the gradient of reads dy and makes x.
            tape.emit(Op(kind, "wgrad"), [dy, x], [tape.grad(weight)], scope, **attrs)
            dx = tape.temp(f"{scope}.dx", x.shape)
            tape.emit(Op(kind, "fprop"), [dy, weight], [dx], scope, **attrs)
            return dx

        return y, backward


@dataclass(frozen=True)
class Linear(Layer):
    """y = x wᵀ + b, as torch.nn.Linear; computed as a 1×1 convolution of 1×1 images.

    Shapes: (N, in_features) → (N, out_features), float32.

    `in_features` None is the input's; `bias` is optional. Parameters: weight (out_features, in_features) and bias (out_features,). Raises
    UsageError for sizes below 1, and, when the network is built, ShapeError for images: Flatten makes vectors of them.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.Linear(10)], mode="cpu").build((7,)).predict(np.zeros((5, 7), np.uint8)).shape
        (5, 10)
    """

    out_features: int
    _: KW_ONLY
    bias: bool = True
    in_features: int | None = unsized()
    kind: ClassVar[str] = "linear"
    orders: ClassVar[tuple[str, ...]] = ("in_features out_features bias", "out_features bias")
    size_of_input: ClassVar[str] = "in_features"

    def __post_init__(self) -> None:
        counts(self, "out_features", "in_features")

    def params(self) -> dict[str, Param]:
        size = known(self)
        made = {"weight": Param((self.out_features, size), size)}
        return made | {"bias": Param((self.out_features,), size, bias=True)} if self.bias else made

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        if x.shape[1:] != (self.in_features,):
            raise ShapeError(f"{scope} takes (N, {self.in_features}), got {x.shape}; Flatten makes vectors of images")
        n = x.shape[0]
        y, backward = conv_by_engine(self, tape, x.reshaped((*x.shape, 1, 1)), scope, ConvShape(n, known(self), 1, 1, self.out_features, 1, 1))
        return y.reshaped((n, self.out_features)), lambda dy: backward(dy.reshaped(y.shape)).reshaped(x.shape)


@dataclass(frozen=True)
class Flatten(NoParams):
    """Images as vectors, in C, H, W order whatever layout the mode stores.

    Shapes: (N, C, H, W) → (N, C·H·W), float32. Raises ShapeError for what is no image, when the network is built.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.Flatten()], mode="cpu").build((3, 8, 8)).predict(np.zeros((5, 3, 8, 8), np.uint8)).shape
        (5, 192)
    """

    kind: ClassVar[str] = "flatten"

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        n, *rest = images(x, scope)
        return linear_map(tape, x, scope, "flatten", (n, numel(tuple(rest))))


@dataclass(frozen=True)
class Residual(Layer):
    """y = body(x) + x (He et al., arXiv:1512.03385). `body` is any number of layers, given one after another.

    Shapes: any shape that the body takes and keeps, float32. Raises ShapeError if the body changes it, when the network is built.

    Example:
        >>> import numpy as np, nbcnn
        >>> block = nbcnn.Residual(nbcnn.Conv2d(3, 3, padding=1), nbcnn.ReLU())
        >>> nbcnn.Model([block], mode="cpu").build((3, 8, 8)).predict(np.zeros((5, 3, 8, 8), np.uint8)).shape
        (5, 3, 8, 8)
    """

    body: tuple[Any, ...]
    kind: ClassVar[str] = "residual"

    def __init__(self, *body: Any) -> None:
        object.__setattr__(self, "body", tuple(body))

    def params(self) -> dict[str, Param]:
        return parameters(self.body)

    def state(self) -> dict[str, Param]:
        return states(self.body)

    def named_body(self, scope: str) -> list[Named]:
        """The layers of the body with their names."""
        return named(self.body, f"{scope}.")

    def sized(self, shape: tuple[int, ...]) -> Residual:
        """The layer with the sizes of its body's inputs filled in, for examples of `shape`."""
        return Residual(*sized(self.body, shape))

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        inner, inner_backward = trace(tape, self.named_body(scope), x)
        if inner.shape != x.shape:
            raise ShapeError(f"{scope}: the body turns {x.shape} into {inner.shape}, which cannot be added to its input")
        y = tape.temp(f"{scope}.y", x.shape)
        tape.emit(Op("add"), [inner, x], [y], scope)

        def backward(dy: Buf) -> Buf:
            dx = tape.temp(f"{scope}.dx", x.shape)
            tape.emit(Op("add"), [inner_backward(dy), dy], [dx], scope)
            return dx

        return y, backward
