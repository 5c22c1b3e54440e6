"""This module defines the fused layers of series; their rules stand in `fuse.py`.

DepthwiseTogether   both gradients of a depthwise convolution are one op
GatedPointwise      glu(pointwise(x)), and perhaps the input of the Residual around it, are one op
LastOfResidual      what stands in front of LastStep and treats every hour by itself sees the last hour alone
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from nbcnn.nn.activations import GELU
from nbcnn.nn.fused import Fused
from nbcnn.nn.layer import Built
from nbcnn.nn.series_layers import GLU, PointwiseConv1d, gated
from nbcnn.plan.graph import Buf, ShapeError, Tape, trace
from nbcnn.plan.op import Map, Op

FUSED_TAPS = 96
"""Taps up to which a depthwise convolution has a fused backward (`nbcnn.ops.series.dwconv1d.best_backward`)."""


@dataclass(frozen=True)
class DepthwiseTogether(Fused):
    """DepthwiseConv1d or StateSpaceConv1d whose two gradients, of input and filters, are one op."""

    kind: ClassVar[str] = "dwconv"
    ops: ClassVar[tuple[Op, ...]] = (Op("dwconv1d", "bwd"),)

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        return self.parts[0][1].build(tape, x, scope, together=True)


@dataclass(frozen=True)
class GatedPointwise(Fused):
    """glu(pointwise(x)), and `plus` added to it; in training the pointwise convolution's own output is kept for GLU's gradient."""

    kind: ClassVar[str] = "pointwise"
    ops: ClassVar[tuple[Op, ...]] = (Op("pwconv1d", "fprop", after=(Map("glu"),)),)

    @staticmethod
    def takes(x: Buf) -> bool:
        """Whether the fused op takes x: it loads four hours at a time, so L must be a multiple of four."""
        return x.shape[-1] % 4 == 0

    def build(self, tape: Tape, x: Buf, scope: str, plus: Buf | None = None) -> Built:
        """`plus` only for an x that the op takes."""
        (scope, pointwise), (gate, glu) = self.parts
        return gated(tape, x, (pointwise, glu), (scope, gate), plus) if self.takes(x) else trace(tape, self.parts, x)


AT_EACH_HOUR = (GELU, GLU, PointwiseConv1d, GatedPointwise)
"""Layers whose output at an hour depends on their input at that hour only."""


@dataclass(frozen=True)
class LastOfResidual(Fused):
    """LastStep of a Residual: the layers at the end of its body that treat every hour by itself are given (N, C, 1), the last hour.

    Same output and gradients as the plain layers, without what the hours before would cost.
    """

    kind: ClassVar[str] = "residual"
    ops: ClassVar[tuple[Op, ...]] = (Op("last", "fprop"), Op("last", "dgrad"))

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        (name, residual), (last, step) = self.parts
        body = residual.named_body(name)
        cut = hourly_from([layer for _, layer in body])
        inner, inner_backward = trace(tape, body[:cut], x)
        (hour, hour_backward), (kept, kept_backward) = step.build(tape, inner, f"{name}.{last}"), step.build(tape, x, last)
        after, after_backward = trace(tape, body[cut:], hour.reshaped((*hour.shape, 1)))
        y = tape.temp(f"{name}.y", (*kept.shape, 1))
        if after.shape != y.shape:
            raise ShapeError(f"{name}: the body makes {after.shape[1]} channels of {kept.shape[1]}, which cannot be added to its input")
        tape.emit(Op("add"), [after, kept.reshaped(y.shape)], [y], name)

        def backward(dy: Buf) -> Buf:
            dhour = after_backward(dy.reshaped(y.shape))
            dx = tape.temp(f"{name}.dx", x.shape)
            tape.emit(Op("add"), [inner_backward(hour_backward(dhour.reshaped(hour.shape))), kept_backward(dy)], [dx], name)
            return dx

        return y.reshaped(kept.shape), backward


def hourly_from(layers: Sequence[Any]) -> int:
    """Index of the first of the layers at the end that treat every hour by itself; the number of layers if there are none."""
    return next((at + 1 for at in reversed(range(len(layers))) if type(layers[at]) not in AT_EACH_HOUR), 0)


def ends_hourly(parts: Sequence[Any]) -> bool:
    """Whether the Residual's body ends with layers that treat every hour by itself."""
    layers = [layer for _, layer in parts[0].named_body("")]
    return hourly_from(layers) < len(layers)


def few_taps(parts: Sequence[Any]) -> bool:
    """Whether the gradient of the filter fits into the registers of one kernel."""
    return parts[0].kernel_size <= FUSED_TAPS


def gates(parts: Sequence[Any]) -> bool:
    """Whether the pointwise convolution has a bias and an even number of output channels, which GLU halves."""
    return parts[0].bias and parts[0].out_channels % 2 == 0
