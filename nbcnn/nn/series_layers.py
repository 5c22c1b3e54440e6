"""This module defines the layers of series (N, C, L); `layer.py` says what a layer is.

`nbcnn train --model s4convd` trains networks of series; `nbcnn.Model` takes images and vectors. So the examples here use `nbcnn.run.net.Net`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np

from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.nn.convolve import convolved
from nbcnn.nn.graphs import Layer, reshape
from nbcnn.nn.layer import Built, NoParams, Param, counts, known, linear_map, unsized
from nbcnn.plan.graph import Buf, ShapeError, Tape
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

KERNEL_INITS = ("s4d-lin", "repo")
_LOG_STEPS = math.log(1e-3), math.log(1e-1)


def _series(x: Buf, scope: str, channels: int | None = None) -> tuple[int, int, int]:
    if len(x.shape) != 3 or channels not in (None, x.shape[1]):
        raise ShapeError(f"{scope} takes series (N, {channels or 'C'}, L), got {x.shape}")
    n, c, length = x.shape
    return n, c, length


@dataclass(frozen=True)
class Conv1d(Layer):
    """1-D convolution (cross-correlation) of series with zero padding, as torch.nn.Conv1d.

    Shapes: (N, in_channels, L) → (N, out_channels, M), float32; M = ⌊(L + 2·padding − dilation·(kernel_size − 1) − 1)/stride⌋ + 1.

    `stride`, `padding` and `dilation` are in time steps; `padding` is one number for both ends, or (before, after); `bias` is optional. `groups`
    divides both numbers of channels: each group of filters reads its own channels, one each where `groups` is in_channels (depthwise).
    `in_channels` None is the input's. Parameters: weight (out_channels, in_channels/groups, kernel_size) and bias (out_channels,). It is computed
    as a 2-D convolution of images one pixel wide, into which modes that store images channels last transpose the series. `PointwiseConv1d` and
    `DepthwiseConv1d` have kernels of their own for what they do.
    Raises UsageError for sizes below 1, a negative padding, or groups that do not divide, and, when the network is built, ShapeError where the window
    does not fit, or for what is no series.

    Example:
        >>> import nbcnn
        >>> from nbcnn.run.net import Net
        >>> Net([nbcnn.Conv1d(8, 5, stride=2, padding=2)], (4, 48), mode="cpu").output_shape
        (8, 24)
    """

    out_channels: int
    kernel_size: int = 3
    _: KW_ONLY
    stride: int = 1
    padding: int | tuple[int, int] = 0
    bias: bool = True
    dilation: int = 1
    groups: int = 1
    in_channels: int | None = unsized()
    kind: ClassVar[str] = "conv1d"
    orders: ClassVar[tuple[str, ...]] = (
        "in_channels out_channels kernel_size stride padding dilation groups bias",
        "out_channels kernel_size stride padding bias dilation groups",
    )
    size_of_input: ClassVar[str] = "in_channels"

    def __post_init__(self) -> None:
        if isinstance(self.padding, list | tuple):
            sides = tuple(self.padding)
            object.__setattr__(self, "padding", sides[0] if len(set(sides)) == 1 else sides)
        for name in ("kernel_size", "stride", "dilation"):
            if isinstance(getattr(self, name), tuple | list):
                raise UsageError(f"Conv1d takes one {name}, got {quoted(getattr(self, name))}")
        counts(self, "out_channels", "kernel_size", "stride", "dilation", "groups", "in_channels")
        counts(self, "padding", least=0)
        if self.out_channels % self.groups or (self.in_channels or 0) % self.groups:
            raise UsageError(f"Conv1d needs groups that divide its channels, got {self.in_channels} → {self.out_channels} in {self.groups} groups")

    def params(self) -> dict[str, Param]:
        shape = (self.out_channels, known(self) // self.groups, self.kernel_size)
        fan_in = numel(shape[1:])
        made = {"weight": Param(shape, fan_in)}
        return made | {"bias": Param((self.out_channels,), fan_in, bias=True)} if self.bias else made

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        n, c, length = _series(x, scope, self.in_channels)
        before, after = self.padding if isinstance(self.padding, tuple) else (self.padding, self.padding)
        image = reshape(tape, x, (n, c, length, 1), f"{scope}.image", scope)
        # With one column any stride along it makes one; an engine of convolution wants the same one for both axes.
        strides, dilations, borders = (self.stride, self.stride), (self.dilation, 1), (before, after, 0, 0)
        z, back = convolved(self, tape, image, scope, (self.kernel_size, 1), strides, dilations, borders)
        y = reshape(tape, z, z.shape[:3], f"{scope}.series", scope)

        def backward(dy: Buf) -> Buf:
            dx = back(reshape(tape, dy, z.shape, f"{scope}.dz", scope))
            return reshape(tape, dx, x.shape, f"{scope}.dx", scope)

        return y, backward


@dataclass(frozen=True)
class DepthwiseConv1d(Layer):
    """A filter of `kernel_size` taps for each channel of a series, zeros outside; `skip` adds d[c]·x. `channels` None is the input's.

    Shapes: (N, C, L) → (N, C, L), float32; L in time steps.

    The parameter `weight` is w (channels, taps), taps = kernel_size, `skip` is d (channels). The two paddings number the taps in opposite directions:

        "causal"  y[t] = Σ_j w[j]·x[t − j]              sees x[t−taps+1 .. t]; w[0] belongs to the newest value, a convolution
        "same"    y[t] = Σ_j w[j]·x[t + j − ⌊taps/2⌋]   sees both sides; w[0] belongs to the oldest value, a cross-correlation

    So a "causal" filter w is, as a "same" filter, w backwards followed by taps − 1 zeros: 2·taps − 1 taps.
    torch.nn.Conv1d(channels, channels, taps, padding=p, groups=channels, bias=False) is a cross-correlation too; its output, cut to the L
    values that the input has, is that of this layer (NumPy arrays):

        "causal"  p = taps - 1    weight = w[:, None, ::-1].copy()    w = weight[:, 0, ::-1].copy()
        "same"    p = taps // 2   weight = w[:, None].copy()          w = weight[:, 0].copy()

    PyTorch's layer has no skip: add d to the tap of the value itself, w[:, 0] or w[:, taps // 2].

    Raises UsageError for sizes below 1 or another `padding`, and ShapeError for what is no series, when the network is built.

    Example:
        >>> import nbcnn
        >>> from nbcnn.run.net import Net
        >>> Net([nbcnn.DepthwiseConv1d(24)], (4, 48), mode="cpu").output_shape
        (4, 48)
    """

    kernel_size: int
    _: KW_ONLY
    padding: str = "causal"
    skip: bool = False
    channels: int | None = unsized()
    kind: ClassVar[str] = "dwconv"
    size_of_input: ClassVar[str] = "channels"

    def __post_init__(self) -> None:
        counts(self, "kernel_size", "channels")
        if self.padding not in ("causal", "same"):
            raise UsageError(f"padding is causal or same, got {quoted(self.padding)}")

    def params(self) -> dict[str, Param]:
        made = {"weight": Param((known(self), self.kernel_size), self.kernel_size)}
        return made | {"skip": Param((known(self),), self.kernel_size, decay=False)} if self.skip else made

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        if len(x.shape) != 3 or x.shape[1] != self.channels:
            raise ShapeError(f"{scope} takes series (N, {self.channels}, L), got {x.shape}")
        params = [tape.param(scope, name, param.shape) for name, param in self.params().items()]
        y, backward = depthwise(tape, x, params, scope, self.padding)
        return y, lambda dy: backward(dy, [tape.grad(param) for param in params])


def depthwise(tape: Tape, x: Buf, filters: Sequence[Buf], scope: str, padding: str) -> tuple[Buf, Callable[[Buf, Sequence[Buf]], Buf]]:
    """Record y of series x by `filters`, w (C, T) and perhaps d (C): parameters, or what another step has made.

    Returns y and the backward: (dy, where the filters' gradients go) → dx. A filter that a step makes has to be a view of a
    Buf of one axis, since rows of lower precision round what has two.
    """
    y = tape.temp(f"{scope}.y", x.shape)
    tape.emit(Op("dwconv1d", "fprop"), [x, *filters], [y], scope, padding=padding)

    def backward(dy: Buf, gradients: Sequence[Buf]) -> Buf:
        dx = tape.temp(f"{scope}.dx", x.shape)
        tape.emit(Op("dwconv1d", "wgrad"), [x, dy], list(gradients), scope, padding=padding)
        tape.emit(Op("dwconv1d", "dgrad"), [dy, *filters], [dx], scope, padding=padding)
        return dx

    return y, backward


@dataclass(frozen=True)
class PointwiseConv1d(Layer):
    """y[n,k,l] = Σ_c w[k,c]·x[n,c,l] + b[k]: the same Linear at every time.

    Shapes: (N, in_channels, L) → (N, out_channels, L), float32. `in_channels` None is the input's; `bias` is optional. Raises UsageError for sizes
    below 1, and ShapeError for what is no series, when the network is built.

    Example:
        >>> import nbcnn
        >>> from nbcnn.run.net import Net
        >>> Net([nbcnn.PointwiseConv1d(8)], (4, 48), mode="cpu").output_shape
        (8, 48)
    """

    out_channels: int
    _: KW_ONLY
    bias: bool = True
    in_channels: int | None = unsized()
    kind: ClassVar[str] = "pointwise"
    orders: ClassVar[tuple[str, ...]] = ("in_channels out_channels", "out_channels bias")
    size_of_input: ClassVar[str] = "in_channels"

    def __post_init__(self) -> None:
        counts(self, "out_channels", "in_channels")

    def params(self) -> dict[str, Param]:
        size = known(self)
        made = {"weight": Param((self.out_channels, size), size)}
        return made | {"bias": Param((self.out_channels,), size, bias=True)} if self.bias else made

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        n, _, length = _series(x, scope, self.in_channels)
        weight, *bias = (tape.param(scope, name, param.shape) for name, param in self.params().items())
        y = tape.temp(f"{scope}.y", (n, self.out_channels, length))
        tape.emit(Op("pwconv1d", "fprop"), [x, weight, *bias], [y], scope)

        def backward(dy: Buf) -> Buf:
            tape.emit(Op("pwconv1d", "wgrad"), [x, dy], map(tape.grad, [weight, *bias]), scope)
            dx = tape.temp(f"{scope}.dx", x.shape)
            tape.emit(Op("pwconv1d", "dgrad"), [dy, weight], [dx], scope)
            return dx

        return y, backward


@dataclass(frozen=True)
class StateSpaceConv1d(Layer):
    """Causal depthwise convolution whose filters of `kernel_size` taps are those of a diagonal state space model, plus d[c]·x
    (ops/series/s4kernel.py).

    Shapes: (N, C, L) → (N, C, L), float32; L in time steps. `channels` None is the input's.

    `states` complex states per channel stand for twice as many. Learnt are each channel's step dt, every state's decay and frequency
    (A) and weight (C), and d. init: "s4d-lin" starts with the frequencies π·s and the decay ½ (Gu et al., 2022); "repo" with
    frequency 1 and decays exp(N(0, 1)) everywhere, as the published code does. dt is 0.001 to 0.1, uniform in its logarithm. Raises UsageError for
    sizes below 1 or another init, and ShapeError for what is no series, when the network is built.

    Example:
        >>> import nbcnn
        >>> from nbcnn.run.net import Net
        >>> Net([nbcnn.StateSpaceConv1d(48, states=8)], (4, 48), mode="cpu").output_shape
        (4, 48)
    """

    kernel_size: int
    _: KW_ONLY
    states: int = 32
    init: str = "s4d-lin"
    channels: int | None = unsized()
    kind: ClassVar[str] = "s4d"
    size_of_input: ClassVar[str] = "channels"

    def __post_init__(self) -> None:
        counts(self, "kernel_size", "states", "channels")
        if self.init not in KERNEL_INITS:
            raise UsageError(f"init is {' or '.join(KERNEL_INITS)}, got {quoted(self.init)}")

    def params(self) -> dict[str, Param]:
        channels = known(self)
        each, lin = (channels, self.states), self.init == "s4d-lin"

        def made(shape: tuple[int, ...], first: Any) -> Param:
            return Param(shape, self.kernel_size, decay=False, first=first)

        def normal(random: Any, shape: tuple[int, ...]) -> Any:
            return random.standard_normal(shape)

        return {
            "log_dt": made((channels,), lambda random, shape: random.uniform(*_LOG_STEPS, shape)),
            "a_re": made(each, (lambda random, shape: np.full(shape, math.log(0.5))) if lin else normal),
            "a_im": made(each, lambda random, shape: np.broadcast_to(math.pi * np.arange(shape[1]) if lin else 1.0, shape)),
            "c_re": made(each, normal),
            "c_im": made(each, normal),
            "skip": made((channels,), normal),
        }

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        _series(x, scope, self.channels)
        *states, skip = (tape.param(scope, name, param.shape) for name, param in self.params().items())
        shape = known(self), self.kernel_size
        # The Buf has one axis, because rows of lower precision round temporaries of two, and a filter is a weight, which stays fp32.
        filters = tape.temp(f"{scope}.filter", (numel(shape),)).reshaped(shape)
        tape.emit(Op("s4kernel", "fprop"), states, [filters], scope)
        y, convolution_backward = depthwise(tape, x, [filters, skip], scope, "causal")

        def backward(dy: Buf) -> Buf:
            gradient = tape.temp(f"{scope}.dfilter", (numel(shape),)).reshaped(shape)
            dx = convolution_backward(dy, [gradient, tape.grad(skip)])
            tape.emit(Op("s4kernel", "dgrad"), [gradient, *states], map(tape.grad, states), scope)
            return dx

        return y, backward


@dataclass(frozen=True)
class GLU(NoParams):
    """The first half of the channels times the sigmoid of the second (Dauphin et al., 2016).

    Shapes: (N, 2C, L) → (N, C, L), float32. Raises ShapeError for an odd number of channels, when the network is built.

    Example:
        >>> import nbcnn
        >>> from nbcnn.run.net import Net
        >>> Net([nbcnn.GLU()], (4, 48), mode="cpu").output_shape
        (2, 48)
    """

    kind: ClassVar[str] = "glu"

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        n, c, length = _series(x, scope)
        if c % 2:
            raise ShapeError(f"{scope} halves its channels, got {x.shape}")
        y = tape.temp(f"{scope}.y", (n, c // 2, length))
        tape.emit(Op("glu", "fprop"), [x], [y], scope)

        def backward(dy: Buf) -> Buf:
            dx = tape.temp(f"{scope}.dx", x.shape)
            tape.emit(Op("glu", "dgrad"), [dy, x], [dx], scope)
            return dx

        return y, backward


@dataclass(frozen=True)
class LastStep(NoParams):
    """The last time step, where a causal network has seen the whole series.

    Shapes: (N, C, L) → (N, C), float32. Raises ShapeError for what is no series, when the network is built.

    Example:
        >>> import nbcnn
        >>> from nbcnn.run.net import Net
        >>> Net([nbcnn.LastStep()], (4, 48), mode="cpu").output_shape
        (4,)
    """

    kind: ClassVar[str] = "last"

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        n, c, _ = _series(x, scope)
        return linear_map(tape, x, scope, "last", (n, c))
