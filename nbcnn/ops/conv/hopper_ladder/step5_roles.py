"""Step 5, warp roles: a producer warp that only fetches, consumer warpgroups that only multiply.

In step 4 thread 0 fetches and multiplies: while it waits for an empty stage its warpgroup multiplies nothing, and while it waits for products
nobody fetches. Now a ninth warp fetches. A consumer always has the next k-tile's products queued before it waits for the last one's, so the
tensor cores never stand still between two k-tiles; a stage is handed back one k-tile later.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.conv.hopper_ladder.parts import A_BYTES, BLOCKS, BM, BN, STAGE_BYTES, SUMS, THREADS, WARPS, aligned, first_corner, tma_step
from nbcnn.ops.conv.hopper_ladder.step2_tma import fence_maps, load_k_tile, next_k_tile
from nbcnn.ops.conv.hopper_ladder.step3_ring import STAGES, make_ring, next_stage
from nbcnn.ops.conv.hopper_ladder.step4_wgmma import GROUP_BYTES, multiply, store_sums, wait_for_products
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.mbarrier import mbarrier_arrive, mbarrier_wait
from nbcnn.ops.ptx.wgmma import wgmma_wait

WITH_PRODUCER = THREADS + 32
"""Two blocks of 288 threads leave 112 registers each. The sums are 64 of them, so no `setmaxnreg` has to move registers from warp to warp."""
wait_for_all_but_one: Any = wgmma_wait(1)


@jit(device=True)
def produce(source, ring, m0, n0, C, P, Q, S, stride, top, left, steps):
    """One thread: fetch every k-tile, each as soon as its stage is empty."""
    full = ring + STAGES * STAGE_BYTES
    empty = full + 8 * STAGES
    fence_maps(source)
    image, h, w = first_corner(m0, P, Q, stride, top, left)
    r, s, c, stage, parity = 0, 0, 0, 0, 1
    for _ in range(steps):
        mbarrier_wait(empty + 8 * stage, parity)
        load_k_tile(source, ring + stage * STAGE_BYTES, full + 8 * stage, image, h, w, n0, r, s, c, C, S)
        r, s, c = next_k_tile(r, s, c, C, S)
        stage, parity = next_stage(stage, parity)


@jit(device=True)
def consume(acc, ring, warp, lane, steps):
    """A warpgroup: acc += A·Bᵀ of every k-tile. The products of one are issued before the last one's are waited for."""
    full = ring + STAGES * STAGE_BYTES
    empty = full + 8 * STAGES
    stage, parity, previous = 0, 0, 0
    for step in range(steps):
        a = ring + stage * STAGE_BYTES
        mbarrier_wait(full + 8 * stage, parity)
        multiply(acc, a + (warp >> 2) * GROUP_BYTES, a + A_BYTES)
        wait_for_all_but_one()
        if lane == 0 and step > 0:
            mbarrier_arrive(empty + 8 * previous)
        previous = stage
        stage, parity = next_stage(stage, parity)
    wait_for_products(acc)


@jit(launch_bounds=(WITH_PRODUCER, BLOCKS))
def roles_kernel(maps, y, GM, C, P, Q, K, S, stride, top, left, across, steps):
    """y[m,n] = Σ_k A[m,k]·B[n,k], A and B as in step 1, in `steps` k-tiles.

    grid    ⌈GM/BM⌉·⌈K/BN⌉, block 288: warps 0 … 7 consume, warp 8 produces.
    owns    as step 4.
    shared  as step 3.
    moves   as step 4.
    needs   compute capability 9.0; C a multiple of 64, K of 8.
    source  M. Bauer et al., "CudaDMA: Optimizing GPU Memory Bandwidth via Warp Specialization" (2011); CUTLASS, "warp-specialized kernel design".
    """
    memory = cuda.shared.array(0, np.uint8)
    ring = aligned(byte_address_shared(memory))
    t = cuda.threadIdx.x
    lane, warp = t & 31, t >> 5
    m0, n0 = cuda.blockIdx.x // across * BM, cuda.blockIdx.x % across * BN
    source = byte_address_global(maps)
    if t == 0:
        make_ring(ring)
    cuda.syncthreads()
    if warp == WARPS:
        if lane == 0:
            produce(source, ring, m0, n0, C, P, Q, S, stride, top, left, steps)
    else:
        acc = cuda.local.array(SUMS, f4)
        for i in range(SUMS):
            acc[i] = 0.0
        consume(acc, ring, warp, lane, steps)
        store_sums(acc, y, m0, n0, warp, lane, GM, K)


IMPL = tma_step(roles_kernel, WITH_PRODUCER, STAGES)
