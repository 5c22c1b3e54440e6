"""Tiles of the weight gradient, and the choice of one for a shape.

The GEMM is K × (taps of C channels) × pixels: few output tiles and a long sum. So the pixels are cut into `split` parts, as
many as make one block for every place on the GPU, and another launch adds the parts in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nbcnn.ops.conv.frame.correlation import Correlation
from nbcnn.ops.conv.frame.wgrad import OverPixels
from nbcnn.ops.conv.wgmma.tile import ALIGNMENT, WARPGROUP
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES

WARP = 32
HELPERS = 3
"""Helper warps of a block: with them 384 threads, which leaves a consumer the 168 registers that 128 sums need."""
BARRIERS = 256
HELPED = 4096
"""Bytes in which helper warps bring their sums together."""
MOST_SPLIT = 132
"""Parts that the pixels are cut into at most."""


@dataclass(frozen=True)
class PixelTile(OverPixels):
    """A block's tile BM × BN over pixels in steps of BK; `groups` warpgroups share its rows; `slots` steps are in flight, the stages of its ring.

    element  bytes of an operand's element: 2 (bfloat16) or 4, whose tiles are transposed in shared memory, 32 pixels a step.
    planes   into how many tf32 values an element is split, 1 or 2.
    split    blocks that share one output tile.

    A tile lies in shared memory as panels of BK pixels × 128 bytes. BM is `groups` times 64 or 128, BN whole panels.
    """

    BM: int
    BN: int
    BK: int
    groups: int
    slots: int
    element: int = 2
    planes: int = 1
    split: int = 1

    @property
    def panel(self) -> int:
        """Channels of a panel."""
        return ROW_BYTES // self.element

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return self.groups * WARPGROUP

    def threads(self, bias: bool) -> int:
        """The consumers, one producer warp, and three helper warps that transpose tiles or add up the bias gradient, if either is to be done."""
        return self.consumers + WARP + (HELPERS * WARP if bias or self.element == 4 else 0)

    @property
    def panel_bytes(self) -> int:
        return self.BK * ROW_BYTES

    @property
    def landed_bytes(self) -> int:
        """Bytes that TMA writes in one step: BK pixels of both operands."""
        return (self.BM + self.BN) // self.panel * self.panel_bytes

    @property
    def stage_bytes(self) -> int:
        """Bytes of one step in the ring."""
        return self.planes * self.landed_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: room to align, the ring, its barriers, the helpers' sums."""
        return ALIGNMENT + self.slots * self.stage_bytes + BARRIERS + HELPED

    def column_tiles(self, g: Correlation) -> int:
        """Tiles across all panels; every tap has its own panels."""
        return ceil_div(g.R * g.S * ceil_div(g.C, self.panel), self.BN // self.panel)

    def blocks(self, g: Correlation) -> int:
        """Blocks of the product."""
        return self.row_tiles(g) * self.column_tiles(g) * self.split


_TILES = {
    "bf16": (
        PixelTile(128, 256, 64, 2, 4),
        PixelTile(128, 192, 64, 2, 5),
        PixelTile(128, 128, 64, 2, 6),
        PixelTile(192, 192, 64, 3, 4),
        PixelTile(64, 256, 64, 1, 5),
        PixelTile(64, 128, 64, 1, 6),
        PixelTile(64, 64, 64, 1, 6),
    ),
    "tf32": (
        PixelTile(128, 256, 32, 2, 4, element=4),
        PixelTile(128, 192, 32, 2, 5, element=4),
        PixelTile(128, 128, 32, 2, 6, element=4),
        PixelTile(64, 256, 32, 1, 5, element=4),
        PixelTile(64, 128, 32, 1, 6, element=4),
        PixelTile(64, 64, 32, 1, 6, element=4),
    ),
    "fp32": (
        PixelTile(128, 128, 32, 2, 3, element=4, planes=2),
        PixelTile(64, 128, 32, 1, 4, element=4, planes=2),
        PixelTile(64, 64, 32, 1, 6, element=4, planes=2),
    ),
}
_STALLS = {"bf16": (1.15, 230), "tf32": (0.8, 500), "fp32": (1.0, 850)}
"""(factor, cycles): a step takes factor × what shared memory needs for it + cycles. Fitted to ten tiles on an H200, to 9 %."""
_SHARED_A_CYCLE = 128
"""Bytes that shared memory moves a cycle. It is what limits most: tensor cores would be faster, by little in bf16, much in tf32."""
_START_CYCLES = 5000
"""Cycles of a block besides its steps: start, first tiles, storing its sums."""
_PARTS_A_CYCLE = 1760
"""Bytes of parts that the second launch adds a cycle."""


def _step_cycles(tile: PixelTile, precision: str) -> float:
    """Cycles of a step: what TMA writes, what is read and written to transpose it, and each 64 rows with all columns for every product."""
    products, transposed = (3 if tile.planes == 2 else 1), (1 + tile.planes if tile.element == 4 else 0)
    operands = tile.BM // 64 * (64 + tile.BN) * tile.BK * tile.element * products
    factor, stall = _STALLS[precision]
    return factor * ((1 + transposed) * tile.landed_bytes + operands) / _SHARED_A_CYCLE + stall


def _cycles(tile: PixelTile, g: Correlation, precision: str, multiprocessors: int) -> float:
    """Estimated time, in cycles."""
    product = ceil_div(tile.blocks(g), multiprocessors) * (_START_CYCLES + tile.steps(g) * _step_cycles(tile, precision))
    return product + 4 * g.K * g.R * g.S * g.C * tile.split / _PARTS_A_CYCLE


def candidates(g: Correlation, precision: str, multiprocessors: int) -> Iterator[PixelTile]:
    """Every tile with the splits that fill half a wave, or one to four, or leave the pixels whole."""
    for tile in _TILES[precision]:
        outputs = tile.row_tiles(g) * tile.column_tiles(g)
        most = min(MOST_SPLIT, tile.pixel_steps(g))
        for split in sorted({1, *(min(most, max(1, int(waves * multiprocessors) // outputs)) for waves in (0.5, 1, 2, 3, 4))}):
            yield replace(tile, split=split)


def choose(g: Correlation, precision: str, multiprocessors: int) -> PixelTile:
    """The candidate with the least estimated time, of those that make one wave if there are any: fewer parts to store and to add."""
    every = [tile for tile in candidates(g, precision, multiprocessors) if tile.groups < 3]
    one_wave = [tile for tile in every if tile.blocks(g) <= multiprocessors]
    return min(one_wave or every, key=lambda tile: _cycles(tile, g, precision, multiprocessors))
