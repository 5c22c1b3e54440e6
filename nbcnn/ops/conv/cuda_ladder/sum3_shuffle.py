"""Sum 3, shuffles: the threads of a warp add their sums by reading each other's registers, five times, without shared memory and without a barrier.
The sums of the eight warps are left, which every warp adds in the same way: one barrier instead of nine.
"""

from __future__ import annotations

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.conv.cuda_ladder.parts import THREADS, sum_step
from nbcnn.ops.conv.cuda_ladder.sum2_tree import channel_sum
from nbcnn.ops.ptx.shuffle import WARP, warp_sum

WARPS = THREADS // WARP


@jit()
def sum_shuffle_kernel(dy, db, N, C, pixels):
    """db[c] = Σ_{n,h,w} dy[n,c,h,w].

    grid C, block 256.
    owns per block one channel, per thread every 256th number of it.
    shared 8 sums, 32 bytes.
    moves dy once, coalesced; db once.
    source J. Luitjens, "Faster Parallel Reductions on Kepler" (2014).
    """
    sums = cuda.shared.array(WARPS, f4)
    lane, warp = cuda.threadIdx.x % WARP, cuda.threadIdx.x // WARP
    total = warp_sum(channel_sum(dy, N, C, pixels))
    if lane == 0:
        sums[warp] = total
    cuda.syncthreads()
    total = warp_sum(sums[lane] if lane < WARPS else 0.0)
    if cuda.threadIdx.x == 0:
        db[cuda.blockIdx.x] = total


IMPL = sum_step(sum_shuffle_kernel, lambda channels: channels)
