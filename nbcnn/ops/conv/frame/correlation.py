"""Every pass over images here is one or four correlations, which one kernel computes as an implicit GEMM:

    target[n, k, p, q] = Σ_{c,r,s} source[n, c, stride·p + r − top, stride·q + s − left] · filter[k, c, r, s]

    conv_fprop    source x, the filter itself
    conv_dgrad    source dy, filters flipped (turned by 180 degrees) with their channel axes exchanged, top = R − 1 − pad (stride 1 only)
    upconv_fprop  source x: output pixel (2i+r, 2j+s) of the doubled image sees 2×2 pixels of x. Four correlations, one per (r, s),
                  with filters V = T_r W T_sᵀ: sums of up to four taps, made when weights are packed. 16 products instead of 36.
    upconv_dgrad  source dy, one 4×4 correlation of stride 2 with G = S W Sᵀ: 16 products instead of 36.

GEMM: m = (n, p, q), n = k, k = (r, s, c). Packed filters are rows (phase, k) of (r, s, c), channels fastest, as images are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nbcnn.ops.kernel.call import Call
from nbcnn.plan.shapes import numel

# Which rows of a 3-row filter fall on row d of the 2-row filter of phase r; the same for columns.
_UP_FPROP = (((0,), (1, 2)), ((0, 1), (2,)))
# Which rows of a 3-row filter fall on row u of the 4-row filter that carries the gradient back.
_UP_DGRAD = ((2,), (1, 2), (0, 1), (0,))
_TERMS = 4


@dataclass(frozen=True)
class Correlation:
    """Extents of `phases` correlations of one source (N,H,W,C); each has K channels of P×Q pixels, with R×S taps."""

    N: int
    H: int
    W: int
    C: int
    P: int
    Q: int
    K: int
    R: int
    S: int
    stride: int
    top: int
    left: int
    phases: int = 1

    @property
    def GM(self) -> int:
        """Pixels of one phase."""
        return self.N * self.P * self.Q

    @property
    def GK(self) -> int:
        return self.R * self.S * self.C

    @property
    def corners(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The box in which the windows' first pixels lie, per axis (columns, rows): its first pixel, and its last relative to the image's."""

        def last(first: int, count: int, size: int) -> int:
            return first + (count - 1) * self.stride + 1 - size

        return (-self.left, -self.top), (last(-self.left, self.Q, self.W), last(-self.top, self.P, self.H))


def correlation(call: Call) -> Correlation:
    """The correlation(s) that a call computes."""
    (N, C, H, W), (_, K, P, Q) = call.in_shapes[0], call.out_shapes[0]
    if call.op.startswith("upconv_fprop") or call.op.startswith("upconv_relu_fprop"):
        return Correlation(N, H, W, C, H, W, K, 2, 2, 1, 1, 1, phases=4)
    if call.op.startswith("upconv_dgrad"):
        return Correlation(N, H, W, C, P, Q, K, 4, 4, 2, 1, 1)
    R, S = call.in_shapes[1][2:]
    pad = call.attrs["pad"]
    if call.op.startswith("conv_dgrad"):
        return Correlation(N, H, W, C, P, Q, K, R, S, 1, R - 1 - pad, S - 1 - pad)
    if "pool" in call.op:
        P, Q = 2 * P, 2 * Q
    return Correlation(N, H, W, C, P, Q, K, R, S, call.attrs["stride"], pad, pad)


def refusal(call: Call, channels: int) -> str | None:
    """None if the kernel serves the call, else the reason in words. `channels` are those of one tile along GK."""
    if call.layout != "NHWC":
        return "wgmma reads images stored NHWC"
    if call.op.startswith("conv_dgrad") and call.attrs["stride"] != 1:
        return f"the input gradient of stride {call.attrs['stride']} is no correlation"
    g = correlation(call)
    if g.C % channels:
        return f"{g.C} channels to sum over are not a multiple of {channels}"
    if g.K % 8:
        return f"{g.K} channels to write are not a multiple of 8"
    if g.top < 0 or g.left < 0:
        return f"a padding of {call.attrs['pad']} is wider than the filter"
    if min(*g.corners[0], *g.corners[1]) < -128 or max(*g.corners[1], g.R, g.S) > 127 or g.stride > 8:
        return "the window exceeds what TMA addresses"
    if max(numel(shape) for shape in (call.in_shapes[0], call.out_shapes[0])) >= 2**31:
        return "an image tensor has 2^31 elements or more; element offsets are 32-bit"
    return None


def pack(call: Call) -> np.ndarray:
    """Index map of the filters as rows (phase, k) of (r, s, c): (n,), or (4, n) where up to four taps are added."""
    shape = call.in_shapes[1]
    index = np.arange(numel(shape), dtype=np.int32).reshape(shape)
    if call.op.startswith("conv_dgrad"):
        return index.transpose(1, 0, 2, 3)[:, :, ::-1, ::-1].transpose(0, 2, 3, 1).reshape(-1)
    if not call.op.startswith("upconv"):
        return index.transpose(0, 2, 3, 1).reshape(-1)
    if "fprop" in call.op:
        phases = [_summed(index, _UP_FPROP[r], _UP_FPROP[s]) for r in (0, 1) for s in (0, 1)]
        return np.stack(phases, 1).transpose(0, 1, 2, 4, 5, 3).reshape(_TERMS, -1)
    return _summed(index, _UP_DGRAD, _UP_DGRAD).transpose(0, 2, 3, 4, 1).reshape(_TERMS, -1)


def _summed(index: np.ndarray, rows: tuple[tuple[int, ...], ...], columns: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """(4,K,C,R,S): positions of the taps that make up each tap of a filter whose rows and columns are sums; −1 where there are fewer."""
    k, c = index.shape[:2]
    made = np.full((_TERMS, k, c, len(rows), len(columns)), -1, np.int32)
    for r, from_rows in enumerate(rows):
        for s, from_columns in enumerate(columns):
            for t, (a, b) in enumerate((a, b) for a in from_rows for b in from_columns):
                made[t, :, :, r, s] = index[:, :, a, b]
    return made
