"""Tiles of the correlation kernel, and the choice among them."""

from __future__ import annotations

from dataclasses import dataclass

from nbcnn.ops.conv.frame.correlation import Correlation, whole
from nbcnn.ops.conv.frame.cost import Work
from nbcnn.ops.conv.wgmma.split import PRODUCTS
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES

ALIGNMENT = 1024
"""Swizzled tiles start at multiples of this."""
WARPGROUP = 128
_SHARED_OF_BLOCK = 227 * 1024
_SHARED_OF_MULTIPROCESSOR = 228 * 1024
_RESERVED = 1024
_BARRIERS = 256


@dataclass(frozen=True)
class Tile:
    """A block's tile BM × BN over GK in steps of 128 bytes; `groups` warpgroups share its rows; `slots` steps are in flight, the stages of its ring.

    `blocks` blocks share a multiprocessor. BM is `groups` times 64 or 128.
    """

    BM: int
    BN: int
    groups: int
    slots: int
    blocks: int

    @property
    def threads(self) -> int:
        """Consumer warpgroups and one producer warp."""
        return self.groups * WARPGROUP + 32

    def chunk(self, g: Correlation) -> int:
        """Pixels whose moments are taken together."""
        return self.BM


@dataclass(frozen=True)
class Kind:
    """How a precision multiplies: bytes of an operand's element, planes an operand is split into, bytes of a result's element."""

    name: str
    element: int
    planes: int
    result: int

    @property
    def channels(self) -> int:
        """Channels of a row of a tile."""
        return ROW_BYTES // self.element


STEPS_OF_ROW = 4
"""Instructions along K in which a row of 128 bytes is multiplied, 16 channels each of bfloat16, 8 of tf32."""
_MOST_STAGES_OF_TAP = 4
KINDS = {"bf16": Kind("bf16", 2, 1, 2), "tf32": Kind("tf32", 4, 1, 4), "fp32": Kind("fp32", 2, 3, 4)}


def steps_of_tap(C: int, kind: Kind) -> tuple[int, ...]:
    """Instructions along K of every stage of a tap: in the last one those that have channels, of 96 of bfloat16 (4, 2) instead of (4, 4).

    Where a tap has many stages they are all alike: the zeros of its last are few, and each stage is code of its own.
    """
    stages, left = -(-C // kind.channels), C % kind.channels
    if kind.planes > 1 or left == 0 or stages > _MOST_STAGES_OF_TAP:
        return (STEPS_OF_ROW,)
    return (*[STEPS_OF_ROW] * (stages - 1), -(-left * STEPS_OF_ROW // kind.channels))


def stage_bytes(tile: Tile, kind: Kind) -> int:
    """Bytes of one step: the rows of both operands, in every plane."""
    return kind.planes * (tile.BM + tile.BN) * ROW_BYTES


def pitch(tile: Tile, kind: Kind) -> int:
    """Bytes from one row of results in shared memory to the next; the padding keeps the eight rows a warp writes in different banks."""
    return tile.BN * kind.result + 8 * kind.result


def shared_bytes(tile: Tile, kind: Kind) -> int:
    """Dynamic shared memory of a block: room to align, the ring (results reuse it), its barriers."""
    return ALIGNMENT + max(tile.slots * stage_bytes(tile, kind), tile.BM * pitch(tile, kind)) + _BARRIERS


def fits(tile: Tile, kind: Kind) -> bool:
    """True if `tile.blocks` blocks fit into a multiprocessor."""
    need = shared_bytes(tile, kind)
    return need <= _SHARED_OF_BLOCK and tile.blocks * (need + _RESERVED) <= _SHARED_OF_MULTIPROCESSOR


_ONE_PLANE = (
    Tile(128, 256, 2, 4, 1),
    Tile(256, 128, 2, 4, 1),
    Tile(128, 192, 2, 5, 1),
    Tile(128, 160, 2, 5, 1),
    Tile(128, 128, 2, 3, 2),
    Tile(64, 256, 1, 5, 1),
    Tile(128, 96, 2, 3, 2),
    Tile(256, 64, 2, 5, 1),
    Tile(256, 96, 2, 5, 1),
    Tile(128, 64, 2, 4, 2),
    Tile(64, 128, 1, 4, 2),
    Tile(64, 64, 1, 6, 2),
    Tile(64, 64, 1, 4, 3),
)
_TILES = {
    "bf16": _ONE_PLANE,
    "tf32": _ONE_PLANE,
    "fp32": (
        Tile(128, 128, 2, 2, 1),
        Tile(128, 64, 2, 3, 1),
        Tile(64, 64, 1, 2, 2),
    ),
}


def candidates(g: Correlation, kind: Kind, epilogue: str = "rows") -> list[Tile]:
    """The tiles that serve a correlation: all, with pooling those whose rows are whole pairs of image rows.

    Where a thread of the epilogue owns columns (of a pooling, of moments) BN is a power of two.
    """
    powers = [tile for tile in _TILES[kind.name] if tile.BN & (tile.BN - 1) == 0]
    if epilogue == "pool":
        return [tile for tile in powers if tile.BM % (2 * g.Q) == 0]
    return powers if epilogue == "moments" else list(_TILES[kind.name])


def tiles_of(g: Correlation, tile: Tile) -> tuple[int, int]:
    """Tiles along GM, and along GN over all phases."""
    return -(-g.GM // tile.BM), g.phases * -(-g.K // tile.BN)


def product_cycles(kind: Kind, rows: int, columns: int) -> float:
    """Cycles of a multiprocessor's tensor cores for one step of rows × columns: 2,048 products of bfloat16 per cycle, or half as many of tf32."""
    return len(PRODUCTS[kind.planes]) * rows * columns * kind.channels / (2048 if kind.element == 2 else 1024)


def product_bytes(kind: Kind, rows: int, columns: int) -> float:
    """Bytes of shared memory that wgmma reads for it: of every 64 rows those rows and all columns."""
    return len(PRODUCTS[kind.planes]) * rows // 64 * (64 + columns) * ROW_BYTES


def compulsory_bytes(g: Correlation, kind: Kind, epilogue: str) -> float:
    """Bytes that any launch of the correlation moves: its source, filters and results once, and what the epilogue reads."""
    results = g.phases * g.GM * g.K * kind.result
    source = kind.planes * kind.element * (g.N * g.H * g.W * g.C + g.phases * g.K * g.mean_taps * g.C)
    return source + results * {"mask": 2.0, "sums": 2.0, "pool": 0.25}.get(epilogue, 1.0)


def end_bytes(g: Correlation, kind: Kind, rows: int, columns: int, epilogue: str) -> float:
    """Bytes that the epilogue of a tile of rows × columns moves: to shared memory and out of it, to memory, and the mask from there."""
    return rows * columns * kind.result * {"mask": 4.0, "sums": 5.0, "pool": 2.25, "moments": 4.0}.get(epilogue, 3.0)


def work(g: Correlation, kind: Kind, tile: Tile, epilogue: str) -> Work:
    """What a launch of the kernel asks for."""
    down, across = tiles_of(g, tile)
    landed, tap = stage_bytes(tile, kind), steps_of_tap(g.C, kind)
    multiplied = sum(tap) / (len(tap) * STEPS_OF_ROW)
    return Work(
        tiles=down * across,
        together=tile.blocks,
        steps=g.mean_taps * (whole(g.C, kind.channels) // kind.channels),
        ahead=tile.slots,
        tensor=multiplied * product_cycles(kind, tile.BM, tile.BN),
        shared=landed + multiplied * product_bytes(kind, tile.BM, tile.BN),
        fetched=landed,
        ends=end_bytes(g, kind, tile.BM, tile.BN, epilogue),
        memory=compulsory_bytes(g, kind, epilogue),
    )
