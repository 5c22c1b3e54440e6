"""This module has what the thin convolution kernels share: their view of a call, and what they refuse.

With stride 1 the input gradient is itself a convolution: of dy with the filters flipped, by 180 degrees, and their two
channel axes exchanged. So fprop and dgrad are both the correlation

    target[n,k,p,q] = Σ_{c,r,s} source[n,c,p+r-top,q+s-left] · filter[k,c,r,s]

and which kernel runs it depends only on which side has few channels: the source (gather) or the target (scatter).
"""

from __future__ import annotations

import numpy as np

from nbcnn.ops.conv.frame.correlation import Correlation
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.kernel.refusals import not_nhwc, too_large
from nbcnn.plan.op import Loss, Op, Pool
from nbcnn.plan.shapes import numel

THIN = 4
"""Most channels a thin side has."""
WINDOW = 25
"""Most taps (R·S) of a filter here: all taps of all thin channels stay in registers and shared memory."""


def correlation(call: Call) -> Correlation:
    """The correlation that an fprop or dgrad call computes, plain or fused; P and Q are those before a pooling."""
    (N, C, H, W), (_, K, P, Q) = call.in_shapes[0], call.out_shapes[1 if call.op == Op("upconv", "fprop", after=(Loss("mse"),)) else 0]
    R, S = call.in_shapes[1][2:]
    if call.op.plain == Op("upconv", "dgrad"):
        return Correlation(N, H, W, C, P, Q, K, 4, 4, 2, 1, 1)
    if call.op.has(Pool):
        P, Q = 2 * P, 2 * Q
    pad = call.attrs.get("pad", 1)
    top, left = (pad, pad) if call.op.direction == "fprop" else (R - 1 - pad, S - 1 - pad)
    return Correlation(N, H, W, C, P, Q, K, R, S, 1, top, left)


def filter_index(call: Call) -> np.ndarray:
    """(K,C,R,S) positions of `correlation(call)`'s filter in the flat weight of the call."""
    shape = call.in_shapes[1]
    index = np.arange(numel(shape), dtype=np.int32).reshape(shape)
    return index if call.op.direction == "fprop" else index.transpose(1, 0, 2, 3)[:, :, ::-1, ::-1]


def refusal(call: Call, filter_shape: tuple[int, ...], images: tuple[tuple[int, ...], ...]) -> str | None:
    """None if the thin kernels serve the call, else the reason in words. `filter_shape` is (K,C,R,S)."""
    K, C, R, S = filter_shape
    thin, wide = min(K, C), max(K, C)
    if reason := not_nhwc(call, "the thin kernels read"):
        return reason
    if call.attrs.get("stride", 1) != 1:
        return f"the thin kernels have stride 1, not {call.attrs['stride']}"
    if thin > THIN:
        return f"neither side is thin: {C} to {K} channels, at most {THIN} on one side"
    if wide < 4 * THIN or wide % 4:
        return f"the wide side has {wide} channels, not a multiple of 4 that is at least {4 * THIN}"
    if R * S > WINDOW:
        return f"a window of {R}×{S} has more than {WINDOW} taps"
    return too_large(*images)
