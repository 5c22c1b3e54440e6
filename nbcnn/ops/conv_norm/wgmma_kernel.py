"""The kernel of a convolution with its EvoNorm on Hopper's tensor cores: a warpgroup makes all pixels of 64 filters of an image, or of a part.

The product is transposed: its rows are 64 filters, its columns the pixels of a few lines of the image, so that a thread has two
channels and nothing but sums of their pixels to make statistics of. The source comes line by line with its border, as TMA brings it,
and the columns run through the border too: column p of tap (r, s) is then row p + r·PW + s of what lies in shared memory, for every tap,
and the few columns between two lines are thrown away. Where all of an image's (or part's) results fit into shared memory, they stay there
until its statistics are known, and are then normalised. Else the convolution's own output goes to memory, or rather to the second-level cache,
and the warpgroup reads back what it has written, while the other one multiplies.

What the kernel then writes is its `epilogue`:

    "s0"        y of EvoNorm-S0, z (the convolution's own output, which the gradients want), shift and std of groups
    "s0 infer"  y of EvoNorm-S0 alone
    "planes"    z, shift and std of planes: EvoNorm-B0 in training still wants the other images of the batch
    "b0 infer"  y of EvoNorm-B0 with the running variance
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit, types
from nbcnn.ops.activations.sigmoid import divide
from nbcnn.ops.conv.wgmma.ring import aligned, claim_stage, init_ring, next_stage
from nbcnn.ops.conv.wgmma.tile import KINDS, WARPGROUP
from nbcnn.ops.conv_norm.wgmma_epilogue import channel_numbers, merge, merged_lanes, normaliser, put_tile
from nbcnn.ops.conv_norm.wgmma_form import FILTER_BYTES, FILTERS, GROUPS, MOMENTS, THREADS, Form
from nbcnn.ops.kernel.loops import quotient, unrolled
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES
from nbcnn.ops.norms.plane import deviation_of
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.grid import receive, send
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
from nbcnn.ops.ptx.wgmma import K_STEP, k_major, wgmma_bf16, wgmma_commit, wgmma_fence, wgmma_tf32, wgmma_wait_all

u8 = types.uint64


@cache
def _multiply_tap(form: Form) -> Any:
    """Device function (acc, filters, source): acc += filters · source over 128 bytes of channels of one tap."""
    product = (wgmma_tf32 if form.kind == "tf32" else wgmma_bf16)(form.columns)

    def instruction(step: int) -> Any:
        MORE = step * K_STEP

        @jit(device=True)
        def run(acc, a, b):
            product(acc, a + u8(MORE), b + u8(MORE), 1)

        return run

    every = unrolled([instruction(step) for step in range(4)])

    @jit(device=True)
    def run(acc, filters, source):
        every(acc, k_major(filters), k_major(source))
        wgmma_commit()

    return run


@cache
def _filter_loads(form: Form) -> Any:
    """Device function (to, filter_map, C, k0, barriers): request all taps of 64 filters; each has a barrier of its own."""
    CHUNKS, TAPS, CHANNELS = form.chunks, form.R * form.S, KINDS[form.kind].channels

    @jit(device=True)
    def run(to, filter_map, C, k0, barriers):
        for chunk in range(CHUNKS):
            for tap in range(TAPS):
                at = chunk * TAPS + tap
                full = barriers + at * 8
                mbarrier_arrive_expect_tx(full, FILTER_BYTES)
                load_tile_2d(to + at * FILTER_BYTES, filter_map, tap * C + chunk * CHANNELS, k0, full)

    return run


@cache
def conv_norm_kernel(form: Form) -> Any:
    """The kernel of one form."""
    kind = KINDS[form.kind]
    R, S, Q, PW, CHUNKS, LINES, BUFFERS, PARTS, GROUP = form.R, form.S, form.Q, form.PW, form.chunks, form.lines, form.buffers, form.parts, form.group
    CHANNELS, TAPS, SUMS, BF16 = kind.channels, R * S, form.columns // 2, kind.result == 2
    PATCH, PATCH_LOAD, STAGE, ALL_FILTERS = form.patch_bytes, form.patch_load, form.stage_bytes, form.filter_bytes
    PATCHES, STAGES, STAGES_OF_GROUP = ALL_FILTERS, ALL_FILTERS + GROUPS * BUFFERS * PATCH, STAGE * form.stages
    SPARE = STAGES + GROUPS * STAGES_OF_GROUP
    BARRIERS = SPARE + ROW_BYTES
    KEEPS, NORMALISES, KEPT = form.epilogue in ("s0", "planes"), form.epilogue != "planes", form.kept > 0
    STORES = BF16 and (KEEPS or not KEPT)
    ALL_MOMENTS, ALL_SCALES, GROUP_MOMENTS = GROUPS * MOMENTS * FILTERS, GROUPS * FILTERS, MOMENTS * FILTERS
    multiply, finish, all_done, bring_filters = _multiply_tap(form), put_tile(form), wgmma_wait_all(SUMS), _filter_loads(form)
    numbers, normalise, over_pixels, over_parts = channel_numbers(form), normaliser(form), merged_lanes(4), merged_lanes(PARTS)
    init, claim, advance = init_ring(BUFFERS, 4), claim_stage(PATCH_LOAD), next_stage(BUFFERS)
    first_group, second_group = bar_sync(1, WARPGROUP), bar_sync(2, WARPGROUP)

    @jit(device=True)
    def join(group):
        if group == 0:
            first_group()
        else:
            second_group()

    @jit(launch_bounds=(THREADS, 1))
    def conv_evonorm_wgmma_kernel(maps, b, gamma, beta, v, running, raw, y, shift, std, packets, N, C, K, P, pad, slabs, share, eps):
        """raw = conv(x, w) + b; y = γ·raw·σ(v·raw)/s + β or γ·raw/max(√(running + eps), v·raw + s) + β; shift, std of every group.

        gemm    64 filters × P·(Q + S − 1) pixels with the borders between lines × R·S·C, for every image.
        grid    a multiple of `slabs` = K/64; the warpgroups of a slab's blocks take images one after another, or `share` lines each of the same.
        block   two warpgroups that multiply, each with a warp that has its source fetched.
        owns    per warpgroup an image's 64 channels (or a part); a tile of `lines` lines at a time, a thread two channels of a quarter of it.
        shared  `form.shared_bytes`: all taps of 64 filters, `buffers` tiles of source for each warpgroup, results.
        moves   x (lines + R − 1)/lines times, raw out if wanted or not kept, back if not kept, mostly from L2; y once; filters once per block.
        needs   compute capability 9.0; parts of an image all on the GPU at once. source: arXiv:2004.02967; NVIDIA, PTX ISA, wgmma.
        """
        memory = cuda.shared.array(0, np.uint8)
        moments = cuda.shared.array(ALL_MOMENTS, f4)
        scales = cuda.shared.array(ALL_SCALES, f4)
        base = aligned(byte_address_shared(memory))
        taps_full = base + BARRIERS
        t = cuda.threadIdx.x
        lane, warp = t & 31, t >> 5
        multiplies = warp < 4 * GROUPS
        group = warp >> 2 if multiplies else warp - 4 * GROUPS
        patches = base + PATCHES + group * (BUFFERS * PATCH)
        full = taps_full + 8 * CHUNKS * TAPS + group * (BUFFERS * 16)
        empty = full + BUFFERS * 8
        source_map = byte_address_global(maps)
        filter_map = source_map + u8(ROW_BYTES)
        raw_map = filter_map + u8(ROW_BYTES)
        if t == 0:
            for tap in range(CHUNKS * TAPS):
                mbarrier_init(taps_full + tap * 8, 1)
            for ring in range(GROUPS):
                first_full = taps_full + (8 * CHUNKS * TAPS + ring * BUFFERS * 16)
                init(first_full, first_full + BUFFERS * 8)
            fence_mbarrier_init()
        elif not multiplies and lane == 0:
            fence_tensor_map(source_map)
            fence_tensor_map(filter_map)
        cuda.syncthreads()
        number = cuda.blockIdx.x // slabs
        k0 = (cuda.blockIdx.x - number * slabs) * FILTERS
        worker = number * GROUPS + group
        image = quotient(worker, PARTS)
        part = worker - image * PARTS
        step = quotient(cuda.gridDim.x // slabs * GROUPS, PARTS)
        first_line = part * share
        last_line = min(P, first_line + share)
        if not multiplies:
            if lane == 0:
                buffer, parity = 0, 1
                # The first source goes ahead of the filters, which arrive tap by tap: the first product waits for as little as can be.
                brings_filters = group == 0
                while image < N:
                    line = first_line
                    while line < last_line:
                        for chunk in range(CHUNKS):
                            barrier = claim(full, empty, buffer, parity)
                            load_tile_4d(patches + buffer * PATCH, source_map, chunk * CHANNELS, -pad, line - pad, image, barrier)
                            if brings_filters:
                                bring_filters(base, filter_map, C, k0, taps_full)
                                brings_filters = False
                            buffer, parity = advance(buffer, parity)
                        line += LINES
                    image += step
        else:
            buffer, parity = 0, 0
            acc = cuda.local.array(SUMS, f4)
            sums = cuda.local.array(7, f4)
            of_channels = cuda.local.array(16, f4)
            in_group = t & WARPGROUP - 1
            own = (warp & 3) * 16 + (lane >> 2)
            chunk_of_row = (warp & 3) * 2 + ((lane >> 3) & 1)
            stages = base + STAGES + group * STAGES_OF_GROUP
            b0, b1 = b[k0 + own], b[k0 + own + 8]
            if STORES and in_group == 0:
                fence_tensor_map(raw_map)
            while image < N:
                for i in range(7):
                    sums[i] = 0.0
                if PARTS > 1:
                    image_packets = (image * K + k0) * PARTS + own
                    turn = packets[4 * (image_packets + part * FILTERS) + 1] + 1
                line, stage = first_line, stages
                while line < last_line:
                    for i in range(SUMS):
                        acc[i] = b1 if i & 2 else b0
                    filters, tap_full = base, taps_full
                    chunk_at = 0
                    while chunk_at < CHUNKS:
                        mbarrier_wait(full + buffer * 8, parity)
                        at = patches + buffer * PATCH
                        # Right before the products: with sums touched behind a fence, ptxas waits for every product before it issues the next.
                        wgmma_fence()
                        r = 0
                        while r < R:
                            s = 0
                            while s < S:
                                mbarrier_wait(tap_full, 0)
                                multiply(acc, filters, at + (r * PW + s) * ROW_BYTES)
                                filters, tap_full = filters + FILTER_BYTES, tap_full + 8
                                s += 1
                            r += 1
                        all_done(acc)
                        if lane == 0:
                            mbarrier_arrive(empty + buffer * 8)
                        buffer, parity = advance(buffer, parity)
                        chunk_at += 1
                    if BF16:
                        if STORES and in_group == 0:
                            wait_stores_read()
                        join(group)
                    to = (image * P + line) * Q * K + k0 + own
                    finish(acc, sums, stage, base + SPARE, raw, to, lane, chunk_of_row, min(LINES, last_line - line), K)
                    if STORES:
                        fence_async_shared()
                        join(group)
                        if in_group == 0:
                            store_tile_4d(raw_map, k0, 0, line, image, stage)
                            commit_stores()
                    if KEPT:
                        stage += STAGE
                    line += LINES
                if NORMALISES:
                    numbers(of_channels, gamma, beta, v, running, k0, in_group, eps)

                # Of each channel a quarter of the pixels is in each of four neighbouring lanes; what a part sends, one of them receives.
                for h in range(2):
                    away = divide(sums[2 + 3 * h], max(sums[0], 1.0))
                    n, mean, squares = over_pixels(sums[0], sums[1 + 3 * h] + away, sums[3 + 3 * h] - sums[2 + 3 * h] * away)
                    if lane & 3 == 0:
                        if PARTS > 1:
                            send(packets, image_packets + part * FILTERS + 8 * h, turn, mean, squares)
                        at_ = group * GROUP_MOMENTS + own + 8 * h
                        moments[at_], moments[at_ + FILTERS], moments[at_ + 2 * FILTERS] = sums[1 + 3 * h], mean, squares
                if PARTS > 1:
                    of = lane & PARTS - 1
                    each = f4(min(share, P - of * share) * Q)
                    for h in range(2):
                        mean, squares = receive(packets, image_packets + of * FILTERS + 8 * h, turn)
                        n, mean, squares = over_parts(each, mean, squares)
                        if lane & 3 == 0:
                            at_ = group * GROUP_MOMENTS + own + 8 * h
                            moments[at_ + FILTERS], moments[at_ + 2 * FILTERS] = mean, squares
                join(group)
                if in_group < FILTERS:
                    lead = quotient(in_group, GROUP) * GROUP
                    n, mean, squares, each = 0.0, 0.0, 0.0, f4(P * Q)
                    for i in range(GROUP):
                        at_ = group * GROUP_MOMENTS + lead + i
                        n, mean, squares = merge(n, mean, squares, each, moments[at_ + FILTERS], moments[at_ + 2 * FILTERS])
                    # Rounding may leave less than 0; not max, which drops a NaN.
                    s_ = deviation_of((0.0 if squares < 0.0 else squares) / n + eps)
                    scales[group * FILTERS + in_group] = s_
                    if KEEPS and part == 0 and in_group == lead:
                        to = image * quotient(K, GROUP) + quotient(k0 + lead, GROUP)
                        shift[to] = mean - moments[group * GROUP_MOMENTS + lead]
                        std[to] = s_
                if STORES and NORMALISES and not KEPT and in_group == 0:
                    wait_stores()
                join(group)
                if NORMALISES:
                    first, pixels = (image * P + first_line) * Q, (last_line - first_line) * Q
                    normalise(raw, y, stages, scales, group * FILTERS, of_channels, k0, in_group, first, pixels, K)
                image += step
            if STORES and in_group == 0:
                wait_stores_read()

    return conv_evonorm_wgmma_kernel
