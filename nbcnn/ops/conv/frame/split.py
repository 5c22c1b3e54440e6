"""Split-K: several blocks share one output tile, each over a part of GK; then their partial results are added in order.

A GEMM with few output tiles (a small batch; any weight gradient) leaves most of the GPU idle. Cutting GK into parts gives
every multiprocessor work, at the price of writing partial sums of each part to scratch and reading them back.
Float atomics would save the second kernel, but add in another order each time. Here the order of the additions depends
on the shape alone, so a result repeats bit for bit.

Adding parts is all latency: a thread has the loads of eight parts in flight at a time, and where parts are many,
several threads share an element.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i8, jit
from nbcnn.ops.activations.table import applied
from nbcnn.ops.kernel.call import Launch, blocks
from nbcnn.ops.kernel.loops import ALIGNMENT
from nbcnn.ops.kernel.traffic import Traffic, once
from nbcnn.ops.ptx.vector import load1_if, load4_if, store4

THREADS = 256
IN_FLIGHT, WAIT_US = 8, 0.27
"""Parts that a thread has on their way out of L2 at once, and the microseconds that it waits for them (H100)."""
MOST_GROUPS = 8


@functools.cache
def sum_of_partials(vector: int) -> Any:
    """Device function (total, partials, at, count, first, step, parts): total[q] = Σ_z partials[z·count + at + q], q < vector.

    z runs over first, first + step, … < parts, in this order. vector: 1, or 4 neighbouring elements at a time.
    """
    add = sum_of_elements(vector, vector == 4)

    @jit(device=True)
    def run(total, partials, at, count, first, step, parts):
        add(total, partials, at, count, first, step, parts, vector)

    return run


@functools.cache
def sum_of_elements(vector: int, whole: bool) -> Any:
    """Device function (total, partials, at, count, first, step, parts, wanted): `sum_of_partials` of the first `wanted` elements, zeros behind.

    whole: all are wanted, and four are one access; else each is loaded by itself.
    """
    FLOATS = vector * IN_FLIGHT

    @jit(device=True)
    def run(total, partials, at, count, first, step, parts, wanted):
        values = cuda.local.array(FLOATS, f4)
        for q in range(vector):
            total[q] = 0.0
        z = first
        while z < parts:
            for j in range(IN_FLIGHT):
                part = z + j * step
                offset = i8(part) * count + at
                if whole:
                    v = load4_if(partials, offset, part < parts)
                    for q in range(4):
                        values[4 * j + q] = v[q]
                elif vector == 1:
                    values[j] = load1_if(partials, offset, part < parts)
                else:
                    for q in range(vector):
                        values[vector * j + q] = load1_if(partials, offset + q, (part < parts) & (q < wanted))
            for j in range(FLOATS):
                total[j % vector] += values[j]
            z += IN_FLIGHT * step

    return run


@functools.cache
def sum_partials(groups: int, vector: int, bias: bool, after: Any) -> Any:
    add_parts = sum_of_partials(vector)
    (ACTIVATES, activate), MASK = applied(after), after == "mask"
    MEMBERS, FLOATS = THREADS // groups, vector * THREADS

    @jit()
    def sum_partials_kernel(partials, b, other, y, count, GN, parts):
        """y[i] = Σ_z partials[z·count + i] (+ b[i mod GN]), then the activation, or zero where other[i] is not positive.

        grid: blocks of vector·256/groups elements; group t of a block adds the parts t, t + groups, …, then group 0 adds the groups.
        shared: vector·1,024 bytes; moves: 4·count·(parts + 1) bytes. vector: 4 if GN is a multiple of 4, else 1.
        """
        shared = cuda.shared.array(FLOATS, f4, ALIGNMENT)
        total = cuda.local.array(vector, f4)
        tid = cuda.threadIdx.x
        group = tid // MEMBERS
        i = (cuda.blockIdx.x * MEMBERS + tid - group * MEMBERS) * vector
        add_parts(total, partials, i, count, group, groups, parts if i < count else 0)
        if groups > 1:
            for q in range(vector):
                shared[tid * vector + q] = total[q]
            cuda.syncthreads()
        if group == 0 and i < count:
            for t in range(1, groups):
                for q in range(vector):
                    total[q] += shared[(tid + t * MEMBERS) * vector + q]
            if bias:
                n = i % GN
                for q in range(vector):
                    total[q] += b[n + q]
            for q in range(vector):
                if ACTIVATES:
                    total[q] = activate(total[q])
                if MASK:
                    total[q] = total[q] if other[i + q] > 0.0 else 0.0
            if vector == 4:
                store4(y, i, total[0], total[1], total[2], total[3])
            else:
                y[i] = total[0]

    return sum_partials_kernel


@functools.cache
def sum_filters(taps: int, bias: bool) -> Any:
    add_parts = sum_of_partials(1)
    CHANNELS = channels_of_a_block(taps)
    CHUNK = CHANNELS * taps

    @jit()
    def sum_filters_kernel(partials, partials_b, dw, db, K, C, parts):
        """dw[k][c][r,s] = Σ_z partials[z][k][r,s][c], and db[k] = Σ_z partials_b[z][k].

        grid: (K, + 1 if there is a bias; chunks of CHANNELS channels): x makes filter k = x, the last x makes db.
        Reads run along c and writes along (c,r,s): a chunk changes its order in shared memory.
        shared: 4·CHANNELS·R·S bytes; moves: 4·K·C·R·S·(parts + 1) bytes.
        """
        shared = cuda.shared.array(CHUNK, f4)
        total = cuda.local.array(1, f4)
        k = cuda.blockIdx.x
        tid = cuda.threadIdx.x
        if bias and k == K:
            i = cuda.blockIdx.y * THREADS + tid
            while i < K:
                add_parts(total, partials_b, i, K, 0, 1, parts)
                db[i] = total[0]
                i += THREADS * cuda.gridDim.y
            return
        c0 = cuda.blockIdx.y * CHANNELS
        row = k * taps * C + c0
        e = tid
        while e < CHUNK:
            tap = e // CHANNELS
            c = e - tap * CHANNELS
            if c0 + c < C:
                add_parts(total, partials, row + tap * C + c, K * taps * C, 0, 1, parts)
                shared[c * taps + tap] = total[0]
            e += THREADS
        cuda.syncthreads()
        e = tid
        while e < min(CHANNELS, C - c0) * taps:
            dw[(k * C + c0) * taps + e] = shared[e]
            e += THREADS

    return sum_filters_kernel


def channels_of_a_block(taps: int) -> int:
    """Channels that a block of `sum_filters_kernel` takes: whole warps along c, about one element per thread, at most 48 KB."""
    return max(1, min(max(32, THREADS // taps // 32 * 32), 12288 // taps))


def launch_sum_partials(partials: Any, b: Any, y: Any, count: int, GN: int, parts: int, after: Any = None, other: Any = None) -> Launch:
    """Launch of `sum_partials_kernel`; b is None, or GN values to add to each row of y. after, other: as for `store_tile`."""
    groups, vector = 1, 4 if GN % 4 == 0 else 1
    while groups < MOST_GROUPS and parts >= 4 * groups:
        groups *= 2
    args = (partials, y if b is None else b, y if other is None else other, y, np.int32(count), np.int32(GN), np.int32(parts))
    return Launch(sum_partials(groups, vector, b is not None, after), blocks(count, vector * THREADS // groups), THREADS, args)


def launch_sum_filters(partials: Any, partials_b: Any, dw: Any, db: Any, K: int, C: int, taps: int, parts: int) -> Launch:
    """Launch of `sum_filters_kernel`; db is None where no bias gradient is wanted (partials_b is then not read)."""
    args = (partials, partials_b, dw, dw if db is None else db, np.int32(K), np.int32(C), np.int32(parts))
    grid = (K + (db is not None), blocks(C, channels_of_a_block(taps)))
    return Launch(sum_filters(taps, db is not None), grid, THREADS, args)


def sum_partials_traffic(count: int, parts: int, masked: bool = False) -> Traffic:
    """Bytes of `launch_sum_partials`."""
    return once(4 * count * (parts + masked), 4 * count)


def sum_filters_traffic(K: int, C: int, taps: int, parts: int, bias: bool) -> Traffic:
    """Bytes of `launch_sum_filters`."""
    return once(4 * parts * (K * C * taps + K * bias), 4 * (K * C * taps + K * bias))
