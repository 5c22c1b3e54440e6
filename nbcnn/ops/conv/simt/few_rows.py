"""Convolutions with 1×1 filters of at most eight pixels in all, such as linear layers of few examples: a warp adds up one column of the result.

    y[m][n] = f(Σ_k x[m][k] · w[n][k] + b[n])        m < M ≤ 8; f: an activation, or none

A register tile of 32 or 64 rows would be empty for the most part here, and its sum would have to be split over the multiprocessors: a second kernel,
and weights packed in another order before every plan. What such a product costs is to read w once, so the lanes of a warp read neighbouring quads of
one row of w, as it is stored, all in flight at once, and multiply them with every row of x; a long row is shared by several warps of a block. Lanes
add up by shuffles, warps in shared memory: the order follows from the shape alone.

Images are stored NHWC, as float32, tf32 or bf16; products take the weights as they are, float32, also where a row rounds what it packs. Sums are
float32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.gpu.target import Target
from nbcnn.ops.activations.table import applied, epilogue_function
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.cost import MEMORY
from nbcnn.ops.kernel.loops import ceil_div, power_of_two
from nbcnn.ops.kernel.refusals import not_nhwc, too_large
from nbcnn.ops.kernel.stored import kinds, scalar_io, vector_load_if
from nbcnn.ops.kernel.traffic import Traffic, element, outputs
from nbcnn.ops.ptx.shuffle import WARP, warp_sum_everywhere
from nbcnn.ops.ptx.vector import load4_if
from nbcnn.plan.op import Map, Op

MOST_ROWS = 8
"""With more rows tiles are as fast: a layer of 256 → 256 takes 1.8 µs for one row and 7.1 for 16, and in tiles 4.3 for 64 (H200, fp32)."""
LAUNCH_US, ROW_US, SPILLED, BLOCKS = 1.2, 0.14, 2.4, 2
"""Microseconds of the launch, of a row in a run of quads, how many times as long more than MOST_ROWS take, and blocks that share a multiprocessor:
1, 4, 8 and 16 rows of 1,024 → 4,096 take 7.6, 9.2, 11.5 and 28.2 µs (H100, fp32)."""
WARPS = 8
THREADS = WARP * WARPS
IN_FLIGHT = 4
"""Quads of a row of w that a lane has in flight at once."""


@dataclass(frozen=True)
class Tile:
    """`rows`: rows of x that a warp multiplies with, a power of two; `parts`: warps that share a row of w, a power of two up to WARPS."""

    rows: int
    parts: int


def tile_of(call: Call, target: Target) -> Tile:
    """The tile of a call: a row of w has as many warps as have IN_FLIGHT quads per lane."""
    M, _, K = extents(call)
    parts = 1
    while parts < WARPS and WARP * IN_FLIGHT * parts < K // 4:
        parts *= 2
    return Tile(power_of_two(M), parts)


@functools.cache
def few_rows(tile: Tile, kind: str, bias: bool, after: Any) -> Any:
    """The kernel for results and rows of x stored as `kind`; after: the activation, a device function, or None."""
    ROWS, PARTS, COLUMNS = tile.rows, tile.parts, WARPS // tile.parts
    STEP, WEIGHTS, SUMS = WARP * tile.parts, 4 * IN_FLIGHT, WARPS * tile.rows
    load, (_, store) = vector_load_if(kind), scalar_io(kind)
    ACTIVATES, activate = applied(after)

    @jit(launch_bounds=(THREADS, 2))
    def few_rows_kernel(x, w, b, y, M, N, K):
        """y[m][n] = f(Σ_k x[m][k] · w[n][k] + b[n]).

        gemm: GM, GN, GK = M, N, K. grid ⌈N·PARTS/8⌉, block 256; owns: per block 8/PARTS columns, per warp every PARTS-th run of 32 quads of one, a
        lane a quad of each run, for all rows of x.
        shared: 32·ROWS bytes; moves w once and, through the caches, M·K elements of x per column; source: the definition.
        """
        lane, warp = cuda.threadIdx.x % WARP, cuda.threadIdx.x // WARP
        column = cuda.blockIdx.x * COLUMNS + warp // PARTS
        part = warp % PARTS
        weights = cuda.local.array(WEIGHTS, f4)
        total = cuda.local.array(ROWS, f4)
        sums = cuda.shared.array(SUMS, f4)
        for m in range(ROWS):
            total[m] = 0.0
        inside = column < N
        row = min(column, N - 1) * K
        first = part * WARP + lane
        quads = K // 4
        while first < quads:
            for j in range(IN_FLIGHT):
                at = first + j * STEP
                v = load4_if(w, row + 4 * at, inside & (at < quads))
                weights[4 * j], weights[4 * j + 1], weights[4 * j + 2], weights[4 * j + 3] = v[0], v[1], v[2], v[3]
            for m in range(ROWS):
                for j in range(IN_FLIGHT):
                    at = first + j * STEP
                    v = load(x, m * K + 4 * at, inside & (m < M) & (at < quads))
                    for q in range(4):
                        total[m] += v[q] * weights[4 * j + q]
            first += IN_FLIGHT * STEP
        value = 0.0
        for m in range(ROWS):
            # The same sum in every lane; lane m keeps that of row m.
            added = warp_sum_everywhere(total[m])
            value = added if lane == m else value
        if lane < ROWS:
            sums[warp * ROWS + lane] = value
        cuda.syncthreads()
        if (part == 0) & (lane < M) & inside:
            value = sums[warp * ROWS + lane]
            for other in range(1, PARTS):
                value += sums[(warp + other) * ROWS + lane]
            if bias:
                value += b[column]
            if ACTIVATES:
                value = activate(value)
            store(y, lane * N + column, value)

    return few_rows_kernel


def extents(call: Call) -> tuple[int, int, int]:
    """M, N, K of a 1×1 convolution: pixels, filters, channels."""
    n, channels, height, width = call.in_shapes[0]
    return n * height * width, call.in_shapes[1][0], channels


def refusal(call: Call) -> str | None:
    """None, or why a call is no product of rows: its filters are larger than 1×1, or it takes steps or has a border."""
    if call.in_shapes[1][2:] != (1, 1) or (call.attrs["stride"], call.attrs["pad"]) != (1, 0):
        return "its windows are more than one pixel, or do not lie side by side"
    return not_nhwc(call, "products of rows read")


def supports(call: Call, target: Target) -> str | None:
    """None, or the reason in words."""
    if reason := refusal(call):
        return reason
    M, _, K = extents(call)
    if M > WARP:
        return f"{M} rows are more than the {WARP} lanes that keep their sums"
    return f"{K} channels are no whole quads" if K % 4 else too_large(*call.in_shapes, *call.out_shapes)


def bind(call: Call) -> list[Launch]:
    """x (N,C,H,W), w (K,C,1,1)[, b (K)] -> y (N,K,H,W): one launch."""
    (M, N, K), tile = extents(call), call.tile
    x, w, *b = call.ins
    kernel = few_rows(tile, kinds(call)[0], bool(b), epilogue_function(call))
    sizes = (np.int32(size) for size in (M, N, K))
    return [Launch(kernel, ceil_div(N * tile.parts, WARPS), THREADS, (x, w, b[0] if b else w, call.outs[0], *sizes), name=call.op)]


def traffic(call: Call) -> list[Traffic]:
    """Bytes of the launch: w once, x once per column."""
    M, N, K = extents(call)
    weights, rows = 4 * N * K, element(call) * M * K
    return [Traffic(weights + N * rows, outputs(call), weights + rows)]


def estimate(call: Call, target: Target) -> float:
    """Microseconds: w streams by, and rows are multiplied one after another in each run of quads; more than MOST_ROWS of them spill."""
    (_, N, K), tile = extents(call), call.tile
    runs = ceil_div(K // 4, WARP * IN_FLIGHT * tile.parts)
    waves = N * tile.parts / (WARPS * BLOCKS * target.multiprocessors)
    rows = tile.rows * (SPILLED if tile.rows > MOST_ROWS else 1)
    return LAUNCH_US + (4 * N * K + outputs(call)) / MEMORY + ROW_US * rows * runs * max(1.0, waves)


_IMPL = Impl(bind, supports=supports, tile=tile_of, traffic=traffic, engine="few rows", estimate=estimate)
OPS = {Op("conv", "fprop"): _IMPL, Op("conv", "fprop", after=(Map("relu"),)): _IMPL}
"""Forward convolutions of few rows, in every GPU row that stores NHWC."""
