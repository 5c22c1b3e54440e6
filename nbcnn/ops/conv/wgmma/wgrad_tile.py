"""Tiles of the weight gradient, and the choice of one for a shape.

The GEMM is K × (taps of C channels) × pixels: few output tiles and a long sum. So the pixels are cut into `split` parts, as
many as make one block for every place on the GPU, and another launch adds the parts in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nbcnn.gpu.target import Target
from nbcnn.ops.conv.frame.correlation import Correlation
from nbcnn.ops.conv.frame.cost import Work, lines_of
from nbcnn.ops.conv.frame.wgrad import OverPixels, most_parts
from nbcnn.ops.conv.wgmma.split import PRODUCTS, SPLIT_BYTES
from nbcnn.ops.conv.wgmma.tile import ALIGNMENT, WARPGROUP
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES

WARP = 32
HELPERS = 3
"""Helper warps of a block: with them 384 threads, which leaves a consumer the 168 registers that 128 sums need."""
HELPER_REGISTERS, CONSUMER_REGISTERS = 72, 216
"""Registers per thread after setmaxnreg where two warpgroups read an operand through registers: 384 threads start with 168 each; the 128 that fetch
and transpose keep 72, so the 256 that multiply get 216."""
BARRIERS = 256
HELPED = 4096
"""Bytes in which helper warps bring their sums together."""
_SHARED_OF_MULTIPROCESSOR = 228 * 1024
_RESERVED = 1024
_PROMOTION = 2.5
"""Cycles in which the threads of a warpgroup add one sum each, and what the wait for the product before costs, shared out among the sums."""
MOST_SPLIT = 132
"""Parts that the pixels are cut into at most."""


@dataclass(frozen=True)
class PixelTile(OverPixels):
    """A block's tile BM × BN over pixels in steps of BK; `groups` warpgroups share its rows; `slots` steps are in flight, the stages of its ring.

    element  bytes of an operand's element: 2 (bfloat16) or 4 (tf32), 32 pixels per step, of which the shifted operand goes through registers.
    planes   of float32: 3 of bfloat16, made before the product and brought by TMA, or 2 of tf32, made by the warps that read them. Otherwise 1.
    split    blocks that share one output tile, over a part of the pixels each.

    A tile lies in shared memory as panels of BK pixels × 128 bytes. BM is `groups` times 64 or 128, BN whole panels. Of four-byte elements the
    warpgroups share the columns instead: BN is `groups` times 128, a panel per warp. Raises ValueError for another BN.
    """

    BM: int
    BN: int
    BK: int
    groups: int
    slots: int
    element: int = 2
    planes: int = 1
    split: int = 1

    def __post_init__(self) -> None:
        if self.element == 4 and WARPGROUP * self.groups != self.BN:
            raise ValueError(f"{self.groups} warpgroups that read four-byte elements have {WARPGROUP * self.groups} columns, not {self.BN}")

    @property
    def panel(self) -> int:
        """Channels of a panel."""
        return ROW_BYTES // self.element

    @property
    def through_registers(self) -> bool:
        """Whether the shifted operand goes through registers, so that the stationary one alone is transposed (`wgrad_registers`)."""
        return self.element == 4

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return self.groups * WARPGROUP

    def threads(self, bias: bool) -> int:
        """The consumers, one producer warp, and three helper warps: of four-byte elements always, else where there is a bias gradient to add up."""
        return self.consumers + WARP + (HELPERS * WARP if bias or self.element == 4 else 0)

    @property
    def panel_bytes(self) -> int:
        return self.BK * ROW_BYTES

    @property
    def planes_in_memory(self) -> int:
        return self.planes if self.element == 2 else 1

    @property
    def plane_bytes(self) -> int:
        """Bytes of BK pixels of both operands in one plane."""
        return (self.BM + self.BN) // self.panel * self.panel_bytes

    @property
    def landed_bytes(self) -> int:
        """Bytes that TMA writes in one step."""
        return self.planes_in_memory * self.plane_bytes

    @property
    def stage_bytes(self) -> int:
        """Bytes of one step in the ring: of two planes of tf32 the second is of the transposed operand alone."""
        if self.through_registers:
            return self.landed_bytes + (self.planes - 1) * self.BM // self.panel * self.panel_bytes
        return self.landed_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: room to align, the ring, its barriers, the helpers' sums."""
        return ALIGNMENT + self.slots * self.stage_bytes + BARRIERS + HELPED

    def lines(self, g: Correlation) -> float:
        """Lines of L2 that a step asks for: a pixel of a panel is one or two."""
        of_operands = (self.BM * lines_of(g.K * self.element), self.BN * lines_of(g.C * self.element))
        return self.planes_in_memory * self.BK * sum(of_operands) / self.panel

    def column_tiles(self, g: Correlation) -> int:
        """Tiles across all panels; every tap has its own panels."""
        return ceil_div(g.R * g.S * ceil_div(g.C, self.panel), self.BN // self.panel)

    def whole(self, g: Correlation) -> bool:
        """With one tap a part lies as dw does: (K, C)."""
        return g.taps == 1 and self.parts(g) == 1

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
        PixelTile(64, 256, 32, 2, 5, element=4),
        PixelTile(64, 128, 32, 1, 4, element=4),
    ),
    "fp32": (
        PixelTile(128, 128, 64, 2, 2, planes=3),
        PixelTile(128, 64, 64, 2, 3, planes=3),
        PixelTile(64, 128, 64, 1, 3, planes=3),
        PixelTile(64, 64, 64, 1, 2, planes=3),
        PixelTile(64, 64, 64, 1, 4, planes=3),
        PixelTile(64, 256, 32, 2, 4, element=4, planes=2),
        PixelTile(64, 128, 32, 1, 6, element=4, planes=2),
    ),
}


def partials_bytes(g: Correlation, tile: OverPixels) -> float:
    """Bytes of the partials of the weight gradient."""
    return 4.0 * tile.partials_written(g) * g.K * g.taps * g.C


def compulsory_bytes(g: Correlation, element: int) -> float:
    """Bytes of both operands once."""
    return element * g.N * (g.H * g.W * g.C + g.P * g.Q * g.K)


def work(g: Correlation, tile: PixelTile) -> Work:
    """What the launch asks for. Through shared memory go the tiles that TMA writes, and what wgmma reads of them; of four-byte elements wgmma reads
    the stationary operand alone, once for every 64 columns, which helper warps read and write once more for each plane.
    """
    # No other warpgroup multiplies while a lone one adds what a step of planes has made to its sums.
    promoted = _PROMOTION * tile.BM * tile.BN / tile.consumers if tile.planes > 1 and tile.groups == 1 else 0.0
    products = len(PRODUCTS[tile.planes])
    if tile.through_registers:
        read = tile.BK * tile.element * (tile.BN + (1 + tile.planes) * tile.BM + products * tile.BN // 64 * tile.BM)
    else:
        read = products * tile.BM // 64 * (64 + tile.BN) * tile.BK * tile.element
    return Work(
        tiles=tile.row_tiles(g) * tile.column_tiles(g) * tile.parts(g),
        together=_SHARED_OF_MULTIPROCESSOR // (tile.shared_bytes + _RESERVED),
        steps=tile.steps(g),
        ahead=tile.slots,
        tensor=products * tile.BM * tile.BN * tile.BK / (2048 if tile.element == 2 else 1024) + promoted,
        shared=tile.landed_bytes + read,
        fetched=tile.landed_bytes,
        ends=4.0 * tile.BM * tile.BN,
        memory=compulsory_bytes(g, tile.planes_in_memory * tile.element),
        parts=0.0 if tile.whole(g) else partials_bytes(g, tile),
        # A plan shares planes of dy with the input gradient, and those of x with the forward pass: a half of what splitting them costs counts here.
        # A step of the side branch, and of a plan that is cut into parts (`nbcnn.run.function`), pays for all of it.
        before=SPLIT_BYTES / 2 * g.N * (g.H * g.W * g.C + g.P * g.Q * g.K) if tile.planes_in_memory > 1 else 0.0,
    )


def candidates(g: Correlation, precision: str, target: Target) -> Iterator[PixelTile]:
    """Every tile with the splits that fill half a wave, or one to four, or leave the pixels whole."""
    for tile in _TILES[precision]:
        if tile.planes_in_memory > 1 and (g.C % 8 or g.K % 8):
            continue  # pixels of planes would not start at whole 16 bytes
        outputs = tile.row_tiles(g) * tile.column_tiles(g)
        most = most_parts(g.K * g.taps * g.C, tile.pixel_steps(g), MOST_SPLIT)
        for split in sorted({1, *(min(most, max(1, int(waves * target.multiprocessors) // outputs)) for waves in (0.5, 1, 2, 3, 4))}):
            yield replace(tile, split=split)
