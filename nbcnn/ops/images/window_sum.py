"""The two linear maps behind average pooling and nearest upsampling, each other's transpose.

`sum_windows`     small[p,q] = scale · Σ over the window's taps of large        avgpool_fprop, upsample_dgrad
`spread_windows`  large[h,w] = scale · Σ over the windows over (h,w) of small   avgpool_dgrad, upsample_fprop

Sums run over the taps in row-major order, in the references and in the kernels: no atomics, the same bits every time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.kernel.call import Call, Launch, Shape
from nbcnn.ops.kernel.stored import kinds, scalar_io, vector_io
from nbcnn.ops.kernel.traffic import Traffic, element, outputs, size
from nbcnn.ops.kernel.traffic import windows as windows_along
from nbcnn.ops.kernel.windows import in_rows, lane_io, lanes_of, launch, offset_of, planes, position, reach_of, split, taps


def sum_reference(large: np.ndarray, small: np.ndarray, size: int, stride: int, scale: float) -> None:
    """small (N,C,P,Q) = scale · the sum over each window of large (N,C,H,W)."""
    small.fill(0)
    for seen in taps(large, size, stride, small.shape[2:]):
        small += seen
    if scale != 1:
        small *= scale


def spread_reference(small: np.ndarray, large: np.ndarray, size: int, stride: int, scale: float) -> None:
    """large (N,C,H,W) = scale · the sum of small (N,C,P,Q) over the windows that contain each element."""
    large.fill(0)
    for seen in taps(large, size, stride, small.shape[2:]):
        seen += small
    if scale != 1:
        large *= scale


@cache
def sum_kernel(kind: str, lanes: int, size: int, stride: int) -> Any:
    """small[o,p,q,c] = scale · Σ_{r,s < size} large[o, p·stride + r, q·stride + s, c], channels c in groups of `lanes`.

    grid    ceil(count / 256), block 256, count = outer·P·Q·groups
    owns    thread: one group of one window
    moves   element size·(windows' part of large + small) bytes; overlapping windows hit the cache
    """
    load, store = lane_io(lanes, kind)

    @jit()
    def window_sum_kernel(large, small, count, scale, H, W, P, Q, groups):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        o, p, q, group = position(i, P, Q, groups)
        first = offset_of(o, p * stride, q * stride, group, H, W, groups)
        total, part = cuda.local.array(lanes, f4), cuda.local.array(lanes, f4)
        for lane in range(lanes):
            total[lane] = 0.0
        for r in range(size):
            for s in range(size):
                load(large, first + (r * W + s) * groups, part)
                for lane in range(lanes):
                    total[lane] += part[lane]
        for lane in range(lanes):
            total[lane] *= scale
        store(small, i, total)

    return window_sum_kernel


@cache
def spread_kernel(kind: str, lanes: int, size: int, stride: int) -> Any:
    """large[o,h,w,c] = scale · Σ small[o,p,q,c] over the windows (p,q) that contain (h,w): a gather, any overlap or gap.

    grid    ceil(count / 256), block 256, count = outer·H·W·groups
    owns    thread: one group of one element of large
    moves   element size·(small + large) bytes; rereads of small hit the cache
    """
    load, store = lane_io(lanes, kind)
    reach = reach_of(size, stride)

    @jit()
    def window_spread_kernel(small, large, count, scale, H, W, P, Q, groups):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        o, h, w, group = position(i, H, W, groups)
        p0, r0 = split(h, stride)
        q0, s0 = split(w, stride)
        total, part = cuda.local.array(lanes, f4), cuda.local.array(lanes, f4)
        for lane in range(lanes):
            total[lane] = 0.0
        for j in range(reach):
            for k in range(reach):
                p, q = p0 - j, q0 - k
                inside = (r0 + j * stride < size) & (s0 + k * stride < size) & (p >= 0) & (p < P) & (q >= 0) & (q < Q)
                # Load always, from a clamped index: a load under a branch would wait for the one before.
                near_p, near_q = min(max(p, 0), P - 1), min(max(q, 0), Q - 1)
                load(small, offset_of(o, near_p, near_q, group, P, Q, groups), part)
                for lane in range(lanes):
                    total[lane] += part[lane] if inside else 0.0
        for lane in range(lanes):
            total[lane] *= scale
        store(large, i, total)

    return window_spread_kernel


@cache
def tile_kernel(kind: str, lanes: int, size: int) -> Any:
    """`spread_kernel` for stride = size: windows tile the image, so each value of small is read once and written size² times.

    Tiles cut off at the right and bottom edge have no window; they get zeros.

    grid    ceil(count / 256), block 256, count = outer·ceil(H/size)·ceil(W/size)·groups
    owns    thread: one group of the size × size elements of one tile
    moves   element size·(small + large) bytes
    """
    load, store = lane_io(lanes, kind)

    @jit()
    def window_tile_kernel(small, large, count, scale, H, W, P, Q, groups, tiles_h, tiles_w):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        o, p, q, group = position(i, tiles_h, tiles_w, groups)
        value = cuda.local.array(lanes, f4)
        load(small, offset_of(o, min(p, P - 1), min(q, Q - 1), group, P, Q, groups), value)
        inside = (p < P) & (q < Q)
        for lane in range(lanes):
            value[lane] = value[lane] * scale if inside else 0.0
        for r in range(size):
            for s in range(size):
                h, w = p * size + r, q * size + s
                if (h < H) & (w < W):
                    store(large, offset_of(o, h, w, group, H, W, groups), value)

    return window_tile_kernel


@cache
def row_sum_kernel(kind: str) -> Any:
    """small[o,p,q] = scale · the sum of 2 × 2 elements of large, NCHW, W a multiple of 8.

    grid    ceil(count / 256), block 256, count = outer·P·W/8
    owns    thread: 4 windows of a row
    moves   element size·(large + small) bytes
    """
    load4, store4 = vector_io(kind)

    @jit()
    def window_row_sum_kernel(large, small, count, scale, H, W, P, quads):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        rest, quad = split(i, quads)
        o, p = split(rest, P)
        top = (o * H + 2 * p) * W + 8 * quad
        a0, a1, a2, a3 = load4(large, top)
        a4, a5, a6, a7 = load4(large, top + 4)
        b0, b1, b2, b3 = load4(large, top + W)
        b4, b5, b6, b7 = load4(large, top + W + 4)
        s0, s1, s2, s3 = a0 + a1 + b0 + b1, a2 + a3 + b2 + b3, a4 + a5 + b4 + b5, a6 + a7 + b6 + b7
        store4(small, 4 * i, s0 * scale, s1 * scale, s2 * scale, s3 * scale)

    return window_row_sum_kernel


@cache
def row_spread_kernel(kind: str) -> Any:
    """large[o,h,w] = scale · small[o, h//2, w//2], 0 in a last odd row; NCHW, W a multiple of 8.

    grid    ceil(count / 256), block 256, count = outer·ceil(H/2)·W/4
    owns    thread: 2 × 4 elements of large, so that the stores of a warp have no holes
    moves   element size·(small + large) bytes
    """
    (load, _), (_, store4) = scalar_io(kind), vector_io(kind)

    @jit()
    def window_row_spread_kernel(small, large, count, scale, H, W, P, pairs, tiles_h):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        rest, pair = split(i, pairs)
        o, p = split(rest, tiles_h)
        window = ((o * P + min(p, P - 1)) * pairs + pair) * 2
        factor = scale if p < P else 0.0
        left, right = load(small, window) * factor, load(small, window + 1) * factor
        for r in range(2):
            h = 2 * p + r
            if h < H:
                store4(large, (o * H + h) * W + 4 * pair, left, left, right, right)

    return window_row_spread_kernel


def sum_windows(call: Call, size: int, stride: int, scale: float) -> list[Launch]:
    """The call's output (N,C,P,Q) = scale · window sums of its input (N,C,H,W)."""
    shape, windows, (_, kind) = call.in_shapes[0], call.out_shapes[0], kinds(call)
    (H, W), (P, Q), arrays, factor = shape[2:], windows[2:], (call.ins[0], call.outs[0]), np.float32(scale)
    outer, inner = planes(shape, call.layout)
    if in_rows(call.layout, size, stride, W):
        return launch(row_sum_kernel(kind), outer * P * W // 8, arrays, factor, H, W, P, W // 8)
    lanes = lanes_of(inner)
    groups = inner // lanes
    return launch(sum_kernel(kind, lanes, size, stride), outer * P * Q * groups, arrays, factor, H, W, P, Q, groups)


def spread_windows(call: Call, size: int, stride: int, scale: float) -> list[Launch]:
    """The call's output (N,C,H,W) = scale · sums of its input (N,C,P,Q) over the windows above each element."""
    windows, shape, (_, kind) = call.in_shapes[0], call.out_shapes[0], kinds(call)
    (H, W), (P, Q), arrays, factor = shape[2:], windows[2:], (call.ins[0], call.outs[0]), np.float32(scale)
    outer, inner = planes(shape, call.layout)
    tiles_h, tiles_w = -(-H // size), -(-W // size)
    if in_rows(call.layout, size, stride, W):
        return launch(row_spread_kernel(kind), outer * tiles_h * W // 4, arrays, factor, H, W, P, W // 4, tiles_h)
    lanes = lanes_of(inner)
    groups = inner // lanes
    if lanes == 4 and size == stride:
        return launch(tile_kernel(kind, lanes, size), outer * tiles_h * tiles_w * groups, arrays, factor, H, W, P, Q, groups, tiles_h, tiles_w)
    return launch(spread_kernel(kind, lanes, size, stride), outer * H * W * groups, arrays, factor, H, W, P, Q, groups)


def sum_reads(shape: Shape, windows: Shape, size: int, stride: int) -> tuple[int, int]:
    """Elements of images of `shape` (N,C,H,W) that `windows` (N,C,P,Q) read, and how many of them are different."""
    (N, C, H, W), (P, Q) = shape, windows[2:]
    down, rows = windows_along(P, size, H, stride)
    across, columns = windows_along(Q, size, W, stride)
    return N * C * down * across, N * C * rows * columns


def spread_reads(shape: Shape, layout: str, size: int, stride: int) -> int:
    """Values of windows that are read to spread them over images of `shape`: once per tile where windows are tiles, else for every element."""
    N, C, H, W = shape
    tiled = in_rows(layout, size, stride, W) or (layout == "NHWC" and lanes_of(C) == 4 and size == stride)
    return N * C * (-(-H // size) * -(-W // size) if tiled else H * W * reach_of(size, stride) ** 2)


def traffic_sum(call: Call, window: int, stride: int) -> list[Traffic]:
    """Bytes of `sum_windows`."""
    read, distinct = sum_reads(call.in_shapes[0], call.out_shapes[0], window, stride)
    return [Traffic(element(call) * read, outputs(call), element(call) * distinct)]


def traffic_spread(call: Call, window: int, stride: int) -> list[Traffic]:
    """Bytes of `spread_windows`."""
    read = element(call) * spread_reads(call.out_shapes[0], call.layout, window, stride)
    return [Traffic(read, outputs(call), min(read, size(call, "in", 0)))]
