"""This module finds the nearest right name for a wrong one: modes, data sets, flags, commands."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def nearest(name: str, known: Sequence[str]) -> str:
    """Words that offer the one of `known` closest to `name`; empty if none is close ("cpu" is not close to "gpu")."""
    close = difflib.get_close_matches(name.lower(), known, 1, 0.7)
    return f"; did you mean {close[0]}?" if close else ""
