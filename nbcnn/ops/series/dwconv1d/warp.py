"""Variant warp: a warp works alone on several series of one channel, without a barrier for the block.

A group of 4, 8, 16 or 32 lanes owns a series (or all taps of it), lane ℓ of it the twelve results 12ℓ … 12ℓ+11 of a tile: for series of 48
elements four lanes are a tile, and a warp has eight series. Results that lie side by side share their elements: the window of
`sliding.py` brings 48 products with two 16-byte loads. arXiv:2604.25422 gives a warp one series and a lane the results ℓ and ℓ+32: a load from
shared memory for every product, which then are what limits it.

In the weight gradient a warp keeps its sums in registers over a strip of the batch, and leaves one partial sum a strip.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i4, jit, u4
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks
from nbcnn.ops.kernel.stored import kinds, scalar_io, vector_io
from nbcnn.ops.kernel.traffic import Traffic, element
from nbcnn.ops.ptx.shuffle import WARP, warp_barrier
from nbcnn.ops.series.dwconv1d import naive, partials
from nbcnn.ops.series.dwconv1d.series import Correlation, of_gradient, of_images, supports
from nbcnn.ops.series.dwconv1d.sliding import OVERRUN, OWN, odd_quads, slide
from nbcnn.ops.series.dwconv1d.staging import bank_pitch, fill_filter, quads, row_loads, shift_of, stage_series

WARPS = 4
THREADS = WARPS * WARP
GROUPS = (4, 8, 16, 32)
"""Lanes that may own a series."""
MOST_SHARED = 48 * 1024
RESIDENT = 8
"""Blocks that share a multiprocessor: up to 64 registers a thread."""


def lanes_for(count: int, halo: int) -> int:
    """Lanes a series, so that tiles of 12 results each waste least of the last one, and least on staging the halo."""

    def cost(lanes: int) -> float:
        tile = OWN * lanes
        return blocks(count, tile) * (tile + (tile + halo) / 8)

    return min(GROUPS, key=cost)


@functools.cache
def images_kernel(lanes: int, shift: int, vector: bool, flipped: bool, skip: bool, source_kind: str, out_kind: str) -> Any:
    """The kernel of fprop and dgrad; vector: L is a multiple of four; flipped, skip as in `naive.images_kernel`."""
    LANES, SERIES, TILE, SHIFT = lanes, WARP // lanes, OWN * lanes, shift
    stage_filter, stage, run = fill_filter(flipped, skip, WARP), stage_series(source_kind, vector, lanes), slide(shift)
    (_, store), (_, store4) = scalar_io(out_kind), vector_io(out_kind)

    @jit(launch_bounds=(THREADS, RESIDENT))
    def dwconv1d_warp_kernel(source, w, d, out, N, C, L, T, left, T4, pitch, units):
        """out[n,c,t] = Σ_i k[c,i] · source[n,c,t+i−left]; k is w, or w read backwards, with d added to tap `left`.

        grid ⌈C·⌈N/SERIES⌉/4⌉, block 4 warps; a warp owns SERIES series of a channel, tile after tile, LANES lanes each; a lane twelve
        neighbours of a tile. shared 16·(T4 + SERIES·pitch) bytes, T4 is T rounded up to four, pitch ≥ TILE + T4 + 8
        moves  out once, each series once for every tile that its halo of T − 1 reaches, the filter once a warp
        source arXiv:2604.25422, "warp-tiled", with twelve neighbours a lane
        """
        shared = cuda.shared.array(0, f4)
        tid = i4(cuda.threadIdx.x)
        lane, series = i4(tid & i4(LANES - 1)), i4(u4(tid & i4(WARP - 1)) // u4(LANES))
        warp = i4(u4(tid) // u4(WARP))
        unit = i4(i4(cuda.blockIdx.x) * i4(WARPS) + warp)
        batch = i4(u4(unit) // u4(C))
        c = i4(unit - batch * C)
        n = i4(batch * i4(SERIES) + series)
        length = L if n < N else i4(0)
        row = i4((n * C + c) * L)
        taps = i4(warp * (T4 + i4(SERIES) * pitch))
        at = i4(taps + T4 + series * pitch)
        if batch < units:
            stage_filter(shared, taps, w, d, c, T, i4(0), T4, left, i4(tid & i4(WARP - 1)))
        acc = cuda.local.array(OWN, f4)
        start = i4(0)
        while start < L:
            stage(shared, at, source, row, i4(start - left - i4(SHIFT)), length, i4(i4(TILE + 4) + T4), lane)
            warp_barrier()
            for m in range(OWN):
                acc[m] = f4(0)
            # Taps that meet a series anywhere in the tile.
            first = i4(max(i4(0), i4(left - start - i4(TILE - 1))) & i4(-4))
            run(acc, shared, taps, i4(at + i4(OWN) * lane), first, i4(min(T, i4(L + left - start))))
            warp_barrier()
            t = i4(start + i4(OWN) * lane)
            if vector:
                for q in range(OWN // 4):
                    if t + i4(4 * q) < length:
                        store4(out, i4(row + t + i4(4 * q)), acc[4 * q], acc[4 * q + 1], acc[4 * q + 2], acc[4 * q + 3])
            else:
                for m in range(OWN):
                    if i4(t + i4(m)) < length:
                        store(out, u4(row + t + i4(m)), acc[m])
            start = i4(start + i4(TILE))

    return dwconv1d_warp_kernel


@functools.cache
def wgrad_kernel(lanes: int, shift: int, vector: bool, kind: str) -> Any:
    """The kernel of the partial sums."""
    LANES, SERIES, TILE, SHIFT = lanes, WARP // lanes, OWN * lanes, shift
    PITCH_DY, PITCH_X = odd_quads(TILE), bank_pitch(2 * TILE + OVERRUN)
    EACH = SERIES * (PITCH_DY + PITCH_X)
    stage, run = stage_series(kind, vector, lanes), slide(shift)

    @jit(launch_bounds=(THREADS, RESIDENT))
    def dwconv1d_wgrad_warp_kernel(x, dy, partial, N, C, L, T, left, rows, parts):
        """partial[part][c][i] = Σ_n Σ_t dy[n,c,t] · x[n,c,t+i−left], n over the `rows` series of the part.

        grid (⌈C·parts/4⌉, ⌈T/TILE⌉), block 4 warps; a warp owns TILE partial sums, LANES lanes all of them for every SERIES-th series
        shared 16·SERIES·(PITCH_DY + PITCH_X) bytes: of SERIES series a warp, TILE dy and the 2·TILE x that they meet
        moves  dy once and x once with a halo of TILE a tile, both for every TILE taps; partial once
        source arXiv:2604.25422, "warp-tiled", without atomics
        """
        shared = cuda.shared.array(0, f4)
        tid = i4(cuda.threadIdx.x)
        lane, series = i4(tid & i4(LANES - 1)), i4(u4(tid & i4(WARP - 1)) // u4(LANES))
        warp = i4(u4(tid) // u4(WARP))
        unit = i4(i4(cuda.blockIdx.x) * i4(WARPS) + warp)
        part = i4(u4(unit) // u4(C))
        c = i4(unit - part * C)
        base = i4(i4(cuda.blockIdx.y) * i4(TILE))
        mine = i4(warp * i4(EACH))
        at_dy = i4(mine + series * i4(PITCH_DY))
        at_x = i4(mine + i4(SERIES * PITCH_DY) + series * i4(PITCH_X))
        acc = cuda.local.array(OWN, f4)
        for m in range(OWN):
            acc[m] = f4(0)
        end = i4(min(N, i4(part * rows + rows)))
        k = i4(0)
        while k < rows:
            n = i4(part * rows + k + series)
            row = i4((n * C + c) * L)
            length = L if n < end else i4(0)
            start = i4(0)
            while start < L:
                stage(shared, at_dy, dy, row, start, length, i4(TILE), lane)
                stage(shared, at_x, x, row, i4(start + base - left - i4(SHIFT)), length, i4(2 * TILE + 4), lane)
                warp_barrier()
                # Elements of dy that meet x: not those before the first of x, nor after the last of either.
                first = i4(max(i4(0), i4(left - start - base - i4(TILE - 1))) & i4(-4))
                last = i4(min(i4(TILE), i4(min(i4(L - start), i4(L - start - base + left)))))
                run(acc, shared, at_dy, i4(at_x + i4(OWN) * lane), first, last)
                warp_barrier()
                start = i4(start + i4(TILE))
            k = i4(k + i4(SERIES))
        for m in range(OWN):
            shared[u4(at_dy + i4(OWN) * lane + i4(m))] = acc[m]
        warp_barrier()
        own = i4(tid & i4(WARP - 1))
        while own < i4(TILE):
            total = f4(0)
            for other in range(SERIES):
                total += shared[u4(mine + i4(other * PITCH_DY) + own)]
            if part < parts and base + own < T:
                partial[u4((part * C + c) * T + base + own)] = total
            own = i4(own + i4(WARP))

    return dwconv1d_wgrad_warp_kernel


def plan_of_images(g: Correlation) -> tuple[int, int, int]:
    """(lanes a series, pitch of a staged row, bytes of shared memory)."""
    lanes = lanes_for(g.L, quads(g.T))
    pitch = bank_pitch(OWN * lanes + quads(g.T) + OVERRUN)
    return lanes, pitch, 4 * WARPS * (quads(g.T) + WARP // lanes * pitch)


def supports_images(call: Call) -> str | None:
    reason = supports(call)
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


def tile(call: Call, multiprocessors: int) -> partials.Strips:
    g = of_gradient(call)
    return partials.strips(blocks(g.N, WARP // lanes_of_gradient(g)), blocks(g.C, WARPS), multiprocessors, RESIDENT)


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
    grid = (blocks(g.C * split, WARPS), blocks(g.T, OWN * lanes))
    nbytes = 4 * WARPS * series * (odd_quads(OWN * lanes) + bank_pitch(2 * OWN * lanes + OVERRUN))
    kernel = wgrad_kernel(lanes, shift_of(g), g.L % 4 == 0, kinds(call)[0])
    return [Launch(kernel, grid, THREADS, (x, dy, partial, *numbers), nbytes), partials.add(g, partial, dw, dd[0] if dd else dw, split)]


def traffic_images(call: Call) -> list[Traffic]:
    """The source with a halo a tile, the filter once a warp, out once."""
    g, one = of_images(call), element(call)
    lanes, _, _ = plan_of_images(g)
    starts = range(0, g.L, OWN * lanes)
    staged = one * g.rows * row_loads(g.L, starts, -g.left - shift_of(g), OWN * lanes + 4 + quads(g.T))
    filters = 4 * g.C * blocks(g.N, WARP // lanes) * (g.T + g.skip)
    return [Traffic(staged + filters, g.rows * g.L * element(call, "out"), one * g.rows * g.L + 4 * g.C * (g.T + g.skip))]


def traffic_wgrad(call: Call) -> list[Traffic]:
    """dy, and x with a halo a tile, for every group of taps; then the partial sums."""
    g, one, split = of_gradient(call), element(call), call.tile.split
    tile = OWN * lanes_of_gradient(g)
    bases = range(0, g.T, tile)
    x_loads = sum(row_loads(g.L, range(0, g.L, tile), base - g.left - shift_of(g), 2 * tile + 4) for base in bases)
    first = Traffic(one * g.rows * (len(bases) * g.L + x_loads), partials.scratch_bytes(g, split), 2 * one * g.rows * g.L)
    return [first, partials.add_traffic(g, split)]


IMAGES = Impl(bind_images, supports=supports_images, traffic=traffic_images)
OPS = {
    "dwconv1d_fprop": IMAGES,
    "dwconv1d_dgrad": IMAGES,
    "dwconv1d_wgrad": Impl(bind_wgrad, scratch, supports, tile, traffic=traffic_wgrad),
}
