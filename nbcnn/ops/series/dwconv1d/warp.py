"""Variant warp: a warp works alone on several series of one channel, without a barrier for the block.

A group of 4, 8, 16 or 32 lanes owns a series (or all taps of it), lane ℓ of it the twelve results 12ℓ … 12ℓ+11 of a tile: for series of 48
elements four lanes are a tile, and a warp has eight series. Results that lie side by side share their elements: the window of
`sliding.py` brings 48 products with two 16-byte loads. arXiv:2604.25422 gives a warp one series and a lane the results ℓ and ℓ+32: a load from
shared memory for every product, which then are what limits it.

In the weight gradient a warp keeps its sums in registers over a strip of the batch, and leaves one partial sum per strip.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit, u4
from nbcnn.gpu.target import Target
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks
from nbcnn.ops.kernel.stored import kinds, scalar_io, vector_io
from nbcnn.ops.kernel.traffic import Traffic, element
from nbcnn.ops.ptx.shuffle import WARP, warp_barrier
from nbcnn.ops.series.dwconv1d import naive, partials
from nbcnn.ops.series.dwconv1d.series import Correlation, of_gradient, of_images, supports
from nbcnn.ops.series.dwconv1d.sliding import OVERRUN, RESULTS, odd_quads, slide
from nbcnn.ops.series.dwconv1d.staging import bank_pitch, fill_filter, quads, row_loads, shift_of, stage_series
from nbcnn.plan.op import Op

WARPS = 4
THREADS = WARPS * WARP
GROUPS = (4, 8, 16, 32)
"""Lanes that may own a series."""
MOST_SHARED = 48 * 1024
RESIDENT = 8
"""Blocks that share a multiprocessor: up to 64 registers per thread."""


def lanes_for(count: int, halo: int) -> int:
    """Lanes a series, so that tiles of 12 results each waste least of the last one, and least on staging the halo."""

    def cost(lanes: int) -> float:
        tile = RESULTS * lanes
        return blocks(count, tile) * (tile + (tile + halo) / 8)

    return min(GROUPS, key=cost)


@functools.cache
def images_kernel(lanes: int, shift: int, vector: bool, flipped: bool, skip: bool, source_kind: str, out_kind: str) -> Any:
    """The kernel of fprop and dgrad; vector: L is a multiple of four; flipped, skip as in `naive.images_kernel`."""
    LANES, SERIES, TILE, SHIFT = lanes, WARP // lanes, RESULTS * lanes, shift
    stage_filter, stage, run = fill_filter(flipped, skip, WARP), stage_series(source_kind, vector, lanes), slide(shift)
    (_, store), (_, store4) = scalar_io(out_kind), vector_io(out_kind)

    @jit(launch_bounds=(THREADS, RESIDENT))
    def dwconv1d_warp_kernel(source, w, d, out, N, C, L, T, left, T4, pitch, units):
        """out[n,c,t] = Σ_i k[c,i] · source[n,c,t+i−left]; k is w, or w read backwards, with d added to tap `left`.

        grid ⌈C·⌈N/SERIES⌉/4⌉, block 4 warps; a warp owns SERIES series of a channel, tile after tile, LANES lanes each; a lane twelve
        neighbours of a tile. shared 16·(T4 + SERIES·pitch) bytes, T4 is T rounded up to four, pitch ≥ TILE + T4 + 8
        moves  out once, each series once for every tile that its halo of T − 1 reaches, the filter once per warp
        source arXiv:2604.25422, "warp-tiled", with twelve neighbours per lane
        """
        shared = cuda.shared.array(0, f4)
        tid = cuda.threadIdx.x
        lane, series = tid & LANES - 1, (tid & WARP - 1) // LANES
        warp = tid // WARP
        unit = cuda.blockIdx.x * WARPS + warp
        batch = unit // C
        c = unit - batch * C
        n = batch * SERIES + series
        length = L if n < N else 0
        row = (n * C + c) * L
        taps = warp * (T4 + SERIES * pitch)
        at = taps + T4 + series * pitch
        if batch < units:
            stage_filter(shared, taps, w, d, c, T, 0, T4, left, tid & WARP - 1)
        acc = cuda.local.array(RESULTS, f4)
        start = 0
        while start < L:
            stage(shared, at, source, row, start - left - SHIFT, length, TILE + 4 + T4, lane)
            warp_barrier()
            for m in range(RESULTS):
                acc[m] = 0.0
            # Taps that meet a series anywhere in the tile.
            first = max(0, left - start - (TILE - 1)) & -4
            run(acc, shared, taps, at + RESULTS * lane, first, min(T, L + left - start))
            warp_barrier()
            t = start + RESULTS * lane
            if vector:
                for q in range(RESULTS // 4):
                    if t + 4 * q < length:
                        store4(out, row + t + 4 * q, acc[4 * q], acc[4 * q + 1], acc[4 * q + 2], acc[4 * q + 3])
            else:
                for m in range(RESULTS):
                    if t + m < length:
                        store(out, u4(row + t + m), acc[m])
            start += TILE

    return dwconv1d_warp_kernel


@functools.cache
def wgrad_kernel(lanes: int, shift: int, vector: bool, kind: str) -> Any:
    """The kernel of the partial sums."""
    LANES, SERIES, TILE, SHIFT = lanes, WARP // lanes, RESULTS * lanes, shift
    PITCH_DY, PITCH_X = odd_quads(TILE), bank_pitch(2 * TILE + OVERRUN)
    WARP_FLOATS = SERIES * (PITCH_DY + PITCH_X)
    stage, run = stage_series(kind, vector, lanes), slide(shift)

    @jit(launch_bounds=(THREADS, RESIDENT))
    def dwconv1d_wgrad_warp_kernel(x, dy, partial, N, C, L, T, left, rows, parts):
        """partial[part][c][i] = Σ_n Σ_t dy[n,c,t] · x[n,c,t+i−left], n over the `rows` series of the part.

        grid (⌈C·parts/4⌉, ⌈T/TILE⌉), block 4 warps; a warp owns TILE partial sums, LANES lanes all of them for every SERIES-th series
        shared 16·SERIES·(PITCH_DY + PITCH_X) bytes: of SERIES series per warp, TILE dy and the 2·TILE x that they meet
        moves  dy once and x once with a halo of TILE per tile, both for every TILE taps; partial once
        source arXiv:2604.25422, "warp-tiled", without atomics
        """
        shared = cuda.shared.array(0, f4)
        tid = cuda.threadIdx.x
        lane, series = tid & LANES - 1, (tid & WARP - 1) // LANES
        warp = tid // WARP
        unit = cuda.blockIdx.x * WARPS + warp
        part = unit // C
        c = unit - part * C
        base = cuda.blockIdx.y * TILE
        mine = warp * WARP_FLOATS
        at_dy = mine + series * PITCH_DY
        at_x = mine + SERIES * PITCH_DY + series * PITCH_X
        acc = cuda.local.array(RESULTS, f4)
        for m in range(RESULTS):
            acc[m] = 0.0
        end = min(N, part * rows + rows)
        k = 0
        while k < rows:
            n = part * rows + k + series
            row = (n * C + c) * L
            length = L if n < end else 0
            start = 0
            while start < L:
                stage(shared, at_dy, dy, row, start, length, TILE, lane)
                stage(shared, at_x, x, row, start + base - left - SHIFT, length, 2 * TILE + 4, lane)
                warp_barrier()
                # Elements of dy that meet x: not those before the first of x, nor after the last of either.
                first = max(0, left - start - base - (TILE - 1)) & -4
                last = min(TILE, min(L - start, L - start - base + left))
                run(acc, shared, at_dy, at_x + RESULTS * lane, first, last)
                warp_barrier()
                start += TILE
            k += SERIES
        for m in range(RESULTS):
            shared[at_dy + RESULTS * lane + m] = acc[m]
        warp_barrier()
        own = tid & WARP - 1
        while own < TILE:
            total = 0.0
            for other in range(SERIES):
                total += shared[mine + other * PITCH_DY + own]
            if part < parts and base + own < T:
                partial[(part * C + c) * T + base + own] = total
            own += WARP

    return dwconv1d_wgrad_warp_kernel


def plan_of_images(g: Correlation) -> tuple[int, int, int]:
    """(lanes per series, pitch of a staged row, bytes of shared memory)."""
    lanes = lanes_for(g.L, quads(g.T))
    pitch = bank_pitch(RESULTS * lanes + quads(g.T) + OVERRUN)
    return lanes, pitch, 4 * WARPS * (quads(g.T) + WARP // lanes * pitch)


def supports_images(call: Call, target: Target) -> str | None:
    reason = supports(call, target)
    if reason:
        return reason
    fits = plan_of_images(of_images(call))[2] <= MOST_SHARED
    return None if fits else f"{call.in_shapes[1][1]} taps of four warps do not fit into shared memory"


def bind_images(call: Call) -> list[Launch]:
    """One launch: y from x, or dx from dy."""
    g = of_images(call)
    lanes, pitch, nbytes = plan_of_images(g)
    units = blocks(g.N, WARP // lanes)
    kernel = images_kernel(lanes, shift_of(g), g.L % 4 == 0, g.flipped, g.skip, *kinds(call))
    arguments = (*naive.image_arrays(call), *naive.sizes(g), *(np.int32(number) for number in (quads(g.T), pitch, units)))
    return [Launch(kernel, blocks(g.C * units, WARPS), THREADS, arguments, nbytes)]


def lanes_of_gradient(g: Correlation) -> int:
    """Lanes that own all taps of a series, or a group of them."""
    return lanes_for(g.T, 0)


def tile(call: Call, target: Target) -> partials.Strips:
    g = of_gradient(call)
    return partials.strips(blocks(g.N, WARP // lanes_of_gradient(g)), blocks(g.C, WARPS), target, RESIDENT)


def scratch(call: Call) -> int:
    return partials.scratch_bytes(of_gradient(call), call.tile.split)


def bind_wgrad(call: Call) -> list[Launch]:
    """Two launches: partial sums, and their sum."""
    g, split, partial = of_gradient(call), call.tile.split, partials.partial_sums(call)
    (x, dy), (dw, *dd) = call.ins, call.outs
    lanes = lanes_of_gradient(g)
    series = WARP // lanes
    rows = series * blocks(blocks(g.N, series), split)
    numbers = (*naive.sizes(g), np.int32(rows), np.int32(split))
    grid = (blocks(g.C * split, WARPS), blocks(g.T, RESULTS * lanes))
    nbytes = 4 * WARPS * series * (odd_quads(RESULTS * lanes) + bank_pitch(2 * RESULTS * lanes + OVERRUN))
    kernel = wgrad_kernel(lanes, shift_of(g), g.L % 4 == 0, kinds(call)[0])
    return [Launch(kernel, grid, THREADS, (x, dy, partial, *numbers), nbytes), partials.add(g, partial, dw, dd[0] if dd else dw, split)]


def traffic_images(call: Call) -> list[Traffic]:
    """The source with a halo per tile, the filter once per warp, out once."""
    g, one = of_images(call), element(call)
    lanes, _, _ = plan_of_images(g)
    starts = range(0, g.L, RESULTS * lanes)
    staged = one * g.rows * row_loads(g.L, starts, -g.left - shift_of(g), RESULTS * lanes + 4 + quads(g.T))
    filters = 4 * g.C * blocks(g.N, WARP // lanes) * (g.T + g.skip)
    return [Traffic(staged + filters, g.rows * g.L * element(call, "out"), one * g.rows * g.L + 4 * g.C * (g.T + g.skip))]


def traffic_wgrad(call: Call) -> list[Traffic]:
    """dy, and x with a halo per tile, for every group of taps; then the partial sums."""
    g, one, split = of_gradient(call), element(call), call.tile.split
    tile = RESULTS * lanes_of_gradient(g)
    bases = range(0, g.T, tile)
    x_loads = sum(row_loads(g.L, range(0, g.L, tile), base - g.left - shift_of(g), 2 * tile + 4) for base in bases)
    first = Traffic(one * g.rows * (len(bases) * g.L + x_loads), partials.scratch_bytes(g, split), 2 * one * g.rows * g.L)
    return [first, partials.add_traffic(g, split)]


IMAGES = Impl(bind_images, supports=supports_images, traffic=traffic_images)
OPS = {
    Op("dwconv1d", "fprop"): IMAGES,
    Op("dwconv1d", "dgrad"): IMAGES,
    Op("dwconv1d", "wgrad"): Impl(bind_wgrad, scratch, supports, tile, traffic=traffic_wgrad),
}
