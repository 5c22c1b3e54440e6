"""Variant best for long series on Hopper: a warp takes 1,024 neighbours of one series, each lane 32 of them, and works alone.

What a warp takes lies in one piece of memory. TMA fetches it as rows of 128 bytes, a segment of 32 elements each, with the rows before and
behind that the filter reaches; rows outside the series are zeros. A lane loads its segment and what the taps reach into registers, 16 bytes
at a time, and from there on every index is known: 64 products for each load of four taps, which all lanes share. The results take the place
of the elements, and TMA stores them. While a warp multiplies, its next segments are on their way into its second box.

TMA swizzles: quad q of row r lies at place q xor r (mod 8), so eight lanes that load the same quad of their rows meet all banks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit, types
from nbcnn.gpu.target import Target
from nbcnn.ops.kernel import tensor_maps
from nbcnn.ops.kernel.call import Call, Launch, blocks
from nbcnn.ops.kernel.traffic import Traffic, element
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.mbarrier import mbarrier_arrive_expect_tx, mbarrier_wait
from nbcnn.ops.ptx.shuffle import WARP, warp_barrier
from nbcnn.ops.ptx.tma import commit_stores, fence_async_shared, load_tile_3d, store_tile_3d, wait_stores_read
from nbcnn.ops.ptx.vector import shared_load4, shared_store4
from nbcnn.ops.series.dwconv1d import naive
from nbcnn.ops.series.dwconv1d.series import Correlation
from nbcnn.ops.series.dwconv1d.short import Strips, fewest_rounds
from nbcnn.ops.series.dwconv1d.staging import fill_filter, floats_before, open_maps, quads

SEGMENT = 32
"""Elements of a lane: a row of 128 bytes."""
UNIT = WARP * SEGMENT
"""Elements of a warp."""
MOST_TAPS = 64
GROUP = 16
"""Results whose sums are in registers at a time."""
ALIGNED = 256
"""Floats of which a swizzled box begins at a multiple: 1,024 bytes."""
WARPS, RESIDENT = 4, 4
"""Warps of a block, and blocks that share a multiprocessor."""
MAP_BYTES = 128


@dataclass(frozen=True)
class Segments(Strips):
    """Blocks that share the series of one channel; where both gradients are made, as many as `parts_dx` in the kernel of the input's."""

    parts_dx: int = 0

    def strip(self, g: Correlation, warps: int) -> int:
        """Times 1,024 elements that each warp takes."""
        return blocks(units(g), self.parts * warps)


@dataclass(frozen=True)
class Reach:
    """How far the window of a lane goes: taps, the first of which looks `left` back; rows and quads before and behind its own."""

    taps: int
    left: int

    @property
    def rows(self) -> tuple[int, int]:
        return blocks_or_none(self.left, SEGMENT), blocks_or_none(self.taps - 1 - self.left, SEGMENT)

    @property
    def quads(self) -> tuple[int, int]:
        return blocks_or_none(self.left, 4), blocks_or_none(self.taps - 1 - self.left, 4)

    @property
    def box_rows(self) -> int:
        return WARP + sum(self.rows)

    @property
    def box_floats(self) -> int:
        """Floats from one box to the next."""
        return blocks(self.box_rows * SEGMENT, ALIGNED) * ALIGNED

    @property
    def window(self) -> int:
        """Elements of a lane's window."""
        return SEGMENT + 4 * sum(self.quads)


def blocks_or_none(count: int, size: int) -> int:
    """Blocks of `size` that cover `count`, none for nothing."""
    return -(-count // size)


def units(g: Correlation) -> int:
    """Times 1,024 elements that one channel has."""
    return g.N * blocks(g.L, UNIT)


def fits(g: Correlation) -> bool:
    """True if the series are whole rows, most of a warp's 32, and a lane's registers hold a window."""
    return g.L % SEGMENT == 0 and 3 * UNIT * blocks(g.L, UNIT) <= 4 * g.L and g.T <= MOST_TAPS


def choose(g: Correlation, target: Target, warps: int, resident: int) -> Segments:
    """The parts that finish first."""
    return Segments(fewest_rounds(g.C, units(g), warps, target.multiprocessors * resident, 1, units(g)))


def in_order(steps: Sequence[Any]) -> Any:
    """One device function of four arguments that calls `steps` one behind the other."""
    while len(steps) > 1:
        steps = [_together(*steps[at : at + 4]) for at in range(0, len(steps), 4)]
    return steps[0]


def _together(*steps: Any) -> Any:
    if len(steps) == 1:
        return steps[0]
    if len(steps) % 2:
        return _two(_together(*steps[:-1]), steps[-1])
    return _two(*steps) if len(steps) == 2 else _two(_two(*steps[:2]), _two(*steps[2:]))


def _two(first: Any, second: Any) -> Any:
    @jit(device=True)
    def both(a, b, c, d):
        first(a, b, c, d)
        second(a, b, c, d)

    return both


@functools.cache
def take(first: int, last: int, into: int) -> Any:
    """take(window, shared, start, row): window[into:] = quads `first` … `last` − 1 of the row of shared memory at start + 32·row, counted from its
    beginning: −1 is the last quad of the row before."""

    def of_row(step: int) -> Any:
        low, high = max(first, 8 * step), min(last, 8 * step + 8)
        STEP, LOW, COUNT, TO = step, low - 8 * step, high - low, into + 4 * (low - first)

        @jit(device=True)
        def run(window, shared, start, row):
            there = row + STEP
            here = (there << 5) ^ ((there & 7) << 2)
            for q in range(COUNT):
                a, b, c, d = shared_load4(shared, start + (here ^ 4 * (LOW + q)))
                window[TO + 4 * q], window[TO + 4 * q + 1], window[TO + 4 * q + 2], window[TO + 4 * q + 3] = a, b, c, d

        return run

    return in_order([of_row(step) for step in range(first // 8, -(-last // 8))])


@functools.cache
def sums(taps: int, left: int, first: int) -> Any:
    """add(acc, window, shared, at_taps): acc[m] += result first + m of a lane, m < GROUP."""
    OFFSET = 4 * Reach(taps, left).quads[0] - left

    def four_taps(tap: int) -> Any:
        AT, TAP, TAPS = OFFSET + first + tap, tap, min(4, taps - tap)

        @jit(device=True)
        def step(acc, window, shared, at_taps):
            k = shared_load4(shared, at_taps + TAP)
            for q in range(TAPS):
                for m in range(GROUP):
                    acc[m] += k[q] * window[AT + q + m]

        return step

    return in_order([four_taps(tap) for tap in range(0, taps, 4)])


@jit(device=True)
def clear(acc):
    """acc[:GROUP] = 0."""
    for m in range(GROUP):
        acc[m] = 0.0


@functools.cache
def put(first: int) -> Any:
    """A device function put(acc, shared, start, row): acc becomes elements `first` … of the row of shared memory at start + 32·row."""
    FIRST = first

    @jit(device=True)
    def store(acc, shared, start, row):
        here = (row << 5) ^ ((row & 7) << 2)
        for q in range(GROUP // 4):
            shared_store4(shared, start + (here ^ FIRST + 4 * q), acc[4 * q], acc[4 * q + 1], acc[4 * q + 2], acc[4 * q + 3])

    return store


@functools.cache
def kernel_for(taps: int, left: int, flipped: bool, skip: bool) -> Any:
    """The kernel of fprop and dgrad."""
    reach, THREADS, T, LEFT = Reach(taps, left), WARP * WARPS, taps, left
    TAPS, BOX, BYTES, (BEFORE, _), WINDOW = quads(taps), reach.box_floats, 128 * reach.box_rows, reach.rows, reach.window
    MINE = 2 * BOX
    FILTER = WARPS * MINE
    BARRIERS = FILTER + TAPS
    stage_filter = fill_filter(flipped, skip, THREADS)
    # The first results need no more of the window than this: registers are fewer if the rest comes when their taps are done.
    FIRST, LAST = -reach.quads[0], SEGMENT // 4 + reach.quads[1]
    FIRST_END = min(LAST, FIRST + blocks(4 * reach.quads[0] - left + GROUP + taps - 1, 4))
    take_first, take_rest = take(FIRST, FIRST_END, 0), take(FIRST_END, LAST, 4 * (FIRST_END - FIRST))
    add_first, add_rest, put_first, put_rest = sums(taps, left, 0), sums(taps, left, GROUP), put(0), put(GROUP)
    boxes_at = floats_before(1024)

    @jit(launch_bounds=(THREADS, RESIDENT))
    def dwconv1d_segments_kernel(maps, w, d, C, across, units, strip):
        """out[n,c,t] = Σ_i k[c,i] · source[n,c,t+i−left]; k is w, or w read backwards, with d added to tap `left`.

        grid C·parts, block 4 warps; a block owns one channel of its part of the `units`, `across` of a series; a warp takes one at a time,
        1,024 elements, a lane 32. shared two boxes of (32 + rows that the taps reach) · 128 bytes per warp, and the filter
        moves  source once and what the taps reach beside every 1,024 elements, out once, the filter once per block
        needs  compute capability 9.0: maps are the tensor maps of source and out, rows of 32 elements
        source ours; NVIDIA, PTX ISA, "cp.async.bulk.tensor"
        """
        shared = cuda.shared.array(0, f4)
        base = byte_address_shared(shared)
        start = boxes_at(base)
        tid = cuda.threadIdx.x
        lane, warp = tid & WARP - 1, tid // WARP
        part = cuda.blockIdx.x // C
        c = cuda.blockIdx.x - part * C
        at = start + warp * MINE
        at_taps = start + FILTER
        barrier = base + (start + BARRIERS + warp * 4) * 4
        source, out = byte_address_global(maps), byte_address_global(maps) + types.uint64(MAP_BYTES)
        unit = (part * WARPS + warp) * strip
        end = min(units, unit + strip)
        open_maps(lane, tid, barrier, source, out)
        if lane == 0 and unit < end:
            n = unit // across
            mbarrier_arrive_expect_tx(barrier, BYTES)
            load_tile_3d(base + at * 4, source, 0, (unit - n * across) * WARP - BEFORE, n * C + c, barrier)
        stage_filter(shared, at_taps, w, d, c, T, 0, TAPS, LEFT, tid)
        cuda.syncthreads()
        window, acc = cuda.local.array(WINDOW, f4), cuda.local.array(GROUP, f4)
        half, phase = 0, 0
        while unit < end:
            mine = at + half * BOX
            mbarrier_wait(barrier + half * 8, phase)
            following = unit + 1
            if lane == 0 and following < end:
                other, place = barrier + (1 - half) * 8, at + (1 - half) * BOX
                n = following // across
                wait_stores_read()
                mbarrier_arrive_expect_tx(other, BYTES)
                load_tile_3d(base + place * 4, source, 0, (following - n * across) * WARP - BEFORE, n * C + c, other)
            take_first(window, shared, mine, lane + BEFORE)
            clear(acc)
            add_first(acc, window, shared, at_taps)
            take_rest(window, shared, mine, lane + BEFORE)
            # All lanes have what they need of all rows, whose place the results take.
            warp_barrier()
            put_first(acc, shared, mine, lane)
            clear(acc)
            add_rest(acc, window, shared, at_taps)
            put_rest(acc, shared, mine, lane)
            fence_async_shared()
            warp_barrier()
            if lane == 0:
                n = unit // across
                store_tile_3d(out, 0, (unit - n * across) * WARP, n * C + c, base + mine * 4)
                commit_stores()
            unit = following
            half = 1 - half
            if half == 0:
                phase ^= 1
        wait_stores_read()

    return dwconv1d_segments_kernel


def map_of(array: Any, g: Correlation, rows: int) -> np.ndarray:
    """The tensor map of series in rows of 32 elements: boxes of `rows` of them."""
    return tensor_maps.encode_tiled(array, (SEGMENT, g.L // SEGMENT, g.rows), (SEGMENT, rows, 1), strides=(SEGMENT, g.L))


def shared_bytes(floats: int, warps: int) -> int:
    """Bytes that a block asks for: `floats`, two barriers per warp, and what it takes to begin at a multiple of 1,024."""
    return 4 * floats + 16 * warps + 1024


def bind(call: Call, g: Correlation) -> list[Launch]:
    """One launch: y from x, or dx from dy."""
    return [launch(g, call.tile, naive.image_arrays(call))]


def launch(g: Correlation, tile: Segments, arrays: tuple[Any, ...]) -> Launch:
    """The kernel on source, w, d and out."""
    (source, w, d, out), reach = arrays, Reach(g.T, g.left)
    maps = tensor_maps.upload(map_of(source, g, reach.box_rows), map_of(out, g, WARP))
    numbers = (np.int32(number) for number in (g.C, blocks(g.L, UNIT), units(g), tile.strip(g, WARPS)))
    nbytes = shared_bytes(2 * WARPS * reach.box_floats + quads(g.T), WARPS)
    kernel = kernel_for(g.T, g.left, g.flipped, g.skip)
    return Launch(kernel, g.C * tile.parts, WARP * WARPS, (maps, w, d, *numbers), nbytes, keep=(maps, source, out))


def loads(g: Correlation) -> int:
    """Elements of one series that are fetched, with what the taps reach."""
    before, behind = Reach(g.T, g.left).rows
    rows = g.L // SEGMENT
    return SEGMENT * sum(min(rows, first + WARP + behind) - max(0, first - before) for first in range(0, rows, WARP))


def traffic(call: Call, g: Correlation) -> list[Traffic]:
    """What `bind` asks memory for."""
    return [traffic_of(call, g, call.tile)]


def traffic_of(call: Call, g: Correlation, tile: Segments) -> Traffic:
    """The source with what the taps reach, out once, the filter once per block."""
    one, filters = element(call), 4 * g.C * (g.T + g.skip)
    read = one * g.rows * loads(g) + filters * tile.parts
    return Traffic(read, g.rows * g.L * element(call, "out"), one * g.rows * g.L + filters)
