"""Sum 1, one thread per channel: it adds all of its channel's numbers, one after another. Of 128 channels, 128 threads work; an H100 has room for
270,000.
"""

from __future__ import annotations

from nbcnn.gpu.language import cuda, jit
from nbcnn.ops.conv.cuda_ladder.parts import THREADS, sum_step
from nbcnn.ops.kernel.loops import ceil_div


@jit()
def sum_thread_kernel(dy, db, N, C, pixels):
    """db[c] = Σ_{n,h,w} dy[n,c,h,w].

    grid ⌈C/256⌉, block 256.
    owns per thread one channel; neighbours read a channel apart, so nothing coalesces.
    shared none.
    moves dy once, 32 bytes for each 4; db once.
    source the definition.
    """
    c = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if c < C:
        total = 0.0
        for n in range(N):
            for i in range(pixels):
                total += dy[(n * C + c) * pixels + i]
        db[c] = total


IMPL = sum_step(sum_thread_kernel, lambda channels: ceil_div(channels, THREADS))
