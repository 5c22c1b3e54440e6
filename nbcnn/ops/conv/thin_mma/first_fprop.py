"""conv_fprop of a first layer on tensor cores, plain, with a ReLU, or with a ReLU and 2×2 max pooling.

The filters stay in a warp's registers for the whole kernel, and what moves is the small image in and the large output out. GK = C·R·S of 3×3 taps
fits into two products of bf16 (four of tf32), and a patch is in registers as well. Of larger windows, up to 7×7 of three channels in 10 products
(19), a patch is loaded product by product, and all groups of filters that a warp has share a load. The rows of two products are chosen so that the
four pixels of a pooling window come out in one lane: row g of the upper and g + 8 of the lower half of product i are pixels (i,0) and (i,1) of
window g. The bias is one more element of GK, in two parts against two ones, so that it takes no registers of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i8, jit, types, u4
from nbcnn.gpu.target import Target
from nbcnn.ops.activations.table import epilogue_function
from nbcnn.ops.conv.thin_mma.first_epilogue import pooled, unpooled
from nbcnn.ops.conv.thin_mma.first_image import image_reads, place_of_unit, segments, stager, unit_rows
from nbcnn.ops.conv.thin_mma.first_shape import (
    LANES,
    MOST_ON_THE_WAY,
    ONES,
    SHARED_BYTES,
    Unit,
    few_columns,
    first_layer,
    image_words,
    pack_filters,
    packed_tiles,
    products,
    refusal,
    unit_of,
    word_elements,
)
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.loops import ALIGNMENT, ceil_div, unrolled
from nbcnn.ops.kernel.traffic import Traffic, outputs, size
from nbcnn.ops.ptx.asm import byte_address_shared
from nbcnn.ops.ptx.cvt import bf16, bf16_float, bf16x2, float_bits, tf32
from nbcnn.ops.ptx.mma import mma_bf16, mma_tf32
from nbcnn.ops.ptx.shared import load_words_1
from nbcnn.ops.ptx.words import load_2_words
from nbcnn.plan.op import Pool
from nbcnn.plan.shapes import ConvShape

REGISTERS = 512
"""Registers of a lane of each of the four parts of a multiprocessor, shared by its warps in multiples of eight."""
MOST_OF_FILTERS = 80
"""Registers of a warp's filters in a kernel that loads patches product by product: as many go to its sums, addresses and the image on its way."""
MOST_OF_ONE_TURN = 51
"""Most registers per thread for the image under a unit of one turn, where columns are many: with 61, 12 channels, 3×3 taps of stride 2, bf16 spilled
40 bytes."""
_PACKED = {"bf16": "bfloat16", "tf32": "tfloat32"}


@dataclass(frozen=True)
class FpropTile:
    """A warp owns 8 windows × GROUPS·16·E filters at a time; a block 16 windows in each of ROWS rows × WARPS such sets of filters.

    A unit of work is TURNS times as many rows. `resident` blocks are to fit on a multiprocessor; `blocks` persistent blocks share the units;
    kernels are compiled for a tile with blocks 0, since one kernel serves any number.
    """

    GROUPS: int
    WARPS: int
    ROWS: int
    TURNS: int
    resident: int
    blocks: int = 0

    @property
    def threads(self) -> int:
        return 64 * self.ROWS * self.WARPS

    def filters(self, E: int) -> int:
        """Filters of a block."""
        return 16 * E * self.GROUPS * self.WARPS


@jit(device=True)
def bf16_part(x):
    """x rounded to bfloat16."""
    return bf16_float(bf16(x))


@functools.cache
def fprop_kernel(C: int, R: int, S: int, stride: int, E: int, bias: bool, after: Any, whole: bool, tile: FpropTile) -> Any:
    """The kernel for one window, one end and one tile.

    after: None, the device function of an activation, "mask" or "pool". whole: K is a multiple of 4·E.
    """
    WARPS, ROWS, TURNS, GROUPS, THREADS = tile.WARPS, tile.ROWS, tile.TURNS, tile.GROUPS, tile.threads
    unit = Unit(C, R, S, stride, ROWS * TURNS)
    FILTERS, IN_GROUP, TILES = 4 * E, 2 * E, 2 * E * tile.GROUPS
    STORED = -(-image_words(C, R, S, E) // 8)
    WORDS, IN_ROW = image_words(C, R, S, E), -(-S * C // E)
    PRODUCTS = products(C, R, S, E)
    WHOLE_PATCH = few_columns(C, R, S, E)
    HALVES, RA, RB, VALUES = 2 * PRODUCTS, 8 * PRODUCTS if WHOLE_PATCH else 8, 2 * PRODUCTS * TILES, 4 * FILTERS
    SUMS = GROUPS * VALUES
    ONE = ONES[E]
    stage_image = stager(unit, 1, E, THREADS)
    fetch, stash, clear = stage_image.fetch, stage_image.stash, stage_image.clear
    SLOTS, ENTRIES, MARGIN, BUFFER = stage_image.slots, stage_image.entries, stage_image.margin, stage_image.words
    NUMBER = types.uint16 if E == 2 else types.float32
    DOWN, ACROSS, WIDTH = 4 * stride * unit.width, 4 * stride * C, unit.width
    put = pooled(E, whole) if after == "pool" else unpooled(E, whole, after)
    mma = mma_bf16 if E == 2 else mma_tf32
    leading = bf16_part if E == 2 else tf32

    @jit(device=True)
    def load_filters(rB, packed, b, first, tiles, lane, K):
        for j in range(TILES):
            number = first + j
            group, column = number // IN_GROUP, lane >> 2
            filter = group * (4 * FILTERS) + (column >> 1) * FILTERS + (number - group * IN_GROUP) * 2 + (column & 1)
            value = 0.0
            if bias and filter < K:
                value = b[filter]
            rest = value - leading(value)
            for k in range(PRODUCTS):
                words = load_2_words(packed, i8((number * STORED + k) * 32 + lane) * 8, (number < tiles) & (k < STORED))
                for half in range(2):
                    word = 8 * k + 4 * half + (lane & 3)
                    rB[(j * PRODUCTS + k) * 2 + half] = words[half]
                    if bias and word == WORDS:
                        rB[(j * PRODUCTS + k) * 2 + half] = bf16x2(value, rest) if E == 2 else float_bits(leading(value))
                    if bias and E == 1 and word == WORDS + 1:
                        rB[(j * PRODUCTS + k) * 2 + half] = float_bits(tf32(rest))

    @jit(device=True)
    def load_patches(rA, address, move, lane):
        for pixel in range(4):
            for k in range(HALVES):
                rA[pixel * HALVES + k] = load_words_1(address[k] + move + ((pixel // 2) * DOWN + (pixel % 2) * ACROSS))
                if bias and 4 * k + 3 >= WORDS:
                    rA[pixel * HALVES + k] = rA[pixel * HALVES + k] if 4 * k + (lane & 3) < WORDS else ONE

    def make_group(s: int) -> Any:
        FIRST, SKIP = s * IN_GROUP, 4 * FILTERS * s

        @jit(device=True)
        def group(rA, rB, y, index, n, p, q, k, P, Q, K):
            values = cuda.local.array(VALUES, f4)
            for j in range(IN_GROUP):
                for i in range(2):
                    d = (0.0, 0.0, 0.0, 0.0)
                    for m in range(PRODUCTS):
                        left, right, at = 2 * i * HALVES + 2 * m, (2 * i + 1) * HALVES + 2 * m, ((FIRST + j) * PRODUCTS + m) * 2
                        d = mma(rA[left], rA[right], rA[left + 1], rA[right + 1], rB[at], rB[at + 1], d[0], d[1], d[2], d[3])
                    values[2 * i * FILTERS + 2 * j], values[2 * i * FILTERS + 2 * j + 1] = d[0], d[1]
                    values[(2 * i + 1) * FILTERS + 2 * j], values[(2 * i + 1) * FILTERS + 2 * j + 1] = d[2], d[3]
            put(values, y, index, n, p, q, k + SKIP, P, Q, K)

        return group

    def make_product(m: int) -> Any:
        @jit(device=True)
        def product(sums, rA, rB, address, move, lane):
            for pixel in range(4):
                for half in range(2):
                    k = 2 * m + half
                    rA[2 * pixel + half] = load_words_1(address[k] + move + ((pixel // 2) * DOWN + (pixel % 2) * ACROSS))
                    if bias and 4 * k + 3 >= WORDS:
                        rA[2 * pixel + half] = rA[2 * pixel + half] if 4 * k + (lane & 3) < WORDS else ONE
            for j in range(TILES):
                for i in range(2):
                    at, one = (j * PRODUCTS + m) * 2, j // IN_GROUP * VALUES + 2 * i * FILTERS + 2 * (j % IN_GROUP)
                    other = one + FILTERS
                    d = (sums[one], sums[one + 1], sums[other], sums[other + 1])
                    d = mma(rA[4 * i], rA[4 * i + 2], rA[4 * i + 1], rA[4 * i + 3], rB[at], rB[at + 1], d[0], d[1], d[2], d[3])
                    sums[one], sums[one + 1], sums[other], sums[other + 1] = d

        return product

    def make_end(s: int) -> Any:
        FIRST, SKIP = s * VALUES, 4 * FILTERS * s

        @jit(device=True)
        def end(sums, y, index, n, p, q, k, P, Q, K):
            values = cuda.local.array(VALUES, f4)
            for e in range(VALUES):
                values[e] = sums[FIRST + e]
            put(values, y, index, n, p, q, k + SKIP, P, Q, K)

        return end

    groups = unrolled([make_group(s) for s in range(GROUPS)])
    multiply, ends = unrolled([make_product(m) for m in range(PRODUCTS)]), unrolled([make_end(s) for s in range(GROUPS)])

    @jit(device=True)
    def streamed(rA, rB, address, move, lane, y, index, n, p, q, k, P, Q, K):
        sums = cuda.local.array(SUMS, f4)
        for e in range(SUMS):
            sums[e] = 0.0
        multiply(sums, rA, rB, address, move, lane)
        ends(sums, y, index, n, p, q, k, P, Q, K)

    @jit(launch_bounds=(THREADS, tile.resident))
    def first_fprop_kernel(x, packed, b, y, index, H, W, K, P, Q, pad, tiles, units, rows, across, turns):
        """y = conv(x, w) + b, then the ReLU, then the 2×2 maximum and its place; P, Q: extents of y.

        gemm: pixels × K filters × C·R·S, rounded up to 16·E; grid: (blocks that take turns with the units, ⌈K/block's filters⌉).
        block: 2·ROWS·WARPS warps; owns: per warp 8 windows × GROUPS·16·E filters of every unit, per lane one window × 4·E filters at a time.
        shared: two buffers of the image under a unit; moves: y, and the image once for every block of filters, its rows twice.
        needs: compute capability 8.0 (mma.sync, bf16x2). units: units of work, `rows` down and `across` in an image; turns: TURNS, kept
        from the compiler, which would write the loop out.
        """
        shared = cuda.shared.array(ENTRIES, NUMBER, ALIGNMENT)
        stage = cuda.local.array(SLOTS, u4)
        rA = cuda.local.array(RA, u4)
        rB = cuda.local.array(RB, u4)
        address = cuda.local.array(HALVES, u4)
        tid = cuda.threadIdx.x
        lane, warp = tid & 31, tid >> 5
        share, set_of_filters = warp % (2 * ROWS), warp // (2 * ROWS)
        g, t = lane >> 2, lane & 3
        # The window of this lane in a unit: row share/2, column q0.
        p0, q0 = share >> 1, 8 * (share & 1) + g
        for k in range(HALVES):
            word = t + 4 * k
            r = word // IN_ROW
            at = r * WIDTH + (word - r * IN_ROW) * E if word < WORDS else 0
            address[k] = byte_address_shared(shared) + (MARGIN + at) * 4 + p0 * (2 * DOWN) + q0 * (2 * ACROSS)
        sets = cuda.blockIdx.y * WARPS + set_of_filters
        load_filters(rB, packed, b, sets * TILES, tiles, lane, K)
        k0 = sets * (4 * FILTERS * GROUPS) + t * FILTERS
        clear(shared)
        number, buffer, line = cuda.blockIdx.x, 0, W * C
        n, row, segment = place_of_unit(number, rows, across)
        top, left = row * (2 * ROWS * TURNS * stride) - pad, (segment * (32 * stride) - pad) * C
        fetch(stage, x, n, top, left, H, line, number < units)
        cuda.syncthreads()
        while number < units:
            stash(stage, shared, buffer)
            cuda.syncthreads()
            p, q, image = row * (ROWS * TURNS) + p0, segment * 16 + q0, n
            # The image under the next unit travels while this one is multiplied; the other buffer has no readers left.
            number += cuda.gridDim.x
            n, row, segment = place_of_unit(number, rows, across)
            top, left = row * (2 * ROWS * TURNS * stride) - pad, (segment * (32 * stride) - pad) * C
            fetch(stage, x, n, top, left, H, line, number < units)
            move = buffer * (4 * BUFFER)
            turn = 0
            while turn < turns:
                if WHOLE_PATCH:
                    load_patches(rA, address, move, lane)
                    groups(rA, rB, y, index, image, p, q, k0, P, Q, K)
                else:
                    streamed(rA, rB, address, move, lane, y, index, image, p, q, k0, P, Q, K)
                move += 2 * ROWS * DOWN
                p += ROWS
                turn += 1
            buffer ^= 1

    return first_fprop_kernel


def _after(call: Call) -> Any:
    return "mask" if call.op.mask else "pool" if call.op.has(Pool) else epilogue_function(call)


def work(layer: ConvShape, ROWS: int) -> tuple[int, int, int]:
    """(units, rows of units in an image, units across)."""
    rows, across = unit_rows(layer.P, ROWS), segments(layer.Q)
    return layer.N * rows * across, rows, across


def with_blocks(tile: FpropTile, layer: ConvShape, E: int, target: Target) -> FpropTile:
    """`tile` with as many blocks as fit on the GPU at a time, no more than there are units."""
    sets = -(-layer.K // tile.filters(E))
    return replace(tile, blocks=min(work(layer, tile.ROWS * tile.TURNS)[0], max(1, tile.resident * target.multiprocessors // sets)))


def streamed_tile(layer: ConvShape, E: int, GROUPS: int, TURNS: int) -> FpropTile:
    """The tile of a kernel that loads patches product by product: its warps, up to four, share out K evenly, and its registers say `resident`."""
    sets = ceil_div(layer.K, 16 * E * GROUPS)
    WARPS = ceil_div(sets, ceil_div(sets, 4))
    tile = FpropTile(GROUPS, WARPS, 1, TURNS, 1)
    # Filters, their sums, addresses, the image on its way, and so many registers for all the rest.
    rest = 32 if E == 2 else 64
    kept = 2 * products(layer.C, layer.R, layer.S, E) * (2 * E * GROUPS + 1) + 16 * E * GROUPS
    needed = kept + unit_of(layer, tile).on_the_way(tile.threads) + rest
    fitting = (count for count in range(8, 1, -1) if REGISTERS // 8 // ceil_div(count * tile.threads, 4 * LANES) * 8 >= needed)
    return replace(tile, resident=next(fitting, 1))


def _fits(layer: ConvShape, tile: FpropTile) -> bool:
    """Whether the image under a unit fits into shared memory twice, and the next one into registers while it travels."""
    unit = unit_of(layer, tile)
    return unit.shared_bytes(1) <= SHARED_BYTES and unit.on_the_way(tile.threads) <= MOST_ON_THE_WAY


def _choose_streamed(layer: ConvShape, E: int, target: Target) -> FpropTile:
    """The most groups of filters that MOST_OF_FILTERS allows, and the most turns that leave each multiprocessor its blocks and pad P no further."""
    of_group = 4 * E * products(layer.C, layer.R, layer.S, E)
    GROUPS = max(1, min(MOST_OF_FILTERS // of_group, -(-layer.K // (16 * E))))
    tile = streamed_tile(layer, E, GROUPS, 1)
    for TURNS in (2, 4):
        larger = streamed_tile(layer, E, GROUPS, TURNS)
        pads = unit_rows(layer.P, TURNS) * TURNS > unit_rows(layer.P, tile.TURNS) * tile.TURNS
        blocks = work(layer, TURNS)[0] * -(-layer.K // larger.filters(E))
        if _fits(layer, larger) and not pads and blocks >= larger.resident * target.multiprocessors:
            tile = larger
    return tile


def _too_much_on_the_way(layer: ConvShape, E: int) -> str | None:
    """None, or why no tile of many columns has room for the image under its smallest unit."""
    tile = streamed_tile(layer, E, 1, 1)
    if few_columns(layer.C, layer.R, layer.S, E) or (needed := unit_of(layer, tile).on_the_way(tile.threads)) <= MOST_OF_ONE_TURN:
        return None
    return f"the image under a row of windows takes {needed} registers per thread, more than {MOST_OF_ONE_TURN}"


def choose(layer: ConvShape, E: int, target: Target) -> FpropTile:
    """The smallest tile of filters that has all of K, if one has; a smaller one where a small batch would leave multiprocessors without a block.

    Padding filters are multiplied like others: in a tile of 256, 512 images of 32×32 took 30.7 µs to 64 filters instead of 21.0, and 28.2 to 32
    instead of 12.0 (bf16). Four turns where they fit and every place on the GPU gets a unit of them: with 52 registers for the image on its way
    (3 → 32 filters, stride 2) bf16 spilled 352 bytes.
    """
    if not few_columns(layer.C, layer.R, layer.S, E):
        return with_blocks(_choose_streamed(layer, E, target), layer, E, target)

    def blocks(tile: FpropTile) -> int:
        return work(layer, tile.TURNS)[0] * ceil_div(layer.K, tile.filters(E))

    tile = FpropTile(1, 1, 1, 1, 8)
    for larger in (FpropTile(2, 1, 1, 1, 6), FpropTile(4, 1, 1, 1, 5), FpropTile(4, 2, 1, 1, 3)):
        if tile.filters(E) < layer.K and blocks(larger) >= target.multiprocessors and unit_of(layer, larger).shared_bytes(1) <= SHARED_BYTES:
            tile = larger
    more = replace(tile, TURNS=4)
    if blocks(more) >= more.resident * target.multiprocessors and _fits(layer, more):
        tile = more
    if unit_of(layer, tile).on_the_way(tile.threads) > MOST_ON_THE_WAY:  # half as many blocks have twice the registers
        tile = replace(tile, resident=max(1, tile.resident // 2))
    return with_blocks(tile, layer, E, target)


def bind(call: Call, E: int) -> list[Launch]:
    """The one launch of an fprop call."""
    layer, tile, after = first_layer(call), call.tile, _after(call)
    units, rows, across = work(layer, tile.ROWS * tile.TURNS)
    bias = len(call.ins) > 2 and after != "mask"
    kernel = fprop_kernel(layer.C, layer.R, layer.S, layer.stride, E, bias, after, layer.K % (4 * E) == 0, replace(tile, blocks=0))
    P, Q = call.out_shapes[0][2:]
    y, index = call.outs[0], call.outs[1] if after == "pool" else call.ins[2] if after == "mask" else call.outs[0]
    numbers = (layer.H, layer.W, layer.K, P, Q, layer.pad, packed_tiles(layer.K, E), units, rows, across, tile.TURNS)
    args = (call.ins[0], call.packed, call.ins[2] if bias else call.packed, y, index, *map(np.int32, numbers))
    return [Launch(kernel, (tile.blocks, -(-layer.K // tile.filters(E))), tile.threads, args)]


def traffic(call: Call, E: int) -> list[Traffic]:
    """Bytes of `bind`: the image under a unit for each set of filters, and filters once per pair of warps (of a block's rows of windows)."""
    layer, tile = first_layer(call), call.tile
    read, different = image_reads(unit_of(layer, tile), call.in_shapes[0], layer.P, layer.Q, layer.pad)
    filters = 256 * packed_tiles(layer.K, E) * -(-image_words(layer.C, layer.R, layer.S, E) // 8)
    mask = size(call, "in", 2) if _after(call) == "mask" else 0
    asked = 4 // E * read * -(-layer.K // tile.filters(E)) + 2 * tile.ROWS * tile.blocks * filters
    return [Traffic(asked + mask, outputs(call), 4 // E * different + filters + mask)]


def implementation(precision: str) -> Impl:
    """conv_fprop, conv_relu_fprop or conv_relu_pool_fprop of a first layer in bf16 or tf32."""
    E = word_elements(precision)

    def candidates(call: Call, target: Target) -> Sequence[FpropTile]:
        layer = first_layer(call)
        if few_columns(layer.C, layer.R, layer.S, E):
            sizes = (
                (1, 1, 1, 1, 8),
                (1, 1, 1, 4, 8),
                (2, 1, 1, 4, 6),
                (2, 2, 1, 1, 4),
                (4, 2, 1, 1, 3),
                (2, 2, 1, 4, 4),
                (4, 2, 1, 4, 3),
                (4, 2, 1, 4, 2),
                (2, 4, 1, 4, 2),
            )
            tiles = [FpropTile(*size) for size in sizes]
        else:
            of_group = 4 * E * products(layer.C, layer.R, layer.S, E)
            tiles = [streamed_tile(layer, E, GROUPS, TURNS) for GROUPS in (1, 2) for TURNS in (1, 2, 4) if GROUPS * of_group <= MOST_OF_FILTERS + 16]
        return [with_blocks(tile, layer, E, target) for tile in tiles if _fits(layer, tile)]

    def supports(call: Call, target: Target) -> str | None:
        return refusal(call, precision) or _too_much_on_the_way(first_layer(call), E)

    return Impl(
        bind=lambda call: bind(call, E),
        supports=supports,
        tile=lambda call, target: choose(first_layer(call), E, target),
        pack=lambda call: pack_filters(call, E),
        packed=_PACKED[precision],
        needs=(8, 0),
        candidates=candidates,
        traffic=lambda call: traffic(call, E),
        engine="thin mma",
    )
