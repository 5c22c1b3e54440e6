"""The kernel of the portable tensor-core engine: an implicit GEMM by cp.async, ldmatrix and mma.sync (compute capability 8.0, in float16 7.5).

A ring of k-tiles in shared memory. In each step the block waits for the oldest k-tile, begins to copy the one that takes the slot which
was read last, and multiplies: one barrier per k-tile, which also says that everyone has left that slot. Float16 goes to shared memory through
registers, since 7.5 has no cp.async (loads).

Source: the multistage pipeline of CUTLASS (github.com/NVIDIA/cutlass, include/cutlass/gemm/threadblock/mma_multistage.h).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, i4, i8, jit, types, u4
from nbcnn.ops.conv.mma.epilogue import put_fragments, row_moments, store_partial, store_pooled, store_rows
from nbcnn.ops.conv.mma.loads import filter_rows, source_rows
from nbcnn.ops.conv.mma.product import fragment_corners, multiply_tile
from nbcnn.ops.conv.mma.rows import put_rows
from nbcnn.ops.conv.mma.tile import KINDS, ROW_BYTES, Tile
from nbcnn.ops.kernel.loops import quotient
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.cp_async import cp_async_commit, cp_async_wait, nothing

u8 = types.uint64


@cache
def gather_product(
    tile: Tile, kind_name: str, width: int, whole: bool, dilate: int, epilogue: str, bias: bool, after: Any, pooled: bool, vector: bool
) -> Any:
    """The kernel for a tile (without its split), and for

    width     elements of the source that are copied at once; whole: its channels are whole k-tiles; dilate: as in frame/correlation.py
    epilogue  "rows", "mask", "pool", "moments" or "partial", as in frame/epilogue.py; bias: there is one
    after     None, or the activation of what is no partial sum, a device function
    pooled    pixels are numbered window by window
    vector    the target's channels are a multiple of four.
    """
    kind = KINDS[kind_name]
    BM, BN, STAGES, STAGE = tile.BM, tile.BN, tile.stages, tile.stage_bytes
    AHEAD, RING, A_BYTES = tile.stages - 1, tile.ring_bytes, tile.BM * ROW_BYTES
    SUMS = tile.BM * tile.BN // tile.threads
    rows = put_rows(tile, dilate, pooled)
    start_source, fetch_source, land_source, ROWS = source_rows(tile, kind, width, whole, dilate)
    (fetch_filters, land_filters, FILTERS), corners, multiply = filter_rows(tile, kind), fragment_corners(tile), multiply_tile(tile, kind)
    HELD_A, HELD_B = (1, 1) if kind.asynchronous else (4 * ROWS, 4 * FILTERS)
    put, partial = put_fragments(tile), store_partial(tile, vector)
    pixels, windows = store_rows(tile, kind, bias, after, epilogue == "mask", vector), store_pooled(tile, kind, bias, vector)
    wait, wait_all, commit = cp_async_wait(tile.stages - 2), cp_async_wait(0), cp_async_commit
    if not kind.asynchronous:
        wait = wait_all = commit = nothing
    is_partial, is_pool, with_moments = epilogue == "partial", epilogue == "pool", epilogue == "moments"
    moments = row_moments(tile, kind, bias)

    @jit(launch_bounds=(tile.threads, tile.blocks))
    def gather_product_kernel(
        x, w, b, mask, y, second, GM, K, C, H, W, P, Q, R, S, stride, top, left, up, pitch, across, part, k_tiles, apart, y_apart, mask_apart
    ):  # fmt: skip
        """y[pixel m][n] = epilogue(Σ_k x[pixel m moved by the tap of k][channel of k] · w[phase][n][k] + b[n]).

        second: where the argmax of a pooling goes, or moments, a block's rows one chunk.
        gemm: GM pixels × K channels × k_tiles·128 bytes, in 4^up phases; w has rows of `pitch` bytes; pixels of x, y
        and mask lie `apart`, `y_apart` and `mask_apart` elements from each other.
        grid: (phases · tiles of BN · tiles of BM, parts of `part` k-tiles); block: WM×WN warps.
        owns: per block BM×BN results of one phase, per warp BM/WM × BN/WN.
        shared: stages·(BM + BN)·128 bytes, or the results; moves per block: GK/parts·(BM + BN) elements, and BM·BN results.
        """
        memory = cuda.shared.array(0, types.uint8)
        halves = cuda.shared.array(0, types.uint16)
        ring = byte_address_shared(memory)
        table = ring + RING
        phase = cuda.blockIdx.x & (1 << (2 * up)) - 1
        number = cuda.blockIdx.x >> 2 * up
        tile_m = quotient(number, across)
        m0 = tile_m * BM
        n0 = (number - tile_m * across) * BN
        right, below = phase & 1, phase >> 1
        rows(table, m0, GM, apart, H, W, P, Q, R, S, stride, top - below, left - right, up, below, right)
        cuda.syncthreads()

        tid = cuda.threadIdx.x
        offsets = cuda.local.array(ROWS, i4)
        masks = cuda.local.array(ROWS, u4)
        tap = cuda.local.array(3, i4)
        first = cuda.blockIdx.y * part
        count = min(first + part, k_tiles) - first
        start_source(offsets, masks, tap, table, first, C, S)
        source = byte_address_global(x)
        n = n0 + (tid >> 3)
        filters = byte_address_global(w) + u8(i8(phase * K + n) * pitch + first * ROW_BYTES + (tid & 7) * 16)

        held_a = cuda.local.array(HELD_A, u4)
        held_b = cuda.local.array(HELD_B, u4)
        acc = cuda.local.array(SUMS, f4)
        for i in range(SUMS):
            acc[i] = 0.0
        a, b_, chunk_a, chunk_b = corners()
        for s in range(AHEAD):
            if s < count:
                fetch_source(ring + s * STAGE, x, source, offsets, masks, tap, C, apart, W, R, S, halves, ring, held_a)
                fetch_filters(ring + (s * STAGE + A_BYTES), filters, pitch, K - n, held_b)
                land_source(ring + s * STAGE, held_a)
                land_filters(ring + (s * STAGE + A_BYTES), held_b)
                filters += u8(ROW_BYTES)
            commit()
        end = ring + STAGES * STAGE
        reading, writing = ring, ring + AHEAD * STAGE
        k = 0
        while k < count:
            wait()
            cuda.syncthreads()
            if k + AHEAD < count:
                fetch_source(writing, x, source, offsets, masks, tap, C, apart, W, R, S, halves, ring, held_a)
                fetch_filters(writing + A_BYTES, filters, pitch, K - n, held_b)
                filters += u8(ROW_BYTES)
            commit()
            multiply(acc, reading + a, reading + b_, chunk_a, chunk_b)
            if k + AHEAD < count:
                land_source(writing, held_a)
                land_filters(writing + A_BYTES, held_b)
            reading += STAGE
            writing += STAGE
            reading = ring if reading == end else reading
            writing = ring if writing == end else writing
            k += 1

        wait_all()
        cuda.syncthreads()
        put(acc, ring)
        cuda.syncthreads()
        if is_partial:
            plane = (cuda.blockIdx.y << 2 * up) + phase
            partial(ring, y, plane, m0, n0, GM, K)
        elif is_pool:
            windows(ring, b, y, second, m0, n0, GM, K)
        else:
            pixels(ring, table, b, mask, y, n0, K, y_apart, mask_apart)
            if with_moments:
                moments(ring, b, second, m0, n0, GM, K, tile_m, (GM + (BM - 1)) // BM)

    return gather_product_kernel
