"""This module refuses outputs that are not finite, by one rule for predict, evaluate and extract.

Weights of 1e38 and a negative running variance load like any others. Of logits that are all NaN the first class is the largest: accuracy may be 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np


def weights(precision: str) -> str:
    """Why a network that computes in `precision` may make what is not finite."""
    beyond = "; or a result is beyond 65,504, the largest number of fp16: take --mode cudacore" if precision == "fp16" else ""
    return f"its weights are too large, or a running variance is negative{beyond}"


class NotFinite(ValueError):
    """A network makes NaN or infinity of what is finite; on the command line the exit code is 3, as of other files that cannot be used."""

    exit_code = 3


def finite(outputs: np.ndarray, of: str, why: str, by: str = "the network") -> np.ndarray:
    """`outputs`, which `by` makes of what `of` names. Raises NotFinite if one is NaN or infinite, with what is known of it, `why`."""
    import numpy as np

    if not np.isfinite(outputs).all():
        raise NotFinite(f"what {by} makes of {of} is not finite: {why}")
    return outputs


def files_of(paths: Sequence[Path]) -> str:
    """The files of a batch in words."""
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} to {paths[-1]}"
