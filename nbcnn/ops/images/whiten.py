"""Whitening of images: the contrast of each image is normalised, the mean image is taken off, and a convolution removes correlations.

    g[n]          = (x[n] − mean of x[n]) / √(variance of x[n] + contrast) − mean image
    y[n, c, h, w] = Σ_{c', r, s} filters[c, c', r, s] · g[n, c', h + r − ⌊size/2⌋, w + s − ⌊size/2⌋]

Mean and variance of x[n] are over its channels and pixels. Behind its borders g is reflected, without the border itself. The filters are the central
rows of a ZCA of patches (`nbcnn.dictionary.whitening`); the op takes any.

Sources: A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009 (ZCA); A. Coates, H. Lee, A. Y. Ng, AISTATS 2011 (contrast).

    whiten            x (N,C,H,W), mean (C·H·W), filters (C·C·size²) -> y (N,C,H,W)            size, contrast
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.gpu.target import Target
from nbcnn.ops.kernel import maps
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.case import Case, Shapes, label_of, normal
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.traffic import Traffic, element, outputs
from nbcnn.ops.ptx.shuffle import WARP, warp_sum_everywhere
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

THREADS = 256
IMAGES = 4
"""Images of a block of the first kernel: a warp each."""
CHANNELS = 32
"""Channels of an image at most: a thread keeps one sum for each in registers."""


def whiten(x: np.ndarray, mean: np.ndarray, filters: np.ndarray, y: np.ndarray, *, size: int, contrast: float) -> None:
    """y (N,C,H,W) from x (N,C,H,W), the mean image (C·H·W) and the filters (C·C·size²)."""
    N, C, H, W = x.shape
    flat = x.reshape(N, -1)
    centred = flat - flat.mean(1, keepdims=True)
    spread = np.sqrt((centred * centred).mean(1, keepdims=True) + contrast)
    half = size // 2
    g = np.pad((centred / spread - mean).reshape(x.shape), ((0, 0), (0, 0), (half, half), (half, half)), mode="reflect")
    taps = filters.reshape(C, C, size, size)
    y.fill(0)
    for r in range(size):
        for s in range(size):
            y += np.einsum("kc,nchw->nkhw", taps[:, :, r, s], g[:, :, r : r + H, s : s + W])


@cache
def contrast_kernel(kind: str) -> Any:
    """The kernel that measures images stored as `kind`."""
    load, _ = scalar_io(kind)

    @jit()
    def contrast_kernel(x, found, images, count, contrast):
        """found[2n] = the mean of image n, found[2n + 1] = 1 / √(its variance + contrast); an image has `count` elements, in any layout.

        grid ⌈images/4⌉, block 128; owns: one warp per image; shared none; moves the image twice, the second time out of the cache; source: the
        definition, in two passes, because E[x²] − E[x]² cancels where an image has little contrast.
        """
        lane, n = cuda.threadIdx.x & 31, cuda.blockIdx.x * IMAGES + (cuda.threadIdx.x >> 5)
        # Every lane of the block takes part in the sums: beyond the last image it is measured again.
        first = min(n, images - 1) * count
        total = 0.0
        for i in range(lane, count, WARP):
            total += load(x, first + i)
        middle = warp_sum_everywhere(total) / count
        squares = 0.0
        for i in range(lane, count, WARP):
            away = load(x, first + i) - middle
            squares += away * away
        variance = warp_sum_everywhere(squares) / count
        if lane == 0 and n < images:
            found[2 * n] = middle
            found[2 * n + 1] = 1.0 / math.sqrt(variance + contrast)

    return contrast_kernel


@cache
def whiten_kernel(source: str, target: str, layout: str, channels: int, size: int) -> Any:
    """The kernel that whitens images of so many channels in `layout`, stored as `source`, into `target`."""
    (load, _), (_, store) = scalar_io(source), scalar_io(target)
    last, half = layout == "NHWC", size // 2

    @jit()
    def whiten_kernel(x, mean, filters, found, y, count, H, W):
        """y = filters ∗ g with g = (x − found[2n]) · found[2n + 1] − mean, reflected at the borders.

        grid ⌈N·H·W/256⌉, block 256; owns: per thread one pixel with all its channels; shared none; moves 4·size²·C bytes of x and of mean per pixel
        through the caches, and y once; source: the definition.
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        plane = H * W
        n = i // plane
        h, w = (i - n * plane) // W, i % W
        middle, scale = found[2 * n], found[2 * n + 1]
        total = cuda.local.array(channels, f4)
        for c in range(channels):
            total[c] = 0.0
        for r in range(size):
            row = h + r - half
            row = max(row, -row)
            row = min(row, 2 * (H - 1) - row)
            for s in range(size):
                column = w + s - half
                column = max(column, -column)
                column = min(column, 2 * (W - 1) - column)
                pixel = row * W + column
                for e in range(channels):
                    at = (n * plane + pixel) * channels + e if last else (n * channels + e) * plane + pixel
                    g = (load(x, at) - middle) * scale - mean[e * plane + pixel]
                    for c in range(channels):
                        total[c] += filters[((c * channels + e) * size + r) * size + s] * g
        for c in range(channels):
            store(y, i * channels + c if last else (n * channels + c) * plane + h * W + w, total[c])

    return whiten_kernel


def bind(call: Call) -> list[Launch]:
    """One launch of each kernel."""
    x, mean, filters = call.ins
    N, C, H, W = call.in_shapes[0]
    source, target = kinds(call)
    found = call.scratch[: scratch(call)].view(np.float32)
    size, contrast = int(call.attrs["size"]), np.float32(call.attrs["contrast"])
    measure = (x, found, np.int32(N), np.int32(C * H * W), contrast)
    pixels = (x, mean, filters, found, call.outs[0], np.int32(N * H * W), np.int32(H), np.int32(W))
    return [
        Launch(contrast_kernel(source), blocks(N, IMAGES), IMAGES * WARP, measure),
        Launch(whiten_kernel(source, target, call.layout, C, size), blocks(N * H * W, THREADS), THREADS, pixels),
    ]


def scratch(call: Call) -> int:
    """Bytes of two float32 for every image."""
    return 8 * call.in_shapes[0][0]


def supports(call: Call, target: Target) -> str | None:
    """None, or the reason in words why an image has too many channels, or a tensor too many elements."""
    channels = call.in_shapes[0][1]
    too_many = f"images of {channels} channels: a thread keeps at most {CHANNELS} in registers"
    return maps.supports(call, target) if channels <= CHANNELS else too_many


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`: each image twice; then what the taps of each pixel read of images and of the mean image."""
    N, C, H, W = call.in_shapes[0]
    image, size = element(call) * numel(call.in_shapes[0]), int(call.attrs["size"])
    read = (element(call) + 4) * size**2 * numel(call.in_shapes[0])
    return [Traffic(2 * image, 8 * N, image), Traffic(read, outputs(call), image + 4 * C * H * W)]


HOST, OPS = {Op("whiten"): host(whiten)}, {Op("whiten"): Impl(bind, scratch, supports, traffic=traffic)}


def cases(images: Shapes = ((2, 3, 4, 5), (1, 1, 5, 3), (3, 2, 6, 3))) -> Iterator[Case]:
    """Images as narrow as the filter can be reflected in, and wider."""
    for shape in images:
        _, c, h, w = shape
        size = 5 if min(h, w) > 3 else 3
        ins = (normal(33, *shape), 0.1 * normal(32, c * h * w), normal(31, c * c * size**2))
        yield Case(Op("whiten"), f"{label_of(shape)} by {size}×{size}", ins, ((shape, "float32"),), {"size": size, "contrast": 1e-3}, c * h * w)
