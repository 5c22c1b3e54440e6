"""Depthwise 1-D convolution in NumPy: one sum per tap, float32 in mode cpu and float64 as the reference of every kernel.

Tap j of channel c multiplies the input `offset(j)` positions further on; what lies outside the series counts as zero:

    y[n,c,t] = Σ_j w[c,j] · x[n,c,t+offset(j)] (+ d[c]·x[n,c,t])
    causal   offset(j) = −j            every output sees its own time and the past
    same     offset(j) = j − ⌊T/2⌋     every output sees both sides

The optional skip d is one more tap of offset 0. In the notation of arXiv:2604.25422, (N, C, L, T) is (B, H, L, K).
"""

from __future__ import annotations

import numpy as np

PADDINGS = ("causal", "same")


def offsets(taps: int, padding: str) -> list[int]:
    """Where each of `taps` taps looks, relative to its output. Raises ValueError for an unknown `padding`."""
    if padding not in PADDINGS:
        raise ValueError(f"padding is causal or same, got {padding!r}")
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
