"""Thread block clusters (sm_90): blocks that run at the same time on neighbouring multiprocessors and read each other's shared memory.

A kernel has a cluster's size as an option, `jit(cluster=8)`; its grid is a multiple of that along x. A block reads what another has written to
shared memory behind a barrier of the cluster, and no block may end while another still reads its memory: a last barrier follows the last read.
"""

from __future__ import annotations

from nbcnn.gpu.language import f4, i4, jit, types, u4
from nbcnn.ops.ptx.asm import byte_address_shared, instruction

cluster_rank = instruction("cluster_rank", "mov.u32 $0, %cluster_ctarank;", types.int32, (), pure=True)
"""() -> the block's number within its cluster."""
cluster_arrive = instruction("cluster_arrive", "barrier.cluster.arrive.release.aligned;", None, ())
"""(): the thread has come to the cluster's barrier; what it wrote before is seen by whoever waits there. By whole warps, so behind `syncthreads`."""
cluster_arrive_relaxed = instruction("cluster_arrive_relaxed", "barrier.cluster.arrive.relaxed.aligned;", None, ())
"""(): `cluster_arrive` that puts no writes in order, and so need not wait for any: behind the last read of another block's memory."""
cluster_wait = instruction("cluster_wait", "barrier.cluster.wait.acquire.aligned;", None, ())
"""(): wait until all threads of the cluster have come to its barrier. By whole warps."""
_load = instruction("ld_of_block", "{ .reg .u32 there; mapa.shared::cluster.u32 there, $1, $2; ld.shared::cluster.f32 $0, [there]; }", f4, (u4, u4))

address_of_block = instruction("address_of_block", "mapa.shared::cluster.u32 $0, $1, $2;", u4, (u4, u4), pure=True)
"""(shared address, rank) -> the address of the same place in the shared memory of block `rank` of the cluster; offsets may be added to it."""
load4_of_block_if = instruction(
    "ld_of_block_v4_if",
    "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.f32 $0, 0f00000000; mov.f32 $1, 0f00000000; mov.f32 $2, 0f00000000;"
    " mov.f32 $3, 0f00000000; @p ld.shared::cluster.v4.f32 {$0,$1,$2,$3}, [$4]; }",
    (f4,) * 4,
    (u4, i4),
)
"""(what `address_of_block` gives, wanted) -> four floats, 16 bytes; four zeros where `wanted` is 0 (nothing is then read)."""


@jit(device=True)
def load_of_block(array, offset, rank):
    """array[offset] of the shared float32 array of block `rank` of the cluster."""
    return _load(byte_address_shared(array) + offset * 4, rank)
