"""Tiles of the weight gradient on mma.sync, and the choice of one for a shape.

The GEMM is M filters × (taps of C channels) × pixels: few output tiles and a long sum. So the pixels are cut into `split`
parts, as many as make one block for every place on the GPU, and another launch adds the parts in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nbcnn.gpu.target import Target
from nbcnn.ops.conv.frame.correlation import Correlation
from nbcnn.ops.conv.frame.wgrad import OverPixels, most_parts
from nbcnn.ops.kernel.cost import CYCLES_A_MICROSECOND
from nbcnn.ops.kernel.loops import ceil_div

CHUNK = 16
"""Bytes that one copy brings at most; a column tile is made of such chunks, each of one tap."""
ALIGNMENT = 128
DESCRIPTOR = 8
"""Bytes that describe where a pixel's window lies."""
MOST_SPLIT = 264
"""Parts that the pixels are cut into at most."""
_RESERVED = 1024
_REGISTERS_OF_MULTIPROCESSOR = 65536


@dataclass(frozen=True)
class Kind:
    """How a precision lies in shared memory and multiplies.

    element   bytes of an operand's element.
    depth     pixels that one mma sums over.
    pad       bytes behind each row of a tile, so that a warp reads its fragments without bank conflicts.
    products  mma for each product: 3 where operands are split in two.
    asynchronous  cp.async brings tiles; without it, on compute capability 7.5, they go through registers.
    """

    name: str
    element: int
    depth: int
    pad: int
    products: int
    asynchronous: bool = True

    @property
    def needs(self) -> tuple[int, int]:
        """The least compute capability."""
        return (8, 0) if self.asynchronous else (7, 5)

    @property
    def chunk(self) -> int:
        """Channels of a chunk."""
        return CHUNK // self.element


KINDS = {
    "bf16": Kind("bf16", 2, 16, 16, 1),
    "tf32": Kind("tf32", 4, 8, 32, 1),
    "fp32": Kind("fp32", 4, 8, 32, 3),
    "fp16": Kind("fp16", 2, 16, 16, 1, asynchronous=False),
}


@dataclass(frozen=True)
class PixelTile(OverPixels):
    """A block's tile BM × BN over pixels in steps of BK, shared out in warp tiles WM × WN; `stages` steps are in shared memory.

    `split` blocks share one output tile. WM and WN are multiples of 32.
    """

    BM: int
    BN: int
    BK: int
    WM: int
    WN: int
    stages: int
    split: int = 1

    @property
    def threads(self) -> int:
        return 32 * (self.BM // self.WM) * (self.BN // self.WN)

    def blocks_by_registers(self, kind: Kind) -> int:
        """Blocks that the register file holds: threads have their sums, and room for fragments (more where those are split) and addresses."""
        registers = {4096: 255, 2048: 168, 1024: 128}[min(4096, self.WM * self.WN * (2 if kind.products > 1 else 1))]
        return max(1, _REGISTERS_OF_MULTIPROCESSOR // (registers * self.threads))

    @property
    def describers(self) -> int:
        """Threads that describe pixels: one for each pixel of a step, in whole warps."""
        return max(self.BK, 32)

    def pitch(self, columns: int, kind: Kind) -> int:
        """Bytes from one pixel to the next in a tile of `columns` channels."""
        return columns * kind.element + kind.pad

    def slot_bytes(self, kind: Kind) -> int:
        """Bytes of one step: BK pixels of both operands."""
        return self.BK * (self.pitch(self.BM, kind) + self.pitch(self.BN, kind))

    def shared_bytes(self, kind: Kind) -> int:
        """Dynamic shared memory of a block: room to align, the steps, the descriptors of two steps' pixels."""
        return ALIGNMENT + self.stages * self.slot_bytes(kind) + 2 * self.describers * DESCRIPTOR

    def resident(self, kind: Kind, target: Target) -> int:
        """Blocks that share a multiprocessor."""
        by_shared = (target.shared_of_block + _RESERVED) // (self.shared_bytes(kind) + _RESERVED)
        return max(1, min(by_shared, self.blocks_by_registers(kind)))

    def column_tiles(self, g: Correlation, kind: Kind) -> int:
        return ceil_div(columns(g, kind), self.BN)


def padded_channels(g: Correlation, kind: Kind) -> int:
    """Columns of one tap: its channels in whole chunks."""
    return ceil_div(g.C, kind.chunk) * kind.chunk


def columns(g: Correlation, kind: Kind) -> int:
    """GN: the columns of all taps."""
    return g.R * g.S * padded_channels(g, kind)


TILES = {
    "bf16": (
        PixelTile(128, 256, 64, 64, 64, 4),
        PixelTile(128, 128, 64, 64, 64, 3),
        PixelTile(64, 128, 64, 32, 64, 3),
        PixelTile(64, 64, 64, 32, 32, 3),
    ),
    "tf32": (
        PixelTile(128, 256, 32, 64, 64, 4),
        PixelTile(128, 128, 32, 64, 64, 3),
        PixelTile(64, 128, 32, 32, 64, 3),
        PixelTile(64, 64, 32, 32, 32, 3),
    ),
    "fp32": (
        PixelTile(128, 128, 16, 32, 64, 5),
        PixelTile(64, 128, 16, 32, 64, 5),
        PixelTile(64, 64, 16, 32, 32, 5),
    ),
    "fp16": (
        PixelTile(128, 128, 32, 64, 32, 2),
        PixelTile(64, 128, 32, 32, 32, 2),
        PixelTile(64, 64, 32, 32, 32, 2),
    ),
}
_PRODUCTS_A_CYCLE = {"bf16": 836, "tf32": 436, "fp32": 140, "fp16": 512}
"""Products that a multiprocessor full of warp tiles of 64×64 makes a cycle, measured on an H200; fp32's is a guess, fp16's what NVIDIA's whitepaper
says of Turing's tensor cores."""
_READS = {4096: 1.0, 2048: 1.25, 1024: 1.6}
"""How much longer smaller warp tiles take for a product: they read more shared memory."""
_CYCLES_A_PRODUCT, _STEP_CYCLES = 10, 500
"""Cycles that a warp on its own takes for an mma, and for a step besides: barrier, first fragments."""
_START_CYCLES = 10000
"""Cycles of a block besides its steps: start, first pixels out of memory."""
_SUM_CYCLES = 5000
_BYTES_A_CYCLE = 600
"""Cycles of the second launch, and what the GPU moves of the parts: writing them and reading them back."""


def _alone(tile: PixelTile, kind: Kind) -> float:
    """Cycles of a step of a warp on its own."""
    return _STEP_CYCLES + _CYCLES_A_PRODUCT * kind.products * tile.WM * tile.WN * tile.BK / (128 * kind.depth)


def cycles(tile: PixelTile, g: Correlation, kind: Kind, target: Target) -> float:
    """Estimated time, in cycles."""
    blocks, resident = tile.row_tiles(g) * tile.column_tiles(g, kind) * tile.parts(g), tile.resident(kind, target)
    work = tile.BM * tile.BN * tile.BK / _PRODUCTS_A_CYCLE[kind.name] * _READS[tile.WM * tile.WN]

    def wave(each: int) -> float:
        return _START_CYCLES + tile.steps(g) * max(_alone(tile, kind), each * work)

    waves, rest = divmod(ceil_div(blocks, target.multiprocessors), resident)
    parts_bytes = 4 * tile.parts(g) * g.K * columns(g, kind)
    return waves * wave(resident) + (wave(rest) if rest else 0) + _SUM_CYCLES + parts_bytes / _BYTES_A_CYCLE


@dataclass(frozen=True)
class Rates:
    """What a launch takes beside other engines.

    launch     microseconds of it, however little it does
    start      cycles of a tile besides its steps
    products   how many times as long as _PRODUCTS_A_CYCLE say products take
    reads      how much longer warp tiles of 2,048 and of 1,024 results take for one
    parts      bytes of parts a microsecond, which stay in L2
    """

    launch: float
    start: float
    products: float
    reads: tuple[float, float]
    parts: float


BESIDE = {
    "bf16": Rates(2.41, 1470, 0.844, (1.78, 2.47), 2.18e6),
    "tf32": Rates(1.59, 3880, 1.04, (1.45, 1.75), 2.99e6),
    "fp32": Rates(0.51, 4510, 0.937, (1.34, 1.53), 2.01e6),
}
"""Fitted to 205 times of the chosen tile on an H100, which they give with rms errors of 7, 5 and 5 %.

Small warp tiles read shared memory for longer than they multiply: for a product one of 32×64 reads 1.5 times the bytes of one of 64×64, one of 32×32
twice.
"""
BESIDE["fp16"] = BESIDE["bf16"]  # not measured
_SOFT, _MEMORY_SOFT, _MEMORY = 6, 4, 2.8e6


def microseconds(tile: PixelTile, g: Correlation, kind: Kind, moved: float, awkward: float, target: Target) -> float:
    """Estimated time of the product, whose operands and results are `moved` bytes; it takes `awkward` times as long for the channels of pixels."""
    rates, resident = BESIDE[kind.name], tile.resident(kind, target)
    reads = {4096: 1.0, 2048: rates.reads[0], 1024: rates.reads[1]}[tile.WM * tile.WN]
    work = rates.products * reads * tile.BM * tile.BN * tile.BK / _PRODUCTS_A_CYCLE[kind.name]

    def wave(each: int) -> float:
        return rates.start + tile.steps(g) * float(_alone(tile, kind) ** _SOFT + (each * work) ** _SOFT) ** (1 / _SOFT)

    blocks = tile.row_tiles(g) * tile.column_tiles(g, kind) * tile.parts(g)
    waves, rest = divmod(blocks, resident * target.multiprocessors)
    took = awkward * (waves * wave(resident) + (wave(ceil_div(rest, target.multiprocessors)) if rest else 0.0)) / CYCLES_A_MICROSECOND
    return rates.launch + float(took**_MEMORY_SOFT + (moved / _MEMORY) ** _MEMORY_SOFT) ** (1 / _MEMORY_SOFT)


def candidates(g: Correlation, kind: Kind, target: Target) -> Iterator[PixelTile]:
    """Every tile that the GPU has shared memory for, with the splits that fill half a wave, one or two, or leave the pixels whole."""
    for tile in TILES[kind.name]:
        if tile.shared_bytes(kind) > target.shared_of_block:
            continue
        outputs = tile.row_tiles(g) * tile.column_tiles(g, kind)
        most = most_parts(g.K * columns(g, kind), ceil_div(g.GM, tile.BK), MOST_SPLIT)
        places = target.multiprocessors * tile.resident(kind, target)
        for split in sorted({1, *(min(most, max(1, waves * places // outputs)) for waves in (0.5, 1, 2))}):
            yield replace(tile, split=int(split))


def choose(g: Correlation, kind: Kind, target: Target) -> PixelTile:
    """The candidate with the least estimated time."""
    return min(candidates(g, kind, target), key=lambda tile: cycles(tile, g, kind, target))
