"""Weight gradients whose sum is whole in one block, or in one cluster: they go straight into dw, and no second launch adds parts or orders them.

A block of squares has 64 filters × 64 channels with all taps. In dw, which is (K, C, R, S), these are 64·R·S floats in a row for each filter. Behind
the last product the blocks put their sums into the ring's memory in this order; then each takes a share of the filters, four neighbours per thread,
adds what the other blocks of its cluster have there, and stores 16 bytes per thread, 512 in a row per warp.

    memory of a block     [filter][64·R·S + 4 float32]: the lanes of a warp, eight filters × four channels, meet in a bank by two at most (3×3)
    filters of rank i     the i-th of CLUSTER equal runs
    order                 rank i adds its own sums first, then those of ranks i + 1, …, around, as in `wgrad_cluster`
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, i4, i8, jit, u4
from nbcnn.ops.conv.wgmma.wgrad_cluster import ring_is_free
from nbcnn.ops.kernel.loops import quotient
from nbcnn.ops.ptx.cluster import address_of_block, cluster_arrive, cluster_arrive_relaxed, cluster_rank, cluster_wait, load4_of_block_if
from nbcnn.ops.ptx.cvt import bits_float, float_bits
from nbcnn.ops.ptx.mbarrier import bar_sync
from nbcnn.ops.ptx.shared import load_words_4, store_words_1
from nbcnn.ops.ptx.vector import store4

PUT = 3
"""The named barrier behind which all sums of a block lie in its memory; that of the ring has 2, helper warps 1."""
_CHANNELS, _EIGHTS = 64, 8


def row_bytes(taps: int) -> int:
    """Bytes of the memory of a block from one filter to the next."""
    return 4 * (_CHANNELS * taps + 4)


@cache
def put_rows(R: int, S: int) -> Any:
    """Device function (acc, ring, t): a thread's sums into shared memory, in the order of dw. Warpgroup r has the taps (r, 0 … S − 1)."""
    ROW, PIXEL = row_bytes(R * S), 4 * R * S

    @jit(device=True)
    def run(acc, ring, t):
        lane = t & 31
        at = ring + (((t >> 5) & 3) * 16 + (lane >> 2)) * ROW + (lane & 3) * (2 * PIXEL) + (t >> 7) * (4 * S)
        for s in range(S):
            for i in range(_EIGHTS):
                e = (s * _EIGHTS + i) * 4
                here = at + (i * (8 * PIXEL) + 4 * s)
                store_words_1(here, float_bits(acc[e]))
                store_words_1(here + PIXEL, float_bits(acc[e + 1]))
                store_words_1(here + 8 * ROW, float_bits(acc[e + 2]))
                store_words_1(here + (8 * ROW + PIXEL), float_bits(acc[e + 3]))

    return run


@cache
def add_rows(BM: int, R: int, S: int, threads: int, cluster: int) -> Any:
    """Device function (dw, ring, t, rank, m0, c0, M, C): the ranks' sums of a share of the filters, added, to dw[m][c][tap].

    A four of another block is read where it is wanted, so that a thread has all that it asked for when it has issued its stores.
    """
    CLUSTER, ROWS, TAPS, ROW = cluster, BM // cluster, R * S, row_bytes(R * S)
    FOURS = _CHANNELS * TAPS // 4
    PASSES, rest = divmod(ROWS * FOURS, threads)
    if rest:
        raise ValueError(f"{ROWS} filters of {FOURS} fours are no whole fours for each of {threads} threads")
    # The fours of a thread that are under way at a time.
    FLIGHT = max(count for count in range(1, 5) if PASSES % count == 0)
    VALUES, THREADS = 4 * CLUSTER * FLIGHT, threads

    @jit(device=True)
    def run(dw, ring, t, rank, m0, c0, M, C):
        values = cuda.local.array(VALUES, f4)
        others = cuda.local.array(CLUSTER, u4)
        wanted = cuda.local.array(FLIGHT, i4)
        starts = cuda.local.array(FLIGHT, i8)
        own = ring + rank * (ROWS * ROW)
        for j in range(1, CLUSTER):
            other = rank + j
            others[j] = address_of_block(own, other - CLUSTER if other >= CLUSTER else other)
        fours = min(_CHANNELS, C - c0) * TAPS >> 2
        first = m0 + rank * ROWS
        for begin in range(0, PASSES, FLIGHT):
            for k in range(FLIGHT):
                four = t + (begin + k) * THREADS
                row = quotient(four, FOURS)
                four -= row * FOURS
                m = first + row
                at = row * ROW + four * 16
                wanted[k] = 1 if m < M and four < fours else 0
                starts[k] = (i8(m) * C + c0) * TAPS + four * 4
                words = load_words_4(own + at)
                for q in range(4):
                    values[k * CLUSTER * 4 + q] = bits_float(words[q])
                for j in range(1, CLUSTER):
                    more = load4_of_block_if(others[j] + at, wanted[k])
                    for q in range(4):
                        values[(k * CLUSTER + j) * 4 + q] = more[q]
            for k in range(FLIGHT):
                for j in range(1, CLUSTER):
                    for q in range(4):
                        values[k * CLUSTER * 4 + q] += values[(k * CLUSTER + j) * 4 + q]
                v = k * CLUSTER * 4
                if wanted[k] != 0:
                    store4(dw, starts[k], values[v], values[v + 1], values[v + 2], values[v + 3])

    return run


@cache
def store_whole(BM: int, R: int, S: int, threads: int, cluster: int, summers: int, ring_bytes: int) -> Any:
    """Device function (acc, dw, ring, t, m0, c0, M, C) for all consumers, behind their last product: their sums, whole, to dw.

    summers: helper warps that read the ring, too.
    """
    if BM * row_bytes(R * S) > ring_bytes:
        raise ValueError(f"{BM} filters of {R * S} taps have no room in {ring_bytes} bytes")
    (wait, _), put, add = ring_is_free(threads, summers), put_rows(R, S), add_rows(BM, R, S, threads, cluster)
    CLUSTERS, all_put = cluster > 1, bar_sync(PUT, threads)

    @jit(device=True)
    def run(acc, dw, ring, t, m0, c0, M, C):
        # Other warps may still multiply out of the ring, or add up dy.
        wait()
        put(acc, ring, t)
        if CLUSTERS:
            cluster_arrive()
            cluster_wait()
            add(dw, ring, t, cluster_rank(), m0, c0, M, C)
            # A block stays as long as another reads its memory. Lanes that store nothing come with the others: by whole warps.
            cuda.syncwarp()
            cluster_arrive_relaxed()
            cluster_wait()
        else:
            all_put()
            add(dw, ring, t, 0, m0, c0, M, C)

    return run
