"""conv_wgrad of a first layer on tensor cores, from the gradient of its output or from the one behind a 2×2 max pooling.

dw[f][(r,s,c)] = Σ_pixels dy[pixel][f] · x[pixel moved by (r,s)][c]: filters × columns × pixels. A warp keeps the sums of 64 filters × all
columns in registers, up to five tiles of 8 columns; where there are more, SETS warps of a block share the columns, and dy comes from memory for
one of them and from L1 for the others, which read it in the same steps. dy, all that is large, goes from global memory into fragments without
touching shared memory; a pooled one is spread over the four pixels of its window on the way. A spare column of ones gives db. Every block leaves
its sums in scratch, and a second launch adds them in one fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i8, jit, types, u4
from nbcnn.gpu.target import Target
from nbcnn.ops.conv.frame.split import sum_of_partials
from nbcnn.ops.conv.thin_mma import first_gradient
from nbcnn.ops.conv.thin_mma.first_fprop import work
from nbcnn.ops.conv.thin_mma.first_gradient import FILTERS
from nbcnn.ops.conv.thin_mma.first_image import image_reads, place_of_unit, stager
from nbcnn.ops.conv.thin_mma.first_shape import FEW_COLUMNS, MOST_ON_THE_WAY, ONES, SHARED_BYTES, Unit, first_layer, refusal, unit_of, word_elements
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.cost import STREAM, Speed, microseconds
from nbcnn.ops.kernel.loops import ALIGNMENT, ceil_div, unrolled
from nbcnn.ops.kernel.traffic import Traffic, once, outputs, size
from nbcnn.ops.ptx.asm import byte_address_shared
from nbcnn.ops.ptx.mma import mma_bf16, mma_tf32
from nbcnn.ops.ptx.shared import load_words_1
from nbcnn.ops.ptx.vector import store2
from nbcnn.plan.op import Unpool
from nbcnn.plan.shapes import ConvShape

OF_WARP = 64
"""Filters of a warp: 8 of each of 8 lanes."""
STEPS = 4
"""Steps of four windows in a row of a unit."""
SUM_THREADS = 256
THREADS = 384
"""Threads that are to fit on a multiprocessor: with 168 registers each. At 512 the gradients on their way do not fit."""
OF_SETS = 256
"""The same where warps share the columns of unpooled gradients: five tiles of sums and two steps' gradients take more than 168 registers in bf16."""
MOST_TILES = {2: 5, 1: 4}
"""Most tiles of 8 columns of a warp, for each E: 16 sums per lane and tile. In tf32 the gradients on their way take twice the registers."""


@dataclass(frozen=True)
class WgradTile:
    """A block owns 64·WARPS filters of ROWS rows of windows at a time, and TURNS times as many make a unit of work.

    A lane has the gradients of DEPTH (1, 2 or 4) steps of four windows on their way. SETS warps share the columns of the same filters.
    `resident` blocks are to fit on a multiprocessor; `blocks` persistent blocks take turns with the units.
    """

    WARPS: int
    ROWS: int
    TURNS: int
    DEPTH: int
    resident: int
    blocks: int = 0
    SETS: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.WARPS * self.ROWS * self.SETS


def tiles_of_set(columns: int, SETS: int) -> int:
    """Tiles of 8 columns in each of SETS equal sets, the last of which may have some that are no columns."""
    return ceil_div(ceil_div(columns, 8), SETS)


def columns(layer: ConvShape, bias: bool, SETS: int) -> int:
    """Columns of the product in whole tiles of 8 and equal sets of tiles: C·R·S, and one of ones."""
    return 8 * SETS * tiles_of_set(layer.C * layer.R * layer.S + bias, SETS)


def least_sets(columns: int, E: int) -> int:
    """Sets of columns of which a warp has the sums in registers."""
    return 1 if columns <= FEW_COLUMNS else ceil_div(ceil_div(columns, 8), MOST_TILES[E])


@functools.cache
def wgrad_kernel(C: int, R: int, S: int, stride: int, E: int, bias: bool, pooled: bool, whole: bool, tile: WgradTile) -> Any:
    """The kernel for one window, one kind of gradient and one tile. whole: K is a multiple of 8."""
    WARPS, ROWS, TURNS, DEPTH, THREADS = tile.WARPS, tile.ROWS, tile.TURNS, tile.DEPTH, tile.threads
    unit = Unit(C, R, S, stride, ROWS * TURNS)
    CRS, SETS = C * R * S, tile.SETS
    TILES = tiles_of_set(CRS + bias, SETS)
    COLUMNS, ONE = 8 * SETS * TILES, ONES[E]
    # The column of ones: which set, and which tile of it.
    SET_OF_ONES, TILE_OF_ONES = divmod(CRS // 8, TILES)
    gradient = first_gradient.pooled(E, whole) if pooled else first_gradient.dense(E, whole)
    load_gradient, make_masks, STAGED, MASKED = gradient.load, gradient.masks, gradient.words, gradient.masked
    ALL_STAGED = DEPTH * STAGED
    stage_image = stager(unit, stride * C, E, THREADS)
    fetch, stash, clear = stage_image.fetch, stage_image.stash, stage_image.clear
    SLOTS, ENTRIES, MARGIN, BUFFER = stage_image.slots, stage_image.entries, stage_image.margin, stage_image.words
    NUMBER = types.uint16 if E == 2 else types.float32
    DOWN, ACROSS, WIDTH = 4 * stride * unit.width, 4 * stride * C, unit.width
    PIXEL_WORDS = 4 // E
    A_WORDS, B_WORDS, SUMS, TALLY = 2 * PIXEL_WORDS, PIXEL_WORDS * TILES, 4 * TILES * (FILTERS // 2), 4 * TILES
    PARKED = TALLY * 32 * WARPS * SETS if ROWS > 1 else 1
    mma = mma_bf16 if E == 2 else mma_tf32

    @jit(device=True)
    def load_columns(rB, address, move, ones):
        for j in range(TILES):
            for w in range(PIXEL_WORDS):
                # In bf16 a word holds both pixels of a row of the window.
                down, across = (w, 0) if E == 2 else (w // 2, w % 2)
                rB[j * PIXEL_WORDS + w] = load_words_1(address[j] + move + (down * DOWN + across * ACROSS))
                if bias and j == TILE_OF_ONES:
                    rB[j * PIXEL_WORDS + w] = ONE if ones else rB[j * PIXEL_WORDS + w]

    def make_tile(i: int) -> Any:
        take = gradient.take[i]

        @jit(device=True)
        def multiply(acc, stage, first, mask, rB):
            rA = cuda.local.array(A_WORDS, u4)
            take(rA, stage, first, mask)
            for j in range(TILES):
                at = 4 * (i * TILES + j)
                for m in range(PIXEL_WORDS // 2):
                    b = j * PIXEL_WORDS + 2 * m
                    acc[at], acc[at + 1], acc[at + 2], acc[at + 3] = mma(
                        rA[4 * m], rA[4 * m + 1], rA[4 * m + 2], rA[4 * m + 3], rB[b], rB[b + 1], acc[at], acc[at + 1], acc[at + 2], acc[at + 3]
                    )

        return multiply

    multiply_all = unrolled([make_tile(i) for i in range(FILTERS // 2)])

    def make_step(step: int) -> Any:
        FIRST, MOVE, NEXT = step % DEPTH * STAGED, 8 * step * ACROSS, 4 * ((step + DEPTH) % STEPS)
        SAME_UNIT = step + DEPTH < STEPS

        @jit(device=True)
        def run(acc, stage, address, buffer, ones, dy, index, this, next, P, Q, K):
            mask = cuda.local.array(MASKED, u4)
            rB = cuda.local.array(B_WORDS, u4)
            make_masks(mask, stage, FIRST)
            load_columns(rB, address, buffer + MOVE, ones)
            multiply_all(acc, stage, FIRST, mask, rB)
            # The registers take the windows DEPTH steps ahead, which travel while those between are multiplied.
            n, p, q, filter = this if SAME_UNIT else next
            load_gradient(stage, FIRST, dy, index, n, p, q + NEXT, filter, P, Q, K)

        return run

    steps = unrolled([make_step(step) for step in range(STEPS)])

    @jit(device=True)
    def add_rows(acc, parked, warp, lane, row):
        for i in range(FILTERS // 2):
            for other in range(1, ROWS):
                if row == other:
                    for e in range(TALLY):
                        parked[(warp * TALLY + e) * 32 + lane] = acc[i * TALLY + e]
                cuda.syncthreads()
                if row == 0:
                    for e in range(TALLY):
                        acc[i * TALLY + e] += parked[(warp * TALLY + e) * 32 + lane]
                cuda.syncthreads()

    @jit(launch_bounds=(THREADS, tile.resident))
    def first_wgrad_kernel(x, dy, index, partials, H, W, K, P, Q, pad, units, rows, across, turns):
        """partials[block][f][(r,s,c)] = Σ dy[pixel][f] · x[pixel moved by (r,s)][c] over the block's pixels, and Σ dy in the next column.

        gemm: K filters × C·R·S (+ 1) columns × pixels; grid: (blocks that take turns with the units, ⌈K/block's filters⌉).
        block: WARPS·SETS·ROWS warps; owns: per warp 64 filters × TILES·8 columns, all or one of SETS sets, over its row of windows of every unit.
        shared: two buffers of the image under a unit; moves: dy (or the pooled one and its index), the image, 4·K·columns bytes of sums per block.
        needs: compute capability 8.0 (mma.sync). P, Q: extents of dy; units: units of work, `rows` down and `across` in an image;
        turns: TURNS, kept from the compiler, which would write the loop out.
        """
        shared = cuda.shared.array(ENTRIES, NUMBER, ALIGNMENT)
        parked = cuda.shared.array(PARKED, f4)
        image = cuda.local.array(SLOTS, u4)
        stage = cuda.local.array(ALL_STAGED, u4)
        address = cuda.local.array(TILES, u4)
        acc = cuda.local.array(SUMS, f4)
        for i in range(SUMS):
            acc[i] = 0.0
        tid = cuda.threadIdx.x
        lane, number_of_warp = tid & 31, tid >> 5
        share = number_of_warp // (WARPS * SETS)
        of_row = number_of_warp - share * (WARPS * SETS)
        warp, first_tile = of_row, 0
        if SETS > 1:
            # Neighbouring warps have the same filters, so that they ask for the same gradients at about the same time.
            warp = of_row // SETS
            first_tile = (of_row - warp * SETS) * TILES
        g, t = lane >> 2, lane & 3
        for j in range(TILES):
            column = 8 * (first_tile + j) + g
            r = column // (S * C)
            at = r * WIDTH + column - r * (S * C) if column < CRS else 0
            address[j] = byte_address_shared(shared) + (MARGIN + at) * 4 + share * (2 * DOWN) + t * (2 * ACROSS)
        ones = (first_tile == SET_OF_ONES * TILES) & (8 * (SET_OF_ONES * TILES + TILE_OF_ONES) + g == CRS)
        k0 = (cuda.blockIdx.y * WARPS + warp) * OF_WARP
        k = k0 + g * FILTERS
        clear(shared)
        number, buffer, line = cuda.blockIdx.x, 0, W * C
        n, row, segment = place_of_unit(number, rows, across)
        top, left = row * (2 * ROWS * TURNS * stride) - pad, (segment * (32 * stride) - pad) * C
        fetch(image, x, n, top, left, H, line, number < units)
        p, q = row * (ROWS * TURNS) + share, segment * 16 + t
        for step in range(DEPTH):
            load_gradient(stage, step * STAGED, dy, index, n, p, q + 4 * step, k, P, Q, K)
        cuda.syncthreads()
        while number < units:
            stash(image, shared, buffer)
            cuda.syncthreads()
            image_now, p_now, q_now = n, p, q
            number += cuda.gridDim.x
            n, row, segment = place_of_unit(number, rows, across)
            top, left = row * (2 * ROWS * TURNS * stride) - pad, (segment * (32 * stride) - pad) * C
            fetch(image, x, n, top, left, H, line, number < units)
            p, q = row * (ROWS * TURNS) + share, segment * 16 + t
            move = buffer * (4 * BUFFER)
            turn = turns
            while turn > 0:
                this = (image_now, p_now, q_now, k)
                turn, p_now, filter = turn - 1, p_now + ROWS, k
                if turn == 0:
                    # Beyond the last unit nothing is read.
                    image_now, p_now, q_now, filter = n, p, q, k if number < units else K
                steps(acc, stage, address, move, ones, dy, index, this, (image_now, p_now, q_now, filter), P, Q, K)
                move += 2 * ROWS * DOWN
            buffer ^= 1
        if ROWS > 1:
            cuda.syncthreads()
            add_rows(acc, parked, of_row, lane, share)
        if share == 0:
            height = cuda.gridDim.y * (WARPS * OF_WARP)
            for i in range(FILTERS // 2):
                for h in range(2):
                    f = k + (2 * i + h)
                    at = (i8(cuda.blockIdx.x) * height + f) * COLUMNS + first_tile * 8 + t * 2
                    for j in range(TILES):
                        e = 4 * (i * TILES + j) + 2 * h
                        store2(partials, at + i8(8 * j), acc[e], acc[e + 1])

    return first_wgrad_kernel


@functools.cache
def sum_kernel(C: int, R: int, S: int, bias: bool, SETS: int) -> Any:
    """The launch that adds the blocks' sums."""
    add_parts = sum_of_partials(1)
    CRS, TAPS = C * R * S, R * S
    COLUMNS = 8 * SETS * tiles_of_set(CRS + bias, SETS)
    TEAMS = SUM_THREADS // 32

    @jit(launch_bounds=(SUM_THREADS, 1))
    def first_sum_kernel(partials, dw, db, K, height, parts):
        """dw[f][c][r,s] = Σ_z partials[z][f][(r,s,c)], db[f] = Σ_z of the next column.

        grid: 32 neighbouring sums per block; team j of a block adds the parts j, j + 8, …, then the teams' sums are added in order.
        shared: 1 KB; moves: 4·parts·height·columns bytes.
        """
        shared = cuda.shared.array(SUM_THREADS, f4)
        total = cuda.local.array(1, f4)
        tid = cuda.threadIdx.x
        lane, team = tid & 31, tid >> 5
        at = cuda.blockIdx.x * 32 + lane
        f = at // COLUMNS
        column = at - f * COLUMNS
        wanted = (f < K) & (column < CRS + bias)
        add_parts(total, partials, at, height * COLUMNS, team, TEAMS, parts if wanted else 0)
        shared[tid] = total[0]
        cuda.syncthreads()
        if team == 0 and wanted:
            made = shared[lane]
            for other in range(1, TEAMS):
                made += shared[lane + 32 * other]
            if column < CRS:
                tap = column // C
                dw[i8(f * CRS + (column - tap * C) * TAPS + tap)] = made
            elif bias:
                db[i8(f)] = made

    return first_sum_kernel


def with_blocks(tile: WgradTile, layer: ConvShape, target: Target) -> WgradTile:
    """`tile` with as many blocks as fit on the GPU at a time, no more than there are units."""
    sets = -(-layer.K // (OF_WARP * tile.WARPS))
    return replace(tile, blocks=min(work(layer, tile.ROWS * tile.TURNS)[0], max(1, tile.resident * target.multiprocessors // sets)))


def fits(layer: ConvShape, tile: WgradTile) -> bool:
    """Whether the image and the sums of rows that wait to be added fit into shared memory."""
    parked = 16 * tiles_of_set(layer.C * layer.R * layer.S + 1, tile.SETS) * 32 * tile.WARPS * tile.SETS if tile.ROWS > 1 else 4
    return unit_of(layer, tile).shared_bytes(layer.stride * layer.C) + parked <= SHARED_BYTES


def tile_of_sets(layer: ConvShape, SETS: int, TURNS: int, DEPTH: int, threads: int) -> WgradTile:
    """A tile whose warps share the columns, up to eight of them for up to 256 filters. threads: as many are to fit on a multiprocessor."""
    filters = -(-layer.K // OF_WARP)
    most = max(1, min(4, 8 // SETS))
    WARPS = ceil_div(filters, ceil_div(filters, most))
    return WgradTile(WARPS, 1, TURNS, DEPTH, max(1, threads // (32 * WARPS * SETS)), SETS=SETS)


def choose(layer: ConvShape, E: int, pooled: bool, bias: bool, target: Target) -> WgradTile:
    """All filters in a block, up to 256, so that the image is read once; several turns a unit where the batch has enough of them.

    Where one warp has all filters, two take rows of windows in turn and share the image: one alone took 45.8 µs for 64 filters of 512 images of 32×32
    (bf16), with two rows and no turns 30.4; behind a pooling 18.5 for 256 images, with two rows 14.5.
    """
    taken = layer.C * layer.R * layer.S + bias
    if taken > FEW_COLUMNS:
        DEPTH, threads = (1, THREADS) if pooled and E == 2 else (2, OF_SETS) if E == 2 else (1, OF_SETS)
        tiles = [tile_of_sets(layer, least_sets(taken, E), TURNS, DEPTH, threads) for TURNS in (4, 2, 1)]

        def is_good(tile: WgradTile) -> bool:
            return (
                unit_of(layer, tile).on_the_way(tile.threads) <= MOST_ON_THE_WAY
                and fits(layer, tile)
                and work(layer, tile.TURNS)[0] >= 4 * target.multiprocessors
            )

        return with_blocks(next(filter(is_good, tiles), tiles[-1]), layer, target)
    WARPS = min(4, -(-layer.K // OF_WARP))
    DEPTH = 1 if E == 2 and not pooled else 2
    ROWS, units = (2, 2) if WARPS == 1 else (1, 4)
    TURNS = 4 if (pooled or WARPS > 1) and work(layer, 4 * ROWS)[0] >= units * target.multiprocessors else 1
    tile = WgradTile(WARPS, ROWS, TURNS, DEPTH, max(1, THREADS // (32 * WARPS * ROWS)))
    alone = replace(tile, ROWS=1, TURNS=1, resident=max(1, THREADS // (32 * WARPS)))
    return with_blocks(next(filter(lambda each: fits(layer, each), (tile, replace(tile, TURNS=1))), alone), layer, target)


def height(layer: ConvShape, tile: WgradTile) -> int:
    """Rows of one block's sums: all filters, in whole blocks of them."""
    of_block = OF_WARP * tile.WARPS
    return -(-layer.K // of_block) * of_block


def blocks_of(call: Call) -> int:
    """Blocks that share the units: a tile chosen for a larger batch may have more than there are units here."""
    return min(call.tile.blocks, work(first_layer(call), call.tile.ROWS * call.tile.TURNS)[0])


def scratch(call: Call) -> int:
    """Bytes of all blocks' sums."""
    layer = first_layer(call)
    return 4 * blocks_of(call) * height(layer, call.tile) * columns(layer, len(call.out_shapes) > 1, call.tile.SETS)


def bind(call: Call, E: int) -> list[Launch]:
    """The product over shares of the pixels, and the sum of the shares."""
    layer, tile, pooled, bias = first_layer(call), call.tile, call.op.has(Unpool), len(call.outs) > 1
    C, R, S, K = layer.C, layer.R, layer.S, layer.K
    units, rows, across = work(layer, tile.ROWS * tile.TURNS)
    kernel = wgrad_kernel(C, R, S, layer.stride, E, bias, pooled, K % 8 == 0, replace(tile, blocks=0))
    partials = call.scratch.view(np.float32)
    P, Q = call.in_shapes[1][2:]
    args = (call.ins[0], call.ins[1], call.ins[2] if pooled else call.ins[1], partials)
    numbers = (layer.H, layer.W, K, P, Q, layer.pad, units, rows, across, tile.TURNS)
    product = Launch(kernel, (blocks_of(call), -(-K // (OF_WARP * tile.WARPS))), tile.threads, (*args, *map(np.int32, numbers)))
    sums = (partials, call.outs[0], call.outs[1] if bias else call.outs[0], *map(np.int32, (K, height(layer, tile), blocks_of(call))))
    blocks = height(layer, tile) * columns(layer, bias, tile.SETS) // 32
    return [product, Launch(sum_kernel(C, R, S, bias, tile.SETS), blocks, SUM_THREADS, sums)]


def traffic(call: Call, E: int) -> list[Traffic]:
    """Bytes of `bind`: the image under a unit for each set of filters, dy (and its index) once for each set of columns, the blocks' sums."""
    layer, tile = first_layer(call), call.tile
    read, different = image_reads(unit_of(layer, tile), call.in_shapes[0], layer.P, layer.Q, layer.pad)
    gradient = sum(size(call, "in", at) for at in range(1, len(call.in_shapes)))
    asked = 4 // E * read * -(-layer.K // (OF_WARP * tile.WARPS)) + tile.SETS * gradient
    return [Traffic(asked, scratch(call), 4 // E * different + gradient), once(blocks_of(call) * outputs(call), outputs(call))]


STEP_US, WARP_US = 0.45, 0.095
"""Microseconds of a step of a warp on its own, which waits for its gradients, and of a step of one of many warps, which share what gathers patches:
5×5 windows of six channels take 28.2 µs for 256 images of 14×14 (48 steps of five warps), of one channel of 28×28 17.5 (12 of twelve; H100, tf32)."""
_OVERLAPPED = Speed(STREAM.launch, 1.0, 4)


def estimate(call: Call, E: int, target: Target) -> float:
    """Microseconds: what is moved, or the steps of a block one after another."""
    layer, tile = first_layer(call), call.tile
    units, blocks = work(layer, tile.ROWS * tile.TURNS)[0], blocks_of(call)
    warps = tile.threads // 32 * ceil_div(blocks * ceil_div(layer.K, OF_WARP * tile.WARPS), target.multiprocessors)
    steps = ceil_div(units, blocks) * tile.TURNS * STEPS
    return microseconds(steps * max(STEP_US, WARP_US * warps), traffic(call, E), _OVERLAPPED)


def implementation(precision: str) -> Impl:
    """conv_wgrad or conv_pool_wgrad of a first layer in bf16 or tf32."""
    E = word_elements(precision)

    def tile(call: Call, target: Target) -> WgradTile:
        return choose(first_layer(call), E, call.op.has(Unpool), len(call.out_shapes) > 1, target)

    def candidates(call: Call, target: Target) -> Sequence[WgradTile]:
        layer = first_layer(call)
        taken = layer.C * layer.R * layer.S + (len(call.out_shapes) > 1)
        if taken > FEW_COLUMNS:
            SETS = least_sets(taken, E)
            made = [tile_of_sets(layer, SETS, TURNS, DEPTH, threads) for TURNS in (4, 2, 1) for DEPTH, threads in ((1, 256), (1, 384), (2, 256))]
            return [with_blocks(tile, layer, target) for tile in dict.fromkeys(made) if fits(layer, tile)]
        most = min(4, -(-layer.K // OF_WARP))
        sizes = [
            (ROWS, TURNS, DEPTH, threads) for ROWS, TURNS, threads in ((1, 4, 384), (1, 1, 512), (2, 2, 512), (4, 1, 512)) for DEPTH in (1, 2, 4)
        ]
        tiles = [WgradTile(most, ROWS, TURNS, DEPTH, max(1, threads // (32 * most * ROWS))) for ROWS, TURNS, DEPTH, threads in sizes]
        return [with_blocks(tile, layer, target) for tile in tiles if fits(layer, tile)]

    return Impl(
        bind=lambda call: bind(call, E),
        scratch=scratch,
        supports=lambda call, target: refusal(call, precision),
        tile=tile,
        needs=(8, 0),
        candidates=candidates,
        traffic=lambda call: traffic(call, E),
        engine="thin mma",
        estimate=lambda call, target: estimate(call, E, target),
    )
