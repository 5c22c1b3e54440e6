"""Sums of partial results (splitk.py) that end in something else than the plain tensor: a pooled one, a folded filter."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.cuda import cuda, f4, i4, i8, jit, u4
from nbcnn.ops.call import Launch, blocks
from nbcnn.ops.conv.pooling import PATCH, store_pooled
from nbcnn.ops.ptx.vector import load1_if, load4_if

THREADS = 256
LANES_K, LANES_C = 32, 8
"""Filters and channels that a block of `sum_folded_kernel` takes: reads run along the filters, writes along channels and taps."""
TAPS, WINDOW = 9, 16


@functools.cache
def sum_pooled(vector: bool, bias: bool) -> Any:
    """The kernel of relu(Σ + b), pooled; vector: GN is a multiple of 4."""
    store_window = store_pooled(vector)

    @jit()
    def sum_pooled_kernel(partials, b, y, index, windows, GN, quads, planes):
        """y, index[window][n] = the maximum, and its place, of relu(Σ_z partials[z][4·window + t][n] + b[n]) over t < 4.

        grid: ceil(windows·quads / 256), quads = ceil(GN / 4); owns: a thread one window of four channels.
        moves: 4·windows·GN·(4·planes + 1) bytes. Rows of the partial results are numbered by windows (pooling.py).
        """
        i = i4(cuda.grid(1))
        if i >= i4(windows * quads):
            return
        window = i4(u4(i) // u4(quads))
        n = i4(i4(i - window * quads) * i4(4))
        patch = cuda.local.array(PATCH, f4)
        values = cuda.local.array(PATCH, f4)
        for q in range(PATCH):
            patch[q] = f4(0)
        z = i4(0)
        while z < planes:
            for t in range(4):
                at = (i8(z) * i8(4) * i8(windows) + i8(i4(4) * window + i4(t))) * i8(GN) + i8(n)
                if vector:
                    values[4 * t], values[4 * t + 1], values[4 * t + 2], values[4 * t + 3] = load4_if(partials, at, True)
                else:
                    for q in range(4):
                        values[4 * t + q] = load1_if(partials, at + i8(q), n + i4(q) < GN)
            for q in range(PATCH):
                patch[q] += values[q]
            z = i4(z + i4(1))
        if bias:
            for q in range(4):
                shift = load1_if(b, n + i4(q), n + i4(q) < GN)
                for t in range(4):
                    patch[4 * t + q] += shift
        store_window(patch, y, index, window, n, GN)

    return sum_pooled_kernel


def launch_sum_pooled(partials: Any, b: Any, y: Any, index: Any, windows: int, GN: int, planes: int) -> Launch:
    """Launch of `sum_pooled_kernel`; b is None, or GN values to add to each row."""
    quads = -(-GN // 4)
    sizes = (np.int32(v) for v in (windows, GN, quads, planes))
    args = (partials, y if b is None else b, y, index, *sizes)
    return Launch(sum_pooled(GN % 4 == 0, b is not None), blocks(windows * quads, THREADS), THREADS, args)


@functools.cache
def sum_folded() -> Any:
    """The kernel of dW = Sᵀ dG S (folded.py), where dG is a sum of planes."""
    CHUNK, ROW = LANES_C * TAPS, LANES_C * TAPS + 1
    MEMORY = LANES_K * ROW

    @jit()
    def sum_folded_kernel(partials, partials_b, dw, db, K, C, planes):
        """dw[k][c][a,b] = Σ_z Σ_(u,v) of (a,b) partials[z][c][u,v][k], db[k] = Σ_z Σ_(u,v) central partials_b[z][u,v][k].

        grid: (ceil(K / 32), ceil(C / 8) + 1): the last y makes db; block 32 filters × 8 channels, a thread one of each.
        shared: 4·32·73 bytes; moves: 4·K·C·(16·planes + 9) bytes.
        """
        shared = cuda.shared.array(MEMORY, f4)
        values = cuda.local.array(WINDOW, f4)
        total = cuda.local.array(WINDOW, f4)
        tid = i4(cuda.threadIdx.x)
        lane = i4(tid & i4(LANES_K - 1))
        k0 = i4(i4(cuda.blockIdx.x) * i4(LANES_K))
        c0 = i4(i4(cuda.blockIdx.y) * i4(LANES_C))
        k, c = i4(k0 + lane), i4(c0 + (tid >> i4(5)))
        makes_b = c0 >= C
        rows = i4(1) if makes_b else C
        inside = (k < K) & ((c < C) | (makes_b & (c == c0)))
        for tap in range(WINDOW):
            total[tap] = f4(0)
        z = i4(0)
        while z < planes:
            for tap in range(WINDOW):
                row = i4(z * rows + (i4(0) if makes_b else c))
                at = i8(i4(row * i4(WINDOW) + i4(tap))) * i8(K) + i8(k)
                if makes_b:
                    values[tap] = load1_if(partials_b, at, inside)
                else:
                    values[tap] = load1_if(partials, at, inside)
            for tap in range(WINDOW):
                total[tap] += values[tap]
            z = i4(z + i4(1))
        if makes_b:
            if inside:
                # The taps (1,1), (1,2), (2,1), (2,2) together see every pixel once.
                db[k] = (total[5] + total[6]) + (total[9] + total[10])
            return
        at = i4(lane * i4(ROW) + i4(tid >> i4(5)) * i4(TAPS))
        for a in range(3):
            for b in range(3):
                # The rows of S that hold tap a are u = 2-a and 3-a.
                corner = (2 - a) * 4 + 2 - b
                shared[at + i4(3 * a + b)] = (total[corner] + total[corner + 1]) + (total[corner + 4] + total[corner + 5])
        cuda.syncthreads()
        e = tid
        while e < i4(LANES_K * CHUNK):
            filter_, rest = i4(u4(e) // u4(CHUNK)), i4(u4(e) % u4(CHUNK))
            if (k0 + filter_ < K) & (rest < i4(C - c0) * i4(TAPS)):
                dw[(i8(k0 + filter_) * i8(C) + i8(c0)) * i8(TAPS) + i8(rest)] = shared[filter_ * i4(ROW) + rest]
            e = i4(e + i4(THREADS))

    return sum_folded_kernel


def launch_sum_folded(partials: Any, partials_b: Any, dw: Any, db: Any, K: int, C: int, planes: int) -> Launch:
    """Launch of `sum_folded_kernel`."""
    args = (partials, partials_b, dw, db, np.int32(K), np.int32(C), np.int32(planes))
    return Launch(sum_folded(), (blocks(K, LANES_K), blocks(C, LANES_C) + 1), THREADS, args)
