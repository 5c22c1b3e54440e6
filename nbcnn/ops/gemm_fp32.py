"""The fp32 product c = a·bᵀ on CUDA cores, its operands brought by TMA: for GPUs that have it and rows of whole 16 bytes.

a and b keep their rows along k in shared memory, as TMA writes them, so nobody turns them: a thread reads four k of a row at once. One thread
asks for tiles as slots of the ring become empty, so there are no addresses to count, no staging registers, no barriers of the block. (It
belongs to a warp that multiplies: a warp more would cost all others a quarter of their registers.)

A thread owns TM×TN sums, its rows and columns spread over the tile. It walks k in chunks of four, and each chunk's columns in groups of
`group`: while one group is multiplied, the next one (and with the last group the next chunk's rows) is on its way from shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from nbcnn.cuda import cuda, f4, i4, i8, jit, types, u4
from nbcnn.ops.call import Call, Impl, Launch
from nbcnn.ops.conv.register_tile import in_sequence
from nbcnn.ops.conv.wgmma import tensor_maps
from nbcnn.ops.conv.wgmma.tensor_maps import ROW_BYTES
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait
from nbcnn.ops.ptx.shared import load_floats_4
from nbcnn.ops.ptx.shuffle import warp_barrier
from nbcnn.ops.ptx.tma import fence_tensor_map, load_tile_2d
from nbcnn.ops.traffic import Traffic, ceil_div, clipped
from nbcnn.shapes import numel

u8 = types.uint64
ALIGNMENT = 1024
COLUMNS = ROW_BYTES // 4
"""k of a slot."""
_BARRIERS = 256


@dataclass(frozen=True)
class ProductTile:
    """A block owns BM×BN, a thread TM×TN; `group` columns a time; `chunks` of four k unrolled; `slots` in flight; `blocks` a multiprocessor."""

    BM: int
    BN: int
    TM: int
    TN: int
    group: int
    chunks: int
    slots: int
    blocks: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.BM // self.TM * self.BN // self.TN

    @property
    def slot_bytes(self) -> int:
        return (self.BM + self.BN) * ROW_BYTES

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: room to align, the ring, its barriers."""
        return ALIGNMENT + self.slots * self.slot_bytes + _BARRIERS


def _load_rows(count: int, apart: int, first: int) -> Any:
    """Device function (to, at): four k of `count` rows, `apart` rows from one to the next, from address `at` on, into to[first …]."""
    BYTES = apart * ROW_BYTES

    @jit(device=True)
    def run(to, at):
        for i in range(count):
            v = load_floats_4(at + u4(i * BYTES))
            for q in range(4):
                to[first + 4 * i + q] = v[q]

    return run


def _multiply(tile: ProductTile, k: int, first_a: int, first_b: int, column: int) -> Any:
    """Device function (acc, fa, fb, _, _): acc[:, column …] += a[:, k]·b[…, k], up one column and down the next (see `multiply_row`)."""
    TM, TN, GROUP = tile.TM, tile.TN, tile.group

    @jit(device=True)
    def run(acc, fa, fb, at_a, at_b):
        for j in range(GROUP):
            for step in range(TM):
                i = step if j % 2 == 0 else TM - 1 - step
                acc[i * TN + column + j] += fa[first_a + 4 * i + k] * fb[first_b + 4 * j + k]

    return run


@cache
def _stages(tile: ProductTile) -> tuple[Any, Any, Any]:
    """Device functions (acc, fa, fb, at_a, at_b): the first loads; all but the last stage of an iteration; the last stage's products."""
    GROUPS, ROWS, COLS = tile.TN // tile.group, tile.BM // tile.TM, tile.BN // tile.TN
    A_SIZE, B_SIZE = 4 * tile.TM, 4 * tile.group
    stages = tile.chunks * GROUPS

    def load(stage: int) -> Any:
        chunk, group = divmod(stage % stages, GROUPS)
        rows = _load_rows(tile.TM, ROWS, chunk % 2 * A_SIZE)
        columns = _load_rows(tile.group, COLS, stage % 2 * B_SIZE)
        WITH_ROWS, XOR, OFFSET = group == 0, chunk * 16, group * tile.group * COLS * ROW_BYTES

        @jit(device=True)
        def run(acc, fa, fb, at_a, at_b):
            columns(fb, (at_b ^ u4(XOR)) + u4(OFFSET))
            if WITH_ROWS:
                rows(fa, at_a ^ u4(XOR))

        return run

    def products(stage: int) -> Any:
        chunk, group = divmod(stage, GROUPS)
        return in_sequence([_multiply(tile, k, chunk % 2 * A_SIZE, stage % 2 * B_SIZE, group * tile.group) for k in range(4)])

    every = [one for stage in range(stages - 1) for one in (load(stage + 1), products(stage))]
    return load(0), in_sequence(every), products(stages - 1)


@cache
def _fetch(tile: ProductTile) -> Any:
    """Device function (ring, full, a_map, b_map, slot, step, m0, n0) for one thread: have a step's tiles written to a slot."""
    SLOT, A_BYTES = tile.slot_bytes, tile.BM * ROW_BYTES

    @jit(device=True)
    def run(ring, full, a_map, b_map, slot, step, m0, n0):
        here = full + u4(slot * i4(8))
        to = ring + u4(slot * i4(SLOT))
        mbarrier_arrive_expect_tx(here, u4(SLOT))
        load_tile_2d(to, a_map, i4(step * i4(COLUMNS)), m0, here)
        load_tile_2d(to + u4(A_BYTES), b_map, i4(step * i4(COLUMNS)), n0, here)

    return run


@cache
def product_kernel(tile: ProductTile) -> Any:
    """The kernel for one tile."""
    BM, BN, TM, TN, SLOTS, SLOT = tile.BM, tile.BN, tile.TM, tile.TN, tile.slots, tile.slot_bytes
    THREADS, WARPS, RING, A_BYTES = tile.threads, tile.threads // 32, tile.slots * tile.slot_bytes, tile.BM * ROW_BYTES
    ROWS, COLS, WX, STEP = BM // TM, BN // TN, BN // TN // 8, 16 * tile.chunks
    ACC, FA, FB = TM * TN, 8 * TM, 8 * tile.group
    first_loads, stages, last_products = _stages(tile)
    fetch = _fetch(tile)

    @jit(launch_bounds=(THREADS, tile.blocks))
    def gemm_fp32_kernel(maps, c, M, N, steps, across):
        """c[m][n] = Σ_k a[m][k] · b[n][k].

        gemm    GM, GN, GK = M, N, K; GK in `steps` of 32.
        grid    tiles of BM×BN, those of one row of tiles next to each other.
        block   (BM/TM)·(BN/TN) threads, of which the first has tiles fetched.
        owns    a block BM×BN, a thread TM×TN: every BM/TM-th row, every BN/TN-th column.
        shared  the ring of slots, (BM + BN)·128 bytes each, and its barriers.
        moves   a once a column of tiles, b once a row of tiles, mostly out of L2; c once.
        needs   compute capability 9.0 (TMA); rows of a and b of whole 16 bytes.
        source  as register_tile.py; NVIDIA, PTX ISA, "Data movement and conversion: tensor copies".
        """
        memory = cuda.shared.array(0, np.uint8)
        ring = u4((byte_address_shared(memory) + u4(ALIGNMENT - 1)) & u4(0xFFFFFFFF - ALIGNMENT + 1))
        full = ring + u4(RING)
        empty = full + u4(SLOTS * 8)
        tid = i4(cuda.threadIdx.x)
        lane, warp = i4(tid & i4(31)), i4(tid >> i4(5))
        tile_m = i4(u4(cuda.blockIdx.x) // u4(across))
        m0, n0 = i4(tile_m * i4(BM)), i4((i4(cuda.blockIdx.x) - tile_m * across) * i4(BN))
        if tid == i4(0):
            for slot in range(SLOTS):
                mbarrier_init(full + u4(8 * slot), u4(1))
                mbarrier_init(empty + u4(8 * slot), u4(WARPS))
            fence_mbarrier_init()
        cuda.syncthreads()
        a_map = byte_address_global(maps)
        b_map = a_map + u8(ROW_BYTES)
        if tid == i4(0):
            fence_tensor_map(a_map)
            fence_tensor_map(b_map)
            for slot in range(SLOTS):
                if i4(slot) < steps:
                    fetch(ring, full, a_map, b_map, i4(slot), i4(slot), m0, n0)
        acc = cuda.local.array(ACC, f4)
        fa = cuda.local.array(FA, f4)
        fb = cuda.local.array(FB, f4)
        for i in range(ACC):
            acc[i] = f4(0)
        # Lanes stand as in `thread_corner`: 4 down and 8 across, interleaved.
        x = i4((warp % i4(WX)) * i4(8) + ((lane & i4(1)) | ((lane >> i4(1)) & i4(6))))
        y = i4((warp // i4(WX)) * i4(4) + (((lane >> i4(1)) & i4(1)) | ((lane >> i4(3)) & i4(2))))
        # TMA swizzles by 128 bytes: the 16 bytes of chunk q of row r lie at place q ^ (r mod 8) of its 128.
        start_a = ring + u4(y * i4(ROW_BYTES) + (y & i4(7)) * i4(16))
        start_b = ring + u4(A_BYTES) + u4(x * i4(ROW_BYTES) + (x & i4(7)) * i4(16))
        at, turn, slot, step, parity = u4(0), u4(0), i4(0), i4(0), u4(0)
        before, parity_before = i4(0), u4(0)
        mbarrier_wait(full, parity)
        first_loads(acc, fa, fb, start_a, start_b)
        while step < steps:
            stages(acc, fa, fb, (start_a + at) ^ turn, (start_b + at) ^ turn)
            turn = turn + u4(STEP)
            if turn == u4(ROW_BYTES):
                warp_barrier()
                if lane == i4(0):
                    mbarrier_arrive(empty + u4(slot * i4(8)))
                # The slot of the step before this one: all warps have left it, or are about to.
                if tid == i4(0) and step > i4(0) and step + i4(SLOTS - 1) < steps:
                    mbarrier_wait(empty + u4(before * i4(8)), parity_before)
                    fetch(ring, full, a_map, b_map, before, i4(step + i4(SLOTS - 1)), m0, n0)
                before, parity_before = slot, parity
                turn = u4(0)
                step = i4(step + i4(1))
                slot = i4(slot + i4(1))
                if slot == i4(SLOTS):
                    slot = i4(0)
                    parity = parity ^ u4(1)
                at = u4(slot * i4(SLOT))
                if step < steps:
                    mbarrier_wait(full + u4(slot * i4(8)), parity)
            # Behind the last slot this reads what nobody uses; a branch around it would hold it back.
            first_loads(acc, fa, fb, (start_a + at) ^ turn, (start_b + at) ^ turn)
            last_products(acc, fa, fb, start_a, start_b)
        for i in range(TM):
            m = i4(m0 + y + i4(i * ROWS))
            if m < M:
                start = i8(m) * i8(N) + i8(n0 + x)
                left = i4(N - n0 - x)
                for j in range(TN):
                    if i4(j * COLS) < left:
                        c[start + i8(j * COLS)] = acc[i * TN + j]

    return gemm_fp32_kernel


_TILES = (
    ProductTile(128, 256, 8, 16, 4, 2, 4, 1),
    ProductTile(128, 256, 8, 16, 2, 2, 4, 1),
    ProductTile(256, 128, 16, 8, 4, 2, 4, 1),
    ProductTile(256, 128, 16, 8, 2, 2, 4, 1),
    ProductTile(128, 128, 8, 8, 2, 2, 3, 2),
    ProductTile(128, 128, 8, 8, 4, 2, 3, 2),
    ProductTile(128, 128, 8, 8, 4, 4, 3, 2),
)


def _extents(call: Call) -> tuple[int, int, int]:
    (M, K), (N, _) = call.in_shapes
    return M, N, K


def _refusal(call: Call) -> str | None:
    if _extents(call)[2] % 4:
        return f"rows of {_extents(call)[2]} elements are no multiple of 16 bytes, as TMA wants them"
    largest = max(numel(shape) for shape in (*call.in_shapes, *call.out_shapes))
    return None if largest < 2**31 else f"a matrix of {largest:,} elements is more than 32-bit offsets reach"


def _bind(call: Call) -> list[Launch]:
    (a, b), (c,), (M, N, K), tile = call.ins, call.outs, _extents(call), call.tile
    maps = tensor_maps.upload(tensor_maps.encode_tiled(a, (K, M), (COLUMNS, tile.BM)), tensor_maps.encode_tiled(b, (K, N), (COLUMNS, tile.BN)))
    across = ceil_div(N, tile.BN)
    args = (maps, c, *(np.int32(v) for v in (M, N, ceil_div(K, COLUMNS), across)))
    return [Launch(product_kernel(tile), ceil_div(M, tile.BM) * across, tile.threads, args, tile.shared_bytes, keep=(maps, a, b))]


def _traffic(call: Call) -> list[Traffic]:
    M, N, K = _extents(call)
    rows, columns = clipped(M, call.tile.BM) * ceil_div(N, call.tile.BN), clipped(N, call.tile.BN) * ceil_div(M, call.tile.BM)
    return [Traffic(4 * K * (rows + columns), 4 * M * N, 4 * K * (M + N))]


IMPL = Impl(_bind, supports=_refusal, tile=lambda call, n: _TILES[0], needs=(9, 0), candidates=lambda call, n: _TILES, traffic=_traffic)
