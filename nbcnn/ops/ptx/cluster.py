"""Thread block clusters (sm_90): neighbouring blocks that are on the GPU together, and write into each other's shared memory.

A *room* is shared memory, one in every block of a cluster, in which each block finds the same pairs of float32, whichever block told them:
an int64 for each pair, and one for an mbarrier that counts the bytes that have come. `st.async` writes a pair and counts it in one message,
so who has waited for the count has the pairs: no fence, no second barrier, no trip to the second-level cache.

Every pair of every room is told once in a launch. A block may end when it has heard: who writes to another block does not wait for it, and
a block does not end before all others have written to it. Source: PTX ISA 9.0, `barrier.cluster`, `mapa`, `st.async`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from nbcnn.gpu.language import SIMULATOR, cuda, i4, jit, u4

MOST = 8
"""Blocks of a cluster that every GPU with clusters takes."""


class Room(NamedTuple):
    """Device functions for rooms of so many pairs.

    gather  (): in the kernel's own body; blocks x … x + size − 1 of its grid are then a cluster, whoever launches it. The driver refuses a
            grid that is no multiple of it.
    open    (room): by all threads, at the start.
    enter   (): by all threads, before the first pair is told: waits until all blocks of the cluster have opened their rooms.
    tell    (room, at, block, a, b): by one thread for every block of the cluster, pair `at` of that block's room.
    hear    (room): by all threads, waits until the block's own room is full.
    """

    gather: Any
    open: Any
    enter: Any
    tell: Any
    hear: Any


if SIMULATOR:
    import numpy as np

    @cuda.jit(device=True)
    def _put(room, at, a, b):
        room[at] = np.array([a, b], np.float32).view(np.int64)[0]

    @cuda.jit(device=True)
    def told(room, at):
        return tuple(np.array([room[at]], np.int64).view(np.float32))
else:
    from nbcnn.gpu.language import f4
    from nbcnn.ops.ptx.asm import byte_address_shared, instruction, kernel_notes
    from nbcnn.ops.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait

    _store = instruction("st_shared_pair", "st.shared.v2.f32 [$0], {$1, $2};", None, (u4, f4, f4))
    _load = instruction("ld_shared_pair", "ld.shared.v2.f32 {$0, $1}, [$2];", (f4,) * 2, (u4,))
    # Relaxed: all that others must see of a block that arrives is its mbarrier, which has a fence of its own.
    _arrive = instruction("barrier_cluster_arrive", "barrier.cluster.arrive.relaxed.aligned;", None, ())
    _wait = instruction("barrier_cluster_wait", "barrier.cluster.wait.acquire.aligned;", None, ())
    _tell = instruction(
        "st_async_pair",
        "{ .reg .b32 to, bar; mapa.shared::cluster.u32 to, $0, $2; mapa.shared::cluster.u32 bar, $1, $2;"
        " st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [to], {$3, $4}, [bar]; }",
        None,
        (u4, u4, u4, f4, f4),
    )

    @jit(device=True)
    def _put(room, at, a, b):
        _store(byte_address_shared(room) + u4(8) * u4(at), a, b)

    @jit(device=True)
    def told(room, at):
        """Pair `at` of a room, as (a, b)."""
        return _load(byte_address_shared(room) + u4(8) * u4(at))


@cache
def room_of(size: int, pairs: int) -> Room:
    """For clusters of `size` blocks. A cluster of one is plain shared memory and the block's barrier; the simulator has no other."""
    return _alone() if size == 1 else _together(size, 8 * pairs)


def _alone() -> Room:
    @jit(device=True)
    def nothing():
        pass

    @jit(device=True)
    def start(room):
        pass

    @jit(device=True)
    def tell(room, at, block, a, b):
        _put(room, at, a, b)

    @jit(device=True)
    def hear(room):
        cuda.syncthreads()

    return Room(nothing, start, nothing, tell, hear)


def _together(size: int, nbytes: int) -> Room:
    NBYTES = nbytes

    @jit(device=True)
    def start(room):
        if cuda.threadIdx.x == i4(0):
            bar = byte_address_shared(room) + u4(NBYTES)
            mbarrier_init(bar, u4(1))
            mbarrier_arrive_expect_tx(bar, u4(NBYTES))
            fence_mbarrier_init()
        cuda.syncwarp()
        _arrive()

    @jit(device=True)
    def enter():
        _wait()

    @jit(device=True)
    def tell(room, at, block, a, b):
        first = byte_address_shared(room)
        _tell(first + u4(8) * u4(at), first + u4(NBYTES), u4(block), a, b)

    @jit(device=True)
    def hear(room):
        mbarrier_wait(byte_address_shared(room) + u4(NBYTES), u4(0))

    return Room(kernel_notes(cluster_dim_x=size, cluster_dim_y=1, cluster_dim_z=1), start, enter, tell, hear)
