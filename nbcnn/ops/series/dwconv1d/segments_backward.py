"""Variant best for long series on Hopper: the weight gradient.

A warp takes 1,024 neighbours of one series, each lane 32 of them, as in `segments.py`. A lane has its 32 elements of dy in registers, and sums
for all taps, which stay there over all that its warp takes; the elements of x that the taps reach come from shared memory, four for up to 128
products. At the end the sums of all lanes of the block are added up, once.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i4, jit, types
from nbcnn.ops.kernel import tensor_maps
from nbcnn.ops.kernel.call import Call, Launch, blocks
from nbcnn.ops.kernel.traffic import Traffic, element
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.mbarrier import mbarrier_arrive_expect_tx, mbarrier_wait
from nbcnn.ops.ptx.shuffle import WARP, warp_barrier
from nbcnn.ops.ptx.tma import load_tile_3d
from nbcnn.ops.ptx.vector import shared_load4
from nbcnn.ops.series.dwconv1d import partials
from nbcnn.ops.series.dwconv1d.segments import GROUP, MAP_BYTES, SEGMENT, UNIT, Reach, in_order, loads, map_of, shared_bytes, take, units
from nbcnn.ops.series.dwconv1d.series import Correlation
from nbcnn.ops.series.dwconv1d.staging import floats_before, open_maps

WARPS, RESIDENT = 4, 3
"""Warps of a block, and blocks that share a multiprocessor."""
DY = WARP * SEGMENT
"""Floats of a box of dy."""


@functools.cache
def gradient(taps: int, left: int) -> Any:
    """run(sums, dy, shared, places): the products of a lane's 32 elements of dy with the elements of x that meet them, added to all taps.

    places[0] is where the box of x begins, places[1] the row of it that lies as dy does.
    """
    before, behind = Reach(taps, left).quads

    def quad(at: int) -> Any:
        STEP, PLACE = at // 8, 4 * (at % 8)
        multiply = functools.reduce(_then, [_products(taps, 4 * at + left, first) for first in range(0, SEGMENT, GROUP)])

        @jit(device=True)
        def step(sums, dy, shared, places):
            there = places[1] + STEP
            here = (there << 5) ^ ((there & 7) << 2)
            multiply(sums, dy, shared_load4(shared, places[0] + (here ^ PLACE)))

        return step

    return in_order([quad(at) for at in range(-before, SEGMENT // 4 + behind)])


def _then(before: Any, last: Any) -> Any:
    @jit(device=True)
    def both(sums, dy, x):
        before(sums, dy, x)
        last(sums, dy, x)

    return both


@functools.cache
def _products(taps: int, tap: int, first: int) -> Any:
    """multiply(sums, dy, x): GROUP elements of dy from `first` on with four of x, the first of which meets dy[0] at `tap`; loops so short are
    unrolled."""
    spans = [(tap + q, max(first, tap + q - taps + 1), min(first + GROUP, tap + q + 1)) for q in range(4)]
    (TAP0, LOW0, HIGH0), (TAP1, LOW1, HIGH1), (TAP2, LOW2, HIGH2), (TAP3, LOW3, HIGH3) = spans

    @jit(device=True)
    def multiply(sums, dy, x):
        for t in range(LOW0, HIGH0):
            sums[TAP0 - t] += dy[t] * x[0]
        for t in range(LOW1, HIGH1):
            sums[TAP1 - t] += dy[t] * x[1]
        for t in range(LOW2, HIGH2):
            sums[TAP2 - t] += dy[t] * x[2]
        for t in range(LOW3, HIGH3):
            sums[TAP3 - t] += dy[t] * x[3]

    return multiply


@functools.cache
def kernel_for(taps: int, left: int) -> Any:
    """The kernel of the partial sums."""
    reach, THREADS, T, APART = Reach(taps, left), WARP * WARPS, taps, taps | 1
    X, BYTES, (BEFORE, _) = reach.box_floats, 128 * (reach.box_rows + WARP), reach.rows
    BOX = X + DY
    MINE = 2 * BOX
    BARRIERS = max(WARPS * MINE, THREADS * APART + 1)
    take_dy, add = take(0, SEGMENT // 4, 0), gradient(taps, left)
    boxes_at = floats_before(1024)

    @jit(launch_bounds=(THREADS, RESIDENT))
    def dwconv1d_wgrad_segments_kernel(maps, partial, C, across, units, strip):
        """partial[part][c][i] = Σ_n Σ_t dy[n,c,t] · x[n,c,t+i−left] over the series of the part.

        grid C·parts, block 4 warps; a block owns the partial sums of one channel of its part of the `units`, `across` of a series; a warp takes
        one at a time, 1,024 elements, a lane 32. shared two boxes of dy and two of x per warp, 128 bytes per lane and what the taps reach; at the
        end all sums of all lanes
        moves  dy once, x once and what the taps reach beside every 1,024 elements, partial once
        needs  compute capability 9.0: maps are the tensor maps of dy and x, rows of 32 elements
        source ours; the order of a sum never depends on timing
        """
        shared = cuda.shared.array(0, f4)
        base = byte_address_shared(shared)
        start = boxes_at(base)
        tid = cuda.threadIdx.x
        lane, warp = tid & WARP - 1, tid // WARP
        part = cuda.blockIdx.x // C
        c = cuda.blockIdx.x - part * C
        at = start + warp * MINE
        barrier = base + (start + (BARRIERS + (BARRIERS & 1)) + warp * 4) * 4
        dy_map, x_map = byte_address_global(maps), byte_address_global(maps) + types.uint64(MAP_BYTES)
        unit = (part * WARPS + warp) * strip
        end = min(units, unit + strip)
        open_maps(lane, tid, barrier, dy_map, x_map)
        if lane == 0 and unit < end:
            n = unit // across
            row = (unit - n * across) * WARP
            mbarrier_arrive_expect_tx(barrier, BYTES)
            load_tile_3d(base + at * 4, dy_map, 0, row, n * C + c, barrier)
            load_tile_3d(base + (at + DY) * 4, x_map, 0, row - BEFORE, n * C + c, barrier)
        cuda.syncthreads()
        own, sums, places = cuda.local.array(SEGMENT, f4), cuda.local.array(T, f4), cuda.local.array(2, i4)
        for i in range(T):
            sums[i] = 0.0
        places[1] = lane + BEFORE
        half, phase = 0, 0
        while unit < end:
            mine = at + half * BOX
            mbarrier_wait(barrier + half * 8, phase)
            following = unit + 1
            if lane == 0 and following < end:
                other, place = barrier + (1 - half) * 8, at + (1 - half) * BOX
                n = following // across
                row = (following - n * across) * WARP
                mbarrier_arrive_expect_tx(other, BYTES)
                load_tile_3d(base + place * 4, dy_map, 0, row, n * C + c, other)
                load_tile_3d(base + (place + DY) * 4, x_map, 0, row - BEFORE, n * C + c, other)
            take_dy(own, shared, mine, lane)
            places[0] = mine + DY
            add(sums, own, shared, places)
            warp_barrier()
            unit = following
            half = 1 - half
            if half == 0:
                phase ^= 1
        # What was fetched is done with: its place takes the sums of all lanes.
        cuda.syncthreads()
        for i in range(T):
            shared[start + APART * tid + i] = sums[i]
        cuda.syncthreads()
        tap = tid
        while tap < T:
            total = 0.0
            for other in range(THREADS):
                total += shared[start + APART * other + tap]
            partial[(part * C + c) * T + tap] = total
            tap += THREADS

    return dwconv1d_wgrad_segments_kernel


def launches(call: Call, g: Correlation, x: Any, dy: Any, dw: Any, dd: Any) -> list[Launch]:
    """The kernel on x and dy, then the sum of its partial sums."""
    tile, partial, reach = call.tile, partials.partial_sums(call), Reach(g.T, g.left)
    maps = tensor_maps.upload(map_of(dy, g, WARP), map_of(x, g, reach.box_rows))
    numbers = (np.int32(number) for number in (g.C, blocks(g.L, UNIT), units(g), tile.strip(g, WARPS)))
    nbytes = shared_bytes(max(2 * WARPS * (reach.box_floats + DY), WARP * WARPS * (g.T | 1) + 2), WARPS)
    first = Launch(kernel_for(g.T, g.left), g.C * tile.parts, WARP * WARPS, (maps, partial, *numbers), nbytes, keep=(maps, x, dy))
    return [first, partials.add(g, partial, dw, dd, tile.parts)]


def traffic(call: Call, g: Correlation) -> list[Traffic]:
    """dy, and x with what the taps reach; then the partial sums."""
    one, parts = element(call), call.tile.parts
    first = Traffic(one * g.rows * (g.L + loads(g)), partials.scratch_bytes(g, parts), 2 * one * g.rows * g.L)
    return [first, partials.add_traffic(g, parts)]
