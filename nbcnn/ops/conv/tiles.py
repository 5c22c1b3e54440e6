"""Tile: how an implicit GEMM is cut into blocks and threads."""

from __future__ import annotations

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
        if self.BM % self.TM or self.BN % self.TN or self.threads % 32:
            raise ValueError(f"{self}: thread tiles must fill the block tile with whole warps")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.BM // self.TM) * (self.BN // self.TN)

    @property
    def blocks_per_multiprocessor(self) -> int:
        """Blocks that the register file (65,536) holds; what `launch_bounds` promises, and so the compiler's register limit.

        64 accumulators need about 128 registers a thread, 128 need about 250, 16 and 32 fit into 64 and 80.
        """
        registers = {16: 64, 32: 80, 64: 128, 128: 255}[self.TM * self.TN]
        return max(1, 65536 // (registers * self.threads))

    def grid(self, GM: int, GN: int) -> tuple[int, int]:
        """(output tiles, split): block x walks the columns of one row of tiles first, y is the split."""
        return ceil_div(GM, self.BM) * ceil_div(GN, self.BN), self.split

    def k_tiles(self, GK: int) -> int:
        """Steps of BK that one of the `split` blocks makes (the last may make fewer)."""
        return ceil_div(ceil_div(GK, self.BK), self.split)


def unsplit(tile: Tile) -> Tile:
    """`tile` without its split, which is a matter of the grid: what kernels are compiled for."""
    return replace(tile, split=1)


def choose(path: str, GM: int, GN: int, GK: int, channels: int, multiprocessors: int) -> Tile:
    """placeholder"""
    fast = channels % 16 == 0
    t = Tile(128, 128, 16, 8, 8) if fast and GM >= 128 and GN >= 128 else Tile(64, 64, 16, 4, 4)
    n = t.grid(GM, GN)[0]
    slots = 2 * multiprocessors
    split = max(1, min(slots // n, -(-GK // 16)))
    return replace(t, split=split)
