"""This module refuses NumPy's masked arrays, whose mask nothing here knows."""

from __future__ import annotations

import sys
from typing import Any

from nbcnn.files.errors import UsageError


def refuse_masked(values: Any, name: str) -> None:
    """Raise UsageError for a masked array: nothing here leaves out what its mask says, and values under a mask may be anything."""
    # Nobody has a masked array before numpy.ma is imported, which takes 10 ms that a training without one need not wait.
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(values, masked.MaskedArray):
        hint = "fill in values first, as with .filled(0), or leave out what it masks"
        raise UsageError(f"{name} are a masked array, whose mask nbcnn does not know: {hint}")
