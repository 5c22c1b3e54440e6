"""Variant best for short series on Hopper: boxes of 32 series come and go by TMA, a lane has one whole in registers and works alone.

As in `whole.py` a lane makes every result of its series (`straight.py`), but nothing is spent on moving: one instruction of one lane has a
box of 32 series fetched into shared memory, and one has the results stored from where the box lay. The lanes are neighbouring channels of one
example, each with taps of its own, because those lie in memory one behind the other. A warp has two boxes, so that the next one is on its way
while it multiplies; no warp waits for another.

A box is one quad wider than a series if that is what makes its rows an odd number of quads: TMA fills what lies outside a series with zeros,
and does not store it. So lanes meet different banks.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit, types
from nbcnn.gpu.target import Target
from nbcnn.ops.kernel import tensor_maps
from nbcnn.ops.kernel.call import Call, Launch, blocks
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.mbarrier import mbarrier_arrive_expect_tx, mbarrier_wait
from nbcnn.ops.ptx.shuffle import WARP, warp_barrier
from nbcnn.ops.ptx.tma import commit_stores, fence_async_shared, load_tile_3d, store_tile_3d, wait_stores_read
from nbcnn.ops.ptx.vector import load1_if
from nbcnn.ops.series.dwconv1d import naive, short
from nbcnn.ops.series.dwconv1d.series import Correlation
from nbcnn.ops.series.dwconv1d.short import Strips, convolve, fewest_rounds, take
from nbcnn.ops.series.dwconv1d.sliding import odd_quads
from nbcnn.ops.series.dwconv1d.staging import floats_before, open_maps

WARPS = 8
"""Warps of a block."""
RESIDENT = 2
"""Blocks that fit on a multiprocessor, in shared memory and by their registers."""
BUSY_BLOCKS = 1
"""Blocks that keep a multiprocessor's memory busy: two are 3 % slower at the paper's size."""
FEWEST = 8
"""Boxes of a warp below which it does not pay what a block costs to begin with: tensor maps, barriers, taps of 32 channels."""
MAP_BYTES = 128
MOST_PARTS = 1024


class Boxes(Strips):
    """A unit is 32 neighbouring channels of one example: a box."""

    def strip(self, g: Correlation, warps: int) -> int:
        """Boxes that each warp takes."""
        return blocks(g.N, self.parts * warps)


def groups(g: Correlation) -> int:
    """Groups of 32 channels."""
    return blocks(g.C, WARP)


def fits(g: Correlation) -> bool:
    """True if a lane holds a whole series and the filter is short, and most lanes have a channel."""
    return short.fits(g) and 3 * WARP * groups(g) <= 4 * g.C


def tiles(g: Correlation, target: Target, warps: int, residents: tuple[int, int]) -> tuple[list[Boxes], list[Boxes]]:
    """The choice for the first of `residents`, and for the other: those to prefer to all else, and those only worth trying."""
    made = [choose(g, target, warps, resident) for resident in residents] if fits(g) else []
    good = bool(made) and made[0].strip(g, warps) >= FEWEST
    return (made, []) if good else ([], made)


def choose(g: Correlation, target: Target, warps: int, resident: int) -> Boxes:
    """The parts that finish first; a block begins with the time of two boxes."""
    return Boxes(fewest_rounds(groups(g), g.N, warps, target.multiprocessors * resident, 2, MOST_PARTS))


@functools.cache
def fill_taps(taps: int, left: int, flipped: bool, skip: bool, threads: int) -> Any:
    """A device function stage(shared, at, w, d, first, C, tid): the taps of 32 channels from `first` on in the order of `series.py`, d added to
    tap `left`.

    Called by `threads` threads; zeros beyond the last tap and the last channel. All loads of a thread are on their way at once.
    """
    PITCH, T, LEFT, TURNS = odd_quads(taps), taps, left, blocks(WARP * odd_quads(taps), threads)
    FLOATS = WARP * PITCH

    @jit(device=True)
    def stage(shared, at, w, d, first, C, tid):
        found = cuda.local.array(TURNS, f4)
        for b in range(TURNS):
            place = tid + b * threads
            row = place // PITCH
            i, c = place - row * PITCH, first + row
            inside = (i < T) & (c < C) & (row < WARP)
            found[b] = load1_if(w, c * T + ((T - 1 - i) if flipped else i), inside)
            if skip:
                found[b] += load1_if(d, c, inside & (i == LEFT))
        for b in range(TURNS):
            place = tid + b * threads
            if place < FLOATS:
                shared[at + place] = found[b]

    return stage


def box_floats(length: int) -> int:
    """Floats of a box of 32 series: a multiple of 128 bytes, where TMA puts it."""
    return WARP * odd_quads(length)


def shared_bytes(taps: int, warps: int, length: int, boxes: int) -> int:
    """Bytes that a block asks for: taps, `boxes` boxes per warp, two barriers per warp, and what it takes to begin at a multiple of 128."""
    return 4 * (taps + warps * boxes * box_floats(length)) + 16 * warps + 128


@functools.cache
def kernel_for(length: int, taps: int, left: int, flipped: bool, skip: bool) -> Any:
    """The kernel of fprop and dgrad."""
    L, PITCH, BOX, THREADS, MY_TAPS = length, odd_quads(length), box_floats(length), WARP * WARPS, odd_quads(taps)
    TAPS = WARP * MY_TAPS
    BARRIERS = TAPS + 2 * WARPS * BOX
    stage_taps, take_row, run = fill_taps(taps, left, flipped, skip, THREADS), take(length), convolve(length, taps, left)
    boxes_at = floats_before(128)

    @jit(launch_bounds=(THREADS, RESIDENT))
    def dwconv1d_boxes_kernel(maps, w, d, C, groups, strip):
        """out[n,c,t] = Σ_i k[c,i] · source[n,c,t+i−left]; k is w, or w read backwards, with d added to tap `left`.

        grid groups·parts, block 8 warps; a block owns 32 neighbouring channels of its part of the examples, per warp those of one example at a
        time, per lane one. shared the taps, and 16·32·PITCH floats: two boxes per warp
        moves  source and out once, the filter once per part
        needs  compute capability 9.0: maps are the tensor maps of source and out
        source ours; NVIDIA, PTX ISA, "cp.async.bulk.tensor"
        """
        shared = cuda.shared.array(0, f4)
        base = byte_address_shared(shared)
        start = boxes_at(base)
        tid = cuda.threadIdx.x
        lane, warp = tid & WARP - 1, tid // WARP
        part = cuda.blockIdx.x // groups
        c = (cuda.blockIdx.x - part * groups) * WARP
        at = start + TAPS + warp * (2 * BOX)
        barrier = base + (start + BARRIERS + warp * 4) * 4
        source, out = byte_address_global(maps), byte_address_global(maps) + types.uint64(MAP_BYTES)
        n = part * strip * WARPS + warp
        open_maps(lane, tid, barrier, source, out)
        if lane == 0:
            mbarrier_arrive_expect_tx(barrier, 4 * BOX)
            load_tile_3d(base + at * 4, source, 0, c, n, barrier)
        stage_taps(shared, start, w, d, c, C, tid)
        cuda.syncthreads()
        row = cuda.local.array(L, f4)
        iteration = 0
        while iteration < strip:
            half = iteration & 1
            mine = at + half * BOX
            own = mine + lane * PITCH
            mbarrier_wait(barrier + half * 8, (iteration >> 1) & 1)
            take_row(row, shared, own)
            if lane == 0 and iteration + 1 < strip:
                other, to = barrier + (1 - half) * 8, at + (1 - half) * BOX
                wait_stores_read()
                mbarrier_arrive_expect_tx(other, 4 * BOX)
                load_tile_3d(base + to * 4, source, 0, c, n + WARPS, other)
            run(row, shared, start + lane * MY_TAPS, own)
            fence_async_shared()
            warp_barrier()
            if lane == 0:
                store_tile_3d(out, 0, c, n, base + mine * 4)
                commit_stores()
            n += WARPS
            iteration += 1
        wait_stores_read()

    return dwconv1d_boxes_kernel


def map_of(array: Any, g: Correlation) -> np.ndarray:
    """The tensor map of series (N, C, L): boxes of 32 neighbouring channels."""
    return tensor_maps.encode_tiled(array, (g.L, g.C, g.N), (odd_quads(g.L), WARP, 1), strides=(g.L, g.C * g.L), plain=True)


def bind(call: Call, g: Correlation) -> list[Launch]:
    """One launch: y from x, or dx from dy."""
    tile, kernel = call.tile, kernel_for(g.L, g.T, g.left, g.flipped, g.skip)
    source, w, d, out = naive.image_arrays(call)
    maps = tensor_maps.upload(map_of(source, g), map_of(out, g))
    numbers = (np.int32(g.C), np.int32(groups(g)), np.int32(tile.strip(g, WARPS)))
    nbytes = shared_bytes(box_floats(g.T), WARPS, g.L, 2)
    return [Launch(kernel, groups(g) * tile.parts, WARP * WARPS, (maps, w, d, *numbers), nbytes, keep=(maps, source, out))]
