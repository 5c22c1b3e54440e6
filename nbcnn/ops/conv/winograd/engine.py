"""Winograd's F(2×2, 3×3) on CUDA cores (fp32, NHWC): 16 multiplications for four outputs, where a direct convolution has 36.

An output of 2×2 pixels needs 4×4 pixels d of the input. With

    Bᵀ = [1 0 -1 0; 0 1 1 0; 0 -1 1 0; 0 1 0 -1]      G = [1 0 0; ½ ½ ½; ½ -½ ½; 0 0 1]      Aᵀ = [1 1 1 0; 0 1 -1 -1]

    fprop   y = Aᵀ [ Σ_c (G w G^T) ⊙ (Bᵀ d B) ] A          16 positions of a tile, at each a matrix product over the channels
    dgrad   the same, of dy with the filters turned and C and K exchanged
    wgrad   dw = Gᵀ [ Σ_tiles (Bᵀ d B) ⊙ (A dy Aᵀ) ] G     16 matrix products over the tiles; position (1,1) of A dy Aᵀ sums per tile: db

Per call: filters to Winograd-domain values, then for a few images at a time (so that their values need little memory, and stay near the
cache) images to Winograd-domain values, the products, and the way back to images. The output tile is the window of a 2×2 pooling, which is why
pooling costs nothing here. Rounding errors are about twice those of the direct form.

Source: A. Lavin, S. Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv:1509.09308; wgrad transposed from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.gpu.target import Target
from nbcnn.ops.activations.table import epilogue_function
from nbcnn.ops.conv.frame import composed
from nbcnn.ops.conv.simt import im2col, im2col_wgrad
from nbcnn.ops.conv.simt.split_fused import exchanged_traffic
from nbcnn.ops.conv.simt.tiles import Product, Tile, product_cycles
from nbcnn.ops.conv.winograd.product import columns_traffic, launch_columns, launch_rows, launch_sum_winograd, rows_traffic
from nbcnn.ops.conv.winograd.transform import (
    THREADS,
    filter_kernel,
    filters_traffic,
    image_kernel,
    images_traffic,
    input_kernel,
    input_traffic,
)
from nbcnn.ops.images import unpool
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks
from nbcnn.ops.kernel.cost import CYCLES_A_MICROSECOND, estimate
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.refusals import not_nhwc, too_large
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.plan.op import Map, Mask, Op, Pool, Unpool
from nbcnn.plan.shapes import ConvShape

VALUES = 16
BYTES = 128 << 20
"""Points of the images that are worked on at a time, about."""


def _after(call: Call) -> Any:
    """What becomes of the results, as `im2col.Window` says it."""
    return "mask" if call.op.mask else "pool" if call.op.has(Pool) else epilogue_function(call)


@dataclass(frozen=True)
class WinogradTile:
    """`images` at a time; the products' blocks own BM×BN, a thread TM×TN; `split` blocks share the tiles in a weight gradient."""

    images: int
    BM: int
    BN: int
    TM: int
    TN: int
    split: int = 1

    @property
    def product(self) -> Tile:
        return Tile(self.BM, self.BN, 16, self.TM, self.TN, self.split)


def shape_of(call: Call) -> ConvShape:
    """The convolution behind a call."""
    return im2col_wgrad.shape_of(call) if call.op.direction == "wgrad" else im2col.shape_of(call)


def supports(call: Call, target: Target) -> str | None:
    """None, or the reason in words."""
    c = shape_of(call)
    if reason := not_nhwc(call, "the Winograd kernels read"):
        return reason
    if (c.R, c.S, c.stride, c.pad) != (3, 3, 1, 1):
        return f"a window of {c.R}×{c.S}, stride {c.stride}, padding {c.pad} is not 3×3, 1, 1"
    if c.H % 2 or c.W % 2 or c.C % 16 or c.K % 16:
        return f"{c.C} to {c.K} channels of {c.H}×{c.W}: channels must be multiples of 16, the image of whole 2×2 tiles"
    if call.op.direction == "wgrad" and c.H * c.W // 4 % 16:
        return f"{c.H * c.W // 4} tiles per image are not a multiple of 16"
    return too_large(c.x_shape, c.y_shape)


def tile(call: Call, target: Target) -> WinogradTile:
    """The tile: as many images at a time as `BYTES` hold the Winograd-domain values of; large blocks; parts of the tiles so that a wave is full."""
    c = shape_of(call)
    images = max(1, min(c.N, BYTES // (4 * VALUES * (c.H * c.W // 4) * max(c.C, c.K))))
    columns = c.C if call.op.direction == "dgrad" else c.K
    sizes = (128, 128, 8, 8) if columns > 64 else (64, 64, 8, 4)
    if call.op.direction != "wgrad":
        return WinogradTile(images, *sizes)
    product = Tile(sizes[0], sizes[1], 16, *sizes[2:])
    blocks_of_part = product.grid(c.C, c.K)[0] * VALUES
    most = images * (c.H * c.W // 4) // product.BK
    split = max(1, min(most, product.blocks_per_multiprocessor * target.multiprocessors // blocks_of_part))
    return WinogradTile(images, *sizes, split)


def _chunks(c: ConvShape, images: int) -> Iterator[tuple[int, int]]:
    """(first tile, tiles) of the images that are worked on at a time."""
    each = c.H * c.W // 4
    return ((first * each, min(images, c.N - first) * each) for first in range(0, c.N, images))


class Scratch:
    """Consecutive float32 parts of a call's scratch."""

    def __init__(self, call: Call) -> None:
        self._floats, self._used = call.scratch.view(np.float32), 0

    def take(self, count: int) -> Any:
        self._used += count
        return self._floats[self._used - count : self._used]


def launch_input(kind: str, x: Any, values: Any, first: int, tiles: int, H: int, W: int, channels: int) -> Launch:
    """Points of the tiles `first` … of images of H×W."""
    sizes = (np.int32(v) for v in (first, tiles, H, W, channels // 4))
    return Launch(input_kernel(kind), blocks(tiles * channels // 4, THREADS), THREADS, (x, values, *sizes))


def launch_filters(kind: str, packed: Any, values: Any, rows: int, columns: int) -> Launch:
    """Points of the filters [3×3][rows][columns]."""
    count = rows * columns // 4
    sizes = (np.int32(v) for v in (count, rows, columns // 4))
    return Launch(filter_kernel(kind), blocks(count, THREADS), THREADS, (packed, values, *sizes))


def launch_images(kind: str, values: Any, b: Any, after: Any, other: Any, y: Any, first: int, tiles: int, H: int, W: int, K: int) -> Launch:
    """y, of images of H×W before a pooling, from the Winograd-domain values of the tiles `first` …; b and other are None where there is none."""
    sizes = (np.int32(v) for v in (first, tiles, H, W, K // 4))
    args = (values, y if b is None else b, y if other is None else other, y, *sizes)
    return Launch(image_kernel(kind, b is not None, after), blocks(tiles * K // 4, THREADS), THREADS, args)


def _sizes(call: Call) -> tuple[int, int, int]:
    """Floats of the Winograd-domain values of the filters, of what a chunk reads, and of what it makes (in a weight gradient: of x and dy)."""
    c = shape_of(call)
    chunk = VALUES * min(c.N, call.tile.images) * (c.H * c.W // 4)
    source, target = (c.K, c.C) if call.op.direction == "dgrad" else (c.C, c.K)
    return VALUES * c.C * c.K, chunk * source, chunk * target


def scratch(call: Call) -> int:
    """Bytes of the Winograd-domain values."""
    return 4 * sum(_sizes(call))


def transformed(call: Call, last: Callable[[Any, int, int], Launch]) -> list[Launch]:
    """Launches of fprop or dgrad: filters to Winograd-domain values; then, a few images at a time, their values, the products, and `last`
    (values, first tile, tiles), which makes images of them."""
    c, tile = shape_of(call), call.tile
    source, target = (c.C, c.K) if call.op.direction == "fprop" else (c.K, c.C)
    room = Scratch(call)
    u, v, m = (room.take(size) for size in _sizes(call))
    made = [launch_filters("winograd", call.packed, u, source, target)]
    for first, tiles in _chunks(c, tile.images):
        made += [
            launch_input("winograd", call.ins[0], v, first, tiles, c.H, c.W, source),
            launch_rows(v, u, m, VALUES, tiles, target, source, tile.product),
            last(m, first, tiles),
        ]
    return made


def bind(call: Call) -> list[Launch]:
    """fprop or dgrad, plain or fused."""
    c, after = shape_of(call), _after(call)
    target = c.K if call.op.direction == "fprop" else c.C
    third = call.ins[2] if len(call.ins) == 3 else None
    bias = None if after == "mask" else third
    other = third if after == "mask" else call.outs[-1] if after == "pool" else None
    return transformed(call, lambda m, first, tiles: launch_images("winograd", m, bias, after, other, call.outs[0], first, tiles, c.H, c.W, target))


def _planes(call: Call) -> int:
    return ceil_div(shape_of(call).N, call.tile.images) * call.tile.split


def scratch_wgrad(call: Call) -> int:
    """Bytes of the Winograd-domain values, of the partial gradients of them, and of the partial sums of dy."""
    c, (one, *images) = shape_of(call), _sizes(call)
    return 4 * (sum(images) + _planes(call) * (one + VALUES * c.K))


def bind_wgrad(call: Call) -> list[Launch]:
    """x (N,C,H,W), dy (N,K,H,W) -> dw (K,C,3,3)[, db (K)]."""
    c, tile, planes = shape_of(call), call.tile, _planes(call)
    (x, dy), dw = call.ins, call.outs[0]
    room, (one, *images) = Scratch(call), _sizes(call)
    v, g = (room.take(size) for size in images)
    partials, partials_b = room.take(planes * one), room.take(planes * VALUES * c.K)
    made: list[Launch] = []
    for chunk, (first, tiles) in enumerate(_chunks(c, tile.images)):
        made += [
            launch_input("winograd", x, v, first, tiles, c.H, c.W, c.C),
            launch_input("gradient", dy, g, first, tiles, c.H, c.W, c.K),
            launch_columns(v, g, partials, partials_b, tiles, c.C, c.K, chunk * tile.split, tile.product),
        ]
    db = call.outs[1] if len(call.outs) == 2 else None
    return [*made, *launch_sum_winograd(partials, partials_b, dw, db, c.K, c.C, planes)]


def traffic_of(call: Call, last: Callable[[int], Traffic]) -> list[Traffic]:
    """Bytes of `transformed`; last: of what makes images of the values of so many tiles."""
    c, tile = shape_of(call), call.tile
    source, target = (c.C, c.K) if call.op.direction == "fprop" else (c.K, c.C)
    made = [filters_traffic("winograd", source, target)]
    for _, tiles in _chunks(c, tile.images):
        made += [
            input_traffic("winograd", tiles, c.H, c.W, source),
            rows_traffic(VALUES, tiles, target, source, tile.product),
            last(tiles),
        ]
    return made


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`."""
    target = shape_of(call).K if call.op.direction == "fprop" else shape_of(call).C
    return traffic_of(
        call, lambda tiles: images_traffic("winograd", tiles, target, "mask" if call.op.mask else "pool" if call.op.has(Pool) else None)
    )


def traffic_wgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_wgrad`."""
    c, tile = shape_of(call), call.tile
    made = []
    for _, tiles in _chunks(c, tile.images):
        made += [input_traffic("winograd", tiles, c.H, c.W, c.C), input_traffic("gradient", tiles, c.H, c.W, c.K)]
        made.append(columns_traffic(tiles, c.C, c.K, tile.product))
    return made + exchanged_traffic(16, c.K, c.C, _planes(call), len(call.out_shapes) == 2)


def products(call: Call, target: Target) -> float:
    """Microseconds of the products of all values: 16 matrices for the images that are worked on at a time."""
    c, tile = shape_of(call), call.tile
    total = 0.0
    for _, tiles in _chunks(c, tile.images):
        if call.op.direction == "wgrad":
            total += product_cycles(tile.product, Product(c.C, c.K, tiles, copies=VALUES), target)
        else:
            source, result = (c.K, c.C) if call.op.direction == "dgrad" else (c.C, c.K)
            total += product_cycles(tile.product, Product(tiles, result, source, copies=VALUES), target)
    return total / CYCLES_A_MICROSECOND


_FPROP = Impl(bind, scratch, supports, tile, im2col.pack_fprop, traffic=traffic, engine="winograd", estimate=estimate("winograd", products, traffic))
_DGRAD = Impl(bind, scratch, supports, tile, im2col.pack_dgrad, traffic=traffic, engine="winograd", estimate=estimate("winograd", products, traffic))
_WGRAD = Impl(
    bind_wgrad, scratch_wgrad, supports, tile, traffic=traffic_wgrad, engine="winograd", estimate=estimate("winograd", products, traffic_wgrad)
)

OPS = {Op("conv", "fprop"): _FPROP, Op("conv", "dgrad"): _DGRAD, Op("conv", "wgrad"): _WGRAD}
"""The plain convolutions that have this form: 3×3, stride 1, padding 1, even images, channels in sixteens, large batches."""
FUSED = {
    Op("conv", "fprop", after=(Map("relu"),)): _FPROP,
    Op("conv", "fprop", after=(Map("relu"), Pool())): _FPROP,
    Op("conv", "dgrad", after=(Mask("relu"),)): _DGRAD,
    Op("conv", "wgrad", before=(Unpool(),)): composed.pool_wgrad(_WGRAD, unpool.IMPL),
}
"""The fused ones."""
