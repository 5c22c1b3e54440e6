"""Step 5, an epilogue: bias and ReLU are applied to the sums while they are in registers. As launches of their own they would read and write all of y
once more each.
"""

from __future__ import annotations

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.conv.cuda_ladder.parts import THREADS, step
from nbcnn.ops.conv.cuda_ladder.step4_registers import BM, BN, SIDE, SUMS, TN, launch_of, tile_sums, traffic


@jit(launch_bounds=(THREADS, 4))
def epilogue_kernel(x, w, b, y, C, H, W, K, P, Q, R, S, stride, pad, pixels):
    """y[k,j] = max(0, b[k] + Σ_e A[k,e]·B[e,j]), A and B as in step 3.

    grid    (⌈NPQ/64⌉, ⌈K/64⌉), block 256.
    owns    block 64 filters × 64 pixels of y, thread 4 × 4 of them, 16 apart.
    shared  64×16 of A and 16×64 of B, 8.3 KB.
    moves   A ⌈NPQ/64⌉ times, B ⌈K/64⌉ times, mostly out of L2; y once.
    source  CUTLASS, "epilogue".
    """
    acc = cuda.local.array(SUMS, f4)
    k0, j0 = cuda.blockIdx.y * BM, cuda.blockIdx.x * BN
    tile_sums(acc, x, w, k0, j0, C, H, W, K, P, Q, R, S, stride, pad, pixels)
    for l in range(TN):
        j = j0 + cuda.threadIdx.x % SIDE + SIDE * l
        for i in range(TN):
            k = k0 + cuda.threadIdx.x // SIDE + SIDE * i
            if k < K and j < pixels:
                y[(j // (P * Q) * K + k) * P * Q + j % (P * Q)] = max(acc[TN * i + l] + b[k], 0.0)


IMPL = step(lambda s, arrays: launch_of(epilogue_kernel, s, arrays), traffic, biased=True)
