"""This module is a weight gradient as a correlation of two images along their pixels: what the engines of mma and wgmma share on the host.

    conv_wgrad    shifted x, stationary dy: dw[k][c][r,s] = Σ dy[n,k,p,q] · x[n,c, stride·p + r − pad, stride·q + s − pad]
    upconv_wgrad  shifted dy, stationary x: dG[u,v] = Σ dy[2i + u − 1, 2j + v − 1] · x[i, j], 16 products of small images instead of nine of
                  doubled ones (36 in the same measure); dW = Sᵀ dG S while the parts are added.

The GEMM is M filters × (taps of C channels) × pixels: few output tiles and a long sum. So the pixels are cut into `split` parts, as many as make
one block for every place on the GPU, and a second launch adds the parts in order (wgrad_sum.py). The bias gradient comes out of the same tiles.
Where a tile has all pixels, and all taps, its product may write dw itself: then a second launch adds up the bias gradient at most.

The kernels are not shared: on mma.sync every thread copies, describes pixels and loads fragments; on wgmma one thread has TMA fetch panels, and
helper warps add up the bias
gradient; of four-byte elements they transpose the stationary operand.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np

from nbcnn.gpu.target import Target
from nbcnn.ops.conv.frame.correlation import Correlation
from nbcnn.ops.conv.frame.split import IN_FLIGHT, WAIT_US, launch_sum_partials, sum_partials_traffic
from nbcnn.ops.conv.frame.wgrad_sum import launch_sum, sum_traffic
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.traffic import Traffic, outputs, windows
from nbcnn.plan.op import Op


def is_up(call: Call) -> bool:
    return call.op == Op("upconv", "wgrad")


def correlation(call: Call) -> Correlation:
    """The correlation behind a call: source = the shifted operand, K = channels of the stationary one."""
    N, C, H, W = call.in_shapes[0]
    _, K, P, Q = call.in_shapes[1]
    if is_up(call):
        return Correlation(N, P, Q, K, H, W, C, 4, 4, 2, 1, 1)
    R, S = call.out_shapes[0][2:]
    return Correlation(N, H, W, C, P, Q, K, R, S, call.attrs["stride"], call.attrs["pad"], call.attrs["pad"])


def operands(call: Call) -> tuple[Any, Any]:
    """(stationary, shifted)."""
    x, dy = call.ins
    return (x, dy) if is_up(call) else (dy, x)


def channels_of(call: Call) -> tuple[int, int]:
    """Elements from one pixel to the next of (stationary, shifted)."""
    x, dy = int(call.channels("in", 0)), int(call.channels("in", 1))
    return (x, dy) if is_up(call) else (dy, x)


def bias_of(call: Call) -> str:
    """Which operand is dy, whose sum is the bias gradient: "stationary" or "shifted"; "" where no bias gradient is wanted."""
    if len(call.out_shapes) == 1:
        return ""
    return "shifted" if is_up(call) else "stationary"


def most_parts(elements: int, steps: int, most: int) -> int:
    """Parts at most into which the `steps` over pixels are cut: `most`, or fewer, so that 32-bit offsets reach the partials of `elements` each."""
    return max(1, min(most, steps, (2**31 - 1) // elements))


class OverPixels:
    """What tiles over pixels have in common: rows of BM filters, steps of BK pixels, and `split` blocks that share one output tile.

    Of these, `cluster` neighbours may add their parts before they are written.
    """

    BM: int
    BK: int
    split: int
    cluster: int = 1

    def row_tiles(self, g: Correlation) -> int:
        return ceil_div(g.K, self.BM)

    def pixel_steps(self, g: Correlation) -> int:
        """Steps of BK over all pixels."""
        return ceil_div(g.GM, self.BK)

    def steps(self, g: Correlation) -> int:
        """Steps that each of the blocks of an output tile makes (the last may make fewer, in clusters some one fewer)."""
        return ceil_div(self.pixel_steps(g), self.split if self.cluster == 1 else self.parts(g))

    def parts(self, g: Correlation) -> int:
        """Parts that have any steps: `split`, or fewer; with clusters whole ones, so `split` rounded up."""
        if self.cluster == 1:
            return ceil_div(self.pixel_steps(g), self.steps(g))
        return min(ceil_div(self.split, self.cluster), self.pixel_steps(g) // self.cluster) * self.cluster

    def whole(self, g: Correlation) -> bool:
        """Whether the product writes the weight gradient itself, so that it has no parts."""
        return False

    @property
    def planes_in_memory(self) -> int:
        """Planes of both operands that the product reads."""
        return 1

    def partials_written(self, g: Correlation) -> int:
        """Parts that are written: one per cluster."""
        return self.parts(g) // self.cluster


def _either_part(call: Call, side: str, at: int, alignment: int) -> bool:
    """`Impl.pitched`: x and dy, which are read in one piece where launches before split them into planes."""
    return call.op == Op("conv", "wgrad") and side == "in" and alignment % 16 == 0 and call.tile.planes_in_memory == 1


Tile = TypeVar("Tile", bound=OverPixels)


class WeightGradient(Generic[Tile]):
    """conv_wgrad and upconv_wgrad by one engine in one precision; an engine overrides the methods that raise NotImplementedError."""

    element: int
    """Bytes of an operand's element."""

    def refusal(self, call: Call, target: Target) -> str | None:
        """None if the kernel serves the call, else the reason in words."""
        raise NotImplementedError

    def candidates(self, g: Correlation, target: Target) -> list[Tile]:
        """The tiles that an autotuner should try."""
        raise NotImplementedError

    def cycles(self, tile: Tile, g: Correlation, target: Target) -> float:
        """Estimated time of all launches with a tile, by which tiles are chosen."""
        raise NotImplementedError

    def microseconds(self, call: Call, moved: float, target: Target) -> float:
        """Estimated time of the product, and of what goes before, whose operands and results are `moved` bytes; beside other engines."""
        raise NotImplementedError

    def part_rate(self, tile: Tile) -> float:
        """Bytes a microsecond of the parts, which are written and read out of L2."""
        raise NotImplementedError

    def choose(self, call: Call, target: Target) -> Tile:
        """The tile for this shape and number of multiprocessors."""
        raise NotImplementedError

    def column_tiles(self, tile: Tile, g: Correlation) -> int:
        """Tiles across all taps."""
        raise NotImplementedError

    def sums_of_shifted(self, tile: Tile, g: Correlation) -> int:
        """Partial bias gradients of a part where dy is the shifted operand."""
        raise NotImplementedError

    def product(self, call: Call, g: Correlation, partials: Any, partials_b: Any) -> Launch:
        """The launch of the product; `partials` is dw where the tile is `whole`."""
        raise NotImplementedError

    def pitch(self, g: Correlation) -> int:
        """Channels from one tap of a part to the next."""
        return g.C

    def read_of_shifted(self, tile: Tile, g: Correlation) -> int:
        """Elements of one shifted image that a row of tiles reads: every tap of every pixel, but for what lies outside."""
        return windows(g.P, g.R, g.H, g.stride, g.top)[0] * windows(g.Q, g.S, g.W, g.stride, g.left)[0] * g.C

    def bytes_read(self, tile: Tile) -> int:
        """Bytes of an operand's element as the product reads it."""
        return self.element

    def bias_partials(self, call: Call) -> tuple[int, int]:
        """(parts, channels) of the partial bias gradients; no parts where no bias gradient is wanted."""
        g, tile = correlation(call), call.tile
        if not bias_of(call):
            return 0, 0
        return (tile.parts(g) * self.sums_of_shifted(tile, g), g.C) if is_up(call) else (tile.parts(g) * self.column_tiles(tile, g), g.K)

    def part_sums(self, call: Call) -> int:
        """Elements of all parts of the weight gradient that are written."""
        g = correlation(call)
        return 0 if call.tile.whole(g) else call.tile.partials_written(g) * g.K * g.taps * self.pitch(g)

    def parts_bytes(self, call: Call) -> int:
        """Bytes of the parts of the weight gradient, and of those of the bias gradient behind them."""
        parts, count = self.bias_partials(call)
        return 4 * (self.part_sums(call) + parts * count)

    def scratch(self, call: Call) -> int:
        """Bytes that `bind` needs beside its operands and results."""
        return self.parts_bytes(call)

    def bind(self, call: Call) -> list[Launch]:
        """x (N,C,H,W), dy -> dw (K,C,R,S)[, db (K)]."""
        g, (parts_b, count_b) = correlation(call), self.bias_partials(call)
        if call.tile.whole(g):
            partials_b = call.scratch.view(np.float32) if parts_b else call.outs[0]
            made = self.product(call, g, call.outs[0], partials_b)
            return [made, launch_sum_partials(partials_b, None, call.outs[1], count_b, count_b, parts_b)] if parts_b else [made]
        partials = call.scratch.view(np.float32)
        partials_b = partials[self.part_sums(call) :] if parts_b else partials
        bias = partials_b, call.outs[1] if parts_b else None, count_b, parts_b
        total = launch_sum(partials, call.outs[0], g.K, g.C, g.taps, call.tile.partials_written(g), is_up(call), *bias, pitch=self.pitch(g))
        return [self.product(call, g, partials, partials_b), total]

    def traffic(self, call: Call) -> list[Traffic]:
        """Bytes of `bind`: the stationary operand once per column of tiles, the shifted one once per row of tiles and tap."""
        g, tile, (parts_b, count_b) = correlation(call), call.tile, self.bias_partials(call)
        rows, columns = windows(g.P, g.R, g.H, g.stride, g.top)[1], windows(g.Q, g.S, g.W, g.stride, g.left)[1]
        element = self.bytes_read(tile)
        stationary, image = element * g.GM * g.K, element * g.N
        shifted = image * self.read_of_shifted(tile, g)
        read = stationary * self.column_tiles(tile, g) + shifted * tile.row_tiles(g)
        least = stationary + image * g.C * rows * columns
        if tile.whole(g):
            product = Traffic(read, 4 * g.K * g.C * g.taps + self.parts_bytes(call), least)
            return [product, sum_partials_traffic(count_b, parts_b)] if parts_b else [product]
        product = Traffic(read, self.parts_bytes(call), least)
        # The sum reads whole quads of channels.
        summed = 4 * tile.partials_written(g) * g.K * g.taps * 4 * ceil_div(g.C, 4)
        return [product, sum_traffic(call, summed + 4 * parts_b * count_b)]

    def estimate(self, call: Call, target: Target) -> float:
        """Microseconds of the product, and of the launch that adds the parts: it waits for a load out of L2 for each IN_FLIGHT of them."""
        g, launches = correlation(call), self.traffic(call)
        distinct = max(each.distinct for each in launches[:-1] or launches)
        made = self.microseconds(call, distinct + outputs(call), target)
        if call.tile.whole(g):
            return made
        waits = ceil_div(call.tile.partials_written(g), IN_FLIGHT)
        return made + WAIT_US * waits + 8 * self.part_sums(call) / self.part_rate(call.tile)

    def impl(self, needs: tuple[int, int], exactly: bool = False) -> Impl:
        """The table's entry for GPUs from compute capability `needs` on, or of exactly that one."""
        return Impl(
            self.bind,
            self.scratch,
            self.refusal,
            self.choose,
            needs=needs,
            candidates=lambda call, target: self.candidates(correlation(call), target),
            traffic=self.traffic,
            exactly=exactly,
            engine="wgmma" if exactly else "mma",
            estimate=self.estimate,
            pitched=_either_part,
        )
