"""This module has what the kernels of a first layer share: their view of a call, its refusals, how pixels are grouped and filters packed.

`E` is the number of elements in a 32-bit word, 2 of bfloat16 or 1 of tf32. Output pixels go in 2×2 windows, pooled or not; a unit of
work is ROWS rows of 16 windows, and the patch of the image under it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nbcnn.ops.kernel.call import Call, Shape, is_filter
from nbcnn.ops.kernel.refusals import not_nhwc, too_large
from nbcnn.plan.bounds import STORE
from nbcnn.plan.shapes import ConvShape, window_extent

LANES = 32
WINDOWS = 16
"""Windows of a unit in a row."""
MOST_COLUMNS = 32
"""Most columns C·R·S of the image matrix: they are one product's whole GK, or the columns of four tiles of 8."""
MOST_CHANNELS = 16
"""Most channels of a single tap: with 32 (64 filters, 512 images of 32×32, bf16) fprop took 143 µs and wgrad 346, their bytes 21."""
ONES = {1: 0x3F800000, 2: 0x3F803F80}
"""A word of ones, for each E."""


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


def word_elements(precision: str) -> int:
    """E: elements in a 32-bit word."""
    return 2 if precision == "bf16" else 1


def image_words(C: int, R: int, S: int, E: int) -> int:
    """Words of GK that a pixel's patch takes: the S·C neighbouring elements of each of its R rows, in whole words."""
    return R * -(-S * C // E)


def first_layer(call: Call) -> ConvShape:
    """The convolution behind an fprop or wgrad call, plain or fused; its P and Q are those before a pooling."""
    K, C, R, S = filter_shape(call)
    N, _, H, W = call.in_shapes[0]
    return ConvShape(N, C, H, W, K, R, S, call.attrs["stride"], call.attrs["pad"])


def filter_shape(call: Call) -> Shape:
    """(K,C,R,S), of the weight or of its gradient."""
    return call.out_shapes[0] if "wgrad" in call.op else call.in_shapes[1]


def refusal(call: Call, precision: str) -> str | None:
    """None if the kernels of a first layer serve the call, else the reason in words."""
    K, C, R, S = filter_shape(call)
    N, _, H, W = call.in_shapes[0]
    store, stride, pad = STORE[precision], call.attrs["stride"], call.attrs["pad"]
    P, Q = window_extent(H, R, stride, pad), window_extent(W, S, stride, pad)
    ones = "wgrad" in call.op and len(call.out_shapes) > 1
    words = MOST_COLUMNS // word_elements(precision)
    if reason := not_nhwc(call, "the thin tensor-core kernels read"):
        return reason
    if C * R * S + ones > MOST_COLUMNS:
        return f"{C} channels × {R}×{S} taps{' and a bias' if ones else ''} are more than {MOST_COLUMNS} columns"
    if image_words(C, R, S, word_elements(precision)) > words:
        return f"{R} rows of {S}×{C} elements are more than {words} words"
    if R * S == 1 and C > MOST_CHANNELS:
        return f"one tap of {C} channels is a product of matrices, for which the other engines are faster"
    if stride > 2:
        return f"the thin tensor-core kernels have a stride of 1 or 2, not {stride}"
    if "pool" in call.op and (P % 2 or Q % 2):
        return f"{P}×{Q} outputs are not whole 2×2 windows"
    kinds = _image_dtypes(call)
    if kinds - {store}:
        return f"images are stored as {', '.join(sorted(kinds))}, not all as {store}"
    return too_large((N, C, H, W), (N, K, P, Q))


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
