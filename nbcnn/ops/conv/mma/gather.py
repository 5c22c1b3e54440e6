"""This module describes every pass over images to the mma engine as a product of gathered pixels with packed filters, in one or four phases.

    target[n, k, p, q] = Σ_(c,r,s) source[n, c, (stride·p − top + r) / dilate, (stride·q − left + s) / dilate] · filter[k, c, r, s]

where a position outside the source, or one that `dilate` does not divide, counts as zero.

    conv_fprop    source x, the filter itself, dilate 1
    conv_dgrad    source dy, filters flipped (turned by 180 degrees) with their channel axes exchanged, top = R − 1 − pad, dilate = the stride
    upconv_fprop  source x, four phases with 2×2 filters V; phase (r, s) writes pixels (2i + r, 2j + s), with top = 1 − r, left = 1 − s
    upconv_dgrad  source dy, 4×4 filters G, stride 2, top = left = 1           (V and G: nbcnn.ops.conv.frame.folded)

GEMM: m = (n, p, q), or the pixels window by window where they are pooled; n = filter; k = (r, s, c), padded to whole k-tiles of
128 bytes. Packed filters are rows (phase, filter) of k.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nbcnn.ops.conv.frame.folded import gradient_filters, phase_filters
from nbcnn.ops.kernel.call import Call
from nbcnn.plan.shapes import numel

LARGEST_FILTER = 16
"""Rows and columns of a filter: a pixel keeps one bit for each in one word."""


@dataclass(frozen=True)
class Gather:
    """Extents: source (N,H,W,C); `phases` targets of P×Q pixels and K channels; R×S taps."""

    N: int
    H: int
    W: int
    C: int
    P: int
    Q: int
    K: int
    R: int
    S: int
    stride: int = 1
    dilate: int = 1
    top: int = 0
    left: int = 0
    phases: int = 1

    @property
    def GM(self) -> int:
        """Pixels of one phase."""
        return self.N * self.P * self.Q

    @property
    def GK(self) -> int:
        """Products behind one result, without the padding to whole k-tiles."""
        return self.R * self.S * self.C

    def k_tiles(self, channels: int) -> int:
        """Steps of `channels` products along GK."""
        return -(-self.GK // channels)


def gather_of(call: Call) -> Gather:
    """The gather that a call computes."""
    (N, C, H, W), (_, K, P, Q) = call.in_shapes[0], call.out_shapes[0]
    if call.op.startswith("upconv"):
        if "fprop" in call.op:
            return Gather(N, H, W, C, H, W, K, 2, 2, top=1, left=1, phases=4)
        return Gather(N, H, W, C, P, Q, K, 4, 4, stride=2, top=1, left=1)
    (R, S), stride, pad = call.in_shapes[1][2:], call.attrs["stride"], call.attrs["pad"]
    if "dgrad" in call.op:
        return Gather(N, H, W, C, P, Q, K, R, S, dilate=stride, top=R - 1 - pad, left=S - 1 - pad)
    pooled = 2 if "pool" in call.op else 1
    return Gather(N, H, W, C, pooled * P, pooled * Q, K, R, S, stride=stride, top=pad, left=pad)


def refusal(call: Call) -> str | None:
    """None if the engine runs the call, else the reason in words."""
    if call.layout != "NHWC":
        return "mma reads images stored NHWC"
    g = gather_of(call)
    if max(g.R, g.S) > LARGEST_FILTER:
        return f"a filter of {g.R}×{g.S} is larger than {LARGEST_FILTER}×{LARGEST_FILTER}"
    if max(numel(shape) for shape in (call.in_shapes[0], call.out_shapes[0])) >= 2**31:
        return "an image tensor has 2^31 elements or more; element offsets are 32-bit"
    return None


def pack(call: Call, channels: int) -> np.ndarray:
    """Index map of the filters as rows (phase, filter) of (r, s, c), padded to whole k-tiles of `channels`: (n,), or (4, n) for sums of taps."""
    shape = call.in_shapes[1]
    index = np.arange(numel(shape), dtype=np.int32).reshape(shape)
    if not call.op.startswith("upconv"):
        rows = index.transpose(1, 0, 2, 3)[:, :, ::-1, ::-1] if "dgrad" in call.op else index
        rows = rows.transpose(0, 2, 3, 1)[None]  # terms, K, R, S, C
    elif "fprop" in call.op:
        rows = phase_filters(index).transpose(0, 1, 2, 4, 5, 3)  # terms, phases, K, R, S, C
    else:
        rows = gradient_filters(index).transpose(0, 2, 3, 4, 1)  # terms, C, R, S, K
    terms, GK = rows.shape[0], int(np.prod(rows.shape[-3:]))
    rows = rows.reshape(terms, -1, GK)
    spare = -GK % channels
    made = np.pad(rows, ((0, 0), (0, 0), (0, spare)), constant_values=-1).reshape(terms, -1)
    return np.ascontiguousarray(made[0] if terms == 1 else made, np.int32)
