"""Tiles of the weight gradient, and the choice of one for a shape.

The GEMM is K × (taps of C channels) × pixels: few output tiles and a long sum. So the pixels are cut into `split` parts, as
many as make one block for every place on the GPU, and another launch adds the parts in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nbcnn.ops.conv.tiles import ceil_div
from nbcnn.ops.conv.wgmma.correlation import Correlation
from nbcnn.ops.conv.wgmma.tensor_maps import ROW_BYTES
from nbcnn.ops.conv.wgmma.tile import ALIGNMENT, WARPGROUP

PANEL = 64
"""Channels of a panel: a tile lies in shared memory as panels of BK pixels × 128 bytes."""
BARRIERS = 256
MOST_SPLIT = 132
"""Parts that the pixels are cut into at most."""


@dataclass(frozen=True)
class PixelTile:
    """A block's tile BM × BN over pixels in steps of BK; `groups` warpgroups share its rows; `slots` steps are in flight.

    `split` blocks share one output tile. BM is `groups` times 64 or 128, BN whole panels.
    """

    BM: int
    BN: int
    BK: int
    groups: int
    slots: int
    split: int = 1

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return self.groups * WARPGROUP

    @property
    def threads(self) -> int:
        """The consumers and one producer warp."""
        return self.consumers + 32

    @property
    def panel_bytes(self) -> int:
        return self.BK * ROW_BYTES

    @property
    def slot_bytes(self) -> int:
        """Bytes of one step: BK pixels of both operands."""
        return (self.BM + self.BN) // PANEL * self.panel_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: room to align, the ring, its barriers."""
        return ALIGNMENT + self.slots * self.slot_bytes + BARRIERS

    def row_tiles(self, g: Correlation) -> int:
        return ceil_div(g.K, self.BM)

    def column_tiles(self, g: Correlation) -> int:
        return ceil_div(panels(g), self.BN // PANEL)

    def steps(self, g: Correlation) -> int:
        """Steps of BK pixels that each of the `split` blocks makes (the last may make fewer)."""
        return ceil_div(ceil_div(g.GM, self.BK), self.split)

    def parts(self, g: Correlation) -> int:
        """Parts that have any steps: `split`, or fewer."""
        return ceil_div(ceil_div(g.GM, self.BK), self.steps(g))


def panels(g: Correlation) -> int:
    """Panels across GN: every tap has its own."""
    return g.R * g.S * ceil_div(g.C, PANEL)


def unsplit(tile: PixelTile) -> PixelTile:
    """`tile` without its split, which is a matter of the grid: what kernels are compiled for."""
    return replace(tile, split=1)


_TILES = (
    PixelTile(128, 256, 64, 2, 4),
    PixelTile(128, 192, 64, 2, 5),
    PixelTile(128, 128, 64, 2, 6),
    PixelTile(64, 256, 64, 1, 5),
    PixelTile(64, 128, 64, 1, 6),
    PixelTile(64, 64, 64, 1, 6),
)
_STEP_CYCLES = 350
"""Least cycles of a step: its barriers, and what a block fetches."""
_START_CYCLES = 3000
"""Cycles of a block besides its steps: start, first tiles, storing its sums."""
_CYCLES_A_PART = 900
"""Cycles that the second launch takes for each part."""


def _cycles(tile: PixelTile, g: Correlation, multiprocessors: int) -> float:
    """Estimated time, in cycles. Tensor cores make 2,048 products a cycle, seven tenths of that in the long run."""
    blocks = tile.row_tiles(g) * tile.column_tiles(g) * tile.split
    step = max(_STEP_CYCLES, tile.BM * tile.BN * tile.BK / 2048 / 0.7, tile.slot_bytes / 30)
    return ceil_div(blocks, multiprocessors) * (_START_CYCLES + tile.steps(g) * step) + _CYCLES_A_PART * tile.split


def candidates(g: Correlation, multiprocessors: int, up: bool) -> Iterator[PixelTile]:
    """Every tile with the splits that fill one wave or two, or leave the pixels whole.

    In upconv_wgrad the columns are those of dy, whose sums want a power of two of threads across.
    """
    for tile in _TILES:
        if up and tile.BN & (tile.BN - 1):
            continue
        outputs = tile.row_tiles(g) * tile.column_tiles(g)
        most = min(MOST_SPLIT, ceil_div(g.GM, tile.BK))
        for split in sorted({1, *(min(most, max(1, waves * multiprocessors // outputs)) for waves in (1, 2))}):
            yield replace(tile, split=split)


def choose(g: Correlation, multiprocessors: int, up: bool) -> PixelTile:
    """The candidate with the least estimated time."""
    return min(candidates(g, multiprocessors, up), key=lambda tile: _cycles(tile, g, multiprocessors))
