"""The two halves of the correlation kernel before its epilogue: a producer thread that has tiles fetched, warpgroups that multiply them.

They share a ring (ring.py). A stage of it holds one step of GK: 128 bytes of channels of one tap, BM rows of the source and BN rows of
filters (three planes of each in fp32).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import jit, types
from nbcnn.ops.conv.frame.correlation import Spans
from nbcnn.ops.conv.wgmma import ring
from nbcnn.ops.conv.wgmma.phases import taps_of
from nbcnn.ops.conv.wgmma.ring import claim_stage, next_stage
from nbcnn.ops.conv.wgmma.split import PRODUCTS
from nbcnn.ops.conv.wgmma.tile import KINDS, STEPS_OF_ROW, WARPGROUP, Tile, stage_bytes
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES
from nbcnn.ops.ptx.tma import fence_tensor_map, load_im2col_4d, load_tile_2d
from nbcnn.ops.ptx.wgmma import K_STEP, k_major, wgmma_bf16, wgmma_tf32

u8, u2 = types.uint64, types.uint16


@cache
def producer(tile: Tile, kind_name: str, spans: Spans | None = None) -> Any:
    """Device function for one thread: fetch all steps of a tile into the ring, each as soon as its stage is empty.

    (maps, ring, full, empty, m0, row, extents…): m0 is the tile's first pixel, `row` its first row of packed filters; right and down
    shift every tap (the phase of an upsampled image); N and rows are a plane's extents. spans: the taps of each phase, if not all have all.
    """
    kind = KINDS[kind_name]
    STAGE, PLANES, A_BYTES, B_BYTES, CHANNELS = stage_bytes(tile, kind), kind.planes, tile.BM * ROW_BYTES, tile.BN * ROW_BYTES, kind.channels
    claim, advance = claim_stage(STAGE), next_stage(tile.slots)
    UNEQUAL, taps = spans is not None, taps_of(spans, 0, 0)

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
        stage, parity, column = 0, 1, 0
        r, first, wide = 0, 0, S
        if UNEQUAL:
            r, R, first, S = taps(2 * down + right)
        while r < R:
            s = first
            if UNEQUAL:
                column = (r * wide + s) * C
            while s < S:
                c = 0
                while c < C:
                    barrier = claim(full, empty, stage, parity)
                    to = ring + stage * STAGE
                    for plane in range(PLANES):
                        a = to + plane * A_BYTES
                        b = to + (PLANES * A_BYTES + plane * B_BYTES)
                        load_im2col_4d(a, a_map, c, w, h, image + plane * N, barrier, u2(s + right), u2(r + down))
                        load_tile_2d(b, b_map, column, row + plane * rows, barrier)
                    stage, parity = advance(stage, parity)
                    column += CHANNELS
                    c += CHANNELS
                s += 1
            r += 1

    return run


@cache
def multiply_stage(tile: Tile, kind_name: str, steps: int = STEPS_OF_ROW) -> Any:
    """Device function (acc, a, b, add): acc (+)= all products of one stage, whose tiles start at shared addresses a and b.

    steps: those of a row that have channels; the others are zeros.
    """
    kind = KINDS[kind_name]
    A_BYTES, B_BYTES = tile.BM * ROW_BYTES, tile.BN * ROW_BYTES
    multiply = wgmma_tf32 if kind_name == "tf32" else wgmma_bf16
    halves = tile.BM // tile.groups // 64

    instructions = [
        (
            multiply(tile.BN, half * tile.BN // 2),
            (plane_a * A_BYTES + half * 64 * ROW_BYTES >> 4) + step * K_STEP,
            (plane_b * B_BYTES >> 4) + step * K_STEP,
            step == 0 and i == 0,
        )
        for half in range(halves)
        for i, (plane_a, plane_b) in enumerate(PRODUCTS[kind.planes])
        for step in range(steps)
    ]
    return ring.products_of_stage(instructions, k_major)


@cache
def consumer(tile: Tile, kind_name: str, persistent: bool = False, tap: tuple[int, ...] = (STEPS_OF_ROW,)) -> Any:
    """The ring's consumer for a tile, as `ring.consumer`; sums of three planes are promoted after each step. tap: as `steps_of_tap`."""
    kind = KINDS[kind_name]
    sums, b_offset = tile.BM // tile.groups * tile.BN // WARPGROUP, kind.planes * tile.BM * ROW_BYTES
    shape = sums, tile.slots, stage_bytes(tile, kind), b_offset
    if kind.planes > 1:
        return ring.promoting_consumer(multiply_stage(tile, kind_name), *shape)
    return ring.consumer(tuple(multiply_stage(tile, kind_name, steps) for steps in tap), *shape, persistent)
