"""This module says how much longer products take than an engine's model where channels do not fill what the engine moves at once.

Measured on an H100 (`study engines`, 500 steps): a factor grows with a power of what is padded, or of how many copies 16 bytes take.
"""

from __future__ import annotations

from collections.abc import Sequence

from nbcnn.ops.conv.frame.correlation import Correlation, whole


def padded(g: Correlation, channels: int, power: float) -> float:
    """The factor where channels are padded to whole steps of `channels`."""
    return float((whole(g.C, channels) / g.C) ** power)


def narrow(channels: Sequence[int], element: int, power: float) -> float:
    """The factor where the channels of a pixel are no whole 16 bytes, and are copied by four bytes or one element at a time.

    channels: of every operand that is loaded so; element: bytes of one.
    """
    copies = (next(16.0 / size for size in (16, 4, element) if count * element % size == 0) for count in channels)
    return float(max(copies) ** power)
