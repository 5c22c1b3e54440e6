"""Step 4, wgmma: the tensor cores read A and B from shared memory themselves.

`mma.sync` multiplies fragments in registers: eight warps of 64 × 32 read every row of A four times and every row of B twice by `ldmatrix`,
96 KiB a k-tile. `wgmma` takes a descriptor (address, strides, swizzle) of a tile in shared memory; four warps, a warpgroup, issue one product of
64 × 128 × 16 together and go on while it runs. Only the sums are in registers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit, types
from nbcnn.ops.conv.hopper_ladder.parts import A_BYTES, BLOCKS, BM, BN, STAGE_BYTES, SUMS, THREADS, aligned, first_corner, tma_step
from nbcnn.ops.conv.hopper_ladder.step2_tma import fence_maps, load_k_tile, next_k_tile
from nbcnn.ops.conv.hopper_ladder.step3_ring import STAGES, make_ring, next_stage
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.cvt import bf16x2
from nbcnn.ops.ptx.mbarrier import mbarrier_arrive, mbarrier_wait
from nbcnn.ops.ptx.wgmma import K_STEP, k_major, wgmma_bf16, wgmma_commit, wgmma_fence, wgmma_wait_all

u8 = types.uint64
product: Any = wgmma_bf16(BN)
wait_for_products: Any = wgmma_wait_all(SUMS)
GROUP_BYTES = 64 * ROW_BYTES
"""The rows of A of one warpgroup."""


@jit(device=True)
def multiply(acc, a, b):
    """A warpgroup: start acc += A·Bᵀ of 64 rows of A at shared address a and BN rows of B at b, four products of 16 k, and do not wait."""
    left, right = k_major(a), k_major(b)
    wgmma_fence()
    product(acc, left, right, 1)
    product(acc, left + u8(K_STEP), right + u8(K_STEP), 1)
    product(acc, left + u8(2 * K_STEP), right + u8(2 * K_STEP), 1)
    product(acc, left + u8(3 * K_STEP), right + u8(3 * K_STEP), 1)
    wgmma_commit()


@jit(device=True)
def store_sums(acc, y, m0, n0, warp, lane, GM, K):
    """The sums to y (GM, K) as words of two. A warp of a warpgroup has 16 rows and all columns: a thread rows lane/4 and 8 further."""
    row, column = m0 + 16 * warp + (lane >> 2), n0 + 2 * (lane & 3)
    for j in range(BN // 8):
        for h in range(2):
            m, n, o = row + 8 * h, column + 8 * j, 4 * j + 2 * h
            if m < GM and n < K:
                y[(m * K + n) >> 1] = bf16x2(acc[o], acc[o + 1])


@jit(launch_bounds=(THREADS, BLOCKS))
def wgmma_kernel(maps, y, GM, C, P, Q, K, S, stride, top, left, across, steps):
    """y[m,n] = Σ_k A[m,k]·B[n,k], A and B as in step 1, in `steps` k-tiles, two of which are under way while one is multiplied.

    grid    ⌈GM/BM⌉·⌈K/BN⌉, block 256: two warpgroups.
    owns    block 128 × 128 of y, warpgroup 64 × 128, thread 2 columns of 8, two rows of 16.
    shared  as step 3.
    moves   as step 2; a k-tile from shared memory to the tensor cores without `ldmatrix`.
    needs   compute capability 9.0 (and no other has wgmma); C a multiple of 64, K of 8.
    source  NVIDIA, PTX ISA, "Asynchronous warpgroup level matrix instructions".
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
    ahead, ahead_parity, stage, parity = 0, 1, 0, 0
    for step in range(1 - STAGES, steps):
        if step + STAGES - 1 < steps:
            if t == 0:
                mbarrier_wait(empty + 8 * ahead, ahead_parity)
                load_k_tile(source, ring + ahead * STAGE_BYTES, full + 8 * ahead, image, h, w, n0, r, s, c, C, S)
            r, s, c = next_k_tile(r, s, c, C, S)
            ahead, ahead_parity = next_stage(ahead, ahead_parity)
        if step >= 0:
            a = ring + stage * STAGE_BYTES
            mbarrier_wait(full + 8 * stage, parity)
            cuda.syncwarp()
            multiply(acc, a + (warp >> 2) * GROUP_BYTES, a + A_BYTES)
            # The tensor cores read the stage until the products are done, and stand still until the next are issued.
            wait_for_products(acc)
            if lane == 0:
                mbarrier_arrive(empty + 8 * stage)
            stage, parity = next_stage(stage, parity)
    store_sums(acc, y, m0, n0, warp, lane, GM, K)


IMPL = tma_step(wgmma_kernel, THREADS, STAGES)
