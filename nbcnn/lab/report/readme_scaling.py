"""Tables of training on several GPUs for the documentation: what was measured on one machine, and what that lets expect of many.

Empty as long as it was not measured, like the tables of `readme_laboratory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Any

from nbcnn.lab.report import sections
from nbcnn.lab.report.tables import GPU, footer, markdown, measured, named, section
from nbcnn.lab.studies.scaling import DRIFT

Row = dict[str, Any]


def scaling() -> str:
    """Weak and strong scaling beside PyTorch's, the all-reduce alone, and what was checked before; most GPUs first."""
    return "\n".join(_measured(*section(GPU, name)) for name in reversed(named("scaling")))


def _measured(rows: Sequence[Row], environment: dict[str, Any]) -> str:
    most = max(row["ranks"] for row in rows)
    brackets = "in brackets PyTorch's own efficiency, and how many times as many images nbcnn trains per second"
    intro = f"**Measured on {most} GPUs of one machine** ({brackets}):\n\n"
    checked = sections.parity(rows)
    apart = "**Checked before timing: how far the GPUs are from one** (‖difference‖ / ‖one GPU's‖). The last ratio may be"
    parity = f"{apart} {DRIFT:g}:\n\n{checked.markdown()}\n\n" if checked else ""
    return intro + sections.scaling(rows).markdown() + "\n\n" + parity + sections.reduced(rows) + footer(environment)


@dataclass(frozen=True)
class Link:
    """A network between machines: bytes per second of each machine, and seconds per hop."""

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
GRADIENT_BYTES = 3_007_744
"""Bytes of the autoencoder's gradients: 751,875 float32, and the padding between them."""
STEPS = {"bf16": "step-tensorcore-bf16-1024", "fp32": "step-tensorcore-fp32-1024"}
ASSUMED_INSIDE = 40e-6
"""Seconds of an all-reduce within a machine, as long as nobody has measured it."""


def reduce_seconds(nbytes: int, machines: int, link: Link, inside: float) -> float:
    """An estimate of an all-reduce over `machines`: `inside` seconds within each, then the sums once around, up and down a tree of hops."""
    return inside + 2 * nbytes * (machines - 1) / machines / link.bandwidth + 2 * ceil(log2(machines)) * link.hop


def machines() -> str:
    """What to expect of many machines: an estimate from the measured step of one GPU, the bytes of the gradients and the links' data."""
    steps = {precision: section(GPU, name) for precision, name in STEPS.items() if measured(GPU, name)}
    if not steps:
        return ""
    alone = {precision: rows[0] for precision, (rows, _) in steps.items()}
    rows = [row for name in reversed(named("scaling")) for row in section(GPU, name)[0]]
    reduced = next((row["ms"]["median"] / 1e3 for row in rows if row["what"] == "all-reduce" and row["form"] == "nbcnn"), None)
    inside = ASSUMED_INSIDE if reduced is None else reduced
    lines = []
    for link in LINKS:
        for number in MACHINES:
            spent = reduce_seconds(GRADIENT_BYTES, number, link, inside)
            cells = []
            for row in alone.values():
                step = row["step_ms"]["median"] / 1e3
                cells += [f"{step / (step + spent):.0%}", f"{9 * spent / step * row['batch']:,.0f}"]
            lines.append((link.name, str(number), f"{spent * 1e6:,.0f}", *cells))
    columns = [cell for precision in alone for cell in (f"{precision}: efficiency at 1,024 images per GPU", "images per GPU for 90 %")]
    title = "**Estimated, not measured: many machines.** "
    text = _assumptions(alone, inside, reduced is not None)
    return title + text + "\n\n" + markdown(("link of each machine", "machines", "all-reduce, µs", *columns), lines) + "\n"


def _assumptions(alone: dict[str, Row], inside: float, known: bool) -> str:
    steps = ", ".join(f"{row['step_ms']['median']:.2f} ms in {precision}" for precision, row in alone.items())
    links = "; ".join(f"{link.name}: {link.bandwidth / 1e9:g} GB/s, {link.hop * 1e6:g} µs per hop" for link in LINKS)
    source = "measured" if known else "assumed"
    return (
        f"A step of 1,024 images takes one GPU {steps} (measured). Each machine adds up its own {GRADIENT_BYTES / 1e6:.1f} MB of gradients\n"
        f"({inside * 1e6:.0f} µs, {source}), then the sums of M machines go around: 2·(M−1)/M of those bytes and 2·log₂ M hops; nothing is hidden\n"
        f"behind the backward pass. Assumed of the links: {links}.\n"
        "Where the all-reduce takes a ninth of the step, efficiency is 90 %: more machines pay from the images per GPU in the last columns on."
    )


TABLES = {"scaling": scaling, "machines": machines}
