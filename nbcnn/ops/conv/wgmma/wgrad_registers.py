"""The product behind a weight gradient of four-byte elements: one operand goes through registers, the other is transposed in shared memory.

The product is `wgrad_kernel`'s. Both operands lie in memory as rows of channels, pixel by pixel, and the product sums over pixels. wgmma of tf32
wants rows of what it sums over, and has no other form; but it takes one operand from registers, which a thread may fill from anywhere. So each warp
that multiplies reads a panel of the shifted operand, 32 pixels × 32 channels, as TMA wrote it. Only the panels of the stationary operand are
transposed (`wgrad_transpose`): 4 of the 12 of a block of 128 filters × 256 columns. With all of them transposed, the 3×3 layers of ResNet-18 and
U-Net took 1.1 to 1.7 times as long in tf32 (H200).

Rows of the result and pixels of a step may come in any order that both operands share:

    channel    row i = lane / 4 + 8·h of the warp's 16 rows in product `half` is channel 4·(lane / 4) + 2·half + h. So a lane reads four channels of a
               pixel, 16 bytes, and stores the gradients of four neighbouring channels of a filter.
    pixel      of eight pixels, columns 0 … 3 are the even ones and columns 4 … 7 the odd ones, so that no two lanes read from one bank at a time.

In fp32 every element is the sum of two values of tf32, which the warp makes as it reads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, i8, jit, types, u4
from nbcnn.ops.conv.wgmma.ring import aligned, init_ring, next_stage
from nbcnn.ops.conv.wgmma.split import PRODUCTS
from nbcnn.ops.conv.wgmma.wgrad_kernel import producer
from nbcnn.ops.conv.wgmma.wgrad_place import panel_place
from nbcnn.ops.conv.wgmma.wgrad_tile import CONSUMER_REGISTERS, HELPER_REGISTERS, HELPERS, WARP, PixelTile
from nbcnn.ops.conv.wgmma.wgrad_transpose import transposer
from nbcnn.ops.kernel.loops import unrolled
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.cvt import bits_float, float_bits, tf32
from nbcnn.ops.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive, mbarrier_init, mbarrier_wait
from nbcnn.ops.ptx.shared import load_words_4
from nbcnn.ops.ptx.vector import store4
from nbcnn.ops.ptx.wgmma import (
    K_STEP,
    k_major,
    registers_dec,
    registers_inc,
    wgmma_commit,
    wgmma_fence,
    wgmma_tf32_registers,
    wgmma_wait,
    wgmma_wait_all,
)

u8 = types.uint64

STEPS = 2
"""Steps of 8 pixels that a warp reads before it multiplies them; the tensor cores work on these while it reads the next."""
WORDS = 8 * STEPS
ODD = ROW_BYTES + 16
"""Bits in which the addresses of the same 16 bytes of an even pixel and of the next one differ: the row, and the swizzle that goes by it."""


@cache
def _multiply(tile: PixelTile, first: int) -> Any:
    """Device function (acc, words, a, b, add): read k-steps first, first + 1 of a stage into `words`, and issue their products.

    a    shared address of the lane's four channels of its first even pixel
    b    shared address of the stage's transposed panels
    add  0 forgets the old sums
    """
    FIRST, SPLIT, LOW = first, tile.planes == 2, tile.landed_bytes >> 4

    def product(plane_a: int, plane_b: int, step: int, half: int, starts: bool) -> Any:
        multiply, MORE = wgmma_tf32_registers(tile.BM, half * tile.BM // 2), (first + step) * K_STEP + plane_b * LOW
        A0, A1, A2, A3 = (plane_a * WORDS + 8 * step + 2 * half + each for each in (0, 1, 4, 5))

        @jit(device=True)
        def run(acc, words, b, add):
            multiply(acc, words[A0], words[A1], words[A2], words[A3], b + u8(MORE), add if starts else 1)

        return run

    pairs = PRODUCTS[tile.planes]
    products = unrolled([product(*pair, step, half, pair == pairs[0] and step == 0) for pair in pairs for step in range(STEPS) for half in range(2)])

    @jit(device=True)
    def keep(words, i, word):
        if SPLIT:
            value = bits_float(word)
            high = tf32(value)
            words[i], words[WORDS + i] = float_bits(high), float_bits(tf32(value - high))
        else:
            words[i] = word

    @jit(device=True)
    def run(acc, words, a, b, add):
        for step in range(STEPS):
            some = load_words_4(a + (FIRST + step) * (8 * ROW_BYTES))
            others = load_words_4((a ^ ODD) + (FIRST + step) * (8 * ROW_BYTES))
            for i in range(4):
                keep(words, 8 * step + i, some[i])
                keep(words, 8 * step + 4 + i, others[i])
        wgmma_fence()
        products(acc, words, k_major(b), add)
        wgmma_commit()

    return run


@cache
def first_word(tile: PixelTile) -> Any:
    """Device function (ring, warp, lane) -> shared address in the first stage of the lane's four channels of its first even pixel."""
    PANEL_BYTES, STATIONARY = tile.panel_bytes, tile.BM // tile.panel

    @jit(device=True)
    def run(ring, warp, lane):
        pixel = 2 * (lane & 3)
        return ring + (STATIONARY + warp) * PANEL_BYTES + pixel * ROW_BYTES + ((lane >> 2) ^ pixel) * 16

    return run


@cache
def consumer(tile: PixelTile) -> Any:
    """Device function (acc, ring, full, ready, empty, warp, lane, steps): acc += the products of a block's `steps` steps; there is at least one.

    full[stage] says that TMA has written the warp's panel, ready[stage] that the panels of the other operand are transposed.
    """
    STAGE = tile.stage_bytes
    advance, one_running, all_done, word_of = next_stage(tile.slots), wgmma_wait(1), wgmma_wait_all(tile.BM), first_word(tile)
    one, other = _multiply(tile, 0), _multiply(tile, STEPS)

    @jit(device=True)
    def run(acc, ring, full, ready, empty, warp, lane, steps):
        words, more = cuda.local.array(WORDS, u4), cuda.local.array(WORDS, u4)
        own = word_of(ring, warp, lane)
        stage, parity, step, previous = 0, 0, 0, 0
        while True:
            here = stage * STAGE
            mbarrier_wait(full + stage * 8, parity)
            mbarrier_wait(ready + stage * 8, parity)
            one(acc, words, own + here, ring + here, 1)
            one_running()
            if lane == 0 and step > 0:
                mbarrier_arrive(empty + previous * 8)
            other(acc, more, own + here, ring + here, 1)
            one_running()
            previous = stage
            stage, parity = advance(stage, parity)
            step += 1
            if step >= steps:
                break
        all_done(acc)

    return run


@cache
def promoting_consumer(tile: PixelTile) -> Any:
    """`consumer` of float32, as `ring.promoting_consumer`: the sums of a step leave the tensor cores, and are added where additions round."""
    STAGE, SUMS, BOTH = tile.stage_bytes, tile.BM, 2 * WORDS
    advance, all_done, word_of = next_stage(tile.slots), wgmma_wait_all(SUMS), first_word(tile)
    one, other = _multiply(tile, 0), _multiply(tile, STEPS)

    @jit(device=True)
    def run(acc, ring, full, ready, empty, warp, lane, steps):
        words, more = cuda.local.array(BOTH, u4), cuda.local.array(BOTH, u4)
        part = cuda.local.array(SUMS, f4)
        for i in range(SUMS):
            part[i] = 0.0
        own = word_of(ring, warp, lane)
        stage, parity, step = 0, 0, 0
        while True:
            here = stage * STAGE
            mbarrier_wait(full + stage * 8, parity)
            mbarrier_wait(ready + stage * 8, parity)
            one(part, words, own + here, ring + here, 0)
            other(part, more, own + here, ring + here, 1)
            all_done(part)
            if lane == 0:
                mbarrier_arrive(empty + stage * 8)
            for i in range(SUMS):
                acc[i] += part[i]
            stage, parity = advance(stage, parity)
            step += 1
            if step >= steps:
                break

    return run


@cache
def store_product(tile: PixelTile) -> Any:
    """Device function (acc, partials, t, z, m0, panel0, panels, M, C, taps, S): the tile to partials[z][m][tap][c], 16 bytes per thread."""
    EIGHTS, HALF, place = tile.BM // 8, tile.BM // 2, panel_place(tile.panel)

    @jit(device=True)
    def run(acc, partials, t, z, m0, panel0, panels, M, C, taps, S):
        lane = t & 31
        panel = panel0 + (t >> 5)
        r, s, c0 = place(panel, panels, C, S)
        c = c0 + (lane >> 2) * 4
        if panel < panels and c < C:
            column = i8((r * S + s) * C + c)
            for j in range(EIGHTS):
                for e in range(2):
                    m = m0 + (8 * j + e) + (lane & 3) * 2
                    if m < M:
                        at = (i8(z) * M + m) * (taps * C) + column
                        store4(partials, at, acc[4 * j + e], acc[4 * j + 2 + e], acc[HALF + 4 * j + e], acc[HALF + 4 * j + 2 + e])

    return run


@cache
def register_product(tile: PixelTile, bias: str) -> Any:
    STAGES, BM, PANEL, CONSUMERS, ACC = tile.slots, tile.BM, tile.panel, tile.consumers, tile.BM
    RING, PANELS_B, MOVED = STAGES * tile.stage_bytes, tile.BN // tile.panel, tile.groups > 1
    init, produce, store = init_ring(STAGES, CONSUMERS // WARP), producer(tile), store_product(tile)
    consume = promoting_consumer(tile) if tile.planes > 1 else consumer(tile)
    transpose, give, take = transposer(tile, bias), registers_dec(HELPER_REGISTERS), registers_inc(CONSUMER_REGISTERS)

    @jit(launch_bounds=(tile.threads(bias != ""), 1))
    def register_product_kernel(maps, partials, partials_b, M, C, P, Q, R, S, stride, top, left, pixel_steps, steps, column_tiles):
        """partials[z][m][(r,s)][c] = Σ_pixel stationary[pixel][m] · shifted[pixel shifted by (r,s)][c] over part z; bias sums of it in partials_b.

        gemm: GM = M, GN = R·S·C, GK = pixels; block tile BM × BN, BK pixels per step.
        grid: (row tiles × column tiles, split), columns first: blocks that run together read the same pixels, out of L2.
        block: `groups` warpgroups that multiply, a warp whose first thread fetches, three helper warps that transpose the stationary operand and
        add up the bias gradient. owns: per block BM × BN, per warp BM × 32 columns of it.
        shared: slots · BK · (planes · BM + BN) · 4 bytes; moves per block: 4·steps·BK·(BM + BN) + 4·BM·BN bytes.
        needs: compute capability 9.0 (wgmma, TMA).
        bias: which operand is dy, "stationary" or "shifted"; "" where no bias gradient is wanted.
        """
        memory = cuda.shared.array(0, types.uint8)
        ring = aligned(byte_address_shared(memory))
        full = ring + RING
        empty = full + STAGES * 8
        ready = full + STAGES * 16
        t = cuda.threadIdx.x
        row_tile = cuda.blockIdx.x // column_tiles
        column_tile = cuda.blockIdx.x - row_tile * column_tiles
        z = cuda.blockIdx.y
        m0, panel0 = row_tile * BM, column_tile * PANELS_B
        panels = R * S * ((C + (PANEL - 1)) // PANEL)
        first = z * steps
        last = min(first + steps, pixel_steps)
        if t == 0:
            init(full, empty)
            for stage in range(STAGES):
                mbarrier_init(ready + stage * 8, HELPERS)
            fence_mbarrier_init()
        cuda.syncthreads()
        if t >= CONSUMERS:
            if MOVED:
                give()
            if t == CONSUMERS:
                produce(byte_address_global(maps), ring, full, empty, m0, panel0, panels, first, last, C, P, Q, S, stride, top, left)
            beside = t - (CONSUMERS + WARP)
            if beside >= 0:
                transpose(
                    *(partials_b, ring, full, ready, beside, z, first, last, row_tile, column_tile, column_tiles),
                    *(m0, panel0, panels, M, C, P, Q, R, S),
                )
            return
        if MOVED:
            take()
        acc = cuda.local.array(ACC, f4)
        for i in range(ACC):
            acc[i] = 0.0
        consume(acc, ring, full, ready, empty, t >> 5, t & 31, last - first)
        store(acc, partials, t, z, m0, panel0, panels, M, C, R * S, S)

    return register_product_kernel
