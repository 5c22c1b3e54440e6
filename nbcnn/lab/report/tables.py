"""This module makes Markdown tables from sections of a results file, and the line below each that names its origin."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from nbcnn.lab.measure import results

GPU = "nvidia-h200.json"


def kept(file: str) -> dict[str, Any]:
    """The content of a results file. The tables ask for it a hundred times, and checking the largest takes half a second: it is read once."""
    path = results.RESULTS / file
    stat = path.stat()
    return _read(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4)
def _read(path: Path, changed: int, size: int) -> dict[str, Any]:
    return results.load(path)


def section(file: str, name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and environment of one section. Raises KeyError if it was never measured."""
    found = kept(file)["sections"][name]
    return found["rows"], found["environment"]


def measured(file: str, name: str) -> bool:
    """True if the results file has the section."""
    return name in kept(file)["sections"]


def markdown(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], left: int = 1) -> str:
    """A table whose first `left` columns are words, the others numbers."""
    rule = ["---" if i < left else "---:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, tuple(rule), *rows))


def footer(*environments: dict[str, Any]) -> str:
    """Device, versions, date and command of the last section of a table; the revisions of all."""
    environment = environments[-1]
    versions = environment["versions"]
    torch = f", PyTorch {versions['torch']}" if versions.get("torch") else ""
    driver = f", driver {environment['driver']}" if environment["driver"] else ""
    device = environment["device"].split(" (")[0]
    revisions = list(dict.fromkeys(one["revision"] for one in environments if one["revision"]))
    revision = f", revision{'s' if len(revisions) > 1 else ''} {', '.join(revisions)}" if revisions else ""
    return f"\n\n{device}{driver}, numba-cuda {versions['numba-cuda']}{torch}, {environment['date']}{revision}, `{environment['command']}`.\n"
