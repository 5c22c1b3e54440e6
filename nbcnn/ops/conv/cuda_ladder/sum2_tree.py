"""Sum 2, a tree: a block adds one channel. Each of its 256 threads adds every 256th number, so that neighbours read neighbours, and the 256 sums
are then added in pairs: 128 threads, 64, 32, … one, with a barrier after each level.
"""

from __future__ import annotations

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.conv.cuda_ladder.parts import THREADS, sum_step


@jit(device=True)
def channel_sum(dy, N, C, pixels):
    """The thread's share of the block's channel: every 256th number."""
    total = 0.0
    for i in range(cuda.threadIdx.x, N * pixels, THREADS):
        total += dy[(i // pixels * C + cuda.blockIdx.x) * pixels + i % pixels]
    return total


@jit()
def sum_tree_kernel(dy, db, N, C, pixels):
    """db[c] = Σ_{n,h,w} dy[n,c,h,w].

    grid C, block 256.
    owns per block one channel, per thread every 256th number of it.
    shared 256 sums, 1 KB.
    moves dy once, coalesced; db once.
    source M. Harris, "Optimizing parallel reduction in CUDA" (2007).
    """
    sums, t = cuda.shared.array(THREADS, f4), cuda.threadIdx.x
    sums[t] = channel_sum(dy, N, C, pixels)
    cuda.syncthreads()
    half = THREADS // 2
    while half > 0:
        if t < half:
            sums[t] += sums[t + half]
        cuda.syncthreads()
        half //= 2
    if t == 0:
        db[cuda.blockIdx.x] = sums[0]


IMPL = sum_step(sum_tree_kernel, lambda channels: channels)
