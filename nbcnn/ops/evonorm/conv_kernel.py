"""The kernel of a convolution with its EvoNorm: what stays in registers from the first product to the last result.

A block makes all pixels of eight filters of one image; conv_end.py says what follows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.cuda import cuda, f4, i4, jit
from nbcnn.ops.call import Call, Launch
from nbcnn.ops.conv.register_tile import ALIGNMENT, quotient
from nbcnn.ops.evonorm.conv_end import FILTERS, finish
from nbcnn.ops.evonorm.plane import power_of_two
from nbcnn.ops.ptx.shuffle import WARP
from nbcnn.ops.ptx.vector import shared_load4
from nbcnn.ops.windows import split
from nbcnn.shapes import ConvShape, numel

DEPTH = 4
"""Input channels in shared memory at a time."""
PIXELS = 4
"""Pixels of a thread at most: PIXELS·FILTERS sums in registers."""
LARGEST_BLOCK = 256
LARGEST_IMAGE = 2048
"""Pixels of the padded input at most: DEPTH of its channels take 32 KiB of shared memory."""


@dataclass(frozen=True)
class Form:
    """What is frozen into the kernel: the end, the window, channels of a group, threads, pixels of a thread, floats of a padded channel."""

    end: str
    R: int
    S: int
    group: int
    threads: int
    pixels: int
    area: int


@functools.cache
def fprop_kernel(form: Form) -> Any:
    R, S, THREADS, MINE, AREA = form.R, form.S, form.threads, form.pixels, form.area
    TAPS, ACC = R * S, MINE * FILTERS
    FLOATS, WEIGHTS, SUMS = DEPTH * AREA, DEPTH * TAPS * FILTERS, THREADS // WARP * FILTERS

    @jit(device=True)
    def pixel(i, P, Q):
        p = i4(i4(cuda.threadIdx.x) + i4(i * THREADS))
        return p if p < P * Q else i4(-1)

    finish_ = finish(form.end, form.group, form.threads, form.pixels, pixel)

    @jit(launch_bounds=(THREADS, 2))
    def conv_evonorm_kernel(x, w, b, gamma, beta, v, running, y, z, shift, std, slabs, C, H, W, K, P, Q, stride, pad, eps):
        """z = conv(x, w) + b; y = γ·z·σ(v·z)/s + β or γ·z/max(√(running + eps), v·z + s) + β; the statistics of every group.

        gemm: GM, GN, GK = P·Q of an image, 8 filters, C·R·S. grid: N·K/8, block 32–256.
        owns: a block all pixels of 8 filters of an image, a thread up to 4 pixels of them.
        shared: 4 channels of the padded image and of the filters, up to 32 KiB + 128·R·S bytes.
        moves: K/8 times x (from L2), what it writes once. needs: K a multiple of 8, P·Q ≤ 1024. source: arXiv:2004.02967.
        """
        image = cuda.shared.array(FLOATS, f4)
        filters = cuda.shared.array(WEIGHTS, f4, ALIGNMENT)
        sums = cuda.shared.array(SUMS, f4)
        leads = cuda.shared.array(FILTERS, f4)
        acc = cuda.local.array(ACC, f4)
        starts = cuda.local.array(MINE, i4)
        tid = i4(cuda.threadIdx.x)
        n, slab = split(i4(cuda.blockIdx.x), slabs)
        k0 = i4(slab * i4(FILTERS))
        wide, padded = i4(W + i4(2) * pad), i4((H + i4(2) * pad) * (W + i4(2) * pad))
        pixels = i4(P * Q)
        for i in range(MINE):
            p = i4(tid + i4(i * THREADS))
            row, column = split(p if p < pixels else i4(0), Q)
            starts[i] = i4((row * wide + column) * stride)
        for i in range(ACC):
            acc[i] = f4(0)

        for c0 in range(i4(0), C, i4(DEPTH)):
            cuda.syncthreads()
            for e in range(tid, i4(DEPTH) * padded, i4(THREADS)):
                pixel, c = i4(e // i4(DEPTH)), i4(e % i4(DEPTH))
                row = quotient(pixel, wide)
                h, column = i4(row - pad), i4(pixel - row * wide - pad)
                inside = (h >= i4(0)) & (h < H) & (column >= i4(0)) & (column < W) & (c0 + c < C)
                image[c * padded + pixel] = x[((n * H + h) * W + column) * C + c0 + c] if inside else f4(0)
            for e in range(tid, i4(WEIGHTS), i4(THREADS)):
                tap, k = i4(e // i4(FILTERS)), i4(e % i4(FILTERS))
                filters[e] = w[(c0 * i4(TAPS) + tap) * K + k0 + k] if c0 * i4(TAPS) + tap < C * i4(TAPS) else f4(0)
            cuda.syncthreads()
            for c in range(DEPTH):
                for r in range(R):
                    for s in range(S):
                        at = i4(i4((c * R + r) * S + s) * i4(FILTERS))
                        w0, w1, w2, w3 = shared_load4(filters, at)
                        w4, w5, w6, w7 = shared_load4(filters, at + i4(4))
                        place = i4(i4(c) * padded + i4(r) * wide + i4(s))
                        for i in range(MINE):
                            value = image[starts[i] + place]
                            acc[i * FILTERS] += value * w0
                            acc[i * FILTERS + 1] += value * w1
                            acc[i * FILTERS + 2] += value * w2
                            acc[i * FILTERS + 3] += value * w3
                            acc[i * FILTERS + 4] += value * w4
                            acc[i * FILTERS + 5] += value * w5
                            acc[i * FILTERS + 6] += value * w6
                            acc[i * FILTERS + 7] += value * w7

        finish_(acc, sums, leads, b, gamma, beta, v, running, y, z, shift, std, n, k0, K, P, Q, eps)

    return conv_evonorm_kernel


def shape_of(call: Call) -> ConvShape:
    """The convolution inside the call."""
    (N, C, H, W), (K, _, R, S) = call.in_shapes[:2]
    return ConvShape(N, C, H, W, K, R, S, call.attrs["stride"], call.attrs["pad"])


def group_of(call: Call) -> int:
    """Channels of a group: 1 for B0, whose planes are their own."""
    return int(call.in_shapes[1][0] // call.attrs["groups"]) if "groups" in call.attrs else 1


def supports(call: Call) -> str | None:
    """None, or the reason in words."""
    c = shape_of(call)
    if call.layout != "NHWC":
        return "the fused convolutions read images stored NHWC"
    if c.K % FILTERS or FILTERS % group_of(call):
        return f"a block has {FILTERS} filters: they must be whole groups, and K a multiple of them"
    if c.P * c.Q > PIXELS * LARGEST_BLOCK or (c.H + 2 * c.pad) * (c.W + 2 * c.pad) > LARGEST_IMAGE:
        return "a block holds all pixels of an image, at most 32×32"
    return None if c.R * c.S <= 25 else "a block holds filters of at most 25 taps"


def pack(call: Call) -> np.ndarray:
    """w (K,C,R,S) as [C][R][S][K]."""
    shape = call.in_shapes[1]
    return np.arange(numel(shape), dtype=np.int32).reshape(shape).transpose(1, 2, 3, 0).reshape(-1)


def launch_conv(call: Call, end: str, running: Any = None, y: Any = None, z: Any = None, shift: Any = None, std: Any = None) -> Launch:
    """The launch that ends in `end`; arrays that this end does not touch may be left out."""
    c = shape_of(call)
    pixels, area = c.P * c.Q, (c.H + 2 * c.pad) * (c.W + 2 * c.pad)
    threads = min(max(power_of_two(pixels), WARP), LARGEST_BLOCK)
    form = Form(end, c.R, c.S, group_of(call), threads, -(-pixels // threads), -(-area // 128) * 128)
    x, _, b, gamma, beta, v, *_ = call.ins
    arrays = (b if array is None else array for array in (running, y, z, shift, std))  # the kernel never looks at these
    sizes = (c.K // FILTERS, c.C, c.H, c.W, c.K, c.P, c.Q, c.stride, c.pad)
    args = (x, call.packed, b, gamma, beta, v, *arrays, *map(np.int32, sizes), np.float32(call.attrs["eps"]))
    return Launch(fprop_kernel(form), c.N * c.K // FILTERS, threads, args, name=call.op)
