"""This module prints a plan as a table: op, shapes, implementation, GFLOP, MB, floor, arena offset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbcnn.nn.graphs import Graph
from nbcnn.nn.layer import parameters, sized
from nbcnn.plan.arena import live_bytes
from nbcnn.plan.flops import fewest_flops, step_bytes, step_flops
from nbcnn.plan.graph import Buf, Plan, Planned, Step, Tape, named
from nbcnn.plan.rewriting import joined
from nbcnn.plan.shapes import numel
from nbcnn.run.peaks import Ceilings


def explain(plan: Plan, precision: str = "fp32", ceilings: Ceilings | None = None) -> str:
    """The table; what was fused and what was not, and what else could run a step, with estimated times; the arena's size and the liveness bound.

    With `ceilings`, every step's floor: the longer of its fewest flops at the peak of `precision` and its compulsory bytes
    at the memory's bandwidth. Only Winograd's form can be faster than that.
    """
    rows: list[tuple[str, ...]] = [("step", "op", "in", "out", "runs as", "tile", "GFLOP", "MB", "floor µs", "arena offset")]
    floors = [floor_us(item.step, precision, ceilings) if ceilings else 0.0 for item in plan.steps]
    rows += [_row(plan, item, floor) for item, floor in zip(plan.steps, floors, strict=True)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(w) if i >= 6 else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))) for row in rows]
    total_flops = sum(step_flops(item.step) for item in plan.steps) / 1e9
    total_bytes = sum(step_bytes(item.step) for item in plan.steps) / 1e6
    bound = live_bytes(plan.steps)
    lines += [*fused(plan), *others(plan)]
    lines.append(f"{len(plan.steps)} steps, {total_flops:.2f} GFLOP, {total_bytes:.1f} MB compulsory")
    if ceilings:
        by = f" by {ceilings.engine}" if ceilings.engine and precision != "fp32" else ""
        rate = f"{ceilings.flops[precision] / 1e12:.0f} TFLOP/s{by}"
        lines.append(f"floor {sum(floors) / 1e3:.3f} ms at {rate} and {ceilings.bandwidth / 1e12:.1f} TB/s")
    lines.append(f"arena {plan.arena_bytes / 2**20:.1f} MiB (no arena can be below {bound / 2**20:.1f} MiB)")
    return "\n".join(line.rstrip() for line in lines)


def fused(plan: Plan) -> list[str]:
    """What steps were made of, and what was not fused since it would take longer, with estimated times; alike fusions in one line."""
    lines = []
    for head, fusions in (
        ("what was fused, and the estimated times before and after:", joined(plan.fusions)),
        ("what would take longer fused, and is not:", [each for each in plan.fusions if not each.kept]),
    ):
        found: dict[str, dict[str, None]] = {}
        for each in fusions:
            scopes = "+".join(dict.fromkeys(step.scope for step in each.gone))
            found.setdefault(f"{_parts(each.gone)} -> {_parts(each.come)}", {})[scopes] = None
        lines += [head] * bool(found) + [f"  {' '.join(scopes)}  {words}" for words, scopes in found.items()]
    return lines


def _parts(steps: Mapping[Step, float]) -> str:
    """Steps with their estimates and the sum of these; where no time is known, their ops alone."""
    total = sum(steps.values())
    if not total:
        return " + ".join(str(step.op) for step in steps)
    return " + ".join(f"{step.op} {us:.1f}" for step, us in steps.items()) + (f" = {total:.1f} µs" if len(steps) > 1 else " µs")


def others(plan: Plan) -> list[str]:
    """What else could run steps that have a choice, with estimated times: the chosen implementation first; steps of one choice in one line."""
    found: dict[str, list[str]] = {}
    for item in plan.steps:
        if len(item.how.offered) > 1:
            found.setdefault(f"{item.step.op}: {', '.join(item.how.offered)}", []).append(item.step.scope)
    head = ["what could run a step, the chosen one first, and its estimated time:"] if found else []
    return head + [f"  {' '.join(scopes)}  {words}" for words, scopes in found.items()]


def floor_us(step: Step, precision: str, ceilings: Ceilings) -> float:
    """Microseconds below which a step cannot run: flops or bytes, whichever takes longer."""
    return max(fewest_flops(step) / ceilings.flops[precision], step_bytes(step) / ceilings.bandwidth) * 1e6


def _row(plan: Plan, item: Planned, floor: float) -> tuple[str, ...]:
    step, flops = item.step, step_flops(item.step)
    shapes = [" ".join("×".join(map(str, b.shape)) or "1" for b in bufs[:2]) for bufs in (step.ins, step.outs)]
    tile = "" if item.how.tile is None else "/".join(str(v) for v in vars(item.how.tile).values())
    y = step.outs[0]
    offset = plan.offsets.get(y.root)
    where = y.root.home if offset is None else f"{offset}" if y.first is None else f"{offset}, from channel {y.first} of {y.root.shape[1]}"
    counts = (f"{flops / 1e9:.3f}" if flops else "", f"{step_bytes(step) / 1e6:.2f}", f"{floor:.1f}" if floor else "")
    return (step.scope, str(step.op), *shapes, item.how.mode, tile, *counts, where)


def summary(layers: Sequence[Any], input_shape: tuple[int, ...]) -> str:
    """One line per layer: name, output shape without the batch, parameters; of a graph one line per call, and what it reads."""
    made = sized(layers, input_shape)
    if isinstance(made, Graph):
        counts, rows = parameters(made), made.lines()
    else:
        body = [layer for layer in made if not hasattr(layer, "needs_labels")]
        counts, rows, x, tape = parameters(body), [], Buf("x", (1, *input_shape)), Tape(False)
        for name, layer in named(body):
            x, _ = layer.build(tape, x, name)
            rows.append((name, layer, x.shape[1:], ""))
    lines = []
    for name, layer, shape, reads in rows:
        # A shared layer's parameters stand in the line of its first call.
        own = sum(numel(p.shape) for full, p in counts.items() if full.split(".")[0] == name)
        lines.append(f"{name:12} {type(layer).__name__:12} {'×'.join(map(str, shape)):14} {own:>10,}" + (f"  {reads}" if reads else ""))
    lines.append(f"{'total':40} {sum(numel(p.shape) for p in counts.values()):>10,}")
    return "\n".join(lines)
