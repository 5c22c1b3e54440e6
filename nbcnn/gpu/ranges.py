"""This module makes NVTX ranges, names that NVIDIA's profilers show over kernels, by the package nvtx if it is installed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Mark = Callable[[str], AbstractContextManager[Any]]
"""A function from a name to a range, a context manager."""

MISSING = "no NVTX ranges: the package nvtx is not installed (pip install nvtx)"


def nothing(name: str) -> AbstractContextManager[Any]:
    """A range that does nothing."""
    return nullcontext()


def nvtx() -> Mark | None:
    """A function that makes NVTX ranges; None if the package is not installed."""
    try:
        import nvtx as package
    except ImportError:
        return None
    return lambda name: package.annotate(name, domain="nbcnn")
