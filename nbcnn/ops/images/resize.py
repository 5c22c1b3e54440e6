"""Larger images: every pixel repeated a × b times (`repeat`), or doubled by bilinear interpolation (`bilinear`).

    repeat     y[h,w] = x[h // a, w // b];  dx is the sum of an a × b block of dy
    bilinear   along an axis y[2i] = ¾·x[i] + ¼·x[i − 1], y[2i + 1] = ¾·x[i] + ¼·x[i + 1], where x[−1] = x[0] and x[H] = x[H − 1];
               along both, one after the other; dx is the transpose, of 4 × 4 elements of dy

Both gradients gather in a fixed order: nothing is atomic and bits repeat. Square factors have faster kernels in upsample.py. The weights are those of
torch.nn.functional.interpolate(mode="bilinear", align_corners=False) for a factor of 2.

    repeat_fprop      x (N,C,H,W) -> y (N,C,aH,bW)        repeat_dgrad      dy -> dx          factors (a,b)
    bilinear_fprop    x (N,C,H,W) -> y (N,C,2H,2W)        bilinear_dgrad    dy -> dx
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
from nbcnn.ops.kernel.windows import lane_io, lanes_of, launch, offset_of, planes, position, split
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

Pair = tuple[int, int]
NEAR, FAR = 0.75, 0.25


def repeat_fprop(x: np.ndarray, y: np.ndarray, *, factors: Pair) -> None:
    """y (N,C,aH,bW) = each element of x (N,C,H,W) repeated in an a × b block."""
    np.copyto(y, x.repeat(factors[0], axis=2).repeat(factors[1], axis=3))


def repeat_dgrad(dy: np.ndarray, dx: np.ndarray, *, factors: Pair) -> None:
    """dx (N,C,H,W) = the sum of each a × b block of dy (N,C,aH,bW)."""
    (n, c, h, w), (down, across) = dx.shape, factors
    dy.reshape(n, c, h, down, w, across).sum(axis=(3, 5), out=dx)


def _doubled(x: np.ndarray, axis: int) -> np.ndarray:
    """x, interpolated to twice its extent along `axis`."""
    x = np.moveaxis(x, axis, -1)
    before, after = np.concatenate([x[..., :1], x[..., :-1]], -1), np.concatenate([x[..., 1:], x[..., -1:]], -1)
    y = np.stack([x * NEAR + before * FAR, x * NEAR + after * FAR], -1)
    return np.moveaxis(y.reshape(*x.shape[:-1], -1), -1, axis)


def _halved(dy: np.ndarray, axis: int) -> np.ndarray:
    """The transpose of `_doubled`."""
    dy = np.moveaxis(dy, axis, -1)
    even, odd = dy[..., ::2], dy[..., 1::2]
    dx = (even + odd) * NEAR
    dx[..., :-1] += even[..., 1:] * FAR
    dx[..., 1:] += odd[..., :-1] * FAR
    dx[..., 0] += even[..., 0] * FAR
    dx[..., -1] += odd[..., -1] * FAR
    return np.moveaxis(dx, -1, axis)


def bilinear_fprop(x: np.ndarray, y: np.ndarray) -> None:
    """y (N,C,2H,2W) = x (N,C,H,W), interpolated."""
    np.copyto(y, _doubled(_doubled(x, 2), 3))


def bilinear_dgrad(dy: np.ndarray, dx: np.ndarray) -> None:
    """dx (N,C,H,W) = the transpose of the interpolation, of dy (N,C,2H,2W)."""
    np.copyto(dx, _halved(_halved(dy, 2), 3))


@cache
def repeat_fprop_kernel(kind: str, lanes: int, factors: Pair) -> Any:
    """The kernel that repeats; x and y stored as `kind`, channels in groups of `lanes`."""
    load, store = lane_io(lanes, kind)
    A, B = factors

    @jit()
    def repeat_pixels_kernel(x, y, count, H, W, groups):
        """y[o,h,w,c] = x[o, h // A, w // B, c].

        grid    ⌈count / 256⌉, block 256, count = outer·A·H·B·W·groups
        owns    thread: one group of one element of y
        shared  none
        moves   8·y bytes of float32; rereads of x hit the cache
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        o, h, w, group = position(i, A * H, B * W, groups)
        p, _ = split(h, A)
        q, _ = split(w, B)
        value = cuda.local.array(lanes, f4)
        load(x, offset_of(o, p, q, group, H, W, groups), value)
        store(y, i, value)

    return repeat_pixels_kernel


@cache
def repeat_dgrad_kernel(kind: str, lanes: int, factors: Pair) -> Any:
    """The kernel of the gradient of repeating; dy and dx stored as `kind`, channels in groups of `lanes`."""
    load, store = lane_io(lanes, kind)
    A, B = factors

    @jit()
    def repeat_dgrad_sums_kernel(dy, dx, count, H, W, groups):
        """dx[o,h,w,c] = Σ over r < A, s < B of dy[o, A·h + r, B·w + s, c].

        grid    ⌈count / 256⌉, block 256, count = outer·H·W·groups
        owns    thread: one group of one element of dx
        shared  none
        moves   4·dy + 4·dx bytes of float32
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        o, h, w, group = position(i, H, W, groups)
        total, part = cuda.local.array(lanes, f4), cuda.local.array(lanes, f4)
        for lane in range(lanes):
            total[lane] = 0.0
        for r in range(A):
            for s in range(B):
                load(dy, offset_of(o, A * h + r, B * w + s, group, A * H, B * W, groups), part)
                for lane in range(lanes):
                    total[lane] += part[lane]
        store(dx, i, total)

    return repeat_dgrad_sums_kernel


@cache
def bilinear_fprop_kernel(kind: str, lanes: int) -> Any:
    """The kernel of the interpolation; x and y stored as `kind`, channels in groups of `lanes`."""
    load, store = lane_io(lanes, kind)

    @jit()
    def bilinear_fprop_kernel(x, y, count, H, W, groups):
        """y[o,h,w,c] = ¾·row(h // 2) + ¼·row(the next one above or below), row(i) = ¾·x[o, i, w // 2, c] + ¼·x[o, i, the next one beside, c].

        grid    ⌈count / 256⌉, block 256, count = outer·2H·2W·groups
        owns    thread: one group of one element of y
        shared  none
        moves   16·y + 4·y bytes of float32; rereads of x hit the cache
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        o, h, w, group = position(i, 2 * H, 2 * W, groups)
        p, q = h >> 1, w >> 1
        p1, q1 = min(max(p + 2 * (h & 1) - 1, 0), H - 1), min(max(q + 2 * (w & 1) - 1, 0), W - 1)
        a, b = cuda.local.array(lanes, f4), cuda.local.array(lanes, f4)
        c, d = cuda.local.array(lanes, f4), cuda.local.array(lanes, f4)
        load(x, offset_of(o, p, q, group, H, W, groups), a)
        load(x, offset_of(o, p, q1, group, H, W, groups), b)
        load(x, offset_of(o, p1, q, group, H, W, groups), c)
        load(x, offset_of(o, p1, q1, group, H, W, groups), d)
        for lane in range(lanes):
            a[lane] = NEAR * (NEAR * a[lane] + FAR * b[lane]) + FAR * (NEAR * c[lane] + FAR * d[lane])
        store(y, i, a)

    return bilinear_fprop_kernel


@jit(device=True)
def _weight(tap, i, extent):
    """What element 2i − 1 + tap of the doubled axis has of element i."""
    near = (tap == 1) | (tap == 2)
    edge = ((tap == 1) & (i == 0)) | ((tap == 2) & (i == extent - 1))
    return (NEAR if near else FAR) + (FAR if edge else 0.0)


@cache
def bilinear_dgrad_kernel(kind: str, lanes: int) -> Any:
    """The kernel of the gradient of the interpolation; dy and dx stored as `kind`, channels in groups of `lanes`."""
    load, store = lane_io(lanes, kind)

    @jit()
    def bilinear_dgrad_kernel(dy, dx, count, H, W, groups):
        """dx[o,h,w,c] = Σ over r, s < 4 of weight(r)·weight(s)·dy[o, 2h − 1 + r, 2w − 1 + s, c] inside the image.

        grid    ⌈count / 256⌉, block 256, count = outer·H·W·groups
        owns    thread: one group of one element of dx
        shared  none
        moves   64·dx + 4·dx bytes of float32; rereads of dy hit the cache
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        o, h, w, group = position(i, H, W, groups)
        total, part = cuda.local.array(lanes, f4), cuda.local.array(lanes, f4)
        for lane in range(lanes):
            total[lane] = 0.0
        for r in range(4):
            for s in range(4):
                p, q = 2 * h - 1 + r, 2 * w - 1 + s
                inside = (p >= 0) & (p < 2 * H) & (q >= 0) & (q < 2 * W)
                weight = _weight(r, h, H) * _weight(s, w, W) if inside else 0.0
                near_p, near_q = min(max(p, 0), 2 * H - 1), min(max(q, 0), 2 * W - 1)
                load(dy, offset_of(o, near_p, near_q, group, 2 * H, 2 * W, groups), part)
                for lane in range(lanes):
                    total[lane] += weight * part[lane]
        store(dx, i, total)

    return bilinear_dgrad_kernel


def _bind(call: Call, small: tuple[int, ...], threads: tuple[int, ...], kernel: Any, *frozen: Any) -> list[Launch]:
    """One launch: a thread for every group of channels of every element of images of shape `threads`; `small` is that of the smaller images."""
    outer, inner = planes(small, call.layout)
    lanes = lanes_of(inner)
    groups = inner // lanes
    return launch(kernel(kinds(call)[0], lanes, *frozen), outer * numel(threads[2:]) * groups, (*call.ins, *call.outs), *small[2:], groups)


def bind_repeat_fprop(call: Call) -> list[Launch]:
    """One launch."""
    return _bind(call, call.in_shapes[0], call.out_shapes[0], repeat_fprop_kernel, tuple(call.attrs["factors"]))


def bind_repeat_dgrad(call: Call) -> list[Launch]:
    """One launch."""
    return _bind(call, call.out_shapes[0], call.out_shapes[0], repeat_dgrad_kernel, tuple(call.attrs["factors"]))


def bind_bilinear_fprop(call: Call) -> list[Launch]:
    """One launch."""
    return _bind(call, call.in_shapes[0], call.out_shapes[0], bilinear_fprop_kernel)


def bind_bilinear_dgrad(call: Call) -> list[Launch]:
    """One launch."""
    return _bind(call, call.out_shapes[0], call.out_shapes[0], bilinear_dgrad_kernel)


def _read(times: int) -> Any:
    """The bytes of a launch that reads `times` elements for each that it writes."""

    def traffic(call: Call) -> list[Traffic]:
        return [Traffic(element(call) * times * numel(call.out_shapes[0]), outputs(call), size(call, "in", 0))]

    return traffic


HOST = {
    Op("repeat", "fprop"): host(repeat_fprop),
    Op("repeat", "dgrad"): host(repeat_dgrad),
    Op("bilinear", "fprop"): host(bilinear_fprop),
    Op("bilinear", "dgrad"): host(bilinear_dgrad),
}
OPS = {
    Op("repeat", "fprop"): Impl(bind_repeat_fprop, traffic=_read(1)),
    Op("repeat", "dgrad"): Impl(bind_repeat_dgrad, traffic=streamed),
    Op("bilinear", "fprop"): Impl(bind_bilinear_fprop, traffic=_read(4)),
    Op("bilinear", "dgrad"): Impl(bind_bilinear_dgrad, traffic=_read(16)),
}
GRADIENTS = {Op(name, "dgrad"): Gradient(Op(name, "fprop"), lambda ins, outs, v: (v,)) for name in ("repeat", "bilinear")}


def cases(images: Shapes = IMAGES) -> Iterator[Case]:
    """All four, by factors that differ."""
    for shape in images:
        (n, c, h, w), x, label = shape, normal(7, *shape), label_of(shape)
        for down, across in ((1, 2), (3, 2)):
            large, attrs = (n, c, h * down, w * across), {"factors": (down, across)}
            yield Case(Op("repeat", "fprop"), f"{label} ×({down}, {across})", (x,), ((large, "float32"),), attrs)
            yield Case(Op("repeat", "dgrad"), f"{label} ×({down}, {across})", (normal(10, *large),), ((shape, "float32"),), attrs, down * across)
        large = (n, c, 2 * h, 2 * w)
        yield Case(Op("bilinear", "fprop"), label, (x,), ((large, "float32"),), {}, 4)
        yield Case(Op("bilinear", "dgrad"), label, (normal(10, *large),), ((shape, "float32"),), {}, 16)
