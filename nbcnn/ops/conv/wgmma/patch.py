"""Geometry of the patch kernel: which pixels a block owns, and the patch of the source that it needs.

Loaded tap by tap, every pixel of the source crosses from L2 R·S times, and that bounds the kernel of `kernel.py`. Here a block loads a patch once:
its pixels and the border around them, 64 channels deep. The rows of A for tap (r, s) are then rows of the patch, r·PW + s further on.

wgmma wants 64 rows in groups of eight, neighbours in memory, at one distance from group to group: 8×8 pixels, whose lines are PW rows apart.
So a block owns TN images' TH×TW pixels, in squares of 8×8; H and W are multiples of 8.

With stride 2 a patch holds every second pixel of every second line: four patches, one for each parity, take their share of the taps.

Where filters are the rows of a product and pixels its columns (`swapped`), one wgmma has up to 256 of these: a strip of lines of eight pixels.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace

from nbcnn.gpu.target import Target
from nbcnn.ops.conv.frame.correlation import SQUARE, Correlation, Spans, has_patches, whole
from nbcnn.ops.conv.frame.cost import Work
from nbcnn.ops.conv.frame.moments import Columns
from nbcnn.ops.conv.wgmma.tile import ALIGNMENT, WARPGROUP, Kind, compulsory_bytes, end_bytes, product_bytes, product_cycles
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES
from nbcnn.plan.arena import align

_SHARED_OF_BLOCK = 227 * 1024
_SHARED_OF_MULTIPROCESSOR = 228 * 1024
_RESERVED = 1024
BARRIER_BYTES = 256
WARPS = 4
"""Warps of a warpgroup, of whose sums each channel has one."""


@dataclass(frozen=True)
class PatchTile:
    """A block's tile: TN·TH·TW pixels × BN channels; `groups` warpgroups; `slots` taps of filters and two patches in flight.

    `blocks` of them share a multiprocessor, and `resident` run in all, each taking one tile after another. Where `turns` is 2, `groups` is 1: two
    warpgroups take whole tiles alternately, so that one stores its results while the other multiplies (CUTLASS calls it ping-pong).

    swapped: filters are the rows of a product and pixels its columns, 8·TH of them, one or two such strips per warpgroup. wgmma reads 64 rows and
    all columns from shared memory for every product: of 64 filters and 256 pixels 80 bytes in a cycle of the tensor cores, of 64 pixels and 64
    filters 128, which is all that shared memory gives. Raises ValueError for other turns and strips.
    """

    TN: int
    TH: int
    TW: int
    BN: int
    groups: int
    slots: int
    blocks: int
    resident: int
    turns: int = field(default=1, kw_only=True)
    swapped: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.swapped and (self.BN != 64 or self.strips not in (1, 2) or self.groups * self.strips * self.strip != self.BM):
            raise ValueError(f"{self}: 64 filters are the rows, and one or two strips of {SQUARE}×TH pixels the columns")
        if self.turns != 1 and ((self.turns, self.groups) != (2, 1) or (self.keeps and not self.swapped)):
            raise ValueError(f"{self}: two warpgroups take tiles alternately, each alone; filters stay where products are swapped")

    @property
    def BM(self) -> int:
        return self.TN * self.TH * self.TW

    @property
    def strip(self) -> int:
        """Pixels that are the columns of one product, where these are swapped: eight of each line."""
        return SQUARE * self.TH

    @property
    def strips(self) -> int:
        """Strips of a warpgroup, where products are swapped."""
        return self.BM // self.groups // self.strip

    @property
    def keeps(self) -> bool:
        """True if the filters of all taps and channels are loaded once and stay: `slots` is then their number of steps."""
        return False

    @property
    def threads(self) -> int:
        """Consumer warpgroups and one producer warp."""
        return self.turns * self.groups * WARPGROUP + 32

    def chunk(self, g: Correlation) -> int | None:
        """Pixels whose moments are taken together: a warpgroup's; None where the last tile has fewer images than the others."""
        return self.BM // self.groups if g.N % self.TN == 0 else None


@dataclass(frozen=True)
class KeepingTile(PatchTile):
    """A tile of a correlation whose filters all fit into shared memory, in `kept` steps (`slots` as well): a block loads them once, not once per
    tile.

    That is where few filters make short tiles: with 64 of 64 channels a tap's filters would be 8 KB for 128 pixels' 16 KB of operands.
    """

    kept: int

    @property
    def keeps(self) -> bool:
        return True


@dataclass(frozen=True)
class Window:
    """What a kernel freezes of a correlation: taps of one patch (R×S), and the stride, whose square is the number of patches.

    spans: the taps of each phase, if not all have all.
    """

    R: int
    S: int
    stride: int
    spans: Spans | None = None

    @property
    def taps(self) -> int:
        return self.R * self.S


def window(g: Correlation) -> Window:
    return Window(g.R // g.stride, g.S // g.stride, g.stride, g.spans)


def patch_extent(tile: PatchTile, w: Window) -> tuple[int, int]:
    """(PH, PW): lines and columns of a patch."""
    return tile.TH + w.R - 1, tile.TW + w.S - 1


def patch_load(tile: PatchTile, w: Window) -> int:
    """Bytes of a patch."""
    PH, PW = patch_extent(tile, w)
    return tile.TN * PH * PW * ROW_BYTES


def patch_bytes(tile: PatchTile, w: Window) -> int:
    """The same, rounded up to where the next swizzled tile may start."""
    return align(patch_load(tile, w), ALIGNMENT)


def stage_bytes(tile: PatchTile, kind: Kind) -> int:
    """Bytes of the results of all turns, put together for TMA to store: squares of 64 rows of 128 bytes."""
    return tile.turns * tile.BM * tile.BN * kind.result


def shared_bytes(tile: PatchTile, kind: Kind, w: Window) -> int:
    """Dynamic shared memory of a block: room to align, two patches, the filters' ring, the results, barriers."""
    return ALIGNMENT + 2 * patch_bytes(tile, w) + tile.slots * tile.BN * ROW_BYTES + stage_bytes(tile, kind) + BARRIER_BYTES


PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
"""Registers of a thread where they move: of 384 threads with 168, which 128 give away to the others."""


def moves_registers(tile: PatchTile, epilogue: str) -> bool:
    """Whether the threads that multiply take registers from the producer's, which are then a whole warpgroup.

    Beside 128 sums of products, those of a norm's gradient and its numbers of the channels find no room in 168 registers.
    """
    return epilogue == "sums" and tile.turns * tile.groups == 2 and tile.blocks == 1


def threads_of(tile: PatchTile, epilogue: str) -> int:
    """Threads of a block with an epilogue."""
    return tile.threads + (WARPGROUP - 32 if moves_registers(tile, epilogue) else 0)


def tiles_of(g: Correlation, tile: PatchTile) -> tuple[int, int]:
    """Tiles along GM, and along GN over all phases."""
    return -(-g.N // tile.TN) * (g.P // tile.TH) * (g.Q // tile.TW), g.phases * -(-g.K // tile.BN)


def sums_bytes(tile: PatchTile, kind: Kind, epilogue: str) -> int:
    """Shared memory in which an epilogue's sums of channels meet, for moments or for a norm's gradient: those of each warpgroup.

    Where products are swapped a warp has all pixels of its filters.
    """
    of_group = {"moments": Columns(tile.BN, 16 // kind.result, WARPGROUP).nbytes, "sums": WARPS * 2 * 4 * tile.BN}
    return 0 if tile.swapped else tile.turns * tile.groups * of_group.get(epilogue, 0)


def candidates(g: Correlation, kind: Kind, target: Target, epilogue: str = "rows") -> list[PatchTile]:
    """The patch tiles that serve a correlation with an epilogue.

    None where its images are no squares of 8×8, or its stride does not divide filter and image. A single tap sees every pixel once, so there the
    filters must stay: only two patches are in flight. Of phases with one tap or none most tiles have nothing to wait for.
    """
    if kind.planes > 1 or not has_patches(g):
        return []
    found: list[PatchTile] = []
    w, steps = window(g), g.taps * whole(g.C, kind.channels) // kind.channels
    for BM, BN, groups, blocks, turns, swapped in _SHAPES:
        if swapped and g.taps == 1 and g.spans is None:
            continue  # MobileNet's 32 → 64 channels of 32×32 by one tap took 100 µs instead of 57 (bf16), their gradient 121 instead of 37
        if swapped and turns > 1 and kind.result > 2:
            continue  # two tiles' results of four bytes leave room for few pixels: 30 % slower than the same tiles side by side
        if swapped:
            TH = _side(g.P, min(BM // groups // SQUARE, _LONGEST_STRIP))
            if TH < _SHORTEST_STRIP:
                continue
            TW = _side(g.Q, BM // TH)
        else:
            TW = _side(g.Q, BM // SQUARE)
            TH = _side(g.P, BM // TW)
        tile = PatchTile(BM // (TW * TH), TH, TW, BN, groups, 0, blocks, 0, turns=turns, swapped=swapped)
        room = min(_SHARED_OF_BLOCK, _SHARED_OF_MULTIPROCESSOR // blocks - _RESERVED)
        free = room - shared_bytes(tile, kind, w) - sums_bytes(tile, kind, epilogue)
        slots = free // (BN * ROW_BYTES)
        down, across = tiles_of(g, tile)
        tile = replace(tile, resident=min(down * across, blocks * target.multiprocessors))
        if (g.taps > 1 or g.spans) and min(slots, _MOST_SLOTS) >= 2 and (BN <= 64 or BN < 2 * g.K):
            found.append(replace(tile, slots=min(slots, _MOST_SLOTS)))
        if across == 1 and (turns == 1 or swapped) and steps <= min(slots, _MOST_KEPT):
            found.append(KeepingTile(**{**asdict(tile), "slots": steps}, kept=steps))
    return found


def _product_bytes(kind: Kind, tile: PatchTile) -> float:
    """Bytes of shared memory that wgmma reads for a step."""
    return tile.groups * tile.strips * product_bytes(kind, 64, tile.strip) if tile.swapped else product_bytes(kind, tile.BM, tile.BN)


def work(g: Correlation, kind: Kind, tile: PatchTile, epilogue: str) -> Work:
    """What a launch of the kernel asks for; a step is a tap of 128 bytes of channels, of which a patch serves several."""
    down, across = tiles_of(g, tile)
    w = window(g)
    taps = g.spans.total / g.spans.busy if g.spans else w.taps
    landed = patch_load(tile, w) / taps + (0 if tile.keeps else tile.BN * ROW_BYTES)
    return Work(
        tiles=down * across,
        together=tile.blocks,
        steps=g.mean_taps * (whole(g.C, kind.channels) // kind.channels),
        ahead=min(tile.slots, 2 * taps),
        tensor=product_cycles(kind, tile.BM, tile.BN),
        shared=landed + _product_bytes(kind, tile),
        fetched=landed,
        ends=end_bytes(g, kind, tile.BM, tile.BN, epilogue),
        memory=compulsory_bytes(g, kind, epilogue),
        turns=tile.turns,
    )


_SHAPES = (
    (256, 128, 2, 1, 1, False),
    (128, 256, 2, 1, 1, False),
    (128, 128, 2, 1, 1, False),
    (256, 64, 2, 1, 1, False),
    (128, 64, 2, 1, 1, False),
    (128, 64, 2, 2, 1, False),
    (64, 64, 1, 1, 1, False),
    (64, 64, 1, 2, 1, False),
    (128, 128, 1, 1, 2, False),
    (256, 64, 1, 1, 2, True),
    (128, 64, 1, 1, 2, True),
    (256, 64, 2, 1, 1, True),
    (128, 64, 1, 2, 1, True),
)
"""BM, BN, warpgroups, blocks that share a multiprocessor, turns, whether products are swapped.

With 64 channels ping-pong loses unless products are swapped: one warpgroup waits for the products of every step, and a step has half as many
(docs/log/tensor-cores.md).
"""
_SHORTEST_STRIP, _LONGEST_STRIP = 16, 32
"""Lines of a strip of eight pixels: 8 would give a product no more columns than it has without swapping, 32 give 256, the most."""
_MOST_SLOTS = 6
_MOST_KEPT = 12
"""Stages of filters, kept or not, for which there are barriers: with the eight others, two of 8 bytes each fill BARRIER_BYTES."""


def _side(size: int, most: int) -> int:
    """The largest power of two, at least 8, that divides `size` and is at most `most`."""
    side = SQUARE
    while side * 2 <= most and size % (side * 2) == 0:
        side *= 2
    return side
