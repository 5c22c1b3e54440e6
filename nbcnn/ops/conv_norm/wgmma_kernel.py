"""The kernel of a convolution with its EvoNorm on Hopper's tensor cores: a warpgroup makes all pixels of 64 filters of an image, or of a part.

The product is turned around: its rows are 64 filters, its columns the pixels of a few lines of the image, so that a thread has two
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

import math
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i4, jit, types, u4
from nbcnn.ops.activations.sigmoid import divide
from nbcnn.ops.conv.wgmma.tile import ALIGNMENT, KINDS, WARPGROUP
from nbcnn.ops.conv_norm.wgmma_epilogue import channel_numbers, merge, merged_lanes, normaliser, put_tile
from nbcnn.ops.conv_norm.wgmma_form import FILTER_BYTES, FILTERS, GROUPS, MOMENTS, THREADS, Form
from nbcnn.ops.kernel.loops import unrolled
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES
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
            product(acc, a + u8(MORE), b + u8(MORE), u4(1))

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
                full = barriers + u4(at * 8)
                mbarrier_arrive_expect_tx(full, u4(FILTER_BYTES))
                load_tile_2d(to + u4(at * FILTER_BYTES), filter_map, i4(i4(tap) * C + i4(chunk * CHANNELS)), k0, full)

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
    ALL_MOMENTS, ALL_SCALES, OWN = GROUPS * MOMENTS * FILTERS, GROUPS * FILTERS, MOMENTS * FILTERS
    multiply, finish, all_done, bring_filters = _multiply_tap(form), put_tile(form), wgmma_wait_all(SUMS), _filter_loads(form)
    numbers, normalise, over_pixels, over_parts = channel_numbers(form), normaliser(form), merged_lanes(4), merged_lanes(PARTS)
    first_group, second_group = bar_sync(1, WARPGROUP), bar_sync(2, WARPGROUP)

    @jit(device=True)
    def join(group):
        if group == i4(0):
            first_group()
        else:
            second_group()

    @jit(launch_bounds=(THREADS, 1))
    def conv_evonorm_wgmma_kernel(maps, b, gamma, beta, v, running, raw, y, shift, std, packets, N, C, K, P, pad, slabs, share, eps):
        """raw = conv(x, w) + b; y = γ·raw·σ(v·raw)/s + β or γ·raw/max(√(running + eps), v·raw + s) + β; shift, std of every group.

        gemm    64 filters × P·(Q + S − 1) pixels with the borders between lines × R·S·C, for every image.
        grid    a multiple of `slabs` = K/64; the warpgroups of a slab's blocks take images in turn, or `share` lines each of the same.
        block   two warpgroups that multiply, each with a warp that has its source fetched.
        owns    a warpgroup an image's 64 channels (or a part); a tile of `lines` lines at a time, a thread two channels of a quarter of it.
        shared  `form.shared_bytes`: all taps of 64 filters, `buffers` tiles of source for each warpgroup, results.
        moves   x (lines + R − 1)/lines times, raw out if wanted or not kept, back if not kept, mostly from L2; y once; filters once a block.
        needs   compute capability 9.0; parts of an image all on the GPU at once. source: arXiv:2004.02967; NVIDIA, PTX ISA, wgmma.
        """
        memory = cuda.shared.array(0, np.uint8)
        moments = cuda.shared.array(ALL_MOMENTS, f4)
        scales = cuda.shared.array(ALL_SCALES, f4)
        base = u4((byte_address_shared(memory) + u4(ALIGNMENT - 1)) & u4(0xFFFFFFFF - ALIGNMENT + 1))
        taps_full = base + u4(BARRIERS)
        t = i4(cuda.threadIdx.x)
        lane, warp = i4(t & i4(31)), i4(t >> i4(5))
        multiplies = warp < i4(4 * GROUPS)
        group = i4(warp >> i4(2)) if multiplies else i4(warp - i4(4 * GROUPS))
        patches = base + u4(PATCHES) + u4(group * i4(BUFFERS * PATCH))
        full = taps_full + u4(8 * CHUNKS * TAPS) + u4(group * i4(BUFFERS * 16))
        empty = full + u4(BUFFERS * 8)
        source_map = byte_address_global(maps)
        filter_map = source_map + u8(ROW_BYTES)
        raw_map = filter_map + u8(ROW_BYTES)
        if t == i4(0):
            for tap in range(CHUNKS * TAPS):
                mbarrier_init(taps_full + u4(tap * 8), u4(1))
            for slot in range(GROUPS * BUFFERS):
                even = taps_full + u4(8 * CHUNKS * TAPS + slot // BUFFERS * BUFFERS * 16 + slot % BUFFERS * 8)
                mbarrier_init(even, u4(1))
                mbarrier_init(even + u4(BUFFERS * 8), u4(4))
            fence_mbarrier_init()
        elif not multiplies and lane == i4(0):
            fence_tensor_map(source_map)
            fence_tensor_map(filter_map)
        cuda.syncthreads()
        number = i4(u4(cuda.blockIdx.x) // u4(slabs))
        k0 = i4((i4(cuda.blockIdx.x) - number * slabs) * i4(FILTERS))
        worker = i4(number * i4(GROUPS) + group)
        image, part = i4(u4(worker) // u4(PARTS)), i4(u4(worker) % u4(PARTS))
        step = i4(u4(u4(cuda.gridDim.x) // u4(slabs) * u4(GROUPS)) // u4(PARTS))
        first_line = i4(part * share)
        last_line = i4(min(P, i4(first_line + share)))
        slot, parity = i4(0), u4(0)
        if not multiplies:
            if lane == i4(0):
                # The first source goes ahead of the filters, which arrive tap by tap: the first product waits for as little as can be.
                brings_filters = group == i4(0)
                while image < N:
                    line = first_line
                    while line < last_line:
                        for chunk in range(CHUNKS):
                            here = u4(slot * i4(8))
                            mbarrier_wait(empty + here, parity ^ u4(1))
                            mbarrier_arrive_expect_tx(full + here, u4(PATCH_LOAD))
                            load_tile_4d(
                                patches + u4(slot * i4(PATCH)), source_map, i4(chunk * CHANNELS), i4(-pad), i4(line - pad), image, full + here
                            )
                            if brings_filters:
                                bring_filters(base, filter_map, C, k0, taps_full)
                                brings_filters = False
                            slot = i4(slot + i4(1))
                            if slot == i4(BUFFERS):
                                slot = i4(0)
                                parity = parity ^ u4(1)
                        line = i4(line + i4(LINES))
                    image = i4(image + step)
        else:
            acc = cuda.local.array(SUMS, f4)
            sums = cuda.local.array(7, f4)
            of_channels = cuda.local.array(16, f4)
            in_group = i4(t & i4(WARPGROUP - 1))
            own = i4((warp & i4(3)) * i4(16) + (lane >> i4(2)))
            chunk_of_row = i4((warp & i4(3)) * i4(2) + ((lane >> i4(3)) & i4(1)))
            stages = base + u4(STAGES) + u4(group * i4(STAGES_OF_GROUP))
            b0, b1 = b[k0 + own], b[k0 + own + i4(8)]
            if STORES and in_group == i4(0):
                fence_tensor_map(raw_map)
            while image < N:
                for i in range(7):
                    sums[i] = f4(0)
                if PARTS > 1:
                    image_packets = i4((image * K + k0) * i4(PARTS) + own)
                    turn = i4(packets[i4(4) * (image_packets + part * i4(FILTERS)) + i4(1)] + i4(1))
                line, stage = first_line, stages
                while line < last_line:
                    for i in range(SUMS):
                        acc[i] = b1 if i & 2 else b0
                    filters, tap_full = base, taps_full
                    chunk_at = i4(0)
                    while chunk_at < i4(CHUNKS):
                        mbarrier_wait(full + u4(slot * i4(8)), parity)
                        at = patches + u4(slot * i4(PATCH))
                        # Right before the products: with sums touched behind a fence, ptxas waits for every product before it issues the next.
                        wgmma_fence()
                        r = i4(0)
                        while r < i4(R):
                            s = i4(0)
                            while s < i4(S):
                                mbarrier_wait(tap_full, u4(0))
                                multiply(acc, filters, at + u4((r * i4(PW) + s) * i4(ROW_BYTES)))
                                filters, tap_full = filters + u4(FILTER_BYTES), tap_full + u4(8)
                                s = i4(s + i4(1))
                            r = i4(r + i4(1))
                        all_done(acc)
                        if lane == i4(0):
                            mbarrier_arrive(empty + u4(slot * i4(8)))
                        slot = i4(slot + i4(1))
                        if slot == i4(BUFFERS):
                            slot = i4(0)
                            parity = parity ^ u4(1)
                        chunk_at = i4(chunk_at + i4(1))
                    if BF16:
                        if STORES and in_group == i4(0):
                            wait_stores_read()
                        join(group)
                    to = i4((image * P + line) * i4(Q) * K + k0 + own)
                    finish(acc, sums, stage, base + u4(SPARE), raw, to, lane, chunk_of_row, i4(min(i4(LINES), i4(last_line - line))), K)
                    if STORES:
                        fence_async_shared()
                        join(group)
                        if in_group == i4(0):
                            store_tile_4d(raw_map, k0, i4(0), line, image, stage)
                            commit_stores()
                    if KEPT:
                        stage = stage + u4(STAGE)
                    line = i4(line + i4(LINES))
                if NORMALISES:
                    numbers(of_channels, gamma, beta, v, running, k0, in_group, eps)

                # Of each channel a quarter of the pixels is in each of four neighbouring lanes; what a part sends, one of them receives.
                for h in range(2):
                    away = divide(sums[2 + 3 * h], max(sums[0], f4(1)))
                    n, mean, squares = over_pixels(sums[0], sums[1 + 3 * h] + away, sums[3 + 3 * h] - sums[2 + 3 * h] * away)
                    if lane & i4(3) == i4(0):
                        if PARTS > 1:
                            send(packets, i4(image_packets + part * i4(FILTERS) + i4(8 * h)), turn, mean, squares)
                        at_ = i4(group * i4(OWN) + own + i4(8 * h))
                        moments[at_], moments[at_ + i4(FILTERS)], moments[at_ + i4(2 * FILTERS)] = sums[1 + 3 * h], mean, squares
                if PARTS > 1:
                    of = i4(lane & i4(PARTS - 1))
                    each = f4(i4(min(share, i4(P - of * share)) * i4(Q)))
                    for h in range(2):
                        mean, squares = receive(packets, i4(image_packets + of * i4(FILTERS) + i4(8 * h)), turn)
                        n, mean, squares = over_parts(each, mean, squares)
                        if lane & i4(3) == i4(0):
                            at_ = i4(group * i4(OWN) + own + i4(8 * h))
                            moments[at_ + i4(FILTERS)], moments[at_ + i4(2 * FILTERS)] = mean, squares
                join(group)
                if in_group < i4(FILTERS):
                    lead = i4(u4(in_group) // u4(GROUP)) * i4(GROUP)
                    n, mean, squares, each = f4(0), f4(0), f4(0), f4(i4(P * i4(Q)))
                    for i in range(GROUP):
                        at_ = i4(group * i4(OWN) + lead + i4(i))
                        n, mean, squares = merge(n, mean, squares, each, moments[at_ + i4(FILTERS)], moments[at_ + i4(2 * FILTERS)])
                    # Rounding may leave less than 0; not max, which drops a NaN.
                    s_ = f4(math.sqrt((f4(0) if squares < f4(0) else squares) / n + eps))
                    scales[group * i4(FILTERS) + in_group] = s_
                    if KEEPS and part == i4(0) and in_group == lead:
                        to = i4(image * i4(u4(K) // u4(GROUP)) + i4(u4(k0 + lead) // u4(GROUP)))
                        shift[to] = mean - moments[group * i4(OWN) + lead]
                        std[to] = s_
                if STORES and NORMALISES and not KEPT and in_group == i4(0):
                    wait_stores()
                join(group)
                if NORMALISES:
                    first, pixels = i4((image * P + first_line) * i4(Q)), i4((last_line - first_line) * i4(Q))
                    normalise(raw, y, stages, scales, i4(group * i4(FILTERS)), of_channels, k0, in_group, first, pixels, K)
                image = i4(image + step)
            if STORES and in_group == i4(0):
                wait_stores_read()

    return conv_evonorm_wgmma_kernel
