"""This module has what the kernels of a first layer share: their view of a call, its refusals, how pixels are grouped and filters packed.

`E` is the number of elements in a 32-bit word, 2 of bfloat16 or 1 of tf32. Output pixels go in 2×2 windows, pooled or not; a unit of
work is ROWS rows of 16 windows, and the patch of the image under it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.ops.kernel.call import Call, Shape, is_filter
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.refusals import not_nhwc, too_large
from nbcnn.plan.bounds import STORE
from nbcnn.plan.op import Pool, Unpool
from nbcnn.plan.shapes import ConvShape, window_extent

LANES = 32
WINDOWS = 16
"""Windows of a unit in a row."""
FEW_COLUMNS = 32
"""Columns C·R·S of the image matrix up to which a warp has all of them in registers: of fprop whole patches, of wgrad the sums of four tiles of 8.

With more, fprop loads a patch product by product, and the warps of a wgrad block share the columns. There only channels are served that the other
engines must copy one or two at a time, because they are no multiple of 16 bytes.
"""
MOST_PRODUCTS = {2: 10, 1: 20}
"""Most products of fprop along GK, for each E: 7×7 taps of three channels. A warp's filters are 8 registers per product in bf16, 4 in tf32."""
MOST_COLUMNS = 160
"""Most columns of wgrad, 7×7 taps of three channels and a bias in whole tiles: at 32 or 40 per warp they are five or four warps a set of filters."""
MOST_CHANNELS = 16
"""Most channels of a single tap: with 32 (64 filters, 512 images of 32×32, bf16) fprop took 143 µs and wgrad 346, their bytes 21."""
MOST_ON_THE_WAY = 24
"""Most registers per thread for the image under the next unit where columns are many: with 34, 7×7 taps of stride 2, bf16's wgrad spilled 24
bytes."""
ONES = {1: 0x3F800000, 2: 0x3F803F80}
"""A word of ones, for each E."""
SHARED_BYTES = 48 * 1024
"""Static shared memory that a block may have."""


@dataclass(frozen=True)
class Unit:
    """The pixels that a block takes at a time: ROWS × 16 windows, under which lie `height` × `width` elements of the image."""

    C: int
    R: int
    S: int
    stride: int
    ROWS: int

    @property
    def height(self) -> int:
        """Image rows of a unit."""
        return (2 * self.ROWS - 1) * self.stride + self.R

    @property
    def width(self) -> int:
        """Elements of an image row of a unit, (w,c)."""
        return ((2 * WINDOWS - 1) * self.stride + self.S) * self.C

    @property
    def elements(self) -> int:
        """Elements of the image under a unit."""
        return self.height * self.width

    def shared_bytes(self, pair: int) -> int:
        """Shared memory of two buffers of the image under a unit, as `first_image.stager` lays it out."""
        return 8 * (pair + self.elements)

    def on_the_way(self, threads: int) -> int:
        """Registers of each of so many threads for the image under the next unit."""
        return ceil_div(self.elements, threads)


def unit_of(layer: ConvShape, tile: Any) -> Unit:
    """The unit of a tile of fprop or wgrad: `tile.ROWS` rows of windows, `tile.TURNS` times."""
    return Unit(layer.C, layer.R, layer.S, layer.stride, tile.ROWS * tile.TURNS)


def word_elements(precision: str) -> int:
    """E: elements in a 32-bit word."""
    return 2 if precision == "bf16" else 1


def image_words(C: int, R: int, S: int, E: int) -> int:
    """Words of GK that a pixel's patch takes: the S·C neighbouring elements of each of its R rows, in whole words."""
    return R * -(-S * C // E)


def products(C: int, R: int, S: int, E: int) -> int:
    """Products that GK takes: the words of a patch, and a bias in two parts of the precision, 2·8 (11) bits of it."""
    return -(-(image_words(C, R, S, E) + 2 // E) // 8)


def few_columns(C: int, R: int, S: int, E: int) -> bool:
    """Whether a patch is so small that a warp of fprop has all its words in registers."""
    return image_words(C, R, S, E) * E <= FEW_COLUMNS


def first_layer(call: Call) -> ConvShape:
    """The convolution behind an fprop or wgrad call, plain or fused; its P and Q are those before a pooling."""
    K, C, R, S = filter_shape(call)
    N, _, H, W = call.in_shapes[0]
    return ConvShape(N, C, H, W, K, R, S, call.attrs["stride"], call.attrs["pad"])


def filter_shape(call: Call) -> Shape:
    """(K,C,R,S), of the weight or of its gradient."""
    return call.out_shapes[0] if call.op.direction == "wgrad" else call.in_shapes[1]


def refusal(call: Call, precision: str) -> str | None:
    """None if the kernels of a first layer serve the call, else the reason in words."""
    K, C, R, S = filter_shape(call)
    N, _, H, W = call.in_shapes[0]
    store, stride, pad = STORE[precision], call.attrs["stride"], call.attrs["pad"]
    P, Q = window_extent(H, R, stride, pad), window_extent(W, S, stride, pad)
    if reason := not_nhwc(call, "the thin tensor-core kernels read"):
        return reason
    if reason := _too_many_columns(call, word_elements(precision)):
        return reason
    if R * S == 1 and C > MOST_CHANNELS:
        return f"one tap of {C} channels is a product of matrices, for which the other engines are faster"
    if stride > 2:
        return f"the thin tensor-core kernels have a stride of 1 or 2, not {stride}"
    if (call.op.has(Pool) or call.op.has(Unpool)) and (P % 2 or Q % 2):
        return f"{P}×{Q} outputs are not whole 2×2 windows"
    if (needed := Unit(C, R, S, stride, 1).shared_bytes(stride * C if call.op.direction == "wgrad" else 1)) > SHARED_BYTES:
        return f"two buffers of the image under 16 windows are {needed} bytes, more than the {SHARED_BYTES} of shared memory that a block may have"
    kinds = _image_dtypes(call)
    if kinds - {store}:
        return f"images are stored as {', '.join(sorted(kinds))}, not all as {store}"
    return too_large((N, C, H, W), (N, K, P, Q))


def _too_many_columns(call: Call, E: int) -> str | None:
    """None if the columns fit, C·R·S of fprop in its products and, with a bias, those of wgrad in its tiles; else the reason in words."""
    _, C, R, S = filter_shape(call)
    wgrad = call.op.direction == "wgrad"
    ones = wgrad and len(call.out_shapes) > 1
    what = f"{C} channels × {R}×{S} taps{' and a bias' if ones else ''} are"
    if C * R * S + ones > FEW_COLUMNS and C % (4 * E) == 0:
        return f"{what} more than {FEW_COLUMNS} columns, and {C} channels are whole 16 bytes, for which the other engines are faster"
    if wgrad and C * R * S + ones > MOST_COLUMNS:
        return f"{what} more than {MOST_COLUMNS} columns of a weight gradient"
    if not wgrad and (needed := products(C, R, S, E)) > MOST_PRODUCTS[E]:
        return f"{what} {needed} products of {8 * E} columns, more than {MOST_PRODUCTS[E]}"
    return None


def _image_dtypes(call: Call) -> set[str]:
    sides = (("in", call.in_shapes, call.in_dtypes), ("out", call.out_shapes, call.out_dtypes))
    return {
        dtype
        for side, shapes, dtypes in sides
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
        if len(shape) == 4 and dtype != "uint8" and not is_filter(call.op, side, i)
    }


def filter_of_lane(E: int, tile: np.ndarray, column: np.ndarray) -> np.ndarray:
    """The filter of a column of a tile of 8 columns.

    A lane's results are columns 2t and 2t+1 of every tile. With this order the 2·E tiles of a group give lane t the 4·E filters from
    4·E·t on, 16 bytes of output.
    """
    group, j = tile // (2 * E), tile % (2 * E)
    return 16 * E * group + 4 * E * (column // 2) + 2 * j + column % 2


def packed_tiles(K: int, E: int) -> int:
    """Tiles of 8 filters that the packed weight holds, in whole groups."""
    return -(-K // (16 * E)) * 2 * E


def pack_filters(call: Call, E: int) -> np.ndarray:
    """Weight index of the fragments B (GK × filters) of conv_fprop: tile of 8 filters, product, lane, word (2), element (E)."""
    K, C, R, S = filter_shape(call)
    row = -(-S * C // E)
    products = -(-image_words(C, R, S, E) // 8)
    tile, product, lane, half, i = np.ogrid[: packed_tiles(K, E), :products, :LANES, :2, :E]
    word = 8 * product + 4 * half + lane % 4
    r, element = word // row, word % row * E + i
    s, c = element // C, element % C
    k = filter_of_lane(E, tile, lane // 4)
    inside = (k < K) & (r < R) & (element < S * C)
    return np.where(inside, ((k * C + c) * R + r) * S + s, -1).astype(np.int32).reshape(-1)
