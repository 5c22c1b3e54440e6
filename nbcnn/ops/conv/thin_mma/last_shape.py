"""This module has what the kernels of a last layer share: their view of a call, its refusals, how filters are packed into fragments.

`E` is the number of elements in a 32-bit word, 2 of bfloat16 or 1 of tf32. All sizes below are in words or in 16 bytes, what one
thread moves at once, and so the two precisions differ only in E: an m16n8 product takes 8·E of GK, a thread's load holds 4·E channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nbcnn.ops.kernel.call import Call
from nbcnn.ops.kernel.refusals import not_nhwc, too_large
from nbcnn.plan.bounds import STORE

FILTERS = 4
"""Most filters of a last layer."""
COLUMNS = 32
"""Columns of the product, one for every tap and filter: two tiles of 16."""
LANES = 32


@dataclass(frozen=True)
class LastLayer:
    """Extents of one call: wide images (N,C,H,W), K filters of R×R, thin images (N,K,F·H,F·W); F is 2 behind an upsampling, else 1."""

    N: int
    C: int
    H: int
    W: int
    K: int
    R: int
    F: int

    @property
    def columns(self) -> int:
        """GN: one column for every tap and filter, (r,s,k) in this order."""
        return self.R * self.R * self.K

    @property
    def pixels(self) -> int:
        """Wide pixels of all images."""
        return self.N * self.H * self.W


def images_and_filter(call: Call) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes (wide images, filter, thin images) of a call of any pass."""
    if call.op.direction == "wgrad":
        return call.in_shapes[0], call.out_shapes[0], call.in_shapes[1]
    if call.op.direction == "dgrad":
        return call.out_shapes[0], call.in_shapes[1], call.in_shapes[0]
    return call.in_shapes[0], call.in_shapes[1], call.out_shapes[-1]


def last_layer(call: Call) -> LastLayer:
    """The extents of a call that `refusal` lets pass."""
    (N, C, H, W), (K, _, R, _), _ = images_and_filter(call)
    return LastLayer(N, C, H, W, K, R, 2 if call.op.kind == "upconv" else 1)


def word_elements(precision: str) -> int:
    """E: elements in a 32-bit word."""
    return 2 if precision == "bf16" else 1


def refusal(call: Call, precision: str) -> str | None:
    """None if the kernels of a last layer serve the call, else the reason in words."""
    wide, (K, C, R, S), thin = images_and_filter(call)
    stride, pad = call.attrs.get("stride", 1), call.attrs.get("pad", 1)
    group, store = 4 * word_elements(precision), STORE[precision]
    if reason := not_nhwc(call, "the thin tensor-core kernels read"):
        return reason
    if K > FILTERS:
        return f"{K} filters are no thin last layer: at most {FILTERS}"
    if stride != 1:
        return f"the thin tensor-core kernels have stride 1, not {stride}"
    if R != S or R % 2 == 0 or pad != R // 2:
        return f"a window of {R}×{S} with padding {pad} is not centred on its pixel"
    if R * S * K > COLUMNS:
        return f"{R}×{S} taps of {K} filters are {R * S * K} columns, more than {COLUMNS}"
    if C % group:
        return f"{C} channels are not whole groups of 16 bytes ({group} of {store})"
    if set(_image_dtypes(call)) - {store}:
        return f"images are stored as {', '.join(sorted(set(_image_dtypes(call))))}, not all as {store}"
    return too_large(wide, thin)


def _image_dtypes(call: Call) -> Sequence[str]:
    pairs = [*zip(call.in_shapes, call.in_dtypes, strict=False), *zip(call.out_shapes, call.out_dtypes, strict=False)]
    filters = images_and_filter(call)[1]
    return [dtype for shape, dtype in pairs if len(shape) == 4 and shape != filters]


def pack_columns_by_channels(call: Call, E: int) -> np.ndarray:
    """Weight index of fragments A (columns × channels), for the product whose B are the wide images.

    Order: channels 16·E at a time, product s (2), column tile (2), lane, word (4), element (E). A thread (g, t) of B loads channels
    4·E·t … of pixel g at once; of its four words product s takes 2s and 2s+1. GK may be walked in any order, A's order is B's.
    """
    layer = last_layer(call)
    blocks = -(-layer.C // (16 * E))
    block, s, tile, lane, word, i = np.ogrid[:blocks, :2, :2, :LANES, :4, :E]
    column = 16 * tile + lane // 4 + 8 * (word & 1)
    channel = 16 * E * block + 4 * E * (lane % 4) + E * (2 * s + (word >> 1)) + i
    return _weight_index(layer, column, column // layer.K, channel)


def pack_channels_by_columns(call: Call, E: int) -> np.ndarray:
    """Weight index of fragments A (channels × columns), for the product whose B are the columns of the thin gradient.

    Order: channels 32·E at a time, product s (4/E), row tile (2·E), lane, word (4), element (E). Rows g and g+8 of row tile t are channels
    4·E·g + 2t and the next, so that the results of a thread are 4·E neighbouring channels. Taps count backwards, as the columns do.
    """
    layer = last_layer(call)
    blocks = -(-layer.C // (32 * E))
    block, s, tile, lane, word, i = np.ogrid[:blocks, : 4 // E, : 2 * E, :LANES, :4, :E]
    column = 8 * E * s + 4 * E * (word >> 1) + E * (lane % 4) + i
    channel = 32 * E * block + 4 * E * (lane // 4) + 2 * tile + (word & 1)
    return _weight_index(layer, column, layer.R**2 - 1 - column // layer.K, channel)


def _weight_index(layer: LastLayer, column: np.ndarray, tap: np.ndarray, channel: np.ndarray) -> np.ndarray:
    """Positions in the flat (K,C,R,R) weight, −1 beyond the last column or channel."""
    inside = (column < layer.columns) & (channel < layer.C)
    index = np.where(inside, (column % layer.K * layer.C + channel) * layer.R**2 + tap, -1)
    return index.astype(np.int32).reshape(-1)
