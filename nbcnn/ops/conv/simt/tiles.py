"""Tile: how an implicit GEMM is cut into blocks and threads; and the choice of one for a shape, from a committed table.

The choice minimises a small model of the time, in multiprocessor cycles. A block makes its k-tiles one after the other; a
multiprocessor that holds r blocks needs r times the FFMAs of a k-tile, at an efficiency that grows with the resident warps,
but never less than the latency of one k-tile. Blocks run in waves of as many as fit; the last wave may be half empty.
Splitting GK evens waves out and shortens them, and costs a second kernel that reads every part again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from nbcnn.gpu.target import Target
from nbcnn.ops.conv.frame.split import WAIT_US
from nbcnn.ops.kernel.cost import CYCLES_A_MICROSECOND, SPEEDS, microseconds, moved
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.tiles import unsplit
from nbcnn.ops.kernel.traffic import Traffic


class Product(NamedTuple):
    """What a launch multiplies: `copies` products of GM×GK by GK×GN, phases or positions of a tile, each in tiles of its own.

    whole_tiles: k-tiles can be read by whole 16-byte loads. always_sums: the sum runs even if there is only one part.
    """

    GM: int
    GN: int
    GK: int
    whole_tiles: bool = True
    always_sums: bool = False
    copies: int = 1


REGISTERS = {16: 80, 32: 102, 64: 128}
"""Registers of a thread by its number of outputs. Fewer would hold the small ones and let more blocks in, but where registers
are tight, the compiler cannot keep the operands of an FFMA in different banks."""


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
        if self.TM * self.TN not in REGISTERS:
            raise ValueError(f"{self}: a thread tile must have 16, 32 or 64 outputs")
        if self.BM % (32 // self.across * self.TM) or self.BN % (self.across * self.TN):
            raise ValueError(f"{self}: a block tile must be made of warp tiles, 4 thread tiles down and 8 across, or 8 down and 4 across")

    @property
    def across(self) -> int:
        """Thread tiles of a warp side by side: eight, or four where a tile has too few columns for eight."""
        return 4 if self.BN % (8 * self.TN) else 8

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.BM // self.TM) * (self.BN // self.TN)

    @property
    def blocks_per_multiprocessor(self) -> int:
        """Blocks that the register file (65,536) holds; what `launch_bounds` promises, and so the compiler's register limit."""
        return max(1, 65536 // (REGISTERS[self.TM * self.TN] * self.threads))

    def grid(self, GM: int, GN: int) -> tuple[int, int]:
        """(output tiles, split): block x walks the columns of one row of tiles first, y is the part of GK."""
        return ceil_div(GM, self.BM) * ceil_div(GN, self.BN), self.split

    def k_tiles(self, GK: int) -> int:
        """Steps of BK that one of the `split` blocks makes (the last may make fewer)."""
        return ceil_div(ceil_div(GK, self.BK), self.split)


EFFICIENCY = {
    Tile(128, 128, 16, 8, 8): 0.845,
    Tile(64, 128, 16, 8, 4): 0.73,
    Tile(64, 64, 16, 8, 4): 0.735,
    Tile(64, 64, 16, 4, 4): 0.63,
    Tile(32, 64, 16, 4, 4): 0.61,
    Tile(64, 32, 16, 4, 4): 0.60,
    Tile(16, 64, 16, 4, 4): 0.45,
    Tile(64, 16, 16, 4, 4): 0.36,
}
"""Fraction of the FFMA rate that a multiprocessor with many warps would reach. This and the next five numbers were fitted
to 410 times of convolutions 128 to 256 channels wide, batch 1 to 1,024, on an H200: they give them with an rms error of 4 %,
and the tile chosen is 0.6 % slower than the best one measured, on average. That of 64×32 is a guess.

The last two tiles are for few filters: three or ten of them fill 16 rows of a weight gradient, or 16 columns of a result, and 64
would be mostly zeros. Each was timed once, with three filters at batch 256: 625 µs for the weight gradient would be 0.85, 1,033 for the
forward pass 0.36. The first stands lower, so that it is taken for 16 rows at most: with 33 it was not timed. That each row of tiles
reads an operand once more is not counted here."""
RAGGED = (Tile(64, 64, 16, 4, 4), Tile(64, 32, 16, 4, 4), Tile(16, 64, 16, 4, 4), Tile(64, 16, 16, 4, 4))
"""Tiles for operands that cannot be read by whole k-tiles of 16-byte loads: small enough for the registers that takes."""
MAX_SPLIT = 64
FFMA_A_CYCLE = 128
HALF_RATE_WARPS = 1.9
"""Resident warps at which a multiprocessor reaches half of its efficiency."""
K_TILE_CYCLES = 535
"""Latency of one k-tile: loads, barrier, shared loads."""
MISS_CYCLES = 830
"""What that latency grows by where all loads of a k-tile go to memory, beyond L2."""
WAVE_CYCLES = 850
"""Start of a block, its first loads, its stores."""
SUM_CYCLES = 4900
"""The second kernel, besides what it moves."""
BYTES_A_CYCLE = 26
"""What a multiprocessor moves of the partial results, in bytes, writing and reading."""


def product_cycles(tile: Tile, product: Product, target: Target, missing: float = 0.0) -> float:
    """Estimated time of the product in cycles, without the launch; `missing` is the part of the bytes it loads that comes out of memory.

    A block has one k-tile of loads in flight. So where few blocks share a multiprocessor, it waits for each of them.
    """
    blocks, resident = tile.grid(product.GM, product.GN)[0] * tile.split * product.copies, tile.blocks_per_multiprocessor
    work = tile.BM * tile.BN * tile.BK / FFMA_A_CYCLE / EFFICIENCY[unsplit(tile)]

    def wave(blocks_each: int) -> float:
        slowdown = 1 + HALF_RATE_WARPS / (blocks_each * tile.threads / 32)
        return WAVE_CYCLES + tile.k_tiles(product.GK) * max(K_TILE_CYCLES + MISS_CYCLES * missing, blocks_each * work * slowdown)

    waves, rest = divmod(blocks, resident * target.multiprocessors)
    return waves * wave(resident) + (wave(ceil_div(rest, target.multiprocessors)) if rest else 0.0)


def cycles(tile: Tile, product: Product, target: Target) -> float:
    """Estimated time of the product and of the sum of its parts, in cycles, without the launch: what tiles are chosen by."""
    total = product_cycles(tile, product, target)
    if tile.split > 1 or product.always_sums:
        results = product.copies * product.GM * product.GN
        total += SUM_CYCLES + (2 * tile.split + 1) * 4 * results / (BYTES_A_CYCLE * target.multiprocessors)
    return total


@functools.cache
def ranked(product: Product, target: Target) -> tuple[Tile, ...]:
    """All tiles, each with every split, the least estimated time first."""
    candidates = []
    for tile in EFFICIENCY if product.whole_tiles else RAGGED:
        k_tiles = ceil_div(product.GK, tile.BK)
        for split in range(1, min(k_tiles, MAX_SPLIT) + 1):
            # Equal parts: where rounding up leaves the last blocks without work, they are not started.
            candidates.append(replace(tile, split=ceil_div(k_tiles, ceil_div(k_tiles, split))))
    return tuple(sorted(dict.fromkeys(candidates), key=lambda tile: cycles(tile, product, target)))


PARTS = 1.7e6
"""Bytes a microsecond that the launch that adds parts moves. This, MISS_CYCLES, WAIT_US and the speed in `nbcnn.ops.kernel.cost` are fitted to 260
products on an H100, whose times they give with an rms error of 7 %."""


def choices(
    product: Callable[[Any], Product],
    traffic: Callable[[Any], Sequence[Traffic]],
    engine: str = "im2col",
    awkward: Callable[[Any], float] | None = None,
    before: int = 0,
    waits: Callable[[Any], int] | None = None,
) -> dict[str, Any]:
    """`engine`, `tile`, `candidates`, `traffic` and `estimate` of an `Impl`: the first of `ranked`, and the first two splits of every tile.

    before: launches before the product. waits: call -> the loads that follow one another where parts are added; one, if they are all in flight.
    """

    def tile(call: Any, target: Target) -> Tile:
        return ranked(product(call), target)[0]

    def candidates(call: Any, target: Target) -> list[Tile]:
        listed: dict[Tile, list[Tile]] = {}
        for one in ranked(product(call), target):
            listed.setdefault(unsplit(one), []).append(one)
        return [one for splits in listed.values() for one in splits[:2]]

    def estimate(call: Any, target: Target) -> float:
        launches = traffic(call)
        loaded = launches[before]
        took = product_cycles(call.tile, product(call), target, loaded.distinct / loaded.read) / CYCLES_A_MICROSECOND
        made = microseconds((awkward(call) if awkward else 1.0) * took, [loaded], SPEEDS[engine]) + moved(launches[:before])
        wait = WAIT_US * (waits(call) if waits else 1)
        return made + sum(wait + each.logical / PARTS for each in launches[before + 1 :])

    return {"engine": engine, "tile": tile, "candidates": candidates, "traffic": traffic, "estimate": estimate}
