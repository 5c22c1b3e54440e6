"""The autoencoder's training plan for any GPU, worked out without one; and the same plan bound to host memory, whose kernels can be compiled."""

from __future__ import annotations

from typing import Any

from nbcnn.gpu.device import Host
from nbcnn.modes import Row
from nbcnn.nn.fuse import fuse
from nbcnn.nn.layers import parameters
from nbcnn.nn.models import autoencoder
from nbcnn.nn.optim import SGD
from nbcnn.nn.params import ParameterBuffer
from nbcnn.plan.graph import Buf, Plan, Tape, drop_dead, lower, named, trace
from nbcnn.plan.shapes import numel
from nbcnn.run.net import resolver
from nbcnn.run.program import Program

IMAGE = (3, 32, 32)
H200 = 132
"""Multiprocessors of the GPU that tiles are chosen for where nothing else is said."""


def training_plan(row: Row, batch: int, *, capability: tuple[int, int] = (9, 0), multiprocessors: int = H200, fusing: bool = True) -> Plan:
    """The steps of one training step on `batch` images, as a session records them: gather, forward, loss, backward, SGD, bookkeeping.

    Raises UsageError if `row` cannot run a step on a GPU of that capability.
    """
    layers, optimizer = autoencoder(), SGD()
    layout = ParameterBuffer(parameters(layers), Host()).layout
    weights, grads = Buf("all weights", (layout.size,), home="param"), Buf("all gradients", (layout.size,), home="grad")
    state, sums = Buf("state", (8,), "int64", "state"), Buf("sums", (4,), "float64", "state")
    moments = [Buf(f"optim.{name}", (layout.size,), home="state") for name in optimizer.moments]
    tape = Tape(training=True)
    x = tape.temp("batch", (batch, *IMAGE))
    images, order = Buf("images", (batch, *IMAGE), "uint8", "io"), Buf("order", (batch,), "int32", "io")
    tape.emit("gather", [images, order, state], [x], "input", flip=False)
    *body, (_, loss) = fuse(named(layers), row.ops if fusing else ())
    y, backward = trace(tape, body, x)
    value, dy = loss.build(tape, y, x, loss.kind)
    backward(dy)
    optimizer.record(tape, weights, grads, moments, Buf("learning rates", (1,), home="io"), state, layout.decayed)
    tape.emit("advance", [value, state, sums], [state, sums], "advance", count=batch)
    return lower(drop_dead(tape.steps), row.layout, resolver(row, multiprocessors, capability), weights, row.store)


def on_host(plan: Plan) -> Program:
    """`plan` bound to host memory that nobody fills: its launches cannot run, but say what would."""
    place = Host()
    params = ParameterBuffer(parameters(autoencoder()), place)
    fixed: dict[Buf, Any] = {}
    for item in plan.steps:
        for buf in (*item.step.ins, *item.step.outs):
            root = buf.root
            if root.name in ("all weights", "all gradients"):
                fixed[root] = params.weights if root.home == "param" else params.grads
            elif root.home in ("io", "state"):
                fixed.setdefault(root, place.empty(numel(root.shape), root.dtype))
    return Program(plan, params, place.empty(plan.arena_bytes, "uint8"), fixed)
