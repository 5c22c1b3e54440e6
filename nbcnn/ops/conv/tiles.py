"""Tile: how an implicit GEMM is cut into blocks and threads; and the choice of one for a shape, from a committed table.

The choice is a small model of the time, in multiprocessor cycles. A block makes its k-tiles one after the other; a
multiprocessor that holds r blocks needs r times the FFMAs of a k-tile at the tile's efficiency, but never less than the
latency of one k-tile. Blocks run in waves of as many as fit; the last wave may be half empty. Splitting GK evens out waves
and shortens them, and costs a second kernel that reads every part again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace


def ceil_div(count: int, size: int) -> int:
    """Pieces of `size` that cover `count`."""
    return -(-count // size)


@dataclass(frozen=True)
class Tile:
    """A block owns BM×BN outputs and walks GK in steps of BK; a thread owns TM×TN; `split` blocks share one output tile.

    Raises ValueError for sizes that the kernels cannot lay out.
    """

    BM: int
    BN: int
    BK: int
    TM: int
    TN: int
    split: int = 1

    def __post_init__(self) -> None:
        if self.TM % 4 or self.TN % 4 or self.BK % 4:
            raise ValueError(f"{self}: TM, TN and BK must be multiples of 4, the width of a 16-byte load")
        if self.BM % (4 * self.TM) or self.BN % (8 * self.TN):
            raise ValueError(f"{self}: a block tile must be made of warp tiles, 4 thread tiles down and 8 across")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.BM // self.TM) * (self.BN // self.TN)

    @property
    def blocks_per_multiprocessor(self) -> int:
        """Blocks that the register file (65,536) holds; what `launch_bounds` promises, and so the compiler's register limit.

        A thread with 64 accumulators gets 128 registers. Smaller ones get more than they need: where registers are tight, the
        compiler cannot keep the three operands of an FFMA in different banks.
        """
        registers = {16: 80, 32: 102, 64: 128}[self.TM * self.TN]
        return max(1, 65536 // (registers * self.threads))

    def grid(self, GM: int, GN: int) -> tuple[int, int]:
        """(output tiles, split): block x walks the columns of one row of tiles first, y is the part of GK."""
        return ceil_div(GM, self.BM) * ceil_div(GN, self.BN), self.split

    def k_tiles(self, GK: int) -> int:
        """Steps of BK that one of the `split` blocks makes (the last may make fewer)."""
        return ceil_div(ceil_div(GK, self.BK), self.split)


def unsplit(tile: Tile) -> Tile:
    """`tile` without its split, which is a matter of the grid: what kernels are compiled for."""
    return replace(tile, split=1)


EFFICIENCY = {
    Tile(128, 128, 16, 8, 8): 0.78,
    Tile(64, 128, 16, 8, 8): 0.75,
    Tile(64, 128, 16, 8, 4): 0.70,
    Tile(64, 64, 16, 8, 4): 0.63,
    Tile(64, 64, 16, 4, 4): 0.61,
    Tile(32, 64, 16, 4, 4): 0.58,
}
"""Fraction of the FFMA rate that a full multiprocessor reaches, measured on an H200."""
RAGGED = Tile(64, 64, 16, 4, 4)
"""For operands that cannot be read by whole k-tiles of 16-byte loads: small enough for the registers that takes."""
FFMA_A_CYCLE = 128
K_TILE_CYCLES = 900
"""Latency of one k-tile: global load, barrier, shared loads."""
WAVE_CYCLES = 3000
"""Start of a block, its first loads, its stores."""
SUM_CYCLES = 2500
"""The second kernel, besides what it moves."""
BYTES_A_CYCLE = 12
"""What a multiprocessor's share of the L2 cache delivers."""


def cycles(tile: Tile, GM: int, GN: int, GK: int, multiprocessors: int, always_sums: bool) -> float:
    """Estimated time of the product, and of the sum of its parts, in cycles."""
    blocks, resident = tile.grid(GM, GN)[0] * tile.split, tile.blocks_per_multiprocessor
    work = tile.BM * tile.BN * tile.BK / FFMA_A_CYCLE / EFFICIENCY[unsplit(tile)]

    def wave(blocks_each: int) -> float:
        return WAVE_CYCLES + tile.k_tiles(GK) * max(K_TILE_CYCLES, blocks_each * work)

    waves, rest = divmod(blocks, resident * multiprocessors)
    total = waves * wave(resident) + (wave(ceil_div(rest, multiprocessors)) if rest else 0)
    if tile.split > 1 or always_sums:
        total += SUM_CYCLES + (2 * tile.split + 1) * 4 * GM * GN / (BYTES_A_CYCLE * multiprocessors)
    return total


@functools.cache
def choose(GM: int, GN: int, GK: int, multiprocessors: int, whole_tiles: bool, always_sums: bool) -> Tile:
    """The tile with the least estimated time.

    whole_tiles: k-tiles can be read by whole 16-byte loads. always_sums: parts are summed even if there is only one.
    """
    candidates = []
    for tile in EFFICIENCY if whole_tiles else (RAGGED,):
        tiles, k_tiles = tile.grid(GM, GN)[0], ceil_div(GK, tile.BK)
        most = min(k_tiles, 64, max(1, 4 * tile.blocks_per_multiprocessor * multiprocessors // tiles))
        candidates += [replace(tile, split=ceil_div(k_tiles, ceil_div(k_tiles, split))) for split in range(1, most + 1)]
    return min(candidates, key=lambda tile: cycles(tile, GM, GN, GK, multiprocessors, always_sums))
