"""Before the first step, serial loops: the definition as seven nested loops on one CPU core.

Numba compiles them, so that "times as fast as the serial loops" is said of compiled code: Python's own loops are a hundred times slower.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np


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


@cache
def serial_convolution() -> Callable[..., None] | None:
    """`loops` compiled for one core; None where Numba is not installed."""
    try:
        from numba import njit
    except ImportError:
        return None
    compiled: Callable[..., None] = njit(loops)
    return compiled
