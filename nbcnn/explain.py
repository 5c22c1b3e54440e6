"""A plan as a table that people read: op, shapes, implementation, GFLOP, MB, arena offset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbcnn.graph import Buf, Plan, Planned, Step, Tape, live_bytes, named, trace
from nbcnn.layers import parameters
from nbcnn.shapes import ConvShape, numel


def conv_shape(step: Step) -> ConvShape | None:
    """The convolution of a conv_fprop, conv_dgrad or conv_wgrad step; None for another op."""
    if step.op == "conv_fprop":
        x, w = step.ins[0].shape, step.ins[1].shape
    elif step.op == "conv_dgrad":
        x, w = step.outs[0].shape, step.ins[1].shape
    elif step.op == "conv_wgrad":
        x, w = step.ins[0].shape, step.outs[0].shape
    else:
        return None
    n, c, height, width = x
    return ConvShape(n, c, height, width, w[0], w[2], w[3], step.attrs["stride"], step.attrs["pad"])


def step_flops(step: Step) -> int:
    """Multiplications and additions of a step; 0 for everything that is not a convolution (memory-bound)."""
    shape = conv_shape(step)
    return shape.flops() if shape else 0


def step_bytes(step: Step) -> int:
    """Compulsory bytes: every operand once. A gather counts the images that it takes, not the resident set."""
    ins = step.ins if not step.op.startswith("gather") else ()
    return sum(buf.nbytes for buf in (*ins, *step.outs))


def explain(plan: Plan) -> str:
    """The table, then the arena's size beside the liveness bound."""
    rows: list[tuple[str, ...]] = [("step", "op", "in", "out", "runs as", "tile", "GFLOP", "MB", "arena offset")]
    rows += [_row(plan, item) for item in plan.steps]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(w) if i >= 6 else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))) for row in rows]
    total_flops = sum(step_flops(item.step) for item in plan.steps) / 1e9
    total_bytes = sum(step_bytes(item.step) for item in plan.steps) / 1e6
    bound = live_bytes(plan.steps)
    lines.append(f"{len(plan.steps)} steps, {total_flops:.2f} GFLOP, {total_bytes:.1f} MB compulsory;")
    lines.append(f"arena {plan.arena_bytes / 2**20:.1f} MiB (no arena can be below {bound / 2**20:.1f} MiB)")
    return "\n".join(line.rstrip() for line in lines)


def _row(plan: Plan, item: Planned) -> tuple[str, ...]:
    step, flops = item.step, step_flops(item.step)
    shapes = [" ".join("×".join(map(str, b.shape)) or "1" for b in bufs[:2]) for bufs in (step.ins, step.outs)]
    tile = "" if item.how.tile is None else "/".join(str(v) for v in vars(item.how.tile).values())
    offset = plan.offsets.get(step.outs[0].root)
    place = step.outs[0].root.home if offset is None else f"{offset}"
    return (step.scope, step.op, *shapes, item.how.mode, tile, f"{flops / 1e9:.3f}" if flops else "", f"{step_bytes(step) / 1e6:.2f}", place)


def summary(layers: Sequence[Any], input_shape: tuple[int, ...]) -> str:
    """One line per layer: name, output shape without the batch, parameters."""
    body = [layer for layer in layers if not hasattr(layer, "needs_labels")]
    counts = parameters(body)
    lines, x = [], Buf("x", (1, *input_shape))
    for at, (name, layer) in enumerate(named(body), 1):
        y, _ = trace(Tape(False), named(body[:at]), x)
        own = sum(numel(p.shape) for full, p in counts.items() if full.split(".")[0] == name)
        lines.append(f"{name:12} {type(layer).__name__:12} {'×'.join(map(str, y.shape[1:])):14} {own:>10,}")
    lines.append(f"{'total':40} {sum(numel(p.shape) for p in counts.values()):>10,}")
    return "\n".join(lines)
