"""This module says how blocks share a batch of images in kernels that work channel by channel (batch normalisation, a bias's gradient): which pixels
a block and a thread take.

The pixels of the whole batch are numbered m = n·H·W + p. A block has COLUMNS × ROWS threads, thread = row·COLUMNS + column, and a chunk of
neighbouring pixels. In NHWC a thread has WIDTH neighbouring channels, 16 bytes where the number of channels allows it, and every ROWS-th pixel
of the chunk, so that a warp reads what lies side by side, and what belongs to a channel is loaded once for all of them. In NCHW a block has one
channel, and neighbouring threads have neighbouring pixels. Sums of a block leave it as one partial for each channel; `finish` kernels add the
partials in a fixed order, so the bits do not depend on timing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from nbcnn.gpu.language import SIMULATOR, cuda, jit
from nbcnn.ops.kernel.call import Call, Shape
from nbcnn.ops.kernel.loops import ceil_div, power_of_two, quotient
from nbcnn.ops.kernel.stored import PAIRS, kinds, scalar_io, vector_io, widest
from nbcnn.ops.ptx import vector

THREADS = 16 if SIMULATOR else 256
"""Threads of a block at most."""
SMALLEST_BLOCK = 4 if SIMULATOR else 32
"""Threads of a block at least, where images are small and a block stays within one."""
BLOCKS = 1056
"""Chunks times tiles of channels, about: eight blocks for each multiprocessor of an H200. Every GPU has the same number, and so the same bits."""
PIXELS_PER_THREAD, PIXELS_PER_CHUNK = (4, 8) if SIMULATOR else (4, 32)
"""Pixels that a thread and a chunk have at least: what a thread has in flight. Of the smallest chunks a channel's partial of eight bytes is 1/16 of
what is read for it in float32. With four times as many pixels, images of 512×512×4×4 made 128 blocks, and dgrad's pass over 25 MB took 11.7 µs where
`add`, which moves as much, takes 7.9 (H200)."""
WIDEST = 4 if SIMULATOR else 32
"""Columns of a block at most: a warp reads 512 bytes of a pixel. More would leave few chunks where there are many channels."""
IN_FLIGHT = 4
"""Pixels that a thread loads before it uses the first."""


@dataclass(frozen=True)
class Share:
    """What a block and a thread take: see the module. `last`: channels are the last axis (NHWC)."""

    width: int
    columns: int
    rows: int
    last: bool

    @property
    def threads(self) -> int:
        return self.columns * self.rows


def share_of(shape: Shape, layout: str, kind: str) -> Share:
    """The share for images of logical `shape` (N,C,H,W) that are stored as `kind`."""
    channels = shape[1]
    if layout == "NCHW":
        return Share(1, 1, THREADS, False)
    widths = (8, 4) if widest(kind) == 8 else (4,)
    width = next((width for width in widths if channels % width == 0), 1)
    groups = channels // width
    columns = max(each for each in range(1, WIDEST + 1) if groups % each == 0)
    if groups > WIDEST > 4 * columns:
        columns = WIDEST  # the last tile is then not full, which costs less than narrow ones
    return Share(width, columns, THREADS // columns, True)


@dataclass(frozen=True)
class Extent:
    """The grid of a batch: pixels, channels, pixels of an image and of a chunk, tiles of channels, chunks."""

    pixels: int
    channels: int
    plane: int
    chunk: int
    tiles: int
    chunks: int

    @property
    def grid(self) -> tuple[int, int]:
        return self.tiles, self.chunks


def extent_of(shape: Shape, share: Share) -> Extent:
    """The grid of images of logical `shape` in this share."""
    n, c, h, w = shape
    pixels, tiles = n * h * w, ceil_div(c, share.width * share.columns)
    chunk = max(ceil_div(pixels, max(BLOCKS // tiles, 1)), PIXELS_PER_THREAD * share.rows, PIXELS_PER_CHUNK)
    chunk = ceil_div(chunk, share.rows) * share.rows
    return Extent(pixels, c, h * w, chunk, tiles, ceil_div(pixels, chunk))


def share_of_images(shape: Shape, layout: str, kind: str) -> tuple[Share, Extent]:
    """The share and the grid where a chunk must not go beyond an image: its pixels divide H·W, and images of few pixels have fewer rows."""
    n, c, h, w = shape
    share = share_of(shape, layout, kind)
    share = replace(share, rows=min(share.rows, max(power_of_two(h * w), SMALLEST_BLOCK // share.columns, 1)))
    tiles = ceil_div(c, share.width * share.columns)
    wanted, least = ceil_div(BLOCKS, tiles * n), max(PIXELS_PER_THREAD * share.rows, PIXELS_PER_CHUNK)
    parts = max(each for each in range(1, max(min(wanted, h * w // least), 1) + 1) if h * w % each == 0)
    return share, Extent(n * h * w, c, h * w, h * w // parts, tiles, n * parts)


def shared_call(call: Call, image: int) -> tuple[str, Share, Extent]:
    """How a call's images are stored, its share and its grid; `image`: of the inputs one that has the images' shape."""
    kind, shape = kinds(call)[0], call.in_shapes[image]
    share = share_of(shape, call.layout, kind)
    return kind, share, extent_of(shape, share)


@jit(device=True)
def statistic_of_group(first, c, C, HW, group):
    """Which statistic channel c has of the image of pixel `first`, if statistics are of `group` neighbouring channels of an image."""
    return quotient(first, HW) * quotient(C, group) + quotient(c, group)


@cache
def taking(width: int, grouped: bool) -> Any:
    """Device function (array, first, c, C, HW, group, into): the statistics of channels c … of the chunk from pixel `first` on.

    `grouped`: they are of groups (`statistic_of_group`), else of channels.
    """
    WIDTH, (load, _) = width, floats_io(width)

    @jit(device=True)
    def take(array, first, c, C, HW, group, into):
        if grouped:
            for q in range(WIDTH):
                into[q] = array[statistic_of_group(first, c + q, C, HW, group)]
        else:
            load(array, c, into)

    return take


@cache
def lanes_io(kind: str, width: int) -> tuple[Any, Any]:
    """Device functions load(array, i, into, at) and store(array, i, values, at): `width` elements stored as `kind`, from element i on.

    into, values: local float32 arrays, from element `at` on.
    """
    if width == 8:
        low, high, pack = PAIRS[kind][:3]

        @jit(device=True)
        def load(array, i, into, at):
            a, b, c, d = vector.load_halves8(array, i)
            into[at], into[at + 1], into[at + 2], into[at + 3] = low(a), high(a), low(b), high(b)
            into[at + 4], into[at + 5], into[at + 6], into[at + 7] = low(c), high(c), low(d), high(d)

        @jit(device=True)
        def store(array, i, values, at):
            a, b = pack(values[at], values[at + 1]), pack(values[at + 2], values[at + 3])
            c, d = pack(values[at + 4], values[at + 5]), pack(values[at + 6], values[at + 7])
            vector.store_halves8(array, i, a, b, c, d)
    elif width == 4:
        load4, store4 = vector_io(kind)

        @jit(device=True)
        def load(array, i, into, at):
            into[at], into[at + 1], into[at + 2], into[at + 3] = load4(array, i)

        @jit(device=True)
        def store(array, i, values, at):
            store4(array, i, values[at], values[at + 1], values[at + 2], values[at + 3])
    else:
        load1, store1 = scalar_io(kind)

        @jit(device=True)
        def load(array, i, into, at):
            into[at] = load1(array, i)

        @jit(device=True)
        def store(array, i, values, at):
            store1(array, i, values[at])

    return load, store


@cache
def floats_io(width: int) -> tuple[Any, Any]:
    """Device functions load(array, i, into) and store(array, i, values): `width` float32, four at a time where there are four."""
    WIDTH, (load4, store4) = width, vector_io("float32")

    @jit(device=True)
    def load(array, i, into):
        for q in range(0, WIDTH, 4):
            into[q], into[q + 1], into[q + 2], into[q + 3] = load4(array, i + q)

    @jit(device=True)
    def store(array, i, values):
        for q in range(0, WIDTH, 4):
            store4(array, i + q, values[q], values[q + 1], values[q + 2], values[q + 3])

    @jit(device=True)
    def load_one(array, i, into):
        into[0] = array[i]

    @jit(device=True)
    def store_one(array, i, values):
        array[i] = values[0]

    return (load_one, store_one) if width == 1 else (load, store)


@cache
def place_of(last: bool) -> Any:
    """Device function (m, c, C, HW) -> the element of channel c at pixel m of the batch."""

    @jit(device=True)
    def in_nhwc(m, c, C, HW):
        return m * C + c

    @jit(device=True)
    def in_nchw(m, c, C, HW):
        n = quotient(m, HW)
        return (n * C + c) * HW + (m - n * HW)

    return in_nhwc if last else in_nchw


@cache
def rows_sum(share: Share, count: int) -> Any:
    """Device function (memory, sums): adds the `count` local sums of every thread over the rows of its column, in a fixed tree.

    memory: shared, `count` float32 per thread. All threads of the block call it. Sum k of a column is then memory[k·threads + column], behind a
    barrier.
    """
    COLUMNS, ROWS, THREADS = share.columns, share.rows, share.threads
    COUNT = count

    @jit(device=True)
    def add(memory, sums):
        tid = cuda.threadIdx.x
        row = tid // COLUMNS
        for k in range(COUNT):
            memory[k * THREADS + tid] = sums[k]
        cuda.syncthreads()
        rows = ROWS
        while rows > 1:
            half = (rows + 1) >> 1
            if row + half < rows:
                for k in range(COUNT):
                    memory[k * THREADS + tid] += memory[k * THREADS + tid + half * COLUMNS]
            cuda.syncthreads()
            rows = half

    return add
