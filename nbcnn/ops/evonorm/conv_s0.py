"""A convolution and its EvoNorm-S0 in one kernel: y and the convolution's own output z, which the gradients want.

A block makes all pixels of eight filters of one image, so the deviation of a group of one, two, four or eight channels is
known inside it: sums of products stay in registers until they are y. Row `im2col` (fp32, NHWC); other shapes run as the two ops.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.cuda import cuda, f4, i4, jit
from nbcnn.ops.call import Call, HostCall, Impl, Launch
from nbcnn.ops.conv.composed import Operand, inner, operands
from nbcnn.ops.conv.im2col import shape_of
from nbcnn.ops.conv.reference import conv_fprop
from nbcnn.ops.conv.register_tile import ALIGNMENT, quotient
from nbcnn.ops.evonorm.plane import power_of_two
from nbcnn.ops.evonorm.reference import evonorm_s0_fprop
from nbcnn.ops.evonorm.s0 import both_sides
from nbcnn.ops.ptx.shuffle import WARP, warp_sum
from nbcnn.ops.ptx.vector import shared_load4, store4
from nbcnn.ops.windows import split
from nbcnn.shapes import numel

Array = np.ndarray
FILTERS = 8
"""Filters of a block."""
DEPTH = 4
"""Input channels in shared memory at a time."""
PIXELS = 4
"""Pixels of a thread at most: PIXELS·FILTERS sums in registers."""
LARGEST_BLOCK = 256
LARGEST_IMAGE = 2048
"""Pixels of the padded input at most: DEPTH of its channels take 32 KiB of shared memory."""


def conv_evonorm_s0_fprop(
    x: Array, w: Array, b: Array, gamma: Array, beta: Array, v: Array, y: Array, z: Array, shift: Array, std: Array,
    *, stride: int, pad: int, groups: int, eps: float,
) -> None:  # fmt: skip
    """z (N,K,P,Q) = conv(x, w) + b; y, shift, std = EvoNorm-S0 of z."""
    conv_fprop(x, w, b, z, stride=stride, pad=pad)
    evonorm_s0_fprop(z, gamma, beta, v, y, shift, std, groups=groups, eps=eps)


@dataclass(frozen=True)
class Form:
    """What is frozen into the kernel: the window, channels of a group, threads, pixels of a thread, floats of a padded channel."""

    R: int
    S: int
    group: int
    threads: int
    pixels: int
    area: int


@functools.cache
def fprop_kernel(form: Form) -> Any:
    R, S, GROUP, THREADS, MINE, AREA = form.R, form.S, form.group, form.threads, form.pixels, form.area
    TAPS, GROUPS, WARPS, ACC = R * S, FILTERS // GROUP, THREADS // WARP, MINE * FILTERS
    FLOATS, WEIGHTS, SUMS = DEPTH * AREA, DEPTH * TAPS * FILTERS, WARPS * FILTERS

    @jit(device=True)
    def block_sums(sums, parts):
        """parts[g] becomes its sum over the block, in a fixed order."""
        tid = i4(cuda.threadIdx.x)
        cuda.syncthreads()
        for g in range(GROUPS):
            total = warp_sum(parts[g])
            if tid % i4(WARP) == i4(0):
                sums[tid // i4(WARP) * i4(FILTERS) + i4(g)] = total
        cuda.syncthreads()
        for g in range(GROUPS):
            total = f4(0)
            for w in range(WARPS):
                total += sums[w * FILTERS + g]
            parts[g] = total

    @jit(launch_bounds=(THREADS, 2))
    def conv_evonorm_s0_kernel(x, w, b, gamma, beta, v, y, z, shift, std, slabs, C, H, W, K, P, Q, stride, pad, eps):
        """z = conv(x, w) + b, y = γ·z·σ(v·z)/s + β, and the statistics of every group.

        gemm: GM, GN, GK = P·Q of an image, 8 filters, C·R·S. grid: N·K/8, block 32–256.
        owns: a block all pixels of 8 filters of an image, a thread up to 4 pixels of them.
        shared: 4 channels of the padded image and of the filters, up to 32 KiB + 128·R·S bytes.
        moves: K/8 times x (from L2), z and y once. needs: K a multiple of 8, P·Q ≤ 1024. source: arXiv:2004.02967.
        """
        image = cuda.shared.array(FLOATS, f4)
        filters = cuda.shared.array(WEIGHTS, f4, ALIGNMENT)
        sums = cuda.shared.array(SUMS, f4)
        leads = cuda.shared.array(FILTERS, f4)
        acc = cuda.local.array(ACC, f4)
        starts = cuda.local.array(MINE, i4)
        parts = cuda.local.array(GROUPS, f4)
        offsets = cuda.local.array(GROUPS, f4)
        values = cuda.local.array(4, f4)
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

        for i in range(MINE):
            for k in range(FILTERS):
                acc[i * FILTERS + k] += b[k0 + i4(k)]
        if tid == i4(0):
            for k in range(FILTERS):
                leads[k] = acc[k]
        cuda.syncthreads()
        for g in range(GROUPS):
            parts[g] = f4(0)
            for i in range(MINE):
                if tid + i4(i * THREADS) < pixels:
                    for k in range(GROUP):
                        parts[g] += acc[i * FILTERS + g * GROUP + k] - leads[g * GROUP]
        block_sums(sums, parts)
        count = f4(GROUP) * f4(pixels)
        for g in range(GROUPS):
            offsets[g] = parts[g] / count
            parts[g] = f4(0)
            for i in range(MINE):
                if tid + i4(i * THREADS) < pixels:
                    for k in range(GROUP):
                        centred = acc[i * FILTERS + g * GROUP + k] - leads[g * GROUP] - offsets[g]
                        parts[g] += centred * centred
        block_sums(sums, parts)
        for g in range(GROUPS):
            parts[g] = f4(math.sqrt(parts[g] / count + eps))
            if tid == i4(0):
                at = i4(n * (K // i4(GROUP)) + k0 // i4(GROUP) + i4(g))
                shift[at] = offsets[g]
                std[at] = parts[g]

        for i in range(MINE):
            p = i4(tid + i4(i * THREADS))
            if p < pixels:
                at = i4((n * pixels + p) * K + k0)
                for quad in range(FILTERS // 4):
                    for k in range(4):
                        channel = i4(k0 + i4(quad * 4 + k))
                        each = acc[i * FILTERS + quad * 4 + k]
                        sigma, _ = both_sides(v[channel] * each)
                        values[k] = gamma[channel] * each * sigma / parts[(quad * 4 + k) // GROUP] + beta[channel]
                    to, first = i4(at + i4(quad * 4)), i * FILTERS + quad * 4
                    store4(z, to, acc[first], acc[first + 1], acc[first + 2], acc[first + 3])
                    store4(y, to, values[0], values[1], values[2], values[3])

    return conv_evonorm_s0_kernel


def supports(call: Call) -> str | None:
    """None, or the reason in words."""
    c = shape_of(call)
    group = c.K // call.attrs["groups"]
    if call.layout != "NHWC":
        return "the fused convolutions read images stored NHWC"
    if c.K % FILTERS or FILTERS % group:
        return f"a block has {FILTERS} filters: they must be whole groups, and K a multiple of them"
    if c.P * c.Q > PIXELS * LARGEST_BLOCK or (c.H + 2 * c.pad) * (c.W + 2 * c.pad) > LARGEST_IMAGE:
        return "a block holds all pixels of an image, at most 32×32"
    return None if c.R * c.S <= 25 else "a block holds filters of at most 25 taps"


def bind(call: Call) -> list[Launch]:
    """One launch."""
    c = shape_of(call)
    pixels = c.P * c.Q
    threads = min(max(power_of_two(pixels), WARP), LARGEST_BLOCK)
    area = (c.H + 2 * c.pad) * (c.W + 2 * c.pad)
    form = Form(c.R, c.S, c.K // call.attrs["groups"], threads, -(-pixels // threads), -(-area // 128) * 128)
    sizes = (c.K // FILTERS, c.C, c.H, c.W, c.K, c.P, c.Q, c.stride, c.pad)
    args = (call.ins[0], call.packed, *call.ins[2:], *call.outs, *map(np.int32, sizes), np.float32(call.attrs["eps"]))
    return [Launch(fprop_kernel(form), c.N * c.K // FILTERS, threads, args)]


def pack(call: Call) -> Array:
    """w (K,C,R,S) as [C][R][S][K]."""
    shape = call.in_shapes[1]
    return np.arange(numel(shape), dtype=np.int32).reshape(shape).transpose(1, 2, 3, 0).reshape(-1)


def composed(conv: Impl, norm: Impl) -> Impl:
    """The op as `conv` (an implementation of conv_fprop), then `norm` (one of evonorm_s0_fprop): any shape."""

    def parts(call: Call) -> tuple[Call, Call]:
        x, w, b, *channels = operands(call, "in")
        y, z, *kept = operands(call, "out")
        geometry, rest = ({name: call.attrs[name] for name in names} for names in (("stride", "pad"), ("groups", "eps")))
        after: list[Operand] = [z, *channels]
        first = inner(call, "conv_fprop", [x, w, b], [z], attrs=geometry)
        return first, inner(call, "evonorm_s0_fprop", after, [y, *kept], attrs=rest, tile=None, packed=None, scratch=None)

    def bind_parts(call: Call) -> list[Launch | HostCall]:
        first, second = parts(call)
        return [*conv.bind(first), *norm.bind(second)]

    def pack_weight(call: Call) -> Array:
        assert conv.pack is not None
        return conv.pack(parts(call)[0])

    return Impl(
        bind_parts,
        scratch=lambda call: conv.scratch(parts(call)[0]),
        supports=lambda call: conv.supports(parts(call)[0]) or norm.supports(parts(call)[1]),
        tile=lambda call, multiprocessors: conv.tile(parts(call)[0], multiprocessors),
        candidates=lambda call, multiprocessors: conv.candidates(parts(call)[0], multiprocessors),
        pack=pack_weight if conv.pack is not None else None,
        packed=conv.packed,
        needs=conv.needs,
    )


IMPL = Impl(bind, supports=supports, pack=pack)
REFERENCES = {"conv_evonorm_s0_fprop": conv_evonorm_s0_fprop}
