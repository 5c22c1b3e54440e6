"""Flatten: (N,C,H,W) -> (N, C·H·W), features in C,H,W order in every layout, so that weights mean the same in every mode.

A copy where images are stored NCHW; where they are stored NHWC, a transpose of each image (see convert.py).
"""

from __future__ import annotations

import numpy as np

from nbcnn.ops.images.convert import traffic_transpose, transpose
from nbcnn.ops.kernel.call import Call, Launch
from nbcnn.ops.kernel.elementwise import copy
from nbcnn.ops.kernel.traffic import Traffic, streamed


def flatten_fprop(x: np.ndarray, y: np.ndarray) -> None:
    """y (N, C·H·W) = x (N,C,H,W), each image in C,H,W order."""
    np.copyto(y, x.reshape(y.shape))


def flatten_dgrad(dy: np.ndarray, dx: np.ndarray) -> None:
    """dx (N,C,H,W) = dy (N, C·H·W), each image from C,H,W order."""
    np.copyto(dx, dy.reshape(dx.shape))


def bind_fprop(call: Call) -> list[Launch]:
    """One launch: a copy (NCHW) or a transpose (NHWC)."""
    if call.layout == "NCHW":
        return copy(call)
    N, C, H, W = call.in_shapes[0]
    return transpose(call, N, H * W, C)


def bind_dgrad(call: Call) -> list[Launch]:
    """One launch: a copy (NCHW) or a transpose (NHWC)."""
    if call.layout == "NCHW":
        return copy(call)
    N, C, H, W = call.out_shapes[0]
    return transpose(call, N, C, H * W)


def traffic_fprop(call: Call) -> list[Traffic]:
    """Bytes of `bind_fprop`."""
    N, C, H, W = call.in_shapes[0]
    return streamed(call) if call.layout == "NCHW" else traffic_transpose(call, N, H * W, C)


def traffic_dgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_dgrad`."""
    N, C, H, W = call.out_shapes[0]
    return streamed(call) if call.layout == "NCHW" else traffic_transpose(call, N, C, H * W)
