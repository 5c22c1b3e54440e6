"""This module describes every pass over images as one or four correlations, each an implicit GEMM of gathered pixels with packed filters:

    target[n, k, p, q] = Σ_{c,r,s} source[n, c, (stride·p − top + r) / dilate, (stride·q − left + s) / dilate] · filter[k, c, r, s]

where a position outside the source, or one that `dilate` does not divide, counts as zero.

    conv_fprop    source x, the filter itself
    conv_dgrad    source dy, filters flipped (turned by 180 degrees) with their channel axes exchanged, top = R − 1 − pad, dilate = the stride
                  or with stride 2 of an image of even extents: pixel (2i+r, 2j+s) of dx sees only the taps of one parity of rows and
                  columns, at neighbours of dy's pixel (i, j). Four correlations, one per (r, s), of one window, in which the taps that a
                  phase lacks are zeros: for 3×3 taps 16 products, not 36, and 9 where a kernel leaves out those of zeros (`Spans`).
    upconv_fprop  source x: output pixel (2i+r, 2j+s) of the doubled image sees 2×2 pixels of x. Four correlations, one per (r, s), with
                  filters V, top = 1 − r, left = 1 − s: 16 products instead of 36.
    upconv_dgrad  source dy, one 4×4 correlation of stride 2 with G: 16 products instead of 36.         (V and G: folded.py)

GEMM: m = (n, p, q), n = k, k = (r, s, c). Packed filters are rows (phase, k) of (r, s, c), channels fastest, as images are. An engine that cannot
dilate refuses the input gradient of other strides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nbcnn.ops.conv.frame.folded import gradient_filters, phase_filters
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.kernel.refusals import not_nhwc, too_large
from nbcnn.plan.op import Map, Mask, Op, Pool
from nbcnn.plan.shapes import numel

IMAGE_OPS = (
    Op("conv", "fprop"),
    Op("conv", "fprop", after=(Map("relu"),)),
    Op("conv", "fprop", after=(Map("relu"), Pool())),
    Op("conv", "dgrad"),
    Op("conv", "dgrad", after=(Mask("relu"),)),
    Op("upconv", "fprop"),
    Op("upconv", "fprop", after=(Map("relu"),)),
    Op("upconv", "dgrad"),
    Op("upconv", "dgrad", after=(Mask("relu"),)),
)
"""The passes over images that a tensor-core engine of this frame has, but for those with sums of channels."""


@dataclass(frozen=True)
class Spans:
    """The taps of four phases (r, s) that are not zeros: of one window, lines `rows[r]` and columns `columns[s]`, from the first to behind the last.

    (0, 0) for none.
    """

    rows: tuple[tuple[int, int], tuple[int, int]]
    columns: tuple[tuple[int, int], tuple[int, int]]

    def of(self, phase: int) -> tuple[int, int, int, int]:
        """First line, behind the last line, first column, behind the last column."""
        return (*self.rows[phase >> 1], *self.columns[phase & 1])

    def taps(self, phase: int) -> int:
        first, end, left, right = self.of(phase)
        return (end - first) * (right - left)

    @property
    def total(self) -> int:
        """Taps of all phases."""
        return sum(map(self.taps, range(4)))

    @property
    def busy(self) -> int:
        """Phases that have a tap."""
        return sum(self.taps(phase) > 0 for phase in range(4))

    @property
    def longest_first(self) -> tuple[int, ...]:
        """The phases, those of the most taps first."""
        return tuple(sorted(range(4), key=lambda phase: -self.taps(phase)))


@dataclass(frozen=True)
class Correlation:
    """Extents of `phases` correlations of one source (N,H,W,C); each has K channels of P×Q pixels, with R×S taps.

    spans: the taps of each phase that are not zeros; None where all phases have all taps.
    """

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
    dilate: int = 1
    spans: Spans | None = None

    @property
    def GM(self) -> int:
        """Pixels of one phase."""
        return self.N * self.P * self.Q

    @property
    def taps(self) -> int:
        return self.R * self.S

    @property
    def mean_taps(self) -> float:
        """Taps of a phase that are not zeros, in the mean."""
        return self.taps if self.spans is None else self.spans.total / self.phases

    @property
    def GK(self) -> int:
        """Products behind one result, those with zeros too."""
        return self.taps * self.C

    def k_tiles(self, channels: int) -> int:
        """Steps of `channels` products along GK."""
        return -(-self.GK // channels)

    @property
    def corners(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The box in which the windows' first pixels lie, per axis (columns, rows): its first pixel, and its last relative to the image's."""

        def last(first: int, count: int, size: int) -> int:
            return first + (count - 1) * self.stride + 1 - size

        return (-self.left, -self.top), (last(-self.left, self.Q, self.W), last(-self.top, self.P, self.H))


@dataclass(frozen=True)
class Parity:
    """Along one axis, the taps of a filter by the parity of the pixels of dx that they reach, for the input gradient of stride 2.

    Pixel 2i + a of dx is Σ_t filter_a[t] · dy[i − (first − a) + t], t < `taps`; `of_tap[r]` is (a, t) of tap r of the filter.
    """

    taps: int
    first: int
    of_tap: tuple[tuple[int, int], ...]

    @property
    def spans(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """First t and the one behind the last, of even pixels and of odd; none between is missing, since every second tap is the next t."""
        even, odd = ([t for parity, t in self.of_tap if parity == a] for a in (0, 1))
        return (min(even, default=0), max(even, default=-1) + 1), (min(odd, default=0), max(odd, default=-1) + 1)


def by_parity(taps: int, pad: int) -> Parity:
    """How tap r reaches pixel 2i + a from dy's pixel i + (a + pad − r)/2, an integer for one a."""
    parity = [(r - pad) % 2 for r in range(taps)]
    shift = [(a + pad - r) // 2 for r, a in enumerate(parity)]
    first = max(a - d for a, d in zip(parity, shift, strict=True))
    of_tap = tuple((a, d + first - a) for a, d in zip(parity, shift, strict=True))
    return Parity(max(t for _, t in of_tap) + 1, first, of_tap)


def in_phases(call: Call) -> bool:
    """True for an input gradient of stride 2 that is computed as four correlations."""
    dy, dx = call.in_shapes[0], call.out_shapes[0]
    return call.op.plain == Op("conv", "dgrad") and call.attrs["stride"] == 2 and dx[2:] == (2 * dy[2], 2 * dy[3])


def correlation(call: Call) -> Correlation:
    """The correlation(s) that a call computes."""
    (N, C, H, W), (_, K, P, Q) = call.in_shapes[0], call.out_shapes[0]
    if call.op.plain == Op("upconv", "fprop"):
        return Correlation(N, H, W, C, H, W, K, 2, 2, 1, 1, 1, phases=4)
    if call.op.plain == Op("upconv", "dgrad"):
        return Correlation(N, H, W, C, P, Q, K, 4, 4, 2, 1, 1)
    R, S = call.in_shapes[1][2:]
    pad = call.attrs["pad"]
    if in_phases(call):
        down, across = by_parity(R, pad), by_parity(S, pad)
        taps, spans = down.taps * across.taps, Spans(down.spans, across.spans)
        unequal = spans if spans.total < 4 * taps else None
        return Correlation(N, H, W, C, H, W, K, down.taps, across.taps, 1, down.first, across.first, phases=4, spans=unequal)
    if call.op.plain == Op("conv", "dgrad"):
        return Correlation(N, H, W, C, P, Q, K, R, S, 1, R - 1 - pad, S - 1 - pad, dilate=call.attrs["stride"])
    if call.op.has(Pool):
        P, Q = 2 * P, 2 * Q
    return Correlation(N, H, W, C, P, Q, K, R, S, call.attrs["stride"], pad, pad)


SQUARE = 8
"""Pixels along the side of a square, the 64 rows of one wgmma."""


def whole(count: int, channels: int) -> int:
    """`count` channels in whole steps of `channels`."""
    return -(-count // channels) * channels


def has_patches(g: Correlation) -> bool:
    """Whether its images are squares of 8×8 pixels, each of which meets a patch of the source or, with stride 2, one for each parity."""
    divided = g.stride <= 2 and not any(size % g.stride for size in (g.R, g.S, g.H, g.W))
    return g.P % SQUARE == 0 and g.Q % SQUARE == 0 and divided


def refusal(call: Call) -> str | None:
    """None if the kernel serves the call, else the reason in words."""
    if reason := not_nhwc(call, "wgmma reads"):
        return reason
    if call.op.plain == Op("conv", "dgrad") and call.attrs["stride"] != 1 and not in_phases(call):
        return f"the input gradient of stride {call.attrs['stride']} is no correlation"
    g = correlation(call)
    if g.C % 8:
        return f"{g.C} channels to sum over are not a multiple of 8"
    if g.K % 8:
        return f"{g.K} channels to write are not a multiple of 8"
    if g.top < 0 or g.left < 0:
        return f"a padding of {call.attrs['pad']} is wider than the filter"
    return beyond_tma(g) or too_large(call.in_shapes[0], call.out_shapes[0])


def image_part(call: Call, side: str, at: int, alignment: int) -> bool:
    """`Impl.pitched` of passes over images whose kernels find a pixel of an image by how far pixels lie apart: of all but what is pooled."""
    dense = call.op.kind != "conv" or (call.op.has(Pool) if side == "out" else at == 1)
    return not dense and alignment % 16 == 0 and len((call.in_shapes if side == "in" else call.out_shapes)[at]) == 4


def beyond_tma(g: Correlation) -> str | None:
    """A reason if TMA's im2col cannot address the windows."""
    if min(*g.corners[0], *g.corners[1]) < -128 or max(*g.corners[1], g.R, g.S) > 127 or g.stride > 8:
        return "the window exceeds what TMA addresses"
    return None


def pack(call: Call, channels: int = 1, of_tap: int = 1) -> np.ndarray:
    """Index map of the filters as rows (phase, k) of (r, s, c), padded to whole steps of `channels`: (n,), or (4, n) where taps are added up.

    of_tap: the channels of each tap are padded to whole steps of so many first.
    """
    shape = call.in_shapes[1]
    index = np.arange(numel(shape), dtype=np.int32).reshape(shape)
    if in_phases(call):
        rows = parity_filters(index, call.attrs["pad"])[None].transpose(0, 1, 2, 4, 5, 3)  # terms, phases, C, R, S, K
    elif call.op.kind != "upconv":
        rows = index.transpose(1, 0, 2, 3)[:, :, ::-1, ::-1] if call.op.direction == "dgrad" else index
        rows = rows.transpose(0, 2, 3, 1)[None]  # terms, K, R, S, C
    elif call.op.direction == "fprop":
        rows = phase_filters(index).transpose(0, 1, 2, 4, 5, 3)  # terms, phases, K, R, S, C
    else:
        rows = gradient_filters(index).transpose(0, 2, 3, 4, 1)  # terms, C, R, S, K
    rows = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % of_tap)], constant_values=-1)
    terms, GK = rows.shape[0], int(np.prod(rows.shape[-3:]))
    rows = rows.reshape(terms, -1, GK)
    made = np.pad(rows, ((0, 0), (0, 0), (0, -GK % channels)), constant_values=-1).reshape(terms, -1)
    return np.ascontiguousarray(made[0] if terms == 1 else made, np.int32)


def parity_filters(index: np.ndarray, pad: int) -> np.ndarray:
    """(phases, C, K, R', S'): positions in `index` (K,C,R,S) of the taps of each phase (r, s), row by row; -1 for none."""
    K, C, R, S = index.shape
    down, across = by_parity(R, pad), by_parity(S, pad)
    made = np.full((4, C, K, down.taps, across.taps), -1, np.int32)
    for r, (a, u) in enumerate(down.of_tap):
        for s, (b, v) in enumerate(across.of_tap):
            made[2 * a + b, :, :, u, v] = index[:, :, r, s].T
    return made
