"""The tables of networks for the documentation: training steps and predictions beside PyTorch's. Empty as long as nothing was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbcnn.lab.measure.nets import NETWORKS, PRECISIONS
from nbcnn.lab.report import sections
from nbcnn.lab.report.tables import GPU, folded, footer, named, section
from nbcnn.lab.studies.nets import mean_ratios


def nets() -> str:
    """Every network in every precision, the geometric means of the ratios, and folded below the ops of each training step."""
    found = _sections("nets")
    if not found:
        return ""
    parts = [section(GPU, name) for _, name in found]
    rows = [row for kept, _ in parts for row in kept]
    intro = "**Whole training steps beside PyTorch's**, milliseconds; the ratio is that of its fastest form:\n\n"
    summary = f"\n\nGeometric means: {_means(rows)}. Without the autoencoder, whose kernels are fitted to it most: {_means(_others(rows))}."
    details = [folded(f"where the time of {row['what']} in {row['precision']} goes", sections.spent(row).markdown()) for row in rows if "ops" in row]
    return intro + sections.nets(rows).markdown() + summary + footer(*(environment for _, environment in parts)) + "\n" + "\n".join(details)


def _means(rows: Sequence[dict[str, Any]]) -> str:
    return ", ".join(f"{precision} {mean:.2f}× over {count} network{'s' if count > 1 else ''}" for precision, mean, count in mean_ratios(rows))


def _others(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if not row["what"].startswith("autoencoder")]


def predict() -> str:
    """Predictions of every network in every precision, beside PyTorch's."""
    found = _sections("predict")
    if not found:
        return ""
    parts = [section(GPU, name) for _, name in found]
    intro = "**Predictions beside PyTorch's**, of a whole batch; the ratio is that of the latencies:\n\n"
    made = sections.predictions([row for kept, _ in parts for row in kept])
    return intro + made.markdown() + footer(*(environment for _, environment in parts))


def _sections(kind: str) -> list[tuple[tuple[int, int, str], str]]:
    """The sections of a kind, each behind its place."""
    return sorted((_place(name), name) for name in named(kind))


def _place(name: str) -> tuple[int, int, str]:
    """Where a section stands: by precision, and by network in the order of their definition, own ones last."""
    _, precision, network, *_ = name.split("-")
    return PRECISIONS.index(precision), list(NETWORKS).index(network) if network in NETWORKS else len(NETWORKS), network


TABLES = {"nets": nets, "predict": predict}
