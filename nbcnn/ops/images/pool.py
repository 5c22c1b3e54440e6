"""Pooling over any windows: R × S taps, a stride for each axis, padding, windows that hang over the lower and right edge (ceil_mode).

    window (p,q) covers rows p·U − top … p·U − top + R − 1, columns likewise; taps outside the image count nothing
    max    y = the largest element inside, index = which tap it was, row by row; ties go to the first tap, the first NaN wins over everything
    mean   y = Σ / n, where n counts the elements inside; `padded`: those of the image padded by (top, left) on both sides, as zeros

Both gradients gather: an element sums dy over the windows that cover it, in a fixed order, so nothing is atomic and bits repeat. Square windows
without padding have faster kernels in maxpool.py and avgpool.py, whose layouts and lanes (kernel/windows.py) are those of this file.
Definitions: torch.nn.MaxPool2d, torch.nn.AvgPool2d.

    window_max_fprop   x (N,C,H,W) -> y (N,C,P,Q), index (N,C,P,Q) uint8 or int32                size (R,S), stride (U,V), pad (top,left)
    window_max_dgrad   dy, index -> dx (N,C,H,W)                                                 size, stride, pad
    window_mean_fprop  x -> y                                                                    size, stride, pad, padded
    window_mean_dgrad  dy -> dx                                                                  size, stride, pad, padded
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i4, jit
from nbcnn.ops.images.maxpool import LOWEST, index_io, larger_of
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import Case, Gradient, label_of, normal
from nbcnn.ops.kernel.stored import kinds
from nbcnn.ops.kernel.traffic import Traffic, element, outputs, size
from nbcnn.ops.kernel.windows import lane_io, lanes_of, launch, offset_of, planes, position, reach_of, split
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel, pooled_extent

Pair = tuple[int, int]


def _views(x: np.ndarray, outside: float, windows: Pair, size: Pair, stride: Pair, pad: Pair) -> Iterator[tuple[int, np.ndarray]]:
    """(tap, what every window of `windows` sees at it): views of a copy of x (N,C,H,W) that has `outside` around it."""
    (P, Q), (R, S), (U, V), (top, left) = windows, size, stride, pad
    H, W = x.shape[2:]
    rows, columns = max(top + H, (P - 1) * U + R), max(left + W, (Q - 1) * V + S)
    wide = np.full((*x.shape[:2], rows, columns), outside, x.dtype)
    wide[:, :, top : top + H, left : left + W] = x
    for tap in range(R * S):
        r, s = divmod(tap, S)
        yield tap, wide[:, :, r : r + U * (P - 1) + 1 : U, s : s + V * (Q - 1) + 1 : V]


def _scatter(parts: Iterator[tuple[int, np.ndarray]], dx: np.ndarray, windows: Pair, size: Pair, stride: Pair, pad: Pair) -> None:
    """dx (N,C,H,W) = the sum, over (tap, values) of windows, of the values at the tap's elements."""
    (P, Q), (R, S), (U, V), (top, left) = windows, size, stride, pad
    H, W = dx.shape[2:]
    wide = np.zeros((*dx.shape[:2], max(top + H, (P - 1) * U + R), max(left + W, (Q - 1) * V + S)), dx.dtype)
    for tap, values in parts:
        r, s = divmod(tap, S)
        wide[:, :, r : r + U * (P - 1) + 1 : U, s : s + V * (Q - 1) + 1 : V] += values
    np.copyto(dx, wide[:, :, top : top + H, left : left + W])


def window_max_fprop(x: np.ndarray, y: np.ndarray, index: np.ndarray, *, size: Pair, stride: Pair, pad: Pair) -> None:
    """y, index (N,C,P,Q) = largest element of x (N,C,H,W) inside each window, and its tap; index is uint8 or int32."""
    inside = np.zeros(y.shape, bool)  # where a tap inside has been seen
    y.fill(-np.inf)
    index.fill(0)
    real = _views(np.ones_like(x), 0, y.shape[2:], size, stride, pad)
    for (tap, seen), (_, here) in zip(_views(x, -np.inf, y.shape[2:], size, stride, pad), real, strict=True):
        wins = (here > 0) & ((~(seen <= y) & (y == y)) | ~inside)
        inside |= here > 0
        np.copyto(y, seen, where=wins)
        index[wins] = tap


def window_max_dgrad(dy: np.ndarray, index: np.ndarray, dx: np.ndarray, *, size: Pair, stride: Pair, pad: Pair) -> None:
    """dx (N,C,H,W) = the sum of dy (N,C,P,Q) over the windows whose `index` names the element."""
    parts = ((tap, dy * (index == tap)) for tap in range(size[0] * size[1]))
    _scatter(parts, dx, dy.shape[2:], size, stride, pad)


def _counts(windows: int, taps: int, stride: int, pad: int, extent: int, padded: bool) -> np.ndarray:
    """How many taps of each window of an axis count."""
    start = np.arange(windows) * stride - pad
    end = np.minimum(start + taps, extent + (pad if padded else 0))
    return end - (start if padded else np.maximum(start, 0))


def _divisors(shape: Pair, windows: Pair, size: Pair, stride: Pair, pad: Pair, padded: bool) -> np.ndarray:
    """The number of elements that each window's mean is of, (P,Q)."""
    rows, columns = (_counts(windows[axis], size[axis], stride[axis], pad[axis], shape[axis], padded) for axis in (0, 1))
    return np.outer(rows, columns)


def window_mean_fprop(x: np.ndarray, y: np.ndarray, *, size: Pair, stride: Pair, pad: Pair, padded: bool) -> None:
    """y (N,C,P,Q) = the mean of x (N,C,H,W) over each window."""
    y.fill(0)
    for _, seen in _views(x, 0, y.shape[2:], size, stride, pad):
        y += seen
    y /= _divisors(x.shape[2:], y.shape[2:], size, stride, pad, padded).astype(y.dtype)


def window_mean_dgrad(dy: np.ndarray, dx: np.ndarray, *, size: Pair, stride: Pair, pad: Pair, padded: bool) -> None:
    """dx (N,C,H,W) = the sum of dy (N,C,P,Q) over its windows' numbers of elements, over the windows that cover each element."""
    each = dy / _divisors(dx.shape[2:], dy.shape[2:], size, stride, pad, padded).astype(dy.dtype)
    _scatter(((tap, each) for tap in range(size[0] * size[1])), dx, dy.shape[2:], size, stride, pad)


@cache
def max_fprop_kernel(kind: str, lanes: int, size: Pair, stride: Pair, pad: Pair) -> Any:
    """The kernel of the maxima for one size, stride and padding; x and y stored as `kind`, channels in groups of `lanes`."""
    load, store = lane_io(lanes, kind)
    _, store_index = index_io(lanes)
    (R, S), (U, V), (TOP, LEFT) = size, stride, pad

    @jit()
    def window_max_fprop_kernel(x, y, index, count, H, W, P, Q, groups):
        """y[o,p,q,c], index[o,p,q,c] = max, argmax over the taps inside of x[o, p·U − TOP + r, q·V − LEFT + s, c].

        grid    ⌈count / 256⌉, block 256, count = outer·P·Q·groups
        owns    thread: one group of one window
        shared  none
        moves   4·R·S·(windows of a group) + (4 + index bytes)·y bytes; windows that overlap hit the cache
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        o, p, q, group = position(i, P, Q, groups)
        h0, w0 = p * U - TOP, q * V - LEFT
        value, best, winner = cuda.local.array(lanes, f4), cuda.local.array(lanes, f4), cuda.local.array(lanes, i4)
        for lane in range(lanes):
            # The first tap inside, in case all elements are −∞.
            best[lane], winner[lane] = LOWEST, max(-h0, 0) * S + max(-w0, 0)
        for r in range(R):
            for s in range(S):
                h, w = h0 + r, w0 + s
                inside = (h >= 0) & (h < H) & (w >= 0) & (w < W)
                # Load always, from a clamped place: a load under a branch would wait for the one before.
                load(x, offset_of(o, min(max(h, 0), H - 1), min(max(w, 0), W - 1), group, H, W, groups), value)
                for lane in range(lanes):
                    most, tap = larger_of(value[lane], r * S + s, best[lane], winner[lane])
                    best[lane], winner[lane] = (most if inside else best[lane]), (tap if inside else winner[lane])
        store(y, i, best)
        store_index(index, i, winner)

    return window_max_fprop_kernel


@cache
def max_dgrad_kernel(kind: str, lanes: int, size: Pair, stride: Pair, pad: Pair) -> Any:
    """The kernel of the gradient of the maxima; dy and dx stored as `kind`, channels in groups of `lanes`."""
    load, store = lane_io(lanes, kind)
    load_index, _ = index_io(lanes)
    (R, S), (U, V), (TOP, LEFT) = size, stride, pad
    DOWN, ACROSS = reach_of(R, U), reach_of(S, V)

    @jit()
    def window_max_dgrad_kernel(dy, index, dx, count, H, W, P, Q, groups):
        """dx[o,h,w,c] = Σ dy[o,p,q,c] over the windows (p,q) that cover (h,w) and whose index names it.

        grid    ⌈count / 256⌉, block 256, count = outer·H·W·groups
        owns    thread: one group of one element of dx
        shared  none
        moves   4·dx + (4 + index bytes)·(windows of a group) bytes; what is read again hits the cache
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        o, h, w, group = position(i, H, W, groups)
        p0, r0 = split(h + TOP, U)
        q0, s0 = split(w + LEFT, V)
        total, part, winner = cuda.local.array(lanes, f4), cuda.local.array(lanes, f4), cuda.local.array(lanes, i4)
        for lane in range(lanes):
            total[lane] = 0.0
        for j in range(DOWN):
            for k in range(ACROSS):
                p, q, r, s = p0 - j, q0 - k, r0 + j * U, s0 + k * V
                inside = (r < R) & (s < S) & (p >= 0) & (p < P) & (q >= 0) & (q < Q)
                window = offset_of(o, min(max(p, 0), P - 1), min(max(q, 0), Q - 1), group, P, Q, groups)
                load(dy, window, part)
                load_index(index, window, winner)
                for lane in range(lanes):
                    total[lane] += part[lane] if inside & (winner[lane] == r * S + s) else 0.0
        store(dx, i, total)

    return window_max_dgrad_kernel


@cache
def counter(taps: int, pad: int, padded: bool) -> Any:
    """A device function (start, extent) -> how many of `taps` from `start` on count along an axis of so many elements."""
    beyond = pad if padded else 0

    @jit(device=True)
    def count_of(start, extent):
        return min(start + taps, extent + beyond) - max(start, -beyond)

    return count_of


@cache
def mean_fprop_kernel(kind: str, lanes: int, size: Pair, stride: Pair, pad: Pair, padded: bool) -> Any:
    """The kernel of the means; x and y stored as `kind`, channels in groups of `lanes`."""
    load, store = lane_io(lanes, kind)
    (R, S), (U, V), (TOP, LEFT) = size, stride, pad
    rows_of, columns_of = counter(R, TOP, padded), counter(S, LEFT, padded)

    @jit()
    def window_mean_fprop_kernel(x, y, count, H, W, P, Q, groups):
        """y[o,p,q,c] = Σ over the taps inside of x[o, p·U − TOP + r, q·V − LEFT + s, c] / their number.

        grid    ⌈count / 256⌉, block 256, count = outer·P·Q·groups
        owns    thread: one group of one window
        shared  none
        moves   4·R·S·(windows of a group) + 4·y bytes; windows that overlap hit the cache
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        o, p, q, group = position(i, P, Q, groups)
        h0, w0 = p * U - TOP, q * V - LEFT
        scale = 1.0 / (rows_of(h0, H) * columns_of(w0, W))
        total, part = cuda.local.array(lanes, f4), cuda.local.array(lanes, f4)
        for lane in range(lanes):
            total[lane] = 0.0
        for r in range(R):
            for s in range(S):
                h, w = h0 + r, w0 + s
                inside = (h >= 0) & (h < H) & (w >= 0) & (w < W)
                load(x, offset_of(o, min(max(h, 0), H - 1), min(max(w, 0), W - 1), group, H, W, groups), part)
                for lane in range(lanes):
                    total[lane] += part[lane] if inside else 0.0
        for lane in range(lanes):
            total[lane] *= scale
        store(y, i, total)

    return window_mean_fprop_kernel


@cache
def mean_dgrad_kernel(kind: str, lanes: int, size: Pair, stride: Pair, pad: Pair, padded: bool) -> Any:
    """The kernel of the gradient of the means; dy and dx stored as `kind`, channels in groups of `lanes`."""
    load, store = lane_io(lanes, kind)
    (R, S), (U, V), (TOP, LEFT) = size, stride, pad
    DOWN, ACROSS = reach_of(R, U), reach_of(S, V)
    rows_of, columns_of = counter(R, TOP, padded), counter(S, LEFT, padded)

    @jit()
    def window_mean_dgrad_kernel(dy, dx, count, H, W, P, Q, groups):
        """dx[o,h,w,c] = Σ dy[o,p,q,c] / n(p,q) over the windows (p,q) that cover (h,w), n their numbers of elements.

        grid    ⌈count / 256⌉, block 256, count = outer·H·W·groups
        owns    thread: one group of one element of dx
        shared  none
        moves   4·dx + 4·(windows of a group) bytes; what is read again hits the cache
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        o, h, w, group = position(i, H, W, groups)
        p0, r0 = split(h + TOP, U)
        q0, s0 = split(w + LEFT, V)
        total, part = cuda.local.array(lanes, f4), cuda.local.array(lanes, f4)
        for lane in range(lanes):
            total[lane] = 0.0
        for j in range(DOWN):
            for k in range(ACROSS):
                p, q = p0 - j, q0 - k
                inside = (r0 + j * U < R) & (s0 + k * V < S) & (p >= 0) & (p < P) & (q >= 0) & (q < Q)
                near_p, near_q = min(max(p, 0), P - 1), min(max(q, 0), Q - 1)
                load(dy, offset_of(o, near_p, near_q, group, P, Q, groups), part)
                scale = 1.0 / (rows_of(near_p * U - TOP, H) * columns_of(near_q * V - LEFT, W))
                for lane in range(lanes):
                    total[lane] += part[lane] * scale if inside else 0.0
        store(dx, i, total)

    return window_mean_dgrad_kernel


def _geometry(call: Call) -> tuple[Pair, Pair, Pair]:
    """Size, stride and padding of the call."""
    return tuple(call.attrs["size"]), tuple(call.attrs["stride"]), tuple(call.attrs["pad"])


def bind_max_fprop(call: Call) -> list[Launch]:
    """One launch. Four lanes need a uint8 index; an int32 index is handled one lane per thread."""
    (x,), (y, index) = call.ins, call.outs
    (H, W), (P, Q) = call.in_shapes[0][2:], call.out_shapes[0][2:]
    outer, inner = planes(call.in_shapes[0], call.layout)
    lanes = lanes_of(inner) if index.dtype == np.uint8 else 1
    groups = inner // lanes
    kernel = max_fprop_kernel(kinds(call)[0], lanes, *_geometry(call))
    return launch(kernel, outer * P * Q * groups, (x, y, index.view(np.uint32) if lanes == 4 else index), H, W, P, Q, groups)


def bind_max_dgrad(call: Call) -> list[Launch]:
    """One launch."""
    (dy, index), (dx,) = call.ins, call.outs
    (P, Q), (H, W) = call.in_shapes[0][2:], call.out_shapes[0][2:]
    outer, inner = planes(call.out_shapes[0], call.layout)
    lanes = lanes_of(inner) if index.dtype == np.uint8 else 1
    groups = inner // lanes
    kernel = max_dgrad_kernel(kinds(call)[0], lanes, *_geometry(call))
    return launch(kernel, outer * H * W * groups, (dy, index.view(np.uint32) if lanes == 4 else index, dx), H, W, P, Q, groups)


def bind_mean_fprop(call: Call) -> list[Launch]:
    """One launch."""
    (H, W), (P, Q) = call.in_shapes[0][2:], call.out_shapes[0][2:]
    outer, inner = planes(call.in_shapes[0], call.layout)
    lanes = lanes_of(inner)
    kernel = mean_fprop_kernel(kinds(call)[0], lanes, *_geometry(call), bool(call.attrs["padded"]))
    return launch(kernel, outer * P * Q * (inner // lanes), (*call.ins, *call.outs), H, W, P, Q, inner // lanes)


def bind_mean_dgrad(call: Call) -> list[Launch]:
    """One launch."""
    (P, Q), (H, W) = call.in_shapes[0][2:], call.out_shapes[0][2:]
    outer, inner = planes(call.out_shapes[0], call.layout)
    lanes = lanes_of(inner)
    kernel = mean_dgrad_kernel(kinds(call)[0], lanes, *_geometry(call), bool(call.attrs["padded"]))
    return launch(kernel, outer * H * W * (inner // lanes), (*call.ins, *call.outs), H, W, P, Q, inner // lanes)


def traffic_fprop(call: Call) -> list[Traffic]:
    """Bytes of the forward kernels, which load every tap of every window."""
    (R, S), _, _ = _geometry(call)
    read = element(call) * numel(call.out_shapes[0]) * R * S
    return [Traffic(read, outputs(call), min(read, size(call, "in", 0)))]


def traffic_dgrad(call: Call) -> list[Traffic]:
    """Bytes of the backward kernels, which load every window that may cover an element, of maxima with its index."""
    (R, S), (U, V), _ = _geometry(call)
    each, all_of = (sum(f(at) for at in range(len(call.in_shapes))) for f in (lambda at: element(call, at=at), lambda at: size(call, "in", at)))
    read = each * numel(call.out_shapes[0]) * reach_of(R, U) * reach_of(S, V)
    return [Traffic(read, outputs(call), min(read, all_of))]


HOST = {
    Op("window_max", "fprop"): host(window_max_fprop),
    Op("window_max", "dgrad"): host(window_max_dgrad),
    Op("window_mean", "fprop"): host(window_mean_fprop),
    Op("window_mean", "dgrad"): host(window_mean_dgrad),
}
OPS = {
    Op("window_max", "fprop"): Impl(bind_max_fprop, traffic=traffic_fprop),
    Op("window_max", "dgrad"): Impl(bind_max_dgrad, traffic=traffic_dgrad),
    Op("window_mean", "fprop"): Impl(bind_mean_fprop, traffic=traffic_fprop),
    Op("window_mean", "dgrad"): Impl(bind_mean_dgrad, traffic=traffic_dgrad),
}
GRADIENTS = {
    Op("window_max", "dgrad"): Gradient(Op("window_max", "fprop"), lambda ins, outs, v: (v, outs[1])),
    Op("window_mean", "dgrad"): Gradient(Op("window_mean", "fprop"), lambda ins, outs, v: (v,)),
}

WINDOWS = (
    ((3, 3), (2, 2), (1, 1), False),
    ((2, 3), (2, 1), (0, 1), False),
    ((3, 2), (3, 2), (1, 0), True),
    ((2, 2), (3, 3), (1, 1), True),
)
"""Windows of the cases: (size, stride, pad, ceil_mode). Padded and overlapping; not square, strides that differ; over the edge; with gaps."""


def cases() -> Iterator[Case]:
    """All four, on odd images of few channels and of eight."""
    for shape in ((1, 1, 5, 7), (2, 3, 4, 6), (1, 8, 7, 5)):
        for stands, (taps, stride, pad, ceil) in enumerate(WINDOWS):
            n, c, *extent = shape
            pooled = (n, c, *(pooled_extent(extent[at], taps[at], stride[at], pad[at], ceil) for at in (0, 1)))
            label, attrs, out = f"{label_of(shape)} {taps}/{stride}+{pad}", {"size": taps, "stride": stride, "pad": pad}, ((shape, "float32"),)
            x, dy = normal(7, *shape), normal(8, *pooled)
            y, index = np.empty(pooled, np.float32), np.empty(pooled, np.uint8)
            window_max_fprop(x, y, index, size=taps, stride=stride, pad=pad)
            terms, padded = taps[0] * taps[1], attrs | {"padded": stands % 2 == 0}
            yield Case(Op("window_max", "fprop"), label, (x,), ((pooled, "float32"), (pooled, "uint8")), attrs)
            yield Case(Op("window_max", "dgrad"), label, (dy, index), out, attrs, terms)
            yield Case(Op("window_mean", "fprop"), label, (x,), ((pooled, "float32"),), padded, terms)
            yield Case(Op("window_mean", "dgrad"), label, (dy,), out, padded, terms)
