"""Before the first step, serial loops: the definition as seven nested loops on one CPU core, forward and for both gradients.

Numba compiles them, so that "times as fast as the serial loops" is said of compiled code: Python's own loops are a hundred times slower.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from nbcnn.ops.kernel.call import Impl, host
from nbcnn.plan.op import Op


def loops(x: Any, w: Any, y: Any, stride: int, pad: int) -> None:
    """y[n,k,p,q] = Σ_{c,r,s} w[k,c,r,s] · x[n,c,p·stride+r−pad,q·stride+s−pad]: x (N,C,H,W), w (K,C,R,S), y (N,K,P,Q), float32."""
    for n in range(y.shape[0]):
        for k in range(y.shape[1]):
            for p in range(y.shape[2]):
                for q in range(y.shape[3]):
                    total = np.float32(0)
                    for c in range(w.shape[1]):
                        for r in range(w.shape[2]):
                            for s in range(w.shape[3]):
                                h, v = p * stride + r - pad, q * stride + s - pad
                                if 0 <= h < x.shape[2] and 0 <= v < x.shape[3]:
                                    total += w[k, c, r, s] * x[n, c, h, v]
                    y[n, k, p, q] = total


def input_loops(dy: Any, w: Any, dx: Any, stride: int, pad: int) -> None:
    """dx[n,c,h,v] = Σ_{k,r,s} w[k,c,r,s] · dy[n,k,p,q] of the windows (p,q) in which tap (r,s) is (h,v): dx (N,C,H,W), w (K,C,R,S), float32."""
    dx[:] = 0
    for n in range(dy.shape[0]):
        for k in range(dy.shape[1]):
            for c in range(w.shape[1]):
                for p in range(dy.shape[2]):
                    for q in range(dy.shape[3]):
                        for r in range(w.shape[2]):
                            for s in range(w.shape[3]):
                                h, v = p * stride + r - pad, q * stride + s - pad
                                if 0 <= h < dx.shape[2] and 0 <= v < dx.shape[3]:
                                    dx[n, c, h, v] += w[k, c, r, s] * dy[n, k, p, q]


def weight_loops(x: Any, dy: Any, dw: Any, stride: int, pad: int) -> None:
    """dw[k,c,r,s] = Σ_{n,p,q} dy[n,k,p,q] · x[n,c,p·stride+r−pad,q·stride+s−pad]: dw (K,C,R,S), float32."""
    for k in range(dw.shape[0]):
        for c in range(dw.shape[1]):
            for r in range(dw.shape[2]):
                for s in range(dw.shape[3]):
                    total = np.float32(0)
                    for n in range(dy.shape[0]):
                        for p in range(dy.shape[2]):
                            for q in range(dy.shape[3]):
                                h, v = p * stride + r - pad, q * stride + s - pad
                                if 0 <= h < x.shape[2] and 0 <= v < x.shape[3]:
                                    total += dy[n, k, p, q] * x[n, c, h, v]
                    dw[k, c, r, s] = total


@cache
def compiled(function: Callable[..., None]) -> Callable[..., None] | None:
    """Loops compiled for one core; None where Numba is not installed."""
    try:
        from numba import njit
    except ImportError:
        return None
    made: Callable[..., None] = njit(function)
    return made


def implementations() -> dict[Op, Impl] | None:
    """The three passes by serial loops, in the place of the row `cpu`'s; None where Numba is not installed."""
    forward, backward, weights = (compiled(each) for each in (loops, input_loops, weight_loops))
    if forward is None or backward is None or weights is None:
        return None

    def conv_fprop(x: np.ndarray, w: np.ndarray, *rest: np.ndarray, stride: int, pad: int) -> None:
        *bias, y = rest
        forward(x, w, y, stride, pad)
        for b in bias:
            y += b[:, None, None]

    def conv_dgrad(dy: np.ndarray, w: np.ndarray, dx: np.ndarray, *, stride: int, pad: int) -> None:
        backward(dy, w, dx, stride, pad)

    def conv_wgrad(x: np.ndarray, dy: np.ndarray, dw: np.ndarray, *db: np.ndarray, stride: int, pad: int) -> None:
        weights(x, dy, dw, stride, pad)
        for target in db:
            np.sum(dy, axis=(0, 2, 3), out=target)

    return {Op("conv", "fprop"): host(conv_fprop), Op("conv", "dgrad"): host(conv_dgrad), Op("conv", "wgrad"): host(conv_wgrad)}
