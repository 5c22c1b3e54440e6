"""Step 6, the epilogue: bias and ReLU while the sums are in registers, and whole rows to global memory by TMA.

The sums begin at the bias, whose loads hide behind the first k-tile. In steps 1 … 5 a warp writes 16 bytes of each of eight rows at a time, and
the layer needs two more kernels for bias and ReLU. Here the results go through shared memory, which the ring no longer needs: in the layout that
TMA's swizzle has, so that eight rows of a warp meet 32 banks; one thread then has two boxes of 128 rows × 128 bytes stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit, types
from nbcnn.ops.conv.frame.correlation import correlation
from nbcnn.ops.conv.hopper_ladder import parts
from nbcnn.ops.conv.hopper_ladder.parts import A_BYTES, BK, BLOCKS, BM, BN, SUMS, THREADS, WARPS, aligned
from nbcnn.ops.conv.hopper_ladder.step3_ring import STAGES, make_ring
from nbcnn.ops.conv.hopper_ladder.step5_roles import WITH_PRODUCER, consume, produce
from nbcnn.ops.kernel import tensor_maps
from nbcnn.ops.kernel.call import Call, Launch
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.cvt import bf16x2
from nbcnn.ops.ptx.mbarrier import bar_sync
from nbcnn.ops.ptx.shared import store_words_1
from nbcnn.ops.ptx.tma import commit_stores, fence_async_shared, fence_tensor_map, store_tile_2d, wait_stores
from nbcnn.ops.ptx.vector import load1_if

u8 = types.uint64
HALVES = BN // BK
"""Boxes that a tile of results is: rows of 64 channels, 128 bytes, each box as large as a k-tile of A."""
all_consumers: Any = bar_sync(1, THREADS)


@jit(device=True)
def begin_at_bias(acc, b, n0, lane, K):
    """acc = b: columns 2·(lane mod 4) and the next of every eight; zero beyond K."""
    for j in range(BN // 8):
        n = n0 + 2 * (lane & 3) + 8 * j
        b0, b1 = load1_if(b, n, n < K), load1_if(b, n + 1, n < K)
        for h in range(2):
            acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1] = b0, b1


@jit(device=True)
def put_results(acc, to, warp, lane):
    """max(acc, 0) in bfloat16 as boxes at shared address `to`: chunk c (16 bytes) of row i at c ^ (i mod 8), a thread 4 bytes of it."""
    row, of_eight = to + (16 * warp + (lane >> 2)) * ROW_BYTES, lane >> 2
    for j in range(BN // 8):
        at = row + (j // 8 * A_BYTES + ((j % 8 ^ of_eight) << 4) + 4 * (lane & 3))
        for h in range(2):
            v0, v1 = acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]
            # Not max(v, 0), which would turn NaN into 0 and hide where a training run broke.
            v0, v1 = 0.0 if v0 <= 0.0 else v0, 0.0 if v1 <= 0.0 else v1
            store_words_1(at + 8 * h * ROW_BYTES, bf16x2(v0, v1))


@jit(launch_bounds=(WITH_PRODUCER, BLOCKS))
def epilogue_kernel(maps, b, GM, C, P, Q, K, S, stride, top, left, across, steps):
    """y[m,n] = max(0, Σ_k A[m,k]·B[n,k] + b[n]), in `steps` k-tiles; the third map is that of y (GM, K).

    grid    ⌈GM/BM⌉·⌈K/BN⌉, block 288: warps 0 … 7 consume and write, warp 8 produces.
    owns    as step 4.
    shared  as step 3; results overwrite the ring.
    moves   as step 4; y in whole rows of 128 bytes.
    needs   compute capability 9.0; C a multiple of 64, K of 8.
    source  NVIDIA, PTX ISA, "cp.async.bulk.tensor" (shared to global); CUTLASS, "epilogue".
    """
    memory = cuda.shared.array(0, np.uint8)
    ring = aligned(byte_address_shared(memory))
    t = cuda.threadIdx.x
    lane, warp = t & 31, t >> 5
    m0, n0 = cuda.blockIdx.x // across * BM, cuda.blockIdx.x % across * BN
    source = byte_address_global(maps)
    if t == 0:
        make_ring(ring)
        fence_tensor_map(source + u8(2 * ROW_BYTES))
    cuda.syncthreads()
    if warp == WARPS:
        if lane == 0:
            produce(source, ring, m0, n0, C, P, Q, S, stride, top, left, steps)
    else:
        acc = cuda.local.array(SUMS, f4)
        begin_at_bias(acc, b, n0, lane, K)
        consume(acc, ring, warp, lane, steps)
        # Results overwrite the ring: both warpgroups must have read it.
        all_consumers()
        put_results(acc, ring, warp, lane)
        # What threads wrote must be visible to TMA before one of them starts it.
        fence_async_shared()
        all_consumers()
        if t == 0:
            for half in range(HALVES):
                if n0 + half * BK < K:
                    store_tile_2d(source + u8(2 * ROW_BYTES), n0 + half * BK, m0, ring + half * A_BYTES)
            commit_stores()
            # The block's shared memory must outlive the copy.
            wait_stores()


def bind(call: Call) -> list[Launch]:
    """x (N,H,W,C), filters (K,R,S,C), b (K) -> y (N,P,Q,K)."""
    g, y = correlation(call), call.outs[0]
    maps = tensor_maps.upload(*parts.operand_maps(call, g), tensor_maps.encode_tiled(y, (g.K, g.GM), (BK, BM)))
    args = (maps, call.ins[2], *parts.extents(g))
    return [Launch(epilogue_kernel, parts.blocks(g), WITH_PRODUCER, args, parts.shared_bytes(STAGES), keep=(maps, call.ins[0], call.packed, y))]


IMPL = parts.step(bind, biased=True)
