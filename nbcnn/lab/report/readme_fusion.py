"""Tables of the fusion study for the documentation: elementwise ops, EvoNorm, matrix products, the batch sweep, and the MNIST classifier.

Each is a whole paragraph with its title, and empty as long as it was not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbcnn.lab.report import sections
from nbcnn.lab.report.tables import GPU, folded, footer, joined, markdown, named, section

TITLES = {
    "elementwise": "**Elementwise ops beside PyTorch and Triton** (µs per call, replayed as a CUDA graph, operands from memory):",
    "evonorm": "**EvoNorm beside PyTorch and Triton** (µs per call, replayed as a CUDA graph; images of 64×28×28):",
    "gemm": "**Matrix products beside cuBLAS** (TFLOP/s, replayed as a CUDA graph):",
    "sweep": "**Small networks forward, by batch size** (µs per batch, replayed as a CUDA graph):",
}


CONV = "conv+"
"""In the names of cases that are a norm behind a convolution."""


def replayed(name: str, behind_conv: bool = False) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A study's replayed rows, of a norm behind a convolution or of everything else, and where they were measured."""
    shown: list[dict[str, Any]] = []
    where: list[dict[str, Any]] = []
    for one in named("fusion"):
        if f"{one}-".startswith(f"fusion-{name}-"):
            rows, environment = section(GPU, one)
            if of_these := [row for row in rows if row["launch"] == "graph" and (CONV in row["case"]) is behind_conv]:
                shown, where = shown + of_these, [*where, environment]
    return shown, where


def study(name: str) -> str:
    """One study, whatever parts of it were measured: a row for each case, a column for each variant."""
    shown, environments = replayed(name)
    if not shown:
        return ""
    made = sections.cases(name, shown)
    table = made.markdown() + footer(*environments)
    return f"{TITLES[name]}\n\n{table}" if len(made.rows) <= 12 else f"{TITLES[name]}\n\n" + folded(f"{len(made.rows)} cases", table)


def conv_evonorm() -> str:
    """A convolution with its norm: the parts, one after the other, in one; and what the norm adds to the convolution, beside its own kernel."""
    shown, environments = replayed("evonorm", behind_conv=True)
    # "B0 conv+fwd 64 bf16"; fp32 is not said.
    order = sorted({row["case"]: row["precision"] for row in shown}.items(), key=lambda one: (one[1], one[0][:2], int(one[0].split()[2])))
    lines = []
    for case, precision in order:
        us = {row["variant"].removeprefix("nbcnn "): 1e3 * row["ms"]["median"] for row in shown if row["case"] == case}
        if "fused" not in us:
            continue
        conv, norm, fused, infer = us["conv alone"], us["norm alone"], us["fused"], us["fused, inference"]
        added = (f"{(one - conv) / norm:.2f}" for one in (fused, infer))
        label = case.replace(f" {CONV}fwd", "").removesuffix(f" {precision}")
        times = (f"{one:,.1f}" for one in (conv, norm, us["unfused"], fused, infer))
        lines.append((label, precision, *times, *added, f"{us['unfused'] / fused:.2f}×"))
    if not lines:
        return ""
    head = ("norm, batch", "precision", "convolution", "norm", "both, one by one", "fused, training", "fused, inference")
    ratios = ("added ÷ norm, training", "added ÷ norm, inference", "one by one ÷ fused")
    title = "**A convolution with its EvoNorm** (3×3, 64→64, images of 28×28, stored NHWC; µs per call, replayed; added: less the convolution alone):"
    return f"{title}\n\n" + markdown((*head, *ratios), lines) + footer(*environments)


def mnist() -> str:
    """The classifier by seed, and its training step."""
    names = named("mnist")
    if not names:
        return ""
    found = [section(GPU, name) for name in names]
    steps = [f"{row['form']} {row['step_ms']['median'] * 1e3:,.0f} µs" for rows, _ in found for row in rows if row["what"] == "step"]
    run = next(row for row in found[0][0] if row["what"] == "train")
    title = f"**MNIST classifier**, {run['epochs']} epochs of batch 128 (test accuracy; an epoch's training alone):\n\n"
    table = joined([sections.mnist(rows) for rows, _ in found]).without("epochs").markdown()
    return title + table + "\n\nOne training step, replayed: " + ", ".join(dict.fromkeys(steps)) + "." + footer(found[-1][1])


def _table(name: str) -> Callable[[], str]:
    return lambda: study(name)


TABLES: dict[str, Callable[[], str]] = {**{f"fusion_{name}": _table(name) for name in TITLES}, "conv_evonorm": conv_evonorm, "mnist": mnist}
