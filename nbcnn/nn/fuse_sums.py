"""This module defines the fused layers of sums; their rules stand in `fuse.py`.

    AddReLU         relu of a sum of two values; one step of the backward pass masks the gradient for both
    FusedResidual   a Residual whose body is fused; a GatedPointwise at the body's end adds the residual's input

Sums that a norm computes on its way are in `fuse_norms.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from nbcnn.nn.fuse_series import GatedPointwise
from nbcnn.nn.fused import Fused, unmasked
from nbcnn.nn.joins import Joined
from nbcnn.nn.layer import Built, Param
from nbcnn.nn.layers import add_gradient, add_input
from nbcnn.plan.graph import Buf, Named, Tape, trace
from nbcnn.plan.op import Map, Op


@dataclass(frozen=True)
class AddReLU(Fused):
    """relu(a + b) in one launch; of more than two values the plain layers."""

    kind: ClassVar[str] = "add"
    joins: ClassVar[bool] = True
    ops: ClassVar[tuple[Op, ...]] = (Op("add", after=(Map("relu"),)),)

    def build(self, tape: Tape, xs: Sequence[Buf], scope: str) -> Joined:
        (name, add), (after, relu) = self.parts
        if len(xs) != 2 or xs[0].shape != xs[1].shape:
            total, add_backward = add.build(tape, xs, name)
            y, relu_backward = relu.build(tape, total, after)
            return y, lambda dy: add_backward(relu_backward(dy))
        y = tape.temp(f"{scope}.y", xs[0].shape, after_relu=True)
        tape.emit(Op("add", after=(Map("relu"),)), xs, [y], scope)

        def backward(dy: Buf) -> list[Buf]:
            dz = unmasked(tape, dy, y, scope)
            # The mask is y's: as the gradient of a and of b it is not called masked.
            return [replace(dz, base=dz.root, masked=False)] * 2

        return y, backward


@dataclass(frozen=True)
class FusedResidual:
    """A Residual with the layers of its body fused; they keep their names."""

    body: tuple[Named, ...]
    inner: dict[str, Param]
    kind: ClassVar[str] = "residual"

    def params(self) -> dict[str, Param]:
        return self.inner

    def named_body(self, scope: str) -> list[Named]:
        """The layers of the body with their names."""
        return list(self.body)

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        *before, (name, last) = self.body
        if not isinstance(last, GatedPointwise) or not last.takes(x):
            return add_input(tape, self.body, x, scope)
        inner, before_backward = trace(tape, before, x)
        y, backward = last.build(tape, inner, name, plus=x)
        return y, lambda dy: add_gradient(tape, before_backward(backward(dy)), dy, scope)
