"""This module compares two ways to run one op: the difference of their results, their times, their kernels' resources, and the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbcnn.check import gradcheck
from nbcnn.lab.measure.op import Choice, Prepared, full_bound, prepare, study
from nbcnn.lab.measure.opcases import Problem
from nbcnn.lab.measure.resources import resources


def compare(a: Choice, b: Choice, problem: Problem, watch_for: Any, *, caches: Sequence[str], iterations: int, cap: float = 3.0) -> dict[str, Any]:
    """Everything that `text` shows. `watch_for(device)` gives the context manager that reads clocks.

    Raises NotTimed if one of them fails parity.
    """
    made = [prepare(choice, problem, rotate="rotate" in caches) for choice in (a, b)]
    outputs = difference(*made)
    gpu = next((each.device for each in made if each.device.name == "gpu"), made[0].device)
    with watch_for(gpu) as watch:
        rows = list(study(made, watch, caches=caches, iterations=(iterations,), graphs=(gpu.name == "gpu",), cap=cap))
    return {
        "op": str(problem.op),
        "variants": [each.label for each in made],
        "parity": [{"error": each.error, "bound": each.limit} for each in made],
        "outputs": outputs,
        "bound": sum(full_bound(problem, each.row.precision) for each in made),
        "times": rows,
        "kernels": [[found for launch in each.bounds[0].launches if (found := resources(launch))] for each in made],
    }


def difference(a: Prepared, b: Prepared) -> list[dict[str, float]]:
    """How far apart each output of the two is on the same operands: ‖a − b‖ / ‖b‖ and the largest |a − b|; of integers, the part that differs."""
    for each in (a, b):
        each.bounds[0].run()
    rows = []
    for x, y in zip(a.bounds[0].results(), b.bounds[0].results(), strict=True):
        if x.dtype.kind in "iu":
            rows.append({"differing": float(np.mean(x != y))})
        else:
            largest = np.max(np.abs(x.astype(np.float64) - y.astype(np.float64)), initial=0.0)
            rows.append({"relative": gradcheck.relative_error(x, y), "largest": float(largest)})
    return rows


def text(found: dict[str, Any]) -> list[str]:
    """The comparison for people."""
    a, b = found["variants"]
    lines = [f"{found['op']}: A = {a}, B = {b}", "", "results"]
    for name, parity in zip("AB", found["parity"], strict=True):
        lines.append(f"  {name} against the float64 reference: {parity['error']:.1e} (bound {parity['bound']:.1e})")
    for at, output in enumerate(found["outputs"]):
        if "differing" in output:
            lines.append(f"  output {at}, integers: {output['differing'] * 100:.4g} % differ")
        else:
            within = "within" if output["relative"] <= found["bound"] else "OVER"
            apart = f"‖A − B‖ / ‖B‖ = {output['relative']:.1e}, largest |A − B| {output['largest']:.1e}"
            lines.append(f"  output {at}: {apart} ({within} both bounds together, {found['bound']:.1e})")
    lines += ["", f"{'time':8}{'A µs':>10}{'B µs':>10}{'A / B':>9}{'95 % interval':>18}{'A % of roof':>13}{'B % of roof':>13}"]
    for one, other in zip(found["times"][::2], found["times"][1::2], strict=True):
        ratio = other["times_the_first"]
        interval = f"[{1 / ratio['high']:.3f}, {1 / ratio['low']:.3f}]"
        roofs = "".join(f"{row['roofline'] * 100:13.0f}" if row["roofline"] else f"{'':13}" for row in (one, other))
        times = f"{one['ms']['median'] * 1e3:10.2f}{other['ms']['median'] * 1e3:10.2f}{1 / ratio['ratio']:9.3f}"
        lines.append(f"{one['cache']:8}{times}{interval:>18}{roofs}{'' if one['steady'] else '  not steady'}")
    lines += ["", *verdict(found)]
    kernels = [(name, kernel) for name, group in zip("AB", found["kernels"], strict=True) for kernel in group]
    if kernels:
        head = f"  {'kernel':34}{'blocks':>9}{'threads':>9}{'registers':>11}{'spilled B':>11}{'shared B':>10}"
        head += f"{'blocks/SM':>11}{'warps/SM':>10}{'occupancy':>11}  limited by"
        lines += ["", head]
    for name, kernel in kernels:
        sizes = f"{kernel['blocks']:>9}{kernel['threads']:>9}{kernel['registers']:>11}{kernel['local_bytes']:>11}{kernel['shared_bytes']:>10}"
        held = f"{kernel['resident_blocks']:>11}{kernel['resident_warps']:>10}{kernel['occupancy'] * 100:>9.0f} %"
        lines.append(f"{name} {kernel['kernel']:34}{sizes}{held}  {kernel['limited_by'] or ''}".rstrip())
    return lines


def verdict(found: dict[str, Any]) -> list[str]:
    """Which is faster, if the interval says so, and where both stand under the roof."""
    lines = []
    a, b = found["variants"]
    for one, other in zip(found["times"][::2], found["times"][1::2], strict=True):
        ratio = other["times_the_first"]
        if ratio["low"] <= 1 <= ratio["high"]:
            lines.append(f"{one['cache']}: no difference that the interval excludes")
            continue
        fast, slow, gain = (a, b, ratio["ratio"]) if ratio["ratio"] > 1 else (b, a, 1 / ratio["ratio"])
        moved = ""
        if one["roofline"] and other["roofline"]:
            first, second = (other, one) if fast == a else (one, other)
            moved = f"; from {first['roofline'] * 100:.0f} to {second['roofline'] * 100:.0f} % of the roofline"
            moved += f" ({first['gbytes_per_second']:.0f} to {second['gbytes_per_second']:.0f} GB/s of compulsory bytes"
            moved += f", {first['tflops']:.1f} to {second['tflops']:.1f} TFLOP/s)" if first["tflops"] else ")"
        lines.append(f"{one['cache']}: {fast} is {gain:.3f} times as fast as {slow}{moved}")
    return lines
