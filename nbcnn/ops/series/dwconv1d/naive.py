"""Variant naive: one thread per result, neighbouring threads in neighbouring series of the batch.

Nothing is shared and nothing coalesces: the lanes of a warp read C·L elements apart, so a load of 128 useful bytes touches
32 sectors of 32 bytes. The weight gradient has only C·T threads, each with a sum over the whole batch.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, jit
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.traffic import Traffic, element
from nbcnn.ops.series.dwconv1d.series import Correlation, of_gradient, of_images, supports
from nbcnn.plan.op import Op

THREADS = 256
WEIGHT_THREADS = 32
"""Threads of a block of the weight gradient: small blocks spread the few threads over more multiprocessors."""


@functools.cache
def images_kernel(flipped: bool, skip: bool, source_kind: str, out_kind: str) -> Any:
    """The kernel of fprop and dgrad; flipped: the filter's last tap comes first; skip: the filter has a d."""
    load, _ = scalar_io(source_kind)
    _, store = scalar_io(out_kind)

    @jit()
    def dwconv1d_naive_kernel(source, w, d, out, N, C, L, T, left):
        """out[n,c,t] = Σ_i k[c,i] · source[n,c,t+i−left] (+ d[c] · source[n,c,t]); k is w, or w read backwards.

        grid ⌈NCL/256⌉, block 256; a thread owns one out, neighbours are series of the batch: no access coalesces.
        shared none; moves 8 bytes per product through the caches, and out once. source: the definition.
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i < N * C * L:
            rest = i // N
            n = i - rest * N
            t = rest // C
            c = rest - t * C
            row = (n * C + c) * L
            total = d[c] * load(source, row + t) if skip else 0.0
            for tap in range(max(0, left - t), min(T, L + left - t)):
                place = T - 1 - tap if flipped else tap
                total += w[c * T + place] * load(source, row + t + tap - left)
            store(out, row + t, total)

    return dwconv1d_naive_kernel


@functools.cache
def wgrad_kernel(flipped: bool, skip: bool, kind: str) -> Any:
    """The kernel of the weight gradient; flipped and skip as for `images_kernel`."""
    load, _ = scalar_io(kind)

    @jit()
    def dwconv1d_wgrad_naive_kernel(x, dy, dw, dd, N, C, L, T, left):
        """dk[c,i] = Σ_n Σ_t dy[n,c,t] · x[n,c,t+i−left], put where w has the tap; dd[c] = dk[c,left].

        grid ⌈CT/32⌉, block 32; a thread owns one weight and sums all its products alone.
        shared none; moves 8 bytes per product through the caches, and dw once. source: the definition.
        """
        at = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if at < C * T:
            c = at // T
            tap = at - c * T
            first, last = max(0, left - tap), min(L, L + left - tap)
            total = 0.0
            for n in range(N):
                row = (n * C + c) * L
                for t in range(first, last):
                    total += load(dy, row + t) * load(x, row + t + tap - left)
            dw[c * T + (T - 1 - tap) if flipped else at] = total
            if skip and tap == left:
                dd[c] = total

    return dwconv1d_wgrad_naive_kernel


def sizes(g: Correlation) -> tuple[np.int32, ...]:
    """N, C, L, T and left, as kernels take them."""
    return tuple(np.int32(size) for size in (g.N, g.C, g.L, g.T, g.left))


def image_arrays(call: Call) -> tuple[Any, ...]:
    """source, w, d, out of an fprop or dgrad call; w stands in for a missing d, which is not read."""
    source, w, *d = call.ins
    return source, w, d[0] if d else w, call.outs[0]


def bind_images(call: Call) -> list[Launch]:
    """One launch: y from x, or dx from dy."""
    g = of_images(call)
    kernel = images_kernel(g.flipped, g.skip, *kinds(call))
    return [Launch(kernel, blocks(g.rows * g.L, THREADS), THREADS, (*image_arrays(call), *sizes(g)))]


def bind_wgrad(call: Call) -> list[Launch]:
    """One launch; dw stands in for a dd that is not wanted."""
    g = of_gradient(call)
    (x, dy), (dw, *dd) = call.ins, call.outs
    kernel = wgrad_kernel(g.flipped, g.skip, kinds(call)[0])
    return [Launch(kernel, blocks(g.C * g.T, WEIGHT_THREADS), WEIGHT_THREADS, (x, dy, dw, dd[0] if dd else dw, *sizes(g)))]


def traffic_images(call: Call) -> list[Traffic]:
    """Two loads per product, the tap and the element; the skip is one more product per output."""
    g, one = of_images(call), element(call)
    products = g.rows * (g.products() + g.L * g.skip)
    return [Traffic(products * (4 + one), g.rows * g.L * element(call, "out"), 4 * g.C * (g.taps_used() + g.skip) + one * g.rows * g.L)]


def traffic_wgrad(call: Call) -> list[Traffic]:
    """Two loads per product, of dy and of x."""
    g, one = of_gradient(call), element(call)
    return [Traffic(2 * one * g.rows * g.products(), 4 * g.C * (g.T + g.skip), 2 * one * g.rows * g.L)]


IMAGES = Impl(bind_images, supports=supports, traffic=traffic_images)
OPS = {
    Op("dwconv1d", "fprop"): IMAGES,
    Op("dwconv1d", "dgrad"): IMAGES,
    Op("dwconv1d", "wgrad"): Impl(bind_wgrad, supports=supports, traffic=traffic_wgrad),
}
