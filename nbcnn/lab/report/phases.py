"""The measured part of docs/ladder.md on whole trainings: a table of the phases of the climb, and a chart of their times."""

from __future__ import annotations

from pathlib import Path

from nbcnn.files import atomic
from nbcnn.lab.report import svg
from nbcnn.lab.report.tables import GPU, Table, footer, measured, section
from nbcnn.lab.studies import phases

SECTION, PICTURE = f"phases-{phases.BATCH}", "phases.svg"


def table() -> str:
    """The phases and their chart; before they are measured, that they are not."""
    if not measured(GPU, SECTION):
        return "Not measured yet.\n"
    rows, environment = section(GPU, SECTION)
    words = f"The phase cpu (NumPy) uses {rows[0]['cpu_cores']} cores, the serial loops one."
    picture = f"![seconds of a training of each phase](pictures/{PICTURE})"
    return f"{Table(phases.HEAD, tuple(map(phases.cells, rows))).markdown()}{footer(environment)}{words}\n\n{picture}\n"


def chart(path: Path) -> None:
    """Seconds of a whole training of every phase, on a logarithmic axis, as an SVG file at `path`; none before they are measured."""
    if measured(GPU, SECTION):
        bars = [(phases.name_of(row), row["total_seconds"], phases.duration(row["total_seconds"])) for row in section(GPU, SECTION)[0]]
        atomic.replace_bytes(path, svg.standalone(svg.bars(bars, f"seconds of a training of {phases.EPOCHS} epochs")).encode())


TABLES = {"phases": table}
