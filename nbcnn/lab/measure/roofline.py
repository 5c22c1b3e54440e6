"""This module makes the roofline without counters: every step of a training plan is a point, under measured ceilings and the datasheet's.

Flops are those that a step means (`flops.fewest_flops`: behind an upsampling nine of 36 products; Winograd's form needs fewer still, so its
points may lie above the roof). Bytes come twice: *compulsory*, every operand once, and *logical*, what the kernels ask for with their tiles
(`nbcnn.ops.kernel.traffic`); between them lies what really goes to DRAM. A step's attainable time takes the compulsory ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from nbcnn.lab.measure.steps import time_steps
from nbcnn.lab.measure.timing import Timing
from nbcnn.modes import named
from nbcnn.ops.conv.wgmma.split import PLANES, PRODUCTS
from nbcnn.ops.kernel.call import planned_call
from nbcnn.ops.kernel.traffic import Traffic, total
from nbcnn.plan.flops import fewest_flops, step_bytes
from nbcnn.plan.graph import Plan, Planned
from nbcnn.run.peaks import Ceilings, peaks_of

LATENCY_SHARE = 0.3
"""A step that reaches less of both roofs than this is held up by neither."""

Roofs = Mapping[str, float]
"""flop/s of "fp32", "tf32" and "bf16", of a GPU without these "fp16", byte/s of "copy"."""


def traffic_of(plan: Plan, item: Planned) -> list[Traffic] | None:
    """What each launch of a step asks memory for; None if nobody has worked it out."""
    count = item.how.impl.traffic
    return None if count is None else list(count(planned_call(item, plan.layout)))


def peak(roofs: Roofs, mode: str, precision: str, part: str) -> float:
    """flop/s that `part` of a row can reach."""
    if mode == "tensorcore" and part != "cudacore":
        return roofs["bf16"] / len(PRODUCTS[PLANES]) if precision == "fp32" else roofs[_roof(roofs, precision)]
    return roofs["fp32"]


def _roof(roofs: Roofs, precision: str) -> str:
    """The roof of products in a precision of tensor cores: fp16 has bf16's where that is known."""
    return "bf16" if precision == "fp16" and "bf16" in roofs else precision


def point(plan: Plan, item: Planned, timing: Timing, roofs: Roofs, mode: str, precision: str) -> dict[str, Any]:
    """One step: flops, bytes, time, the time that the measured roofs allow, and what holds it up."""
    flops, least = fewest_flops(item.step), step_bytes(item.step)
    launches = traffic_of(plan, item)
    roof = peak(roofs, mode, precision, item.how.mode)
    compute_ms, memory_ms = flops / roof * 1e3, least / roofs["copy"] * 1e3
    attainable = max(compute_ms, memory_ms)
    fraction = attainable / timing.median
    limiter = "latency/launch" if fraction < LATENCY_SHARE else "compute" if compute_ms > memory_ms else "memory"
    return {
        "scope": item.step.scope,
        "op": str(item.step.op),
        "runs_as": item.how.mode,
        "tile": None if item.how.tile is None else asdict(item.how.tile),
        "flops": flops,
        "compulsory_bytes": least,
        "logical_bytes": None if launches is None else total(launches).logical,
        "ms": timing.as_dict(),
        "attainable_ms": round(attainable, 6),
        "limiter": limiter,
        "fraction": round(fraction, 4),
    }


def measure(session: Any, measured: Roofs) -> dict[str, Any]:
    """All points of a session's training step, the ceilings, and the sum of the steps beside the whole."""
    program, net = session.program, session.net
    times = time_steps(session)
    points = [
        point(program.plan, item, timing, measured, net.mode, net.precision) for (item, _), timing in zip(program.bound, times.steps, strict=True)
    ]
    return {
        "mode": net.mode,
        "precision": net.precision,
        "batch": session.batch,
        "device": net.device_name,
        "points": points,
        "ceilings": {"measured": dict(measured), "datasheet": datasheet(peaks_of(net.device, net.row))},
        "whole_step_ms": times.whole.median,
        "sum_ms": sum(timing.median for timing in times.steps),
        "event_ms": round(times.event_ms, 6),
    }


def datasheet(ceilings: Ceilings | None) -> dict[str, float] | None:
    """The GPU's peaks from its clocks and widths, under the names of the measured ones; None where they are not known."""
    if ceilings is None:
        return None
    names = ("fp32", "tf32", "bf16") if ceilings.flops["bf16"] > ceilings.flops["fp32"] else ("fp32", "fp16")
    return {name: ceilings.flops[name] for name in names} | {"copy": ceilings.bandwidth}


def table(found: Mapping[str, Any]) -> str:
    """The points as text, and how the sum of the steps compares with the whole."""
    head = (
        "step",
        "op",
        "runs as",
        "GFLOP",
        "MB least",
        "MB logical",
        "µs",
        "attainable",
        "reached",
        "GB/s least",
        "GB/s logical",
        "TFLOP/s",
        "limiter",
    )
    lines: list[tuple[str, ...]] = [head]
    for row in found["points"]:
        ms, logical = row["ms"]["median"], row["logical_bytes"]
        lines.append(
            (
                row["scope"],
                row["op"],
                row["runs_as"],
                f"{row['flops'] / 1e9:.3f}" if row["flops"] else "",
                f"{row['compulsory_bytes'] / 1e6:.2f}",
                f"{logical / 1e6:.2f}" if logical is not None else "–",
                f"{ms * 1e3:.1f}",
                f"{row['attainable_ms'] * 1e3:.1f}",
                f"{row['fraction'] * 100:.0f} %",
                f"{row['compulsory_bytes'] / ms / 1e6:,.0f}",
                f"{logical / ms / 1e6:,.0f}" if logical is not None else "–",
                f"{row['flops'] / ms / 1e9:.1f}" if row["flops"] else "",
                row["limiter"],
            )
        )
    text = aligned(lines, (0, 1, 2, 12))
    text += [ceilings_line(name, roofs) for name, roofs in found["ceilings"].items()]
    off = found["sum_ms"] / found["whole_step_ms"] - 1
    text.append(f"sum of the steps {found['sum_ms']:.3f} ms, the whole step as one CUDA graph {found['whole_step_ms']:.3f} ms ({off:+.1%})")
    text.append(f"Steps are timed by events between them; what an event costs, {found['event_ms'] * 1e3:.1f} µs, was measured and taken off each.")
    text.append(
        "least: every operand once; logical: what the kernels ask for with these tiles, mostly out of L2. Attainable: least bytes, measured ceilings."
    )
    if any(named(row["op"]).kind == "upconv" for row in found["points"]):
        text.append("A convolution behind an upsampling counts the nine of 36 products that it needs.")
    return "\n".join(line.rstrip() for line in text)


def aligned(lines: Sequence[Sequence[str]], words: Sequence[int]) -> list[str]:
    """Lines of cells in columns; the columns `words` begin at the left, the others end at the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(c.ljust(w) if i in words else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))) for line in lines]


def ceilings_line(name: str, roofs: Roofs | None) -> str:
    """One kind of ceilings in words."""
    if roofs is None:
        return f"{name} ceilings: not known for this GPU"
    parts = [f"{key} {roofs[key] / 1e12:,.1f} TFLOP/s" for key in ("fp32", "tf32", "bf16", "fp16") if key in roofs]
    return f"{name} ceilings: {', '.join(parts)}, copy {roofs['copy'] / 1e12:.2f} TB/s"


def chart(found: Mapping[str, Any], path: Any, title: str) -> None:
    """Points over flops per byte, by compulsory bytes (filled) and logical ones (hollow), under both kinds of roofs; PNG or SVG by the suffix."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    points = [row for row in found["points"] if row["flops"]]
    figure, axes = plt.subplots(figsize=(9, 5.6), layout="constrained")
    intensities = [row["flops"] / row[which] for row in points for which in ("compulsory_bytes", "logical_bytes") if row[which]]
    low, high = min(intensities, default=1.0) / 3, max(intensities, default=1000.0) * 4
    for kind, style in (("measured", "-"), ("datasheet", ":")):
        roofs = found["ceilings"][kind]
        if roofs:
            _roofs(axes, roofs, used(found), (low, high), kind, style)
    colours = dict(zip(PASSES, ("#389826", "#cb3c33", "#9558b2"), strict=True))
    for row in points:
        rate, colour = row["flops"] / row["ms"]["median"] / 1e9, colours[pass_of(row["op"]) or "fprop"]
        axes.plot(row["flops"] / row["compulsory_bytes"], rate, "o", color=colour)
        axes.annotate(row["scope"], (row["flops"] / row["compulsory_bytes"], rate), textcoords="offset points", xytext=(5, 4), fontsize=7)
        if row["logical_bytes"]:
            axes.plot(row["flops"] / row["logical_bytes"], rate, "o", color=colour, fillstyle="none", markersize=4)
    for name, colour in colours.items():
        axes.plot([], [], "o", color=colour, label=name)
    axes.plot([], [], "o", color="#666666", label="compulsory bytes")
    axes.plot([], [], "o", color="#666666", fillstyle="none", markersize=4, label="logical bytes")
    axes.set(xscale="log", yscale="log", xlabel="flops per byte", ylabel="TFLOP/s", xlim=(low, high), title=title)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


PASSES = ("fprop", "dgrad", "wgrad")


def pass_of(op: str) -> str | None:
    """fprop, dgrad or wgrad; None for an op outside the passes."""
    direction = named(op).direction
    return direction if direction in PASSES else None


def used(found: Mapping[str, Any]) -> list[str]:
    """Which compute ceilings the mode runs under."""
    if found["mode"] != "tensorcore":
        return ["fp32"]
    return ["bf16"] if found["precision"] == "fp32" else [_roof(found["ceilings"]["measured"], found["precision"])]


def _roofs(axes: Any, roofs: Roofs, names: Sequence[str], span: tuple[float, float], kind: str, style: str) -> None:
    low, high = span
    best = max(roofs[name] for name in names)
    ridge = best / roofs["copy"]
    axes.plot([low, ridge], [low * roofs["copy"] / 1e12, best / 1e12], style, color="#333333", linewidth=1)
    for name in names:
        axes.plot([roofs[name] / roofs["copy"], max(high, 2 * ridge)], [roofs[name] / 1e12] * 2, style, color="#333333", linewidth=1)
        axes.annotate(f"{kind} {name}", (high, roofs[name] / 1e12), ha="right", va="bottom", fontsize=7, annotation_clip=True)
