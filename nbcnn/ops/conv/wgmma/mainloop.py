"""The two halves of the correlation kernel before its epilogue: a producer thread that has tiles fetched, warpgroups that multiply them.

They share a ring of slots in shared memory. A slot holds one step of GK: 128 bytes of channels of one tap, BM rows of the
source and BN rows of filters (three planes of each in fp32). Barrier `full[slot]` ends a phase when TMA has written all bytes of the
slot; barrier `empty[slot]` when every consumer warp has finished reading it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, jit, types, u4
from nbcnn.ops.conv.wgmma.tile import KINDS, WARPGROUP, Tile, slot_bytes
from nbcnn.ops.kernel.loops import unrolled
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES
from nbcnn.ops.ptx.mbarrier import mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_wait
from nbcnn.ops.ptx.tma import fence_tensor_map, load_im2col_4d, load_tile_2d
from nbcnn.ops.ptx.wgmma import K_STEP, k_major, wgmma_bf16, wgmma_commit, wgmma_fence, wgmma_tf32, wgmma_wait, wgmma_wait_all

u8, u2 = types.uint64, types.uint16

# Of hi + mid + lo on both sides, the products that reach float32's 24 bits, the smallest first: small sums lose least to large ones.
_PRODUCTS = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))


@cache
def producer(tile: Tile, kind_name: str) -> Any:
    """Device function for one thread: fetch all steps of a tile into the ring, each as soon as its slot is empty.

    (maps, ring, full, empty, m0, row, extents…): m0 is the tile's first pixel, `row` its first row of packed filters; right and down
    shift every tap (the phase of an upsampled image); N and rows are a plane's extents.
    """
    kind = KINDS[kind_name]
    SLOT, SLOTS, PLANES = slot_bytes(tile, kind), tile.slots, kind.planes
    A_BYTES, B_BYTES, CHANNELS = tile.BM * ROW_BYTES, tile.BN * ROW_BYTES, kind.channels

    @jit(device=True)
    def run(maps, ring, full, empty, m0, row, right, down, N, rows, C, P, Q, R, S, stride, top, left):
        a_map = maps
        b_map = maps + u8(ROW_BYTES)
        fence_tensor_map(a_map)
        fence_tensor_map(b_map)
        line = m0 // Q
        image = line // P
        w = (m0 - line * Q) * stride - left
        h = (line - image * P) * stride - top
        slot, parity, column = 0, u4(1), 0
        r = 0
        while r < R:
            s = 0
            while s < S:
                c = 0
                while c < C:
                    here = u4(slot * 8)
                    to = ring + u4(slot * SLOT)
                    mbarrier_wait(empty + here, parity)
                    mbarrier_arrive_expect_tx(full + here, u4(SLOT))
                    for plane in range(PLANES):
                        a = to + plane * A_BYTES
                        b = to + (PLANES * A_BYTES + plane * B_BYTES)
                        load_im2col_4d(a, a_map, c, w, h, image + plane * N, full + here, u2(s + right), u2(r + down))
                        load_tile_2d(b, b_map, column, row + plane * rows, full + here)
                    slot += 1
                    if slot == SLOTS:
                        slot = 0
                        parity ^= 1
                    column += CHANNELS
                    c += CHANNELS
                s += 1
            r += 1

    return run


@cache
def multiply_slot(tile: Tile, kind_name: str) -> Any:
    """Device function (acc, a, b, add): acc (+)= all products of one slot, whose tiles start at shared addresses a and b."""
    kind = KINDS[kind_name]
    A_BYTES, B_BYTES = tile.BM * ROW_BYTES, tile.BN * ROW_BYTES
    multiply = wgmma_tf32 if kind_name == "tf32" else wgmma_bf16
    halves = tile.BM // tile.groups // 64
    products = _PRODUCTS if kind.planes == 3 else ((0, 0),)

    def instruction(half: int, plane_a: int, plane_b: int, step: int, starts: bool) -> Any:
        product = multiply(tile.BN, half * tile.BN // 2)
        A_MORE = (plane_a * A_BYTES + half * 64 * ROW_BYTES >> 4) + step * K_STEP
        B_MORE = (plane_b * B_BYTES >> 4) + step * K_STEP
        STARTS = starts

        @jit(device=True)
        def run(acc, a, b, add):
            product(acc, a + u8(A_MORE), b + u8(B_MORE), add if STARTS else u4(1))

        return run

    every = unrolled(
        [
            instruction(half, plane_a, plane_b, step, step == 0 and i == 0)
            for half in range(halves)
            for i, (plane_a, plane_b) in enumerate(products)
            for step in range(4)
        ]
    )

    @jit(device=True)
    def run(acc, a, b, add):
        wgmma_fence()
        every(acc, k_major(a), k_major(b), add)
        wgmma_commit()

    return run


@cache
def consumer(tile: Tile, kind_name: str) -> Any:
    """Device function (acc, ring, full, empty, group, lane, steps): acc += A·Bᵀ over the `steps` slots that the producer fills.

    The tensor cores work on one slot while the next is issued; a slot is given back when the one after it is under way.
    """
    kind = KINDS[kind_name]
    SLOT, SLOTS, PLANES, A_BYTES = slot_bytes(tile, kind), tile.slots, kind.planes, tile.BM * ROW_BYTES
    GROUP_BYTES, SUMS = A_BYTES // tile.groups, tile.BM // tile.groups * tile.BN // WARPGROUP
    multiply, one_running, all_done = multiply_slot(tile, kind_name), wgmma_wait(1), wgmma_wait_all(SUMS)

    @jit(device=True)
    def run(acc, ring, full, empty, group, lane, steps):
        slot, parity, step, previous = 0, u4(0), 0, 0
        while step < steps:
            mbarrier_wait(full + u4(slot * 8), parity)
            a = ring + u4(slot * SLOT)
            multiply(acc, a + group * GROUP_BYTES, a + A_BYTES, u4(1))
            one_running()
            if lane == 0 and step > 0:
                mbarrier_arrive(empty + u4(previous * 8))
            previous = slot
            slot += 1
            if slot == SLOTS:
                slot = 0
                parity ^= 1
            step += 1
        all_done(acc)

    @jit(device=True)
    def run_promoted(acc, ring, full, empty, group, lane, steps):
        part = cuda.local.array(SUMS, f4)
        for i in range(SUMS):
            part[i] = 0.0
        slot, parity, step = 0, u4(0), 0
        while step < steps:
            mbarrier_wait(full + u4(slot * 8), parity)
            a = ring + u4(slot * SLOT)
            multiply(part, a + group * GROUP_BYTES, a + PLANES * A_BYTES, u4(0))
            all_done(part)
            if lane == 0:
                mbarrier_arrive(empty + u4(slot * 8))
            for i in range(SUMS):
                acc[i] += part[i]
            slot += 1
            if slot == SLOTS:
                slot = 0
                parity ^= 1
            step += 1

    # Tensor cores cut off what falls below a sum's last bit, always towards zero: over thousands of products that shows in float32.
    # So in fp32 a sum leaves them after each step, and is added where additions round.
    return run if PLANES == 1 else run_promoted
