"""The weight gradient of all taps at once: squares of 8×8 pixels of dy, and the patches of x around them, stay in shared memory for every tap.

    D[m][(r,s), c] = Σ_(n,p,q) dy[(n,p,q)][m] · x[n, p + r − top, q + s − left][c]                      stride 1

Loaded tap by tap (`wgrad_kernel`), 64 pixels of one tap bring 8 KB of dy and 8 KB of x to shared memory, and with 64 filters that takes longer than
the products. Here 8 KB of dy and a patch of 12.5 KB serve nine taps. wgmma sums over the rows of a tile of bfloat16, eight rows at any distance from
the next eight: a line of a square is eight rows of the patch, the next line PW rows further, and tap (r, s) r·PW + s rows further on. The taps of one
line of the filter are one operand of S·64 columns whose 64s overlap: each starts one row behind the last.

Images whose P and Q are no multiples of 8 have smaller squares, of 8 images at a time (2×4 pixels) or of 16 (2×2): TMA puts the same pixel of all of
them side by side, so the eight rows are eight images, and a tap to the right is a whole pixel of all images further. What lies outside an image, or
behind the last one, is zero.

Warpgroup r has the taps (r, 0 … S − 1). Ring, helper warps and parts are those of `wgrad_kernel`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, i8, jit, types
from nbcnn.gpu.target import Target
from nbcnn.ops.conv.frame.correlation import Correlation
from nbcnn.ops.conv.frame.cost import Work
from nbcnn.ops.conv.frame.wgrad import OverPixels, most_parts
from nbcnn.ops.conv.wgmma.ring import aligned, claim_stage, consumer, init_ring, next_stage
from nbcnn.ops.conv.wgmma.tile import ALIGNMENT, WARPGROUP
from nbcnn.ops.conv.wgmma.wgrad_bias import summer
from nbcnn.ops.conv.wgmma.wgrad_cluster import option, place_of_block, share_sums, steps_of_part
from nbcnn.ops.conv.wgmma.wgrad_tile import BARRIERS, HELPED, HELPERS, MOST_SPLIT, WARP, compulsory_bytes, partials_bytes
from nbcnn.ops.conv.wgmma.wgrad_whole import store_whole
from nbcnn.ops.kernel.loops import ceil_div, unrolled
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.mbarrier import fence_mbarrier_init
from nbcnn.ops.ptx.tma import fence_tensor_map, load_tile_4d
from nbcnn.ops.ptx.vector import store2
from nbcnn.ops.ptx.wgmma import MN_STEP, mn_major, wgmma_bf16, wgmma_commit, wgmma_fence

u8 = types.uint64
SQUARE = 8
"""Pixels along the side of a square of one image."""
_SQUARES = {1: (SQUARE, SQUARE), 8: (2, 4), 16: (2, 2)}
"""(lines, columns) of a square, by how many images it takes."""
CHANNELS = ROW_BYTES // 2
_MOST_TAPS = 3
"""Lines of a filter, a warpgroup each, and taps of a line: more sums than a thread has registers."""
_SHARED_OF_BLOCK = 227 * 1024
_MOST_SLOTS = 8
PAIR = 2
"""Blocks of a cluster. Pairs find room on every multiprocessor, clusters of four on 120 of an H200's 132."""
_EXCHANGE = 4000.0
"""Cycles in which a block adds its sums to those of its cluster, or orders them by itself."""


@dataclass(frozen=True)
class SquareTile(OverPixels):
    """A block's tile BM × (R·S taps of 64 channels) over squares of 64 pixels; `slots` of them are in flight, the stages of its ring.

    images   whose pixels a square takes; of 1 it has 8×8.
    split    blocks that share one output tile.
    cluster  of these blocks as many add their parts before they write them (`wgrad_cluster`): 1 or PAIR.
    """

    BM: int
    R: int
    S: int
    slots: int
    split: int = 1
    cluster: int = 1
    images: int = 1

    # The same for all tiles, so no fields.
    BK = SQUARE * SQUARE
    element = 2

    @property
    def lines(self) -> int:
        """Lines of a square."""
        return _SQUARES[self.images][0]

    @property
    def columns(self) -> int:
        """Columns of a square."""
        return _SQUARES[self.images][1]

    @property
    def PW(self) -> int:
        """Columns of a patch."""
        return self.columns + self.S - 1

    @property
    def PH(self) -> int:
        """Lines of a patch."""
        return self.lines + self.R - 1

    @property
    def pixel_bytes(self) -> int:
        """Bytes of one pixel of a patch, of all images."""
        return self.images * ROW_BYTES

    @property
    def line_bytes(self) -> int:
        """Bytes of one line of a patch."""
        return self.PW * self.pixel_bytes

    @property
    def eights(self) -> tuple[int, ...]:
        """Where the first tap of each eight rows of a square lies in the patch, in bytes. Rows run over lines, columns, images."""
        rows = range(0, self.BK, 8)
        pixels = [divmod(row // self.images, self.columns) for row in rows]
        return tuple(
            line * self.line_bytes + column * self.pixel_bytes + row % self.images * ROW_BYTES
            for row, (line, column) in zip(rows, pixels, strict=True)
        )

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return self.R * WARPGROUP

    def threads(self, bias: bool) -> int:
        """The consumers, one producer warp, and helper warps that add up the bias gradient."""
        return self.consumers + WARP + (HELPERS * WARP if bias else 0)

    @property
    def panel_bytes(self) -> int:
        """Bytes of a square of dy."""
        return self.BK * ROW_BYTES

    @property
    def patch_bytes(self) -> int:
        return self.PH * self.line_bytes

    @property
    def landed_bytes(self) -> int:
        """Bytes that TMA writes in one step."""
        return self.panel_bytes + self.patch_bytes

    @property
    def stage_bytes(self) -> int:
        """Bytes of one step in the ring: the next swizzled tile starts at a multiple of ALIGNMENT."""
        return ceil_div(self.landed_bytes, ALIGNMENT) * ALIGNMENT

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: room to align, the ring, its barriers, the helpers' sums."""
        return ALIGNMENT + self.slots * self.stage_bytes + BARRIERS + HELPED

    def pixel_steps(self, g: Correlation) -> int:
        """Squares of all images."""
        return ceil_div(g.N, self.images) * ceil_div(g.P, self.lines) * ceil_div(g.Q, self.columns)

    def column_tiles(self, g: Correlation) -> int:
        """Tiles across the channels; each has all taps."""
        return ceil_div(g.C, CHANNELS)

    def whole(self, g: Correlation) -> bool:
        return self.partials_written(g) == 1

    def blocks(self, g: Correlation) -> int:
        """Blocks of the product."""
        return self.row_tiles(g) * self.column_tiles(g) * self.split

    def patch_pixels(self, g: Correlation) -> int:
        """Pixels of one image that the patches of a row of tiles read; what lies outside the image is not loaded."""

        def along(count: int, side: int, before: int, reach: int, size: int) -> int:
            return sum(max(0, min(size, at - before + reach) - max(0, at - before)) for at in range(0, count, side))

        return along(g.P, self.lines, g.top, self.PH, g.H) * along(g.Q, self.columns, g.left, self.PW, g.W)


def candidates(g: Correlation, target: Target) -> Iterator[SquareTile]:
    """The tile, in bf16, with the splits that fill half a wave, one or two, alone and in pairs.

    None where pixels or taps are apart. Squares take several images where they do not divide one, as many as make the fewest squares.
    """
    if g.stride != 1 or g.taps == 1 or max(g.R, g.S) > _MOST_TAPS:
        return
    whole = g.P % SQUARE == 0 and g.Q % SQUARE == 0
    kinds = [SquareTile(64, g.R, g.S, 0, images=images) for images in _SQUARES if (images == 1) == whole]
    tile = min(kinds, key=lambda kind: kind.pixel_steps(g))
    tile = replace(tile, slots=min(_MOST_SLOTS, (_SHARED_OF_BLOCK - tile.shared_bytes) // tile.stage_bytes))
    outputs = tile.row_tiles(g) * tile.column_tiles(g)
    most = most_parts(g.K * g.taps * g.C, tile.pixel_steps(g), MOST_SPLIT)
    for split in sorted({min(most, max(1, int(waves * target.multiprocessors) // outputs)) for waves in (0.5, 1, 2)}):
        yield replace(tile, split=split)
        if split > 1:
            yield replace(tile, split=split // PAIR * PAIR, cluster=PAIR)


def work(g: Correlation, tile: SquareTile) -> Work:
    """What the launch asks for."""
    return Work(
        tiles=tile.row_tiles(g) * tile.column_tiles(g) * tile.parts(g),
        together=1,
        steps=tile.steps(g),
        ahead=tile.slots,
        tensor=tile.BM * tile.R * tile.S * CHANNELS * tile.BK / 2048,
        shared=tile.landed_bytes + tile.R * (tile.BM + tile.S * CHANNELS) * tile.BK * 2,
        fetched=tile.landed_bytes,
        ends=4.0 * tile.BM * tile.R * tile.S * CHANNELS / tile.cluster,
        memory=compulsory_bytes(g, 2),
        parts=0.0 if tile.whole(g) else partials_bytes(g, tile),
        exchange=_EXCHANGE if tile.cluster > 1 or tile.whole(g) else 0.0,
    )


@cache
def _producer(tile: SquareTile) -> Any:
    """Device function for one thread: fetch the squares first … last − 1 of dy, and their patches, each as soon as its stage is empty."""
    STAGE, PANEL_BYTES, IMAGES, LINES, COLUMNS = tile.stage_bytes, tile.panel_bytes, tile.images, tile.lines, tile.columns
    claim, advance = claim_stage(tile.landed_bytes), next_stage(tile.slots)

    @jit(device=True)
    def run(maps, ring, full, empty, m0, c0, first, last, P, Q, top, left):
        patch_map = maps + u8(ROW_BYTES)
        fence_tensor_map(maps)
        fence_tensor_map(patch_map)
        across, down = (Q + (COLUMNS - 1)) // COLUMNS, (P + (LINES - 1)) // LINES
        stage, parity, step = 0, 1, first
        while step < last:
            line = step // across
            image = line // down
            h, w = (line - image * down) * LINES, (step - line * across) * COLUMNS
            barrier = claim(full, empty, stage, parity)
            to = ring + stage * STAGE
            if IMAGES == 1:
                load_tile_4d(to, maps, m0, w, h, image, barrier)
                load_tile_4d(to + PANEL_BYTES, patch_map, c0, w - left, h - top, image, barrier)
            else:
                load_tile_4d(to, maps, m0, image * IMAGES, w, h, barrier)
                load_tile_4d(to + PANEL_BYTES, patch_map, c0, image * IMAGES, w - left, h - top, barrier)
            stage, parity = advance(stage, parity)
            step += 1

    return run


@cache
def _multiply_square(tile: SquareTile) -> Any:
    """Device function (acc, patch, dy, add): issue acc (+)= dyᵀ·x over 64 pixels for the taps of one line; `patch` starts at the line's first tap.

    add 0 forgets the old sums.
    """
    product, eights = wgmma_bf16(CHANNELS * tile.S, 0, a_mn_major=True, b_mn_major=True), tile.eights
    stationary, shifted = mn_major(0), mn_major(tile.pixel_bytes, eights[1] - eights[0])

    def instruction(step: int) -> Any:
        STARTS, A_MORE, B_MORE = step == 0, step * MN_STEP, eights[2 * step] >> 4

        @jit(device=True)
        def run(acc, a, b, add):
            product(acc, a + u8(A_MORE), b + u8(B_MORE), add if STARTS else 1)

        return run

    every = unrolled([instruction(step) for step in range(tile.BK // 16)])

    @jit(device=True)
    def run(acc, patch, dy, add):
        wgmma_fence()
        every(acc, stationary(dy), shifted(patch), add)
        wgmma_commit()

    return run


@cache
def place_of_four() -> Any:
    """Device function (t, four, m0, c0, C, S) -> (m, tap, c, whether the channel is there) of sums 4·four … 4·four + 3 of thread t."""

    @jit(device=True)
    def run(t, four, m0, c0, C, S):
        s = four >> 3
        c = c0 + (t & 3) * 2 + (four & 7) * 8
        return m0 + ((t >> 5) & 3) * 16 + ((t & 31) >> 2), (t >> 7) * S + s, c, c < C

    return run


@cache
def square_product(tile: SquareTile, bias: bool, whole: bool) -> Any:
    """The kernel for one tile, with a bias gradient or without; whole: a block, or a cluster, has all pixels, and writes dw itself."""
    STAGES, BM, TAPS, S, CONSUMERS, LINE = tile.slots, tile.BM, tile.R * tile.S, tile.S, tile.consumers, tile.line_bytes
    RING, PANEL_BYTES, SUMS = STAGES * tile.stage_bytes, tile.panel_bytes, BM * CHANNELS * S // WARPGROUP
    ARRIVALS = CONSUMERS // WARP + (HELPERS if bias else 0)
    init, produce = init_ring(STAGES, ARRIVALS), _producer(tile)
    consume = consumer((_multiply_square(tile),), SUMS, STAGES, tile.stage_bytes, 0)
    CLUSTER, WHOLE, SUMMERS, locate = tile.cluster, whole, HELPERS if bias else 0, place_of_block(tile.BM, tile.cluster)
    add_up = summer(tile, False, CLUSTER > 1 or WHOLE)
    share: Any = share_sums(CONSUMERS, SUMS, CLUSTER, SUMMERS, place_of_four(), RING) if CLUSTER > 1 and not WHOLE else None
    write: Any = store_whole(BM, tile.R, S, CONSUMERS, CLUSTER, SUMMERS, RING) if WHOLE else None

    @jit(launch_bounds=(tile.threads(bias), 1), **option(CLUSTER))
    def square_product_kernel(maps, partials, partials_b, M, C, P, Q, top, left, pixel_steps, steps, column_tiles):
        """partials[z][m][(r,s)][c] = Σ_pixel dy[pixel][m] · x[pixel shifted by (r,s)][c] over part z; sums of dy in partials_b.

        Where sums are whole, `partials` is dw[m][c][(r,s)] itself.

        gemm    GM = M, GN = R·S·C, GK = pixels; block tile 64 × (R·S taps of 64 channels), a square of 64 pixels per step.
        grid    (row tiles × column tiles, split), columns first: blocks that run together read the same pixels, out of L2; with clusters one
                number (`wgrad_cluster`), and z counts clusters in partials.
        block   a warpgroup for each line of the filter, a warp whose first thread fetches; three helper warps that add up dy if there is a bias.
        owns    warpgroup r 64 × (S taps of 64 channels), thread 2 columns of 8, every 8th row.
        shared  `tile.shared_bytes`: the ring, its barriers, the helpers' sums.
        moves   per block: steps·128·(64 + PH·PW·images) bytes, what lies outside an image left out, and 4·64·64·R·S bytes of sums; in clusters a
                share of these, and through their shared memory all of them once.
        needs   compute capability 9.0 (wgmma, TMA).
        source  NVIDIA, PTX ISA, "Asynchronous warpgroup level matrix instructions": strides of MN-major operands.
        """
        memory = cuda.shared.array(0, types.uint8)
        ring = aligned(byte_address_shared(memory))
        full = ring + RING
        empty = full + STAGES * 8
        meeting = full + BARRIERS
        t = cuda.threadIdx.x
        if CLUSTER > 1:
            row_tile, column_tile, z = locate(M, column_tiles)
        else:
            row_tile = cuda.blockIdx.x // column_tiles
            column_tile = cuda.blockIdx.x - row_tile * column_tiles
            z = cuda.blockIdx.y
        m0, c0 = row_tile * BM, column_tile * CHANNELS
        if CLUSTER > 1:
            first, last = steps_of_part(z, pixel_steps, cuda.gridDim.x // ((M + (BM - 1)) // BM * column_tiles))
        else:
            first = z * steps
            last = min(first + steps, pixel_steps)
        if t == 0:
            init(full, empty)
            fence_mbarrier_init()
        cuda.syncthreads()
        if t >= CONSUMERS:
            if t == CONSUMERS:
                produce(byte_address_global(maps), ring, full, empty, m0, c0, first, last, P, Q, top, left)
            beside = t - (CONSUMERS + WARP)
            if bias and beside >= 0:
                m = m0 + (beside & 7) * 8
                at = i8(z * column_tiles + column_tile) * M + m if m < M else i8(-1)
                add_up(partials_b, ring, full, empty, meeting, beside, first, last, first + column_tile, column_tiles, 0, 0, P, Q, at)
            return
        acc = cuda.local.array(SUMS, f4)
        for i in range(SUMS):
            acc[i] = 0.0
        r, lane = t >> 7, t & 31
        consume(acc, ring, full, empty, PANEL_BYTES + r * LINE, lane, last - first, 0, 0)
        if WHOLE:
            write(acc, partials, ring, t, m0, c0, M, C)
            return
        if CLUSTER > 1:
            share(acc, partials, ring, t, z // CLUSTER, m0, c0, M, C, TAPS, S)
            return
        row = m0 + ((t >> 5) & 3) * 16 + (lane >> 2)
        for h in range(2):
            m = row + 8 * h
            if m < M:
                line = (i8(z) * M + m) * (TAPS * C)
                for s in range(S):
                    c = c0 + (lane & 3) * 2
                    at = line + i8((r * S + s) * C + c)
                    for i in range(8):
                        if c + 8 * i < C:
                            e = (s * 8 + i) * 4 + 2 * h
                            store2(partials, at + i8(8 * i), acc[e], acc[e + 1])

    return square_product_kernel
