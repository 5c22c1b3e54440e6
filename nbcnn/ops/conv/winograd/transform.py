"""The transforms of Winograd's F(2×2, 3×3) between images or filters and their 16 Winograd-domain values, and those of a folded upsampling's
nine (winograd.py and nine_products.py have the formulas).

Every kernel moves float4s of neighbouring channels, one tile (or one filter) per thread: memory-bound. The values of an image
lie as [position][tile][channel], those of a filter as [row][position][column]. Tiles are numbered image by image, line by line,
which is also how pooling numbers its windows (pooling.py); launches see a part of the images, from tile `first` on.
"""

from __future__ import annotations

import functools
from typing import Any

from nbcnn.gpu.language import cuda, f4, i8, jit
from nbcnn.ops.activations.table import applied
from nbcnn.ops.conv.frame.pooling import store_pooled
from nbcnn.ops.kernel.loops import quotient
from nbcnn.ops.kernel.traffic import Traffic, once, windows
from nbcnn.ops.kernel.windows import split
from nbcnn.ops.ptx.vector import load4, load4_if, store4

THREADS = 256
VALUES = {"winograd": 16, "doubled": 9}


def _both_ways(line: Any, n: int, m: int) -> Any:
    """Device function (into, of): `line`, a linear map of n numbers to m, along the rows and then the columns of `of` (n,n,4)."""
    MIDDLE = m * n * 4

    @jit(device=True)
    def run(into, of):
        middle = cuda.local.array(MIDDLE, f4)
        for b in range(n):
            for q in range(4):
                line(middle, b * 4 + q, n * 4, of, b * 4 + q, n * 4)
        for a in range(m):
            for q in range(4):
                line(into, a * m * 4 + q, 4, middle, a * n * 4 + q, 4)

    return run


@jit(device=True)
def _bt(y, at, step, x, first, by):
    """y = Bᵀ x for the four numbers first, first + by, … of x, to at, at + step, … of y."""
    a, b, c, d = x[first], x[first + by], x[first + 2 * by], x[first + 3 * by]
    y[at], y[at + step], y[at + 2 * step], y[at + 3 * step] = a - c, b + c, c - b, b - d


@jit(device=True)
def _at(y, at, step, x, first, by):
    """y = Aᵀ x: four numbers to two."""
    a, b, c, d = x[first], x[first + by], x[first + 2 * by], x[first + 3 * by]
    y[at], y[at + step] = a + b + c, b - c - d


@jit(device=True)
def _a(y, at, step, x, first, by):
    """y = A x: two numbers to four."""
    a, b = x[first], x[first + by]
    y[at], y[at + step], y[at + 2 * step], y[at + 3 * step] = a, a + b, a - b, -b


@jit(device=True)
def _g(y, at, step, x, first, by):
    """y = G x: three numbers to four."""
    a, b, c = x[first], x[first + by], x[first + 2 * by]
    half = 0.5 * (a + c)
    y[at], y[at + step], y[at + 2 * step], y[at + 3 * step] = a, half + 0.5 * b, half - 0.5 * b, c


@jit(device=True)
def _d(y, at, step, x, first, by):
    """y = the left difference, the middle, the right difference of three numbers."""
    a, b, c = x[first], x[first + by], x[first + 2 * by]
    y[at], y[at + step], y[at + 2 * step] = a - b, b, c - b


@jit(device=True)
def _p(y, at, step, x, first, by):
    """y = P x: the first, the sum, the last of three numbers."""
    a, b, c = x[first], x[first + by], x[first + 2 * by]
    y[at], y[at + step], y[at + 2 * step] = a, a + b + c, c


@jit(device=True)
def _q(y, at, step, x, first, by):
    """y = Q x: three numbers to two."""
    a, b, c = x[first], x[first + by], x[first + 2 * by]
    y[at], y[at + step] = a + b, b + c


# By kind: the map, how many numbers it takes and gives; of tiles also how far apart they begin, and how far outside the first.
_TILES = {"winograd": (_bt, 4, 4, 2, 1), "gradient": (_a, 2, 4, 2, 0), "doubled": (_d, 3, 3, 1, 1)}
_FILTERS = {"winograd": (_g, 3, 4), "doubled": (_p, 3, 3)}
_IMAGES = {"winograd": (_at, 4, 2), "doubled": (_q, 3, 2)}


@jit(device=True)
def filter_of_values(total, taps):
    """The nine taps Gᵀ total G of 16 Winograd-domain values."""
    middle = cuda.local.array(12, f4)
    for v in range(4):
        plus, minus = 0.5 * (total[4 + v] + total[8 + v]), 0.5 * (total[4 + v] - total[8 + v])
        middle[v], middle[4 + v], middle[8 + v] = total[v] + plus, minus, plus + total[12 + v]
    for r in range(3):
        a, b, c, d = middle[4 * r], middle[4 * r + 1], middle[4 * r + 2], middle[4 * r + 3]
        plus, minus = 0.5 * (b + c), 0.5 * (b - c)
        taps[3 * r], taps[3 * r + 1], taps[3 * r + 2] = a + plus, minus, plus + d


@functools.cache
def input_kernel(kind: str) -> Any:
    """Points of image tiles: "winograd" (Bᵀ d B of 4×4) and "doubled" (3×3) for what a convolution reads, "gradient" (A dy Aᵀ of 2×2)."""
    line, size, wide, STEP, PAD = _TILES[kind]
    transform, COUNT = _both_ways(line, size, wide), wide * wide
    FLOATS, ALL = size * size * 4, COUNT * 4

    @jit(launch_bounds=(THREADS, 2))
    def winograd_input_kernel(x, values, first, tiles, H, W, groups):
        """values[position][t][c] of the tile t, which begins at pixel STEP·(i,j) - PAD of x (N,H,W,C); zero outside.

        grid ceil(tiles·groups / 256), block 256, groups = C/4; a thread owns four channels of a tile
        moves 4·(1 + values/STEP²)·H·W·C bytes per image; the rereads of overlapping tiles meet in the cache
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= tiles * groups:
            return
        t, group = split(i, groups)
        line, across = split(first + t, quotient(W, STEP))
        n, down = split(line, quotient(H, STEP))
        d = cuda.local.array(FLOATS, f4)
        p = cuda.local.array(ALL, f4)
        for a in range(size):
            for b in range(size):
                h, w = STEP * down + (a - PAD), STEP * across + (b - PAD)
                inside = (h >= 0) & (h < H) & (w >= 0) & (w < W)
                k = (a * size + b) * 4
                d[k], d[k + 1], d[k + 2], d[k + 3] = load4_if(x, (((n * H + h) * W + w) * groups + group) * 4, inside)
        transform(p, d)
        for position in range(COUNT):
            at = ((position * tiles + t) * groups + group) * 4
            store4(values, at, p[4 * position], p[4 * position + 1], p[4 * position + 2], p[4 * position + 3])

    return winograd_input_kernel


@functools.cache
def filter_kernel(kind: str) -> Any:
    """Points of filters, of kind "winograd" or "doubled"."""
    line, size, wide = _FILTERS[kind]
    transform, COUNT = _both_ways(line, size, wide), wide * wide
    ALL = COUNT * 4

    @jit(launch_bounds=(THREADS, 2))
    def winograd_filter_kernel(w, values, count, rows, groups):
        """values[row][position][column] = G w Gᵀ (or P w Pᵀ) of w [3×3][row][column].

        grid ceil(count / 256), block 256, count = rows·groups, groups = columns/4; a thread owns four filters
        moves 4·(9 + values)·rows·columns bytes
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        row, group = split(i, groups)
        d = cuda.local.array(36, f4)
        p = cuda.local.array(ALL, f4)
        for tap in range(9):
            at = ((tap * rows + row) * groups + group) * 4
            d[4 * tap], d[4 * tap + 1], d[4 * tap + 2], d[4 * tap + 3] = load4(w, at)
        transform(p, d)
        for position in range(COUNT):
            at = ((row * COUNT + position) * groups + group) * 4
            store4(values, at, p[4 * position], p[4 * position + 1], p[4 * position + 2], p[4 * position + 3])

    return winograd_filter_kernel


@functools.cache
def output_tile(kind: str, bias: bool) -> Any:
    """Device function (out, values, b, t, group, tiles, groups): 2×2 pixels of four channels, Aᵀ m A or Q m Qᵀ (+ b), of the values of a tile."""
    line_of, size, _ = _IMAGES[kind]
    transform, COUNT, ALL, BIAS = _both_ways(line_of, size, 2), size * size, size * size * 4, bias

    @jit(device=True)
    def run(out, values, b, t, group, tiles, groups):
        m = cuda.local.array(ALL, f4)
        for position in range(COUNT):
            at = ((position * tiles + t) * groups + group) * 4
            m[4 * position], m[4 * position + 1], m[4 * position + 2], m[4 * position + 3] = load4(values, at)
        transform(out, m)
        if BIAS:
            v = load4(b, 4 * group)
            for pixel in range(4):
                for q in range(4):
                    out[4 * pixel + q] += v[q]

    return run


@functools.cache
def image_kernel(kind: str, bias: bool, after: Any) -> Any:
    """Images of Winograd-domain values: Aᵀ m A or Q m Qᵀ (+ b), then nothing, an activation, "mask" or "pool" (im2col.Window says what these are)."""
    make, store_window = output_tile(kind, bias), store_pooled(True)
    (ACTIVATES, activate), MASK, POOL = applied(after), after == "mask", after == "pool"

    @jit(launch_bounds=(THREADS, 2))
    def winograd_image_kernel(values, b, other, y, first, tiles, H, W, groups):
        """y (N,H,W,K) (or its pooled form) from values[position][t][k].

        grid ceil(tiles·groups / 256), block 256, groups = K/4; a thread owns four channels of a tile of 2×2 pixels
        moves 4·(values/4 + 1)·H·W·K bytes per image (4·(values/4 + 1/4) if pooled). other: what masks, or the index that pooling writes
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= tiles * groups:
            return
        t, group = split(i, groups)
        out = cuda.local.array(16, f4)
        make(out, values, b, t, group, tiles, groups)
        if POOL:
            at = (first + t) * groups + group
            store_window(out, y, other, i8(at) * 4, i8(at), 4)
        else:
            line, across = split(first + t, W >> 1)
            for pixel in range(4):
                # Tiles are numbered over all images: line is n·H/2 + i, so its pixels lie in the rows 2·line and 2·line + 1.
                row = (2 * line + pixel // 2) * W + 2 * across + pixel % 2
                at = (row * groups + group) * 4
                if MASK:
                    v = load4(other, at)
                    for q in range(4):
                        out[4 * pixel + q] = out[4 * pixel + q] if v[q] > 0.0 else 0.0
                if ACTIVATES:
                    for q in range(4):
                        out[4 * pixel + q] = activate(out[4 * pixel + q])
                store4(y, at, out[4 * pixel], out[4 * pixel + 1], out[4 * pixel + 2], out[4 * pixel + 3])

    return winograd_image_kernel


def input_traffic(kind: str, tiles: int, H: int, W: int, channels: int) -> Traffic:
    """Bytes of `input_kernel` on the tiles of whole images of H×W: overlapping tiles read their common pixels twice or more."""
    _, size, wide, step, pad = _TILES[kind]
    images = tiles // (H // step * (W // step))
    down, rows = windows(H // step, size, H, step, pad)
    across, columns = windows(W // step, size, W, step, pad)
    return Traffic(4 * images * channels * down * across, 4 * wide * wide * tiles * channels, 4 * images * channels * rows * columns)


def filters_traffic(kind: str, rows: int, columns: int) -> Traffic:
    """Bytes of `filter_kernel`."""
    return once(4 * 9 * rows * columns, 4 * VALUES[kind] * rows * columns)


def images_traffic(kind: str, tiles: int, K: int, after: Any) -> Traffic:
    """Bytes of `image_kernel`: Winograd-domain values of tiles of 2×2 pixels; a pooled tile is one pixel, and a byte of index for 4 channels."""
    read = 4 * VALUES[kind] * tiles * K + (16 * tiles * K if after == "mask" else 0)
    return once(read, tiles * (4 * K + K // 4) if after == "pool" else 16 * tiles * K)
