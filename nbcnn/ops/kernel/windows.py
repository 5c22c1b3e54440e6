"""Sliding windows over images, as pooling and upsampling share them.

Kernels see an image batch as (outer, H, W, inner), whatever its layout: NCHW is (N·C, H, W, 1) and NHWC is (N, H, W, C).
Lanes are neighbours in `inner` that one thread handles in one access: 4 where C is a multiple of 4 in NHWC, else 1.
A window has size × size taps, numbered row by row; windows lie fully inside, P = (H - size) // stride + 1 of them.

NCHW has nothing to vectorise along `inner`. There, the 2 × 2 windows of stride 2 that every model here uses are handled
in "rows", several at a time along W; other windows one element at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.kernel.call import Launch, Shape, blocks
from nbcnn.ops.kernel.case import Shapes, label_of
from nbcnn.ops.kernel.loops import quotient
from nbcnn.ops.kernel.stored import scalar_io, vector_io
from nbcnn.plan.shapes import window_extent

THREADS = 256


def taps(x: np.ndarray, size: int, stride: int, windows: tuple[int, int]) -> Iterator[np.ndarray]:
    """Views of x (N,C,H,W), one per tap in row-major order: element (n,c,p,q) is what window (p,q) of `windows` = (P,Q) sees."""
    P, Q = windows
    for r in range(size):
        for s in range(size):
            yield x[:, :, r : r + stride * (P - 1) + 1 : stride, s : s + stride * (Q - 1) + 1 : stride]


def planes(shape: Shape, layout: str) -> tuple[int, int]:
    """(outer, inner) of an image batch of logical `shape` (N,C,H,W) stored in `layout`."""
    n, c = shape[:2]
    return (n, c) if layout == "NHWC" else (n * c, 1)


def lanes_of(inner: int) -> int:
    """Elements of `inner` that a thread takes at once: 4 or 1."""
    return 4 if inner % 4 == 0 else 1


def in_rows(layout: str, size: int, stride: int, W: int) -> bool:
    """True where windows over a width of `W` can be handled two and four at a time along W."""
    return layout == "NCHW" and size == stride == 2 and W % 8 == 0


def reach_of(size: int, stride: int) -> int:
    """Windows along one axis that can contain one element: ceil(size / stride)."""
    return -(-size // stride)


def launch(kernel: Any, threads: int, arrays: tuple[Any, ...], *scalars: Any) -> list[Launch]:
    """`kernel`(*arrays, threads, *scalars) with `threads` threads that have work; Python ints become int32."""
    numbers = (np.int32(threads), *(np.int32(s) if isinstance(s, int) else s for s in scalars))
    return [Launch(kernel, blocks(threads, THREADS), THREADS, (*arrays, *numbers))]


@jit(device=True)
def split(i, n):
    """(i // n, i % n) of i >= 0."""
    whole = quotient(i, n)
    return whole, i - whole * n


@jit(device=True)
def position(i, H, W, groups):
    """(o, h, w, group) of element i of an (outer, H, W, groups) array."""
    rest, group = split(i, groups)
    rest, w = split(rest, W)
    o, h = split(rest, H)
    return o, h, w, group


@jit(device=True)
def offset_of(o, h, w, group, H, W, groups):
    """The element of an (outer, H, W, groups) array at (o, h, w, group): the inverse of `position`."""
    return ((o * H + h) * W + w) * groups + group


@cache
def lane_io(lanes: int, kind: str) -> tuple[Any, Any]:
    """Device functions load(array, i, into) and store(array, i, values): group i of `lanes` elements stored as `kind`, to and
    from a local float32 array."""
    if lanes == 4:
        load4, store4 = vector_io(kind)

        @jit(device=True)
        def load(array, i, into):
            into[0], into[1], into[2], into[3] = load4(array, i * 4)

        @jit(device=True)
        def store(array, i, values):
            store4(array, i * 4, values[0], values[1], values[2], values[3])
    else:
        load1, store1 = scalar_io(kind)

        @jit(device=True)
        def load(array, i, into):
            into[0] = load1(array, i)

        @jit(device=True)
        def store(array, i, values):
            store1(array, i, values[0])

    return load, store


WINDOWS: Shapes = ((2, 2), (3, 2), (2, 3), (3, 1))
"""Sizes and strides of pooling cases: side by side, overlapping, with gaps, one pixel apart."""


def pooled_shapes(images: Shapes, windows: Shapes) -> Iterator[tuple[str, Shape, Shape, dict[str, int]]]:
    """For cases: (label, images, pooled images, attributes) wherever a window of `windows`, (size, stride), fits into an image."""
    for shape in images:
        n, c, h, w = shape
        for size, stride in windows:
            if size <= min(h, w):
                pooled = (n, c, window_extent(h, size, stride), window_extent(w, size, stride))
                yield f"{label_of(shape)} {size}/{stride}", shape, pooled, {"size": size, "stride": stride}
