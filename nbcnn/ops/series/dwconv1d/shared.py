"""Variant shared: a block stages the filter and sixteen series in shared memory, and every element is loaded from there.

Threads are 16 lanes × 16 series. A lane owns results 16 apart (elements of a tile of `GROUPS`·16, or taps), and goes through the
sum four products at a time: one 16-byte load of the factor that all lanes share (four taps, or four dy) serves every group, and
each group takes four elements. Groups whose four elements all lie outside the series are passed over.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.gpu.target import Target
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.traffic import Traffic, element
from nbcnn.ops.ptx.vector import shared_load4
from nbcnn.ops.series.dwconv1d import naive, partials
from nbcnn.ops.series.dwconv1d.series import Correlation, of_gradient, of_images, supports
from nbcnn.ops.series.dwconv1d.staging import bank_pitch, fill_filter, quads, row_loads, shift_of, stage_series
from nbcnn.plan.op import Op

LANES, ROWS = 16, 16
THREADS = LANES * ROWS
MOST_GROUPS = 8
MOST_SHARED = 48 * 1024
RESIDENT = 5
"""Blocks that share a multiprocessor: 48 registers per thread."""


def groups_of(count: int) -> int:
    """Groups of sixteen results that a thread owns one of each."""
    return min(MOST_GROUPS, -(-count // LANES))


@functools.cache
def images_kernel(GROUPS: int, shift: int, vector: bool, flipped: bool, skip: bool, source_kind: str, out_kind: str) -> Any:
    """The kernel of fprop and dgrad; vector: L is a multiple of four; flipped: the filter's last tap comes first; skip: the filter has a d."""
    stage_filter, stage_row, SHIFT = fill_filter(flipped, skip, THREADS), stage_series(source_kind, vector, LANES), shift
    _, store = scalar_io(out_kind)
    TILE = LANES * GROUPS

    @jit(launch_bounds=(THREADS, RESIDENT))
    def dwconv1d_shared_kernel(source, w, d, out, N, C, L, T, left, T4, pitch, tiles):
        """out[n,c,t] = Σ_i k[c,i] · source[n,c,t+i−left]; k is w, or w read backwards, with d added to tap `left`.

        grid C·⌈L/TILE⌉·⌈N/16⌉, block 16 lanes × 16 series; a block owns 16 series × TILE of one channel, per thread every 16th of a tile.
        shared 4·(T4 + 16·pitch) bytes, pitch ≥ TILE + T4 + 4; T4 is T rounded up to four.
        moves  out once, each series once for every tile that its halo of T − 1 reaches, the filter once per block
        source arXiv:2604.25422, "shared-memory cache-blocked"
        """
        shared = cuda.shared.array(0, f4)
        tid = cuda.threadIdx.x
        lane, r = tid & LANES - 1, tid // LANES
        rest = cuda.blockIdx.x // C
        c = cuda.blockIdx.x - rest * C
        chunk = rest // tiles
        start = (rest - chunk * tiles) * TILE
        n = chunk * ROWS + r
        row = (n * C + c) * L
        at = T4 + r * pitch
        stage_filter(shared, 0, w, d, c, T, 0, T4, left, tid)
        stage_row(shared, at, source, row, start - left - SHIFT, L if n < N else 0, TILE + 4 + T4, lane)
        cuda.syncthreads()
        acc = cuda.local.array(GROUPS, f4)
        for g in range(GROUPS):
            acc[g] = 0.0
        at = at + lane + SHIFT
        i = 0
        while i < T4:
            k0, k1, k2, k3 = shared_load4(shared, i)
            for g in range(GROUPS):
                first = start + LANES * g + i - left
                if first + (LANES + 2) >= 0 and first < L:
                    e = at + i + LANES * g
                    acc[g] += k0 * shared[e]
                    acc[g] += k1 * shared[e + 1]
                    acc[g] += k2 * shared[e + 2]
                    acc[g] += k3 * shared[e + 3]
            i += 4
        for g in range(GROUPS):
            t = start + LANES * g + lane
            if n < N and t < L:
                store(out, row + t, acc[g])

    return dwconv1d_shared_kernel


@functools.cache
def wgrad_kernel(GROUPS: int, shift: int, vector: bool, kind: str) -> Any:
    """The kernel of the partial sums; vector: L is a multiple of four."""
    stage_row, SHIFT = stage_series(kind, vector, LANES), shift
    TAPS = LANES * GROUPS

    @jit(launch_bounds=(THREADS, RESIDENT))
    def dwconv1d_wgrad_shared_kernel(x, dy, partial, N, C, L, T, left, rows, TL, pitch_dy, pitch_x):
        """partial[part][c][i] = Σ_n Σ_t dy[n,c,t] · x[n,c,t+i−left], n over the `rows` series of the part.

        grid (C·parts, ⌈T/TAPS⌉), block 16 lanes × 16 series; a block owns TAPS partial sums, per thread every 16th of one series in 16.
        shared 64·(pitch_dy + pitch_x) bytes, pitch_dy ≥ TL, pitch_x ≥ TL + TAPS + 4; a tile of TL elements at a time
        moves  dy once and x once with a halo of TAPS per tile, both for every TAPS taps; partial once
        source arXiv:2604.25422, "shared-memory cache-blocked", without atomics
        """
        shared = cuda.shared.array(0, f4)
        tid = cuda.threadIdx.x
        lane, r = tid & LANES - 1, tid // LANES
        part = cuda.blockIdx.x // C
        c = cuda.blockIdx.x - part * C
        base = cuda.blockIdx.y * TAPS
        at_dy, at_x = r * pitch_dy, ROWS * pitch_dy + r * pitch_x
        acc = cuda.local.array(GROUPS, f4)
        for g in range(GROUPS):
            acc[g] = 0.0
        n, end = part * rows, min(N, part * rows + rows)
        while n < end:
            row = ((n + r) * C + c) * L
            length = L if n + r < end else 0
            start = 0
            while start < L:
                stage_row(shared, at_dy, dy, row, start, length, TL, lane)
                stage_row(shared, at_x, x, row, start + base - left - SHIFT, length, TL + (TAPS + 4), lane)
                cuda.syncthreads()
                t = 0
                while t < TL:
                    v0, v1, v2, v3 = shared_load4(shared, at_dy + t)
                    for g in range(GROUPS):
                        first = start + t + base + LANES * g - left
                        if first + (LANES + 2) >= 0 and first < L:
                            e = at_x + t + (LANES * g + SHIFT) + lane
                            acc[g] += v0 * shared[e]
                            acc[g] += v1 * shared[e + 1]
                            acc[g] += v2 * shared[e + 2]
                            acc[g] += v3 * shared[e + 3]
                    t += 4
                cuda.syncthreads()
                start += TL
            n += ROWS
        # The staged series are done with: their place takes the sums of all sixteen, [series][tap].
        for g in range(GROUPS):
            shared[r * TAPS + LANES * g + lane] = acc[g]
        cuda.syncthreads()
        tap = tid
        while tap < TAPS and base + tap < T:
            total = 0.0
            for other in range(ROWS):
                total += shared[other * TAPS + tap]
            partial[(part * C + c) * T + base + tap] = total
            tap += THREADS

    return dwconv1d_wgrad_shared_kernel


def shared_of_images(g: Correlation) -> tuple[int, int]:
    """(pitch of a staged series, bytes of shared memory)."""
    pitch = bank_pitch(LANES * groups_of(g.L) + quads(g.T) + 4)
    return pitch, 4 * (quads(g.T) + ROWS * pitch)


def shared_of_gradient(g: Correlation) -> tuple[int, int, int, int]:
    """(elements of a tile, pitch of staged dy, pitch of staged x, bytes of shared memory)."""
    tile = min(quads(g.L), LANES * MOST_GROUPS)
    pitch_dy, pitch_x = bank_pitch(tile), bank_pitch(tile + LANES * groups_of(g.T) + 4)
    return tile, pitch_dy, pitch_x, 4 * ROWS * (pitch_dy + pitch_x)


def supports_images(call: Call, target: Target) -> str | None:
    reason = supports(call, target)
    if reason:
        return reason
    taps, (_, nbytes) = call.in_shapes[1][1], shared_of_images(of_images(call))
    return None if nbytes <= MOST_SHARED else f"{taps} taps of sixteen series do not fit into shared memory"


def tile(call: Call, target: Target) -> partials.Strips:
    g = of_gradient(call)
    return partials.strips(blocks(g.N, ROWS), g.C, target, RESIDENT)


def scratch(call: Call) -> int:
    return partials.scratch_bytes(of_gradient(call), call.tile.split)


def part_of(g: Correlation, split: int) -> int:
    """Series of a channel that a part takes, whole sixteens."""
    return blocks(blocks(g.N, ROWS), split) * ROWS


def bind_images(call: Call) -> list[Launch]:
    """One launch: y from x, or dx from dy."""
    g = of_images(call)
    pitch, nbytes = shared_of_images(g)
    tiles = blocks(g.L, LANES * groups_of(g.L))
    kernel = images_kernel(groups_of(g.L), shift_of(g), g.L % 4 == 0, g.flipped, g.skip, *kinds(call))
    numbers = (*naive.sizes(g), np.int32(quads(g.T)), np.int32(pitch), np.int32(tiles))
    return [Launch(kernel, g.C * tiles * blocks(g.N, ROWS), THREADS, (*naive.image_arrays(call), *numbers), nbytes)]


def bind_wgrad(call: Call) -> list[Launch]:
    """Two launches: partial sums, and their sum."""
    g, split, partial = of_gradient(call), call.tile.split, partials.partial_sums(call)
    (x, dy), (dw, *dd) = call.ins, call.outs
    TL, pitch_dy, pitch_x, nbytes = shared_of_gradient(g)
    groups = groups_of(g.T)
    grid = (g.C * split, -(-g.T // (LANES * groups)))
    numbers = (*naive.sizes(g), *(np.int32(number) for number in (part_of(g, split), TL, pitch_dy, pitch_x)))
    first = Launch(wgrad_kernel(groups, shift_of(g), g.L % 4 == 0, kinds(call)[0]), grid, THREADS, (x, dy, partial, *numbers), nbytes)
    return [first, partials.add(g, partial, dw, dd[0] if dd else dw, split)]


def traffic_images(call: Call) -> list[Traffic]:
    """The source with a halo per tile, the filter once per block, out once."""
    g, one, TILE = of_images(call), element(call), LANES * groups_of(call.in_shapes[0][2])
    tiles = -(-g.L // TILE)
    staged = one * g.rows * row_loads(g.L, range(0, g.L, TILE), -g.left - shift_of(g), TILE + 4 + quads(g.T))
    filters = 4 * g.C * tiles * blocks(g.N, ROWS) * (g.T + g.skip)
    return [Traffic(staged + filters, g.rows * g.L * element(call, "out"), one * g.rows * g.L + 4 * g.C * (g.T + g.skip))]


def traffic_wgrad(call: Call) -> list[Traffic]:
    """dy, and x with a halo per tile, for every group of taps; then the partial sums."""
    g, one, split = of_gradient(call), element(call), call.tile.split
    TL, TAPS = shared_of_gradient(g)[0], LANES * groups_of(g.T)
    bases = range(0, g.T, TAPS)
    staged = len(bases) * g.L + sum(row_loads(g.L, range(0, g.L, TL), base - g.left - shift_of(g), TL + TAPS + 4) for base in bases)
    first = Traffic(one * g.rows * staged, partials.scratch_bytes(g, split), 2 * one * g.rows * g.L)
    return [first, partials.add_traffic(g, split)]


IMAGES = Impl(bind_images, supports=supports_images, traffic=traffic_images)
OPS = {
    Op("dwconv1d", "fprop"): IMAGES,
    Op("dwconv1d", "dgrad"): IMAGES,
    Op("dwconv1d", "wgrad"): Impl(bind_wgrad, scratch, supports, tile, traffic=traffic_wgrad),
}
