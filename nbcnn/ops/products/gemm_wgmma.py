"""Matrix products of Hopper's tensor cores: c = a·bᵀ in bf16 and tf32, both operands straight from their rows through TMA.

As many blocks as fit stay for the whole product and take one tile after another; while the consumers write a tile's results, the producer
already fills the ring for the next. Tiles are taken in bands of `band` rows of tiles, column by column, so that the tiles that are
under way together are about a square of c, and what they read of a and b stays in the second-level cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i8, jit, types
from nbcnn.gpu.target import Target
from nbcnn.ops.conv.wgmma.mainloop import consumer
from nbcnn.ops.conv.wgmma.ring import aligned, claim_stage, init_ring, next_stage
from nbcnn.ops.conv.wgmma.tile import ALIGNMENT, KINDS, WARPGROUP, Kind, Tile, stage_bytes
from nbcnn.ops.kernel import tensor_maps
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.cost import STREAM
from nbcnn.ops.kernel.loops import ceil_div, unrolled
from nbcnn.ops.kernel.refusals import too_large
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES
from nbcnn.ops.kernel.traffic import Traffic, clipped
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.cvt import bf16x2, tf32
from nbcnn.ops.ptx.mbarrier import fence_mbarrier_init
from nbcnn.ops.ptx.shuffle import exchange_word
from nbcnn.ops.ptx.tma import fence_tensor_map, load_tile_2d
from nbcnn.ops.ptx.vector import store2, store_halves8

u8 = types.uint64
_BARRIERS = 256


@dataclass(frozen=True)
class ProductTile:
    """The tile of a product; `band` rows of tiles are taken together, and `resident` blocks run in all, each taking tile after tile."""

    BM: int
    BN: int
    groups: int
    slots: int
    blocks: int
    band: int
    resident: int

    @property
    def shape(self) -> Tile:
        """What a kernel is compiled for."""
        return Tile(self.BM, self.BN, self.groups, self.slots, self.blocks)


@cache
def _place(tile: Tile) -> Any:
    """Device function (t, down, across, band) -> first row and column of tile t."""
    BM, BN = tile.BM, tile.BN

    @jit(device=True)
    def run(t, down, across, band):
        of_band = band * across
        at = t // of_band
        first = at * band
        rest = t - at * of_band
        rows = min(band, down - first)
        tile_n = rest // rows
        return (first + rest - tile_n * rows) * BM, tile_n * BN

    return run


@cache
def _producer(tile: Tile, kind_name: str) -> Any:
    """Device function for one thread: fetch every step of every tile of this block into the ring, each as soon as its stage is empty."""
    kind = KINDS[kind_name]
    STAGE, A_BYTES, COLUMNS = stage_bytes(tile, kind), tile.BM * ROW_BYTES, kind.channels
    place, claim, advance = _place(tile), claim_stage(STAGE), next_stage(tile.slots)

    @jit(device=True)
    def run(maps, ring, full, empty, steps, down, across, band):
        a_map = maps
        b_map = maps + u8(ROW_BYTES)
        fence_tensor_map(a_map)
        fence_tensor_map(b_map)
        stage, parity = 0, 1
        t, stride, tiles = cuda.blockIdx.x, cuda.gridDim.x, down * across
        while t < tiles:
            m0, n0 = place(t, down, across, band)
            step = 0
            while step < steps:
                barrier = claim(full, empty, stage, parity)
                to = ring + stage * STAGE
                column = step * COLUMNS
                load_tile_2d(to, a_map, column, m0, barrier)
                load_tile_2d(to + A_BYTES, b_map, column, n0, barrier)
                stage, parity = advance(stage, parity)
                step += 1
            t += stride

    return run


@cache
def _four_words(first: int) -> Any:
    """Device function (acc, c, at, lane, wanted): sums first … of four eights of columns, rounded to bfloat16, 16 bytes per lane.

    A lane holds two columns of each eight; the four lanes of a row exchange them, so that each has all of one eight: it transposes 4×4 words.
    """
    A, B, C, D = first, first + 4, first + 8, first + 12

    @jit(device=True)
    def run(acc, c, at, lane, wanted):
        w0, w1 = bf16x2(acc[A], acc[A + 1]), bf16x2(acc[B], acc[B + 1])
        w2, w3 = bf16x2(acc[C], acc[C + 1]), bf16x2(acc[D], acc[D + 1])
        odd, upper = (lane & 1) != 0, (lane & 2) != 0
        r0 = exchange_word(w0 if odd else w1, 1)
        r1 = exchange_word(w2 if odd else w3, 1)
        w0, w1 = (r0, w1) if odd else (w0, r0)
        w2, w3 = (r1, w3) if odd else (w2, r1)
        r0 = exchange_word(w0 if upper else w2, 2)
        r1 = exchange_word(w1 if upper else w3, 2)
        w0, w1, w2, w3 = (r0, r1, w2, w3) if upper else (w0, w1, r0, r1)
        if wanted:
            store_halves8(c, at, w0, w1, w2, w3)

    return run


@cache
def _store(tile: Tile, kind_name: str) -> Any:
    """Device function (acc, c, m0, n0, M, N, group, warp, lane): a thread's sums to c, from registers."""
    ROWS, EIGHTS, BF16 = tile.BM // tile.groups, tile.BN // 8, KINDS[kind_name].result == 2
    HALVES, LANE_COLUMNS = ROWS // 64, 8 if BF16 else 2

    def row_of_fours(half: int, h: int) -> Any:
        def four(j: int) -> Any:
            put = _four_words((half * EIGHTS + j) * 4 + 2 * h)
            ACROSS = 8 * j

            @jit(device=True)
            def run(acc, c, start, left, lane):
                put(acc, c, start + i8(ACROSS), lane, left > ACROSS)

            return run

        return unrolled([four(j) for j in range(0, EIGHTS, 4)])

    def row_of_twos(half: int, h: int) -> Any:
        @jit(device=True)
        def run(acc, c, start, left, lane):
            for j in range(EIGHTS):
                at = (half * EIGHTS + j) * 4 + 2 * h
                if 8 * j < left:
                    store2(c, start + i8(8 * j), tf32(acc[at]), tf32(acc[at + 1]))

        return run

    def row(half: int, h: int) -> Any:
        every, DOWN = (row_of_fours if BF16 else row_of_twos)(half, h), half * 64 + 8 * h

        @jit(device=True)
        def run(acc, c, m, n, M, N, lane):
            at = m + DOWN
            every(acc, c, i8(at) * N + n, N - n if at < M else 0, lane)

        return run

    rows = unrolled([row(half, h) for half in range(HALVES) for h in range(2)])

    @jit(device=True)
    def run(acc, c, m0, n0, M, N, group, warp, lane):
        m = m0 + group * ROWS + (warp & 3) * 16 + (lane >> 2)
        rows(acc, c, m, n0 + (lane & 3) * LANE_COLUMNS, M, N, lane)

    return run


@cache
def product_kernel(tile: Tile, kind_name: str) -> Any:
    """The kernel for one tile and precision."""
    THREADS, WARPS, STAGES = tile.threads, 4 * tile.groups, tile.slots
    RING, SUMS = tile.slots * stage_bytes(tile, KINDS[kind_name]), tile.BM // tile.groups * tile.BN // WARPGROUP
    GROUP_BYTES, init, consume = tile.BM // tile.groups * ROW_BYTES, init_ring(STAGES, WARPS), consumer(tile, kind_name, persistent=True)
    place, produce, store = _place(tile), _producer(tile, kind_name), _store(tile, kind_name)

    @jit(launch_bounds=(THREADS, tile.blocks))
    def gemm_wgmma_kernel(maps, c, M, N, steps, down, across, band):
        """c[m][n] = Σ_k a[m][k] · b[n][k], added in float32, rounded once.

        gemm    GM, GN, GK = M, N, K; GK in `steps` of 128 bytes.
        grid    as many blocks as run together; block i takes the tiles i, i + grid, …, in bands of `band` rows of tiles.
        block   `groups` warpgroups that multiply, one warp of which a single thread has tiles fetched.
        owns    block BM × BN at a time, warpgroup BM/groups × BN, thread 2 columns of 8, every 8th row.
        shared  the ring of stages, (BM + BN)·128 bytes each, and its barriers.
        moves   a once per column of tiles, b once per row of tiles, mostly out of L2; c once.
        needs   compute capability 9.0; rows of a and b of whole 16 bytes, N a multiple of 8.
        source  NVIDIA, PTX ISA, "Asynchronous warpgroup level matrix instructions"; CUTLASS, "Efficient GEMM in CUDA" (persistent, warp specialised).
        """
        memory = cuda.shared.array(0, np.uint8)
        ring = aligned(byte_address_shared(memory))
        full = ring + RING
        empty = full + STAGES * 8
        tid = cuda.threadIdx.x
        lane = tid & 31
        warp = tid >> 5
        if tid == 0:
            init(full, empty)
            fence_mbarrier_init()
        cuda.syncthreads()
        if warp == WARPS:
            if lane == 0:
                produce(byte_address_global(maps), ring, full, empty, steps, down, across, band)
        else:
            acc = cuda.local.array(SUMS, f4)
            group = warp >> 2
            stage, parity = 0, 0
            t, stride, tiles = cuda.blockIdx.x, cuda.gridDim.x, down * across
            while t < tiles:
                m0, n0 = place(t, down, across, band)
                stage, parity = consume(acc, ring, full, empty, group * GROUP_BYTES, lane, steps, stage, parity)
                store(acc, c, m0, n0, M, N, group, warp, lane)
                t += stride

    return gemm_wgmma_kernel


def shared_bytes(tile: Tile, kind: Kind) -> int:
    """Dynamic shared memory of a block: room to align, the ring, its barriers."""
    return ALIGNMENT + tile.slots * stage_bytes(tile, kind) + _BARRIERS


_TILES = (Tile(128, 256, 2, 4, 1), Tile(128, 128, 2, 3, 2), Tile(128, 64, 2, 4, 2), Tile(64, 64, 1, 6, 2))
_BANDS = (16, 8)


def _extents(call: Call) -> tuple[int, int, int]:
    (M, K), (N, _) = call.in_shapes
    return M, N, K


def _candidates(call: Call, target: Target) -> list[ProductTile]:
    M, N, _ = _extents(call)
    made = []
    for tile in _TILES:
        tiles = ceil_div(M, tile.BM) * ceil_div(N, tile.BN)
        resident = min(tiles, target.multiprocessors * tile.blocks)
        made += [ProductTile(tile.BM, tile.BN, tile.groups, tile.slots, tile.blocks, band, resident) for band in _BANDS]
    return made


# Nanoseconds that a wave of tiles takes for one step and for beginning and end, on an H200.
_TIMES = {(128, 256): (640, 4000), (128, 128): (780, 3000), (128, 64): (620, 2500), (64, 64): (370, 2000)}


def _choose(call: Call, kind: Kind, target: Target) -> ProductTile:
    return min(_candidates(call, target), key=lambda tile: _nanoseconds(call, tile, kind, target))


def _nanoseconds(call: Call, tile: ProductTile, kind: Kind, target: Target) -> int:
    M, N, K = _extents(call)
    step, ends = _TIMES[tile.BM, tile.BN]
    waves = ceil_div(ceil_div(M, tile.BM) * ceil_div(N, tile.BN), target.multiprocessors * tile.blocks)
    return waves * (ceil_div(K, kind.channels) * step + ends)


def _refusal(call: Call, kind: Kind) -> str | None:
    _, N, K = _extents(call)
    if K * kind.element % 16:
        return f"rows of {K} elements are no multiple of 16 bytes, as TMA wants them"
    if N % 8:
        return f"{N} columns are not a multiple of 8"
    return too_large(*call.in_shapes, *call.out_shapes, what="a matrix")


def _bind(call: Call, kind: Kind) -> list[Launch]:
    (a, b), (c,), (M, N, K), tile = call.ins, call.outs, _extents(call), call.tile
    shape, box = tile.shape, kind.channels
    maps = tensor_maps.upload(tensor_maps.encode_tiled(a, (K, M), (box, tile.BM)), tensor_maps.encode_tiled(b, (K, N), (box, tile.BN)))
    scalars = (M, N, ceil_div(K, box), ceil_div(M, tile.BM), ceil_div(N, tile.BN), tile.band)
    args = (maps, c, *(np.int32(v) for v in scalars))
    return [Launch(product_kernel(shape, kind.name), tile.resident, shape.threads, args, shared_bytes(shape, kind), keep=(maps, a, b))]


def _traffic(call: Call, kind: Kind) -> Sequence[Traffic]:
    M, N, K = _extents(call)
    rows, columns = clipped(M, call.tile.BM) * ceil_div(N, call.tile.BN), clipped(N, call.tile.BN) * ceil_div(M, call.tile.BM)
    return [Traffic(kind.element * K * (rows + columns), kind.result * M * N, kind.element * K * (M + N))]


def implementation(precision: str) -> Impl:
    """The product in bf16 or tf32."""
    kind = KINDS[precision]
    return Impl(
        lambda call: _bind(call, kind),
        supports=lambda call, target: _refusal(call, kind),
        tile=lambda call, target: _choose(call, kind, target),
        needs=(9, 0),
        candidates=_candidates,
        traffic=lambda call: _traffic(call, kind),
        exactly=True,
        engine="wgmma",
        estimate=lambda call, target: STREAM.launch + _nanoseconds(call, call.tile, kind, target) / 1000,
    )
