"""The image under a unit of work, from global to shared memory, so that every operand of a product is one aligned 32-bit load.

In tf32 shared memory holds the elements, (h,w,c), a word each. In bfloat16 a word is two elements: element i in its lower half and
element i + PAIR in its upper one. There is such a word for every i, at word i: each element is stored twice. fprop multiplies
neighbouring elements of a patch (PAIR = 1), wgrad the same element of the patches of two neighbouring pixels (PAIR = stride·C).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from nbcnn.gpu.language import cuda, i8, jit, types
from nbcnn.ops.conv.thin_mma.first_shape import WINDOWS, Unit
from nbcnn.ops.kernel.loops import within
from nbcnn.ops.kernel.traffic import windows
from nbcnn.ops.ptx.cvt import bits_float
from nbcnn.ops.ptx.words import load_half, load_word


@dataclass(frozen=True)
class Stager:
    """How `threads` threads copy the image under a unit.

    fetch  (stage, x, n, h, e, H, row, wanted): a thread's share into `slots` registers; h, e: first image row and first element of
           it, negative in the padding; row: elements of an image row.
    stash  (stage, shared, buffer): from there to one of two buffers.
    clear  (shared): both buffers to zero; no element is ever written to some halves, and a product with a zero weight must be zero.
    entries, margin, words  elements of `shared`; first word of buffer 0; words from one buffer to the next.
    """

    fetch: Any
    stash: Any
    clear: Any
    slots: int
    entries: int
    margin: int
    words: int


@functools.cache
def stager(unit: Unit, pair: int, E: int, threads: int) -> Stager:
    """The `Stager` of a unit."""
    WIDTH, COUNT = unit.width, unit.height * unit.width
    SLOTS = -(-COUNT // threads)
    WORDS, ENTRIES = pair + COUNT, 2 * (pair + COUNT) * E
    load = load_half if E == 2 else load_word
    BYTES = 4 // E

    @jit(device=True)
    def fetch(stage, x, n, h, e, H, row, wanted):
        tid = cuda.threadIdx.x
        for j in range(SLOTS):
            at = tid + j * threads
            dh = at // WIDTH
            p, q = h + dh, e + at - dh * WIDTH
            # As unsigned numbers, negative coordinates lie beyond any extent.
            ok = wanted & (at < COUNT) & within(p, H) & within(q, row)
            stage[j] = load(x, i8((n * H + p) * row + q) * BYTES, ok)

    @jit(device=True)
    def stash(stage, shared, buffer):
        tid = cuda.threadIdx.x
        for j in range(SLOTS):
            at = tid + j * threads
            if at < COUNT:
                word = buffer * WORDS + pair + at
                if E == 2:
                    shared[word * 2] = types.uint16(stage[j])
                    shared[(word - pair) * 2 + 1] = types.uint16(stage[j])
                else:
                    shared[word] = bits_float(stage[j])

    @jit(device=True)
    def clear(shared):
        i = cuda.threadIdx.x
        while i < ENTRIES:
            shared[i] = types.uint16(0) if E == 2 else types.float32(0)
            i += threads

    return Stager(fetch, stash, clear, SLOTS, ENTRIES, pair, WORDS)


@jit(device=True)
def place_of_unit(unit, rows, segments):
    """(image, row of units, segment of 16 windows in it) of a unit's number."""
    line = unit // segments
    n = line // rows
    return n, line - n * rows, unit - line * segments


def segments(Q: int) -> int:
    """Units side by side over Q output columns."""
    return -(-Q // (2 * WINDOWS))


def unit_rows(P: int, ROWS: int) -> int:
    """Rows of units over P output rows."""
    return -(-P // (2 * ROWS))


def image_reads(unit: Unit, shape: tuple[int, ...], P: int, Q: int, pad: int) -> tuple[int, int]:
    """Elements of images of `shape` (N,C,H,W) that the units over P×Q outputs read, and how many of them are different."""
    N, C, H, W = shape
    down, rows = windows(unit_rows(P, unit.ROWS), unit.height, H, 2 * unit.ROWS * unit.stride, pad)
    across, columns = windows(segments(Q), unit.width, W * C, 2 * WINDOWS * unit.stride * C, pad * C)
    return N * down * across, N * rows * columns
