"""What the thin convolution kernels share: their view of a call, and the walk over pixels.

With stride 1 the input gradient is itself a convolution: of dy with the filters turned by 180 degrees and their two
channel axes exchanged. So fprop and dgrad are both the correlation

    target[n,k,p,q] = Σ_{c,r,s} source[n,c,p+r-top,q+s-left] · filter[k,c,r,s]

and which kernel runs it depends only on which side has few channels: the source (gather) or the target (scatter).

Numba adds and multiplies int32 as int64. The thin kernels cut what they keep back to 32 bits with i4(), so that the
compiler finds 32-bit arithmetic, and take quotients of unsigned numbers, which need no correction of the sign.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.gpu.language import SIMULATOR, cuda, i4, jit, u4
from nbcnn.ops.kernel.call import Call
from nbcnn.plan.shapes import numel

THIN = 4
"""Most channels a thin side has."""
WINDOW = 25
"""Most taps (R·S) of a filter here: all taps of all thin channels stay in registers and shared memory."""


@dataclass(frozen=True)
class Correlation:
    """Extents of target = source ⋆ filter; source (N,C,H,W), target (N,K,P,Q), filter (K,C,R,S).

    The stride is 1 but for the gradient behind a folded upsampling (folded.py).
    """

    N: int
    C: int
    H: int
    W: int
    K: int
    P: int
    Q: int
    R: int
    S: int
    top: int
    left: int
    stride: int = 1

    @property
    def taps(self) -> int:
        return self.R * self.S


def correlation(call: Call) -> Correlation:
    """The correlation that an fprop or dgrad call computes, plain or fused; P and Q are those before a pooling."""
    (N, C, H, W), (_, K, P, Q) = call.in_shapes[0], call.out_shapes[1 if call.op == "upconv_mse_fprop" else 0]
    R, S = call.in_shapes[1][2:]
    if call.op.startswith("upconv_dgrad"):
        return Correlation(N, C, H, W, K, P, Q, 4, 4, 1, 1, 2)
    if "pool" in call.op:
        P, Q = 2 * P, 2 * Q
    pad = call.attrs.get("pad", 1)
    top, left = (pad, pad) if "fprop" in call.op else (R - 1 - pad, S - 1 - pad)
    return Correlation(N, C, H, W, K, P, Q, R, S, top, left)


def filter_index(call: Call) -> np.ndarray:
    """(K,C,R,S) positions of `correlation(call)`'s filter in the flat weight of the call."""
    shape = call.in_shapes[1]
    index = np.arange(numel(shape), dtype=np.int32).reshape(shape)
    return index if "fprop" in call.op else index.transpose(1, 0, 2, 3)[:, :, ::-1, ::-1]


def refusal(call: Call, filter_shape: tuple[int, ...], images: tuple[tuple[int, ...], ...]) -> str | None:
    """None if the thin kernels serve the call, else the reason in words. `filter_shape` is (K,C,R,S)."""
    K, C, R, S = filter_shape
    thin, wide = min(K, C), max(K, C)
    if call.layout != "NHWC":
        return "the thin kernels read images stored NHWC"
    if call.attrs.get("stride", 1) != 1:
        return f"the thin kernels have stride 1, not {call.attrs['stride']}"
    if thin > THIN:
        return f"neither side is thin: {C} to {K} channels, at most {THIN} on one side"
    if wide < 4 * THIN or wide % 4:
        return f"the wide side has {wide} channels, not a multiple of 4 that is at least {4 * THIN}"
    if R * S > WINDOW:
        return f"a window of {R}×{S} has more than {WINDOW} taps"
    if max(numel(shape) for shape in images) >= 2**31:
        return "an image tensor has 2^31 elements or more; element offsets are 32-bit"
    return None


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


def unrolled(steps: list[Any]) -> Any:
    """One device function that calls each of `steps` in a row with the arguments it gets: a loop unrolled for certain."""

    def both(one: Any, other: Any) -> Any:
        @jit(device=True)
        def run(*args):
            one(*args)
            other(*args)

        return run

    return functools.reduce(both, steps)


@jit(device=True)
def split_pixel(m, P, Q):
    """(n, p, q) of pixel m of images of P×Q pixels; m ≥ 0."""
    plane = i4(P * Q)
    image = i4(u4(m) // u4(plane))
    rest = i4(m - image * plane)
    row = i4(u4(rest) // u4(Q))
    return image, row, i4(rest - row * Q)


@jit(device=True)
def step_pixel(n, p, q, dn, dp, dq, P, Q):
    """(n, p, q) plus (dn, dp, dq) with carries: a walk in equal steps without divisions."""
    q = i4(q + dq)
    p = i4(p + dp)
    n = i4(n + dn)
    if q >= Q:
        q = i4(q - Q)
        p = i4(p + i4(1))
    if p >= P:
        p = i4(p - P)
        n = i4(n + i4(1))
    return n, p, q


@jit(device=True)
def keep_order():
    """Loads written before this call are issued before loads written after it.

    The assembler otherwise moves a load whose value is needed only in the next turn of a loop to the end of this one,
    where it is too late to hide its latency. A barrier of the warp costs one empty instruction and holds it in place.
    The simulator, which has no warps, needs none.
    """
    if not SIMULATOR:
        cuda.syncwarp()
