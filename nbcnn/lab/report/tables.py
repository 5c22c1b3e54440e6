"""This module is a table of figures, written as Markdown for the pages in docs or as HTML for the report, and the line that names its origin.

What the cells of a table are is the business of `sections.py`, once for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from nbcnn.lab.measure import results, sources
from nbcnn.lab.report import page
from nbcnn.lab.report.origin import origin

GPU = "nvidia-h200.json"


@dataclass(frozen=True)
class Table:
    """Columns by name and rows of cells, of which the first `words` are words and the others numbers; an empty cell is "".

    A cell has Markdown's marks for code (`…`) and for what is bold (**…**), and no others.

    >>> Table(("mode", "ms"), (("im2col", "6.5"),)).labelled("batch", "256").markdown().splitlines()[-1]
    '| 256 | im2col | 6.5 |'
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1

    def without(self, *names: str) -> Table:
        """The table without some of its columns. Raises ValueError for a column that it does not have."""
        left_out = {self.head.index(name) for name in names}
        kept = [at for at in range(len(self.head)) if at not in left_out]
        rows = tuple(tuple(row[at] for at in kept) for row in self.rows)
        return Table(tuple(self.head[at] for at in kept), rows, sum(at < self.words for at in kept))

    def filled(self) -> Table:
        """The table without columns in which every cell is empty: of what was not measured."""
        kept = [at for at in range(len(self.head)) if any(row[at] for row in self.rows)]
        rows = tuple(tuple(row[at] for at in kept) for row in self.rows)
        return Table(tuple(self.head[at] for at in kept), rows, sum(at < self.words for at in kept))

    def labelled(self, name: str, label: str) -> Table:
        """The table with one more column in front that says the same in every row."""
        return Table((name, *self.head), tuple((label, *row) for row in self.rows), self.words + 1)

    def markdown(self) -> str:
        return markdown(self.head, self.rows, self.words)

    def html(self) -> str:
        """The table for the report, where columns of empty cells are left out."""
        return page.table(self.head, [[cell or None for cell in row] for row in self.rows], self.words)


def joined(tables: Sequence[Table]) -> Table:
    """Tables of the same columns, one below the other. Raises ValueError for other columns or no table at all."""
    if len({table.head for table in tables}) != 1:
        raise ValueError(f"tables of {len({table.head for table in tables})} different heads cannot be joined")
    return replace(tables[0], rows=tuple(row for table in tables for row in table.rows))


def kept(file: str) -> dict[str, Any]:
    """The content of a results file. The tables ask for it a hundred times, and checking the largest takes half a second: it is read once."""
    path = results.RESULTS / file
    stat = path.stat()
    return _read(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4)
def _read(path: Path, changed: int, size: int) -> dict[str, Any]:
    return results.load(path)


def section(file: str, name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and environment of one section, and in it whether its kernels have `changed` since. Raises KeyError if it was never measured."""
    found = kept(file)["sections"][name]
    return found["rows"], found["environment"] | {"changed": sources.changed(file, name, found["environment"])}


def measured(file: str, name: str) -> bool:
    """True if the results file has the section."""
    return name in kept(file)["sections"]


def named(kind: str) -> list[str]:
    """The names of the measured sections of a kind, in order."""
    return results.of_kind(kept(GPU), kind)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table whose first `left` columns are words, the others numbers."""
    rule = ["---" if i < left else "---:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rows))


def folded(title: str, content: str) -> str:
    """Markdown that opens when its title is clicked."""
    return f"<details><summary>{title}</summary>\n\n{content}\n</details>\n"


def footer(*environments: dict[str, Any]) -> str:
    """The origin of a table as the paragraph below it, in Markdown."""
    return f"\n\n{origin(*environments)}\n"
