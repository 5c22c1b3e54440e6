"""Each channel of an example times a factor of its own, y[n,c,…] = x[n,c,…]·f[n,c]; the gradient by the factor, df[n,c] = Σ x[n,c,…]·dy[n,c,…].

The gradient by x needs no op of its own: dx = dy·f is a `scale` too.

    scale              x (N,C,…), f (N,C) -> y (N,C,…)                images (N,C,H,W) or series (N,C,L)
    scale_wgrad        x (N,C,…), dy (N,C,…) -> df (N,C)

Source: J. Hu, L. Shen, G. Sun, "Squeeze-and-excitation networks", arXiv:1709.01507, equation 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.kernel.by_channel import launch_by_channel
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import IMAGES, SERIES, Case, Gradient, label_of, normal
from nbcnn.ops.kernel.loops import ceil_div, power_of_two
from nbcnn.ops.kernel.maps import element_part, supports
from nbcnn.ops.kernel.stored import kinds
from nbcnn.ops.kernel.traffic import Traffic, element, outputs, size, streamed
from nbcnn.ops.kernel.windows import lane_io, lanes_of, planes
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

THREADS = 256


def scale(x: np.ndarray, f: np.ndarray, y: np.ndarray) -> None:
    """y (N,C,…) = x (N,C,…)·f (N,C)."""
    np.multiply(x, f.reshape(f.shape + (1,) * (x.ndim - 2)), out=y)


def scale_wgrad(x: np.ndarray, dy: np.ndarray, df: np.ndarray) -> None:
    """df (N,C) = Σ x·dy over all axes of x and dy (N,C,…) but the first two."""
    np.sum((x * dy).reshape(*df.shape, -1), axis=2, out=df)


@jit(device=True)
def _product(x, f):
    return x * f


@cache
def wgrad_kernel(kind: str, lanes: int, width: int, lines: int) -> Any:
    """The kernel of the factor's gradient; all stored as `kind`. A block is `lines` lines of `width` groups of `lanes` channels."""
    load, store = lane_io(lanes, kind)
    FLOATS, FIRST = width * lines * lanes, lines // 2

    @jit()
    def scale_wgrad_kernel(x, dy, df, plane, groups):
        """df[o,c] = Σ_j x[o,j,c]·dy[o,j,c] over the pixels j of an image (NHWC) or a plane (NCHW, groups 1).

        grid    (outer, ⌈groups / width⌉), block width × lines
        owns    block: `width` groups of channels of one image; thread: every lines-th pixel of one
        shared  4·lanes·width·lines bytes, where the lines are added by a tree
        moves   4·x + 4·dy bytes of float32
        """
        sums = cuda.shared.array(FLOATS, f4)
        total, a, b = cuda.local.array(lanes, f4), cuda.local.array(lanes, f4), cuda.local.array(lanes, f4)
        own, line = cuda.threadIdx.x, cuda.threadIdx.y
        group = cuda.blockIdx.y * width + own
        for lane in range(lanes):
            total[lane] = 0.0
        if group < groups:
            for j in range(line, plane, lines):
                at = (cuda.blockIdx.x * plane + j) * groups + group
                load(x, at, a)
                load(dy, at, b)
                for lane in range(lanes):
                    total[lane] += a[lane] * b[lane]
        corner = (line * width + own) * lanes
        for lane in range(lanes):
            sums[corner + lane] = total[lane]
        cuda.syncthreads()
        half = FIRST
        while half > 0:
            if line < half:
                for lane in range(lanes):
                    sums[corner + lane] = sums[corner + lane] + sums[corner + half * width * lanes + lane]
            cuda.syncthreads()
            half >>= 1
        if line == 0 and group < groups:
            for lane in range(lanes):
                total[lane] = sums[corner + lane]
            store(df, cuda.blockIdx.x * groups + group, total)

    return scale_wgrad_kernel


def _extents(call: Call) -> tuple[int, int, int]:
    """(outer, pixels, inner) of the images or series of the call; series lie as NCHW in every row."""
    shape = call.in_shapes[0]
    outer, inner = planes(shape, call.layout if len(shape) == 4 else "NCHW")
    return outer, numel(shape[2:]), inner


def bind(call: Call) -> list[Launch]:
    """x, f -> y. One launch."""
    return launch_by_channel("scale_kernel", _product, call, per_image=True)


def bind_wgrad(call: Call) -> list[Launch]:
    """x, dy -> df. One launch."""
    outer, plane, inner = _extents(call)
    lanes = lanes_of(inner)
    groups = inner // lanes
    width = min(32, power_of_two(groups))
    lines = max(32 // width, min(THREADS // width, power_of_two(ceil_div(plane, 4))))
    args = (*call.ins, *call.outs, np.int32(plane), np.int32(groups))
    return [Launch(wgrad_kernel(kinds(call)[0], lanes, width, lines), (outer, ceil_div(groups, width)), (width, lines), args)]


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`: every element of x, and its factor as often as a thread needs it."""
    x = size(call, "in", 0)
    return [Traffic(x + element(call) * numel(call.in_shapes[0]), outputs(call), x + size(call, "in", 1))]


HOST = {Op("scale"): host(scale), Op("scale", "wgrad"): host(scale_wgrad)}
OPS = {
    Op("scale"): Impl(bind, supports=supports, traffic=traffic, pitched=element_part),
    Op("scale", "wgrad"): Impl(bind_wgrad, supports=supports, traffic=streamed),
}
GRADIENTS = {Op("scale", "wgrad"): Gradient(Op("scale"), lambda ins, outs, v: (ins[0], v), of=(1,))}


def cases() -> Iterator[Case]:
    """Both, of images and of series."""
    for shape in (*IMAGES, *SERIES):
        x, f, dy = normal(7, *shape), normal(8, *shape[:2]), normal(9, *shape)
        yield Case(Op("scale"), label_of(shape), (x, f), ((shape, "float32"),))
        yield Case(Op("scale", "wgrad"), label_of(shape), (x, dy), ((shape[:2], "float32"),), {}, numel(shape[2:]))
