"""Convolution out of a thin source (at most 4 channels): conv_fprop of a first layer, conv_dgrad of a last one.

The whole of GK = R·S·C (27 for 3×3 over RGB) fits into shared memory, so a block loads its filters once and then
walks over pixel tiles: per tile one im2col of BM pixels, one product, one coalesced write of BM×BN outputs. What becomes
of them is frozen in (`after`): nothing, a ReLU, a mask, or ReLU and pooling, for which pixels are numbered window by window.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i4, i8, jit, u4
from nbcnn.gpu.target import Target
from nbcnn.ops.activations.table import applied, epilogue_function
from nbcnn.ops.conv.frame.pooling import PATCH, store_pooled
from nbcnn.ops.conv.thin.shape import correlation, filter_index
from nbcnn.ops.conv.thin.taps import fetch_taps
from nbcnn.ops.kernel.call import Call, Launch
from nbcnn.ops.kernel.cost import CYCLES_A_MICROSECOND, MEMORY, STREAM
from nbcnn.ops.kernel.loops import ALIGNMENT, ceil_div, split_pixel, step_pixel, unrolled
from nbcnn.ops.kernel.traffic import Traffic, outputs, size, windows
from nbcnn.ops.ptx.vector import load1_if, load4_if, shared_load4, shared_store4, store4

SHARED_BYTES = 48 * 1024
"""Shared memory that a block gets without asking for more."""


@dataclass(frozen=True)
class GatherTile:
    """BM pixels × BN channels per block, TM × TN per thread; `blocks` persistent blocks share the pixel tiles, `resident` of them on a
    multiprocessor."""

    BM: int
    BN: int
    TM: int
    TN: int
    resident: int
    blocks: int

    @property
    def threads(self) -> int:
        return (self.BM // self.TM) * (self.BN // self.TN)


def pack(call: Call) -> np.ndarray:
    """Weight index of filter[(r,s,c), k], row by row."""
    return filter_index(call).transpose(2, 3, 1, 0).reshape(-1)


@functools.cache
def kernel(R: int, S: int, C: int, stride: int, has_bias: bool, after: Any, tile: GatherTile) -> Any:
    """The gather kernel for one window, thin channel count, end and tile. after: None, the device function of an activation, "mask" or "pool"."""
    BM, BN, TM, TN, resident = tile.BM, tile.BN, tile.TM, tile.TN, tile.resident
    (ACTIVATES, activate), MASK, POOL, MASKS = applied(after), after == "mask", after == "pool", 4 * tile.TN
    store_window = store_pooled(True)
    TAPS, GK = R * S, R * S * C
    ROW_A, ROW_W = S * C * BM, S * C * BN
    TX, TY = BN // TN, BM // TM
    T = TX * TY
    # Threads that share the im2col row of one pixel, each with every GROUPS-th tap.
    GROUPS = T // BM
    LOADS = -(-TAPS // GROUPS)
    STAGED, A_ELEMENTS, W_ELEMENTS = LOADS * C, GK * BM, (GK + 1) * BN
    WARPS_X, ROW_STEP, COL_STEP, VM, VN = TX // 8, TY * 4, TX * 4, TM // 4, TN // 4

    fetch = fetch_taps(R, S, C, stride, GROUPS)

    def make_product(k):
        @jit(device=True)
        def product(acc, shared, a, b):
            rA = cuda.local.array(TM, f4)
            rW = cuda.local.array(TN, f4)
            for v in range(VM):
                rA[4 * v], rA[4 * v + 1], rA[4 * v + 2], rA[4 * v + 3] = shared_load4(shared, a + (k * BM + v * ROW_STEP))
            for v in range(VN):
                rW[4 * v], rW[4 * v + 1], rW[4 * v + 2], rW[4 * v + 3] = shared_load4(shared, b + (k * BN + v * COL_STEP))
            for i in range(TM):
                for j in range(TN):
                    acc[i, j] += rA[i] * rW[j]

        return product

    filter_row = unrolled([make_product(k) for k in range(S * C)])
    MEMORY = A_ELEMENTS + W_ELEMENTS

    @jit(launch_bounds=(T, resident))
    def thin_gather_kernel(x, w, bias, other, y, M, H, W, P, Q, K, top, left, dn, dp, dq):
        """y[m,k] = b[k] + Σ_{r,s,c} x[n, stride·p+r-top, stride·q+s-left, c] · w[(r,s,c), k], pixel m = (n,p,q).

        gemm   M = NPQ pixels × K channels × R·S·C
        grid   (persistent blocks that walk over pixel tiles, ⌈K/BN⌉), block TX·TY; block owns BM×BN outputs per step, thread TM×TN
        shared 4·(R·S·C·(BM + BN) + BN) bytes
        moves  4·(M·C + M·K) bytes (4·(M·C + M·K/4) if it pools), and the filters once per block
        other  what masks, or the index that pooling writes; P and Q are then those of the pooled image, as are dn, dp, dq
        """
        shared = cuda.shared.array(MEMORY, f4, ALIGNMENT)
        acc = cuda.local.array((TM, TN), f4)
        staged = cuda.local.array(STAGED, f4)
        patch = cuda.local.array(PATCH, f4)
        masks = cuda.local.array(MASKS, f4)

        t = cuda.threadIdx.x
        lane, warp = u4(t) & 31, u4(t) >> 5
        col = i4((warp % WARPS_X * 8 + (lane & 7)) * 4)
        row = i4((warp // WARPS_X * 4 + (lane >> 3)) * 4)
        n0 = cuda.blockIdx.y * BN
        columns_left = K - n0 - col

        pixel, group = t % BM, t // BM
        store = group * (C * BM) + pixel
        m0 = cuda.blockIdx.x * BM
        walk = cuda.gridDim.x * BM
        # The place of this thread's pixel in its window never changes.
        down, across = (pixel >> 1) & 1, pixel & 1
        if POOL:
            n, p, q = split_pixel((m0 + pixel) >> 2, P, Q)
            fetch(staged, x, m0 + pixel < M, n, 2 * p + down, 2 * q + across, group, H, W, top, left)
        else:
            n, p, q = split_pixel(m0 + pixel, P, Q)
            fetch(staged, x, m0 + pixel < M, n, p, q, group, H, W, top, left)

        e = t * 4
        while e < GK * BN:
            k = e // BN
            c = n0 + e - k * BN
            f = load4_if(w, k * K + c, c < K)
            shared_store4(shared, A_ELEMENTS + e, f[0], f[1], f[2], f[3])
            e += 4 * T
        # The row after the filters is the bias: the accumulators start from it.
        e = t
        while e < BN:
            if has_bias:
                shared[A_ELEMENTS + GK * BN + e] = load1_if(bias, n0 + e, n0 + e < K)
            else:
                shared[A_ELEMENTS + GK * BN + e] = 0.0
            e += T
        while m0 < M:
            cuda.syncthreads()
            for i in range(LOADS):
                if group + i * GROUPS < TAPS:
                    for c in range(C):
                        shared[store + (i * GROUPS * C + c) * BM] = staged[i * C + c]
            cuda.syncthreads()
            # The next tile's pixels travel while this tile is multiplied.
            n, p, q = step_pixel(n, p, q, dn, dp, dq, P, Q)
            if POOL:
                fetch(staged, x, m0 + walk + pixel < M, n, 2 * p + down, 2 * q + across, group, H, W, top, left)
            else:
                fetch(staged, x, m0 + walk + pixel < M, n, p, q, group, H, W, top, left)
            for v in range(VN):
                f = shared_load4(shared, col + (A_ELEMENTS + GK * BN + v * COL_STEP))
                for i in range(TM):
                    acc[i, 4 * v], acc[i, 4 * v + 1], acc[i, 4 * v + 2], acc[i, 4 * v + 3] = f
            r = 0
            while r < R:
                filter_row(acc, shared, row + r * ROW_A, col + A_ELEMENTS + r * ROW_W)
                r += 1
            rows_left, at = M - m0 - row, (m0 + row) * K + n0 + col
            if POOL:
                pooled_at = (m0 + row >> 2) * K + n0 + col
                for u in range(VM):
                    for v in range(VN):
                        if (u * ROW_STEP < rows_left) & (v * COL_STEP < columns_left):
                            for i in range(4):
                                for j in range(4):
                                    patch[4 * i + j] = acc[4 * u + i, 4 * v + j]
                            # K is a multiple of four: the byte of four channels lies at a fourth of their offset.
                            to = pooled_at + u * (ROW_STEP // 4) * K + v * COL_STEP
                            store_window(patch, y, other, i8(to), i8(to >> 2), 4)
            else:
                for u in range(VM):
                    if MASK:
                        # All loads of four rows before their stores: behind a store, each would wait for the one before.
                        for i in range(4):
                            for v in range(VN):
                                j = i * TN + 4 * v
                                ok = (u * ROW_STEP + i < rows_left) & (v * COL_STEP < columns_left)
                                f = load4_if(other, i8(at + K * i) + v * COL_STEP, ok)
                                masks[j], masks[j + 1], masks[j + 2], masks[j + 3] = f
                    for i in range(4):
                        for v in range(VN):
                            for j in range(4 * v, 4 * v + 4):
                                if ACTIVATES:
                                    acc[4 * u + i, j] = activate(acc[4 * u + i, j])
                                if MASK:
                                    acc[4 * u + i, j] = acc[4 * u + i, j] if masks[i * TN + j] > 0.0 else 0.0
                            if (u * ROW_STEP + i < rows_left) & (v * COL_STEP < columns_left):
                                k, j = 4 * u + i, 4 * v
                                store4(y, i8(at + K * i) + v * COL_STEP, acc[k, j], acc[k, j + 1], acc[k, j + 2], acc[k, j + 3])
                    at += K * ROW_STEP
            m0 += walk

    return thin_gather_kernel


def scratch(call: Call) -> int:
    return 0


def tile(call: Call, target: Target) -> GatherTile:
    """The largest tile that fills the GPU and whose pixels and filters fit into shared memory."""
    g = correlation(call)
    pixels, depth = g.N * g.P * g.Q, g.taps * g.C

    def fits(BM: int, BN: int) -> bool:
        return 4 * (depth * BM + (depth + 1) * BN) <= SHARED_BYTES

    if pixels >= 1024 * target.multiprocessors and g.K > 128 and fits(64, 256):
        BM, BN, TM, TN, resident = 64, 256, 16, 8, 2
    elif pixels >= 128 * target.multiprocessors and g.K > 64 and fits(64, 128):
        BM, BN, TM, TN, resident = 64, 128, 8, 8, 3
    else:
        BM, BN, TM, TN, resident = 32, 64, 4, 4, 4
    return GatherTile(BM, BN, TM, TN, resident, max(1, target.multiprocessors * resident // -(-g.K // BN)))


PRODUCTS_A_CYCLE = {16: 62, 128: 82}
"""Products that a multiprocessor makes a cycle, by results of a thread: 128 images of 3 to 24 channels take 17.4 µs, 33 take 6.2, 1,024 of 3 to
256 channels 379 (H100)."""


def estimate(call: Call, target: Target) -> float:
    """Microseconds of the products of whole blocks of filters."""
    g, tile = correlation(call), call.tile
    products = g.GM * g.taps * g.C * ceil_div(g.K, tile.BN) * tile.BN
    rate = PRODUCTS_A_CYCLE[128 if tile.TM * tile.TN >= 64 else 16] * target.multiprocessors * CYCLES_A_MICROSECOND
    moved = sum(each.least for each in traffic(call)) / MEMORY
    return STREAM.launch + max(products / rate, moved)


def bind(call: Call, after: Any = None) -> list[Launch]:
    """One launch, with the activation of the call unless `after` is "mask" or "pool".

    A third input is the bias of an fprop, the mask of a dgrad; a second output the index of a pooling.
    """
    g, tile, after = correlation(call), call.tile, after or epilogue_function(call)
    third = call.ins[2] if len(call.ins) > 2 else None
    bias = None if after == "mask" else third
    other = {"mask": third, "pool": call.outs[-1]}.get(after, call.packed)
    # The number of blocks is the grid's business: one kernel serves them all.
    run = kernel(g.R, g.S, g.C, g.stride, bias is not None, after, replace(tile, blocks=1))
    pixels, unit = g.N * g.P * g.Q, 2 if after == "pool" else 1
    P, Q = g.P // unit, g.Q // unit
    grid = (min(tile.blocks, -(-pixels // tile.BM)), -(-g.K // tile.BN))
    image, rest = divmod(grid[0] * tile.BM // unit**2, P * Q)
    step = (image, *divmod(rest, Q))
    sizes = [np.int32(v) for v in (pixels, g.H, g.W, P, Q, g.K, g.top, g.left, *step)]
    b = call.packed if bias is None else bias
    return [Launch(run, grid, tile.threads, (call.ins[0], call.packed, b, other, call.outs[0], *sizes))]


def traffic(call: Call, after: str | None = None) -> list[Traffic]:
    """Bytes of `bind`: pixels once per tap and column of blocks, filters once per block."""
    g, tile = correlation(call), call.tile
    down, rows = windows(g.P, g.R, g.H, g.stride, g.top)
    across, columns = windows(g.Q, g.S, g.W, g.stride, g.left)
    blocks = min(tile.blocks, ceil_div(g.N * g.P * g.Q, tile.BM))
    filters, mask = 4 * g.taps * g.C * g.K, size(call, "in", 2) if after == "mask" else 0
    read = 4 * g.N * g.C * down * across * ceil_div(g.K, tile.BN) + filters * blocks
    return [Traffic(read + mask, outputs(call), 4 * g.N * g.C * rows * columns + filters + mask)]
