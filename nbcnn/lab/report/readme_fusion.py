"""Tables of the fusion study for the documentation: elementwise ops, EvoNorm, matrix products, the batch sweep, and the MNIST classifier.

Each is a whole paragraph with its title, and empty as long as it was not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbcnn.lab.report import sections
from nbcnn.lab.report.tables import GPU, folded, footer, joined, markdown, named, section

TITLES = {
    "elementwise": "**Elementwise ops beside PyTorch and Triton** (µs per call, replayed as a CUDA graph, operands from memory):",
    "evonorm": "**EvoNorm beside PyTorch and Triton** (µs per call, replayed as a CUDA graph; images of 64×28×28):",
    "gemm": "**Matrix products beside cuBLAS** (TFLOP/s, replayed as a CUDA graph):",
    "sweep": "**Small networks forward, by batch size** (µs per batch, replayed as a CUDA graph):",
}


PRODUCTS = "fusion-gemm"
HEATMAPS = {metric: f"gemm-{metric}.png" for metric in ("latency", "memory", "throughput", "efficiency")}
"""The pictures of the matrix products, by what they show."""
_PICTURES = "../../nbcnn/lab/results"
CONV, NARROW = "conv+", "→"
"""In the names of cases that are a norm behind a convolution, and of those whose convolution makes another number of channels."""


def replayed(name: str, *has: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A study's replayed rows whose cases' names have `has` and no other of `CONV` and `NARROW`, and where they were measured."""
    shown: list[dict[str, Any]] = []
    where: list[dict[str, Any]] = []
    for one in named("fusion"):
        if f"{one}-".startswith(f"fusion-{name}-"):
            rows, environment = section(GPU, one)
            if of_these := [row for row in rows if row["launch"] == "graph" and all((it in row["case"]) is (it in has) for it in (CONV, NARROW))]:
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
    shown, environments = replayed("evonorm", CONV)
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


def published_evonorm() -> str:
    """A convolution from 64 to 32 channels with its norm, at the presentation's own shapes, beside PyTorch and Triton."""
    shown, environments = replayed("evonorm", CONV, NARROW)
    if not shown:
        return ""
    title = "**EvoNorm behind a convolution, beside PyTorch and Triton** (3×3, 64→32, images of 28×28, fp32; µs per call, replayed as a CUDA graph):"
    return f"{title}\n\n" + sections.cases("conv and norm", shown).markdown() + footer(*environments)


def mnist() -> str:
    """The classifier by seed, and its training step."""
    names = named("mnist")
    if not names:
        return ""
    found = [section(GPU, name) for name in names]
    steps = [f"{row['form']} {row['step_ms']['median'] * 1e3:,.0f} µs" for rows, _ in found for row in rows if row["what"] == "step"]
    run = next(row for row in found[0][0] if row["what"] == "train")
    title = (
        f"**MNIST classifier**, {run['epochs']} epochs of batch 128 (shares of images that are classified rightly; an epoch's training alone):\n\n"
    )
    table = joined([sections.mnist(rows) for rows, _ in found]).without("epochs").filled().markdown()
    return title + table + "\n\nOne training step, replayed: " + ", ".join(dict.fromkeys(steps)) + "." + footer(found[-1][1])


def products() -> str:
    """The matrix products with their heat maps: latency, memory, throughput, efficiency."""
    if not (table := study("gemm")):
        return ""
    shown = [f"![{metric} of matrix products, ours and cuBLAS’s]({_PICTURES}/{name})" for metric, name in HEATMAPS.items()]
    words = "Heat maps of the same products; the right half of each is the ratio to cuBLAS in fp32:"
    return f"{table}\n{words}\n\n" + "\n\n".join(shown) + "\n"


def charts(folder: Path) -> None:
    """The heat maps of the matrix products, of what was measured."""
    from nbcnn.lab.studies import heatmaps

    rows, _ = replayed("gemm")
    for metric, name in HEATMAPS.items() if rows else ():
        heatmaps.picture(folder / name, rows, metric, "graph")


def _table(name: str) -> Callable[[], str]:
    return lambda: study(name)


TABLES: dict[str, Callable[[], str]] = {
    **{f"fusion_{name}": _table(name) for name in TITLES},
    "fusion_gemm": products,
    "conv_evonorm": conv_evonorm,
    "published_evonorm": published_evonorm,
    "mnist": mnist,
}
