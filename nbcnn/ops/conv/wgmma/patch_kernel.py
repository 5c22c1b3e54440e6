"""The patch kernel: a patch of the source stays in shared memory for all taps; blocks stay for many tiles."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit, types, u4
from nbcnn.ops.conv.wgmma.epilogue import activated
from nbcnn.ops.conv.wgmma.patch import (
    BARRIER_BYTES,
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    SQUARE,
    PatchTile,
    Window,
    moves_registers,
    patch_bytes,
    patch_extent,
    patch_load,
    stage_bytes,
    sums_bytes,
    threads_of,
)
from nbcnn.ops.conv.wgmma.patch_epilogue import (
    BLOCK_BYTES,
    filter_moments,
    put_fragments,
    put_transposed,
    square_moments,
    square_place,
    store_pooled,
)
from nbcnn.ops.conv.wgmma.patch_gradient import leave_sums, put_sums, sign_words, take_signs, take_staged
from nbcnn.ops.conv.wgmma.phases import phase_in_rounds, stages_of, taps_of
from nbcnn.ops.conv.wgmma.ring import aligned, claim_stage, init_ring, next_stage, skip_stages
from nbcnn.ops.conv.wgmma.tile import KINDS, WARPGROUP
from nbcnn.ops.kernel.loops import unrolled
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.mbarrier import bar_sync, fence_mbarrier_init, mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait
from nbcnn.ops.ptx.tma import (
    commit_stores,
    fence_async_shared,
    fence_tensor_map,
    load_tile_2d,
    load_tile_4d,
    store_tile_4d,
    wait_stores,
    wait_stores_read,
)
from nbcnn.ops.ptx.vector import load1_if
from nbcnn.ops.ptx.wgmma import (
    K_STEP,
    k_major,
    k_major_rows,
    registers_dec,
    registers_inc,
    wgmma_bf16,
    wgmma_commit,
    wgmma_fence,
    wgmma_settle,
    wgmma_tf32,
    wgmma_wait,
    wgmma_wait_all,
)

u8 = types.uint64
PATCHES = 2


@cache
def _place(tile: PatchTile) -> Any:
    """Device function (tile_m, P, Q) -> image, line, column of the first pixel of a tile."""
    TN, TH, TW = tile.TN, tile.TH, tile.TW

    @jit(device=True)
    def run(tile_m, P, Q):
        across = Q // TW
        line = tile_m // across
        down = P // TH
        group = line // down
        return group * TN, (line - group * down) * TH, (tile_m - line * across) * TW

    return run


@cache
def _multiply_tap(tile: PatchTile, kind_name: str, w: Window) -> Any:
    """Device function (acc, a0, a1, b): acc += A·Bᵀ over 128 bytes of channels of one tap; a0, a1 start a warpgroup's squares, b the filters.

    Where products are swapped, acc += B·Aᵀ; a0, a1 then start strips.
    """
    multiply = wgmma_tf32 if kind_name == "tf32" else wgmma_bf16
    _, PW = patch_extent(tile, w)
    source, halves = k_major_rows(PW * ROW_BYTES), tile.strips if tile.swapped else tile.BM // tile.groups // 64
    SWAPPED, columns = tile.swapped, tile.strip if tile.swapped else tile.BN

    def instruction(half: int, step: int) -> Any:
        product = multiply(columns, half * columns // 2)
        MORE, SECOND = step * K_STEP, half == 1

        @jit(device=True)
        def run(acc, a0, a1, b):
            product(acc, (a1 if SECOND else a0) + u8(MORE), b + u8(MORE), 1)

        @jit(device=True)
        def run_swapped(acc, a0, a1, b):
            product(acc, b + u8(MORE), (a1 if SECOND else a0) + u8(MORE), 1)

        return run_swapped if SWAPPED else run

    every = unrolled([instruction(half, step) for half in range(halves) for step in range(4)])

    @jit(device=True)
    def run(acc, a0, a1, b):
        wgmma_fence()
        every(acc, source(a0), source(a1), k_major(b))
        wgmma_commit()

    return run


@cache
def correlate_patches(tile: PatchTile, kind_name: str, w: Window, epilogue: str, activation: str = "", after: Any = None) -> Any:
    """The kernel for one tile, precision and window. epilogue: "rows", "mask" (only where x > 0), "pool", "moments" or "interleave" (four phases).

    Or "sums" of the gradient behind `activation` (`patch_gradient.py`), with "mask" in front where y masks. In front of a mask and of sums may stand
    "add", where a second gradient is added, and before that "interleave". after: the device function of an activation; a ReLU is a floor of 0.
    """
    kind = KINDS[kind_name]
    words = epilogue.split()
    MOVED = moves_registers(tile, words[-1])
    give_registers, take_registers = registers_dec(PRODUCER_REGISTERS), registers_inc(CONSUMER_REGISTERS)
    THREADS, TURNS, STAGES, BN, CHANNELS = threads_of(tile, words[-1]), tile.turns, tile.slots, tile.BN, kind.channels
    WARPGROUPS, SHARING = tile.groups * TURNS, 4 * tile.groups
    WARPS = 4 * WARPGROUPS
    PATCH, PATCH_LOAD, FILTERS, (PH, PW) = patch_bytes(tile, w), patch_load(tile, w), BN * ROW_BYTES, patch_extent(tile, w)
    RING, RESULTS = PATCHES * PATCH, PATCHES * PATCH + STAGES * FILTERS
    BARRIERS = RESULTS + stage_bytes(tile, kind)
    HALVES, EIGHTS, WIDE = tile.BM // tile.groups // 64, BN // 8, ROW_BYTES // kind.result
    COLUMNS = BN // WIDE
    SWAPPED, SUMS = tile.swapped, HALVES * EIGHTS * 4
    SECOND = (tile.strips - 1) * (tile.TH // SQUARE) if SWAPPED else HALVES - 1
    MINE = HALVES * COLUMNS * BLOCK_BYTES
    R, S, STRIDE, SOURCES, ALL_S = w.R, w.S, w.stride, w.stride * w.stride, w.S * w.stride
    POOL, INTERLEAVE, MASK, MOMENTS = epilogue == "pool", "interleave" in words, words[-1] == "mask", epilogue == "moments"
    SUMS_OF_NORM, ADD, SIGNS = "sums" in words, "add" in words, "sums" in words and "mask" in words
    STAGED, SIGN_WORDS = MASK or SUMS_OF_NORM, sign_words(tile) if SIGNS else 1
    PHASES, KEEPS, IDLE = 4 if INTERLEAVE else 1, tile.keeps, w.spans is not None and w.spans.busy < 4
    MAPS = PHASES * (4 if SUMS_OF_NORM or ADD else 2 if MASK else 1)
    phase_of, taps_of_phase, stages_of_tile = phase_in_rounds(w.spans), taps_of(w.spans, R, S), stages_of(w.spans, R, S)
    place, multiply = _place(tile), _multiply_tap(tile, kind_name, w)
    put, pool = (put_transposed if SWAPPED else put_fragments)(tile, kind_name, MASK), store_pooled(tile, kind_name)
    activate, ACTIVATES = activated(after, SUMS), after is not None
    square_at, take_more, signs_of = square_place(tile), take_staged(tile, kind_name), take_signs(tile, kind_name)
    put_gradient, leave = put_sums(tile, kind_name, activation, SIGNS), leave_sums(tile)
    init_filters, claim_filters, next_filters = init_ring(STAGES, SHARING), claim_stage(FILTERS), next_stage(STAGES)
    init_patches, claim_patch, next_patch = init_ring(PATCHES, SHARING), claim_stage(PATCH_LOAD), next_stage(PATCHES)
    skip_filters, skip_patches = skip_stages(STAGES), skip_stages(PATCHES)
    one_running, all_done, settle = wgmma_wait(1), wgmma_wait_all(SUMS), wgmma_settle(SUMS)
    first_group, second_group = bar_sync(1, WARPGROUP), bar_sync(2, WARPGROUP)

    @jit(device=True)
    def join(group):
        if group == 0:
            first_group()
        else:
            second_group()

    moments, GROUPS = square_moments(tile, kind_name, first_group), tile.groups
    SUM_BYTES = sums_bytes(tile, kind, words[-1]) // WARPGROUPS
    moments_of_second, moments_of_filters = square_moments(tile, kind_name, second_group), filter_moments(tile, kind_name)

    @jit(device=True)
    def square_rows(square):
        """Rows of a patch before those of a square of the tile."""
        column, line, image = square_at(square)
        return (image * PH + line * SQUARE) * PW + column * SQUARE

    @jit(device=True)
    def fetch(map_, stage, barrier, square, image, h0, w0, n0):
        """One thread has the squares of its warpgroup brought to the stage, when what was stored from there has been read."""
        wait_stores_read()
        mbarrier_arrive_expect_tx(barrier, MINE)
        for half in range(HALVES):
            right, below, further = square_at(square + half)
            wx, hx, nx = w0 + right * SQUARE, h0 + below * SQUARE, image + further
            for column in range(COLUMNS):
                load_tile_4d(stage + (half * COLUMNS + column) * BLOCK_BYTES, map_, n0 + column * WIDE, wx, hx, nx, barrier)

    @jit(launch_bounds=(THREADS, tile.blocks))
    def correlate_patches_kernel(maps, b, biased, floor, y, second, weight, bias, mean, rstd, N, C, P, Q, K, top, left, across, tiles):
        """y[m,n] = epilogue(max(floor, Σ_k source[m,k]·filter[n,k] + b[n])): see `correlation.py`, `patch.py`. b has `biased` elements, K or none.
        second: where the argmax of a pooling goes, or moments or sums, each warpgroup's squares one chunk. weight, bias, mean, rstd: of the norm
        that the sums are for.

        gemm    GM = N·P·Q, GN = K (of each phase), GK = R·S·C.
        grid    `resident` blocks; each takes tiles blockIdx, blockIdx + gridDim, … of the tiles (pixels, phase, channels), or of phases of
                unequal taps (pixels, channels, phase) in rounds (`phases.py`). A phase without taps loads nothing.
        block   `groups` warpgroups that multiply (with turns two), one warp of which a single thread has patches and filters fetched, tiles ahead;
                where registers move it is a warpgroup, which keeps 40 of its 168 per thread, and the others have 232.
        owns    block BM × BN, warpgroup BM/groups × BN in squares of 8×8 pixels, thread 2 columns of 8, every 8th row; of swapped products 2
                filters and 2 pixels of 8 each.
        shared  `shared_bytes(tile)`: two patches, the ring of filters, results on their way out, barriers, and sums for moments.
        swapped filters are A's rows and pixels B's columns, which come transposed to the stage; moments are taken in registers.
        turns   the two warpgroups multiply alternately: each waits at its barrier `turn` until the other has issued its last product, and so stores
                its results while the other multiplies. Without turns the tensor cores wait for every epilogue.
        moves   the source (PH·PW)/(TH·TW) times for every tile along GN, filters once per tile, both out of L2, y once; with sums the norm's x, too,
                and where it is asked for the y that masks and the second gradient.
        needs   compute capability 9.0; C in whole rows of 128 bytes (TMA reads zeros behind the source's own), K, P and Q multiples of 8.
        source  NVIDIA, PTX ISA, "Asynchronous warpgroup level matrix instructions": strides and swizzles of K-major operands.
        """
        memory = cuda.shared.array(0, np.uint8)
        patches = aligned(byte_address_shared(memory))
        ring = patches + RING
        full = patches + BARRIERS
        empty = full + STAGES * 8
        patch_full = empty + STAGES * 8
        patch_empty = patch_full + PATCHES * 8
        mask_full = patch_empty + PATCHES * 8
        turn = mask_full + WARPGROUPS * 8
        sums_at = patches + (BARRIERS + BARRIER_BYTES)
        t = cuda.threadIdx.x
        lane = t & 31
        warp = t >> 5
        tiles_of_phase = (K + (BN - 1)) // BN
        source_map = byte_address_global(maps)
        filter_map = source_map + u8(SOURCES * ROW_BYTES)
        output_map = filter_map + u8(ROW_BYTES)
        # Behind the map of the output of each phase come those of x (or the mask), y and the second gradient.
        staged_map = output_map + u8(PHASES * ROW_BYTES)
        signs_map = staged_map + u8(PHASES * ROW_BYTES)
        more_map = signs_map + u8(PHASES * ROW_BYTES)
        if t == 0:
            init_filters(full, empty)
            init_patches(patch_full, patch_empty)
            for group in range(WARPGROUPS):
                mbarrier_init(mask_full + 8 * group, 1)
                # Every warp passes the turn: so none has missed the last one when the next comes, however short tiles are.
                mbarrier_init(turn + 8 * group, 4)
            fence_mbarrier_init()
        cuda.syncthreads()
        tile_at = cuda.blockIdx.x
        if warp >= WARPS:
            if MOVED:
                give_registers()
            if t == 32 * WARPS:
                stage, parity, patch, patch_parity = 0, 1, 0, 1
                for i in range(SOURCES + 1):
                    fence_tensor_map(source_map + u8(i * ROW_BYTES))
                while tile_at < tiles:
                    tile_m = tile_at // across
                    tile_n = tile_at - tile_m * across
                    image, h0, w0 = place(tile_m, P, Q)
                    phase, r0, s0 = 0, 0, 0
                    if INTERLEAVE:
                        phase, tile_n = phase_of(tile_at, tile_n, tiles_of_phase)
                        r0, s0 = phase >> 1, phase & 1
                    row = phase * K + tile_n * BN
                    first_r, end_r, first_s, end_s = taps_of_phase(phase)
                    for source in range(SOURCES):
                        U, V = source // STRIDE, source % STRIDE
                        # Line 2·(i + a) + U − top of the source is line i + a + (U − top) // 2 of the patch's parity.
                        h = h0 + r0 + ((U - top) >> STRIDE - 1)
                        w_ = w0 + s0 + ((V - left) >> STRIDE - 1)
                        c = 0
                        if IDLE and (first_r == end_r or first_s == end_s):
                            c = C
                        while c < C:
                            barrier = claim_patch(patch_full, patch_empty, patch, patch_parity)
                            load_tile_4d(patches + patch * PATCH, source_map + u8(source * ROW_BYTES), c, w_, h, image, barrier)
                            patch, patch_parity = next_patch(patch, patch_parity)
                            for r in range(first_r, end_r):
                                for s in range(first_s, end_s):
                                    tap = (r * STRIDE + U) * ALL_S + s * STRIDE + V
                                    if not KEEPS or tile_at == cuda.blockIdx.x:
                                        barrier = claim_filters(full, empty, stage, parity)
                                        load_tile_2d(ring + stage * FILTERS, filter_map, tap * C + c, row, barrier)
                                        stage, parity = next_filters(stage, parity)
                            c += CHANNELS
                    tile_at += cuda.gridDim.x
        else:
            if MOVED:
                take_registers()
            signs = cuda.local.array(SIGN_WORDS, u4)
            acc = cuda.local.array(SUMS, f4)
            stage, parity, patch, patch_parity = 0, 0, 0, 0
            group = warp >> 2
            in_group = t & WARPGROUP - 1
            results = patches + RESULTS + group * MINE
            square = group * HALVES if TURNS == 1 else 0
            rows0 = square_rows(square) * ROW_BYTES
            rows1 = square_rows(square + SECOND) * ROW_BYTES
            staged_parity, turn_parity = 0, 1
            staged, memory_of_sums = mask_full + group * 8, sums_at + group * SUM_BYTES
            steps, chunks = C // CHANNELS * SOURCES, tiles // tiles_of_phase * GROUPS
            if TURNS > 1 and group == 1:
                # The first tile is the other's.
                tile_at += cuda.gridDim.x
                turn_parity = 0
                others, their_filters = stages_of_tile(cuda.blockIdx.x, across, steps)
                patch, patch_parity = skip_patches(patch, patch_parity, others)
                stage, parity = skip_filters(stage, parity, their_filters)
                if KEEPS:
                    parity = 0
            if in_group == 0 and not POOL:
                for i in range(MAPS):
                    fence_tensor_map(output_map + u8(i * ROW_BYTES))
            while tile_at < tiles:
                tile_m = tile_at // across
                tile_n = tile_at - tile_m * across
                image, h0, w0 = place(tile_m, P, Q)
                phase = 0
                if INTERLEAVE:
                    phase, tile_n = phase_of(tile_at, tile_n, tiles_of_phase)
                first_r, end_r, first_s, end_s = taps_of_phase(phase)
                taps = (end_r - first_r) * (end_s - first_s)
                n0 = tile_n * BN
                for j in range(0 if SWAPPED or ADD else EIGHTS):
                    n = n0 + (lane & 3) * 2 + 8 * j
                    b0, b1 = load1_if(b, n, n < biased), load1_if(b, n + 1, n < biased)
                    for half in range(HALVES):
                        for h in range(2):
                            acc[(half * EIGHTS + j) * 4 + 2 * h] = b0
                            acc[(half * EIGHTS + j) * 4 + 2 * h + 1] = b1
                for h in range(2 if SWAPPED and not ADD else 0):
                    n = n0 + (warp & 3) * 16 + (lane >> 2) + 8 * h
                    first = load1_if(b, n, n < biased)
                    for j in range(SUMS // 4):
                        acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1] = first, first
                if SIGNS:
                    if in_group == 0:
                        fetch(signs_map + u8(phase * ROW_BYTES), results, staged, square, image, h0, w0, n0)
                    mbarrier_wait(staged, staged_parity)
                    staged_parity ^= 1
                    signs_of(signs, results, warp, lane)
                    fence_async_shared()
                    join(group)
                if ADD:
                    if in_group == 0:
                        fetch(more_map + u8(phase * ROW_BYTES), results, staged, square, image, h0, w0, n0)
                    mbarrier_wait(staged, staged_parity)
                    staged_parity ^= 1
                    take_more(acc, results, warp, lane)
                    settle(acc)
                    # What is read here is overwritten by TMA, whose writes are not ordered behind these reads by a barrier alone.
                    fence_async_shared()
                    join(group)
                if STAGED and in_group == 0:
                    fetch(staged_map + u8(phase * ROW_BYTES), results, staged, square, image, h0, w0, n0)
                if TURNS > 1:
                    mbarrier_wait(turn + group * 8, turn_parity)
                    turn_parity ^= 1
                previous, step = -1, 0
                if IDLE and taps == 0:
                    step = steps
                while step < steps:
                    mbarrier_wait(patch_full + patch * 8, patch_parity)
                    start = patches + patch * PATCH
                    tap = 0
                    line = first_r * (PW * ROW_BYTES)
                    while tap < taps:
                        s = first_s * ROW_BYTES
                        while s < end_s * ROW_BYTES:
                            mbarrier_wait(full + stage * 8, parity)
                            at = start + (line + s)
                            multiply(acc, at + rows0, at + rows1, ring + stage * FILTERS)
                            # The step before this one is done: its filters, and after the last tap its patch, may be overwritten.
                            one_running()
                            if lane == 0 and previous >= 0:
                                if not KEEPS:
                                    mbarrier_arrive(empty + previous * 8)
                                if tap == 0:
                                    mbarrier_arrive(patch_empty + (patch ^ 1) * 8)
                            previous = stage
                            stage, parity = next_filters(stage, parity)
                            if KEEPS:
                                # Filters that stay have ended the first phase of their barrier, and no other begins.
                                parity = 0
                            s += ROW_BYTES
                            tap += 1
                        line += PW * ROW_BYTES
                    patch, patch_parity = next_patch(patch, patch_parity)
                    step += 1
                if TURNS > 1 and lane == 0:
                    mbarrier_arrive(turn + (group ^ 1) * 8)
                all_done(acc)
                if lane == 0 and (not IDLE or taps > 0):
                    if not KEEPS:
                        mbarrier_arrive(empty + previous * 8)
                    mbarrier_arrive(patch_empty + (patch ^ 1) * 8)
                if ACTIVATES:
                    activate(acc)
                chunk = (tile_m * PHASES + phase) * GROUPS + square // HALVES
                if STAGED:
                    mbarrier_wait(staged, staged_parity)
                    staged_parity ^= 1
                else:
                    if in_group == 0 and not POOL:
                        wait_stores_read()
                    join(group)
                if SUMS_OF_NORM:
                    put_gradient(acc, signs, results, warp, lane, n0, K, weight, bias, mean, rstd, memory_of_sums, second, chunk, chunks)
                else:
                    put(acc, floor, results, warp, lane)
                if POOL:
                    join(group)
                    pool(results, y, second, in_group, square, image, h0, w0, n0, N, P, Q, K)
                else:
                    fence_async_shared()
                    join(group)
                    if in_group == 0:
                        for half in range(HALVES):
                            right, below, further = square_at(square + half)
                            wx, hx, nx = w0 + right * SQUARE, h0 + below * SQUARE, image + further
                            for column in range(COLUMNS):
                                at = results + (half * COLUMNS + column) * BLOCK_BYTES
                                channel = n0 + column * WIDE
                                store_tile_4d(output_map + u8(phase * ROW_BYTES), channel, wx, hx, nx, at)
                        commit_stores()
                if SUMS_OF_NORM and not SWAPPED:
                    leave(memory_of_sums, second, in_group, n0, K, chunk, chunks)
                    join(group)
                if MOMENTS:
                    if SWAPPED:
                        moments_of_filters(acc, second, warp, lane, n0, K, chunk, chunks)
                    elif group == 0:
                        moments(results, memory_of_sums, second, in_group, n0, K, chunk, chunks)
                    else:
                        moments_of_second(results, memory_of_sums, second, in_group, n0, K, chunk, chunks)
                tile_at += TURNS * cuda.gridDim.x
                if TURNS > 1:
                    others, their_filters = stages_of_tile(tile_at - cuda.gridDim.x, across, steps)
                    patch, patch_parity = skip_patches(patch, patch_parity, others)
                    stage, parity = skip_filters(stage, parity, their_filters)
                    if KEEPS:
                        parity = 0
            if in_group == 0 and not POOL:
                wait_stores()

    return correlate_patches_kernel
