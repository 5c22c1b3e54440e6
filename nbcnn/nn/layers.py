"""This module defines the layers of images and vectors, and the losses; normalisations stand in `norms.py`, layers of series in `series_layers.py`.

A layer is a frozen dataclass. `build(tape, x, scope)` records its forward and returns (y, backward); `backward(dy)`
records its backward and returns dx. `params()` names its parameters, `state()`, where a layer has it, what training updates
in place (norms.py). A loss is the last layer of a list: its
`build(tape, y, target, scope)` returns (value, dy). Shapes are logical: images (N, C, H, W), vectors (N, F), series (N, C, L).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np

from nbcnn.plan.graph import Backward, Buf, Named, ShapeError, Tape, named, trace
from nbcnn.plan.shapes import ConvShape, numel, window_extent

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


@dataclass(frozen=True)
class Conv2d:
    """2-D convolution (cross-correlation), zero padding: in_channels × R×S → out_channels.

    `kernel`: R×S or one int for both; `stride` and `pad` count for both axes; `bias` is optional.
    """

    in_channels: int
    out_channels: int
    kernel: int | tuple[int, int] = 3
    stride: int = 1
    pad: int = 0
    bias: bool = True
    kind: ClassVar[str] = "conv"

    def params(self) -> dict[str, Param]:
        shape = (self.out_channels, self.in_channels, *_pair(self.kernel))
        fan_in = numel(shape[1:])
        made = {"weight": Param(shape, fan_in)}
        return made | {"bias": Param((self.out_channels,), fan_in, bias=True)} if self.bias else made

    def shape(self, x: Buf, scope: str, doubled: bool = False) -> ConvShape:
        """The convolution of `x`, or of the doubled `x`. Raises ShapeError if `x` does not fit."""
        n, c, h, w = images(x, scope)
        if c != self.in_channels:
            raise ShapeError(f"{scope} takes {self.in_channels} channels, got {c} (its input is {x.shape})")
        r, s = _pair(self.kernel)
        h, w = (2 * h, 2 * w) if doubled else (h, w)
        return _fitting(scope, x, lambda: ConvShape(n, c, h, w, self.out_channels, r, s, self.stride, self.pad))

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        return _conv(self, tape, x, scope, self.shape(x, scope))


@dataclass(frozen=True)
class Linear:
    """y = x wᵀ + b: (N, in_features) → (N, out_features); a 1×1 convolution of 1×1 images."""

    in_features: int
    out_features: int
    bias: bool = True
    kind: ClassVar[str] = "linear"

    def params(self) -> dict[str, Param]:
        made = {"weight": Param((self.out_features, self.in_features), self.in_features)}
        return made | {"bias": Param((self.out_features,), self.in_features, bias=True)} if self.bias else made

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        if x.shape[1:] != (self.in_features,):
            raise ShapeError(f"{scope} takes (N, {self.in_features}), got {x.shape}; Flatten makes vectors of images")
        n = x.shape[0]
        y, backward = _conv(self, tape, x.reshaped((*x.shape, 1, 1)), scope, ConvShape(n, self.in_features, 1, 1, self.out_features, 1, 1))
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


class _NoParams:
    def params(self) -> dict[str, Param]:
        return {}


@dataclass(frozen=True)
class Elementwise(_NoParams):
    """y = f(x) for every element of a tensor of any shape. A layer names its op in `kind`; its fields are f's parameters.

    `reads`: what f′ reads, the input ("x") or the output ("y"), as the op's entry in the table of activations says.
    """

    kind: ClassVar[str]
    reads: ClassVar[str] = "x"

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        attrs = asdict(self)
        y = tape.temp(f"{scope}.y", x.shape, after_relu=self.kind == "relu")
        tape.emit(f"{self.kind}_fprop", [x], [y], scope, **attrs)

        def backward(dy: Buf) -> Buf:
            if dy.masked:
                # A ReLU whose gradient arrives masked has nothing left to do; as the gradient of x it is not called masked, because the mask is y's.
                return replace(dy, base=dy.root, masked=False)
            dx = tape.temp(f"{scope}.dx", x.shape)
            tape.emit(f"{self.kind}_dgrad", [dy, y if self.reads == "y" else x], [dx], scope, **attrs)
            return dx

        return y, backward


@dataclass(frozen=True)
class ReLU(Elementwise):
    """max(x, 0)."""

    kind: ClassVar[str] = "relu"
    reads: ClassVar[str] = "y"


@dataclass(frozen=True)
class LeakyReLU(Elementwise):
    """x where x > 0, else slope·x; slope > 0."""

    slope: float = 0.01
    kind: ClassVar[str] = "leaky_relu"
    reads: ClassVar[str] = "y"

    def __post_init__(self) -> None:
        if self.slope <= 0:
            raise ValueError(f"LeakyReLU needs a positive slope, got {self.slope}; ReLU is the layer for 0")


@dataclass(frozen=True)
class Sigmoid(Elementwise):
    """1 / (1 + exp(−x))."""

    kind: ClassVar[str] = "sigmoid"
    reads: ClassVar[str] = "y"


@dataclass(frozen=True)
class Swish(Elementwise):
    """x·sigmoid(x) (Ramachandran, Zoph and Le, 2017; also called SiLU)."""

    kind: ClassVar[str] = "swish"


@dataclass(frozen=True)
class MaxPool2d(_NoParams):
    """Maximum over size×size windows; ties go to the first in (h, w) order. `stride` defaults to `size`; no padding."""

    size: int = 2
    stride: int | None = None
    kind: ClassVar[str] = "pool"

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        shape, attrs = _window(self, x, scope)
        y = tape.temp(f"{scope}.y", shape)
        index = tape.temp(f"{scope}.index", shape, "uint8" if self.size**2 <= 256 else "int32")
        tape.emit("maxpool_fprop", [x], [y, index], scope, **attrs)

        def backward(dy: Buf) -> Buf:
            dx = tape.temp(f"{scope}.dx", x.shape)
            tape.emit("maxpool_dgrad", [dy, index], [dx], scope, **attrs)
            return dx

        return y, backward


@dataclass(frozen=True)
class AvgPool2d(_NoParams):
    """Mean over size×size windows. `stride` defaults to `size`; no padding."""

    size: int = 2
    stride: int | None = None
    kind: ClassVar[str] = "avgpool"

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        shape, attrs = _window(self, x, scope)
        return _linear_map(tape, x, scope, "avgpool", shape, **attrs)


def _window(layer: MaxPool2d | AvgPool2d, x: Buf, scope: str) -> tuple[tuple[int, ...], dict[str, int]]:
    n, c, h, w = images(x, scope)
    stride = layer.stride or layer.size
    extent = _fitting(scope, x, lambda: [window_extent(edge, layer.size, stride) for edge in (h, w)])
    return (n, c, *extent), {"size": layer.size, "stride": stride}


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
    """Nearest neighbour: every pixel becomes factor×factor pixels."""

    factor: int = 2
    kind: ClassVar[str] = "up"

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        n, c, h, w = images(x, scope)
        return _linear_map(tape, x, scope, "upsample", (n, c, h * self.factor, w * self.factor), factor=self.factor)


@dataclass(frozen=True)
class Flatten(_NoParams):
    """(N, C, H, W) → (N, C·H·W), in C, H, W order whatever layout the mode stores."""

    kind: ClassVar[str] = "flatten"

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        n, *rest = images(x, scope)
        return _linear_map(tape, x, scope, "flatten", (n, numel(tuple(rest))))


@dataclass(frozen=True)
class Residual:
    """y = body(x) + x; the body must keep the shape."""

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
class MSE(_NoParams):
    """mean((y − target)²) over all elements of the batch; the target is the network's own input (an autoencoder)."""

    kind: ClassVar[str] = "mse"
    needs_labels: ClassVar[bool] = False

    def build(self, tape: Tape, y: Buf, target: Buf, scope: str) -> tuple[Buf, Buf]:
        if y.shape != target.shape:
            raise ShapeError(f"{scope}: the network makes {y.shape}, the target is {target.shape}")
        value, dy = tape.temp(f"{scope}.loss", (), "float64"), tape.temp(f"{scope}.dy", y.shape)
        tape.emit("mse_fprop", [y, target], [value], scope)
        tape.emit("mse_dgrad", [y, target], [dy], scope)
        return value, dy


@dataclass(frozen=True)
class SoftmaxCrossEntropy(_NoParams):
    """−log softmax(y)[label], mean over the batch; y is (N, F), labels are int32 in 0..F−1."""

    kind: ClassVar[str] = "xent"
    needs_labels: ClassVar[bool] = True

    def build(self, tape: Tape, y: Buf, target: Buf, scope: str) -> tuple[Buf, Buf]:
        if len(y.shape) != 2 or target.shape != y.shape[:1]:
            raise ShapeError(f"{scope} takes logits (N, F) and labels (N,), got {y.shape} and {target.shape}")
        p = tape.temp(f"{scope}.p", y.shape)
        value = tape.temp(f"{scope}.loss", (), "float64")
        tape.emit("softmax_xent_fprop", [y, target], [p, value], scope)
        dy = tape.temp(f"{scope}.dy", y.shape)
        tape.emit("softmax_xent_dgrad", [p, target], [dy], scope)
        return value, dy


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
