"""Variant coalesced: as naive, but neighbouring threads handle neighbouring elements of one series.

A warp now loads 32 elements in a row, four or five sectors of 32 bytes, and the tap is one address for the whole warp. Every
element is still loaded once per tap, from the caches. In the weight gradient a warp shares one weight: its lanes walk along the
series, so that many more than C·T threads work; a part of the batch each, and the parts are added afterwards.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, jit
from nbcnn.gpu.target import Target
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.traffic import Traffic, element
from nbcnn.ops.ptx.shuffle import WARP, warp_sum
from nbcnn.ops.series.dwconv1d import naive, partials
from nbcnn.ops.series.dwconv1d.series import of_gradient, of_images, supports
from nbcnn.plan.op import Op

THREADS = 256
WARPS = THREADS // WARP
RESIDENT = 8
"""Blocks of the weight gradient that share a multiprocessor."""


@functools.cache
def images_kernel(flipped: bool, skip: bool, source_kind: str, out_kind: str) -> Any:
    """The kernel of fprop and dgrad; flipped: the filter's last tap comes first; skip: the filter has a d."""
    load, _ = scalar_io(source_kind)
    _, store = scalar_io(out_kind)

    @jit()
    def dwconv1d_coalesced_kernel(source, w, d, out, N, C, L, T, left):
        """out[n,c,t] = Σ_i k[c,i] · source[n,c,t+i−left] (+ d[c] · source[n,c,t]); k is w, or w read backwards.

        grid ⌈NCL/256⌉, block 256; a thread owns one out, neighbours are neighbours in time: loads and stores coalesce.
        shared none; moves 8 bytes per product through the caches, and out once. source: arXiv:2604.25422, "GMC".
        """
        at = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if at < N * C * L:
            row = at // L
            t = at - row * L
            c = row % C
            total = d[c] * load(source, at) if skip else 0.0
            for tap in range(max(0, left - t), min(T, L + left - t)):
                place = T - 1 - tap if flipped else tap
                total += w[c * T + place] * load(source, at + tap - left)
            store(out, at, total)

    return dwconv1d_coalesced_kernel


@functools.cache
def wgrad_kernel(kind: str) -> Any:
    """The kernel of the partial sums."""
    load, _ = scalar_io(kind)

    @jit()
    def dwconv1d_wgrad_coalesced_kernel(x, dy, partial, N, C, L, T, left, rows, parts):
        """partial[part][c][i] = Σ_n Σ_t dy[n,c,t] · x[n,c,t+i−left], n over the `rows` series of the part.

        grid ⌈parts·CT/8⌉, block 8 warps; a warp owns one partial sum, its lanes every 32nd t of every series.
        shared none; moves 8 bytes per product through the caches, and partial once. source: arXiv:2604.25422, "GMC", without atomics.
        """
        lane = cuda.threadIdx.x & WARP - 1
        at = cuda.blockIdx.x * WARPS + cuda.threadIdx.x // WARP
        weight = at % (C * T)
        part = at // (C * T)
        c = weight // T
        tap = weight - c * T
        first, last = max(0, left - tap), min(L, L + left - tap)
        total = 0.0
        if part < parts:
            for n in range(part * rows, min(N, part * rows + rows)):
                row = (n * C + c) * L
                t = first + lane
                while t < last:
                    total += load(dy, row + t) * load(x, row + t + tap - left)
                    t += WARP
        total = warp_sum(total)
        if lane == 0 and part < parts:
            partial[at] = total

    return dwconv1d_wgrad_coalesced_kernel


def tile(call: Call, target: Target) -> partials.Strips:
    g = of_gradient(call)
    return partials.strips(g.N, blocks(g.C * g.T, WARPS), target, RESIDENT)


def scratch(call: Call) -> int:
    return partials.scratch_bytes(of_gradient(call), call.tile.split)


def bind_images(call: Call) -> list[Launch]:
    """One launch: y from x, or dx from dy."""
    g = of_images(call)
    kernel = images_kernel(g.flipped, g.skip, *kinds(call))
    return [Launch(kernel, blocks(g.rows * g.L, THREADS), THREADS, (*naive.image_arrays(call), *naive.sizes(g)))]


def bind_wgrad(call: Call) -> list[Launch]:
    """Two launches: partial sums, and their sum."""
    g, split, partial = of_gradient(call), call.tile.split, partials.partial_sums(call)
    (x, dy), (dw, *dd) = call.ins, call.outs
    numbers = (*naive.sizes(g), np.int32(-(-g.N // split)), np.int32(split))
    first = Launch(wgrad_kernel(kinds(call)[0]), blocks(split * g.C * g.T, WARPS), THREADS, (x, dy, partial, *numbers))
    return [first, partials.add(g, partial, dw, dd[0] if dd else dw, split)]


def traffic_wgrad(call: Call) -> list[Traffic]:
    """Two loads per product, then the partial sums."""
    g, one, split = of_gradient(call), element(call), call.tile.split
    first = Traffic(2 * one * g.rows * g.products(), partials.scratch_bytes(g, split), 2 * one * g.rows * g.L)
    return [first, partials.add_traffic(g, split)]


IMAGES = Impl(bind_images, supports=supports, traffic=naive.traffic_images)
OPS = {
    Op("dwconv1d", "fprop"): IMAGES,
    Op("dwconv1d", "dgrad"): IMAGES,
    Op("dwconv1d", "wgrad"): Impl(bind_wgrad, scratch, supports, tile, traffic=traffic_wgrad),
}
