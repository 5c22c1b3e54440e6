"""Four phases of which not all have all taps (`Spans`): the taps of each, and an order of tiles that gives every multiprocessor as much to do.

A phase of a 3×3 filter has 1, 2, 2 or 4 taps, of a 2×2 filter 1 of 4, of a 1×1 filter 1 or none. All phases of the same pixels read the same source,
so whatever the order, they are near each other in time: a source that is larger than the L2 cache would else come out of memory once per phase.

    persistent blocks   the phase is the fastest part of a tile's number, and turns by one with every round of the blocks: a block, whose tiles are
                        gridDim apart, gets all phases in turn where 4 divides the number of blocks, as it does 132 and 264 (others are less
                        even), and at any time some blocks multiply while others store.
    one tile per block  even bands of at most BAND rows of tiles, within a band the phase of the most taps first: multiprocessors take blocks as they
                        become free, and what is left at the end are the shortest.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, jit
from nbcnn.ops.conv.frame.correlation import Spans
from nbcnn.ops.kernel.loops import quotient

BAND = 128
"""Rows of tiles whose phases follow each other: of 128 pixels of 512 channels of bfloat16 they read 16 MB, which stay in L2 for all four."""


@cache
def taps_of(spans: Spans | None, R: int, S: int) -> Any:
    """Device function (phase) -> first line of taps, behind the last line, first column, behind the last column: of R×S taps without spans."""
    if spans is None:

        @jit(device=True)
        def every(phase):
            return 0, R, 0, S

        return every
    (EVEN_TOP, EVEN_END), (ODD_TOP, ODD_END) = spans.rows
    (EVEN_LEFT, EVEN_RIGHT), (ODD_LEFT, ODD_RIGHT) = spans.columns

    @jit(device=True)
    def run(phase):
        top, end, left, right = EVEN_TOP, EVEN_END, EVEN_LEFT, EVEN_RIGHT
        if phase >= 2:
            top, end = ODD_TOP, ODD_END
        if phase & 1:
            left, right = ODD_LEFT, ODD_RIGHT
        return top, end, left, right

    return run


@jit(device=True)
def turned(tile, rest, blocks):
    """Phase of tile number `tile` of persistent blocks, `blocks` in all; `rest` is what its number has behind the tiles along GM.

    The four phases of the same pixels and channels turn together: so each is there once, whatever number of blocks there is.
    """
    at = rest & 3
    return (at + quotient(tile - at, blocks)) & 3


@cache
def phase_in_rounds(spans: Spans | None) -> Any:
    """Device function (tile, rest, tiles_of_phase) -> phase, tile along K: as `turned`. Without spans phase follows phase."""
    if spans is None:

        @jit(device=True)
        def in_order(tile, rest, tiles_of_phase):
            phase = rest // tiles_of_phase
            return phase, rest - phase * tiles_of_phase

        return in_order

    @jit(device=True)
    def run(tile, rest, tiles_of_phase):
        return turned(tile, rest, cuda.gridDim.x), rest >> 2

    return run


@cache
def stages_of(spans: Spans | None, R: int, S: int) -> Any:
    """Device function (tile, across, steps) -> patches and filters that a tile of a persistent block takes from their rings.

    steps: patches of a tile that has taps.
    """
    if spans is None:

        @jit(device=True)
        def equal(tile, across, steps):
            return steps, steps * (R * S)

        return equal
    taps = taps_of(spans, R, S)

    @jit(device=True)
    def run(tile, across, steps):
        top, end, left, right = taps(turned(tile, tile - quotient(tile, across) * across, cuda.gridDim.x))
        count = (end - top) * (right - left)
        return steps if count > 0 else 0, steps * count

    return run


@cache
def tile_in_bands(spans: Spans) -> Any:
    """Device function (block, down, across, tiles_of_phase) -> tile along GM, tile along K, phase: `down` tiles along GM, one tile per block."""
    ORDER = sum(phase << 2 * at for at, phase in enumerate(spans.longest_first))

    @jit(device=True)
    def run(block, down, across, tiles_of_phase):
        bands = quotient(down + (BAND - 1), BAND)
        rows = quotient(down + bands - 1, bands)
        first = quotient(block, rows * across) * rows
        rest = block - first * across
        tiles = min(rows, down - first) * tiles_of_phase
        at = quotient(rest, tiles)
        rest -= at * tiles
        row = quotient(rest, tiles_of_phase)
        return first + row, rest - row * tiles_of_phase, ORDER >> 2 * at & 3

    return run
