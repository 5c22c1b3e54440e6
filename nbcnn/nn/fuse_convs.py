"""This module defines the fused layers of convolutions; their rules stand in `fuse.py`.

ConvEvoNorm     writes the normalised output, and the convolution's own for the gradients
ConvReLUPool    writes the pooled output and the argmax of each window, two bits
UpConv          the doubled image is never stored; UpConvMSE, a loss, stores no output either
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from nbcnn.nn.fused import Fused
from nbcnn.nn.layer import Built, Param
from nbcnn.nn.layers import Conv2d
from nbcnn.nn.norms import EvoNormB0
from nbcnn.plan.graph import Buf, ShapeError, Tape, trace
from nbcnn.plan.op import Loss, Map, Norm, Op, Pool, Unpool

FEW_TAPS = 31
"""C·R·S up to which a pooled layer's wgrad reads the pooled gradient itself; beyond, unpooling it once serves wgrad and dgrad."""


@dataclass(frozen=True)
class _AroundConv(Fused):
    """A convolution with what stands around it: name and parameters are those of the convolution, wherever it stands."""

    @property
    def conv(self) -> Any:
        """The convolution inside."""
        return next(layer for _, layer in self.parts if isinstance(layer, Conv2d))

    @property
    def scope(self) -> str:
        """The convolution's name, which is the prefix of the parameters' names."""
        return next(name for name, layer in self.parts if isinstance(layer, Conv2d))

    def params(self) -> dict[str, Param]:
        return self.conv.params()

    def _weights(self, tape: Tape) -> tuple[Buf, Buf]:
        params = self.params()
        return tape.param(self.scope, "weight", params["weight"].shape), tape.param(self.scope, "bias", params["bias"].shape)

    def _grads(self, tape: Tape) -> list[Buf]:
        return [tape.grad(buf) for buf in self._weights(tape)]


def _dgrad(tape: Tape, kind: str, dy: Buf, w: Buf, x: Buf, scope: str, **attrs: int) -> Buf:
    """Record x's gradient by a convolution's `kind`."""
    dx = tape.temp(f"{scope}.dx", x.shape)
    tape.emit(Op(kind, "dgrad"), [dy, w], [dx], scope, **attrs)
    return dx


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
            return _dgrad(tape, "conv", dz, w, x, scope, **attrs)

        return y, backward


@dataclass(frozen=True)
class ConvReLUPool(_AroundConv):
    """2×2 maxpool of relu(conv(x) + b); keeps the pooled output and a 2-bit index, never what was pooled."""

    kind: ClassVar[str] = "conv"
    ops: ClassVar[tuple[Op, ...]] = (
        Op("conv", "fprop", after=(Map("relu"), Pool())),
        Op("unpool"),
        Op("conv", "wgrad", before=(Unpool(),)),
    )

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        shape, (w, b) = self.conv.shape(x, scope), self._weights(tape)
        if shape.P % 2 or shape.Q % 2:
            return trace(tape, self.parts, x)
        attrs = {"stride": shape.stride, "pad": shape.pad}
        y = tape.temp(f"{scope}.y", (shape.N, shape.K, shape.P // 2, shape.Q // 2))
        index = tape.temp(f"{scope}.index", (shape.N, -(-shape.K // 4), shape.P // 2, shape.Q // 2), "uint8")
        tape.emit(Op("conv", "fprop", after=(Map("relu"), Pool())), [x, w, b], [y, index], scope, **attrs)

        def backward(dy: Buf) -> Buf:
            dp = tape.temp(f"{scope}.dp", y.shape)
            tape.emit(Op("relu", "dgrad"), [dy, y], [dp], scope)
            dz = tape.temp(f"{scope}.dz", shape.y_shape)
            tape.emit(Op("unpool"), [dp, index], [dz], scope)  # dead if nobody wants dx and wgrad reads dp
            if shape.C * shape.R * shape.S <= FEW_TAPS:
                tape.emit(Op("conv", "wgrad", before=(Unpool(),)), [x, dp, index], self._grads(tape), scope, **attrs)
            else:
                tape.emit(Op("conv", "wgrad"), [x, dz], self._grads(tape), scope, **attrs)
            return _dgrad(tape, "conv", dz, w, x, scope, **attrs)

        return y, backward


@dataclass(frozen=True)
class UpConv(_AroundConv):
    """conv 3×3 of the image doubled by nearest neighbour, without the doubled image."""

    kind: ClassVar[str] = "conv"
    ops: ClassVar[tuple[Op, ...]] = (
        Op("upconv", "fprop"),
        Op("upconv", "dgrad"),
        Op("upconv", "wgrad"),
    )

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        w, b = self._weights(tape)
        y = tape.temp(f"{scope}.y", self.conv.shape(x, scope, doubled=True).y_shape)
        tape.emit(Op("upconv", "fprop"), [x, w, b], [y], scope)

        def backward(dy: Buf) -> Buf:
            tape.emit(Op("upconv", "wgrad"), [x, dy], self._grads(tape), scope)
            return _dgrad(tape, "upconv", dy, w, x, scope)

        return y, backward


@dataclass(frozen=True)
class UpConvMSE(_AroundConv):
    """The mean squared error of `UpConv`, a loss: its output exists only as the gradient of that error."""

    kind: ClassVar[str] = "mse"
    needs_labels: ClassVar[bool] = False
    ops: ClassVar[tuple[Op, ...]] = (
        Op("upconv", "fprop", after=(Loss("mse"),)),
        Op("upconv", "dgrad"),
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
        return value, _dgrad(tape, "upconv", dy, w, x, self.scope)
