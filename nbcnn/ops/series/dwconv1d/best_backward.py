"""Variant best, backward: the weight gradient, and both gradients from one load of x and dy.

The weight gradient is the sum of `sliding.py` again, with dy as the factors and taps as the results: a lane works in a row of its
own, on twelve taps, and keeps their sums in registers over a strip of the batch. Rows are added up at the end of a strip, once.
The fused kernel has in shared memory all that the input's gradient needs but the filter, so it makes that from the same tiles:
12 bytes of memory per element instead of 16.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.gpu.target import Target
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks
from nbcnn.ops.kernel.tiles import unsplit
from nbcnn.ops.kernel.traffic import Traffic, element
from nbcnn.ops.ptx.shuffle import WARP
from nbcnn.ops.series.dwconv1d import boxes, boxes_backward, partials, segments, segments_backward, short, whole, whole_backward
from nbcnn.ops.series.dwconv1d.best import by_tma
from nbcnn.ops.series.dwconv1d.boxes import Boxes
from nbcnn.ops.series.dwconv1d.results import put_results, store_rows
from nbcnn.ops.series.dwconv1d.segments import Segments
from nbcnn.ops.series.dwconv1d.series import Correlation, of_backward, of_gradient, supports
from nbcnn.ops.series.dwconv1d.short import Strips
from nbcnn.ops.series.dwconv1d.sliding import MOST_SEGMENTS, OVERRUN, RESULTS, ROWS, Sliding, choose, odd_quads, slide, stage_rows
from nbcnn.ops.series.dwconv1d.staging import fill_filter, quads, row_loads, shift_of
from nbcnn.ops.series.dwconv1d.whole import Whole
from nbcnn.plan.op import Op

RESIDENT = 768
"""Threads that a multiprocessor is to hold: up to 80 registers each."""
FUSED_TAPS = RESULTS * MOST_SEGMENTS
"""The longest filter whose gradients one kernel makes."""
APART = RESULTS + 1
"""Places between the sums of two lanes: an odd number, so that they lie in different banks."""


@dataclass(frozen=True)
class Form:
    """What is frozen into a kernel besides the tile: warps along the taps, shifts of x and dy (`sliding.py`), whether L is a multiple
    of four; and for the input's gradient whether it is made, the order of the taps, and whether there is a skip."""

    taps: int
    shift_x: int
    shift_dy: int
    vector: bool
    with_dx: bool
    flipped: bool
    skip: bool

    def warps(self, tile: Sliding) -> int:
        return max(self.taps, tile.segments) if self.with_dx else self.taps


@functools.cache
def kernel_for(tile: Sliding, form: Form, kind: str, out_kind: str) -> Any:
    """The kernel of the partial sums, and of dx if `form` says so; x and dy are stored as `kind`, dx as `out_kind`."""
    SEGMENTS, PACK, TILE, TAP_SEGMENTS, TAPS = tile.segments, tile.pack, tile.length, form.taps, RESULTS * form.taps
    WARPS, SERIES, SHIFT_X, SHIFT_DY, WITH_DX = form.warps(tile), ROWS // PACK, form.shift_x, form.shift_dy, form.with_dx
    THREADS, REACH = WARP * WARPS, (PACK - 1) * TILE + RESULTS - 1
    stage = stage_rows(kind, form.vector, WARPS, PACK, TILE)
    store = store_rows(out_kind, form.vector, WARPS, PACK, TILE)
    stage_filter, run, run_dx = fill_filter(form.flipped, form.skip, THREADS), slide(SHIFT_X), slide(SHIFT_DY)

    @jit(launch_bounds=(THREADS, max(1, RESIDENT // THREADS)))
    def dwconv1d_bwd_best_kernel(x, dy, w, d, dx, partial, N, C, L, T, left, left_dx, T4, pitch_x, pitch_dy, tiles, units, strip):
        """partial[part][c][i] = Σ_n Σ_t dy[n,c,t] · x[n,c,t+i−left] over the rows of the part; dx as dwconv1d_best_kernel has it.

        grid (C·parts, ⌈T/TAPS⌉), block 32 rows × the warps along taps or tile; a row is a tile of a series, a block takes `strip` of
        the `units` of 32 rows of a channel one after the other and owns TAPS partial sums, per thread twelve of them in its row, and
        twelve elements of dx. shared 128·(pitch_x + pitch_dy) bytes and, for dx, 4·T4
        moves  x and dy once, each with a halo per tile, for every TAPS taps; partial once; dx once
        source ours; the rows' order in a sum never depends on timing
        """
        shared = cuda.shared.array(0, f4)
        tid = cuda.threadIdx.x
        lane, warp = tid & WARP - 1, tid // WARP
        part = cuda.blockIdx.x // C
        c = cuda.blockIdx.x - part * C
        own, base = RESULTS * warp, cuda.blockIdx.y * TAPS
        at_dy = T4
        at_x = at_dy + ROWS * pitch_dy
        halo = left_dx + SHIFT_DY if WITH_DX else 0
        if WITH_DX:
            stage_filter(shared, 0, w, d, c, T, 0, T4, left_dx, tid)
        acc = cuda.local.array(RESULTS, f4)
        for m in range(RESULTS):
            acc[m] = 0.0
        unit = part * strip
        end = min(units, unit + strip)
        while unit < end:
            batch = unit // tiles
            part0, n0 = (unit - batch * tiles) * PACK, batch * SERIES
            start = part0 * TILE
            width = TILE + 4 + T4 if WITH_DX else TILE
            stage(shared, at_dy, pitch_dy, dy, n0, part0, 0 - halo, width, N, C, c, L, warp, lane)
            stage(shared, at_x, pitch_x, x, n0, part0, base - left - SHIFT_X, TILE + TAPS + 4, N, C, c, L, warp, lane)
            cuda.syncthreads()
            row_dy, row_x = at_dy + lane * pitch_dy, at_x + lane * pitch_x
            if warp < TAP_SEGMENTS:
                # Elements of dy that meet x in any of the warp's rows.
                first = max(0, left - base - own - start - REACH) & -4
                last = min(TILE, min(L - start, L + left - base - own - start))
                run(acc, shared, row_dy + halo, row_x + own, first, last)
            if WITH_DX:
                made = cuda.local.array(RESULTS, f4)
                for m in range(RESULTS):
                    made[m] = 0.0
                if warp < SEGMENTS:
                    first = max(0, left_dx - start - own - REACH) & -4
                    run_dx(made, shared, 0, row_dy + own, first, min(T4, L + left_dx - start - own))
                cuda.syncthreads()
                if warp < SEGMENTS:
                    put_results(made, shared, row_x + own)
                cuda.syncthreads()
                store(shared, at_x, pitch_x, dx, n0, part0, N, C, c, L, tid)
            cuda.syncthreads()
            unit += 1
        # What is staged is done with (by a part without rows too): its place takes the sums of all lanes.
        cuda.syncthreads()
        if warp < TAP_SEGMENTS:
            for m in range(RESULTS):
                shared[APART * tid + m] = acc[m]
        cuda.syncthreads()
        tap = tid
        while tap < TAPS and base + tap < T:
            segment = tap // RESULTS
            total = 0.0
            for other in range(WARP):
                total += shared[APART * (WARP * segment + other) + tap - RESULTS * segment]
            partial[(part * C + c) * T + base + tap] = total
            tap += THREADS

    return dwconv1d_bwd_best_kernel


def form_of(g: Correlation, towards: Correlation | None = None) -> Form:
    """The form for gradient `g`, and for the input's gradient `towards` if it is made too."""
    segments = blocks(g.T, RESULTS)
    taps = blocks(segments, blocks(segments, MOST_SEGMENTS))
    vector = g.L % 4 == 0
    if towards is None:
        return Form(taps, shift_of(g), 0, vector, False, False, False)
    return Form(taps, shift_of(g), shift_of(towards), vector, True, towards.flipped, towards.skip)


def staged(g: Correlation, tile: Sliding, form: Form) -> tuple[int, int, int, int]:
    """(floats of the filter, pitch of rows of x, pitch of rows of dy, bytes of shared memory)."""
    filters = quads(g.T) if form.with_dx else 0
    pitch_x = odd_quads(tile.length + RESULTS * form.taps + OVERRUN)
    pitch_dy = odd_quads(tile.length + filters + OVERRUN if form.with_dx else tile.length)
    return filters, pitch_x, pitch_dy, 4 * (filters + ROWS * (pitch_x + pitch_dy))


Tile = Sliding | Whole | Boxes | Segments
IN_REGISTERS: dict[type, Any] = {Whole: whole_backward, Boxes: boxes_backward}
"""The modules of tiles with which a lane has a whole series in registers."""


def tiles(call: Call, g: Correlation, form: Form, target: Target) -> list[Tile]:
    """The tiles worth trying, the own choice first: what TMA moves; series whole in registers where they are short and many, else tiles of them."""
    made: list[Tile] = []
    last: list[Tile] = []
    if by_tma(call, target):
        # Twice the arithmetic for one more series to move: both gradients want all warps that fit, the weights' alone fewer.
        residents = (boxes_backward.RESIDENT, boxes_backward.BUSY_BLOCKS) if form.with_dx else (boxes_backward.BUSY_BLOCKS, boxes_backward.RESIDENT)
        first, rest = boxes.tiles(g, target, boxes_backward.WARPS, residents)
        made, last = [*first], [*rest]
        if segments.fits(g):
            parts = segments.choose(g, target, segments_backward.WARPS, segments_backward.RESIDENT).parts
            parts_dx = segments.choose(g, target, segments.WARPS, segments.RESIDENT).parts if form.with_dx else 0
            made.append(Segments(parts, parts_dx))
    others: list[Tile] = [in_strips(g, form, target)]
    if short.fits(g):
        own = whole.choose(g, target, whole_backward.WARPS, whole_backward.resident(g.L, g.T, form.with_dx))
        others = [own, *others] if g.N >= whole.FEWEST else [*others, own]
    return [*made, *others, *last]


def in_strips(g: Correlation, form: Form, target: Target) -> Sliding:
    """Tiles of series, and parts enough for four rounds of blocks."""
    chosen = choose(g)
    resident = max(1, RESIDENT // (WARP * form.warps(chosen)))
    units = chosen.batches(g) * chosen.tiles(g)
    return replace(chosen, split=partials.strips(units, g.C * blocks(g.T, RESULTS * form.taps), target, resident).split)


def launches(call: Call, g: Correlation, form: Form, arrays: tuple[Any, ...], left_dx: int, dw: Any, dd: Any, kinds: tuple[str, str]) -> list[Launch]:
    """The kernel on x, dy, w, d and dx, then the sum of its partial sums."""
    tile, partial = call.tile, partials.partial_sums(call)
    filters, pitch_x, pitch_dy, nbytes = staged(g, tile, form)
    units = tile.batches(g) * tile.tiles(g)
    sizes = (g.N, g.C, g.L, g.T, g.left, left_dx, filters, pitch_x, pitch_dy, tile.tiles(g), units, blocks(units, tile.split))
    kernel = kernel_for(unsplit(tile), form, *kinds)
    grid = (g.C * tile.split, blocks(g.T, RESULTS * form.taps))
    numbers = tuple(np.int32(size) for size in sizes)
    first = Launch(kernel, grid, WARP * form.warps(tile), (*arrays, partial, *numbers), nbytes)
    return [first, partials.add(g, partial, dw, dd, tile.split)]


def tile_wgrad(call: Call, target: Target) -> Tile:
    return candidates_wgrad(call, target)[0]


def candidates_wgrad(call: Call, target: Target) -> list[Tile]:
    g = of_gradient(call)
    return tiles(call, g, form_of(g), target)


def scratch_wgrad(call: Call) -> int:
    return partials.scratch_bytes(of_gradient(call), call.tile.split)


def bind_wgrad(call: Call) -> list[Launch]:
    """Two launches: partial sums, and their sum. Arrays that the kernel does not touch are stood in for by others."""
    g, (x, dy), (dw, *dd) = of_gradient(call), call.ins, call.outs
    kind = (call.in_dtypes or ("float32",))[0]
    arrays = (x, dy, dw, dw, dy)
    if isinstance(call.tile, Segments):
        return segments_backward.launches(call, g, x, dy, dw, dd[0] if dd else dw)
    if isinstance(call.tile, Strips):
        return IN_REGISTERS[type(call.tile)].launches(call, g, None, arrays, dw, dd[0] if dd else dw)
    return launches(call, g, form_of(g), arrays, 0, dw, dd[0] if dd else dw, (kind, kind))


def traffic_wgrad(call: Call) -> list[Traffic]:
    """dy, and x with a halo per tile, for every group of taps; then the partial sums."""
    g = of_gradient(call)
    if isinstance(call.tile, Segments):
        return segments_backward.traffic(call, g)
    if isinstance(call.tile, Strips):
        return short.traffic_backward(call, g, False)
    groups = blocks(g.T, RESULTS * form_of(g).taps)
    read = element(call) * g.rows * (groups * g.L + x_loads(g, call.tile, form_of(g)))
    first = Traffic(read, partials.scratch_bytes(g, call.tile.split), 2 * element(call) * g.rows * g.L)
    return [first, partials.add_traffic(g, call.tile.split)]


def x_loads(g: Correlation, tile: Sliding, form: Form) -> int:
    """Elements of one series of x that the tiles stage for all taps."""
    starts, taps = range(0, g.L, tile.length), RESULTS * form.taps
    return sum(row_loads(g.L, starts, base - g.left - form.shift_x, tile.length + taps + 4) for base in range(0, g.T, taps))


def supports_fused(call: Call, target: Target) -> str | None:
    taps = call.in_shapes[2][1]
    return supports(call, target) or (None if taps <= FUSED_TAPS else f"{taps} taps are more than the {FUSED_TAPS} that one kernel's registers hold")


def tile_fused(call: Call, target: Target) -> Tile:
    return candidates_fused(call, target)[0]


def candidates_fused(call: Call, target: Target) -> list[Tile]:
    towards, g = of_backward(call)
    return tiles(call, g, form_of(g, towards), target)


def scratch_fused(call: Call) -> int:
    return partials.scratch_bytes(of_backward(call)[1], call.tile.split)


def bind_fused(call: Call) -> list[Launch]:
    """Two launches: dx with the partial sums, and their sum; of long series on Hopper three."""
    towards, g = of_backward(call)
    (dy, x, w, *d), (dx, dw, *dd) = call.ins, call.outs
    kinds = (call.in_dtypes[0], call.out_dtypes[0]) if call.in_dtypes else ("float32", "float32")
    arrays = (x, dy, w, d[0] if d else w, dx)
    if isinstance(call.tile, Segments):
        # Two kernels: what one alone would save, a second load of dy, is less than its registers would cost.
        dx_first = segments.launch(towards, Segments(call.tile.parts_dx), (dy, w, d[0] if d else w, dx))
        return [dx_first, *segments_backward.launches(call, g, x, dy, dw, dd[0] if dd else dw)]
    if isinstance(call.tile, Strips):
        return IN_REGISTERS[type(call.tile)].launches(call, g, towards, arrays, dw, dd[0] if dd else dw)
    return launches(call, g, form_of(g, towards), arrays, towards.left, dw, dd[0] if dd else dw, kinds)


def traffic_fused(call: Call) -> list[Traffic]:
    """x and dy with a halo per tile, the filter once per block, dx once; then the partial sums."""
    towards, g = of_backward(call)
    if isinstance(call.tile, Segments):
        return [segments.traffic_of(call, towards, Segments(call.tile.parts_dx)), *segments_backward.traffic(call, g)]
    if isinstance(call.tile, Strips):
        return short.traffic_backward(call, g, True)
    tile, form, one, filters = call.tile, form_of(g, towards), element(call), 4 * g.C * (g.T + g.skip)
    dy_loads = row_loads(g.L, range(0, g.L, tile.length), -towards.left - form.shift_dy, tile.length + 4 + quads(g.T))
    read = one * g.rows * (dy_loads + x_loads(g, tile, form)) + filters * tile.split
    write = g.rows * g.L * element(call, "out") + partials.scratch_bytes(g, tile.split)
    first = Traffic(read, write, 2 * one * g.rows * g.L + filters)
    return [first, partials.add_traffic(g, tile.split)]


OPS = {
    Op("dwconv1d", "wgrad"): Impl(bind_wgrad, scratch_wgrad, supports, tile_wgrad, candidates=candidates_wgrad, traffic=traffic_wgrad),
    Op("dwconv1d", "bwd"): Impl(bind_fused, scratch_fused, supports_fused, tile_fused, candidates=candidates_fused, traffic=traffic_fused),
}
