"""Where a column panel of a weight gradient's product lies: its tap and channels."""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import i4, jit, u4


@cache
def panel_place(channels: int) -> Any:
    """Device function (panel, panels, C, S) -> (r, s, c): tap and first channel of a column panel; beyond the last, those of the last.

    Panels run over the taps (r, s), and within a tap over `channels` of the C channels at a time.
    """
    MORE = channels - 1

    @jit(device=True)
    def run(panel, panels, C, S):
        across = i4(u4(C + i4(MORE)) // u4(channels))
        panel = min(i4(panel), i4(panels - i4(1)))
        tap = i4(u4(panel) // u4(across))
        r = i4(u4(tap) // u4(S))
        return r, i4(tap - r * S), i4((panel - tap * across) * i4(channels))

    return run
