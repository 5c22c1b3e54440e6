"""This module defines the fused layers of BatchNorm2d; their rules stand in `fuse.py`.

BatchNormReLU                   the activation behind the norm is applied with it; BatchNormReLU6, BatchNormHardSwish, BatchNormSwish, BatchNormGELU
ConvBatchNorm                   in inference the norm is folded into filters and bias; in training it takes the ReLU
ConvBatchNormGELU               the convolution, then a BatchNormGELU; ConvBatchNormReLU6 and so on likewise
BatchNormAddReLU                the norm adds another value of the graph and applies the ReLU; ConvBatchNormAddReLU likewise
ResidualReLU                    a BatchNorm2d at the end of a residual's body adds the residual's input and applies the ReLU

In training the convolution's epilogue makes the statistics of the batch (`conv_statistics_fprop`), and the norm is one pass behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from nbcnn.nn import joins
from nbcnn.nn.fused import Fused
from nbcnn.nn.joins import Joined, alike
from nbcnn.nn.layer import Built
from nbcnn.nn.layers import add_gradient
from nbcnn.nn.norms import BatchNorm2d, no_backward
from nbcnn.plan.graph import Buf, Named, ShapeError, Tape, trace
from nbcnn.plan.op import Add, Map, Mask, Moments, Op, Part, undone
from nbcnn.plan.shapes import numel

STATISTICS = (
    Op("conv", "fprop", after=(Moments(),)),
    Op("batchnorm", "apply"),
    Op("batchnorm", "apply", after=(Map("relu"),)),
    Op("batchnorm", "apply", after=(Add(), Map("relu"))),
)
"""The ops of a norm behind a convolution in training."""


def _ops_of(*after: Part) -> tuple[Op, ...]:
    """The ops of a norm with `after` behind it."""
    return *(Op("batchnorm", name, after=after) for name in ("fprop", "infer")), Op("batchnorm", "grads", before=undone(after))


@dataclass(frozen=True)
class BatchNormReLU(Fused):
    """relu of a BatchNorm2d: one pass forward behind the statistics, and no tensor between the two backward."""

    kind: ClassVar[str] = "batchnorm"
    after: ClassVar[tuple[Part, ...]] = (Map("relu"),)
    ops: ClassVar[tuple[Op, ...]] = _ops_of(Map("relu"))

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        if tape.training and tape.sync is not None:
            return trace(tape, self.parts, x)
        y, backward = self.parts[0][1].normalise(tape, x, scope, self.after)
        return y, lambda dy: backward(dy)[0]


@dataclass(frozen=True)
class BatchNormGELU(BatchNormReLU):
    """gelu of a BatchNorm2d."""

    after: ClassVar[tuple[Part, ...]] = (Map("gelu"),)
    ops: ClassVar[tuple[Op, ...]] = _ops_of(Map("gelu"))


@dataclass(frozen=True)
class BatchNormReLU6(BatchNormReLU):
    """relu6 of a BatchNorm2d."""

    after: ClassVar[tuple[Part, ...]] = (Map("relu6"),)
    ops: ClassVar[tuple[Op, ...]] = _ops_of(Map("relu6"))


@dataclass(frozen=True)
class BatchNormHardSwish(BatchNormReLU):
    """hard_swish of a BatchNorm2d."""

    after: ClassVar[tuple[Part, ...]] = (Map("hard_swish"),)
    ops: ClassVar[tuple[Op, ...]] = _ops_of(Map("hard_swish"))


@dataclass(frozen=True)
class BatchNormSwish(BatchNormReLU):
    """swish of a BatchNorm2d."""

    after: ClassVar[tuple[Part, ...]] = (Map("swish"),)
    ops: ClassVar[tuple[Op, ...]] = _ops_of(Map("swish"))


@dataclass(frozen=True)
class BatchNormAddReLU(Fused):
    """relu of a BatchNorm2d plus another value, whose gradient is what the ReLU passes."""

    kind: ClassVar[str] = "batchnorm"
    joins: ClassVar[bool] = True
    ops: ClassVar[tuple[Op, ...]] = _ops_of(Add(), Map("relu"))

    def build(self, tape: Tape, xs: Sequence[Buf], scope: str) -> Joined:
        (name, norm), (sum_name, add), (after, relu) = self.parts
        x, other = xs
        alike([x, other], sum_name)
        if not tape.training or tape.sync is None:
            return norm.normalise(tape, x, name, (Add(), Map("relu")), other)
        inner, norm_backward = norm.build(tape, x, name)
        total, add_backward = add.build(tape, [inner, other], sum_name)
        y, relu_backward = relu.build(tape, total, after)

        def backward(dy: Buf) -> list[Buf]:
            dinner, dother = add_backward(relu_backward(dy))
            return [norm_backward(dinner), dother]

        return y, backward


@dataclass(frozen=True)
class ConvBatchNorm(Fused):
    """A BatchNorm2d of conv(x), and perhaps its ReLU. In inference the norm is folded into filters and bias, and the convolution makes y alone."""

    kind: ClassVar[str] = "conv"
    ops: ClassVar[tuple[Op, ...]] = (
        Op("batchnorm", "fold"),
        *STATISTICS,
        *BatchNormReLU.ops,
        Op("conv", "fprop", after=(Map("relu"),)),
        Op("conv", "dgrad", after=(Mask("relu"),)),
    )

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        relu = len(self.parts) > 2
        if not tape.training:
            return _folded(tape, self.parts, x, Op("conv", "fprop", after=(Map("relu"),)) if relu else Op("conv", "fprop")), no_backward
        if tape.sync is not None:
            return trace(tape, self.parts, x)
        y, backward = _behind_conv(tape, self.parts, x, (Map("relu"),) if relu else ())
        return y, lambda dy: backward(dy)[0]


def _folded(tape: Tape, parts: Sequence[Named], x: Buf, op: Op) -> Buf:
    """Record, for inference, the convolution of `parts` with the norm behind it folded into its filters and bias, by `op`."""
    (name, conv), (norm_name, norm), *_ = parts
    shape = conv.shape(x, name)
    norm.check(Buf(name, shape.y_shape), norm_name)
    weight, *bias = (tape.param(name, each, param.shape) for each, param in conv.params().items())
    # One axis, so that no row of the op table rounds the filters before they are packed.
    filters, shift = tape.temp(f"{name}.folded", (numel(shape.w_shape),)), tape.temp(f"{name}.shift", (shape.K,))
    ins = [weight.reshaped(filters.shape), *bias, *norm.affine_of(tape, norm_name), *norm.running(tape, norm_name)]
    tape.emit(Op("batchnorm", "fold"), ins, [filters, shift], norm_name, eps=norm.eps)
    y = tape.temp(f"{name}.y", shape.y_shape)
    tape.emit(op, [x, filters.reshaped(shape.w_shape), shift], [y], name, stride=shape.stride, pad=shape.pad)
    return y


def _behind_conv(
    tape: Tape, parts: Sequence[Named], x: Buf, after: tuple[Part, ...], other: Buf | None = None
) -> tuple[Buf, Callable[[Buf], list[Buf]]]:
    """Record, in training, the convolution of `parts` with the statistics of the batch, and the norm behind it as `BatchNorm2d.normalise` does.

    The backward gives the gradient of x and, if there is one, that of `other`.
    """
    (name, conv), (norm_name, norm), *_ = parts
    kept, running = norm.kept(tape, norm_name), norm.running(tape, norm_name)

    def with_statistics(_: str, ins: Sequence[Buf], outs: Sequence[Buf], scope: str, **geometry: Any) -> None:
        attrs = {"eps": norm.eps, "momentum": norm.momentum}
        tape.emit(Op("conv", "fprop", after=(Moments(),)), [*ins, *running], [*outs, *kept, *running], scope, **geometry, **attrs)

    z, conv_backward = conv.build(tape, x, name, with_statistics)
    y, norm_backward = norm.normalise(tape, z, norm_name, after, other, kept)

    def backward(dy: Buf) -> list[Buf]:
        dz, *dother = norm_backward(dy)
        return [conv_backward(dz), *dother]

    return y, backward


@dataclass(frozen=True)
class ConvBatchNormGELU(Fused):
    """gelu of a BatchNorm2d of conv(x). No epilogue has a GELU, so the norm and it make a pass of their own in inference, too."""

    kind: ClassVar[str] = "conv"
    norm: ClassVar[type[BatchNormReLU]] = BatchNormGELU
    ops: ClassVar[tuple[Op, ...]] = (*STATISTICS, *BatchNormGELU.ops, Op("batchnorm", "apply", after=(Map("gelu"),)))

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        if not tape.training or tape.sync is not None or self.parts[0][1].general:
            return trace(tape, [self.parts[0], (self.parts[1][0], self.norm(self.parts[1:]))], x)
        y, backward = _behind_conv(tape, self.parts, x, self.norm.after)
        return y, lambda dy: backward(dy)[0]


@dataclass(frozen=True)
class ConvBatchNormReLU6(ConvBatchNormGELU):
    """relu6 of a BatchNorm2d of conv(x)."""

    norm: ClassVar[type[BatchNormReLU]] = BatchNormReLU6
    ops: ClassVar[tuple[Op, ...]] = (*STATISTICS, *BatchNormReLU6.ops, Op("batchnorm", "apply", after=(Map("relu6"),)))


@dataclass(frozen=True)
class ConvBatchNormHardSwish(ConvBatchNormGELU):
    """hard_swish of a BatchNorm2d of conv(x)."""

    norm: ClassVar[type[BatchNormReLU]] = BatchNormHardSwish
    ops: ClassVar[tuple[Op, ...]] = (*STATISTICS, *BatchNormHardSwish.ops, Op("batchnorm", "apply", after=(Map("hard_swish"),)))


@dataclass(frozen=True)
class ConvBatchNormSwish(ConvBatchNormGELU):
    """swish of a BatchNorm2d of conv(x)."""

    norm: ClassVar[type[BatchNormReLU]] = BatchNormSwish
    ops: ClassVar[tuple[Op, ...]] = (*STATISTICS, *BatchNormSwish.ops, Op("batchnorm", "apply", after=(Map("swish"),)))


@dataclass(frozen=True)
class ConvBatchNormAddReLU(Fused):
    """relu of a BatchNorm2d of conv(x) plus another value. The norm is not folded in inference: a pass behind the convolution is left anyway."""

    kind: ClassVar[str] = "conv"
    joins: ClassVar[bool] = True
    ops: ClassVar[tuple[Op, ...]] = (*STATISTICS, *BatchNormAddReLU.ops)

    def build(self, tape: Tape, xs: Sequence[Buf], scope: str) -> Joined:
        x, other = xs
        (name, conv), (norm_name, norm), (sum_name, _), _ = self.parts
        z = Buf(name, conv.shape(x, name).y_shape)
        norm.check(z, norm_name)
        alike([z, other], sum_name)
        if tape.training and tape.sync is None:
            return _behind_conv(tape, self.parts, x, (Add(), Map("relu")), other)
        z, conv_backward = conv.build(tape, x, name)
        y, norm_backward = BatchNormAddReLU(self.parts[1:]).build(tape, [z, other], norm_name)

        def backward(dy: Buf) -> list[Buf]:
            dz, dother = norm_backward(dy)
            return [conv_backward(dz), dother]

        return y, backward


@dataclass(frozen=True)
class ResidualReLU(Fused):
    """relu(body(x) + x), the sum and the ReLU computed by the BatchNorm2d at the body's end."""

    kind: ClassVar[str] = "residual"
    ops: ClassVar[tuple[Op, ...]] = _ops_of(Add(), Map("relu"))

    def named_body(self, scope: str) -> list[Named]:
        """The layers of the body with their names."""
        return self.parts[0][1].named_body(scope)

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        if tape.training and tape.sync is not None:
            return trace(tape, self.parts, x)
        *before, last = self.named_body(scope)
        inner, before_backward = trace(tape, before, x)
        shape = last[1].parts[0][1].shape(inner, last[0]).y_shape if isinstance(last[1], ConvBatchNorm) else inner.shape
        if shape != x.shape:
            raise ShapeError(f"{scope}: the body turns {x.shape} into {shape}, which cannot be added to its input")
        y, backward = _plus(last, ((scope, joins.Add()), self.parts[1])).build(tape, [inner, x], last[0])

        def backward_both(dy: Buf) -> Buf:
            dz, dother = backward(dy)
            return add_gradient(tape, before_backward(dz), dother, scope)

        return y, backward_both


def _plus(last: Named, behind: tuple[Named, Named]) -> ConvBatchNormAddReLU | BatchNormAddReLU:
    """The layer at the end of a body, a norm or one that a convolution has taken in, with the sum and the ReLU behind it."""
    name, layer = last
    return ConvBatchNormAddReLU((*layer.parts, *behind)) if isinstance(layer, ConvBatchNorm) else BatchNormAddReLU(((name, layer), *behind))


def ends_in_norm(parts: Sequence[Any]) -> bool:
    """Whether the body of a residual ends in a BatchNorm2d."""
    body = parts[0].named_body("")
    last = body[-1][1] if body else None
    return isinstance(last, BatchNorm2d) or (isinstance(last, ConvBatchNorm) and len(last.parts) == 2)


def takes_norm(parts: Sequence[Any]) -> bool:
    """Whether the convolution in front is not general: a norm is folded into the filters of the engines alone."""
    return not parts[0].general


def exact(parts: Sequence[Any]) -> bool:
    """Whether the GELU at the end is the exact one, should there be others."""
    return getattr(parts[-1], "op", "gelu") == "gelu"
