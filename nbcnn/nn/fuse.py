"""This module defines the one fused layer: LastStep behind a Residual. All other fusion is on the recorded steps (`nbcnn.plan.merging`).

Residual, LastStep    LastOfResidual: the layers at the body's end that treat every hour by itself compute the last hour only
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from nbcnn.nn.activations import GELU
from nbcnn.nn.layer import Built, Param
from nbcnn.nn.layers import Residual
from nbcnn.nn.series_layers import GLU, LastStep, PointwiseConv1d
from nbcnn.plan.graph import Buf, Named, ShapeError, Tape, Wired, trace
from nbcnn.plan.op import Op

AT_EACH_HOUR = (GELU, GLU, PointwiseConv1d)
"""Layers whose output at an hour depends on their input at that hour only."""


@dataclass(frozen=True)
class LastOfResidual:
    """LastStep of a Residual: the layers at the end of its body that treat every hour by itself are given (N, C, 1), the last hour.

    Same output and gradients as the plain layers, without what the hours before would cost.
    """

    residual: Residual
    last: Named
    kind: ClassVar[str] = "residual"
    ops: ClassVar[tuple[Op, ...]] = (Op("last", "fprop"), Op("last", "dgrad"))

    def params(self) -> dict[str, Param]:
        return self.residual.params()

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        last, step = self.last
        body = self.residual.named_body(scope)
        cut = hourly_from(self.residual.body)
        inner, inner_backward = trace(tape, body[:cut], x)
        (hour, hour_backward), (kept, kept_backward) = step.build(tape, inner, f"{scope}.{last}"), step.build(tape, x, last)
        after, after_backward = trace(tape, body[cut:], hour.reshaped((*hour.shape, 1)))
        y = tape.temp(f"{scope}.y", (*kept.shape, 1))
        if after.shape != y.shape:
            raise ShapeError(f"{scope}: the body makes {after.shape[1]} channels of {kept.shape[1]}, which cannot be added to its input")
        tape.emit(Op("add"), [after, kept.reshaped(y.shape)], [y], scope)

        def backward(dy: Buf) -> Buf:
            dhour = after_backward(dy.reshaped(y.shape))
            dx = tape.temp(f"{scope}.dx", x.shape)
            tape.emit(Op("add"), [inner_backward(hour_backward(dhour.reshaped(hour.shape))), kept_backward(dy)], [dx], scope)
            return dx

        return y.reshaped(kept.shape), backward


def hourly_from(layers: Sequence[Any]) -> int:
    """Index of the first of the layers at the end that treat every hour by itself; the number of layers if there are none."""
    return next((at + 1 for at in reversed(range(len(layers))) if type(layers[at]) not in AT_EACH_HOUR), 0)


def fuse_nodes(wired: Wired, ops: Container[Op]) -> Wired:
    """`wired` with a LastOfResidual in place of every Residual that a LastStep alone reads, if its ops are all among `ops`."""
    readers = Counter(at for node in wired.nodes for at in node.reads) + Counter(wired.outputs)
    last = {node.reads[0]: node for node in wired.nodes if type(node.layer) is LastStep and readers[node.reads[0]] == 1}
    made, gone = [], set[int]()
    for node in wired.nodes:
        step = last.get(node.writes)
        fits = step is not None and type(node.layer) is Residual and hourly_from(node.layer.body) < len(node.layer.body)
        if step is not None and fits and all(op in ops for op in LastOfResidual.ops):
            node = node._replace(layer=LastOfResidual(node.layer, (step.name, step.layer)), writes=step.writes)
            gone.add(step.writes)
        elif node.writes in gone:
            continue
        made.append(node)
    return replace(wired, nodes=tuple(made))
