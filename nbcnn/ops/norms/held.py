"""Slabs of images that are kept in registers, so that every element is loaded once, however often it is used.

A block holds `channels` channels of `images` images. A *plane* is one channel of one image; the threads that share it are a *thread group*;
thread `rank` of a group holds its elements rank, rank + ranks, …, `slots` of them. So a thread has one channel, and its statistics are scalars.

NCHW   an element is four neighbouring pixels, one access of 16 bytes; a thread group is whole warps
NHWC   an element is a pixel; a thread group is every `channels`-th lane of every warp, so that the lanes of a warp read whole sectors
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, i8, jit, types
from nbcnn.ops.activations.sigmoid import divide
from nbcnn.ops.kernel.call import Shape
from nbcnn.ops.kernel.stored import scalar_io, vector_io, vector_load_if
from nbcnn.ops.kernel.windows import split
from nbcnn.ops.ptx.shuffle import WARP, sum_over

u8: Any = types.uint64

LARGEST_GROUP = 8
"""Channels of a group at most: a block holds whole groups."""
SECTOR = 8
"""Channels of a slab in NHWC at least: 32 neighbouring bytes of float32 are what memory moves at once."""
MOST_FLOATS = 32
"""Numbers of a tensor that a thread holds at most."""
LARGEST_BLOCK = 512
OTHER_REGISTERS = 32
"""Registers of a thread besides what it holds, and four for every tensor."""
MOST_IMAGES = 65535
"""What the second axis of a grid has."""
REGISTERS, THREADS, BLOCKS = 65536, 1024, 16
"""Limits of a multiprocessor, on every GPU from compute capability 7.5 on."""
ENOUGH_WARPS = 24
"""Warps on a multiprocessor beyond which longer work for each is worth more than further ones (NCHW; measured on an H200)."""
ENOUGH_THREADS = 256
"""Threads of a block that a slab in NHWC should have at least: two warps for each scheduler."""


@dataclass(frozen=True)
class Held:
    """What a block holds, its threads, elements of a thread, tensors that are held, and how many blocks must fit on a multiprocessor.

    together: 1 if all blocks of the launch fit on the GPU at once, so that they may wait for each other.
    """

    channels: int
    images: int
    threads: int
    slots: int
    tensors: int
    blocks: int
    together: int = 0


@dataclass(frozen=True)
class ThreadGroup:
    """The threads of a `Held` slab in one layout, as numbers that kernels freeze.

    width  floats of an element. step: lanes from one of a thread group to the next. ranks: threads of a thread group.
    warps  warps of which each has part of a plane. planes: of the block. group: channels of a group. floats: of a thread.
    stride floats from one element of a thread to the next.
    """

    wide: bool
    width: int
    step: int
    ranks: int
    warps: int
    planes: int
    channels: int
    group: int
    slots: int
    floats: int
    stride: int

    @property
    def joint(self) -> int:
        """Warps of which each has part of a group."""
        return self.warps if self.wide else self.warps * self.group

    @property
    def groups(self) -> int:
        """Groups of the block."""
        return self.planes // self.group


def thread_group_of(held: Held, layout: str, group: int, channels: int) -> ThreadGroup:
    """The thread group of a slab with groups of `group` channels, of images of so many channels."""
    wide = layout == "NHWC"
    planes = held.channels * held.images
    ranks, width = held.threads // planes, 1 if wide else 4
    warps = held.threads // WARP if wide else ranks // WARP
    step = held.channels if wide else 1
    stride = ranks * channels if wide else 4 * ranks
    return ThreadGroup(wide, width, step, ranks, warps, planes, held.channels, group, held.slots, width * held.slots, stride)


def frozen(layout: str, channels: int) -> int:
    """The channels that a kernel knows when it is compiled: in NHWC all, so that distances are constants; in NCHW it need not know them."""
    return channels if layout == "NHWC" else 0


def slabs_of(shape: Shape, layout: str, group: int, tensors: Sequence[int], multiprocessors: int, at_once: bool = False) -> list[Held]:
    """Slabs for images of logical `shape` (N,C,H,W) with groups of `group` channels, the likely fastest first.

    tensors: how many may be held, first choice first. at_once: all blocks of the launch must fit on the GPU together.
    Empty where nothing fits: pixels (NCHW) or channels (NHWC) that are no multiple of four, wide groups, large images.
    """
    n, c, h, w = shape
    wide = layout == "NHWC"
    if (c if wide else h * w) % 4 or group > LARGEST_GROUP or n > MOST_IMAGES:
        return []
    if wide:
        channels = SECTOR if c % SECTOR == 0 else 4
        slabs = [(channels, 1)] if channels % group == 0 else []
    else:
        slabs = [(1, images) for images in (1, 2, 4, 8) if n % images == 0] if at_once else [(group, 1)]
    made: dict[tuple[int, int, int], tuple[tuple[float, ...], Held]] = {}
    for held in tensors:
        for channels, images in slabs:
            planes, width = channels * images, 1 if wide else 4
            # The fewest warps for every number of elements: of a block in NHWC, of a plane in NCHW.
            for warps in range(1, LARGEST_BLOCK // WARP + 1):
                ranks = warps * WARP // channels if wide else warps * WARP
                slots, threads = -(-h * w // (width * ranks)), ranks * planes
                registers = held * (width * slots + 4) + OTHER_REGISTERS
                blocks, grid = min(THREADS // threads, REGISTERS // (threads * registers), BLOCKS), n * c // planes
                fits = blocks * multiprocessors >= grid
                if width * slots <= MOST_FLOATS and threads <= LARGEST_BLOCK and blocks and (fits or not at_once):
                    # A tensor that is read twice is not held, yet it takes registers while its sums are made.
                    few = threads < ENOUGH_THREADS if wide else grid * threads < ENOUGH_WARPS * WARP * multiprocessors
                    order = (max(tensors) * width * slots > MOST_FLOATS, few, slots if few and not wide else -slots, abs(threads - ENOUGH_THREADS))
                    one = Held(channels, images, threads, slots, held, blocks, int(at_once))
                    made.setdefault((slots, images, held), (order, one))
    return [one for _, one in sorted(made.values(), key=lambda pair: pair[0])]


@cache
def block_position(wide: bool) -> Any:
    """Device function () -> (slab of an image, image_group of images): in NCHW the images of a channel, which wait for each other, come one after
    the other; in NHWC the slabs of an image, which share what memory moves at once.
    """
    WIDE = wide

    @jit(device=True)
    def position():
        x, y = cuda.blockIdx.x, cuda.blockIdx.y
        return (x, y) if WIDE else (y, x)

    return position


def grid_of(layout: str, slabs: int, image_groups: int) -> tuple[int, int]:
    """The grid that `block_position` belongs to."""
    return (slabs, image_groups) if layout == "NHWC" else (image_groups, slabs)


@cache
def plane_of_thread(threads: ThreadGroup) -> Any:
    """Device function (tid) -> (channel, image, rank): of the thread's plane within the slab, and the thread's number in its thread group."""
    RANKS, WIDE, CHANNELS = threads.ranks, threads.wide, threads.channels

    @jit(device=True)
    def plane(tid):
        if WIDE:
            rank, channel = split(tid, CHANNELS)
            return channel, 0, rank
        of, rank = split(tid, RANKS)
        image, channel = split(of, CHANNELS)
        return channel, image, rank

    return plane


@cache
def elements_of(threads: ThreadGroup) -> Any:
    """Device function (n, c, rank, C, HW) -> (offset of the thread's first element, 1 if it has the last slot too)."""
    WIDE, BEFORE = threads.wide, (threads.slots - 1) * threads.ranks

    @jit(device=True)
    def start(n, c, rank, C, HW):
        if WIDE:
            return (n * HW + rank) * C + c, rank + BEFORE < HW
        return (n * C + c) * HW + 4 * rank, rank + BEFORE < HW >> 2

    return start


@cache
def loading(kind: str, threads: ThreadGroup) -> Any:
    """Device function (held, array, start, tail): the thread's elements; zeros in the last slot if it has none there."""
    WIDE, LAST, STRIDE = threads.wide, threads.slots - 1, threads.stride
    load, (load4, _), load4_if = scalar_io(kind)[0], vector_io(kind), vector_load_if(kind)

    @jit(device=True)
    def fill(held, array, start, tail):
        if WIDE:
            for i in range(LAST):
                held[i] = load(array, u8(u8(start) + u8(i * STRIDE)))
            held[LAST] = load(array, u8(u8(start) + u8(LAST * STRIDE))) if tail else 0.0
        else:
            for i in range(LAST):
                held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3] = load4(array, i8(start) + i * STRIDE)
            i = LAST
            held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3] = load4_if(array, i8(start) + i * STRIDE, tail)

    return fill


@cache
def storing(kind: str, threads: ThreadGroup) -> Any:
    """Device function (array, held, start, tail): the counterpart of `loading`."""
    WIDE, SLOTS, STRIDE = threads.wide, threads.slots, threads.stride
    store, (_, store4) = scalar_io(kind)[1], vector_io(kind)

    @jit(device=True)
    def put(array, held, start, tail):
        for i in range(SLOTS):
            if i < SLOTS - 1 or tail:
                if WIDE:
                    store(array, u8(u8(start) + u8(i * STRIDE)), held[i])
                else:
                    store4(array, i8(start) + i * STRIDE, held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3])

    return put


def reaching(kind: str, threads: ThreadGroup) -> tuple[Any, Any, Any, Any]:
    """How a thread of a group reaches what it holds of arrays of `kind`: `plane_of_thread`, `elements_of`, `loading` and `storing`."""
    return plane_of_thread(threads), elements_of(threads), loading(kind, threads), storing(kind, threads)


@cache
def spread_of(threads: ThreadGroup, keep: bool = True) -> Any:
    """Device function (kept, held, lead, rank, HW) -> (mean, squares): of what the thread's warp has of the thread's group the mean, as its
    distance from `lead`, and Σ (x − mean)²; both also go to kept (3, group, warp) with the count, for `joined`, if `keep`. Two passes over
    registers.
    """
    WIDE, WIDTH, SLOTS, STEP, RANKS, WARPS, ALL = (
        threads.wide,
        threads.width,
        threads.slots,
        threads.step,
        threads.ranks,
        threads.joint,
        threads.groups * threads.joint,
    )
    LANES, BEFORE, FLOATS, GROUP = WARP // STEP, (SLOTS - 1) * RANKS, threads.floats, threads.group if threads.wide else 1
    SAFE, PIECES = WIDTH * (SLOTS - 1), WIDTH * GROUP
    across = sum_over(WARP - STEP | GROUP - 1)

    @jit(device=True)
    def spread(kept, held, lead, rank, HW):
        warp, lane = split(cuda.threadIdx.x, WARP)
        elements = HW if WIDE else HW >> 2
        tail = rank + BEFORE < elements
        # How many lanes have the last slot too.
        behind = min(max(elements - BEFORE - (rank - lane // STEP), 0), LANES)
        count = f4(((SLOTS - 1) * LANES + behind) * PIECES)
        total, other = 0.0, 0.0
        for j in range(0, FLOATS):
            if j < SAFE or tail:
                if j % 2 == 0:
                    total += held[j] - lead
                else:
                    other += held[j] - lead
        mean = across(total + other) * divide(1.0, count)
        centre, total, other = lead + mean, 0.0, 0.0
        for j in range(0, FLOATS):
            if j < SAFE or tail:
                away = held[j] - centre
                if j % 2 == 0:
                    total += away * away
                else:
                    other += away * away
        squares = across(total + other)
        if keep and (lane < STEP and lane % GROUP == 0 if WIDE else lane == 0):
            at = lane // GROUP * WARPS + warp if WIDE else warp
            kept[at], kept[ALL + at], kept[2 * ALL + at] = mean, squares, count
        return mean, squares

    return spread


@cache
def joined(threads: ThreadGroup) -> Any:
    """Device function (kept, group, count) -> the mean and the variance of a group, from its warps' (Chan's formula)."""
    WARPS, ALL = threads.joint, threads.groups * threads.joint

    @jit(device=True)
    def join(kept, group, count):
        first, scale = group * WARPS, divide(1.0, count)
        total, squares = 0.0, 0.0
        for w in range(WARPS):
            total += kept[first + w] * kept[2 * ALL + first + w]
        mean = total * scale
        for w in range(WARPS):
            away = kept[first + w] - mean
            squares += kept[ALL + first + w] + kept[2 * ALL + first + w] * away * away
        return mean, squares * scale

    return join


@cache
def adding(threads: ThreadGroup) -> Any:
    """Device function (sums, value, plane, part): the `value`-th sum of every thread, added over each warp, goes to sums (value, plane, warp).

    Behind a barrier `total_of` adds the warps'.
    """
    STEP, WARPS, PLANES = threads.step, threads.warps, threads.planes
    across = sum_over(WARP - STEP)

    @jit(device=True)
    def add(sums, value, plane, part):
        warp, lane = split(cuda.threadIdx.x, WARP)
        total = across(part)
        if lane < STEP:
            sums[(value * PLANES + plane) * WARPS + warp % WARPS] = total

    return add


@cache
def total_of(threads: ThreadGroup) -> Any:
    """Device function (sums, at) -> the sum of a plane: Σ over its warps of sums[at]; the order is fixed."""
    WARPS = threads.warps

    @jit(device=True)
    def total(sums, at):
        first, value = at * WARPS, 0.0
        for w in range(WARPS):
            value += sums[first + w]
        return value

    return total
