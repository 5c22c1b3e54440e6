"""Sums of partial results (frame/split.py) that end in something else than the plain tensor: a pooled one, a filter with K and C exchanged."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i8, jit
from nbcnn.ops.conv.frame.pooling import PATCH, store_pooled, window_offsets
from nbcnn.ops.conv.frame.split import launch_sum_partials, sum_of_partials, sum_partials_traffic
from nbcnn.ops.kernel.call import Launch, blocks
from nbcnn.ops.kernel.traffic import Traffic, once
from nbcnn.ops.ptx.vector import load1_if, load4_if

THREADS = 256
LANES_K, LANES_C = 32, 8
"""Filters and channels that a block of `sum_exchanged_kernel` takes: reads run along the filters, writes along channels and taps."""
TAPS = 9
FEW_PARTS = 4


@functools.cache
def sum_pooled(vector: bool, bias: bool) -> Any:
    """The kernel of relu(Σ + b), pooled; vector: GN is a multiple of 4."""
    store_window = store_pooled(vector)

    @jit()
    def sum_pooled_kernel(partials, b, y, index, windows, GN, quads, parts):
        """y, index[window][n] = the maximum, and its place, of relu(Σ_z partials[z][4·window + t][n] + b[n]) over t < 4.

        grid: ceil(windows·quads / 256), quads = ceil(GN / 4); owns: per thread one window of four channels.
        moves: 4·windows·GN·(4·parts + 1) bytes. Rows of the partial results are numbered by windows (pooling.py).
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= windows * quads:
            return
        window = i // quads
        n = (i - window * quads) * 4
        patch = cuda.local.array(PATCH, f4)
        values = cuda.local.array(PATCH, f4)
        for q in range(PATCH):
            patch[q] = 0.0
        z = 0
        while z < parts:
            for t in range(4):
                at = (i8(z) * 4 * windows + (4 * window + t)) * GN + n
                if vector:
                    values[4 * t], values[4 * t + 1], values[4 * t + 2], values[4 * t + 3] = load4_if(partials, at, True)
                else:
                    for q in range(4):
                        values[4 * t + q] = load1_if(partials, at + i8(q), n + q < GN)
            for q in range(PATCH):
                patch[q] += values[q]
            z += 1
        if bias:
            for q in range(4):
                shift = load1_if(b, n + q, n + q < GN)
                for t in range(4):
                    patch[4 * t + q] += shift
        at, byte = window_offsets(window, n, GN)
        store_window(patch, y, index, at, byte, GN - n)

    return sum_pooled_kernel


def launch_sum_pooled(partials: Any, b: Any, y: Any, index: Any, windows: int, GN: int, parts: int) -> Launch:
    """Launch of `sum_pooled_kernel`; b is None, or GN values to add to each row."""
    quads = -(-GN // 4)
    sizes = (np.int32(v) for v in (windows, GN, quads, parts))
    args = (partials, y if b is None else b, y, index, *sizes)
    return Launch(sum_pooled(GN % 4 == 0, b is not None), blocks(windows * quads, THREADS), THREADS, args)


@jit(device=True)
def flipped(total, taps):
    """The taps of a 3×3 window in reverse order."""
    for tap in range(9):
        taps[tap] = total[8 - tap]


@functools.cache
def sum_exchanged(window: int, planar: bool, filter_of: Any, bias_tap: int) -> Any:
    """The kernel that makes dW (K,C,3,3) of sums of partials which hold C first, K last, and `window` taps.

    filter_of: device function (total, taps): the nine taps of a filter, of the `window` sums of one (c,k).
    planar: partials lie [z][tap][c][k], not [z][c][tap][k]. bias_tap: the tap whose column sums are the bias gradient.
    """
    CHUNK, ROW = LANES_C * TAPS, LANES_C * TAPS + 1
    MEMORY, add_parts = LANES_K * ROW, sum_of_partials(1)

    @jit()
    def sum_exchanged_kernel(partials, partials_b, dw, db, K, C, parts, parts_b):
        """dw[k][c] = filter_of(Σ_z partials[z] of (c,k)), db[k] = Σ_z partials_b[z][bias_tap][k].

        grid: (ceil(K / 32), ceil(C / 8) + 1): the last y makes db; block 32 filters × 8 channels, a thread one of each.
        shared: 4·32·73 bytes; moves: 4·K·C·(window·parts + 9) bytes.
        """
        shared = cuda.shared.array(MEMORY, f4)
        values = cuda.local.array(window, f4)
        total = cuda.local.array(window, f4)
        taps = cuda.local.array(TAPS, f4)
        bias = cuda.local.array(1, f4)
        tid = cuda.threadIdx.x
        lane = tid & LANES_K - 1
        k0 = cuda.blockIdx.x * LANES_K
        c0 = cuda.blockIdx.y * LANES_C
        k, c = k0 + lane, c0 + (tid >> 5)
        z = 0
        if c0 >= C:
            if (k < K) & (c == c0):
                add_parts(bias, partials_b, bias_tap * K + k, window * K, 0, 1, parts_b)
                db[k] = bias[0]
            return
        inside = (k < K) & (c < C)
        for tap in range(window):
            total[tap] = 0.0
        while z < parts:
            for tap in range(window):
                row = (z * window + tap) * C + c if planar else (z * C + c) * window + tap
                values[tap] = load1_if(partials, i8(row) * K + k, inside)
            for tap in range(window):
                total[tap] += values[tap]
            z += 1
        filter_of(total, taps)
        for tap in range(TAPS):
            shared[lane * ROW + (tid >> 5) * TAPS + tap] = taps[tap]
        cuda.syncthreads()
        e = tid
        while e < LANES_K * CHUNK:
            filter_, rest = e // CHUNK, e % CHUNK
            if (k0 + filter_ < K) & (rest < (C - c0) * TAPS):
                dw[(i8(k0 + filter_) * C + c0) * TAPS + rest] = shared[filter_ * ROW + rest]
            e += THREADS

    return sum_exchanged_kernel


def launch_exchanged(kernel: Any, window: int, partials: Any, partials_b: Any, dw: Any, db: Any, K: int, C: int, parts: int) -> list[Launch]:
    """Launches of a `sum_exchanged` kernel. Many parts are first added to the first one, by a kernel with more threads."""
    summed = 1 if parts > FEW_PARTS else parts
    first = [launch_sum_partials(partials, None, partials, window * C * K, K, parts)] if summed < parts else []
    args = (partials, partials_b, dw, dw if db is None else db, *(np.int32(v) for v in (K, C, summed, parts)))
    return [*first, Launch(kernel, (blocks(K, LANES_K), blocks(C, LANES_C) + (db is not None)), THREADS, args)]


def launch_sum_flipped(partials: Any, partials_b: Any, dw: Any, db: Any, K: int, C: int, parts: int) -> list[Launch]:
    """dw[k][c][r,s] = Σ_z partials[z][c][2-r,2-s][k], db[k] = Σ_z partials_b[z][1,1][k]; partials are overwritten."""
    return launch_exchanged(sum_exchanged(TAPS, False, flipped, 4), TAPS, partials, partials_b, dw, db, K, C, parts)


def sum_pooled_traffic(windows: int, GN: int, parts: int) -> Traffic:
    """Bytes of `launch_sum_pooled`."""
    return once(4 * 4 * windows * GN * parts, windows * (4 * GN + -(-GN // 4)))


def exchanged_traffic(window: int, K: int, C: int, parts: int, bias: bool = True) -> list[Traffic]:
    """Bytes of `launch_sum_flipped` (a window of 9) and `launch_sum_winograd` (16)."""
    count = window * K * C
    summed = 1 if parts > FEW_PARTS else parts
    first = [sum_partials_traffic(count, parts)] if summed < parts else []
    return [*first, once(4 * (count * summed + K * parts * bias), 4 * (TAPS * K * C + K * bias))]
