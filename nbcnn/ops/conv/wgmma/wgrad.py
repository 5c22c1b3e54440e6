"""Weight gradients on wgmma and TMA: conv_wgrad, and upconv_wgrad with the upsampling folded away; bias gradients on the way.

What they compute, the parts and their sum are those of frame/wgrad.py; the product is `wgrad_kernel`'s. In fp32 two launches before it may split
both operands into planes of bfloat16 (split.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from nbcnn.gpu.target import Target
from nbcnn.ops.conv.frame.awkward import padded
from nbcnn.ops.conv.frame.correlation import Correlation, beyond_tma
from nbcnn.ops.conv.frame.cost import BESIDE, PLANES, PLANES_US, RATES, Work, cycles
from nbcnn.ops.conv.frame.wgrad import WeightGradient, bias_of, channels_of, correlation, is_up, operands
from nbcnn.ops.conv.frame.wgrad_sum import MOST_TAPS
from nbcnn.ops.conv.wgmma import wgrad_square, wgrad_tile
from nbcnn.ops.conv.wgmma.split import in_planes, own_bytes, split_bytes, traffic_of_planes
from nbcnn.ops.conv.wgmma.wgrad_kernel import pixel_product
from nbcnn.ops.conv.wgmma.wgrad_registers import register_product
from nbcnn.ops.conv.wgmma.wgrad_square import SquareTile
from nbcnn.ops.conv.wgmma.wgrad_tile import PixelTile
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.cost import CYCLES_A_MICROSECOND
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.refusals import not_nhwc, too_large
from nbcnn.ops.kernel.tensor_maps import encode_im2col, encode_tiled, upload
from nbcnn.ops.kernel.tiles import unsplit
from nbcnn.ops.kernel.traffic import Traffic, windows
from nbcnn.plan.graph import Shape
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

PADDED = {("pixels", "bf16"): 0.60, ("squares", "bf16"): 0.48, ("pixels", "fp32"): 0.73, ("registers", "tf32"): 0.18, ("registers", "fp32"): 0.08}
"""Power of what channels are padded by (`awkward.padded`), by kernel and precision."""
PARTS = {("pixels", "bf16"): 6.3e6, ("squares", "bf16"): 6.4e6, ("pixels", "fp32"): 5.3e6, ("registers", "tf32"): 26e6, ("registers", "fp32"): 6.7e6}
"""Bytes of the parts a microsecond, by kernel and precision."""
FOLDED = {"tf32": 2.4, "fp32": 2.1}
"""How much longer a gradient behind an upsampling takes through registers: helper warps read all of the shifted dy again for the bias gradient."""


class WgmmaWeightGradient(WeightGradient["PixelTile | SquareTile"]):
    """Weight gradients in one precision."""

    def __init__(self, precision: str) -> None:
        self.precision, self.element = precision, 2 if precision == "bf16" else 4

    def refusal(self, call: Call, target: Target) -> str | None:
        if reason := not_nhwc(call, "wgmma reads"):
            return reason
        g, step = correlation(call), 16 // self.element
        if g.C % step or g.K % step:
            return f"{g.C} and {g.K} channels are not both multiples of {step}, the 16 bytes that TMA addresses"
        if g.taps > MOST_TAPS:
            return f"a filter of more than {MOST_TAPS} taps"
        return beyond_tma(g) or too_large(*call.in_shapes, (g.K, g.taps, g.C), what="a tensor")

    def candidates(self, g: Correlation, target: Target) -> list[PixelTile | SquareTile]:
        squares = wgrad_square.candidates(g, target) if self.precision == "bf16" else ()
        return [*wgrad_tile.candidates(g, self.precision, target), *squares]

    def choose(self, call: Call, target: Target) -> PixelTile | SquareTile:
        """The tile of each kernel by its own rates, the kernel by those that engines are compared with.

        Splitting operands into planes counts half, as in `wgrad_tile.work`: a plan shares planes.
        """
        g, best = correlation(call), dict[tuple[str, str], PixelTile | SquareTile]()
        for tile in sorted(self.candidates(g, target), key=lambda tile: self.cycles(tile, g, target)):
            best.setdefault(self.kernel(tile), tile)

        def took(tile: PixelTile | SquareTile) -> float:
            return self.estimate(replace(call, tile=tile), target) - self.work(tile, g).before / PLANES

        return min(best.values(), key=took)

    def kernel(self, tile: PixelTile | SquareTile) -> tuple[str, str]:
        """The kernel and the precision, by which rates are named."""
        if isinstance(tile, SquareTile):
            return "squares", self.precision
        return ("registers" if tile.through_registers else "pixels"), self.precision

    def work(self, tile: PixelTile | SquareTile, g: Correlation) -> Work:
        return wgrad_square.work(g, tile) if isinstance(tile, SquareTile) else wgrad_tile.work(g, tile)

    def cycles(self, tile: PixelTile | SquareTile, g: Correlation, target: Target) -> float:
        return cycles(self.work(tile, g), RATES[self.kernel(tile)], target)

    def microseconds(self, call: Call, moved: float, target: Target) -> float:
        g, kernel = correlation(call), self.kernel(call.tile)
        (launch, rates), asked = BESIDE[kernel], self.work(call.tile, g)
        folded = FOLDED[self.precision] if kernel[0] == "registers" and is_up(call) else 1.0
        if isinstance(call.tile, PixelTile):
            asked = replace(asked, lines=call.tile.lines(g))
        longer = folded * padded(g, 32 if self.element == 4 and self.precision == "tf32" else 64, PADDED[kernel])
        product = longer * cycles(replace(asked, parts=0.0, before=0.0, memory=0.0), rates, target)
        took = launch + float(product**rates.soft + (asked.memory / rates.memory) ** rates.soft) ** (1 / rates.soft) / CYCLES_A_MICROSECOND
        # `Work.before` is a half of what splitting both operands moves.
        return took + (2 * PLANES_US + 2 * asked.before / PLANES if asked.before else 0.0)

    def part_rate(self, tile: PixelTile | SquareTile) -> float:
        return PARTS[self.kernel(tile)]

    def column_tiles(self, tile: PixelTile | SquareTile, g: Correlation) -> int:
        return tile.column_tiles(g)

    def sums_of_shifted(self, tile: PixelTile | SquareTile, g: Correlation) -> int:
        return g.taps

    def read_of_shifted(self, tile: PixelTile | SquareTile, g: Correlation) -> int:
        """Squares read patches; panels beyond the last one of a last column of tiles bring that one again."""
        if isinstance(tile, SquareTile):
            return tile.patch_pixels(g) * g.C
        of_tap = ceil_div(g.C, tile.panel)
        again = tile.column_tiles(g) * (tile.BN // tile.panel) - g.taps * of_tap
        last = windows(g.P, 1, g.H, g.stride, g.top - g.R + 1)[0] * windows(g.Q, 1, g.W, g.stride, g.left - g.S + 1)[0]
        return super().read_of_shifted(tile, g) + again * last * (g.C - (of_tap - 1) * tile.panel)

    def product(self, call: Call, g: Correlation, partials: Any, partials_b: Any) -> Launch:
        tile, bias, (stationary, shifted) = call.tile, bias_of(call), operands(call)
        if isinstance(tile, SquareTile):
            return self._squares(call, tile, g, partials, partials_b)
        pixels, images, (apart, from_pixel) = (g.K, g.GM), (g.N, g.H, g.W, g.C), channels_of(call)
        maps = upload(
            *(encode_tiled(each, pixels, (tile.panel, tile.BK), strides=(apart,)) for each in _planes(tile, stationary, pixels)),
            *(encode_im2col(each, images, from_pixel, *g.corners, g.stride, tile.panel, tile.BK) for each in _planes(tile, shifted, images)),
        )
        columns = tile.column_tiles(g)
        sizes = (g.K, g.C, g.P, g.Q, g.R, g.S, g.stride, g.top, g.left, tile.pixel_steps(g), tile.steps(g), columns)
        args, grid = (maps, partials, partials_b, *map(np.int32, sizes)), (tile.row_tiles(g) * columns, tile.parts(g))
        product = register_product if tile.through_registers else pixel_product
        return Launch(product(unsplit(tile), bias), grid, tile.threads(bias != ""), args, shared=tile.shared_bytes, name=call.op)

    def bytes_read(self, tile: PixelTile | SquareTile) -> int:
        return tile.planes_in_memory * tile.element

    def scratch(self, call: Call) -> int:
        return own_bytes(call, _positions(call)) + self.parts_bytes(call)

    def bind(self, call: Call) -> list[Launch]:
        planes, first, scratch = in_planes(call, _positions(call))
        return [*first, *super().bind(replace(call, ins=tuple(planes or call.ins), scratch=scratch))]

    def traffic(self, call: Call) -> list[Traffic]:
        return [*traffic_of_planes(call, _positions(call)), *super().traffic(call)]

    def _squares(self, call: Call, tile: SquareTile, g: Correlation, partials: Any, partials_b: Any) -> Launch:
        """The launch of the product by squares, which are only of dy: of conv_wgrad."""
        (dy, x), columns, bias, (apart, from_pixel) = operands(call), tile.column_tiles(g), bias_of(call) != "", channels_of(call)
        maps = upload(
            _map_of_squares(dy, (g.K, g.Q, g.P, g.N), (tile.BM, tile.columns, tile.lines), tile.images, apart),
            _map_of_squares(x, (g.C, g.W, g.H, g.N), (wgrad_square.CHANNELS, tile.PW, tile.PH), tile.images, from_pixel),
        )
        sizes = (g.K, g.C, g.P, g.Q, g.top, g.left, tile.pixel_steps(g), tile.steps(g), columns)
        args, tiles, parts = (maps, partials, partials_b, *map(np.int32, sizes)), tile.row_tiles(g) * columns, tile.parts(g)
        # Clusters lie along x: `wgrad_cluster.place_of_block`.
        grid = (tiles, parts) if tile.cluster == 1 else (tiles * parts, 1)
        kernel = wgrad_square.square_product(unsplit(tile), bias, tile.whole(g))
        return Launch(kernel, grid, tile.threads(bias), args, shared=tile.shared_bytes, name=call.op)


def _positions(call: Call) -> tuple[int, ...]:
    """The positions of the operands that the product reads in planes, which launches before it make."""
    return (0, 1) if call.tile.planes_in_memory > 1 else ()


def _planes(tile: PixelTile, operand: Any, shape: Shape) -> list[Any]:
    """The planes of an operand of `shape`, or itself."""
    if tile.planes_in_memory == 1:
        return [operand]
    count = numel(shape)
    return [operand[plane * count : (plane + 1) * count] for plane in range(tile.planes_in_memory)]


def _map_of_squares(array: Any, shape: tuple[int, int, int, int], box: tuple[int, int, int], images: int, apart: int) -> np.ndarray:
    """Map of boxes of channels, columns and lines of one image; of several, the same pixel of which lies side by side. apart: elements from one
    pixel to the next.
    """
    channels, columns, lines, count = shape
    if images == 1:
        return encode_tiled(array, shape, (*box, 1), strides=(apart, columns * apart, lines * columns * apart))
    strides = (lines * columns * apart, apart, columns * apart)
    return encode_tiled(array, (channels, count, columns, lines), (box[0], images, *box[1:]), strides=strides)


def ops(precision: str) -> dict[Op, Impl]:
    """What this module implements in `precision`, by op."""

    def splits(call: Call) -> dict[int, int]:
        # An op around one of these has other operands.
        return split_bytes(call, _positions(call)) if call.op in names else {}

    names = Op("conv", "wgrad"), Op("upconv", "wgrad")
    return dict.fromkeys(names, replace(WgmmaWeightGradient(precision).impl(needs=(9, 0), exactly=True), splits=splits))
