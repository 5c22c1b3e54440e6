"""Step 3, a ring of mbarriers: TMA fetches the k-tiles to come while this one is multiplied.

Shared memory has room for three k-tiles, the stages of a ring. Barrier `full[i]` ends a phase when the bytes of stage i have arrived, barrier
`empty[i]` when all warps have read it. A stage is used again and again; the parity of its phase says whether a wait is for this use or the last.
"""

from __future__ import annotations

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.conv.hopper_ladder.mma_product import multiply, store_sums
from nbcnn.ops.conv.hopper_ladder.parts import A_BYTES, BLOCKS, BM, BN, STAGE_BYTES, SUMS, THREADS, WARPS, aligned, first_corner, tma_step
from nbcnn.ops.conv.hopper_ladder.step2_tma import fence_maps, load_k_tile, next_k_tile
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive, mbarrier_init, mbarrier_wait

STAGES = 3
"""96 KiB: with two blocks on a multiprocessor, which has 228 KiB, there is no room for a fourth."""


@jit(device=True)
def make_ring(ring):
    """One thread: the barriers behind the stages, `full` (one arrival, and TMA's bytes) and `empty` (an arrival of each warp)."""
    for stage in range(STAGES):
        mbarrier_init(ring + (STAGES * STAGE_BYTES + 8 * stage), 1)
        mbarrier_init(ring + (STAGES * STAGE_BYTES + 8 * STAGES + 8 * stage), WARPS)
    fence_mbarrier_init()


@jit(device=True)
def next_stage(stage, parity):
    """The stage behind, and the parity of its phase: it changes with every round of the ring."""
    stage += 1
    if stage == STAGES:
        stage = 0
        parity ^= 1
    return stage, parity


@jit(launch_bounds=(THREADS, BLOCKS))
def ring_kernel(maps, y, GM, C, P, Q, K, S, stride, top, left, across, steps):
    """y[m,n] = Σ_k A[m,k]·B[n,k], A and B as in step 1, in `steps` k-tiles, two of which are under way while one is multiplied.

    grid    ⌈GM/BM⌉·⌈K/BN⌉, block 256.
    owns    as step 1.
    shared  `shared_bytes(STAGES)`: the ring and its barriers.
    moves   as step 2.
    needs   compute capability 9.0; C a multiple of 64, K of 8.
    source  NVIDIA, PTX ISA, "mbarrier"; CUTLASS, "Asynchronous pipelines".
    """
    memory = cuda.shared.array(0, np.uint8)
    ring = aligned(byte_address_shared(memory))
    full = ring + STAGES * STAGE_BYTES
    empty = full + 8 * STAGES
    t = cuda.threadIdx.x
    lane, warp = t & 31, t >> 5
    m0, n0 = cuda.blockIdx.x // across * BM, cuda.blockIdx.x % across * BN
    image, h, w = first_corner(m0, P, Q, stride, top, left)
    source = byte_address_global(maps)
    if t == 0:
        make_ring(ring)
        fence_maps(source)
    cuda.syncthreads()
    acc = cuda.local.array(SUMS, f4)
    for i in range(SUMS):
        acc[i] = 0.0
    r, s, c = 0, 0, 0
    # Of the k-tile that is fetched, and of the one that is multiplied. A fresh barrier counts as if a phase of parity 1 had ended:
    # the first wait for each empty stage returns at once.
    ahead, ahead_parity, stage, parity = 0, 1, 0, 0
    for step in range(1 - STAGES, steps):
        if step + STAGES - 1 < steps:
            if t == 0:
                mbarrier_wait(empty + 8 * ahead, ahead_parity)
                load_k_tile(source, ring + ahead * STAGE_BYTES, full + 8 * ahead, image, h, w, n0, r, s, c, C, S)
            r, s, c = next_k_tile(r, s, c, C, S)
            ahead, ahead_parity = next_stage(ahead, ahead_parity)
        if step >= 0:
            tile = ring + stage * STAGE_BYTES
            mbarrier_wait(full + 8 * stage, parity)
            cuda.syncwarp()
            multiply(acc, tile, tile + A_BYTES, warp, lane)
            cuda.syncwarp()
            if lane == 0:
                mbarrier_arrive(empty + 8 * stage)
            stage, parity = next_stage(stage, parity)
    store_sums(acc, y, m0, n0, warp, lane, GM, K)


IMPL = tma_step(ring_kernel, THREADS, STAGES)
