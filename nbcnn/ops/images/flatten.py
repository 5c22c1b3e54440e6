"""Flatten: (N,C,H,W) -> (N, C·H·W), features in C,H,W order in every layout, so that weights mean the same in every mode.

A copy where images are stored NCHW; where they are stored NHWC, a transpose of each image (see convert.py).

    flatten_fprop     x (N,C,H,W) -> y (N,CHW)            flatten_dgrad     dy -> dx          (y in C,H,W order in every layout)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nbcnn.ops.images.convert import traffic_transpose, transpose
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import IMAGES, Case, Gradient, Shapes, label_of, normal
from nbcnn.ops.kernel.maps import copy, supports
from nbcnn.ops.kernel.traffic import Traffic, streamed
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel


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


HOST = {Op("flatten", "fprop"): host(flatten_fprop), Op("flatten", "dgrad"): host(flatten_dgrad)}
OPS = {
    Op("flatten", "fprop"): Impl(bind_fprop, supports=supports, traffic=traffic_fprop),
    Op("flatten", "dgrad"): Impl(bind_dgrad, supports=supports, traffic=traffic_dgrad),
}
GRADIENTS = {Op("flatten", "dgrad"): Gradient(Op("flatten", "fprop"), lambda ins, outs, v: (v,))}


def cases(images: Shapes = IMAGES) -> Iterator[Case]:
    """Both passes."""
    for shape in images:
        flat, label = (shape[0], numel(shape[1:])), label_of(shape)
        yield Case(Op("flatten", "fprop"), label, (normal(7, *shape),), ((flat, "float32"),))
        yield Case(Op("flatten", "dgrad"), label, (normal(11, *flat),), ((shape, "float32"),))
