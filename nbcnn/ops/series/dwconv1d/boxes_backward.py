"""Variant best for short series on Hopper, backward: the weight gradient, and both gradients from one load of x and dy.

`whole_backward.py` with the boxes of `boxes.py`: a lane has dy in registers and the sums of all taps, which stay there over all boxes of its
warp, and reads x from shared memory, four elements for 48 products. A warp has two pairs of boxes, one on its way. dx leaves from where dy lay.
At the end the sums of the block's warps are added up.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit, types
from nbcnn.ops.kernel import tensor_maps
from nbcnn.ops.kernel.call import Call, Launch
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.mbarrier import mbarrier_arrive_expect_tx, mbarrier_wait
from nbcnn.ops.ptx.shuffle import WARP, warp_barrier
from nbcnn.ops.ptx.tma import commit_stores, fence_async_shared, fence_tensor_map, load_tile_3d, store_tile_3d, wait_stores_read
from nbcnn.ops.series.dwconv1d import partials
from nbcnn.ops.series.dwconv1d.boxes import MAP_BYTES, box_floats, fill_taps, groups, map_of, shared_bytes
from nbcnn.ops.series.dwconv1d.series import Correlation
from nbcnn.ops.series.dwconv1d.short import convolve, take
from nbcnn.ops.series.dwconv1d.sliding import odd_quads
from nbcnn.ops.series.dwconv1d.staging import floats_before, init_two_barriers
from nbcnn.ops.series.dwconv1d.straight import gradient

WARPS = 4
"""Warps of a block."""
RESIDENT = 2
"""Blocks that fit on a multiprocessor, in shared memory and by their registers."""
BUSY_BLOCKS = 1
"""Blocks that keep a multiprocessor's memory busy where only the weights' gradient is made: two are 7 % slower at the paper's size."""


@functools.cache
def kernel_for(length: int, taps: int, left: int, left_dx: int | None, flipped: bool, skip: bool) -> Any:
    """The kernel of the partial sums, and of dx if `left_dx` is given: then with the filter in the order `flipped`, with a `skip` or not."""
    L, T, PITCH, BOX, THREADS, WITH_DX = length, taps, odd_quads(length), box_floats(length), WARP * WARPS, left_dx is not None
    MY_TAPS, TAPS, APART = odd_quads(taps), box_floats(taps) if left_dx is not None else 0, taps | 1
    BARRIERS = TAPS + 4 * WARPS * BOX
    take_row, add = take(length), gradient(length, taps, left)
    stage_taps, run = fill_taps(taps, left_dx or 0, flipped, skip, THREADS), convolve(length, taps, left_dx or 0)
    boxes_at = floats_before(128)

    @jit(launch_bounds=(THREADS, RESIDENT))
    def dwconv1d_bwd_boxes_kernel(maps, w, d, partial, C, groups, strip):
        """partial[part][c][i] = Σ_n Σ_t dy[n,c,t] · x[n,c,t+i−left] over the series of the part; dx as dwconv1d_boxes_kernel has it.

        grid groups·parts, block 4 warps; a block owns 32 neighbouring channels of its part of the examples and their partial sums, per warp those
        of one example at a time, per lane one. shared the taps for dx, and 16·32·PITCH floats: two boxes of dy and of x per warp
        moves  x and dy once, partial once; dx once, the filter once per part
        needs  compute capability 9.0: maps are the tensor maps of dy, x and dx
        source ours; the order of a sum never depends on timing
        """
        shared = cuda.shared.array(0, f4)
        base = byte_address_shared(shared)
        start = boxes_at(base)
        tid = cuda.threadIdx.x
        lane, warp = tid & WARP - 1, tid // WARP
        part = cuda.blockIdx.x // groups
        c = (cuda.blockIdx.x - part * groups) * WARP
        at = start + TAPS + warp * (4 * BOX)
        barrier = base + (start + BARRIERS + warp * 4) * 4
        dy_map = byte_address_global(maps)
        x_map, dx_map = dy_map + types.uint64(MAP_BYTES), dy_map + types.uint64(2 * MAP_BYTES)
        n = part * strip * WARPS + warp
        if lane == 0:
            init_two_barriers(barrier)
        if tid == 0:
            fence_tensor_map(dy_map)
            fence_tensor_map(x_map)
            if WITH_DX:
                fence_tensor_map(dx_map)
        cuda.syncthreads()
        if lane == 0:
            mbarrier_arrive_expect_tx(barrier, 8 * BOX)
            load_tile_3d(base + at * 4, dy_map, 0, c, n, barrier)
            load_tile_3d(base + (at + BOX) * 4, x_map, 0, c, n, barrier)
        if WITH_DX:
            stage_taps(shared, start, w, d, c, C, tid)
        cuda.syncthreads()
        row, sums = cuda.local.array(L, f4), cuda.local.array(T, f4)
        for i in range(T):
            sums[i] = 0.0
        iteration = 0
        while iteration < strip:
            half = iteration & 1
            mine = at + half * (2 * BOX)
            own = mine + lane * PITCH
            mbarrier_wait(barrier + half * 8, (iteration >> 1) & 1)
            take_row(row, shared, own)
            if lane == 0 and iteration + 1 < strip:
                other, to = barrier + (1 - half) * 8, base + (at + (1 - half) * (2 * BOX)) * 4
                following = n + WARPS
                if WITH_DX:
                    wait_stores_read()
                mbarrier_arrive_expect_tx(other, 8 * BOX)
                load_tile_3d(to, dy_map, 0, c, following, other)
                load_tile_3d(to + 4 * BOX, x_map, 0, c, following, other)
            add(sums, row, shared, own + BOX)
            if WITH_DX:
                run(row, shared, start + lane * MY_TAPS, own)
                fence_async_shared()
            warp_barrier()
            if WITH_DX and lane == 0:
                store_tile_3d(dx_map, 0, c, n, base + mine * 4)
                commit_stores()
            n += WARPS
            iteration += 1
        # What was fetched is done with, and the last store has read: its place takes the sums of all lanes.
        if WITH_DX:
            wait_stores_read()
        cuda.syncthreads()
        at = start + TAPS
        for i in range(T):
            shared[at + APART * tid + i] = sums[i]
        cuda.syncthreads()
        place = tid
        while place < WARP * T:
            channel = place // T
            tap = place - channel * T
            total = 0.0
            for other in range(WARPS):
                total += shared[at + APART * (channel + WARP * other) + tap]
            if c + channel < C:
                partial[(part * C + c) * T + place] = total
            place += THREADS

    return dwconv1d_bwd_boxes_kernel


def launches(call: Call, g: Correlation, towards: Correlation | None, arrays: tuple[Any, ...], dw: Any, dd: Any) -> list[Launch]:
    """The kernel on x, dy, w, d and dx, then the sum of its partial sums."""
    tile, partial = call.tile, partials.partial_sums(call)
    x, dy, w, d, dx = arrays
    direction = (None, False, False) if towards is None else (towards.left, towards.flipped, towards.skip)
    kernel = kernel_for(g.L, g.T, g.left, *direction)
    maps = tensor_maps.upload(*(map_of(array, g) for array in (dy, x, dx)))
    numbers = (np.int32(g.C), np.int32(groups(g)), np.int32(tile.strip(g, WARPS)))
    nbytes = shared_bytes(box_floats(g.T) if towards is not None else 0, WARPS, g.L, 4)
    first = Launch(kernel, groups(g) * tile.parts, WARP * WARPS, (maps, w, d, partial, *numbers), nbytes, keep=(maps, x, dy, dx))
    return [first, partials.add(g, partial, dw, dd, tile.parts)]
