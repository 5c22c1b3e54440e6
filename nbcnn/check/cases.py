"""This module collects the cases of every op from the modules of the table, for `gradcheck` and the parity tests."""

from __future__ import annotations

from collections.abc import Iterator

from nbcnn.modes import MODULES
from nbcnn.ops.kernel.case import Case


def mean_cases() -> Iterator[Case]:
    """Cases of every op on shapes that are mean on purpose, and small enough for the simulator."""
    return _gathered("cases")


def real_cases() -> Iterator[Case]:
    """Cases on shapes of real networks, for ops in which they may find errors that small ones do not."""
    return _gathered("real_cases")


def _gathered(name: str) -> Iterator[Case]:
    for module in MODULES:
        if hasattr(module, name):
            yield from getattr(module, name)()
