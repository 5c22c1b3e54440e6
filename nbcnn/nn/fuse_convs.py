"""This module defines the fused layers of convolutions and linear layers; their rules stand in `fuse.py`.

    ConvActivation  f(conv(x) + b) in one launch, f any activation; LinearActivation likewise, a 1×1 convolution of 1×1 images
    ConvEvoNorm     writes the normalised output, and the convolution's own for the gradients
    ConvReLUPool    writes the pooled output and the argmax of each window, two bits
    UpConv          the doubled image is never stored; UpConvActivation likewise, and UpConvMSE, a loss, stores no output either

In the backward pass a fused layer multiplies its input's gradient by the ReLU mask of the layer that made that input (`Buf.after_relu`): the
gradient arrives there masked, and the pass that plain layers need for it vanishes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from nbcnn.nn.activations import Elementwise
from nbcnn.nn.fused import Fused, unmasked
from nbcnn.nn.layer import Built, Param, known
from nbcnn.nn.layers import Conv2d, Linear
from nbcnn.nn.norms import EvoNormB0
from nbcnn.plan.graph import Buf, ShapeError, Tape, trace
from nbcnn.plan.op import Loss, Map, Mask, Norm, Op, Pool, Unpool

FEW_TAPS = 31
"""C·R·S up to which a pooled layer's wgrad reads the pooled gradient itself; beyond, unpooling it once serves wgrad and dgrad."""


@dataclass(frozen=True)
class _AroundConv(Fused):
    """A convolution or linear layer with what stands around it: name and parameters are those of the convolution, wherever it stands."""

    @property
    def conv(self) -> Any:
        """The convolution (or linear layer) inside."""
        return next(layer for _, layer in self.parts if isinstance(layer, Conv2d | Linear))

    @property
    def scope(self) -> str:
        """The convolution's name, which is the prefix of the parameters' names."""
        return next(name for name, layer in self.parts if isinstance(layer, Conv2d | Linear))

    def params(self) -> dict[str, Param]:
        return self.conv.params()

    def _weights(self, tape: Tape) -> tuple[Buf, Buf]:
        params = self.params()
        return tape.param(self.scope, "weight", params["weight"].shape), tape.param(self.scope, "bias", params["bias"].shape)

    def _grads(self, tape: Tape) -> list[Buf]:
        return [tape.grad(buf) for buf in self._weights(tape)]


def _dgrad(tape: Tape, op: Op, dy: Buf, w: Buf, x: Buf, scope: str, **attrs: int) -> Buf:
    """Record x's gradient by `op`, masked by the ReLU that x came out of, if any."""
    dx = tape.temp(f"{scope}.dx", x.shape, masked=x.after_relu)
    if x.after_relu:
        tape.emit(Op(op.kind, "dgrad", after=(Mask("relu"),)), [dy, w, x], [dx], scope, **attrs)
    else:
        tape.emit(op, [dy, w], [dx], scope, **attrs)
    return dx


def _undone(tape: Tape, activation: Elementwise, dy: Buf, y: Buf, scope: str) -> Buf:
    """Record the gradient of what the activation was taken of, from y; a ReLU's may be masked already."""
    if activation.function == "relu":
        return unmasked(tape, dy, y, scope)
    dz = tape.temp(f"{scope}.dz", y.shape)
    tape.emit(Op(activation.function, "dgrad"), [dy, y], [dz], scope, **activation.attrs())
    return dz


@dataclass(frozen=True)
class ConvActivation(_AroundConv):
    """f(conv(x) + b) in one launch, for any activation f.

    In training only where the gradient of f reads y. Where it reads x, the plain layers are recorded: the convolution stores z = conv(x) + b and
    a map makes y of it. An epilogue that stored z beside y would save that map's one read of z, of the five times that z and y move in a
    training step, and would be one more kernel for every engine, tile and activation.
    """

    kind: ClassVar[str] = "conv"

    @property
    def activation(self) -> Elementwise:
        """The layer of f."""
        return self.parts[1][1]

    @property
    def ops(self) -> tuple[Op, ...]:  # type: ignore[override]
        """What a row must have."""
        return Op("conv", "fprop", after=(Map(self.activation.function),)), Op("conv", "dgrad", after=(Mask("relu"),))

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        if tape.training and self.activation.reads == "x":
            return trace(tape, self.parts, x)
        shape, (w, b) = self.conv.shape(x, scope), self._weights(tape)
        return self._record(tape, x, w, b, shape.y_shape, scope, {"stride": shape.stride, "pad": shape.pad})

    def _record(self, tape: Tape, x: Buf, w: Buf, b: Buf, y_shape: tuple[int, ...], scope: str, attrs: dict[str, int]) -> Built:
        """Record y of images, and a backward of their gradients."""
        f, parameters = self.activation.function, self.activation.attrs()
        y = tape.temp(f"{scope}.y", y_shape, after_relu=f == "relu")
        tape.emit(Op("conv", "fprop", after=(Map(f),)), [x, w, b], [y], scope, **attrs, **parameters)

        def backward(dy: Buf) -> Buf:
            dz = _undone(tape, self.activation, dy, y, scope)
            dw, db = self._grads(tape)
            tape.emit(Op("conv", "wgrad"), [x, dz], [dw.reshaped(w.shape), db], scope, **attrs)
            return _dgrad(tape, Op("conv", "dgrad"), dz, w, x, scope, **attrs)

        return y, backward


@dataclass(frozen=True)
class LinearActivation(ConvActivation):
    """f(x wᵀ + b) in one launch, as a 1×1 convolution of 1×1 images."""

    kind: ClassVar[str] = "linear"

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        if tape.training and self.activation.reads == "x":
            return trace(tape, self.parts, x)
        linear, (w, b) = self.conv, self._weights(tape)
        if x.shape[1:] != (linear.in_features,):
            raise ShapeError(f"{scope} takes (N, {linear.in_features}), got {x.shape}; Flatten makes vectors of images")
        n, k, c = x.shape[0], linear.out_features, known(linear)
        pixels, filters, attrs = x.reshaped((n, c, 1, 1)), w.reshaped((k, c, 1, 1)), {"stride": 1, "pad": 0}
        y, backward = self._record(tape, pixels, filters, b, (n, k, 1, 1), scope, attrs)
        return y.reshaped((n, k)), lambda dy: backward(dy.reshaped(y.shape)).reshaped(x.shape)


@dataclass(frozen=True)
class ConvEvoNorm(_AroundConv):
    """EvoNorm-S0 or -B0 of conv(x) + b. In inference the convolution's own output is never stored.

    In training it is kept: both norms' gradients read it, and it cannot be read off y, because γ·x·σ(v·x) takes most values twice (B0 the
    same below its least deviation). So training keeps x, the convolution's output and y, as the plain layers do.

    A B0 whose statistics are taken over all ranks stays a layer of its own: the ranks add their sums in the middle of it.
    """

    kind: ClassVar[str] = "conv"
    ops: ClassVar[tuple[Op, ...]] = (
        Op("conv", "fprop", after=(Norm("evonorm_s0"),)),
        Op("conv", "infer", after=(Norm("evonorm_s0"),)),
        Op("conv", "fprop", after=(Norm("evonorm_b0"),)),
        Op("conv", "infer", after=(Norm("evonorm_b0"),)),
        Op("conv", "dgrad", after=(Mask("relu"),)),
    )

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        (_, conv), (name, norm) = self.parts
        if tape.sync is not None and isinstance(norm, EvoNormB0):
            return trace(tape, self.parts, x)
        shape, (w, b) = conv.shape(x, scope), self._weights(tape)
        attrs = {"stride": shape.stride, "pad": shape.pad}
        y, z = tape.temp(f"{name}.y", shape.y_shape), tape.temp(f"{scope}.y", shape.y_shape)
        emit, norm_backward = norm.record(tape, z, y, name)

        def op(of_norm: Op, ins: list[Buf], outs: list[Buf], **more: Any) -> None:
            if tape.training:
                tape.emit(Op("conv", "fprop", after=(Norm(of_norm.kind),)), [x, w, b, *ins[1:]], [outs[0], z, *outs[1:]], scope, **attrs, **more)
            else:
                tape.emit(Op("conv", "infer", after=(Norm(of_norm.kind),)), [x, w, b, *ins[1:]], outs[:1], scope, **attrs, **more)

        emit(op)

        def backward(dy: Buf) -> Buf:
            dz = norm_backward(dy)
            tape.emit(Op("conv", "wgrad"), [x, dz], self._grads(tape), scope, **attrs)
            return _dgrad(tape, Op("conv", "dgrad"), dz, w, x, scope, **attrs)

        return y, backward


@dataclass(frozen=True)
class ConvReLUPool(_AroundConv):
    """2×2 maxpool of relu(conv(x) + b); keeps the pooled output and a 2-bit index, never what was pooled."""

    kind: ClassVar[str] = "conv"
    ops: ClassVar[tuple[Op, ...]] = (
        Op("conv", "fprop", after=(Map("relu"), Pool())),
        Op("unpool"),
        Op("conv", "dgrad", after=(Mask("relu"),)),
        Op("conv", "wgrad", before=(Unpool(),)),
    )

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        shape, (w, b) = self.conv.shape(x, scope), self._weights(tape)
        if shape.P % 2 or shape.Q % 2:
            return trace(tape, self.parts, x)
        attrs = {"stride": shape.stride, "pad": shape.pad}
        y = tape.temp(f"{scope}.y", (shape.N, shape.K, shape.P // 2, shape.Q // 2), after_relu=True)
        index = tape.temp(f"{scope}.index", (shape.N, -(-shape.K // 4), shape.P // 2, shape.Q // 2), "uint8")
        tape.emit(Op("conv", "fprop", after=(Map("relu"), Pool())), [x, w, b], [y, index], scope, **attrs)

        def backward(dy: Buf) -> Buf:
            dp = unmasked(tape, dy, y, scope)
            dz = tape.temp(f"{scope}.dz", shape.y_shape)
            tape.emit(Op("unpool"), [dp, index], [dz], scope)  # dead if nobody wants dx and wgrad reads dp
            if shape.C * shape.R * shape.S <= FEW_TAPS:
                tape.emit(Op("conv", "wgrad", before=(Unpool(),)), [x, dp, index], self._grads(tape), scope, **attrs)
            else:
                tape.emit(Op("conv", "wgrad"), [x, dz], self._grads(tape), scope, **attrs)
            return _dgrad(tape, Op("conv", "dgrad"), dz, w, x, scope, **attrs)

        return y, backward


@dataclass(frozen=True)
class UpConv(_AroundConv):
    """conv 3×3 of the image doubled by nearest neighbour, without the doubled image."""

    kind: ClassVar[str] = "conv"
    ops: ClassVar[tuple[Op, ...]] = (
        Op("upconv", "fprop"),
        Op("upconv", "dgrad"),
        Op("upconv", "dgrad", after=(Mask("relu"),)),
        Op("upconv", "wgrad"),
    )

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        return self._record(tape, x, scope, None)

    def _record(self, tape: Tape, x: Buf, scope: str, activation: Elementwise | None) -> Built:
        """Record y, with the activation if there is one, and a backward of its gradient."""
        w, b = self._weights(tape)
        y_shape = self.conv.shape(x, scope, doubled=True).y_shape
        f, parameters = (activation.function, activation.attrs()) if activation else ("", {})
        y = tape.temp(f"{scope}.y", y_shape, after_relu=f == "relu")
        tape.emit(Op("upconv", "fprop", after=(Map(f),) if f else ()), [x, w, b], [y], scope, **parameters)

        def backward(dy: Buf) -> Buf:
            dz = _undone(tape, activation, dy, y, scope) if activation else dy
            tape.emit(Op("upconv", "wgrad"), [x, dz], self._grads(tape), scope)
            return _dgrad(tape, Op("upconv", "dgrad"), dz, w, x, scope)

        return y, backward


@dataclass(frozen=True)
class UpConvActivation(UpConv):
    """f of `UpConv`, for any activation f: in training as `ConvActivation`, in the same launch where the gradient of f reads y."""

    @property
    def activation(self) -> Elementwise:
        """The layer of f."""
        return self.parts[2][1]

    @property
    def ops(self) -> tuple[Op, ...]:  # type: ignore[override]
        """What a row must have."""
        return Op("upconv", "fprop", after=(Map(self.activation.function),)), *UpConv.ops

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        if tape.training and self.activation.reads == "x":
            return trace(tape, [(scope, UpConv(self.parts[:2])), self.parts[2]], x)
        return self._record(tape, x, scope, self.activation)


@dataclass(frozen=True)
class UpConvMSE(_AroundConv):
    """The mean squared error of `UpConv`, a loss: its output exists only as the gradient of that error."""

    kind: ClassVar[str] = "mse"
    needs_labels: ClassVar[bool] = False
    ops: ClassVar[tuple[Op, ...]] = (
        Op("upconv", "fprop", after=(Loss("mse"),)),
        Op("upconv", "dgrad"),
        Op("upconv", "dgrad", after=(Mask("relu"),)),
        Op("upconv", "wgrad"),
    )

    def build(self, tape: Tape, x: Buf, target: Buf, scope: str) -> tuple[Buf, Buf]:
        w, b = self._weights(tape)
        doubled = self.conv.shape(x, self.scope, doubled=True).y_shape
        if doubled != target.shape:
            raise ShapeError(f"{scope}: the network makes {doubled}, the target is {target.shape}")
        value, dy = tape.temp(f"{scope}.loss", (), "float64"), tape.temp(f"{scope}.dy", doubled)
        tape.emit(Op("upconv", "fprop", after=(Loss("mse"),)), [x, w, b, target], [value, dy], self.scope)
        if not tape.training:
            return value, dy
        tape.emit(Op("upconv", "wgrad"), [x, dy], self._grads(tape), self.scope)
        return value, _dgrad(tape, Op("upconv", "dgrad"), dy, w, x, self.scope)
