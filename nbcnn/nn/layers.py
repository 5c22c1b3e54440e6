"""This module defines the layers of images and vectors, and the losses; normalisations stand in `norms.py`, layers of series in `series_layers.py`.

A layer is a frozen dataclass whose arguments have PyTorch's names. What its input's size is may be left out (`in_channels`, `in_features`,
`channels`: None), and `sized` fills it in from the shape of one example. `build(tape, x, scope)` records its forward and returns
(y, backward); `backward(dy)` records its backward and returns dx. `params()` names its parameters, `state()`, where a layer has it,
what training updates in place (norms.py). A loss is the last layer of a list: its
`build(tape, y, target, scope)` returns (value, dy). Shapes are logical: images (N, C, H, W), vectors (N, F), series (N, C, L); values are float32 as
the caller sees them, whatever a mode stores.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from nbcnn.files.errors import UsageError
from nbcnn.nn.graphs import Graph, Layer, filled
from nbcnn.plan.graph import Backward, Buf, Named, ShapeError, Tape, named, trace
from nbcnn.plan.shapes import ConvShape, numel, pooled_extent, window_extent

Built = tuple[Buf, Backward]


@dataclass(frozen=True)
class Param:
    """A parameter's shape; `fan_in` sets the scale of its first values, unless `first` makes them (a NumPy generator, the shape ->
    array); `decay` says whether weight decay applies."""

    shape: tuple[int, ...]
    fan_in: int
    decay: bool = True
    bias: bool = False
    first: Callable[[Any, tuple[int, ...]], Any] | None = None


def constant(value: float) -> Callable[[Any, tuple[int, ...]], Any]:
    """A function for `Param.first` that sets every element to `value`."""
    return lambda random, shape: np.full(shape, value)


def unsized() -> Any:
    """The field of a layer that holds the size of its input, by keyword only; None until `sized` knows it."""
    return field(default=None, kw_only=True)


def later(default: Any, kw_only: bool = True) -> Any:
    """A field that the layer of an earlier version did not have.

    What a file says of a network leaves it out where it is `default` (`description.as_data`), so that older files, and the digests by which a run
    knows its network, stay what they are.
    """
    return field(default=default, kw_only=kw_only, metadata={"later": True})


def counts(layer: Any, *names: str, least: int = 1) -> None:
    """Raise UsageError unless the fields `names` of `layer` are whole numbers, or pairs of them, of at least `least`; None is no number yet."""
    for name in names:
        value = getattr(layer, name)
        for each in value if isinstance(value, tuple) else (value,):
            if value is not None and (isinstance(each, bool) or not isinstance(each, int) or each < least):
                raise UsageError(f"{type(layer).__name__} needs a whole number of at least {least} as {name}, got {value!r}")
        if isinstance(value, tuple) and len(value) != 2:
            raise UsageError(f"{type(layer).__name__} takes one {name} or a pair, got {value!r}")


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def images(x: Buf, scope: str) -> tuple[int, int, int, int]:
    """x's shape; raises ShapeError if x is no batch of images."""
    if len(x.shape) != 4:
        raise ShapeError(f"{scope} takes images (N, C, H, W), got {x.shape}")
    n, c, h, w = x.shape
    return n, c, h, w


def _fitting(scope: str, x: Buf, make: Any) -> Any:
    """The result of `make()`; its error names the layer and its input if the shape does not fit."""
    try:
        return make()
    except ValueError as error:
        raise ShapeError(f"{scope}: {error} (its input is {x.shape})") from None


def _even(value: Any) -> Any:
    """A pair, or four, of one number as that number; lists, as files have them, as tuples."""
    made = tuple(value) if isinstance(value, list | tuple) else value
    return made[0] if isinstance(made, tuple) and len(made) in (2, 4) and len(set(made)) == 1 else made


@dataclass(frozen=True)
class Conv2d(Layer):
    """2-D convolution (cross-correlation) with zero padding, as torch.nn.Conv2d.

    Shapes: (N, in_channels, H, W) → (N, out_channels, P, Q), float32; P = ⌊(H + padding above and below − dilation·(R − 1) − 1)/stride⌋ + 1, Q alike.

    `kernel_size`: (R, S), or one int for both; `stride` and `dilation` are ints or pairs (rows, columns), in pixels; `padding` is an int, a pair, or
    (top, bottom, left, right); `bias` is optional. `groups` divides both numbers of channels: each group of filters reads its own channels, one each
    where `groups` is in_channels (depthwise). `in_channels` None is the input's. Parameters: weight (out_channels, in_channels/groups, R, S) and bias
    (out_channels,). The engines of a mode compute what has one group, no dilation and one stride, where borders are uneven of a padded copy; one
    general kernel for all modes computes the rest.
    Raises UsageError for sizes below 1, a negative padding, or groups that divide not, and, when the network is built, ShapeError where the window
    does not fit.

    Example, which keeps height and width:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.Conv2d(4, 3, padding=1)], mode="cpu").build((3, 8, 8)).predict(np.zeros((5, 3, 8, 8), np.uint8)).shape
        (5, 4, 8, 8)
    """

    out_channels: int
    kernel_size: int | tuple[int, int] = 3
    stride: int | tuple[int, int] = 1
    padding: int | tuple[int, ...] = 0
    bias: bool = True
    dilation: int | tuple[int, int] = later(1)
    groups: int = later(1)
    in_channels: int | None = unsized()
    kind: ClassVar[str] = "conv"
    size_of_input: ClassVar[str] = "in_channels"

    def __post_init__(self) -> None:
        if isinstance(self.kernel_size, list):
            object.__setattr__(self, "kernel_size", tuple(self.kernel_size))
        for name in ("stride", "padding", "dilation"):
            object.__setattr__(self, name, _even(getattr(self, name)))
        counts(self, "out_channels", "kernel_size", "stride", "dilation", "groups", "in_channels")
        sides = self.padding if isinstance(self.padding, tuple) else (self.padding,)
        if len(sides) == 1:
            counts(self, "padding", least=0)
        elif len(sides) not in (2, 4) or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in sides):
            raise UsageError(f"Conv2d takes one padding of at least 0, a pair, or (top, bottom, left, right), got {self.padding!r}")
        if self.out_channels % self.groups or (self.in_channels or 0) % self.groups:
            raise UsageError(f"Conv2d needs groups that divide its channels, got {self.in_channels} → {self.out_channels} in {self.groups} groups")

    @property
    def general(self) -> bool:
        """Whether it takes more than the engines of convolution do: groups, dilation, or strides and paddings that differ."""
        return self.groups > 1 or self.dilation != 1 or isinstance(self.stride, tuple) or isinstance(self.padding, tuple)

    @property
    def borders(self) -> tuple[int, int, int, int]:
        """The padding as (top, bottom, left, right)."""
        sides = self.padding if isinstance(self.padding, tuple) else (self.padding,) * 2
        top, bottom, left, right = sides if len(sides) == 4 else (sides[0], sides[0], sides[1], sides[1])
        return top, bottom, left, right

    def params(self) -> dict[str, Param]:
        shape = (self.out_channels, known(self) // self.groups, *_pair(self.kernel_size))
        fan_in = numel(shape[1:])
        made = {"weight": Param(shape, fan_in)}
        return made | {"bias": Param((self.out_channels,), fan_in, bias=True)} if self.bias else made

    def shape(self, x: Buf, scope: str, doubled: bool = False) -> ConvShape:
        """The convolution of `x`, or of the doubled `x`, of a layer that is not general. Raises ShapeError if `x` does not fit."""
        n, c, h, w = self._taken(x, scope)
        r, s = _pair(self.kernel_size)
        h, w = (2 * h, 2 * w) if doubled else (h, w)
        stride, pad = _pair(self.stride)[0], self.borders[0]
        return _fitting(scope, x, lambda: ConvShape(n, c, h, w, self.out_channels, r, s, stride, pad))

    def _taken(self, x: Buf, scope: str) -> tuple[int, int, int, int]:
        n, c, h, w = images(x, scope)
        if c != self.in_channels:
            raise ShapeError(f"{scope} takes {self.in_channels} channels, got {c} (its input is {x.shape})")
        return n, c, h, w

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        if not self.general:
            return _conv(self, tape, x, scope, self.shape(x, scope))
        if self.groups > 1 or self.dilation != 1 or isinstance(self.stride, tuple):
            return self._general(tape, x, scope)
        # Uneven borders alone: a padded copy costs two passes over the image, the general kernel many times the convolution of an engine.
        self._taken(x, scope)
        whole, back = padded_images(tape, x, self.borders, scope)
        n, c, h, w = images(whole, scope)
        r, s = _pair(self.kernel_size)
        shape = _fitting(scope, x, lambda: ConvShape(n, c, h, w, self.out_channels, r, s, _pair(self.stride)[0], 0))
        y, backward = _conv(self, tape, whole, scope, shape)
        return y, lambda dy: back(backward(dy))

    def _general(self, tape: Tape, x: Buf, scope: str) -> Built:
        """Record the convolution by the ops that take everything (`nbcnn.ops.conv.grouped`)."""
        n, _, h, w = self._taken(x, scope)
        window, stride, dilation = _pair(self.kernel_size), _pair(self.stride), _pair(self.dilation)
        top, bottom, left, right = self.borders
        whole = (h + top + bottom, w + left + right)
        out = [_fitting(scope, x, lambda at=at: window_extent(whole[at], dilation[at] * (window[at] - 1) + 1, stride[at])) for at in (0, 1)]
        params = self.params()
        weight = tape.param(scope, "weight", params["weight"].shape)
        biases = [tape.param(scope, "bias", params["bias"].shape)] if self.bias else []
        y = tape.temp(f"{scope}.y", (n, self.out_channels, *out))
        attrs = {"groups": self.groups, "stride": stride, "dilation": dilation, "pad": (top, left)}
        tape.emit("gconv_fprop", [x, weight, *biases], [y], scope, **attrs)

        def backward(dy: Buf) -> Buf:
            tape.emit("gconv_wgrad", [x, dy], [tape.grad(weight), *(tape.grad(b) for b in biases)], scope, **attrs)
            dx = tape.temp(f"{scope}.dx", x.shape)
            tape.emit("gconv_dgrad", [dy, weight], [dx], scope, **attrs)
            return dx

        return y, backward


@dataclass(frozen=True)
class ConvTranspose2d(Layer):
    """2-D transposed convolution, the gradient of a Conv2d by its input, as torch.nn.ConvTranspose2d.

    Shapes: (N, in_channels, H, W) → (N, out_channels, P, Q), float32; P = (H − 1)·stride − 2·padding + R + output_padding, Q likewise.

    `kernel_size`: (R, S), or one int for both; `stride`, `padding` and `output_padding`, which is below `stride`, count for both axes, in pixels;
    `bias` is optional. `in_channels` None is the input's. Parameters: weight (in_channels, out_channels, R, S) and bias (out_channels,). Raises
    UsageError for sizes below 1, a negative padding or an output_padding that is too large, and, when the network is built, ShapeError where
    nothing is left.

    Example, which doubles height and width:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.ConvTranspose2d(4, 2, stride=2)], mode="cpu").build((3, 8, 8)).predict(np.zeros((5, 3, 8, 8), np.uint8)).shape
        (5, 4, 16, 16)
    """

    out_channels: int
    kernel_size: int | tuple[int, int] = 3
    stride: int = 1
    padding: int = 0
    output_padding: int = 0
    bias: bool = True
    in_channels: int | None = unsized()
    kind: ClassVar[str] = "convt"
    size_of_input: ClassVar[str] = "in_channels"

    def __post_init__(self) -> None:
        if isinstance(self.kernel_size, list):
            object.__setattr__(self, "kernel_size", tuple(self.kernel_size))
        counts(self, "out_channels", "kernel_size", "in_channels")
        for name, least in (("stride", 1), ("padding", 0), ("output_padding", 0)):
            if isinstance(getattr(self, name), tuple | list):
                raise UsageError(f"ConvTranspose2d takes one {name} for both axes, got {getattr(self, name)!r}")
            counts(self, name, least=least)
        if self.output_padding >= self.stride:
            raise UsageError(f"ConvTranspose2d needs an output_padding below its stride, got {self.output_padding} and {self.stride}")

    def params(self) -> dict[str, Param]:
        shape = (known(self), self.out_channels, *_pair(self.kernel_size))
        # PyTorch too takes the second and the further axes for the fan-in.
        fan_in = numel(shape[1:])
        made = {"weight": Param(shape, fan_in)}
        return made | {"bias": Param((self.out_channels,), fan_in, bias=True)} if self.bias else made

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        n, c, h, w = images(x, scope)
        if c != self.in_channels:
            raise ShapeError(f"{scope} takes {self.in_channels} channels, got {c} (its input is {x.shape})")
        window = _pair(self.kernel_size)
        p, q = ((size - 1) * self.stride - 2 * self.padding + r + self.output_padding for size, r in zip((h, w), window, strict=True))
        shape = _fitting(scope, x, lambda: ConvShape(n, self.out_channels, p, q, c, *window, self.stride, self.padding))
        params, attrs = self.params(), {"stride": self.stride, "pad": self.padding}
        weight = tape.param(scope, "weight", params["weight"].shape)
        bias = tape.param(scope, "bias", params["bias"].shape) if self.bias else None
        y = tape.temp(f"{scope}.y", shape.x_shape)
        tape.emit("conv_dgrad", [x, weight], [y], scope, **attrs)
        if bias is not None:
            product, y = y, tape.temp(f"{scope}.y", y.shape)
            tape.emit("bias_fprop", [product, bias], [y], scope)

        def backward(dy: Buf) -> Buf:
            if bias is not None:
                tape.emit("bias_wgrad", [dy], [tape.grad(bias)], scope)
            # The convolution that this is the gradient of reads dy and makes x.
            tape.emit("conv_wgrad", [dy, x], [tape.grad(weight)], scope, **attrs)
            dx = tape.temp(f"{scope}.dx", x.shape)
            tape.emit("conv_fprop", [dy, weight], [dx], scope, **attrs)
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
    bias: bool = True
    in_features: int | None = unsized()
    kind: ClassVar[str] = "linear"
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
        y, backward = _conv(self, tape, x.reshaped((*x.shape, 1, 1)), scope, ConvShape(n, known(self), 1, 1, self.out_features, 1, 1))
        return y.reshaped((n, self.out_features)), lambda dy: backward(dy.reshaped(y.shape)).reshaped(x.shape)


def _conv(layer: Conv2d | Linear, tape: Tape, x: Buf, scope: str, shape: ConvShape) -> Built:
    """Record the convolution `shape` of `x` with `layer`'s parameters."""
    params = layer.params()
    weight = tape.param(scope, "weight", params["weight"].shape)
    biases = [tape.param(scope, "bias", params["bias"].shape)] if layer.bias else []
    w = weight.reshaped(shape.w_shape)
    y = tape.temp(f"{scope}.y", shape.y_shape)
    geometry = {"stride": shape.stride, "pad": shape.pad}
    tape.emit("conv_fprop", [x, w, *biases], [y], scope, **geometry)

    def backward(dy: Buf) -> Buf:
        dw = tape.grad(weight).reshaped(shape.w_shape)
        tape.emit("conv_wgrad", [x, dy], [dw, *(tape.grad(b) for b in biases)], scope, **geometry)
        dx = tape.temp(f"{scope}.dx", x.shape)
        tape.emit("conv_dgrad", [dy, w], [dx], scope, **geometry)
        return dx

    return y, backward


def padded_images(tape: Tape, x: Buf, sides: tuple[int, ...], scope: str, value: float = 0.0) -> Built:
    """Record images with `value` around them; `sides` are (top, bottom, left, right), and a negative one crops."""
    (n, c, h, w), (top, bottom, left, right) = images(x, scope), sides
    y, attrs = tape.temp(f"{scope}.padded", (n, c, h + top + bottom, w + left + right)), {"top": top, "left": left}
    tape.emit("pad_fprop", [x], [y], scope, **attrs, value=float(value))

    def backward(dy: Buf) -> Buf:
        dx = tape.temp(f"{scope}.dx", x.shape)
        tape.emit("pad_dgrad", [dy], [dx], scope, **attrs)
        return dx

    return y, backward


class _NoParams(Layer):
    def params(self) -> dict[str, Param]:
        return {}


@dataclass(frozen=True)
class Elementwise(_NoParams):
    """y = f(x) for every element of a tensor of any shape. A layer names its op in `kind`; its fields are f's parameters.

    `reads`: what f′ reads, the input ("x") or the output ("y"), as the op's entry in the table of activations says.
    """

    kind: ClassVar[str]
    reads: ClassVar[str] = "x"

    def attrs(self) -> dict[str, Any]:
        """The op's parameters: the fields, by their names."""
        return asdict(self)

    @property
    def op(self) -> str:
        """The name of the activation in the table."""
        return self.kind

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        attrs = self.attrs()
        y = tape.temp(f"{scope}.y", x.shape, after_relu=self.op == "relu")
        tape.emit(f"{self.op}_fprop", [x], [y], scope, **attrs)

        def backward(dy: Buf) -> Buf:
            if dy.masked:
                # A ReLU whose gradient arrives masked has nothing left to do; as the gradient of x it is not called masked, because the mask is y's.
                return replace(dy, base=dy.root, masked=False)
            dx = tape.temp(f"{scope}.dx", x.shape)
            tape.emit(f"{self.op}_dgrad", [dy, y if self.reads == "y" else x], [dx], scope, **attrs)
            return dx

        return y, backward


@dataclass(frozen=True)
class ReLU(Elementwise):
    """max(x, 0), element by element.

    Shapes: any shape, float32, stays as it is. Raises nothing.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.ReLU()], mode="cpu").build((2,)).predict(np.array([[0, 255]], np.uint8))
        array([[0., 1.]], dtype=float32)
    """

    kind: ClassVar[str] = "relu"
    reads: ClassVar[str] = "y"


@dataclass(frozen=True)
class LeakyReLU(Elementwise):
    """x where x > 0, else negative_slope·x.

    Shapes: any shape, float32, stays as it is. Raises UsageError unless `negative_slope` is positive and finite.

    Example:
        >>> import nbcnn
        >>> nbcnn.LeakyReLU(0.1)
        LeakyReLU(negative_slope=0.1)
    """

    negative_slope: float = 0.01
    kind: ClassVar[str] = "leaky_relu"
    reads: ClassVar[str] = "y"

    def __post_init__(self) -> None:
        if not 0 < self.negative_slope < math.inf:
            raise UsageError(f"LeakyReLU needs a positive, finite negative_slope, got {self.negative_slope}; ReLU is the layer for 0")

    def attrs(self) -> dict[str, Any]:
        return {"slope": self.negative_slope}


@dataclass(frozen=True)
class Sigmoid(Elementwise):
    """1 / (1 + exp(−x)), element by element.

    Shapes: any shape, float32, stays as it is. Raises nothing.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.Sigmoid()], mode="cpu").build((1,)).predict(np.zeros((1, 1), np.uint8))
        array([[0.5]], dtype=float32)
    """

    kind: ClassVar[str] = "sigmoid"
    reads: ClassVar[str] = "y"


@dataclass(frozen=True)
class Swish(Elementwise):
    """x·sigmoid(x) (Ramachandran, Zoph and Le, 2017; also called SiLU).

    Shapes: any shape, float32, stays as it is. Raises nothing.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.Swish()], mode="cpu").build((1,)).predict(np.zeros((1, 1), np.uint8))
        array([[0.]], dtype=float32)
    """

    kind: ClassVar[str] = "swish"


@dataclass(frozen=True)
class _Pool(_NoParams):
    """Windows over images; `padding` and `ceil_mode` as in PyTorch."""

    kernel_size: int | tuple[int, int] = 2
    stride: int | tuple[int, int] | None = None
    padding: int | tuple[int, int] = later(0, kw_only=False)
    ceil_mode: bool = later(False)

    def __post_init__(self) -> None:
        for name in ("kernel_size", "stride", "padding"):
            value = getattr(self, name)
            if isinstance(value, tuple | list):
                # A pair of equals is one number, so that a layer has one description, and its windows the kernels of square ones.
                object.__setattr__(self, name, value[0] if len(value) == 2 and value[0] == value[1] else tuple(value))
        counts(self, "kernel_size", "stride")
        counts(self, "padding", least=0)
        if any(2 * pad > size for pad, size in zip(_pair(self.padding), _pair(self.kernel_size), strict=True)):
            raise UsageError(f"{type(self).__name__} needs a padding of at most half of the kernel_size {self.kernel_size}, got {self.padding}")

    def shape(self, x: Buf, scope: str) -> tuple[int, ...]:
        """The shape of the output. Raises ShapeError if no window fits."""
        n, c, *extent = images(x, scope)
        size, stride, pad = self.geometry()
        return n, c, *_fitting(scope, x, lambda: [pooled_extent(extent[at], size[at], stride[at], pad[at], self.ceil_mode) for at in (0, 1)])

    def geometry(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Size, stride and padding of both axes."""
        return _pair(self.kernel_size), _pair(self.stride or self.kernel_size), _pair(self.padding)

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
        >>> nbcnn.Model([nbcnn.MaxPool2d(3, 2, 1)], mode="cpu").build((1, 6, 7)).net.output_shape
        (1, 3, 4)
    """

    kind: ClassVar[str] = "pool"

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        shape, attrs = self.shape(x, scope), self.square(x, scope)
        op = "window_max" if attrs is None else "maxpool"
        used: dict[str, Any] = dict(zip(("size", "stride", "pad"), self.geometry(), strict=True)) if attrs is None else attrs
        y = tape.temp(f"{scope}.y", shape)
        index = tape.temp(f"{scope}.index", shape, "uint8" if numel(_pair(self.kernel_size)) <= 256 else "int32")
        tape.emit(f"{op}_fprop", [x], [y, index], scope, **used)

        def backward(dy: Buf) -> Buf:
            dx = tape.temp(f"{scope}.dx", x.shape)
            tape.emit(f"{op}_dgrad", [dy, index], [dx], scope, **used)
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
            return _linear_map(tape, x, scope, "avgpool", shape, **attrs)
        size, stride, pad = self.geometry()
        return _linear_map(tape, x, scope, "window_mean", shape, size=size, stride=stride, pad=pad, padded=self.count_include_pad)


def _linear_map(tape: Tape, x: Buf, scope: str, op: str, shape: tuple[int, ...], **attrs: Any) -> Built:
    """y = A x with a constant A: dx = Aᵀ dy needs nothing from the forward pass."""
    y = tape.temp(f"{scope}.y", shape)
    tape.emit(f"{op}_fprop", [x], [y], scope, **attrs)

    def backward(dy: Buf) -> Buf:
        dx = tape.temp(f"{scope}.dx", x.shape)
        tape.emit(f"{op}_dgrad", [dy], [dx], scope, **attrs)
        return dx

    return y, backward


@dataclass(frozen=True)
class Upsample2d(_NoParams):
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
        return _linear_map(tape, x, scope, "upsample", (n, c, h * self.scale_factor, w * self.scale_factor), factor=self.scale_factor)


@dataclass(frozen=True)
class Flatten(_NoParams):
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
        return _linear_map(tape, x, scope, "flatten", (n, numel(tuple(rest))))


@dataclass(frozen=True)
class Softmax(_NoParams):
    """exp(x)/Σ exp(x) along the channels of every pixel, or the features of every vector (J. S. Bridle, 1990).

    Shapes: (N, F), (N, C, L) or (N, C, H, W), float32, stays as it is. The loss "cross_entropy" has a softmax of its own and wants what comes before
    it. Raises ShapeError for another number of axes, when the network is built.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.Softmax()], mode="cpu").build((2,)).predict(np.zeros((1, 2), np.uint8))
        array([[0.5, 0.5]], dtype=float32)
    """

    kind: ClassVar[str] = "softmax"

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        if len(x.shape) not in (2, 3, 4):
            raise ShapeError(f"{scope} takes vectors, series or images, got {x.shape}")
        y = tape.temp(f"{scope}.y", x.shape)
        tape.emit("softmax_fprop", [x], [y], scope)

        def backward(dy: Buf) -> Buf:
            dx = tape.temp(f"{scope}.dx", x.shape)
            tape.emit("softmax_dgrad", [dy, y], [dx], scope)
            return dx

        return y, backward


@dataclass(frozen=True)
class Dropout(_NoParams):
    """In training every element becomes 0 with probability p, else x/(1 − p); in evaluation and prediction x itself (Srivastava et al., 2014).

    Shapes: any shape (N, …), float32, stays as it is. The random numbers belong to the layer, the example and the epoch, so the mask is the same in
    every mode, for every batch size, on any number of ranks and after a resume; it is computed again in the backward pass and never stored. A
    network that is given arrays of the caller's own, as by `gradcheck`, knows no examples and epochs: it leaves the layer out. Raises UsageError
    unless 0 ≤ p < 1.

    Example:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.Dropout(0.5)], mode="cpu").build((2,)).predict(np.array([[0, 255]], np.uint8))
        array([[0., 1.]], dtype=float32)
    """

    p: float = 0.5
    kind: ClassVar[str] = "dropout"

    def __post_init__(self) -> None:
        if not 0 <= self.p < 1:
            raise UsageError(f"Dropout needs a probability p with 0 ≤ p < 1, got {self.p}")

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        if not tape.training or tape.examples is None or not self.p:
            return x, lambda dy: dy
        # The highest bit keeps the stream apart from those of augmentation, which count from 0.
        attrs = {"p": self.p, "stream": zlib.crc32(scope.encode()) | 1 << 31}
        examples = tape.examples
        # Where x is 0 after a ReLU, y is too, and a gradient that is masked for y stays masked.
        y = tape.temp(f"{scope}.y", x.shape, after_relu=x.after_relu)
        tape.emit("dropout_fprop", [x, *examples], [y], scope, **attrs)

        def backward(dy: Buf) -> Buf:
            dx = tape.temp(f"{scope}.dx", x.shape, masked=dy.masked)
            tape.emit("dropout_dgrad", [dy, *examples], [dx], scope, **attrs)
            return dx

        return y, backward


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
        return add_input(tape, self.named_body(scope), x, scope)


def add_input(tape: Tape, body: Sequence[Named], x: Buf, scope: str) -> Built:
    """Record y = body(x) + x."""
    inner, inner_backward = trace(tape, body, x)
    if inner.shape != x.shape:
        raise ShapeError(f"{scope}: the body turns {x.shape} into {inner.shape}, which cannot be added to its input")
    y = tape.temp(f"{scope}.y", x.shape)
    tape.emit("add", [inner, x], [y], scope)
    return y, lambda dy: add_gradient(tape, inner_backward(dy), dy, scope)


def add_gradient(tape: Tape, inner: Buf, dy: Buf, scope: str) -> Buf:
    """Record the gradient of body(x) + x: the body's gradient plus the sum's."""
    dx = tape.temp(f"{scope}.dx", inner.shape)
    tape.emit("add", [inner, dy], [dx], scope)
    return dx


@dataclass(frozen=True)
class PairLoss(_NoParams):
    """A loss that compares outputs and targets of one shape, element by element, by the ops KIND_fprop and KIND_dgrad; its fields are their
    attributes."""

    kind: ClassVar[str]
    needs_labels: ClassVar[bool] = False

    def attrs(self) -> dict[str, Any]:
        """The attributes of both ops."""
        return asdict(self)

    def terms(self, outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """The loss of every element, float64, for `Model.evaluate`."""
        raise NotImplementedError

    def measure(self, outputs: np.ndarray, targets: np.ndarray) -> tuple[float, float]:
        """The sum over examples of their losses, in float64, and how many examples it is of."""
        return float(self.terms(outputs, targets).reshape(len(outputs), -1).mean(1).sum()), len(outputs)

    def build(self, tape: Tape, y: Buf, target: Buf, scope: str) -> tuple[Buf, Buf]:
        if y.shape != target.shape:
            raise ShapeError(f"{scope}: the network makes {y.shape}, the target is {target.shape}")
        value, dy = tape.temp(f"{scope}.loss", (), "float64"), tape.temp(f"{scope}.dy", y.shape)
        tape.emit(f"{self.kind}_fprop", [y, target], [value], scope, **self.attrs())
        tape.emit(f"{self.kind}_dgrad", [y, target], [dy], scope, **self.attrs())
        return value, dy


@dataclass(frozen=True)
class MSE(PairLoss):
    """mean((y − target)²) over all elements of the batch; without targets of its own, the target is the network's input (an autoencoder).

    `loss="mse"` means it. Shapes: y and target of any shape, the same for both, float32 → a float64 scalar. Raises ShapeError if they differ, when
    the network is built.

    Example:
        >>> import nbcnn
        >>> nbcnn.Model([nbcnn.Conv2d(3, 3, padding=1), nbcnn.MSE()], mode="cpu").build((3, 8, 8)).loss
        MSE()
    """

    kind: ClassVar[str] = "mse"

    def terms(self, outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return (outputs - targets) ** 2


@dataclass(frozen=True)
class SoftmaxCrossEntropy(_NoParams):
    """−log softmax(y)[label], mean over the batch, or over all pixels of the batch, in nats. `loss="cross_entropy"` means it.

    Shapes: y (N, F), float32, and labels (N,), int32 in 0..F−1 → a float64 scalar; of pixels y (N, F, H, W) and labels (N, H, W). The arguments are
    those of torch.nn.CrossEntropyLoss:

    weight           F numbers, at least 0: the mean counts an example of class c weight[c] times. None counts all once.
    ignore_index     a label, of any class or of none, whose examples or pixels count nothing and get no gradient; None ignores none. Where nothing of
                     a batch counts, its loss is 0 (PyTorch has NaN), and so is its gradient.
    label_smoothing  at least 0 and less than 1: that part of every label is spread over all classes alike (arXiv:1512.00567, section 7).

    With `weight` or `ignore_index` the mean is over what counts, of a batch of all ranks and of a whole epoch. Raises UsageError for numbers out of
    range, and, when the network is built, ShapeError for logits of another number of axes or weights of another number of classes.

    Example, of which the third label counts nothing:
        >>> import numpy as np, nbcnn
        >>> model = nbcnn.Model([nbcnn.Linear(2)], nbcnn.SoftmaxCrossEntropy(ignore_index=-1, label_smoothing=0.1), mode="cpu")
        >>> history = model.fit(np.zeros((3, 4), np.uint8), [0, 1, -1], verbose=0)
        >>> model.loss.label_smoothing
        0.1
    """

    weight: tuple[float, ...] | None = later(None)
    ignore_index: int | None = later(None)
    label_smoothing: float = later(0.0)
    kind: ClassVar[str] = "xent"
    needs_labels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.weight is not None:
            object.__setattr__(self, "weight", tuple(float(each) for each in self.weight))
            if not self.weight or not all(0 <= each < math.inf for each in self.weight) or not any(self.weight):
                raise UsageError(f"SoftmaxCrossEntropy needs finite weights of at least 0, not all of them 0, got {self.weight}")
        if self.ignore_index is not None and (isinstance(self.ignore_index, bool) or not -(2**31) < int(self.ignore_index) < 2**31):
            raise UsageError(f"SoftmaxCrossEntropy needs a 32-bit whole number as ignore_index, got {self.ignore_index!r}")
        if not 0 <= self.label_smoothing < 1:
            raise UsageError(f"SoftmaxCrossEntropy needs a label_smoothing of at least 0 and less than 1, got {self.label_smoothing!r}")

    def counted(self, labels: np.ndarray) -> np.ndarray:
        """Which of `labels` are not ignored, bool of their shape."""
        return np.ones(labels.shape, bool) if self.ignore_index is None else labels != self.ignore_index

    def measure(self, outputs: np.ndarray, targets: np.ndarray) -> tuple[float, float]:
        """The sum of what examples, or pixels, lose, in float64, and what they count together."""
        classes, labels, counted = outputs.shape[1], targets.astype(np.int64), self.counted(targets)
        weights = np.ones(classes) if self.weight is None else np.array(self.weight)
        highest = outputs.max(1, keepdims=True)
        z = highest + np.log(np.exp(outputs - highest).sum(1, keepdims=True)) - outputs
        own = np.where(counted, labels, 0)
        lost = (1 - self.label_smoothing) * weights[own] * np.take_along_axis(z, own[:, None], 1)[:, 0]
        if self.label_smoothing:
            lost = lost + self.label_smoothing / classes * np.tensordot(weights, z, (0, 1))
        return float(lost[counted].sum()), float(weights[own][counted].sum())

    def build(self, tape: Tape, y: Buf, target: Buf, scope: str) -> tuple[Buf, Buf]:
        if len(y.shape) not in (2, 4) or target.shape != (y.shape[0], *y.shape[2:]):
            raise ShapeError(
                f"{scope} takes logits (N, F) and labels (N,), or of pixels (N, F, H, W) and (N, H, W), got {y.shape} and {target.shape}"
            )
        p = tape.temp(f"{scope}.p", y.shape)
        value = tape.temp(f"{scope}.loss", (), "float64")
        dy = tape.temp(f"{scope}.dy", y.shape)
        if self.weight is None and self.ignore_index is None and not self.label_smoothing:
            tape.emit("softmax_xent_fprop", [y, target], [p, value], scope)
            tape.emit("softmax_xent_dgrad", [p, target], [dy], scope)
            return value, dy
        self._build_weighted(tape, y, target, p, value, dy, scope)
        return value, dy

    def _build_weighted(self, tape: Tape, y: Buf, target: Buf, p: Buf, value: Buf, dy: Buf, scope: str) -> None:
        """Record the loss whose mean is over what its labels count (`nbcnn.ops.losses.weighted_xent`)."""
        each = self.weight or (1.0,) * y.shape[1]
        if len(each) != y.shape[1]:
            raise ShapeError(f"{scope} has weights of {len(each)} classes, the network makes {y.shape[1]} (its input is {y.shape})")
        weights = tape.const(f"{scope}.weight", (*each, math.fsum(each)))
        total, count = tape.temp(f"{scope}.total", (1,)), tape.temp(f"{scope}.count", (), "float64")
        ignore = {"ignore": -(2**31) if self.ignore_index is None else int(self.ignore_index)}
        attrs = {"smoothing": self.label_smoothing, "share": tape.part, **ignore}
        tape.emit("xent_total", [target, weights], [total], scope, **ignore)
        if tape.together:
            # A rank that has no image of a last batch computes one for nothing.
            tape.emit("all_reduce", [total], [total], scope, weight=float(tape.part > 0))
        tape.emit("weighted_xent_fprop", [y, target, weights, total], [p, value, count], scope, **attrs)
        tape.emit("weighted_xent_dgrad", [p, target, weights, total], [dy], scope, **attrs)
        tape.count = count


def parameters(layers: Sequence[Any]) -> dict[str, Param]:
    """All parameters of a list of layers under their full names (conv1.weight, residual1.conv1.bias, …)."""
    made: dict[str, Param] = {}
    for name, layer in named(layers):
        made.update({f"{name}.{inner}": param for inner, param in layer.params().items()})
    return made


def states(layers: Sequence[Any]) -> dict[str, Param]:
    """All states of a list of layers, which training updates in place (running statistics), under full names like parameters."""
    made: dict[str, Param] = {}
    for name, layer in named(layers):
        own = layer.state() if hasattr(layer, "state") else {}
        made.update({f"{name}.{inner}": state for inner, state in own.items()})
    return made


def known(layer: Any) -> int:
    """The size of the layer's input. Raises UsageError if it was left out and nothing has filled it in."""
    size = getattr(layer, layer.size_of_input)
    if size is None:
        raise UsageError(f"{type(layer).__name__} does not know its {layer.size_of_input} yet: build the network for a shape first, or give it")
    return int(size)


def sized(layers: Sequence[Any], shape: tuple[int, ...]) -> Any:
    """A list of `layers`, or a graph, with the sizes of inputs filled in, for examples of `shape`: (C, H, W), (F,) or (F, L). A loss stays as it is.

    Raises UsageError for no layers, or a loss that is not the last of them; ShapeError if a layer does not take what it gets.
    """
    if isinstance(layers, Graph):
        return layers.sized(shape)
    if not [layer for layer in layers if not hasattr(layer, "needs_labels")]:
        raise UsageError("a network needs at least one layer besides its loss")
    early = [at for at, layer in enumerate(layers[:-1]) if hasattr(layer, "needs_labels")]
    if early:
        raise UsageError(f"the loss {type(layers[early[0]]).__name__} is layer {early[0] + 1} of {len(layers)}: a loss must be the last")
    made, x, tape = [], Buf("x", (1, *shape)), Tape(training=False)
    for name, layer in named(layers):
        if hasattr(layer, "needs_labels"):
            made.append(layer)
            continue
        made.append(filled(layer, x, name))
        x, _ = made[-1].build(tape, x, name)
    return made
