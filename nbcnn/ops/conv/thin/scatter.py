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

from nbcnn.gpu.language import cuda, f4, i4, i8, jit, u4
from nbcnn.gpu.target import Target
from nbcnn.ops.conv.frame.correlation import Correlation
from nbcnn.ops.conv.thin.shape import correlation, filter_index
from nbcnn.ops.kernel.call import Call, Launch, blocks
from nbcnn.ops.kernel.loops import ALIGNMENT, ceil_div, keep_order, power_of_two, split_pixel, unrolled
from nbcnn.ops.kernel.traffic import Traffic, once, outputs, windows
from nbcnn.ops.ptx.vector import load1_if, load4, load4_if, shared_load4, shared_store4, store4


@dataclass(frozen=True)
class ScatterTile:
    """A thread owns TM pixels × TN columns, a block TX threads across the columns and TY down the pixels.

    BK channels per step; `split` blocks share the channels of one pixel tile; `resident` blocks are to fit on a multiprocessor.
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
        """Pixels per block."""
        return self.TM * self.TY

    @property
    def threads(self) -> int:
        return self.TX * self.TY

    @property
    def pitch(self) -> int:
        """Floats per row of the packed filters: a thread's TN columns begin at a multiple of four."""
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
    GROUP, PITCH_A, PITCH_B, STEP = VN * 4, TM * TY + 32, VN * 4 * TX, TY * 4
    VECTORS, LOADS_A = BK // 4, TM * TY * BK // (4 * T)
    # Channels are read four at a time and stored transposed. Every fourth row is shifted further, so that the threads of a
    # warp, which hold neighbouring pixels and channels, write to 32 different banks.
    SKEW = 32 // VECTORS
    B_VECTORS = BK * PITCH_B // 4
    LOADS_B = -(-B_VECTORS // T)
    STAGED_A, STAGED_B, WIDTH = 4 * LOADS_A, 4 * LOADS_B, 4 * VN
    AREA_A, HALF = BK * PITCH_A, BK * (PITCH_A + PITCH_B)

    @jit(device=True)
    def fetch(stage_a, stage_b, rows, x, w, c0, c1, C):
        t = cuda.threadIdx.x
        # Beyond the last channel the last ones are read again, and multiplied by filters of zeros.
        c = min(c0 + t % VECTORS * 4, C - 4)
        for i in range(LOADS_A):
            v = load4(x, i8(rows[i]) + c)
            stage_a[4 * i], stage_a[4 * i + 1], stage_a[4 * i + 2], stage_a[4 * i + 3] = v
        for i in range(LOADS_B):
            e = (t + i * T) * 4
            v = load4_if(w, c0 * PITCH_B + e, (e < BK * PITCH_B) & (c0 + e // PITCH_B < c1))
            stage_b[4 * i], stage_b[4 * i + 1], stage_b[4 * i + 2], stage_b[4 * i + 3] = v

    @jit(device=True)
    def stash(stage_a, stage_b, shared, half):
        t = cuda.threadIdx.x
        at = half + t % VECTORS * (4 * PITCH_A + SKEW) + t // VECTORS
        for i in range(LOADS_A):
            for j in range(4):
                shared[at + (i * (T // VECTORS) + j * PITCH_A)] = stage_a[4 * i + j]
        for i in range(LOADS_B):
            e = (t + i * T) * 4
            if e < BK * PITCH_B:
                shared_store4(shared, half + AREA_A + e, stage_b[4 * i], stage_b[4 * i + 1], stage_b[4 * i + 2], stage_b[4 * i + 3])

    def make_product(k):
        at_a, at_b = k * PITCH_A + k // 4 * SKEW, k * PITCH_B

        @jit(device=True)
        def product(acc, shared, a, b):
            rA = cuda.local.array(TM, f4)
            rB = cuda.local.array(WIDTH, f4)
            for v in range(VM):
                rA[4 * v], rA[4 * v + 1], rA[4 * v + 2], rA[4 * v + 3] = shared_load4(shared, a + (at_a + v * STEP))
            for v in range(VN):
                rB[4 * v], rB[4 * v + 1], rB[4 * v + 2], rB[4 * v + 3] = shared_load4(shared, b + (at_b + 4 * v))
            for i in range(TM):
                for j in range(TN):
                    acc[i, j] += rA[i] * rB[j]

        return product

    multiply = unrolled([make_product(k) for k in range(BK)])
    MEMORY = 2 * HALF

    @jit(launch_bounds=(T, resident))
    def thin_parts_kernel(x, w, parts, M, C, per_split, columns, plane):
        """parts[split][column][m] = Σ_c x[m,c] · w[c,column] over the split's channels.

        gemm   M = NHW pixels × R·S·K columns × C
        grid   (⌈M/BM⌉, split), block TX·TY; block owns BM pixels × all columns, thread TM×TN
        shared 8·BK·(BM + 32 + pitch) bytes
        moves  4·M·(C + split·R·S·K) bytes, and the filters once per block
        """
        shared = cuda.shared.array(MEMORY, f4, ALIGNMENT)
        acc = cuda.local.array((TM, TN), f4)
        stage_a = cuda.local.array(STAGED_A, f4)
        stage_b = cuda.local.array(STAGED_B, f4)
        for i in range(TM):
            for j in range(TN):
                acc[i, j] = 0.0

        t = cuda.threadIdx.x
        tx, ty = t % TX, t // TX
        m0, split = cuda.blockIdx.x * BM, cuda.blockIdx.y
        c0 = split * per_split
        c1 = min(C, c0 + per_split)
        rows = cuda.local.array(LOADS_A, i4)
        for i in range(LOADS_A):
            # Pixels beyond the last one stand in for it; what they give is not stored.
            rows[i] = min(m0 + t // VECTORS + i * (T // VECTORS), M - 1) * C
        fetch(stage_a, stage_b, rows, x, w, c0, c1, C)
        half = 0
        while c0 < c1:
            # A thread that is ahead writes one half while the others still read the other: one barrier per step is enough.
            stash(stage_a, stage_b, shared, half)
            cuda.syncthreads()
            c0 += BK
            fetch(stage_a, stage_b, rows, x, w, c0, c1, C)
            keep_order()
            multiply(acc, shared, half + ty * 4, half + AREA_A + tx * GROUP)
            half = HALF - half

        first = split * columns + tx * TN
        for j in range(TN):
            if tx * TN + j < columns:
                for v in range(VM):
                    m = m0 + ty * 4 + v * STEP
                    if m < M:
                        a, b, c, d = acc[4 * v, j], acc[4 * v + 1, j], acc[4 * v + 2, j], acc[4 * v + 3, j]
                        store4(parts, i8(first + j) * plane + m, a, b, c, d)

    return thin_parts_kernel


@functools.cache
def splits_added(outputs: int, split: int, pixels: int) -> Any:
    """Device function (acc, t, z): acc of the threads with z = 0 += acc of the others of their pixel; thread t = pixel + z·pixels has `outputs` sums.

    All threads of the block call it. It takes 4·pixels·split·outputs bytes of shared memory where split > 1, and does nothing where split is 1.
    """
    SUMS = pixels * split * outputs

    @jit(device=True)
    def add_splits(acc, t, z):
        if split > 1:
            sums = cuda.shared.array(SUMS, f4)
            for o in range(outputs):
                sums[t * outputs + o] = acc[o]
            cuda.syncthreads()
            if z == 0:
                for other in range(1, split):
                    for o in range(outputs):
                        acc[o] += sums[(t + other * pixels) * outputs + o]

    return add_splits


@functools.cache
def collect_kernel(R: int, S: int, K: int, split: int, pixels: int, has_bias: bool) -> Any:
    """The kernel that adds up what reaches each target pixel; `pixels` pixels per block, `split` threads per pixel."""
    add_splits = splits_added(K, split, pixels)

    @jit()
    def thin_collect_kernel(parts, bias, y, M, H, W, P, Q, top, left, plane):
        """y[(n,p,q),k] = bias[k] + Σ_split Σ_{r,s} parts[split][(r,s,k)][n, p+r-top, q+s-left].

        grid   ⌈NPQ/pixels⌉, block pixels·split; a thread owns the K outputs of one pixel and split, neighbours read neighbours
        shared 4·pixels·split·K bytes
        moves  4·M·K·(split·R·S + 1) bytes
        """
        t = cuda.threadIdx.x
        pixel, z = t % pixels, t // pixels
        m = cuda.blockIdx.x * pixels + pixel
        n, p, q = split_pixel(m, P, Q)
        acc = cuda.local.array(K, f4)
        for k in range(K):
            acc[k] = 0.0
        for r in range(R):
            for s in range(S):
                h, w = p + r - top, q + s - left
                inside = (m < M) & (u4(h) < u4(H)) & (u4(w) < u4(W))
                at = i8((n * H + h) * W + w) + i8(plane) * (z * (R * S * K) + (r * S + s) * K)
                for k in range(K):
                    acc[k] += load1_if(parts, at + i8(plane) * k, inside)
        add_splits(acc, t, z)
        if (z == 0) & (m < M):
            for k in range(K):
                y[i8(m) * K + k] = acc[k] + (bias[k] if has_bias else 0.0)

    return thin_collect_kernel


def plane(g: Correlation) -> int:
    """Floats of one column's plane in scratch: the source pixels, rounded up to whole float4s."""
    return -(-g.N * g.H * g.W // 4) * 4


def scratch(call: Call) -> int:
    g = correlation(call)
    return 4 * call.tile.split * g.taps * g.K * plane(g)


def tile(call: Call, target: Target) -> ScatterTile:
    """Few channels split and many pixels per block where pixels fill the GPU; the other way round for a single image."""
    g = correlation(call)
    pixels, columns = g.N * g.H * g.W, g.taps * g.K
    if pixels >= 256 * target.multiprocessors:
        TX = power_of_two(-(-columns // 14))
        return ScatterTile(4, -(-columns // TX), TX, 128 // TX, 16 if TX > 1 else 8, 3, 1)
    TX = min(8, power_of_two(-(-columns // 7)))
    split = 1
    while split < 16 and 16 * split <= g.C and -(-pixels // 64) * split < 2 * target.multiprocessors:
        split *= 2
    return ScatterTile(4, -(-columns // TX), TX, 64 // TX, 8, 4, split)


def parts_launch(call: Call) -> Launch:
    """The launch that leaves the products of all source pixels at the start of scratch."""
    g, tile = correlation(call), call.tile
    source, parts = g.N * g.H * g.W, call.scratch.view(np.float32)
    steps = -(-g.C // tile.BK)
    per_split = -(-steps // tile.split) * tile.BK
    product = parts_kernel(tile.TM, tile.TN, tile.TX, tile.TY, tile.BK, tile.resident)
    sizes = [np.int32(v) for v in (source, g.C, per_split, g.taps * g.K, plane(g))]
    return Launch(product, (-(-source // tile.BM), tile.split), tile.threads, (call.ins[0], call.packed, parts, *sizes))


def bind(call: Call) -> list[Launch]:
    g, tile = correlation(call), call.tile
    bias = call.ins[2] if len(call.ins) > 2 else None
    target, parts = g.N * g.P * g.Q, call.scratch.view(np.float32)
    pixels = 128 if tile.split == 1 else 32
    collect = collect_kernel(g.R, g.S, g.K, tile.split, pixels, bias is not None)
    extents = [np.int32(v) for v in (target, g.H, g.W, g.P, g.Q, g.top, g.left, plane(g))]
    args = (parts, parts if bias is None else bias, call.outs[0], *extents)
    return [parts_launch(call), Launch(collect, blocks(target, pixels), pixels * tile.split, args)]


def parts_traffic(call: Call) -> Traffic:
    """Bytes of `parts_launch`: a block fetches one step of channels ahead, which it does not use, and whole tiles of pixels and channels."""
    g, tile = correlation(call), call.tile
    pixels, steps = g.N * g.H * g.W, ceil_div(g.C, tile.BK)
    per_split = ceil_div(steps, tile.split)
    fetched = sum(min(per_split, max(0, steps - split * per_split)) + 1 for split in range(tile.split))
    tiles, filters = ceil_div(pixels, tile.BM), 4 * g.C * tile.pitch
    read = 4 * tiles * tile.BM * fetched * tile.BK + filters * tiles
    return Traffic(read, scratch(call), 4 * pixels * g.C + filters)


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`."""
    g = correlation(call)
    taps = windows(g.P, g.R, g.H, 1, g.top)[0] * windows(g.Q, g.S, g.W, 1, g.left)[0]
    collected = once(4 * call.tile.split * g.N * g.K * taps, outputs(call))
    return [parts_traffic(call), collected]
