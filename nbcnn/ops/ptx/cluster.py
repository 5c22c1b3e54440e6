"""Thread block clusters (sm_90): blocks that run at the same time on neighbouring multiprocessors and read each other's shared memory.

A kernel has a cluster's size as an option, `jit(cluster=8)`; its grid is a multiple of that along x. A block reads what another has written to
shared memory behind a barrier of the cluster, and no block may end while another still reads its memory: so a last barrier follows the last read.
"""

from __future__ import annotations

from nbcnn.gpu.language import f4, u4
from nbcnn.ops.ptx.asm import instruction

cluster_rank = instruction("cluster_rank", "mov.u32 $0, %cluster_ctarank;", u4, (), pure=True)
"""() -> the block's number within its cluster."""
cluster_arrive = instruction("cluster_arrive", "barrier.cluster.arrive.release.aligned;", None, ())
"""(): the thread has come to the cluster's barrier; what it wrote before is seen by whoever waits there. By every thread of the cluster."""
cluster_wait = instruction("cluster_wait", "barrier.cluster.wait.acquire.aligned;", None, ())
"""(): wait until all threads of the cluster have come to its barrier."""
load_of_block = instruction(
    "ld_shared_cluster_f32", "{ .reg .u32 there; mapa.shared::cluster.u32 there, $1, $2; ld.shared::cluster.f32 $0, [there]; }", f4, (u4, u4)
)
"""(address, rank) -> the float32 that block `rank` of the cluster has at this shared byte address, a multiple of 4, of its own window."""
