"""The correlation kernel: images through TMA im2col, filters through TMA, wgmma, an epilogue through shared memory."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.conv.frame.correlation import Spans
from nbcnn.ops.conv.wgmma import epilogue as stores
from nbcnn.ops.conv.wgmma.mainloop import consumer, producer
from nbcnn.ops.conv.wgmma.phases import taps_of, tile_in_bands
from nbcnn.ops.conv.wgmma.ring import aligned, init_ring
from nbcnn.ops.conv.wgmma.tile import ALIGNMENT, KINDS, STEPS_OF_ROW, WARPGROUP, Tile, shared_bytes, stage_bytes
from nbcnn.ops.kernel.loops import quotient
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.mbarrier import bar_sync, fence_mbarrier_init
from nbcnn.ops.ptx.vector import load1_if


@cache
def correlate(
    tile: Tile, kind_name: str, epilogue: str, spans: Spans | None = None, tap: tuple[int, ...] = (STEPS_OF_ROW,), after: Any = None
) -> Any:
    """The kernel for one tile and precision. epilogue: "rows", "mask" (only where x > 0), "pool", "moments", "interleave" (four phases)
    or "interleave mask". spans: the taps of each phase, if not all have all. tap: as `steps_of_tap`. after: the
    device function of an activation; a ReLU is a floor of 0."""
    kind = KINDS[kind_name]
    THREADS, WARPS, STAGES, BM, BN = tile.threads, 4 * tile.groups, tile.slots, tile.BM, tile.BN
    RING = max(tile.slots * stage_bytes(tile, kind), shared_bytes(tile, kind) - ALIGNMENT - 256)
    HALVES, EIGHTS = BM // tile.groups // 64, BN // 8
    SUMS = HALVES * EIGHTS * 4
    init, produce, consume = init_ring(STAGES, WARPS), producer(tile, kind_name, spans), consumer(tile, kind_name, tap=tap)
    GROUP_BYTES = BM // tile.groups * ROW_BYTES
    put, activate, ACTIVATES = stores.put_fragments(tile, kind_name), stores.activated(after, SUMS), after is not None
    store = stores.store_rows(tile, kind_name, "mask" in epilogue, "interleave" in epilogue)
    store_pooled = stores.store_pooled(tile, kind_name)
    consumers = bar_sync(1, tile.groups * WARPGROUP)
    POOL, INTERLEAVE, MOMENTS = epilogue == "pool", "interleave" in epilogue, epilogue == "moments"
    moments = stores.row_moments(tile, kind_name)
    UNEQUAL, IDLE = spans is not None, spans is not None and spans.busy < 4
    place: Any = tile_in_bands(spans) if spans else None
    taps = taps_of(spans, 0, 0)

    @jit(launch_bounds=(THREADS, tile.blocks))
    def correlate_kernel(maps, b, biased, floor, x, y, second, N, C, P, Q, K, rows, R, S, stride, top, left, across, steps, apart, x_apart):
        """y[m,n] = epilogue(max(floor, Σ_k source[m,k]·filter[n,k] + b[n])): see `correlation.py`. b has `biased` elements, K or none.
        second: where the argmax of a pooling goes, or moments, each block's rows one chunk.
        Pixels of y lie `apart` elements from each other, those of x `x_apart`.

        gemm    GM = N·P·Q, GN = K (of each phase), GK = R·S·C.
        grid    ⌈GM/BM⌉ · phases · ⌈K/BN⌉ blocks, those of one BM rows next to each other, so that they read the source together; phases of unequal
                taps by bands (`phases.py`). A phase without taps loads nothing.
        block   `groups` warpgroups that multiply, one warp of which a single thread has tiles fetched.
        owns    block BM × BN, warpgroup BM/groups × BN, thread 2 columns of 8, every 8th row.
        shared  `shared_bytes(tile)`: the ring, where results are put at the end, and its barriers.
        moves   the source ⌈K/BN⌉·phases times, mostly out of L2 (its taps too), filters once per block out of L2, y once.
        needs   compute capability 9.0; C in whole rows of 128 bytes (TMA reads zeros behind the source's own), K a multiple of 8.
        source  NVIDIA, PTX ISA, "Asynchronous warpgroup level matrix instructions" and "im2col mode".
        """
        memory = cuda.shared.array(0, np.uint8)
        ring = aligned(byte_address_shared(memory))
        full = ring + RING
        empty = full + STAGES * 8
        t = cuda.threadIdx.x
        lane = t & 31
        warp = t >> 5
        tile_m = cuda.blockIdx.x // across
        tile_n = cuda.blockIdx.x - tile_m * across
        tiles_of_phase = (K + (BN - 1)) // BN
        phase, r, s = 0, 0, 0
        if INTERLEAVE:
            phase = tile_n // tiles_of_phase
            tile_n -= phase * tiles_of_phase
            if UNEQUAL:
                tile_m, tile_n, phase = place(cuda.blockIdx.x, quotient(cuda.gridDim.x, across), across, tiles_of_phase)
                top_tap, end_tap, left_tap, right_tap = taps(phase)
                steps = quotient(steps, R * S) * ((end_tap - top_tap) * (right_tap - left_tap))
            r, s = phase >> 1, phase & 1
        m0, n0 = tile_m * BM, tile_n * BN
        if t == 0:
            init(full, empty)
            fence_mbarrier_init()
        cuda.syncthreads()
        if warp == WARPS:
            if lane == 0:
                first_row = phase * K + n0
                produce(byte_address_global(maps), ring, full, empty, m0, first_row, s, r, N, rows, C, P, Q, R, S, stride, top, left)
        else:
            acc = cuda.local.array(SUMS, f4)
            for j in range(EIGHTS):
                n = n0 + (lane & 3) * 2 + 8 * j
                b0, b1 = load1_if(b, n, n < biased), load1_if(b, n + 1, n < biased)
                for half in range(HALVES):
                    for h in range(2):
                        acc[(half * EIGHTS + j) * 4 + 2 * h] = b0
                        acc[(half * EIGHTS + j) * 4 + 2 * h + 1] = b1
            group = warp >> 2
            if not IDLE or steps > 0:
                consume(acc, ring, full, empty, group * GROUP_BYTES, lane, steps, 0, 0)
            if ACTIVATES:
                activate(acc)
            # Results overwrite the ring: every warpgroup must have read it.
            consumers()
            put(acc, floor, ring, group, warp, lane)
            consumers()
            GM = N * P * Q
            if POOL:
                store_pooled(ring, y, second, t, m0, n0, GM, K, Q)
            else:
                store(ring, x, y, t, m0, n0, GM, K, Q, r, s, apart, x_apart)
                if MOMENTS:
                    moments(ring, second, t, m0, n0, GM, K, tile_m, (GM + (BM - 1)) // BM)

    return correlate_kernel
