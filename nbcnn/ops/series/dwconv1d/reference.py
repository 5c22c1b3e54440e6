"""Depthwise 1-D convolution in NumPy: one sum per tap, float32 in mode cpu and float64 as the reference of every kernel.

Tap j of channel c multiplies the input `offset(j)` positions further on; what lies outside the series counts as zero:

    y[n,c,t] = Σ_j w[c,j] · x[n,c,t+offset(j)] (+ d[c]·x[n,c,t])
    causal   offset(j) = −j            every output sees its own time and the past
    same     offset(j) = j − ⌊T/2⌋     every output sees both sides

The optional skip d is one more tap of offset 0. In the notation of arXiv:2604.25422, (N, C, L, T) is (B, H, L, K).

    dwconv1d_fprop    x (N,C,L), w (C,T)[, d (C)] -> y (N,C,L)                                padding: causal or same
    dwconv1d_dgrad    dy (N,C,L), w (C,T)[, d (C)] -> dx (N,C,L)                              padding
    dwconv1d_wgrad    x (N,C,L), dy (N,C,L) -> dw (C,T)[, dd (C)]                             padding
    dwconv1d_bwd      dy (N,C,L), x (N,C,L), w (C,T)[, d (C)] -> dx, dw[, dd]                 padding; both gradients in one op
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nbcnn.files.quote import quoted
from nbcnn.ops.kernel.call import host
from nbcnn.ops.kernel.case import Case, Gradient, normal
from nbcnn.plan.op import Op

PADDINGS = ("causal", "same")


def offsets(taps: int, padding: str) -> list[int]:
    """Where each of `taps` taps looks, relative to its output. Raises ValueError for an unknown `padding`."""
    if padding not in PADDINGS:
        raise ValueError(f"padding is causal or same, got {quoted(padding)}")
    return [-j if padding == "causal" else j - taps // 2 for j in range(taps)]


def _overlap(length: int, offset: int) -> tuple[slice, slice]:
    """(outputs, inputs) of a tap: the outputs t for which t + offset lies inside the series, and those t + offset."""
    first, last = max(0, -offset), min(length, length - offset)
    return (slice(first, last), slice(first + offset, last + offset)) if first < last else (slice(0), slice(0))


def dwconv1d_fprop(x: np.ndarray, w: np.ndarray, *d_and_y: np.ndarray, padding: str) -> None:
    """y (N,C,L) from x (N,C,L), w (C,T) and, if it is given before y, d (C)."""
    *d, y = d_and_y
    y[...] = d[0][:, None] * x if d else 0
    for j, offset in enumerate(offsets(w.shape[1], padding)):
        out, into = _overlap(x.shape[2], offset)
        y[:, :, out] += w[:, j, None] * x[:, :, into]


def dwconv1d_dgrad(dy: np.ndarray, w: np.ndarray, *d_and_dx: np.ndarray, padding: str) -> None:
    """dx (N,C,L) from dy (N,C,L), w (C,T) and, if it is given before dx, d (C)."""
    *d, dx = d_and_dx
    dx[...] = d[0][:, None] * dy if d else 0
    for j, offset in enumerate(offsets(w.shape[1], padding)):
        out, into = _overlap(dy.shape[2], offset)
        dx[:, :, into] += w[:, j, None] * dy[:, :, out]


def dwconv1d_wgrad(x: np.ndarray, dy: np.ndarray, dw: np.ndarray, *dd: np.ndarray, padding: str) -> None:
    """dw (C,T) and, if wanted, dd (C) from x and dy (N,C,L)."""
    for j, offset in enumerate(offsets(dw.shape[1], padding)):
        out, into = _overlap(x.shape[2], offset)
        dw[:, j] = np.einsum("nct,nct->c", dy[:, :, out], x[:, :, into])
    for skip in dd:
        skip[...] = np.einsum("nct,nct->c", dy, x)


def dwconv1d_bwd(dy: np.ndarray, x: np.ndarray, w: np.ndarray, *rest: np.ndarray, padding: str) -> None:
    """dx (N,C,L), dw (C,T)[, dd (C)] from dy, x, w[, d (C)]: both gradients in one op."""
    if len(rest) == 4:
        d, dx, dw, dd = rest
        dwconv1d_dgrad(dy, w, d, dx, padding=padding)
        dwconv1d_wgrad(x, dy, dw, dd, padding=padding)
    else:
        dx, dw = rest
        dwconv1d_dgrad(dy, w, dx, padding=padding)
        dwconv1d_wgrad(x, dy, dw, padding=padding)


HOST = {Op("dwconv1d", "fprop"): host(dwconv1d_fprop), Op("dwconv1d", "dgrad"): host(dwconv1d_dgrad), Op("dwconv1d", "wgrad"): host(dwconv1d_wgrad)}
REFERENCES = {Op("dwconv1d", "bwd"): dwconv1d_bwd}
"""The reference of the fused op, which NumPy gains nothing from."""
GRADIENTS = {
    Op("dwconv1d", "dgrad"): Gradient(Op("dwconv1d", "fprop"), lambda ins, outs, v: (v, *ins[1:])),
    Op("dwconv1d", "wgrad"): Gradient(Op("dwconv1d", "fprop"), lambda ins, outs, v: (ins[0], v), of=(1,)),
}

MEAN_SERIES = (
    # N, C, L, T: one of everything; a single tap; taps as long as the series, and longer; odd; a length no multiple of four.
    (1, 1, 1, 1),
    (1, 1, 7, 1),
    (3, 2, 8, 8),
    (2, 3, 5, 9),
    (5, 2, 13, 3),
    (1, 4, 24, 5),
)
REAL_SERIES = ((37, 8, 48, 48), (33, 4, 300, 48), (2, 8, 1024, 64), (3, 5, 100, 7))


def series_cases(n: int, c: int, length: int, taps: int) -> Iterator[Case]:
    """The three passes of a depthwise convolution of series, both paddings, with and without a skip."""
    x, w, d, dy = normal(31, n, c, length), normal(32, c, taps), normal(33, c), normal(34, n, c, length)
    y, dw, dd = ((n, c, length), "float32"), ((c, taps), "float32"), ((c,), "float32")
    for padding in ("causal", "same"):
        attrs, label = {"padding": padding}, f"{n}×{c}×{length} {taps} taps {padding}"
        yield Case(Op("dwconv1d", "fprop"), label, (x, w), (y,), attrs, taps)
        yield Case(Op("dwconv1d", "fprop"), label + " skip", (x, w, d), (y,), attrs, taps + 1)
        yield Case(Op("dwconv1d", "dgrad"), label, (dy, w), (y,), attrs, taps)
        yield Case(Op("dwconv1d", "dgrad"), label + " skip", (dy, w, d), (y,), attrs, taps + 1)
        yield Case(Op("dwconv1d", "wgrad"), label, (x, dy), (dw,), attrs, n * length)
        yield Case(Op("dwconv1d", "wgrad"), label + " skip", (x, dy), (dw, dd), attrs, n * length)


def series_backward_cases(n: int, c: int, length: int, taps: int) -> Iterator[Case]:
    """Both gradients of a depthwise convolution of series in one op."""
    x, w, d, dy = normal(31, n, c, length), normal(32, c, taps), normal(33, c), normal(34, n, c, length)
    dx, dw, dd = ((n, c, length), "float32"), ((c, taps), "float32"), ((c,), "float32")
    for padding in ("causal", "same"):
        attrs, label, terms = {"padding": padding}, f"{n}×{c}×{length} {taps} taps {padding}", max(n * length, taps + 1)
        yield Case(Op("dwconv1d", "bwd"), label, (dy, x, w), (dx, dw), attrs, terms)
        yield Case(Op("dwconv1d", "bwd"), label + " skip", (dy, x, w, d), (dx, dw, dd), attrs, terms)


def cases() -> Iterator[Case]:
    """Shapes small enough for the simulator."""
    for series in MEAN_SERIES:
        yield from series_cases(*series)
        yield from series_backward_cases(*series)


def real_cases() -> Iterator[Case]:
    """The lengths that are measured."""
    for series in REAL_SERIES:
        yield from series_cases(*series)
        yield from series_backward_cases(*series)
