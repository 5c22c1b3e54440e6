"""Step 2, TMA loads: one thread asks for a whole k-tile, and the copy engine computes the addresses.

A tensor map knows the images, the padding (zeros) and the swizzle; its im2col mode walks from window to window. The threads neither compute
addresses nor hold data in registers on its way; they wait at an mbarrier, which counts the bytes that have arrived.
"""

from __future__ import annotations

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit, types
from nbcnn.ops.conv.hopper_ladder.mma_product import multiply, store_sums
from nbcnn.ops.conv.hopper_ladder.parts import A_BYTES, BK, BLOCKS, BM, BN, STAGE_BYTES, SUMS, THREADS, aligned, first_corner, tma_step
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait
from nbcnn.ops.ptx.tma import fence_tensor_map, load_im2col_4d, load_tile_2d

u2, u8 = types.uint16, types.uint64


@jit(device=True)
def fence_maps(maps):
    """The thread that fetches, once: the maps came to the device by an ordinary copy, which TMA must not have missed."""
    fence_tensor_map(maps)
    fence_tensor_map(maps + u8(ROW_BYTES))


@jit(device=True)
def load_k_tile(maps, to, barrier, image, h, w, n0, r, s, c, C, S):
    """One thread: have channels c … c + 63 of tap (r, s) fetched to shared address `to`; their 32 KiB count at `barrier`."""
    mbarrier_arrive_expect_tx(barrier, STAGE_BYTES)
    load_im2col_4d(to, maps, c, w, h, image, barrier, u2(s), u2(r))
    load_tile_2d(to + A_BYTES, maps + u8(ROW_BYTES), (r * S + s) * C + c, n0, barrier)


@jit(device=True)
def next_k_tile(r, s, c, C, S):
    """(r, s, c) of the k-tile behind: channels first, then taps."""
    c += BK
    if c == C:
        c = 0
        s += 1
    if s == S:
        s = 0
        r += 1
    return r, s, c


@jit(launch_bounds=(THREADS, BLOCKS))
def tma_kernel(maps, y, GM, C, P, Q, K, S, stride, top, left, across, steps):
    """y[m,n] = Σ_k A[m,k]·B[n,k], A and B as in step 1, in `steps` k-tiles.

    grid    ⌈GM/BM⌉·⌈K/BN⌉, block 256.
    owns    as step 1.
    shared  `shared_bytes(1)`: one k-tile of A and B, which TMA writes, and its barrier.
    moves   as step 1, past the registers.
    needs   compute capability 9.0; C a multiple of 64, K of 8.
    source  NVIDIA, PTX ISA, "cp.async.bulk.tensor" and "im2col mode".
    """
    memory = cuda.shared.array(0, np.uint8)
    tile = aligned(byte_address_shared(memory))
    full = tile + STAGE_BYTES
    t = cuda.threadIdx.x
    lane, warp = t & 31, t >> 5
    m0, n0 = cuda.blockIdx.x // across * BM, cuda.blockIdx.x % across * BN
    image, h, w = first_corner(m0, P, Q, stride, top, left)
    source = byte_address_global(maps)
    if t == 0:
        mbarrier_init(full, 1)
        fence_mbarrier_init()
        fence_maps(source)
    cuda.syncthreads()
    acc = cuda.local.array(SUMS, f4)
    for i in range(SUMS):
        acc[i] = 0.0
    r, s, c, parity = 0, 0, 0, 0
    for _ in range(steps):
        if t == 0:
            load_k_tile(source, tile, full, image, h, w, n0, r, s, c, C, S)
        r, s, c = next_k_tile(r, s, c, C, S)
        mbarrier_wait(full, parity)
        parity ^= 1
        # Thread 0 comes later, and a wait is a loop: `ldmatrix` and `mma.sync` want all lanes of a warp together.
        cuda.syncwarp()
        multiply(acc, tile, tile + A_BYTES, warp, lane)
        # All warps must have read the k-tile before TMA writes the next one there.
        cuda.syncthreads()
    store_sums(acc, y, m0, n0, warp, lane, GM, K)


IMPL = tma_step(tma_kernel, THREADS, 1)
