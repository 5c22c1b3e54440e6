"""Padding of images by a constant on each side; a negative padding crops.

    y[n,c,p,q] = x[n,c,p − top,q − left] inside the image, else value;   dx[n,c,h,w] = dy[n,c,h + top,w + left] inside dy, else 0

The gradient is the same op with the paddings negated and zeros outside, so one kernel serves both passes.

    pad_fprop         x (N,C,H,W) -> y (N,C,P,Q)          pad_dgrad         dy -> dx          top, left, value
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, jit
from nbcnn.ops.kernel.call import Call, Impl, Launch, Shape, blocks, host
from nbcnn.ops.kernel.case import IMAGES, Case, Gradient, Shapes, label_of, normal
from nbcnn.ops.kernel.loops import quotient, within
from nbcnn.ops.kernel.maps import supports
from nbcnn.ops.kernel.stored import kinds, scalar_io, vector_io
from nbcnn.ops.kernel.traffic import Traffic, element, once, outputs
from nbcnn.ops.kernel.windows import lanes_of, planes
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

THREADS = 256


def _kept(extent: int, source: int, before: int) -> tuple[slice, slice]:
    """Along one axis of `extent` elements made from `source` with `before` elements put in front: (made, taken) of those that are copied."""
    first, last = max(0, before), min(extent, source + before)
    last = max(first, last)
    return slice(first, last), slice(first - before, last - before)


def _shift(x: np.ndarray, y: np.ndarray, top: int, left: int, value: float) -> None:
    (rows, from_rows), (cols, from_cols) = _kept(y.shape[2], x.shape[2], top), _kept(y.shape[3], x.shape[3], left)
    y.fill(value)
    y[:, :, rows, cols] = x[:, :, from_rows, from_cols]


def pad_fprop(x: np.ndarray, y: np.ndarray, *, top: int, left: int, value: float = 0.0) -> None:
    """y (N,C,P,Q) = x (N,C,H,W) moved down by `top` and right by `left`, and `value` outside of it."""
    _shift(x, y, top, left, value)


def pad_dgrad(dy: np.ndarray, dx: np.ndarray, *, top: int, left: int, value: float = 0.0) -> None:
    """dx (N,C,H,W) = the part of dy (N,C,P,Q) that x became; `value` was constant."""
    _shift(dy, dx, -top, -left, 0.0)


@cache
def pad_kernel(kind: str, four: bool, value: float) -> Any:
    """y[o,p,q,i] = x[o,p − top,q − left,i] inside x, else `value`; images as (outer, rows, columns, inner), stored as `kind`.

    grid    ceil(y's elements / block's elements), block 256
    owns    thread: four channels of a pixel of y where inner is a multiple of four (`four`), else one element
    moves   the elements of y that come out of x twice, the others once
    """
    load, store = vector_io(kind) if four else scalar_io(kind)

    @jit()
    def pad_kernel(x, y, count, P, Q, H, W, inner, top, left):
        i = (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x) * (4 if four else 1)
        if within(i, count):
            pixel = quotient(i, inner)
            row = quotient(pixel, Q)
            outer = quotient(row, P)
            h, w = row - outer * P - top, pixel - row * Q - left
            inside = within(h, H) & within(w, W)
            at = ((outer * H + h) * W + w) * inner + i - pixel * inner
            if four:
                if inside:
                    a, b, c, d = load(x, at)
                    store(y, i, a, b, c, d)
                else:
                    store(y, i, value, value, value, value)
            else:
                store(y, i, load(x, at) if inside else value)

    return pad_kernel


def _launch(call: Call, top: int, left: int, value: float) -> list[Launch]:
    shape = call.out_shapes[0]
    _, inner = planes(shape, call.layout)
    four, count = lanes_of(inner) == 4, numel(shape)
    sizes = (count, *shape[2:], *call.in_shapes[0][2:], inner, top, left)
    grid = blocks(count, 4 * THREADS if four else THREADS)
    return [Launch(pad_kernel(kinds(call)[0], four, float(value)), grid, THREADS, (*call.ins, *call.outs, *(np.int32(n) for n in sizes)))]


def bind_fprop(call: Call) -> list[Launch]:
    """x (N,C,H,W) -> y (N,C,P,Q). One launch."""
    return _launch(call, call.attrs["top"], call.attrs["left"], call.attrs.get("value", 0.0))


def bind_dgrad(call: Call) -> list[Launch]:
    """dy (N,C,P,Q) -> dx (N,C,H,W). One launch."""
    return _launch(call, -call.attrs["top"], -call.attrs["left"], 0.0)


def _traffic(call: Call, top: int, left: int) -> list[Traffic]:
    (n, c, *made), source = call.out_shapes[0], call.in_shapes[0][2:]
    kept = [_kept(extent, of, before)[0] for extent, of, before in zip(made, source, (top, left), strict=True)]
    return [once(element(call) * n * c * numel(tuple(each.stop - each.start for each in kept)), outputs(call))]


def traffic_fprop(call: Call) -> list[Traffic]:
    """Bytes of `bind_fprop`: what is copied is read once."""
    return _traffic(call, call.attrs["top"], call.attrs["left"])


def traffic_dgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_dgrad`: what is copied is read once."""
    return _traffic(call, -call.attrs["top"], -call.attrs["left"])


HOST = {Op("pad", "fprop"): host(pad_fprop), Op("pad", "dgrad"): host(pad_dgrad)}
OPS = {
    Op("pad", "fprop"): Impl(bind_fprop, supports=supports, traffic=traffic_fprop),
    Op("pad", "dgrad"): Impl(bind_dgrad, supports=supports, traffic=traffic_dgrad),
}
GRADIENTS = {Op("pad", "dgrad"): Gradient(Op("pad", "fprop"), lambda ins, outs, v: (v,))}

Sides = tuple[int, int, int, int]


def padded(shape: Shape, sides: Sides) -> Shape:
    """The shape of images of `shape` (N,C,H,W) padded by (top, bottom, left, right)."""
    n, c, h, w = shape
    return n, c, h + sides[0] + sides[1], w + sides[2] + sides[3]


def cases(images: Shapes = IMAGES, sides: Sequence[Sides] = ((1, 1, 1, 1), (0, 2, 3, 0), (2, -1, -1, 1))) -> Iterator[Case]:
    """Both passes: equal sides, two sides alone, and a side that is cropped."""
    for shape in images:
        for each in sides:
            made, label, attrs = padded(shape, each), f"{label_of(shape)} by {each}", {"top": each[0], "left": each[2], "value": 0.5}
            yield Case(Op("pad", "fprop"), label, (normal(35, *shape),), ((made, "float32"),), attrs)
            yield Case(Op("pad", "dgrad"), label, (normal(36, *made),), ((shape, "float32"),), attrs)
