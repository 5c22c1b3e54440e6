"""The measured parts of docs/hopper-ladder.md: the whole climb, and a line for each step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nbcnn.lab.report import sections
from nbcnn.lab.report.tables import GPU, footer, measured, section
from nbcnn.ops.conv.hopper_ladder import STEPS

PAGE = Path(__file__).parents[3] / "docs" / "hopper-ladder.md"
SECTION = "hopper-1024"


def climb() -> str:
    """Every kernel, from mode im2col to the engine; nothing before it is measured."""
    if not measured(GPU, SECTION):
        return ""
    rows, environment = section(GPU, SECTION)
    return sections.hopper(rows).markdown() + footer(environment)


def of_step(at: int) -> str:
    """One step's figures in a sentence, beside those of the step before; nothing before they are measured."""
    if not measured(GPU, SECTION):
        return ""
    rows, _ = section(GPU, SECTION)
    row, before = rows[at], rows[at - 1]
    return (
        f"Measured: **{row['tflops']:.0f} TFLOP/s**, {row['ms']['median'] * 1e3:,.0f} µs, {row['over_before']:.2f} times as fast as "
        f"{_name(before)} ({before['tflops']:.0f} TFLOP/s).\n"
    )


def _name(row: dict[str, Any]) -> str:
    name = str(row["variant"])
    return f"step {name.split()[0]}" if name[0].isdigit() else name


TABLES: dict[str, Callable[[], str]] = {"hopper": climb, **{f"hopper_{at}": partial(of_step, at) for at in range(1, len(STEPS) + 1)}}
