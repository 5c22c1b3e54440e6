"""Weight gradients by clusters: blocks that have neighbouring parts of one output tile add them before anything is written to memory.

Without, every block writes its part in float32 and a second launch reads them all. Here the blocks of a cluster put their sums into the ring's
memory, which is free behind the last product, and each adds a share of all ranks' sums out of their shared memory: a plane of parts per cluster.

    memory of a block     [fours][thread][4 float32]: four sums of a thread are 16 bytes, those of a warp 512 in a row, so no two lanes share a bank
    fours of rank i       the i-th of CLUSTER equal runs of fours
    order                 rank i adds its own sums first, then those of ranks i + 1, …, around: all ranks read from different blocks at a time, and a
                          result has the same bits every time

Sums come in fours, as wgmma leaves them: two columns of a row, and two of the row 8 below. `wgrad_square.place_of_four` says which.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, i4, i8, jit, u4
from nbcnn.ops.conv.wgmma.wgrad_tile import WARP
from nbcnn.ops.ptx.cluster import address_of_block, cluster_arrive, cluster_arrive_relaxed, cluster_rank, cluster_wait, load4_of_block_if
from nbcnn.ops.ptx.cvt import float_bits
from nbcnn.ops.ptx.mbarrier import bar_arrive, bar_sync
from nbcnn.ops.ptx.shared import store_words_4
from nbcnn.ops.ptx.vector import store2

FREE = 2
"""The named barrier behind which no warp reads the ring; helper warps have 1."""


def option(cluster: int) -> dict[str, int]:
    """What `jit` is told."""
    return {"cluster": cluster} if cluster > 1 else {}


@cache
def place_of_block(BM: int, cluster: int) -> Any:
    """Device function (M, column_tiles) -> (row tile, column tile, part z).

    Neighbours in the grid, a cluster, have as many parts of one tile; then comes the next tile, and behind the last tile the next parts: blocks that
    run together read the same pixels, out of L2.
    """
    CLUSTER = cluster

    @jit(device=True)
    def run(M, column_tiles):
        tiles = (M + (BM - 1)) // BM * column_tiles
        neighbours = cuda.blockIdx.x // CLUSTER
        plane = neighbours // tiles
        tile = neighbours - plane * tiles
        row_tile = tile // column_tiles
        return row_tile, tile - row_tile * column_tiles, cuda.blockIdx.x - (neighbours - plane) * CLUSTER

    return run


@jit(device=True)
def steps_of_part(z, pixel_steps, parts):
    """(first, last + 1) of the steps of part z: one more than another has at most, and with no more parts than steps one at least."""
    least = pixel_steps // parts
    more = pixel_steps - least * parts
    first = z * least + min(z, more)
    return first, first + least + (1 if z < more else 0)


def ring_is_free(consumers: int, summers: int) -> tuple[Any, Any]:
    """Instructions (wait, come): consumers wait until all of them and all helper warps that read the ring have come; those only come."""
    threads = consumers + summers * WARP
    return bar_sync(FREE, threads), bar_arrive(FREE, threads)


@cache
def put_sums(consumers: int, sums: int) -> Any:
    """Device function (acc, ring, t): a thread's sums into shared memory, a four at a time."""
    FOURS, PITCH = sums // 4, consumers * 16

    @jit(device=True)
    def run(acc, ring, t):
        at = ring + t * 16
        for i in range(FOURS):
            a, b, c, d = acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]
            store_words_4(at + i * PITCH, float_bits(a), float_bits(b), float_bits(c), float_bits(d))

    return run


@cache
def add_ranks(consumers: int, sums: int, cluster: int, place: Any) -> Any:
    """Device function (partials, ring, t, rank, plane, m0, c0, M, C, taps, S): the ranks' sums, added, to partials[plane][m][tap][c].

    place  device function (t, four, m0, c0, C, S) -> (m, tap, c, whether the channels are there) of a four's first sum

    A four is read where its first row is wanted, so that a thread has all that it asked for when it has issued its stores.
    """
    CLUSTER, FOURS, PITCH = cluster, sums // 4 // cluster, consumers * 16
    # The fours of a thread that are under way at a time.
    FLIGHT = max(count for count in range(1, 5) if FOURS % count == 0)
    VALUES = 4 * CLUSTER * FLIGHT

    @jit(device=True)
    def run(partials, ring, t, rank, plane, m0, c0, M, C, taps, S):
        values = cuda.local.array(VALUES, f4)
        there = cuda.local.array(CLUSTER, u4)
        rows = cuda.local.array(FLIGHT, i4)
        starts = cuda.local.array(FLIGHT, i8)
        own = rank * FOURS
        for j in range(CLUSTER):
            other = rank + j
            there[j] = address_of_block(ring + own * PITCH + t * 16, other - CLUSTER if other >= CLUSTER else other)
        for begin in range(0, FOURS, FLIGHT):
            for k in range(FLIGHT):
                m, tap, c, inside = place(t, own + begin + k, m0, c0, C, S)
                # A four of channels that are not there has rows beyond the last.
                rows[k] = m if inside else M
                starts[k] = (i8(plane) * M + m) * (taps * C) + i8(tap * C + c)
                for j in range(CLUSTER):
                    four = load4_of_block_if(there[j] + (begin + k) * PITCH, rows[k] < M)
                    for q in range(4):
                        values[(k * CLUSTER + j) * 4 + q] = four[q]
            for k in range(FLIGHT):
                for j in range(1, CLUSTER):
                    for q in range(4):
                        values[k * CLUSTER * 4 + q] += values[(k * CLUSTER + j) * 4 + q]
                first = k * CLUSTER * 4
                if rows[k] < M:
                    store2(partials, starts[k], values[first], values[first + 1])
                if rows[k] + 8 < M:
                    store2(partials, starts[k] + i8(8 * (taps * C)), values[first + 2], values[first + 3])

    return run


@cache
def share_sums(consumers: int, sums: int, cluster: int, summers: int, place: Any, ring_bytes: int) -> Any:
    """Device function (acc, partials, ring, t, plane, …), the rest as of `add_ranks`: for all consumers, behind their last product."""
    if sums // 4 % cluster or 4 * consumers * sums > ring_bytes:
        raise ValueError(f"{sums} sums of {consumers} threads in clusters of {cluster}, {ring_bytes} bytes: not whole fours per rank, or no room")
    (wait, _), put, add = ring_is_free(consumers, summers), put_sums(consumers, sums), add_ranks(consumers, sums, cluster, place)

    @jit(device=True)
    def run(acc, partials, ring, t, plane, m0, c0, M, C, taps, S):
        # Other warps may still multiply out of the ring, or add up dy.
        wait()
        put(acc, ring, t)
        cluster_arrive()
        cluster_wait()
        add(partials, ring, t, cluster_rank(), plane, m0, c0, M, C, taps, S)
        # A block stays as long as another reads its memory. Lanes whose rows or channels are not there come with the others: by whole warps.
        cuda.syncwarp()
        cluster_arrive_relaxed()
        cluster_wait()

    return run
