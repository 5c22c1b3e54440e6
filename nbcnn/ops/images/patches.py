"""Patches of images, normalised: what is left to do after a convolution has multiplied every patch by a whitening matrix.

Of the patch p of size² pixels in all channels of x at position (i, j), u[·, i, j] = Z p is the convolution's result. Then

    s = √(variance of p + norm), of its C·size² values with C·size² − 1 in the denominator
    z = u / s − bias,   y = z / |z|

Rows of Z that sum to zero take the patch's mean out, so y is the whitened patch of unit contrast with `bias` = Z·(mean of such patches), scaled to
unit length: what a spherical k-means compares with its atoms.

Source: A. Coates, A. Y. Ng, "Learning feature representations with k-means", 2012.

    unit_patches      x (N,C,H,W), u (N,D,P,Q), bias (D) -> y (N,D,P,Q)                        size, norm
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, jit
from nbcnn.ops.kernel import maps
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.case import Case, Shapes, label_of, normal
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.traffic import Traffic, element, outputs, size
from nbcnn.ops.ptx.shuffle import WARP, warp_sum_everywhere
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

PATCHES = 8
"""Patches of a block: a warp each."""
TINY = 1e-24
"""Added to |z|², so that a patch of nothing but its mean stays zero."""


def unit_patches(x: np.ndarray, u: np.ndarray, bias: np.ndarray, y: np.ndarray, *, size: int, norm: float) -> None:
    """y (N,D,P,Q) from the images x (N,C,H,W) and the products u (N,D,P,Q) of their patches."""
    patches = np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(2, 3))  # (N, C, P, Q, size, size)
    spread = np.sqrt(patches.var(axis=(1, 4, 5), ddof=1) + norm)  # (N, P, Q)
    z = u / spread[:, None] - bias[:, None, None]
    np.copyto(y, z / np.sqrt((z * z).sum(1, keepdims=True) + TINY))


@cache
def unit_patches_kernel(source: str, middle: str, target: str, layout: str, edge: int) -> Any:
    """The kernel for images in `layout`: x, u and y are stored as `source`, `middle` and `target`; `edge` is the side of a patch."""
    (load, _), (load_u, _), (_, store) = scalar_io(source), scalar_io(middle), scalar_io(target)
    last = layout == "NHWC"

    @jit()
    def unit_patches_kernel(x, u, bias, y, patches, norm, C, H, W, D, P, Q):
        """y = z / |z| with z = u / s − bias, s the deviation of the patch.

        grid ⌈N·P·Q/8⌉, block 256; owns: per warp a patch, its lanes share the C·edge² values and then the D products; shared none;
        moves 2·C·edge² values of x a patch through the caches, u twice (the second time out of the cache) and y once; source: the definition.
        """
        lane, which = cuda.threadIdx.x & 31, cuda.blockIdx.x * PATCHES + (cuda.threadIdx.x >> 5)
        m = min(which, patches - 1)  # every lane of the block takes part in the sums
        n = m // (P * Q)
        place = m - n * (P * Q)
        p, q = place // Q, place % Q
        values = C * edge * edge
        total = 0.0
        for i in range(lane, values, WARP):
            c, tap = i % C, i // C
            pixel = (p + tap // edge) * W + q + tap % edge
            total += load(x, (n * H * W + pixel) * C + c if last else (n * C + c) * H * W + pixel)
        mean = warp_sum_everywhere(total) / values
        squares = 0.0
        for i in range(lane, values, WARP):
            c, tap = i % C, i // C
            pixel = (p + tap // edge) * W + q + tap % edge
            away = load(x, (n * H * W + pixel) * C + c if last else (n * C + c) * H * W + pixel) - mean
            squares += away * away
        scale = 1.0 / math.sqrt(warp_sum_everywhere(squares) / (values - 1) + norm)
        squares = 0.0
        for d in range(lane, D, WARP):
            z = load_u(u, m * D + d if last else (n * D + d) * (P * Q) + place) * scale - bias[d]
            squares += z * z
        length = 1.0 / math.sqrt(warp_sum_everywhere(squares) + TINY)
        if which < patches:
            for d in range(lane, D, WARP):
                at = m * D + d if last else (n * D + d) * (P * Q) + place
                store(y, at, (load_u(u, at) * scale - bias[d]) * length)

    return unit_patches_kernel


def bind(call: Call) -> list[Launch]:
    """One launch."""
    (N, C, H, W), (_, D, P, Q) = call.in_shapes[:2]
    source, target = kinds(call)
    middle = call.in_dtypes[1] if call.in_dtypes else "float32"
    kernel = unit_patches_kernel(source, middle, target, call.layout, int(call.attrs["size"]))
    extents = (np.int32(extent) for extent in (C, H, W, D, P, Q))
    args = (*call.ins, *call.outs, np.int32(N * P * Q), np.float32(call.attrs["norm"]), *extents)
    return [Launch(kernel, blocks(N * P * Q, PATCHES), PATCHES * WARP, args)]


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`: the values of every patch twice, and its products twice."""
    (_, C, _, _), (N, _, P, Q) = call.in_shapes[:2]
    patches = element(call) * N * P * Q * C * int(call.attrs["size"]) ** 2
    products = element(call, "in", 1) * numel(call.in_shapes[1])
    return [Traffic(2 * (patches + products), outputs(call), size(call, "in", 0) + products)]


HOST, OPS = {Op("unit_patches"): host(unit_patches)}, {Op("unit_patches"): Impl(bind, supports=maps.supports, traffic=traffic)}


def cases(images: Shapes = ((2, 3, 5, 4), (1, 2, 4, 6)), products: int = 7) -> Iterator[Case]:
    """Patches of 2×2 and 3×3 pixels with more and with fewer products than a warp has lanes."""
    for shape, edge, width in zip(images, (3, 2), (40, products), strict=True):
        n, _, h, w = shape
        made = (n, width, h - edge + 1, w - edge + 1)
        ins = (normal(34, *shape), normal(35, *made), 0.1 * normal(36, width))
        # Of D products the length, of C·edge² values the deviation: the longest sum is the larger one.
        yield Case(Op("unit_patches"), f"{edge}×{edge} of {label_of(shape)}", ins, ((made, "float32"),), {"size": edge, "norm": 1e-3}, 40)
