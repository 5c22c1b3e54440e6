"""NVTX ranges: names that NVIDIA's profilers show over the kernels between two calls of the host. Through the package nvtx, if it is installed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Mark = Callable[[str], AbstractContextManager[Any]]
"""Called with a name, a range for `with`."""

MISSING = "no NVTX ranges: the package nvtx is not installed (pip install nvtx)"


def nothing(name: str) -> AbstractContextManager[Any]:
    """No range."""
    return nullcontext()


def nvtx() -> Mark | None:
    """A function that makes NVTX ranges; None if the package is not installed."""
    try:
        import nvtx as package
    except ImportError:
        return None
    return lambda name: package.annotate(name, domain="nbcnn")
