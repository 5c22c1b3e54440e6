"""Bytes that the launches of engine.py ask memory for (nbcnn/ops/kernel/traffic.py)."""

from __future__ import annotations

from nbcnn.ops.conv.frame.correlation import Correlation, correlation
from nbcnn.ops.conv.wgmma import patch
from nbcnn.ops.conv.wgmma.patch import PatchTile
from nbcnn.ops.conv.wgmma.split import split_traffic
from nbcnn.ops.conv.wgmma.tile import Kind, Tile, tiles_of
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.traffic import Traffic, clipped, outputs, size, windows
from nbcnn.plan.shapes import numel


def traffic(call: Call, kind: Kind) -> list[Traffic]:
    """Bytes of every launch of a pass over images."""
    g = correlation(call)
    mask = size(call, "in", 2) if call.op.endswith("dgrad_relu") else 0
    first = []
    if kind.planes > 1:
        first = [split_traffic(numel(call.in_shapes[0])), split_traffic(g.phases * g.K * g.GK)]
    pixels, down = _patches(g, call.tile) if isinstance(call.tile, PatchTile) else _columns(g, call.tile)
    source = kind.planes * kind.element * g.N * g.C
    filters = kind.element * g.GK
    rows = clipped(g.K, call.tile.BN, kind.planes * g.phases)
    read = source * pixels * ceil_div(g.K, call.tile.BN) + filters * rows * down + mask
    distinct = source * g.H * g.W + filters * kind.planes * g.phases * g.K + mask
    return [*first, Traffic(read, outputs(call), distinct)]


def _columns(g: Correlation, tile: Tile) -> tuple[int, int]:
    """Pixels of an image that TMA's im2col brings to the tiles of one column of channels, in all phases, and rows of tiles."""
    shifts = (0, 1) if g.phases == 4 else (0,)
    down = sum(windows(g.P, g.R, g.H, g.stride, g.top - shift)[0] for shift in shifts)
    across = sum(windows(g.Q, g.S, g.W, g.stride, g.left - shift)[0] for shift in shifts)
    return down * across, tiles_of(g, tile)[0]


def _patches(g: Correlation, tile: PatchTile) -> tuple[int, int]:
    """The same of patches: every pixel of a patch once, however many taps see it; one patch for each parity of lines and columns."""
    PH, PW = patch.patch_extent(tile, patch.window(g))
    shifts = (0, 1) if g.phases == 4 else (0,)
    parities = range(g.stride)

    def along(count: int, extent: int, size: int, step: int, before: int) -> int:
        firsts = (shift + (parity - before) // g.stride for shift in shifts for parity in parities)
        return sum(windows(count // step, extent, size // g.stride, step, -first)[0] for first in firsts)

    return along(g.P, PH, g.H, tile.TH, g.top) * along(g.Q, PW, g.W, tile.TW, g.left), patch.tiles_of(g, tile)[0]
