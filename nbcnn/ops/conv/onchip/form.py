"""What a call freezes into the kernel, and the map of its shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.ptx.shuffle import WARP

FILTERS, POINTS = 64, 16
"""Filters of a block; points of a tile."""
MULTIPLIERS, FILLERS, FINISHERS = 256, 128, 128
"""Threads that multiply, two points a warp; that make points of images; that make images of products."""
THREADS = MULTIPLIERS + FILLERS + FINISHERS
TURNS = FILLERS // WARP
"""Filling warps, which bring a stage each in turn. Stages have their barriers in turn too, as many, so that whoever waits sees every phase though
there is room for fewer."""
BARRIERS = 2 * TURNS + 2
"""Of stages: full, empty; of products: there, taken."""
STRIPS, SLOTS = FINISHERS // WARP, 8
"""Strips of neighbouring tiles of a round, one a row of lanes that multiply and one a warp that finishes; places for tiles of a strip."""
_FEWEST, _MOST = 5, 7
"""Tiles of a strip. With eight, the sums of a thread that multiplies leave no room for its factors; with fewer, shared memory gives as much for
fewer products."""
CHANNELS = 8
"""Of a stage."""
ROW = STRIPS * SLOTS
CHANNEL_PITCH = POINTS * ROW + 4
"""Floats from channel to channel of the points: eight lanes that store sixteen bytes each, of eight channels, meet every bank once."""
STAGES = 2
"""Of points and filters, of 8 channels each: one is multiplied while the next is brought."""
FILTER_STAGE, POINT_STAGE = CHANNELS * POINTS * FILTERS, CHANNELS * CHANNEL_PITCH
"""Floats."""
AT_POINTS = STAGES * FILTER_STAGE
"""Where stages of points begin, in floats."""
QUADS = FILTERS // 4
"""Neighbouring finishers that have the four-channel parts of a pixel."""


@dataclass(frozen=True)
class Form:
    """Images of H×W×C to H×W×64. A round is STRIPS strips of `across` neighbouring tiles.

    spare: floats of shared memory that the end of the kernel asks for.
    """

    H: int
    W: int
    C: int
    across: int
    spare: int = 0

    @property
    def tiles(self) -> int:
        """Of a round."""
        return STRIPS * self.across

    @property
    def strips_of_line(self) -> int:
        return self.W // 2 // self.across

    @property
    def strips(self) -> int:
        """Of an image."""
        return self.H // 2 * self.strips_of_line

    @property
    def rounds(self) -> int:
        """Of an image."""
        return ceil_div(self.strips, STRIPS)

    @property
    def at_products(self) -> int:
        """In floats, behind stages of filters, then of points."""
        return STAGES * (FILTER_STAGE + POINT_STAGE)

    @property
    def at_spare(self) -> int:
        return self.at_products + POINTS * self.tiles * FILTERS

    @property
    def at_barriers(self) -> int:
        """In floats; a barrier takes two."""
        return self.at_spare + self.spare + self.spare % 2

    @property
    def shared_bytes(self) -> int:
        return 4 * self.at_barriers + 8 * BARRIERS


def across_of(W: int) -> int:
    """Most neighbouring tiles that a strip may have on lines of W pixels, 0 if no number divides them so that a round has whole lines."""
    fit = (n for n in range(min(_MOST, W // 2), _FEWEST - 1, -1) if W // 2 % n == 0 and STRIPS % (W // 2 // n) == 0)
    return next(fit, 0)
