"""Tiles of the product, and the choice of one for a shape.

The choice minimises a small model of the time, in cycles of a multiprocessor. r blocks on a multiprocessor need r times the products of
a k-tile, but never less than one block takes by itself. Blocks run in waves of as many as fit. Splitting GK shortens small problems, and
costs a second kernel that adds the parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from nbcnn.gpu.target import Target
from nbcnn.ops.conv.frame.awkward import narrow
from nbcnn.ops.conv.frame.correlation import Correlation
from nbcnn.ops.kernel.cost import CYCLES_A_MICROSECOND
from nbcnn.ops.kernel.tiles import unsplit
from nbcnn.ops.ptx.mma import mma_bf16, mma_f16, mma_tf32

ROW_BYTES = 128
"""Bytes of one row of an operand in one k-tile."""
SHARED_OF_BLOCK = 99 * 1024
"""Bytes of shared memory that a block may have on every GPU from compute capability 8.0 on."""


@dataclass(frozen=True)
class Kind:
    """How a precision multiplies.

    element   bytes of an operand in memory.
    store     how activations and packed filters are stored (`nbcnn.plan.storage`).
    products  products of tensor cores behind one of the result: three where operands are split in two.
    cycles    of a multiprocessor, for one result of one k-tile, with enough warps and large parts for each.
    asynchronous  cp.async brings tiles; without it, on compute capability 7.5, they go through registers.
    """

    name: str
    element: int
    store: str
    products: int
    multiply: Any
    cycles: float
    asynchronous: bool = True

    @property
    def needs(self) -> tuple[int, int]:
        """The least compute capability."""
        return (8, 0) if self.asynchronous else (7, 5)

    @property
    def channels(self) -> int:
        """Elements of a row of a k-tile."""
        return ROW_BYTES // self.element


KINDS = {
    "bf16": Kind("bf16", 2, "bfloat16", 1, mma_bf16, 0.060),
    "tf32": Kind("tf32", 4, "tfloat32", 1, mma_tf32, 0.058),
    "fp32": Kind("fp32", 4, "float32", 3, mma_tf32, 0.202),
    # Not measured: 512 products in a cycle of a multiprocessor are what NVIDIA's whitepaper says of Turing's tensor cores.
    "fp16": Kind("fp16", 2, "float16", 1, mma_f16, 0.125, asynchronous=False),
}


@dataclass(frozen=True)
class Tile:
    """A block owns BM×BN results; its warps stand WM down and WN across; `stages` k-tiles are in flight; `split` blocks share GK.

    `blocks` blocks share a multiprocessor: the compiler keeps to the registers that leaves. Raises ValueError for sizes that
    cannot be laid out.
    """

    BM: int
    BN: int
    WM: int
    WN: int
    stages: int
    blocks: int
    split: int = 1

    def __post_init__(self) -> None:
        if self.BM % (16 * self.WM) or self.BN % (16 * self.WN):
            raise ValueError(f"{self}: a warp's part must be made of 16×16 results")
        if self.stages < 2 or self.BM % (self.threads // 8) or self.BN % (self.threads // 8) or self.threads < self.BN // 4:
            raise ValueError(f"{self}: {self.threads} threads cannot share the rows of its operands")
        if self.shared_bytes > SHARED_OF_BLOCK:
            raise ValueError(f"{self}: {self.shared_bytes} bytes of shared memory are more than every GPU has for a block")

    @property
    def threads(self) -> int:
        return 32 * self.WM * self.WN

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one k-tile of both operands."""
        return (self.BM + self.BN) * ROW_BYTES

    @property
    def pitch(self) -> int:
        """Floats from one row of results in shared memory to the next: the eight more keep the rows that a warp writes in different banks."""
        return self.BN + 8

    @property
    def ring_bytes(self) -> int:
        """Shared memory of the k-tiles in flight; the results take their place in the end."""
        return max(self.stages * self.stage_bytes, self.BM * self.pitch * 4)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the ring, and three words for every row."""
        return self.ring_bytes + 12 * self.BM

    def tiles(self, g: Correlation) -> int:
        """Output tiles over all phases."""
        return -(-g.GM // self.BM) * -(-g.K // self.BN) * g.phases

    def chunk(self, g: Correlation) -> int | None:
        """Pixels whose moments are taken together; None where GK is split, and no block has whole sums."""
        return self.BM if self.split == 1 else None

    def part(self, k_tiles: int) -> int:
        """k-tiles of one of the `split` parts (the last may have fewer)."""
        return -(-k_tiles // self.split)


_SMALL = (Tile(64, 64, 2, 2, 4, 3), Tile(32, 64, 2, 2, 4, 4), Tile(32, 32, 2, 2, 4, 4))
WHOLE = {
    "bf16": (Tile(128, 128, 2, 2, 3, 2), Tile(128, 64, 2, 2, 3, 3), *_SMALL),
    "tf32": (Tile(128, 128, 2, 2, 3, 2), Tile(128, 64, 2, 2, 3, 3), *_SMALL),
    # A float32 sum has a second register for the k-tile at hand.
    "fp32": (Tile(128, 128, 2, 4, 3, 1), Tile(128, 64, 2, 2, 3, 2), *_SMALL),
    # Compute capability 7.5 has 64 KiB of shared memory, which all but the first fit: two stages, and eight warps where there is room for one block.
    "fp16": (Tile(128, 128, 2, 4, 3, 1), Tile(128, 64, 4, 2, 2, 1), Tile(64, 64, 2, 4, 2, 1), Tile(32, 64, 2, 2, 2, 2), Tile(32, 32, 2, 2, 2, 3)),
}
"""Tiles for operands that can be read 16 bytes at a time."""
RAGGED = (Tile(64, 64, 2, 2, 3, 2), Tile(32, 32, 2, 2, 3, 2))
"""Tiles for all others."""
MAX_SPLIT = 16

_STEP_CYCLES, _STEP_ALONE = 250, 1.4
"""What a k-tile takes a block that has the multiprocessor to itself: barrier and first loads from shared memory, and how much
longer its products take one after another. These numbers and those of `KINDS` were fitted to times of conv2, batch 1 and 256, on an H200."""
_START_CYCLES = 2200
"""First loads, results to memory."""
_SUM_CYCLES, _PART_CYCLES = 3000, 190
"""The second kernel, and what each part costs besides what it moves."""
_BYTES_A_CYCLE = 20
"""What a multiprocessor moves of the parts."""


def width(g: Correlation, kind: Kind) -> int:
    """Elements of the source that can be copied at once: 16 bytes' worth, a pair of halves, or one."""
    return next(count for count in (16 // kind.element, 4 // kind.element, 1) if g.C % count == 0)


def candidates(g: Correlation, kind: Kind, target: Target) -> list[Tile]:
    """Every tile that serves a gather and that the GPU has shared memory for, with every split."""
    k_tiles = g.k_tiles(kind.channels)
    shapes: Iterable[Tile] = WHOLE[kind.name] if width(g, kind) * kind.element == 16 else RAGGED
    made = []
    for tile in shapes:
        if tile.shared_bytes > target.shared_of_block:
            continue
        # Equal parts: where rounding up leaves the last blocks without work, they are not started.
        for split in range(1, min(k_tiles, MAX_SPLIT) + 1):
            made.append(replace(tile, split=-(-k_tiles // -(-k_tiles // split))))
    return list(dict.fromkeys(made))


def cycles(tile: Tile, g: Correlation, kind: Kind, target: Target) -> float:
    """Estimated time in cycles, without the launch."""
    blocks = tile.tiles(g) * tile.split
    steps = tile.part(g.k_tiles(kind.channels))
    products = kind.cycles * tile.BM * tile.BN
    # The smaller a warp's part, the more of its time goes into loading fragments.
    work = products * (1 + 8 * tile.WM / tile.BM + 8 * tile.WN / tile.BN)

    def wave(blocks_each: int) -> float:
        return _START_CYCLES + steps * max(_STEP_CYCLES + _STEP_ALONE * products, blocks_each * work)

    waves, rest = divmod(blocks, tile.blocks * target.multiprocessors)
    total = waves * wave(tile.blocks) + (wave(-(-rest // target.multiprocessors)) if rest else 0)
    if tile.split > 1:
        bytes_of_parts = (2 * tile.split + 1) * 4 * g.phases * g.GM * g.K
        total += _SUM_CYCLES + tile.split * _PART_CYCLES + bytes_of_parts / (_BYTES_A_CYCLE * target.multiprocessors)
    return total


@dataclass(frozen=True)
class Rates:
    """What a launch takes beside other engines.

    launch     microseconds of it, however little it does
    start      cycles of a tile besides its k-tiles
    latency    cycles of a k-tile that a block alone waits, and `alone` times its products
    products   part of `Kind.cycles` that products take where the operands are there; fetched: bytes of operands per cycle of a multiprocessor
    narrow     power of the copies that 16 bytes of a pixel take, by which operands come more slowly
    memory     bytes a microsecond of the whole GPU
    second     microseconds of the sum of the parts, and the bytes of parts a microsecond, which stay in L2
    """

    launch: float
    start: float
    latency: float
    alone: float
    products: float
    fetched: float
    narrow: float
    memory: float
    second: float
    parts: float


BESIDE = {
    "bf16": Rates(0.50, 5110, 146, 0.69, 0.764, 67.4, 0.17, 2.4e6, 1.22, 40e6),
    "tf32": Rates(2.45, 2930, 36, 2.34, 0.699, 72.8, 0.08, 2.1e6, 1.51, 32.4e6),
    "fp32": Rates(2.25, 3070, 422, 0.84, 0.563, 22.0, 0.07, 2.4e6, 2.09, 8.5e6),
}
"""Fitted to 416 times of the chosen tile beside other engines, on an H100; ratios within a step count more than times."""
BESIDE["fp16"] = BESIDE["bf16"]  # not measured
_SOFT = 8


def microseconds(tile: Tile, g: Correlation, kind: Kind, moved: float, target: Target) -> float:
    """Estimated time of all launches, whose operands and results are `moved` bytes."""
    rates, products, p = BESIDE[kind.name], kind.cycles * tile.BM * tile.BN, _SOFT
    copies = narrow((g.C,), kind.element, rates.narrow)
    work = rates.products * products + tile.stage_bytes * copies / rates.fetched

    def wave(blocks: int) -> float:
        alone = rates.latency + rates.alone * products
        return rates.start + tile.part(g.k_tiles(kind.channels)) * float(alone**p + (blocks * work) ** p) ** (1 / p)

    waves, rest = divmod(tile.tiles(g) * tile.split, tile.blocks * target.multiprocessors)
    took = waves * wave(tile.blocks) + (wave(-(-rest // target.multiprocessors)) if rest else 0.0)
    total = rates.launch + float((took / CYCLES_A_MICROSECOND) ** p + (moved / rates.memory) ** p) ** (1 / p)
    return total + (rates.second + 8 * tile.split * g.phases * g.GM * g.K / rates.parts if tile.split > 1 else 0.0)


@cache
def choose(g: Correlation, kind_name: str, target: Target) -> Tile:
    """The tile with the least estimated time."""
    kind = KINDS[kind_name]
    return min(candidates(g, kind, target), key=lambda tile: cycles(tile, g, kind, target))


def worth_measuring(g: Correlation, kind: Kind, target: Target) -> list[Tile]:
    """Each tile with its two splits of the least estimated times."""
    made: dict[Tile, list[Tile]] = {}
    for tile in sorted(candidates(g, kind, target), key=lambda tile: cycles(tile, g, kind, target)):
        made.setdefault(unsplit(tile), []).append(tile)
    return [tile for splits in made.values() for tile in splits[:2]]
