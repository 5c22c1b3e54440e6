"""Convolution, one thread per result: the honest baseline of the ladder.

No shared memory, no reuse but what the caches give, no reordering: each thread evaluates the definition of its own
element of y, dx, dw or db (formulas: `reference.py`). Any shape, stride and padding; images are NCHW.

A block works inside one image, so offsets within an image are 32-bit and only the image's own offset is 64-bit.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, i8, jit
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks
from nbcnn.ops.kernel.traffic import Traffic, met, once, outputs, size, windows
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import ConvShape, numel

IMAGE_THREADS = 128
# A layer has far fewer weights than pixels: small blocks spread them over more multiprocessors.
WEIGHT_THREADS = 64


@functools.cache
def fprop_kernel(with_bias: bool) -> Any:
    """The kernel of y = conv(x, w) [+ b]."""

    @jit()
    def conv_fprop_naive_kernel(x, w, b, y, C, H, W, K, P, Q, R, S, stride, pad, image_blocks):
        """y[n,k,p,q] = b[k] + Σ_{c,r,s} w[k,c,r,s] · x[n,c,p·stride+r−pad,q·stride+s−pad].

        grid N·⌈KPQ/128⌉, block 128; a thread owns one y, neighbours share a row: loads of x and stores coalesce.
        shared none; moves 8 bytes per product through the caches, and y once. source: the definition.
        """
        n = cuda.blockIdx.x // image_blocks
        i = (cuda.blockIdx.x - n * image_blocks) * cuda.blockDim.x + cuda.threadIdx.x
        if i < K * P * Q:
            k = i // (P * Q)
            p = (i - k * P * Q) // Q
            q = i - (k * P + p) * Q
            image = i8(n) * (C * H * W)
            total = b[k] if with_bias else 0.0
            for c in range(C):
                for r in range(R):
                    row = p * stride + r - pad
                    if 0 <= row < H:
                        for s in range(S):
                            column = q * stride + s - pad
                            if 0 <= column < W:
                                total += w[((k * C + c) * R + r) * S + s] * x[image + ((c * H + row) * W + column)]
            y[i8(n) * (K * P * Q) + i] = total

    return conv_fprop_naive_kernel


@jit()
def conv_dgrad_naive_kernel(dy, w, dx, C, H, W, K, P, Q, R, S, stride, pad, image_blocks):
    """dx[n,c,h,w] = Σ_{k,r,s} w[k,c,r,s] · dy[n,k,p,q] over the p, q with p·stride+r−pad = h and q·stride+s−pad = w.

    grid N·⌈CHW/128⌉, block 128; a thread owns one dx, neighbours share a row: loads of dy and stores coalesce.
    shared none; moves 8 bytes per product through the caches, and dx once. source: the definition.
    """
    n = cuda.blockIdx.x // image_blocks
    i = (cuda.blockIdx.x - n * image_blocks) * cuda.blockDim.x + cuda.threadIdx.x
    if i < C * H * W:
        c = i // (H * W)
        row = (i - c * H * W) // W
        column = i - (c * H + row) * W
        image = i8(n) * (K * P * Q)
        total = 0.0
        # Filters innermost: which output a tap reaches needs divisions, and does not depend on the filter.
        for r in range(R):
            p = max(row + pad - r, 0) // stride
            if p * stride == row + pad - r and p < P:
                for s in range(S):
                    q = max(column + pad - s, 0) // stride
                    if q * stride == column + pad - s and q < Q:
                        for k in range(K):
                            total += w[((k * C + c) * R + r) * S + s] * dy[image + ((k * P + p) * Q + q)]
        dx[i8(n) * (C * H * W) + i] = total


@jit()
def conv_wgrad_naive_kernel(x, dy, dw, N, C, H, W, K, P, Q, R, S, stride, pad):
    """dw[k,c,r,s] = Σ_{n,p,q} dy[n,k,p,q] · x[n,c,p·stride+r−pad,q·stride+s−pad].

    grid ⌈KCRS/64⌉, block 64; a thread owns one weight and sums all N·P·Q products alone.
    shared none; moves 8 bytes per product through the caches (neighbours share dy), and dw once. source: the definition.
    """
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < K * C * R * S:
        taps = R * S
        filter_channel = i // taps
        r = (i - filter_channel * taps) // S
        s = i - filter_channel * taps - r * S
        k = filter_channel // C
        c = filter_channel - k * C
        total = 0.0
        for n in range(N):
            plane = i8(n * C + c) * (H * W)
            gradient = i8(n * K + k) * (P * Q)
            for p in range(P):
                row = p * stride + r - pad
                if 0 <= row < H:
                    for q in range(Q):
                        column = q * stride + s - pad
                        if 0 <= column < W:
                            total += dy[gradient + (p * Q + q)] * x[plane + (row * W + column)]
        dw[i] = total


@jit()
def conv_bgrad_naive_kernel(dy, db, N, K, PQ):
    """db[k] = Σ_{n,p,q} dy[n,k,p,q].

    grid ⌈K/64⌉, block 64; a thread owns one filter and sums its N·P·Q terms alone: with K = 3, three threads work.
    shared none; moves dy once, uncoalesced. source: the definition.
    """
    k = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if k < K:
        total = 0.0
        for n in range(N):
            plane = i8(n * K + k) * PQ
            for i in range(PQ):
                total += dy[plane + i]
        db[k] = total


def shape_of(call: Call) -> ConvShape:
    """The convolution that a conv_fprop, conv_dgrad or conv_wgrad call computes."""
    N, C, H, W = call.out_shapes[0] if call.op == Op("conv", "dgrad") else call.in_shapes[0]
    K, _, R, S = call.out_shapes[0] if call.op == Op("conv", "wgrad") else call.in_shapes[1]
    return ConvShape(N, C, H, W, K, R, S, call.attrs["stride"], call.attrs["pad"])


def int32s(*values: int) -> tuple[np.int32, ...]:
    """Kernel arguments: Python ints would be 64-bit."""
    return tuple(np.int32(value) for value in values)


def bind_fprop(call: Call) -> list[Launch]:
    """One launch."""
    shape, (y,) = shape_of(call), call.outs
    x, w, *bias = call.ins
    # Without bias the kernel has a `b` that it never reads.
    return [_image_launch(fprop_kernel(bool(bias)), (x, w, *(bias or [w]), y), shape, shape.K * shape.P * shape.Q)]


def bind_dgrad(call: Call) -> list[Launch]:
    """One launch."""
    shape = shape_of(call)
    return [_image_launch(conv_dgrad_naive_kernel, (*call.ins, *call.outs), shape, shape.C * shape.H * shape.W)]


def _image_launch(kernel: Any, arrays: tuple[Any, ...], shape: ConvShape, elements: int) -> Launch:
    """`kernel` with a thread for each of the `elements` of every image."""
    s, image_blocks = shape, blocks(elements, IMAGE_THREADS)
    extents = int32s(s.C, s.H, s.W, s.K, s.P, s.Q, s.R, s.S, s.stride, s.pad, image_blocks)
    return Launch(kernel, s.N * image_blocks, IMAGE_THREADS, (*arrays, *extents))


def bind_wgrad(call: Call) -> list[Launch]:
    """One launch for dw, and one for db if it is wanted."""
    s, (x, dy), (dw, *db) = shape_of(call), call.ins, call.outs
    extents = int32s(s.N, s.C, s.H, s.W, s.K, s.P, s.Q, s.R, s.S, s.stride, s.pad)
    grid = blocks(numel(s.w_shape), WEIGHT_THREADS)
    launches = [Launch(conv_wgrad_naive_kernel, grid, WEIGHT_THREADS, (x, dy, dw, *extents))]
    for target in db:
        grid = blocks(s.K, WEIGHT_THREADS)
        launches.append(Launch(conv_bgrad_naive_kernel, grid, WEIGHT_THREADS, (dy, target, *int32s(s.N, s.K, s.P * s.Q))))
    return launches


def _products(s: ConvShape) -> int:
    """Products with pixels inside the image: each asks for both of its factors."""
    return s.N * s.K * s.C * windows(s.P, s.R, s.H, s.stride, s.pad)[0] * windows(s.Q, s.S, s.W, s.stride, s.pad)[0]


def traffic_fprop(call: Call) -> list[Traffic]:
    """Bytes of `bind_fprop`: two operands per product."""
    s = shape_of(call)
    rows, columns = (s.P, s.R, s.H, s.stride, s.pad), (s.Q, s.S, s.W, s.stride, s.pad)
    pixels = s.N * s.C * windows(*rows)[1] * windows(*columns)[1]
    weights = s.K * s.C * met(*rows)[1] * met(*columns)[1]
    return [Traffic(8 * _products(s), outputs(call), 4 * (pixels + weights))]


def traffic_dgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_dgrad`: the same products, from the other side."""
    s = shape_of(call)
    # Output row p meets row h by tap r where p·stride = h + pad − r; taps are counted from the last.
    rows, columns = (s.H, s.R, s.P, 1, s.R - 1 - s.pad, s.stride), (s.W, s.S, s.Q, 1, s.S - 1 - s.pad, s.stride)
    pixels = s.N * s.K * windows(*rows)[1] * windows(*columns)[1]
    weights = s.K * s.C * met(*rows)[1] * met(*columns)[1]
    return [Traffic(8 * _products(s), outputs(call), 4 * (pixels + weights))]


def traffic_wgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_wgrad`: the same products again, and dy once for db."""
    s = shape_of(call)
    rows, columns = (s.P, s.R, s.H, s.stride, s.pad), (s.Q, s.S, s.W, s.stride, s.pad)
    pixels = s.N * s.C * windows(*rows)[1] * windows(*columns)[1]
    gradients = s.N * s.K * met(*rows)[0] * met(*columns)[0]
    dw = Traffic(8 * _products(s), size(call, "out", 0), 4 * (pixels + gradients))
    return [dw, *(once(size(call, "in", 1), size(call, "out", 1)) for _ in call.out_shapes[1:])]


OPS = {
    Op("conv", "fprop"): Impl(bind_fprop, traffic=traffic_fprop),
    Op("conv", "dgrad"): Impl(bind_dgrad, traffic=traffic_dgrad),
    Op("conv", "wgrad"): Impl(bind_wgrad, traffic=traffic_wgrad),
}
