"""The measured parts of docs/ladder.md and docs/hopper-ladder.md: each whole climb, and a line per step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nbcnn.lab.measure.phase import SERIAL
from nbcnn.lab.report import sections
from nbcnn.lab.report.tables import GPU, footer, measured, section
from nbcnn.lab.studies.kernel_ladders import LADDERS, Ladder

DOCS = Path(__file__).parents[3] / "docs"
PAGES = {"climb": DOCS / "ladder.md", "sums": DOCS / "ladder.md", "hopper": DOCS / "hopper-ladder.md"}
"""The page that climbs a ladder."""


def section_of(ladder: Ladder) -> str:
    """The section of results that the page shows."""
    return f"{ladder.name}-{ladder.batch}"


def climb(ladder: Ladder) -> str:
    """Every rung; nothing before they are measured."""
    if not measured(GPU, section_of(ladder)):
        return ""
    rows, environment = section(GPU, section_of(ladder))
    return sections.kernel_ladder(rows).markdown() + footer(environment)


def of_step(ladder: Ladder, name: str) -> str:
    """One step's figures in a sentence, beside those of the rung before; nothing before they are measured."""
    if not measured(GPU, section_of(ladder)):
        return ""
    rows, _ = section(GPU, section_of(ladder))
    at = next(at for at, row in enumerate(rows) if row["variant"] == name)
    row, before = rows[at], rows[at - 1] if at else None
    rate = _rate(row)
    times = "" if before is None else f", {sections.gain(row['over_before'])} times as fast as {_name(before)} ({_rate(before)})"
    return f"Measured: **{rate}**, {row['ms']['median'] * 1e3:,.0f} µs{times}.\n"


def _rate(row: dict[str, Any]) -> str:
    return f"{row['tflops']:.3g} TFLOP/s" if row["tflops"] else f"{row['gb_per_second']:,.0f} GB/s"


def _name(row: dict[str, Any]) -> str:
    name = str(row["variant"])
    return f"step {name.split()[0]}" if name[0].isdigit() else f"the {name} loops" if name == "serial" else name


TABLES: dict[str, Callable[[], str]] = {
    **{name: partial(climb, ladder) for name, ladder in LADDERS.items()},
    **{f"{name}_{step.name.split()[0]}": partial(of_step, ladder, step.name) for name, ladder in LADDERS.items() for step in ladder.steps},
    **{f"{name}_{SERIAL}": partial(of_step, ladder, SERIAL) for name, ladder in LADDERS.items() if ladder.serial},
}
