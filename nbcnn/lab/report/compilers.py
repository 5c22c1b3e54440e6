"""The measured part of docs/howto/compilers.md: kernels and training steps by both compilers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbcnn.lab.report import sections
from nbcnn.lab.report.tables import GPU, footer, measured, section
from nbcnn.lab.studies.compilers import failures

SECTION = "compilers"
NAMES = {"llvmlite": "llvmlite", "nvidia-nvjitlink": "nvJitLink", "nvidia-nvvm": "NVVM", "python": "Python"}
"""What packages are called; the others by their own names."""


def beside() -> str:
    """The table, what failed, what compiled the kernels, and where the figures are from; nothing before they are measured."""
    if not measured(GPU, SECTION):
        return ""
    rows, environment = section(GPU, SECTION)
    why = failures(rows)
    lost = "\n\nWhat failed:\n\n" + "\n".join(f"- {each}" for each in why) if why else ""
    made = f"\n\nCompiled by: numba {versions(rows, 'numba')}; mlir {versions(rows, 'mlir')}."
    return sections.compilers(rows).markdown() + lost + made + footer(environment)


def versions(rows: Sequence[Mapping[str, Any]], compiler: str) -> str:
    """The versions of what compiled the kernels of one compiler, as a list in brackets."""
    found = {
        f"{NAMES.get(name, name)} {version}": None for row in rows for made in row[compiler].get("made_by", ()) for name, version in made.items()
    }
    return f"({', '.join(found) or 'not known'})"


TABLES = {"compilers": beside}
