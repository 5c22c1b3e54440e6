"""Convolution into a thin target (at most 4 channels): conv_fprop of a last layer, conv_dgrad of a first one.

A gather would read every source pixel R·S times for a handful of outputs. Here each pixel is read once: a product
with GN = R·S·K columns (27 for 3×3 to RGB) gives what the pixel contributes to each of its R·S target pixels,

    parts[(r,s,k)][pixel] = Σ_c source[pixel,c] · filter[k,c,r,s]

and a second kernel collects, for every target pixel, its R·S contributions in one fixed order (no atomics).
Source: col2im, the transposed form of Chellapilla, Puri, Simard, "High performance convolutional neural networks", 2006.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.cuda import cuda, f4, i4, i8, jit, types
from nbcnn.ops.call import Call, Launch, blocks
from nbcnn.ops.conv.register_tile import ALIGNMENT, in_sequence
from nbcnn.ops.conv.thin_shape import Correlation, correlation, filter_index, split_pixel
from nbcnn.ops.ptx.vector import load1_if, load4_if, shared_load4, shared_store4, store4


@dataclass(frozen=True)
class ScatterTile:
    """A thread owns TM pixels × TN columns, a block TX threads across the columns and TY down the pixels.

    BK channels a step; `split` blocks share the channels of one pixel tile; `resident` blocks are to fit on a multiprocessor.
    """

    TM: int
    TN: int
    TX: int
    TY: int
    BK: int
    resident: int
    split: int

    @property
    def BM(self) -> int:
        """Pixels a block."""
        return self.TM * self.TY

    @property
    def threads(self) -> int:
        return self.TX * self.TY

    @property
    def pitch(self) -> int:
        """Floats a row of the packed filters: a thread's TN columns begin at a multiple of four."""
        return self.TX * (-(-self.TN // 4) * 4)


def pack(call: Call) -> np.ndarray:
    """Weight index of filter[c, column], row by row; columns (r,s,k) in TX groups of TN, each padded to whole float4s."""
    tile = call.tile
    index = filter_index(call).transpose(1, 2, 3, 0)
    rows = index.reshape(index.shape[0], -1)
    padded = np.full((rows.shape[0], tile.pitch), -1, np.int32)
    column = np.arange(rows.shape[1])
    padded[:, column // tile.TN * (tile.pitch // tile.TX) + column % tile.TN] = rows
    return padded.reshape(-1)


@functools.cache
def parts_kernel(TM: int, TN: int, TX: int, TY: int, BK: int, resident: int) -> Any:
    """The product of all source pixels with all filter columns."""
    T, BM, VM, VN = TX * TY, TM * TY, TM // 4, -(-TN // 4)
    GROUP, PITCH_A, PITCH_B, STEP = VN * 4, TM * TY + 4, VN * 4 * TX, TY * 4
    VECTORS, LOADS_A = BK // 4, TM * TY * BK // (4 * T)
    B_VECTORS = BK * PITCH_B // 4
    LOADS_B = -(-B_VECTORS // T)
    STAGED_A, STAGED_B, WIDTH = 4 * LOADS_A, 4 * LOADS_B, 4 * VN
    AREA_A, HALF = BK * PITCH_A, BK * (PITCH_A + PITCH_B)

    @jit(device=True)
    def fetch(stage_a, stage_b, x, w, m0, c0, c1, M, C):
        t = i4(cuda.threadIdx.x)
        for i in range(LOADS_A):
            m = i4(m0 + (t + i * T) // VECTORS)
            c = i4(c0 + t % VECTORS * 4)
            v = load4_if(x, i8(m) * C + c, (m < M) & (c < c1))
            stage_a[4 * i], stage_a[4 * i + 1], stage_a[4 * i + 2], stage_a[4 * i + 3] = v
        for i in range(LOADS_B):
            e = i4((t + i * T) * 4)
            v = load4_if(w, i4(c0 * PITCH_B + e), (e < i4(BK * PITCH_B)) & (i4(c0 + e // PITCH_B) < c1))
            stage_b[4 * i], stage_b[4 * i + 1], stage_b[4 * i + 2], stage_b[4 * i + 3] = v

    @jit(device=True)
    def stash(stage_a, stage_b, shared, half):
        t = i4(cuda.threadIdx.x)
        at = i4(half + t % VECTORS * 4 * PITCH_A + t // VECTORS)
        for i in range(LOADS_A):
            for j in range(4):
                shared[types.uint64(at + (i * (T // VECTORS) + j * PITCH_A))] = stage_a[4 * i + j]
        for i in range(LOADS_B):
            e = i4((t + i * T) * 4)
            if e < i4(BK * PITCH_B):
                shared_store4(shared, i4(half + AREA_A + e), stage_b[4 * i], stage_b[4 * i + 1], stage_b[4 * i + 2], stage_b[4 * i + 3])

    def make_product(k):
        @jit(device=True)
        def product(acc, shared, a, b):
            rA = cuda.local.array(TM, f4)
            rB = cuda.local.array(WIDTH, f4)
            for v in range(VM):
                rA[4 * v], rA[4 * v + 1], rA[4 * v + 2], rA[4 * v + 3] = shared_load4(shared, i4(a + (k * PITCH_A + v * STEP)))
            for v in range(VN):
                rB[4 * v], rB[4 * v + 1], rB[4 * v + 2], rB[4 * v + 3] = shared_load4(shared, i4(b + (k * PITCH_B + 4 * v)))
            for i in range(TM):
                for j in range(TN):
                    acc[i, j] += rA[i] * rB[j]

        return product

    multiply = in_sequence([make_product(k) for k in range(BK)])
    MEMORY = 2 * HALF

    @jit(launch_bounds=(T, resident))
    def thin_parts_kernel(x, w, parts, M, C, per_split, columns, plane):
        """parts[split][column][m] = Σ_c x[m,c] · w[c,column] over the split's channels.

        gemm   M = NHW pixels × R·S·K columns × C
        grid   (⌈M/BM⌉, split), block TX·TY; block owns BM pixels × all columns, thread TM×TN
        shared 8·BK·(BM + 4 + pitch) bytes
        moves  4·M·(C + split·R·S·K) bytes, and the filters once a block
        """
        shared = cuda.shared.array(MEMORY, f4, ALIGNMENT)
        acc = cuda.local.array((TM, TN), f4)
        stage_a = cuda.local.array(STAGED_A, f4)
        stage_b = cuda.local.array(STAGED_B, f4)
        for i in range(TM):
            for j in range(TN):
                acc[i, j] = f4(0)

        t = i4(cuda.threadIdx.x)
        tx, ty = i4(t % TX), i4(t // TX)
        m0, split = i4(cuda.blockIdx.x * BM), i4(cuda.blockIdx.y)
        c0 = i4(split * per_split)
        c1 = i4(min(C, c0 + per_split))
        fetch(stage_a, stage_b, x, w, m0, c0, c1, M, C)
        stash(stage_a, stage_b, shared, i4(0))
        cuda.syncthreads()
        half = i4(0)
        while c0 < c1:
            c0 = i4(c0 + BK)
            fetch(stage_a, stage_b, x, w, m0, c0, c1, M, C)
            multiply(acc, shared, i4(half + ty * 4), i4(half + AREA_A + tx * GROUP))
            half = i4(HALF - half)
            stash(stage_a, stage_b, shared, half)
            cuda.syncthreads()

        first = i4(split * columns + tx * TN)
        for j in range(TN):
            if i4(tx * TN + j) < columns:
                for v in range(VM):
                    m = i4(m0 + ty * 4 + v * STEP)
                    if m < M:
                        a, b, c, d = acc[4 * v, j], acc[4 * v + 1, j], acc[4 * v + 2, j], acc[4 * v + 3, j]
                        store4(parts, i8(first + j) * plane + m, a, b, c, d)

    return thin_parts_kernel


@functools.cache
def collect_kernel(R: int, S: int, K: int, split: int, has_bias: bool) -> Any:
    """The kernel that adds up what reaches each target pixel."""

    @jit()
    def thin_collect_kernel(parts, bias, y, M, H, W, P, Q, top, left, plane):
        """y[(n,p,q),k] = bias[k] + Σ_{r,s} Σ_split parts[split][(r,s,k)][n, p+r-top, q+s-left].

        grid   ⌈NPQ/threads⌉; a thread owns the K outputs of one pixel, neighbouring threads read neighbouring pixels
        moves  4·M·K·(split·R·S + 1) bytes
        """
        m = i4(cuda.grid(1))
        if m < M:
            n, p, q = split_pixel(m, P, Q)
            acc = cuda.local.array(K, f4)
            for k in range(K):
                acc[k] = bias[k] if has_bias else f4(0)
            for r in range(R):
                for s in range(S):
                    h, w = i4(p + r - top), i4(q + s - left)
                    inside = (h >= i4(0)) & (h < H) & (w >= i4(0)) & (w < W)
                    at = i4(i4(n * H + h) * W + w)
                    for k in range(K):
                        for z in range(split):
                            acc[k] += load1_if(parts, i8(plane) * ((z * R + r) * S * K + s * K + k) + at, inside)
            for k in range(K):
                y[types.uint64(i8(m) * K + k)] = acc[k]

    return thin_collect_kernel


def _plane(g: Correlation) -> int:
    """Floats of one column's plane in scratch: the source pixels, rounded up to whole float4s."""
    return -(-g.N * g.H * g.W // 4) * 4


def scratch(call: Call) -> int:
    g = correlation(call)
    return 4 * call.tile.split * g.taps * g.K * _plane(g)


def tile(call: Call, multiprocessors: int) -> ScatterTile:
    """Few channels split and many pixels a block where pixels fill the GPU; the other way round for a single image."""
    g = correlation(call)
    pixels, columns = g.N * g.H * g.W, g.taps * g.K
    if pixels >= 256 * multiprocessors:
        TX = _power_of_two(-(-columns // 14))
        return ScatterTile(8, -(-columns // TX), TX, 128 // TX, 8, 2, 1)
    TX = min(8, _power_of_two(-(-columns // 7)))
    split = 1
    while split < 8 and 32 * split <= g.C and -(-pixels // 64) * split < multiprocessors:
        split *= 2
    return ScatterTile(4, -(-columns // TX), TX, 64 // TX, 8, 4, split)


def _power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


def bind(call: Call) -> list[Launch]:
    g, tile = correlation(call), call.tile
    bias = call.ins[2] if len(call.ins) > 2 else None
    source, target = g.N * g.H * g.W, g.N * g.P * g.Q
    parts = call.scratch.view(np.float32)
    steps = -(-g.C // tile.BK)
    per_split = -(-steps // tile.split) * tile.BK
    product = parts_kernel(tile.TM, tile.TN, tile.TX, tile.TY, tile.BK, tile.resident)
    sizes = [np.int32(v) for v in (source, g.C, per_split, g.taps * g.K, _plane(g))]
    collect = collect_kernel(g.R, g.S, g.K, tile.split, bias is not None)
    threads = 128 if target > 1 << 15 else 32
    extents = [np.int32(v) for v in (target, g.H, g.W, g.P, g.Q, g.top, g.left, _plane(g))]
    return [
        Launch(product, (-(-source // tile.BM), tile.split), tile.threads, (call.ins[0], call.packed, parts, *sizes)),
        Launch(collect, blocks(target, threads), threads, (parts, parts if bias is None else bias, call.outs[0], *extents)),
    ]
