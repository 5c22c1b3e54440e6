"""The mean of every channel of an image: y[n,c] = Σ_hw x[n,c,h,w] / (H·W); dx = dy / (H·W).

    global_mean_fprop  x (N,C,H,W) -> y (N,C)             global_mean_dgrad  dy (N,C) -> dx (N,C,H,W)

Source: M. Lin, Q. Chen, S. Yan, "Network in network", arXiv:1312.4400, section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import IMAGES, Case, Gradient, Shapes, label_of, normal
from nbcnn.ops.kernel.stored import kinds
from nbcnn.ops.kernel.traffic import Traffic, element, outputs, size, streamed
from nbcnn.ops.kernel.windows import lane_io, lanes_of, launch, planes, split
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel


def global_mean_fprop(x: np.ndarray, y: np.ndarray) -> None:
    """y (N,C) = the means of x (N,C,H,W) over H and W."""
    x.mean(axis=(2, 3), out=y)


def global_mean_dgrad(dy: np.ndarray, dx: np.ndarray) -> None:
    """dx (N,C,H,W) = dy (N,C) / (H·W)."""
    np.copyto(dx, (dy * dy.dtype.type(1 / numel(dx.shape[2:])))[:, :, None, None])


@cache
def fprop_kernel(kind: str, lanes: int) -> Any:
    """The kernel of the means; x and y stored as `kind`, channels in groups of `lanes`."""
    load, store = lane_io(lanes, kind)

    @jit()
    def global_mean_fprop_kernel(x, y, count, plane, groups, scale):
        """y[o,c] = scale · Σ_j x[o,j,c] over the pixels j of an image.

        grid    ⌈count / 256⌉, block 256, count = outer·groups
        owns    thread: one group of channels of one image
        shared  none
        moves   4·x + 4·y bytes of float32
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        o, group = split(i, groups)
        total, part = cuda.local.array(lanes, f4), cuda.local.array(lanes, f4)
        for lane in range(lanes):
            total[lane] = 0.0
        at = o * plane * groups + group
        for _ in range(plane):
            load(x, at, part)
            for lane in range(lanes):
                total[lane] += part[lane]
            at += groups
        for lane in range(lanes):
            total[lane] *= scale
        store(y, i, total)

    return global_mean_fprop_kernel


@cache
def dgrad_kernel(kind: str, lanes: int) -> Any:
    """The kernel of the gradient; dy and dx stored as `kind`, channels in groups of `lanes`."""
    load, store = lane_io(lanes, kind)

    @jit()
    def global_mean_dgrad_kernel(dy, dx, count, plane, groups, scale):
        """dx[o,j,c] = scale · dy[o,c].

        grid    ⌈count / 256⌉, block 256, count = outer·plane·groups
        owns    thread: one group of channels of one pixel
        shared  none
        moves   4·dx bytes of float32; dy comes from L1
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        pixel, group = split(i, groups)
        o, _ = split(pixel, plane)
        value = cuda.local.array(lanes, f4)
        load(dy, o * groups + group, value)
        for lane in range(lanes):
            value[lane] *= scale
        store(dx, i, value)

    return global_mean_dgrad_kernel


def _bind(call: Call, shape: tuple[int, ...], kernel: Any, whole: bool) -> list[Launch]:
    """One launch over images of `shape`, a thread for every pixel if `whole`, else for every image."""
    outer, inner = planes(shape, call.layout)
    lanes, plane = lanes_of(inner), numel(shape[2:])
    groups = inner // lanes
    count = outer * groups * (plane if whole else 1)
    return launch(kernel(kinds(call)[0], lanes), count, (*call.ins, *call.outs), plane, groups, np.float32(1 / plane))


def bind_fprop(call: Call) -> list[Launch]:
    """One launch."""
    return _bind(call, call.in_shapes[0], fprop_kernel, False)


def bind_dgrad(call: Call) -> list[Launch]:
    """One launch."""
    return _bind(call, call.out_shapes[0], dgrad_kernel, True)


def traffic_dgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_dgrad`: every pixel asks for its image's gradient."""
    return [Traffic(element(call) * numel(call.out_shapes[0]), outputs(call), size(call, "in", 0))]


HOST = {Op("global_mean", "fprop"): host(global_mean_fprop), Op("global_mean", "dgrad"): host(global_mean_dgrad)}
OPS = {Op("global_mean", "fprop"): Impl(bind_fprop, traffic=streamed), Op("global_mean", "dgrad"): Impl(bind_dgrad, traffic=traffic_dgrad)}
GRADIENTS = {Op("global_mean", "dgrad"): Gradient(Op("global_mean", "fprop"), lambda ins, outs, v: (v,))}


def cases(images: Shapes = IMAGES) -> Iterator[Case]:
    """Both passes."""
    for shape in images:
        yield Case(Op("global_mean", "fprop"), label_of(shape), (normal(7, *shape),), ((shape[:2], "float32"),), {}, numel(shape[2:]))
        yield Case(Op("global_mean", "dgrad"), label_of(shape), (normal(8, *shape[:2]),), ((shape, "float32"),), {}, 4)
