"""The README's tables of training on several GPUs: what was measured on one machine, and what that lets expect of many.

Empty as long as it was not measured, like the tables of `readme_laboratory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Any

from nbcnn.bench.tables import GPU, footer, markdown, measured, section

SECTION = "scaling"
Row = dict[str, Any]


def scaling() -> str:
    """Weak and strong scaling beside PyTorch's, the all-reduce alone, and what was checked before."""
    if not measured(GPU, SECTION):
        return ""
    rows, environment = section(GPU, SECTION)
    steps = [row for row in rows if "step_ms" in row]
    lines = [_line(row, steps) for row in steps if row["form"] == "nbcnn"]
    head = ("precision", "GPUs", "images a step", "ms/step", "images/s", "efficiency", "DistributedDataParallel eager", "compiled")
    most = max(row["ranks"] for row in rows)
    brackets = "in brackets PyTorch's own efficiency, and how many times as many images nbcnn trains a second"
    intro = f"**Measured on {most} GPUs of one machine** ({brackets}):\n\n"
    return intro + markdown(head, lines) + "\n\n" + _reduced(rows) + " " + _checked(rows) + footer(environment)


def _line(row: Row, steps: Sequence[Row]) -> tuple[str, ...]:
    cells = []
    for form in ("PyTorch eager", "PyTorch compile"):
        key = (form, row["what"], row["precision"], row["ranks"])
        peer = next((other for other in steps if (other["form"], other["what"], other["precision"], other["ranks"]) == key), None)
        ratio = f"{row['images_per_second'] / peer['images_per_second']:.2f}×" if peer else ""
        cells.append(f"{peer['step_ms']['median']:.3f} ({peer['efficiency']:.1%}; {ratio})" if peer else "")
    kind = "" if row["ranks"] == 1 else f" ({row['what']})"
    return (
        row["precision"],
        f"{row['ranks']}{kind}",
        f"{row['batch']:,}",
        f"**{row['step_ms']['median']:.3f}**",
        f"{row['images_per_second']:,.0f}",
        f"{row['efficiency']:.1%}",
        *cells,
    )


def _reduced(rows: Sequence[Row]) -> str:
    found = [row for row in rows if row["what"] == "all-reduce"]
    words = {"nbcnn": "in our graph", "PyTorch eager": "enqueued by PyTorch", "PyTorch graph": "in a graph of PyTorch's"}
    times = ", ".join(f"{row['ms']['median'] * 1e3:.1f} µs {words.get(row['form'], row['form'])} on {row['ranks']} GPUs" for row in found)
    return f"The all-reduce of the gradients ({found[0]['bytes'] / 1e6:.1f} MB) alone: {times}." if found else ""


def _checked(rows: Sequence[Row]) -> str:
    found = [row for row in rows if row["what"] == "parity"]
    if not found:
        return ""
    errors = ", ".join(f"{row['precision']} {row['gradient_error']:.0e}" for row in found)
    drifts = ", ".join(f"{row['precision']} {row['drift'] / row['drift_of_splits']:.2f}" for row in found if row["drift_of_splits"])
    return (
        f"Checked before timing: the gradients of a step differ from one GPU's by {errors}; after {found[0]['steps']} steps the weights differ, as a "
        f"part of what another split of the sums on one GPU makes of them, by {drifts}."
    )


@dataclass(frozen=True)
class Link:
    """A network between machines: bytes a second of each machine, and seconds a hop."""

    name: str
    bandwidth: float
    hop: float


LINKS = (
    Link("InfiniBand, 400 Gb/s", 50e9, 10e-6),
    Link("Ethernet, 100 Gb/s", 12.5e9, 30e-6),
    Link("Ethernet, 10 Gb/s", 1.25e9, 50e-6),
)
"""Assumed, not measured."""
MACHINES = (2, 8, 64)


def reduce_seconds(nbytes: int, machines: int, link: Link, inside: float) -> float:
    """An estimate of an all-reduce over `machines`: `inside` seconds within each, then the sums once around, up and down a tree of hops."""
    return inside + 2 * nbytes * (machines - 1) / machines / link.bandwidth + 2 * ceil(log2(machines)) * link.hop


def machines() -> str:
    """What to expect of many machines: an estimate from one GPU's step and the links' data."""
    if not measured(GPU, SECTION):
        return ""
    rows, _ = section(GPU, SECTION)
    reduced = next((row for row in rows if row["what"] == "all-reduce" and row["form"] == "nbcnn"), None)
    alone = {row["precision"]: row for row in rows if row["what"] == "weak" and row["ranks"] == 1 and row["form"] == "nbcnn"}
    if reduced is None or not alone:
        return ""
    precisions = [name for name in ("bf16", "fp32") if name in alone]
    lines = []
    for link in LINKS:
        for number in MACHINES:
            spent = reduce_seconds(reduced["bytes"], number, link, reduced["ms"]["median"] / 1e3)
            cells = []
            for name in precisions:
                step, batch = alone[name]["step_ms"]["median"] / 1e3, alone[name]["batch"]
                cells += [f"{step / (step + spent):.0%}", f"{9 * spent / step * batch:,.0f}"]
            lines.append((link.name, str(number), f"{spent * 1e6:,.0f}", *cells))
    batch = alone[precisions[0]]["batch"]
    columns = [cell for name in precisions for cell in (f"{name}: efficiency at {batch:,} images a GPU", "images a GPU for 90 %")]
    title = "**Estimated, not measured: many machines.** "
    return title + _assumptions(reduced["bytes"]) + "\n\n" + markdown(("link of each machine", "machines", "all-reduce, µs", *columns), lines) + "\n"


def _assumptions(nbytes: int) -> str:
    links = "; ".join(f"{link.name}: {link.bandwidth / 1e9:g} GB/s and {link.hop * 1e6:g} µs a hop" for link in LINKS)
    return (
        f"Each machine adds up its own {nbytes / 1e6:.1f} MB of gradients, then the sums of M machines go around: 2·(M−1)/M of those bytes, and\n"
        f"2·log₂ M hops; nothing is hidden behind the backward pass. Assumed: {links}.\n"
        "The step of one GPU and the all-reduce within a machine are those measured above."
    )


TABLES = {"scaling": scaling, "machines": machines}
