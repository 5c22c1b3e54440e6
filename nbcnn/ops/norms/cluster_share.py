"""This module says what a block of a cluster holds of a batch, and how its sums are added: for batch_cluster_forward.py and _backward.py.

Block `rank` of a cluster has pixels rank·⌈M/CLUSTER⌉ … of CHANNELS neighbouring channels. A thread has 16 bytes of every ROWS-th of them, which it
alone reads again, from where the threads of a warp lie side by side. In shared memory, in this order:

    2·CHANNELS          what the block gives to its cluster
    4·CHANNELS          numbers of every channel, from which y or dx is made
    2·CHANNELS·warps    sums of every warp
    the pixels          of a thread one after the other, THREADS·16 bytes apart; of the gradients g (or dy) before x

Sums are added over the lanes of a warp, over the warps, and over the ranks, always in the same order: the bits do not depend on timing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, jit, types, u4
from nbcnn.ops.kernel.loops import ceil_div, power_of_two
from nbcnn.ops.kernel.stored import PAIRS
from nbcnn.ops.ptx import cvt, vector
from nbcnn.ops.ptx.shuffle import WARP
from nbcnn.plan.storage import HALVES

ALL_LANES = 0xFFFFFFFF
MOST_IN_FLIGHT = 8


@dataclass(frozen=True)
class Tile:
    """A block has `rows` × `columns` threads, of 16 bytes of a pixel each; a cluster has `cluster` blocks."""

    columns: int
    rows: int
    cluster: int

    @property
    def threads(self) -> int:
        return self.columns * self.rows


@dataclass(frozen=True)
class Layout:
    """A block's shared memory: the pixels of a thread at most, the elements of a tensor that the block holds, and the bytes of all."""

    slots: int
    held: int
    nbytes: int

    @property
    def flight(self) -> int:
        """Pixels that a thread may load before it uses the first: all that it has, and 8 at most."""
        return min(power_of_two(self.slots), MOST_IN_FLIGHT)


def layout_of(tile: Tile, width: int, pixels: int, tensors: int) -> Layout:
    """The shared memory of a block with so many pixels of `tensors` tensors, 16 bytes of which are `width` channels."""
    slots = ceil_div(pixels, tile.rows)
    held = slots * tile.threads * width
    return Layout(slots, held, 4 * floats_of(tile, width) + 16 // width * held * tensors)


def floats_of(tile: Tile, width: int) -> int:
    """Numbers in front of the pixels."""
    return 2 * tile.columns * width * (3 + tile.threads // WARP)


@cache
def words_io(kind: str) -> tuple[Any, ...]:
    """Device functions that move 16 bytes, as four words of a local array from element `at` on, and what they are stored and worded as.

    read(array, i, words, at), write(array, i, words, at): of a device array. put, get: of a shared one. floats(words, at, into): as float32,
    4 or 8 of them. rounded(values, words, at): the reverse.
    """
    tf32 = kind == "tfloat32"
    if kind in HALVES:
        low, high, pack = PAIRS[kind][:3]

        @jit(device=True)
        def read(array, i, words, at):
            words[at], words[at + 1], words[at + 2], words[at + 3] = vector.load_halves8(array, i)

        @jit(device=True)
        def write(array, i, words, at):
            vector.store_halves8(array, i, words[at], words[at + 1], words[at + 2], words[at + 3])

        @jit(device=True)
        def get(array, i, words, at):
            words[at], words[at + 1], words[at + 2], words[at + 3] = vector.shared_load_halves8(array, i)

        @jit(device=True)
        def put(array, i, words, at):
            vector.shared_store_halves8(array, i, words[at], words[at + 1], words[at + 2], words[at + 3])

        @jit(device=True)
        def floats(words, at, into):
            for k in range(4):
                into[2 * k], into[2 * k + 1] = low(words[at + k]), high(words[at + k])

        @jit(device=True)
        def rounded(values, words, at):
            for k in range(4):
                words[at + k] = pack(values[2 * k], values[2 * k + 1])
    else:

        @jit(device=True)
        def read(array, i, words, at):
            words[at], words[at + 1], words[at + 2], words[at + 3] = vector.load4(array, i)

        @jit(device=True)
        def write(array, i, words, at):
            vector.store4(array, i, words[at], words[at + 1], words[at + 2], words[at + 3])

        @jit(device=True)
        def get(array, i, words, at):
            words[at], words[at + 1], words[at + 2], words[at + 3] = vector.shared_load4(array, i)

        @jit(device=True)
        def put(array, i, words, at):
            vector.shared_store4(array, i, words[at], words[at + 1], words[at + 2], words[at + 3])

        @jit(device=True)
        def floats(words, at, into):
            for k in range(4):
                into[k] = words[at + k]

        @jit(device=True)
        def rounded(values, words, at):
            for k in range(4):
                words[at + k] = cvt.tf32(values[k]) if tf32 else values[k]

    stored, word = (types.uint16, u4) if kind in HALVES else (f4, f4)
    return read, write, get, put, floats, rounded, stored, word


@cache
def over_lanes(count: int, step: int) -> Any:
    """Device function (sums, lane): adds `count` sums over the lanes whose numbers differ in bits from `step` on.

    With every step a lane gives half of what it has left to the lane across and keeps the other half: sums[0], … at last, from the sum on whose
    number has, for every bit of the lane, half of what was left then.
    """
    if step == WARP:

        @jit(device=True)
        def nothing(sums, lane):
            pass

        return nothing
    HALF, STEP, rest = count // 2, step, over_lanes(max(count // 2, 1), 2 * step)

    @jit(device=True)
    def add(sums, lane):
        if HALF == 0:
            sums[0] += cuda.shfl_xor_sync(ALL_LANES, sums[0], STEP)
        else:
            upper = lane & STEP
            for k in range(HALF):
                give = sums[k] if upper else sums[HALF + k]
                keep = sums[HALF + k] if upper else sums[k]
                sums[k] = keep + cuda.shfl_xor_sync(ALL_LANES, give, STEP)
        rest(sums, lane)

    return add


@cache
def block_sums(tile: Tile, width: int) -> tuple[Any, Any]:
    """Device functions gather(memory, sums), which all threads call with 2·width sums each, and behind it total(memory, i): the i-th of the block.

    Sums 0 … width − 1 of a thread are the first CHANNELS of the block, the others the second.
    """
    WIDTH, COLUMNS, CHANNELS, WARPS = width, tile.columns, width * tile.columns, tile.threads // WARP
    STEPS, COUNT = (WARP // tile.columns).bit_length() - 1, 2 * width
    KEPT, AT = max(COUNT >> STEPS, 1), 6 * width * tile.columns
    add = over_lanes(COUNT, tile.columns)

    @jit(device=True)
    def gather(memory, sums):
        tid = cuda.threadIdx.x
        lane = tid & WARP - 1
        column, first = tid & COLUMNS - 1, 0
        add(sums, lane)
        for k in range(STEPS):
            first += COUNT >> k + 1 if lane & COLUMNS << k else 0
        for k in range(KEPT):
            which = (first + k) // WIDTH
            q = first + k - which * WIDTH
            memory[AT + tid // WARP * 2 * CHANNELS + which * CHANNELS + column * WIDTH + q] = sums[k]
        cuda.syncthreads()

    @jit(device=True)
    def total(memory, i):
        value = 0.0
        for w in range(WARPS):
            value += memory[AT + w * 2 * CHANNELS + i]
        return value

    return gather, total


@cache
def shared_floats(width: int) -> Any:
    """Device function (memory, i, into): `width` float32 of shared memory, four at a time."""
    WIDTH = width

    @jit(device=True)
    def load(memory, i, into):
        for q in range(0, WIDTH, 4):
            into[q], into[q + 1], into[q + 2], into[q + 3] = vector.shared_load4(memory, i + q)

    return load
