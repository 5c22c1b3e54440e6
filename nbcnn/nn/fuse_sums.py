"""This module defines FusedResidual, a Residual whose body is fused: a GatedPointwise at the body's end adds the residual's input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nbcnn.nn.fuse_series import GatedPointwise
from nbcnn.nn.layer import Built, Param
from nbcnn.nn.layers import add_gradient, add_input
from nbcnn.plan.graph import Buf, Named, Tape, trace


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
