"""Weight gradients on mma.sync, for every shape: conv_wgrad, and upconv_wgrad with the upsampling folded away; bias gradients on the way.

What they compute, the parts and their sum are those of frame/wgrad.py; the product is `wgrad_kernel`'s. tf32 multiplies operands as they lie,
rounded by whoever wrote them. fp32 splits each into two tf32, and makes three products of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbcnn.gpu.target import Target
from nbcnn.ops.conv.frame.awkward import narrow
from nbcnn.ops.conv.frame.correlation import Correlation
from nbcnn.ops.conv.frame.wgrad import WeightGradient, bias_of, channels_of, correlation, operands
from nbcnn.ops.conv.frame.wgrad_sum import MOST_TAPS
from nbcnn.ops.conv.mma import wgrad_tile
from nbcnn.ops.conv.mma.wgrad_kernel import pixel_product
from nbcnn.ops.conv.mma.wgrad_load import MOST_ROWS, width_of
from nbcnn.ops.conv.mma.wgrad_tile import KINDS, Kind, PixelTile, padded_channels
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.refusals import not_nhwc, too_large
from nbcnn.ops.kernel.tiles import unsplit
from nbcnn.plan.bounds import STORE
from nbcnn.plan.op import Op

_INNER_TAPS = 4
NARROW = 0.32
"""Power of the copies that 16 bytes of a pixel take (`awkward.narrow`)."""


class MmaWeightGradient(WeightGradient[PixelTile]):
    """Weight gradients in one precision."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.element = kind, kind.element

    def refusal(self, call: Call, target: Target) -> str | None:
        if reason := not_nhwc(call, "the mma.sync kernels read"):
            return reason
        store = STORE[self.kind.name]
        if set(call.in_dtypes) != {store}:
            return f"operands are not stored as {store}"
        g = correlation(call)
        if max(g.R, g.S) > MOST_ROWS or g.taps > MOST_TAPS:
            return f"a filter of {g.R}×{g.S} taps is larger than {MOST_ROWS}×{MOST_ROWS}"
        return too_large(*call.in_shapes, (g.K, wgrad_tile.columns(g, self.kind)), what="a tensor")

    def candidates(self, g: Correlation, target: Target) -> list[PixelTile]:
        return list(wgrad_tile.candidates(g, self.kind, target))

    def choose(self, call: Call, target: Target) -> PixelTile:
        return wgrad_tile.choose(correlation(call), self.kind, target)

    def microseconds(self, call: Call, moved: float, target: Target) -> float:
        g = correlation(call)
        return wgrad_tile.microseconds(call.tile, g, self.kind, moved, narrow((g.C, g.K), self.element, NARROW), target)

    def part_rate(self, tile: PixelTile) -> float:
        return wgrad_tile.BESIDE[self.kind.name].parts

    def cycles(self, tile: PixelTile, g: Correlation, target: Target) -> float:
        return wgrad_tile.cycles(tile, g, self.kind, target)

    def column_tiles(self, tile: PixelTile, g: Correlation) -> int:
        return tile.column_tiles(g, self.kind)

    def sums_of_shifted(self, tile: PixelTile, g: Correlation) -> int:
        return tile.row_tiles(g) * _INNER_TAPS

    def pitch(self, g: Correlation) -> int:
        return padded_channels(g, self.kind)

    def product(self, call: Call, g: Correlation, partials: Any, partials_b: Any) -> Launch:
        tile, kind = call.tile, self.kind
        rows, columns = tile.row_tiles(g), tile.column_tiles(g, kind)
        dn, rest = divmod(tile.BK, g.P * g.Q)
        sizes = (g.K, g.C, g.H, g.W, g.P, g.Q, g.R, g.S, g.stride, g.top, g.left, g.GM, tile.steps(g), columns, rows, dn, *divmod(rest, g.Q))
        kernel = pixel_product(unsplit(tile), kind.name, width_of(g.K, kind.element), width_of(g.C, kind.element), bias_of(call))
        args = (*operands(call), partials, partials_b, *map(np.int32, (*sizes, *channels_of(call))))
        return Launch(kernel, (rows * columns, tile.parts(g)), tile.threads, args, shared=tile.shared_bytes(kind), name=call.op)


IMPLS = {name: MmaWeightGradient(kind).impl(needs=kind.needs) for name, kind in KINDS.items()}


def ops(precision: str) -> dict[Op, Impl]:
    """What this module implements in `precision`, by op."""
    return {Op("conv", "wgrad"): IMPLS[precision], Op("upconv", "wgrad"): IMPLS[precision]}
