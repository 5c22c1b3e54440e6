"""The classes of the main job in docs/results/accuracy.md: a table from the easiest to the hardest, and the confusion matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbcnn.files import atomic
from nbcnn.lab.report import svg
from nbcnn.lab.report.tables import GPU, Table, footer, measured, section

MAIN, CONFUSION = "quality-main", "confusion.svg"
PAIRS = 5
"""How many of the most frequent mistakes are listed."""


def classified() -> dict[str, Any] | None:
    """The row of the main job's classifier; None before it is measured."""
    if not measured(GPU, MAIN):
        return None
    return next((row for row in section(GPU, MAIN)[0] if row["what"] == "classify"), None)


def table() -> str:
    """Every class from the easiest to the hardest, the most frequent mistakes, and the picture; nothing before they are measured."""
    found = classified()
    if found is None:
        return ""
    names, counts = found["classes"], found["classifiers"]["encoder"]["confusion"]
    lines = []
    for at in sorted(range(len(names)), key=lambda at: -counts[at][at] / sum(counts[at])):
        right, true, said = counts[at][at], sum(counts[at]), sum(row[at] for row in counts)
        other = max((other for other in range(len(names)) if other != at), key=lambda other: counts[at][other])
        taken = f"{names[other]} ({counts[at][other] / true:.1%})"
        lines.append((names[at], f"{right / true:.1%}", f"{right / said:.1%}", f"{2 * right / (true + said):.3f}", taken))
    every = sorted(((counts[a][b], a, b) for a in range(len(names)) for b in range(len(names)) if a != b), reverse=True)
    pairs = ", ".join(f"{names[a]} as {names[b]} ({count:,})" for count, a, b in every[:PAIRS])
    easy, hard = (", ".join(name for name, *_ in part) for part in (lines[:3], lines[:-4:-1]))
    return (
        Table(("class", "recall", "precision", "F1", "most often taken for"), tuple(lines)).markdown()
        + f"{footer(section(GPU, MAIN)[1])}Easiest: {easy}; hardest: {hard}. Most frequent mistakes: {pairs}.\n\n"
        + f"![confusion matrix of the test images](../pictures/{CONFUSION})\n"
    )


def chart(path: Path) -> None:
    """The confusion matrix as an SVG file at `path`; none before it is measured."""
    if found := classified():
        drawn = svg.matrix(found["classifiers"]["encoder"]["confusion"], found["classes"], "test images by true (row) and predicted class")
        atomic.replace_bytes(path, svg.standalone(drawn).encode())


TABLES = {"classes": table}
