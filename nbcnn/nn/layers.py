"""This module says what a layer is, and defines the layers of images and vectors: convolutions, Linear, Flatten, Residual.

A layer is a frozen dataclass whose arguments have PyTorch's names. What its input's size is may be left out (`in_channels`, `in_features`,
`channels`: None), and `sized` fills it in from the shape of one example. `build(tape, x, scope)` records its forward and returns
(y, backward); `backward(dy)` records its backward and returns dx. `params()` names its parameters, `state()`, where a layer has it,
what training updates in place (norms.py). Shapes are logical: images (N, C, H, W), vectors (N, F), series (N, C, L); values are float32 as
the caller sees them, whatever a mode stores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from nbcnn.files.errors import UsageError
from nbcnn.nn.graphs import Graph, Layer, filled
from nbcnn.plan.graph import Backward, Buf, Named, ShapeError, Tape, named, trace
from nbcnn.plan.shapes import ConvShape, numel, window_extent

Built = tuple[Buf, Backward]
MOST_TAPS = 15
"""Taps along an axis that every engine of convolution takes (`ops/conv/mma/wgrad_load.py`)."""


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


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def images(x: Buf, scope: str) -> tuple[int, int, int, int]:
    """x's shape; raises ShapeError if x is no batch of images."""
    if len(x.shape) != 4:
        raise ShapeError(f"{scope} takes images (N, C, H, W), got {x.shape}")
    n, c, h, w = x.shape
    return n, c, h, w


def fitting(scope: str, x: Buf, make: Any) -> Any:
    """The result of `make()`; its error names the layer and its input if the shape does not fit."""
    try:
        return make()
    except ValueError as error:
        raise ShapeError(f"{scope}: {error} (its input is {x.shape})") from None


def _even(value: Any) -> Any:
    """A pair, or four, of one number as that number; lists, as files have them, as tuples."""
    made = tuple(value) if isinstance(value, list | tuple) else value
    return made[0] if isinstance(made, tuple) and len(made) in (2, 4) and len(set(made)) == 1 else made


def _check_padding(layer: Any) -> None:
    """Raise UsageError unless the padding of `layer` is a whole number of at least 0, or two, or four of them."""
    sides = layer.padding if isinstance(layer.padding, tuple) else (layer.padding,)
    if len(sides) == 1:
        counts(layer, "padding", least=0)
    elif len(sides) not in (2, 4) or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in sides):
        kind = type(layer).__name__
        raise UsageError(f"{kind} takes one padding of at least 0, a pair, or (top, bottom, left, right), got {layer.padding!r}")


def sides_of(padding: int | tuple[int, ...]) -> tuple[int, int, int, int]:
    """A padding as (top, bottom, left, right)."""
    sides = padding if isinstance(padding, tuple) else (padding,) * 2
    top, bottom, left, right = sides if len(sides) == 4 else (sides[0], sides[0], sides[1], sides[1])
    return top, bottom, left, right


@dataclass(frozen=True)
class Conv2d(Layer):
    """2-D convolution (cross-correlation) with zero padding, as torch.nn.Conv2d.

    Shapes: (N, in_channels, H, W) → (N, out_channels, P, Q), float32; P = ⌊(H + padding above and below − dilation·(R − 1) − 1)/stride⌋ + 1, Q alike.

    `kernel_size`: (R, S), or one int for both; `stride` and `dilation` are ints or pairs (rows, columns), in pixels; `padding` is an int, a pair, or
    (top, bottom, left, right); `bias` is optional. `groups` divides both numbers of channels: each group of filters reads its own channels, one each
    where `groups` is in_channels (depthwise). `in_channels` None is the input's. Parameters: weight (out_channels, in_channels/groups, R, S) and bias
    (out_channels,). The engines of a mode compute what has one stride, where borders are uneven of a padded copy, depthwise kernels what has one
    channel a group, and a general kernel, which is many times slower, the rest.
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
        _check_padding(self)
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

    def build(self, tape: Tape, x: Buf, scope: str, emit: Callable[..., None] | None = None) -> Built:
        """`emit` records the forward pass of what is not general, and may make another op of it."""
        if not self.general:
            return _conv(self, tape, x, scope, self.shape(x, scope), emit)
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
    or groups that divide not, and, when the network is built, ShapeError where nothing is left.

    Example, which doubles height and width:
        >>> import numpy as np, nbcnn
        >>> nbcnn.Model([nbcnn.ConvTranspose2d(4, 2, stride=2)], mode="cpu").build((3, 8, 8)).predict(np.zeros((5, 3, 8, 8), np.uint8)).shape
        (5, 4, 16, 16)
    """

    out_channels: int
    kernel_size: int | tuple[int, int] = 3
    stride: int | tuple[int, int] = 1
    padding: int | tuple[int, ...] = 0
    output_padding: int | tuple[int, int] = 0
    bias: bool = True
    dilation: int | tuple[int, int] = later(1)
    groups: int = later(1)
    in_channels: int | None = unsized()
    kind: ClassVar[str] = "convt"
    size_of_input: ClassVar[str] = "in_channels"

    def __post_init__(self) -> None:
        if isinstance(self.kernel_size, list):
            object.__setattr__(self, "kernel_size", tuple(self.kernel_size))
        for name in ("stride", "padding", "output_padding", "dilation"):
            object.__setattr__(self, name, _even(getattr(self, name)))
        counts(self, "out_channels", "kernel_size", "stride", "dilation", "groups", "in_channels")
        counts(self, "output_padding", least=0)
        _check_padding(self)
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
        prefix, attrs = "conv", dict[str, Any]()
        if self.general:
            top, _, left, _ = self.borders
            prefix = "gconv"
            attrs = {"groups": self.groups, "stride": pair(self.stride), "dilation": pair(self.dilation), "pad": (top, left)}
        else:
            window, step, pad = pair(self.kernel_size), pair(self.stride)[0], self.borders[0]
            made = fitting(scope, x, lambda: ConvShape(n, self.out_channels, p, q, c, *window, step, pad)).x_shape
            attrs = {"stride": step, "pad": pad}
        params = self.params()
        weight = tape.param(scope, "weight", params["weight"].shape)
        bias = tape.param(scope, "bias", params["bias"].shape) if self.bias else None
        y = tape.temp(f"{scope}.y", made)
        tape.emit(f"{prefix}_dgrad", [x, weight], [y], scope, **attrs)
        if bias is not None:
            product, y = y, tape.temp(f"{scope}.y", y.shape)
            tape.emit("bias_fprop", [product, bias], [y], scope)

        def backward(dy: Buf) -> Buf:
            if bias is not None:
                tape.emit("bias_wgrad", [dy], [tape.grad(bias)], scope)
            # The convolution that this is the gradient of reads dy and makes x.
            tape.emit(f"{prefix}_wgrad", [dy, x], [tape.grad(weight)], scope, **attrs)
            dx = tape.temp(f"{scope}.dx", x.shape)
            tape.emit(f"{prefix}_fprop", [dy, weight], [dx], scope, **attrs)
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


def _conv(layer: Any, tape: Tape, x: Buf, scope: str, shape: ConvShape, emit: Callable[..., None] | None = None) -> Built:
    """Record the convolution `shape` of `x` with `layer`'s parameters; the forward pass by `emit`, if there is one."""
    params = layer.params()
    weight = tape.param(scope, "weight", params["weight"].shape)
    biases = [tape.param(scope, "bias", params["bias"].shape)] if layer.bias else []
    w = weight.reshaped(shape.w_shape)
    y = tape.temp(f"{scope}.y", shape.y_shape)
    geometry = {"stride": shape.stride, "pad": shape.pad}
    (emit or tape.emit)("conv_fprop", [x, w, *biases], [y], scope, **geometry)

    def backward(dy: Buf) -> Buf:
        dw = tape.grad(weight).reshaped(shape.w_shape)
        tape.emit("conv_wgrad", [x, dy], [dw, *(tape.grad(b) for b in biases)], scope, **geometry)
        dx = tape.temp(f"{scope}.dx", x.shape)
        tape.emit("conv_dgrad", [dy, w], [dx], scope, **geometry)
        return dx

    return y, backward


def convolved(
    layer: Any,
    tape: Tape,
    x: Buf,
    scope: str,
    window: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    borders: tuple[int, int, int, int],
) -> Built:
    """Record the convolution of images `x` with the parameters of `layer`, which has `out_channels`, `groups` and `bias`.

    An engine of the mode computes it where it has one group, one stride, no dilation and at most `MOST_TAPS` taps along an axis; else the ops that
    take everything (`ops/conv/grouped.py`).
    """
    n, c, h, w = images(x, scope)
    by_engine = layer.groups == 1 and dilation == (1, 1) and stride[0] == stride[1] and max(window) <= MOST_TAPS
    if any(borders) and (by_engine or (layer.groups < c and len(set(borders)) > 1)):
        # A padded copy costs two passes over the image; an engine without it many times the products, or a kernel that is many times slower.
        whole, back = padded_images(tape, x, borders, scope)
        y, inner = convolved(layer, tape, whole, scope, window, stride, dilation, (0, 0, 0, 0))
        return y, lambda dy: back(inner(dy))
    if by_engine:
        return _conv(layer, tape, x, scope, fitting(scope, x, lambda: ConvShape(n, c, h, w, layer.out_channels, *window, stride[0], 0)))
    top, bottom, left, right = borders
    extent = (h + top + bottom, w + left + right)
    out = [fitting(scope, x, lambda at=at: window_extent(extent[at], dilation[at] * (window[at] - 1) + 1, stride[at])) for at in (0, 1)]
    params = layer.params()
    weight = tape.param(scope, "weight", params["weight"].shape)
    filters = (*params["weight"].shape[:2], *window)
    biases = [tape.param(scope, "bias", params["bias"].shape)] if layer.bias else []
    y = tape.temp(f"{scope}.y", (n, layer.out_channels, *out))
    attrs = {"groups": layer.groups, "stride": stride, "dilation": dilation, "pad": (top, left)}
    tape.emit("gconv_fprop", [x, weight.reshaped(filters), *biases], [y], scope, **attrs)

    def backward(dy: Buf) -> Buf:
        gradients = [tape.grad(weight).reshaped(filters), *(tape.grad(b) for b in biases)]
        tape.emit("gconv_wgrad", [x, dy], gradients, scope, **attrs)
        dx = tape.temp(f"{scope}.dx", x.shape)
        tape.emit("gconv_dgrad", [dy, weight.reshaped(filters)], [dx], scope, **attrs)
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


class NoParams(Layer):
    def params(self) -> dict[str, Param]:
        return {}


def linear_map(tape: Tape, x: Buf, scope: str, op: str, shape: tuple[int, ...], **attrs: Any) -> Built:
    """y = A x with a constant A: dx = Aᵀ dy needs nothing from the forward pass."""
    y = tape.temp(f"{scope}.y", shape)
    tape.emit(f"{op}_fprop", [x], [y], scope, **attrs)

    def backward(dy: Buf) -> Buf:
        dx = tape.temp(f"{scope}.dx", x.shape)
        tape.emit(f"{op}_dgrad", [dy], [dx], scope, **attrs)
        return dx

    return y, backward


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
