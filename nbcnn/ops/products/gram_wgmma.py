"""RBF kernel values of Hopper's tensor cores, as good as in float32: three float16 products of operands in two halves, and exp in the epilogue.

x = hi + lo with hi = float16(x) and lo = float16(x − hi) has 22 bits, and rows are scaled by a power of two so that no half is subnormal
where it counts. a·b = hi·hi + hi·lo + lo·hi; what is left out, lo·lo, is 2⁻²² of a product. That is half of what three tf32 products cost.

Tensor cores round sums down, which over 8,192 features would show in the fifth digit. So the products of 64 features are a sum of their own,
added to the total on the CUDA cores, which round to nearest.

A Gram matrix is symmetric: its tiles on and above the diagonal are computed, and stored twice. What is subtracted from a symmetric matrix is
subtracted on and below the diagonal alone, which is all that a Cholesky factorisation reads.

    rbf_values    halves of a (M,K) and b (N,K), |a|², |b|² -> k (M,N) = exp(−γ |a − b|²), or added to k; or k −= a·bᵀ
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.device import constant
from nbcnn.gpu.language import cuda, f4, i8, jit, types
from nbcnn.ops.conv.wgmma.split import PRODUCTS
from nbcnn.ops.conv.wgmma.tile import ALIGNMENT, WARPGROUP
from nbcnn.ops.kernel import tensor_maps
from nbcnn.ops.kernel.call import Launch
from nbcnn.ops.kernel.loops import ceil_div, unrolled
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.fast import LOG2E, exp2
from nbcnn.ops.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait
from nbcnn.ops.ptx.tma import fence_tensor_map, load_tile_2d
from nbcnn.ops.ptx.wgmma import K_STEP, k_major, wgmma_commit, wgmma_f16, wgmma_fence, wgmma_wait_all

u8 = types.uint64
SIDE = 128
"""Rows and columns of a tile."""
COLUMNS = ROW_BYTES // 2
"""Features of a step; the width of the halves is a multiple of this."""
GROUPS, STAGES, BAND = 2, 3, 16
SUBTRACTED = 2
"""What `added` is where the products themselves are subtracted from k."""
THREADS, WARPS = GROUPS * WARPGROUP + 32, GROUPS * 4
TILE_BYTES = SIDE * ROW_BYTES
STAGE_BYTES = 4 * TILE_BYTES
SHARED_BYTES = ALIGNMENT + STAGES * STAGE_BYTES + 16 * STAGES
SUMS = SIDE // GROUPS * SIDE // WARPGROUP
_LO = TILE_BYTES
ANY = 1 << 30
"""More rows than there are: a matrix that is not symmetric is stored wherever its column is right of its row minus this."""


def tiles(M: int, N: int, symmetric: bool) -> np.ndarray:
    """Row and column of every tile in the order in which blocks take them, int32 (tiles, 2).

    Bands of 16 rows of tiles, column by column: what runs together is about a square, and what it reads stays in the second-level cache.
    """
    down, across = ceil_div(M, SIDE), ceil_div(N, SIDE)
    column, row = np.divmod(np.arange(across * BAND, dtype=np.int32), np.int32(BAND))
    bands = []
    for top in range(0, down, BAND):
        # Made in its order, since sorting 76,000 tiles takes 20 ms, and the updates of a factorisation ask for 200 orders.
        first = top * BAND if symmetric else 0
        band = np.stack([row[first:] + np.int32(top), column[first:]], 1)
        if top + BAND > down:
            band = band[band[:, 0] < down]
        # Only its first 16 columns have tiles below the diagonal.
        corner = band[: BAND * BAND] if symmetric else band[:0]
        bands += [corner[corner[:, 1] >= corner[:, 0]], band[len(corner) :]]
    return np.concatenate(bands)


@cache
def _multiply() -> Any:
    """Device function (acc, a, b): acc = all products of one stage, whose halves of a and b start at shared addresses a and b."""

    def instruction(half_a: int, half_b: int, step: int, first: bool) -> Any:
        product = wgmma_f16(SIDE)
        A_MORE, B_MORE, ADD = (half_a * _LO >> 4) + step * K_STEP, (half_b * _LO >> 4) + step * K_STEP, 0 if first else 1

        @jit(device=True)
        def run(acc, a, b):
            product(acc, a + u8(A_MORE), b + u8(B_MORE), ADD)

        return run

    every = unrolled([instruction(a, b, step, i == 0 and step == 0) for i, (a, b) in enumerate(PRODUCTS[2]) for step in range(4)])

    @jit(device=True)
    def run(acc, a, b):
        wgmma_fence()
        every(acc, k_major(a), k_major(b))
        wgmma_commit()

    return run


@cache
def _producer() -> Any:
    """Device function for one thread: fetch every step of every tile of this block, each as soon as its stage is empty."""

    @jit(device=True)
    def run(maps, ring, full, empty, order, count, steps, rows_a, rows_b):
        a_map = maps
        b_map = maps + u8(ROW_BYTES)
        fence_tensor_map(a_map)
        fence_tensor_map(b_map)
        stage, parity, t = 0, 1, cuda.blockIdx.x
        while t < count:
            m0, n0, step = order[2 * t] * SIDE, order[2 * t + 1] * SIDE, 0
            while step < steps:
                to, barrier, column = ring + stage * STAGE_BYTES, full + stage * 8, step * COLUMNS
                mbarrier_wait(empty + stage * 8, parity)
                mbarrier_arrive_expect_tx(barrier, STAGE_BYTES)
                load_tile_2d(to, a_map, column, m0, barrier)
                load_tile_2d(to + TILE_BYTES, a_map, column, m0 + rows_a, barrier)
                load_tile_2d(to + 2 * TILE_BYTES, b_map, column, n0, barrier)
                load_tile_2d(to + 3 * TILE_BYTES, b_map, column, n0 + rows_b, barrier)
                stage += 1
                if stage == STAGES:
                    stage = 0
                    parity ^= 1
                step += 1
            t += cuda.gridDim.x

    return run


@cache
def gram_kernel() -> Any:
    """The kernel."""
    produce, multiply, all_done = _producer(), _multiply(), wgmma_wait_all(SUMS)
    RING, HALF, EIGHTS = STAGES * STAGE_BYTES, TILE_BYTES // GROUPS, SIDE // 8

    def adding(first: int) -> Any:
        @jit(device=True)
        def run(total, acc):
            for j in range(16):
                total[first + j] += acc[first + j]

        return run

    add = unrolled([adding(first) for first in range(0, SUMS, 16)])

    def each(made: Any) -> Any:
        """What `made` makes for each value of a thread: its number, its row and its column, counted from the thread's first."""
        return unrolled([unrolled([made(4 * j + 2 * h + e, 8 * h, 8 * j + e) for h in range(2) for e in range(2)]) for j in range(EIGHTS)])

    def kernel_value(AT: int, DOWN: int, ACROSS: int) -> Any:
        @jit(device=True)
        def run(total, norms_a, norms_b, m, n, M, N, unscale, power, symmetric):
            row, column = m + DOWN, n + ACROSS
            if row < M and column < N:
                squared = norms_a[row] + norms_b[column] - 2.0 * (total[AT] * unscale)
                total[AT] = 1.0 if symmetric != 0 and row == column else exp2(power * max(squared, 0.0))

        return run

    def negative(AT: int, DOWN: int, ACROSS: int) -> Any:
        @jit(device=True)
        def run(total, unscale):
            total[AT] = -(total[AT] * unscale)

        return run

    def fetching(AT: int, DOWN: int, ACROSS: int) -> Any:
        @jit(device=True)
        def run(old, k, m, n, M, N, down, across, least):
            row, column = m + DOWN, n + ACROSS
            if row < M and column < N and column - row >= least:
                old[AT] = k[i8(row) * down + i8(column) * across]

        return run

    def storing(AT: int, DOWN: int, ACROSS: int) -> Any:
        @jit(device=True)
        def run(total, old, k, m, n, M, N, down, across, least, added):
            row, column = m + DOWN, n + ACROSS
            if row < M and column < N and column - row >= least:
                k[i8(row) * down + i8(column) * across] = total[AT] + old[AT] if added != 0 else total[AT]

        return run

    value, negate, fetch, store = each(kernel_value), each(negative), each(fetching), each(storing)

    @jit(device=True)
    def put(total, old, k, m, n, M, N, down, across, least, added):
        # All loads come first: one latency, where a load behind every store would be 64 of them.
        if added != 0:
            fetch(old, k, m, n, M, N, down, across, least)
        store(total, old, k, m, n, M, N, down, across, least, added)

    @jit(launch_bounds=(THREADS, 1))
    def gram_wgmma_kernel(maps, order, norms_a, norms_b, k, count, steps, rows_a, rows_b, M, N, pitch, unscale, power, symmetric, added):
        """k[m][n] = exp(−γ max(|a[m]|² + |b[n]|² − 2·Σ a[m]·b[n], 0)), or that added to what is there, or what is there minus Σ a[m]·b[n].

        gemm    GM, GN, GK = M, N, 3 products of K features; K in `steps` of 64.
        grid    as many blocks as multiprocessors; block i takes the tiles i, i + grid, … of `order`.
        block   two warpgroups that multiply, one warp of which a single thread has tiles fetched.
        owns    block 128 × 128 at a time, warpgroup 64 × 128, thread 2 columns of 8, every 8th row: 64 sums of a step, 64 totals.
        shared  three stages of 64 KiB (both halves of 128 rows of a and of b), and their barriers.
        moves   4 bytes per feature: a once per column of tiles, b once per row of tiles, out of L2; symmetric tiles read half as often. k is written
                once, and read once where it is added to.
        needs   compute capability 9.0; halves whose width is a multiple of 64.
        source  H. Ootomo, R. Yokota, "Recovering single precision accuracy from tensor cores …", IJHPCA 36 (2022).
        """
        memory = cuda.shared.array(0, np.uint8)
        ring = (byte_address_shared(memory) + (ALIGNMENT - 1)) & -ALIGNMENT
        full = ring + RING
        empty = full + STAGES * 8
        tid = cuda.threadIdx.x
        lane, warp = tid & 31, tid >> 5
        if tid == 0:
            for stage in range(STAGES):
                mbarrier_init(full + 8 * stage, 1)
                mbarrier_init(empty + 8 * stage, WARPS)
            fence_mbarrier_init()
        cuda.syncthreads()
        if warp == WARPS:
            if lane == 0:
                produce(byte_address_global(maps), ring, full, empty, order, count, steps, rows_a, rows_b)
        else:
            acc = cuda.local.array(SUMS, f4)
            total = cuda.local.array(SUMS, f4)
            group, stage, parity, t = warp >> 2, 0, 0, cuda.blockIdx.x
            while t < count:
                for j in range(SUMS):
                    total[j] = 0.0
                step = 0
                while step < steps:
                    mbarrier_wait(full + stage * 8, parity)
                    a = ring + stage * STAGE_BYTES
                    multiply(acc, a + group * HALF, a + 2 * TILE_BYTES)
                    all_done(acc)
                    if lane == 0:
                        mbarrier_arrive(empty + stage * 8)
                    # Beside these additions the other warpgroup multiplies.
                    add(total, acc)
                    stage += 1
                    if stage == STAGES:
                        stage = 0
                        parity ^= 1
                    step += 1
                m = order[2 * t] * SIDE + group * (SIDE // GROUPS) + (warp & 3) * 16 + (lane >> 2)
                n = order[2 * t + 1] * SIDE + (lane & 3) * 2
                if added == SUBTRACTED:
                    negate(total, unscale)
                else:
                    value(total, norms_a, norms_b, m, n, M, N, unscale, power, symmetric)
                if symmetric == 0:
                    put(total, acc, k, m, n, M, N, pitch, 1, -ANY, added)
                else:
                    if added != SUBTRACTED:
                        put(total, acc, k, m, n, M, N, pitch, 1, 0, added)
                    put(total, acc, k, m, n, M, N, 1, pitch, 0 if added == SUBTRACTED else 1, added)
                t += cuda.gridDim.x

    return gram_wgmma_kernel


def launch_gram(
    a: tuple[Any, Any, int],
    b: tuple[Any, Any, int],
    k: Any,
    sizes: tuple[int, int, int],
    pitch: int,
    gamma: float,
    unscale: float,
    multiprocessors: int,
    *,
    first: tuple[int, int] = (0, 0),
    symmetric: bool = False,
    added: bool = False,
    subtract: bool = False,
) -> Launch:
    """Launch of `gram_wgmma_kernel` for rows `first` … of a and b, `sizes` = M, N and the width.

    a and b are (halves, norms, rows): halves a flat uint16 array of hi and then lo, rows × width each; norms float32, from the first row of the
    product on. `unscale` is one over the product of the powers of two that their rows were scaled by. k is a flat float32 array.
    With `subtract` the products are subtracted from it, of a symmetric one on and below the diagonal only (norms and γ do not matter then).
    """
    (halves_a, norms_a, rows_a), (halves_b, norms_b, rows_b), (M, N, width) = a, b, sizes
    if width % COLUMNS:
        raise ValueError(f"halves of {width} features are no multiple of {COLUMNS}")
    order = tiles(M, N, symmetric)
    box = (COLUMNS, SIDE)
    maps = tensor_maps.upload(
        tensor_maps.encode_tiled(halves_a, (width, 2 * rows_a - first[0]), box, first=first[0] * width),
        tensor_maps.encode_tiled(halves_b, (width, 2 * rows_b - first[1]), box, first=first[1] * width),
    )
    order_there = constant(order.reshape(-1))
    whole = (len(order), width // COLUMNS, rows_a, rows_b, M, N, pitch)
    scalars = (
        *(np.int32(v) for v in whole),
        np.float32(unscale),
        np.float32(-gamma * LOG2E),
        np.int32(symmetric),
        np.int32(SUBTRACTED if subtract else added),
    )
    args = (maps, order_there, norms_a, norms_b, k, *scalars)
    return Launch(gram_kernel(), min(len(order), multiprocessors), THREADS, args, SHARED_BYTES, keep=(maps, order_there, halves_a, halves_b))
