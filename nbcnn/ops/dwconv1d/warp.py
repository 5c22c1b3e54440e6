"""Variant warp: a warp works alone on two series of one channel, without a barrier for the block.

Half a warp owns a series: lane ℓ of it the four results 4ℓ..4ℓ+3 of a tile of 64 (elements, or taps). Results that lie side by
side share their elements: a window of eight lives in registers, and every quad of products moves it by four, one 16-byte
load, beside the one that brings four taps (or four dy). arXiv:2604.25422 gives a warp one series and a lane the results ℓ and
ℓ+32: three times the loads from shared memory, which then are what limits it.

In the weight gradient a warp keeps its 64 sums in registers over a strip of the batch, and leaves one partial sum a strip.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.cuda import cuda, f4, i4, jit, u4
from nbcnn.ops.call import Call, Impl, Launch, blocks
from nbcnn.ops.conv.register_tile import ALIGNMENT
from nbcnn.ops.dwconv1d import naive, partials
from nbcnn.ops.dwconv1d.series import Correlation, of_gradient, of_images, supports
from nbcnn.ops.dwconv1d.staging import fill_filter, fill_row, quads, row_loads
from nbcnn.ops.ptx.shuffle import WARP, warp_barrier
from nbcnn.ops.ptx.vector import shared_load4
from nbcnn.ops.stored import kinds, scalar_io, vector_io
from nbcnn.ops.traffic import Traffic, element

WARPS, HALF, OWN = 8, 16, 4
THREADS = WARPS * WARP
TILE = HALF * OWN
PITCH_DY, PITCH_X = TILE + 4, 2 * TILE + 4
"""Staged series of the weight gradient: rows of one half follow those of the other four banks further on."""
MOST_SHARED = 48 * 1024
RESIDENT = 4
"""Blocks of the weight gradient that share a multiprocessor."""


@jit(device=True)
def _quad(acc, shared, at_factor, at_next, window):
    """acc[m] += Σ_{j<4} factor[j] · window[m+j] for m < 4; then the window moves on by four."""
    a0, a1, a2, a3, b0, b1, b2, b3 = window
    k0, k1, k2, k3 = shared_load4(shared, at_factor)
    acc[0] += k0 * a0 + k1 * a1 + k2 * a2 + k3 * a3
    acc[1] += k0 * a1 + k1 * a2 + k2 * a3 + k3 * b0
    acc[2] += k0 * a2 + k1 * a3 + k2 * b0 + k3 * b1
    acc[3] += k0 * a3 + k1 * b0 + k2 * b1 + k3 * b2
    c0, c1, c2, c3 = shared_load4(shared, at_next)
    return b0, b1, b2, b3, c0, c1, c2, c3


@jit(device=True)
def _slide(acc, shared, at_factor, at, first, last):
    """acc[m] += Σ_i factor[i] · element[i+m] over i = first..last−1, both multiples of four; elements from `at`, factors from `at_factor` on."""
    window = shared_load4(shared, i4(at + first)) + shared_load4(shared, i4(at + first + i4(4)))
    i = first
    while i < last:
        window = _quad(acc, shared, i4(at_factor + i), i4(at + i + i4(8)), window)
        i = i4(i + i4(4))


@functools.cache
def images_kernel(vector: bool, flipped: bool, skip: bool, source_kind: str, out_kind: str) -> Any:
    """The kernel of fprop and dgrad; vector: L is a multiple of four; flipped, skip as in `naive.images_kernel`."""
    stage_filter, stage_row = fill_filter(flipped, skip, WARP), fill_row(source_kind, HALF)
    (_, store), (_, store4) = scalar_io(out_kind), vector_io(out_kind)

    @jit(launch_bounds=(THREADS, 4))
    def dwconv1d_warp_kernel(source, w, d, out, N, C, L, T, left, T4, pairs):
        """out[n,c,t] = Σ_i k[c,i] · source[n,c,t+i−left]; k is w, or w read backwards, with d added to tap `left`.

        grid ⌈C·⌈N/2⌉/8⌉, block 8 warps; a warp owns two series, tile after tile; a lane four neighbours of a tile.
        shared 32·(T4 + 2·(TILE + T4 + 4)) bytes, T4 is T rounded up to four
        moves  out once, each series once for every tile that its halo of T − 1 reaches, the filter once a warp
        source arXiv:2604.25422, "warp-tiled", with four neighbours a lane
        """
        shared = cuda.shared.array(0, f4)
        tid = i4(cuda.threadIdx.x)
        lane, half = i4(tid & i4(HALF - 1)), i4(u4(tid) // u4(HALF) & u4(1))
        warp = i4(u4(tid) // u4(WARP))
        unit = i4(i4(cuda.blockIdx.x) * i4(WARPS) + warp)
        pair = i4(u4(unit) // u4(C))
        c = i4(unit - pair * C)
        n = i4(i4(2) * pair + half)
        length = L if n < N else i4(0)
        row = i4((n * C + c) * L)
        pitch = i4(i4(TILE + 4) + T4)
        taps = i4(warp * (T4 + pitch + pitch))
        at = i4(taps + T4 + half * pitch)
        if pair < pairs:
            stage_filter(shared, taps, w, d, c, T, i4(0), T4, left, i4(tid & i4(WARP - 1)))
        acc = cuda.local.array(OWN, f4)
        start = i4(0)
        while start < L:
            stage_row(shared, at, source, row, i4(start - left), length, i4(i4(TILE + 4) + T4), lane)
            warp_barrier()
            for m in range(OWN):
                acc[m] = f4(0)
            first = i4(max(i4(0), i4(left - start - i4(TILE - 1))) & i4(-4))
            _slide(acc, shared, taps, i4(at + i4(OWN) * lane), first, i4(min(T4, i4(L + left - start + i4(3) & i4(-4)))))
            warp_barrier()
            t = i4(start + i4(OWN) * lane)
            if vector:
                if t < length:
                    store4(out, i4(row + t), acc[0], acc[1], acc[2], acc[3])
            else:
                for m in range(OWN):
                    if i4(t + i4(m)) < length:
                        store(out, u4(row + t + i4(m)), acc[m])
            start = i4(start + i4(TILE))

    return dwconv1d_warp_kernel


@functools.cache
def wgrad_kernel(kind: str) -> Any:
    """The kernel of the partial sums."""
    stage_row = fill_row(kind, HALF)
    MEMORY, EACH = WARPS * 2 * (PITCH_DY + PITCH_X), 2 * (PITCH_DY + PITCH_X)

    @jit(launch_bounds=(THREADS, 4))
    def dwconv1d_wgrad_warp_kernel(x, dy, partial, N, C, L, T, left, rows, parts):
        """partial[part][c][i] = Σ_n Σ_t dy[n,c,t] · x[n,c,t+i−left], n over the `rows` series of the part.

        grid (⌈C·parts/8⌉, ⌈T/64⌉), block 8 warps; a warp owns 64 partial sums, each half of it those of every second series
        shared 64·(PITCH_DY + PITCH_X) bytes: of two series a warp, 64 dy and the 128 x that they meet
        moves  dy once and x once with a halo of 64 a tile, both for every 64 taps; partial once
        source arXiv:2604.25422, "warp-tiled", without atomics
        """
        shared = cuda.shared.array(MEMORY, f4, ALIGNMENT)
        tid = i4(cuda.threadIdx.x)
        lane, half = i4(tid & i4(HALF - 1)), i4(u4(tid) // u4(HALF) & u4(1))
        warp = i4(u4(tid) // u4(WARP))
        unit = i4(i4(cuda.blockIdx.x) * i4(WARPS) + warp)
        part = i4(u4(unit) // u4(C))
        c = i4(unit - part * C)
        base = i4(i4(cuda.blockIdx.y) * i4(TILE))
        at_dy = i4(warp * i4(EACH) + half * i4(PITCH_DY))
        at_x = i4(warp * i4(EACH) + i4(2 * PITCH_DY) + half * i4(PITCH_X))
        acc = cuda.local.array(OWN, f4)
        for m in range(OWN):
            acc[m] = f4(0)
        end = i4(min(N, i4(part * rows + rows)))
        k = i4(0)
        while k < rows:
            n = i4(part * rows + k + half)
            row = i4((n * C + c) * L)
            length = L if n < end else i4(0)
            start = i4(0)
            while start < L:
                stage_row(shared, at_dy, dy, row, start, length, i4(TILE), lane)
                stage_row(shared, at_x, x, row, i4(start + base - left), length, i4(PITCH_X), lane)
                warp_barrier()
                # Elements of dy that meet x: not those before the first of x, nor after the last of either.
                first = i4(min(i4(TILE), i4(max(i4(0), i4(left - start - base - i4(TILE - 1))) & i4(-4))))
                last = i4(min(i4(TILE), i4(min(i4(L - start), i4(L - start - base + left)) + i4(3) & i4(-4))))
                _slide(acc, shared, at_dy, i4(at_x + i4(OWN) * lane), first, last)
                warp_barrier()
                start = i4(start + i4(TILE))
            k = i4(k + i4(2))
        if half == i4(1):
            for m in range(OWN):
                shared[u4(at_dy + i4(OWN) * lane + i4(m))] = acc[m]
        warp_barrier()
        if half == i4(0) and part < parts:
            for m in range(OWN):
                tap = i4(base + i4(OWN) * lane + i4(m))
                if tap < T:
                    partial[u4((part * C + c) * T + tap)] = acc[m] + shared[u4(at_dy + i4(PITCH_DY) + i4(OWN) * lane + i4(m))]

    return dwconv1d_wgrad_warp_kernel


def shared_of_images(g: Correlation) -> int:
    """Bytes of shared memory."""
    return 4 * WARPS * (quads(g.T) + 2 * (TILE + 4 + quads(g.T)))


def supports_images(call: Call) -> str | None:
    reason = supports(call)
    if reason:
        return reason
    taps, fits = call.in_shapes[1][1], shared_of_images(of_images(call)) <= MOST_SHARED
    return None if fits else f"{taps} taps of eight warps do not fit into shared memory"


def tile(call: Call, multiprocessors: int) -> partials.Strips:
    g = of_gradient(call)
    return partials.strips(blocks(g.N, 2), blocks(g.C, WARPS), multiprocessors, RESIDENT)


def scratch(call: Call) -> int:
    return partials.scratch_bytes(of_gradient(call), call.tile.split)


def bind_images(call: Call) -> list[Launch]:
    """One launch: y from x, or dx from dy."""
    g = of_images(call)
    pairs = blocks(g.N, 2)
    kernel = images_kernel(g.L % 4 == 0, g.flipped, g.skip, *kinds(call))
    arguments = (*naive.image_arrays(call), *naive.sizes(g), np.int32(quads(g.T)), np.int32(pairs))
    return [Launch(kernel, blocks(g.C * pairs, WARPS), THREADS, arguments, shared_of_images(g))]


def bind_wgrad(call: Call) -> list[Launch]:
    """Two launches: partial sums, and their sum."""
    g, split, partial = of_gradient(call), call.tile.split, partials.partial_sums(call)
    (x, dy), (dw, *dd) = call.ins, call.outs
    numbers = (*naive.sizes(g), np.int32(part_of(g, split)), np.int32(split))
    grid = (blocks(g.C * split, WARPS), blocks(g.T, TILE))
    first = Launch(wgrad_kernel(kinds(call)[0]), grid, THREADS, (x, dy, partial, *numbers))
    return [first, partials.add(g, partial, dw, dd[0] if dd else dw, split)]


def part_of(g: Correlation, split: int) -> int:
    """Series of a channel that a part takes, whole pairs."""
    return 2 * blocks(blocks(g.N, 2), split)


def traffic_images(call: Call) -> list[Traffic]:
    """The source with a halo a tile, the filter once a warp, out once."""
    g, one = of_images(call), element(call)
    staged = one * g.rows * row_loads(g.L, range(0, g.L, TILE), -g.left, TILE + 4 + quads(g.T))
    filters = 4 * g.C * blocks(g.N, 2) * (g.T + g.skip)
    return [Traffic(staged + filters, g.rows * g.L * element(call, "out"), one * g.rows * g.L + 4 * g.C * (g.T + g.skip))]


def traffic_wgrad(call: Call) -> list[Traffic]:
    """dy, and x with a halo a tile, for every 64 taps; then the partial sums."""
    g, one, split = of_gradient(call), element(call), call.tile.split
    bases = range(0, g.T, TILE)
    staged = len(bases) * g.L + sum(row_loads(g.L, range(0, g.L, TILE), base - g.left, PITCH_X) for base in bases)
    first = Traffic(one * g.rows * staged, partials.scratch_bytes(g, split), 2 * one * g.rows * g.L)
    return [first, partials.add_traffic(g, split)]


IMAGES = Impl(bind_images, supports=supports_images, traffic=traffic_images)
OPS = {
    "dwconv1d_fprop": IMAGES,
    "dwconv1d_dgrad": IMAGES,
    "dwconv1d_wgrad": Impl(bind_wgrad, scratch, supports, tile, traffic=traffic_wgrad),
}
