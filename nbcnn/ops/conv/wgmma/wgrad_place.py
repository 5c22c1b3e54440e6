"""Where a column panel of a weight gradient's product lies: its tap and channels."""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import jit


@cache
def panel_place(channels: int) -> Any:
    """Device function (panel, panels, C, S) -> (r, s, c): tap and first channel of a column panel; beyond the last, those of the last.

    Panels run over the taps (r, s), and within a tap over `channels` of the C channels at a time.
    """
    MORE = channels - 1

    @jit(device=True)
    def run(panel, panels, C, S):
        across = (C + MORE) // channels
        panel = min(panel, panels - 1)
        tap = panel // across
        r = tap // S
        return r, tap - r * S, (panel - tap * across) * channels

    return run
