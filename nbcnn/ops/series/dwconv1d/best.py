"""Variant best, fprop and dgrad: which tile, and the one that takes any: 32 series in shared memory, twelve results per thread in registers.

What TMA can move is in `boxes.py` and `segments.py`, short series without it in `whole.py`.

A lane works in a row of its own, and the lanes of a warp on the same twelve elements of their rows: a tap is one address for the
whole warp, and the taps that meet only zeros are the same for all its rows, so a causal filter as long as the series costs little
more than the half of its products that count.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.gpu.target import Target
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.stored import kinds
from nbcnn.ops.kernel.traffic import Traffic, element
from nbcnn.ops.ptx.shuffle import WARP
from nbcnn.ops.series.dwconv1d import boxes, naive, segments, short, whole
from nbcnn.ops.series.dwconv1d.boxes import Boxes
from nbcnn.ops.series.dwconv1d.results import put_results, store_rows
from nbcnn.ops.series.dwconv1d.segments import Segments
from nbcnn.ops.series.dwconv1d.series import Correlation, of_images, supports
from nbcnn.ops.series.dwconv1d.short import Strips
from nbcnn.ops.series.dwconv1d.sliding import MOST_SEGMENTS, OVERRUN, RESULTS, ROWS, Sliding, choose, odd_quads, slide, stage_rows
from nbcnn.ops.series.dwconv1d.staging import fill_filter, quads, row_loads, shift_of
from nbcnn.ops.series.dwconv1d.whole import Whole
from nbcnn.plan.op import Op

MOST_TAPS = 128
"""Taps that are staged at once; a longer filter takes several iterations."""


@functools.cache
def kernel_for(tile: Sliding, shift: int, vector: bool, flipped: bool, skip: bool, source_kind: str, out_kind: str) -> Any:
    """The kernel of fprop and dgrad; shift: by how much the first tap is off a multiple of four; vector: L is a multiple of four."""
    SEGMENTS, PACK, TILE = tile.segments, tile.pack, tile.length
    THREADS, SERIES = WARP * SEGMENTS, ROWS // PACK
    stage = stage_rows(source_kind, vector, SEGMENTS, PACK, TILE)
    store = store_rows(out_kind, vector, SEGMENTS, PACK, TILE)
    stage_filter, run = fill_filter(flipped, skip, THREADS), slide(shift)

    @jit(launch_bounds=(THREADS, max(1, 768 // THREADS)))
    def dwconv1d_best_kernel(source, w, d, out, N, C, L, T, left, taps, pitch, tiles):
        """out[n,c,t] = Σ_i k[c,i] · source[n,c,t+i−left]; k is w, or w read backwards, with d added to tap `left`.

        grid C·⌈N·pack/32⌉·⌈tiles/pack⌉, block 32 rows × SEGMENTS; a row is a tile of a series, a block owns 32 rows of one channel, a
        thread twelve elements of its row. shared 4·(taps + 32·pitch) bytes, taps at a time, pitch ≥ TILE + taps + 8
        moves  out once, each series once for every tile that its halo of T − 1 reaches, the filter once per block
        source ours; lanes down the batch as in arXiv:2604.25422's naive kernel, but through shared memory
        """
        shared = cuda.shared.array(0, f4)
        tid = cuda.threadIdx.x
        lane, warp = tid & WARP - 1, tid // WARP
        rest = cuda.blockIdx.x // C
        c = cuda.blockIdx.x - rest * C
        batch = rest // tiles
        part0, n0 = (rest - batch * tiles) * PACK, batch * SERIES
        begin = part0 * TILE + RESULTS * warp
        acc = cuda.local.array(RESULTS, f4)
        for m in range(RESULTS):
            acc[m] = 0.0
        i0 = 0
        while i0 < T:
            count = min(taps, T - i0 + 3 & -4)
            stage_filter(shared, 0, w, d, c, T, i0, count, left, tid)
            stage(shared, taps, pitch, source, n0, part0, i0 - left - shift, TILE + 4 + count, N, C, c, L, warp, lane)
            cuda.syncthreads()
            # Taps that meet a series in any of the warp's rows: not before the last tile's start, nor beyond the first tile's end.
            first = max(0, left - i0 - begin - ((PACK - 1) * TILE + RESULTS - 1)) & -4
            run(acc, shared, 0, taps + lane * pitch + RESULTS * warp, first, min(count, L + left - begin - i0))
            cuda.syncthreads()
            i0 += taps
        put_results(acc, shared, taps + lane * pitch + RESULTS * warp)
        cuda.syncthreads()
        store(shared, taps, pitch, out, n0, part0, N, C, c, L, tid)

    return dwconv1d_best_kernel


def staged(g: Correlation, tile: Sliding) -> tuple[int, int, int]:
    """(taps at a time, pitch of a row, bytes of shared memory)."""
    taps = min(quads(g.T), MOST_TAPS)
    pitch = odd_quads(tile.length + taps + OVERRUN)
    return taps, pitch, 4 * (taps + ROWS * pitch)


MODULES: dict[type, Any] = {Whole: whole, Boxes: boxes, Segments: segments}
"""Modules that bind the tiles which are not of this file."""
Tile = Sliding | Whole | Boxes | Segments


def by_tma(call: Call, target: Target) -> bool:
    """True if TMA may fetch and store the operands: series of float32, on a GPU that has it."""
    return target.tma and {*call.in_dtypes, *call.out_dtypes} <= {"float32"}


def tile(call: Call, target: Target) -> Tile:
    return candidates(call, target)[0]


def candidates(call: Call, target: Target) -> list[Tile]:
    """The tiles worth trying, the own choice first: what TMA moves, series whole in registers, every number of segments in shared memory."""
    g = of_images(call)
    made: list[Tile] = []
    last: list[Tile] = []
    if by_tma(call, target):
        first, others = boxes.tiles(g, target, boxes.WARPS, (boxes.BUSY_BLOCKS, boxes.RESIDENT))
        made, last = [*first], [*others]
        if segments.fits(g):
            made.append(segments.choose(g, target, segments.WARPS, segments.RESIDENT))
    chosen = choose(g)
    sliding = [chosen, *(Sliding(count, chosen.pack) for count in range(1, min(MOST_SEGMENTS, -(-g.L // RESULTS)) + 1))]
    if not short.fits(g):
        return list(dict.fromkeys([*made, *sliding, *last]))
    own = whole.choose(g, target, whole.WARPS, whole.resident(g.L))
    in_registers = [own, Whole(2 * own.parts)]
    return list(dict.fromkeys([*made, *in_registers, *sliding, *last] if g.N >= whole.FEWEST else [*made, *sliding, *in_registers, *last]))


def bind(call: Call) -> list[Launch]:
    """One launch: y from x, or dx from dy."""
    g, chosen = of_images(call), call.tile
    other = MODULES.get(type(chosen))
    if other:
        return other.bind(call, g)
    taps, pitch, nbytes = staged(g, chosen)
    kernel = kernel_for(Sliding(chosen.segments, chosen.pack), shift_of(g), g.L % 4 == 0, g.flipped, g.skip, *kinds(call))
    numbers = (*naive.sizes(g), *(np.int32(number) for number in (taps, pitch, chosen.tiles(g))))
    grid = g.C * chosen.batches(g) * chosen.tiles(g)
    return [Launch(kernel, grid, WARP * chosen.segments, (*naive.image_arrays(call), *numbers), nbytes)]


def series_loads(g: Correlation, tile: Sliding) -> int:
    """Elements of one series that the tiles stage, with their halos."""
    step = min(quads(g.T), MOST_TAPS)
    starts = range(0, g.L, tile.length)
    passes = ((i0, min(step, quads(g.T - i0))) for i0 in range(0, g.T, step))
    return sum(row_loads(g.L, starts, i0 - g.left - shift_of(g), tile.length + 4 + count) for i0, count in passes)


def traffic(call: Call) -> list[Traffic]:
    """The source with a halo per tile, the filter once per block, out once."""
    g, one, chosen = of_images(call), element(call), call.tile
    if isinstance(chosen, Segments):
        return segments.traffic(call, g)
    if isinstance(chosen, Strips):
        return short.traffic(call, g)
    filters = 4 * g.C * (g.T + g.skip)
    read = one * g.rows * series_loads(g, chosen) + filters * chosen.batches(g) * chosen.tiles(g)
    return [Traffic(read, g.rows * g.L * element(call, "out"), one * g.rows * g.L + filters)]


IMAGES = Impl(bind, supports=supports, tile=tile, candidates=candidates, traffic=traffic)
OPS = {Op("dwconv1d", "fprop"): IMAGES, Op("dwconv1d", "dgrad"): IMAGES}
