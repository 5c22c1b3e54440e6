"""This module refuses outputs that are not finite, by one rule for predict, evaluate and extract.

Weights of 1e38 and a negative running variance load like any others. Of logits that are all NaN the first class is the largest: accuracy may be 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np


class NotFinite(ValueError):
    """A network makes NaN or infinity of what is finite; on the command line the exit code is 3, as of other files that cannot be used."""

    exit_code = 3


def finite(outputs: np.ndarray, of: str) -> np.ndarray:
    """`outputs`, which the network makes of what `of` names. Raises NotFinite if one is NaN or infinite."""
    import numpy as np

    if not np.isfinite(outputs).all():
        raise NotFinite(f"what the network makes of {of} is not finite: its weights are too large, or a running variance is negative")
    return outputs


def files_of(paths: Sequence[Path]) -> str:
    """The files of a batch in words."""
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} to {paths[-1]}"
