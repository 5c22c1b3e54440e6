"""This module defines the fused layers of BatchNorm2d; their rules stand in `fuse.py`.

BatchNormReLU, BatchNormGELU    the activation behind the norm is applied with it
ConvBatchNorm                   in inference the norm is folded into filters and bias; in training it takes the ReLU
ConvBatchNormGELU               the convolution, then a BatchNormGELU
ResidualReLU                    a BatchNorm2d at the end of a residual's body adds the residual's input and applies the ReLU
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from nbcnn.nn.fused import Fused
from nbcnn.nn.layers import Built, add_gradient
from nbcnn.nn.norms import BatchNorm2d, no_backward
from nbcnn.plan.graph import Buf, Named, ShapeError, Tape, trace
from nbcnn.plan.shapes import numel


@dataclass(frozen=True)
class BatchNormReLU(Fused):
    """relu of a BatchNorm2d: one pass forward behind the statistics, and no tensor between the two backward.

    Its output is not called `after_relu`: the gradient masks itself by what it reads anyway, so no layer behind it has to.
    """

    kind: ClassVar[str] = "batchnorm"
    form: ClassVar[str] = "_relu"
    ops: ClassVar[tuple[str, ...]] = ("batchnorm_relu_fprop", "batchnorm_relu_infer", "batchnorm_relu_grads")

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        if tape.training and tape.sync is not None:
            return trace(tape, self.parts, x)
        y, backward = self.parts[0][1].normalise(tape, x, scope, self.form)
        return y, lambda dy: backward(dy)[0]


@dataclass(frozen=True)
class BatchNormGELU(BatchNormReLU):
    """gelu of a BatchNorm2d."""

    form: ClassVar[str] = "_gelu"
    ops: ClassVar[tuple[str, ...]] = ("batchnorm_gelu_fprop", "batchnorm_gelu_infer", "batchnorm_gelu_grads")


@dataclass(frozen=True)
class ConvBatchNorm(Fused):
    """A BatchNorm2d of conv(x), and perhaps its ReLU. In inference the norm is folded into filters and bias, and the convolution makes y alone."""

    kind: ClassVar[str] = "conv"
    ops: ClassVar[tuple[str, ...]] = ("batchnorm_fold", *BatchNormReLU.ops, "conv_relu_fprop", "conv_dgrad_relu")

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        (name, conv), (norm_name, norm), *relu = self.parts
        if tape.training:
            behind = (self.parts[1], *relu)
            return trace(tape, [self.parts[0], (norm_name, BatchNormReLU(behind)) if relu else behind[0]], x)
        shape = conv.shape(x, name)
        norm.check(Buf(name, shape.y_shape), norm_name)
        weight, *bias = (tape.param(name, each, param.shape) for each, param in conv.params().items())
        # One axis, so that no row of the op table rounds the filters before they are packed.
        folded, shift = tape.temp(f"{name}.folded", (numel(shape.w_shape),)), tape.temp(f"{name}.shift", (shape.K,))
        ins = [weight.reshaped(folded.shape), *bias, *norm.affine_of(tape, norm_name), *norm.running(tape, norm_name)]
        tape.emit("batchnorm_fold", ins, [folded, shift], norm_name, eps=norm.eps)
        y = tape.temp(f"{scope}.y", shape.y_shape)
        op = "conv_relu_fprop" if relu else "conv_fprop"
        tape.emit(op, [x, folded.reshaped(shape.w_shape), shift], [y], scope, stride=shape.stride, pad=shape.pad)
        return y, no_backward


@dataclass(frozen=True)
class ConvBatchNormGELU(Fused):
    """gelu of a BatchNorm2d of conv(x). No epilogue has a GELU, so the norm and it make a pass of their own in inference, too."""

    kind: ClassVar[str] = "conv"
    ops: ClassVar[tuple[str, ...]] = BatchNormGELU.ops

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        return trace(tape, [self.parts[0], (self.parts[1][0], BatchNormGELU(self.parts[1:]))], x)


@dataclass(frozen=True)
class ResidualReLU(Fused):
    """relu(body(x) + x), the sum and the ReLU computed by the BatchNorm2d at the body's end."""

    kind: ClassVar[str] = "residual"
    ops: ClassVar[tuple[str, ...]] = ("batchnorm_add_relu_fprop", "batchnorm_add_relu_infer", "batchnorm_add_relu_grads")

    def named_body(self, scope: str) -> list[Named]:
        """The layers of the body with their names."""
        return self.parts[0][1].named_body(scope)

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        if tape.training and tape.sync is not None:
            return trace(tape, self.parts, x)
        *before, (name, norm) = _apart(self.named_body(scope))
        inner, before_backward = trace(tape, before, x)
        if inner.shape != x.shape:
            raise ShapeError(f"{scope}: the body turns {x.shape} into {inner.shape}, which cannot be added to its input")
        y, norm_backward = norm.normalise(tape, inner, name, "_add_relu", x)

        def backward(dy: Buf) -> Buf:
            dz, dother = norm_backward(dy)
            return add_gradient(tape, before_backward(dz), dother, scope)

        return y, backward


def _apart(body: Sequence[Named]) -> list[Named]:
    """`body`, a convolution at its end that has taken in a norm once more apart from it: to add a tensor and fold the norm would take a pass more."""
    *before, last = body
    return [*before, *(last[1].parts if isinstance(last[1], ConvBatchNorm) else [last])]


def ends_in_norm(parts: Sequence[Any]) -> bool:
    """Whether the body of a residual ends in a BatchNorm2d."""
    body = parts[0].named_body("")
    return bool(body) and isinstance(_apart(body)[-1][1], BatchNorm2d)


def takes_norm(parts: Sequence[Any]) -> bool:
    """Whether the convolution in front is not general: a norm is folded into the filters of the engines alone."""
    return not parts[0].general


def exact(parts: Sequence[Any]) -> bool:
    """Whether the GELU at the end is the exact one, should there be others."""
    return getattr(parts[-1], "op", "gelu") == "gelu"
