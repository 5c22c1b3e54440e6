"""The bias gradient, Σ dy over all pixels, out of the tiles of bfloat16 dy that a weight gradient has in shared memory anyway.

Helper warps read them while the tensor cores do: consumers of the ring like the others. Reading shared memory costs the tensor
cores bandwidth, so the work is shared out evenly, and every pixel read once:

    dy stationary (conv_wgrad)    all column tiles of a row of tiles see the same dy: they take turns, step by step.
    dy shifted (upconv_wgrad)     tap (u, v) of the 4×4 window of pixel (i, j) sees dy[2i + u − 1, 2j + v − 1]. A row of dy is seen by two u,
                                  from neighbouring i. u = 1 and 3 take it from even i, u = 0 and 2 from i as odd or even as H − 1: then
                                  each row is taken once (what they take outside the image is zero). The same for columns: a tap reads a
                                  quarter.

Lane l owns 8 channels, 16 bytes of a pixel, which TMA has swizzled by the pixel; where 32 lanes are more than a pixel needs, they
form teams, which share out the pixels.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, i8, jit, u4
from nbcnn.ops.conv.wgmma.ring import next_stage
from nbcnn.ops.conv.wgmma.wgrad_cluster import ring_is_free
from nbcnn.ops.conv.wgmma.wgrad_tile import HELPERS, WARP, PixelTile
from nbcnn.ops.kernel.loops import split_pixel
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES
from nbcnn.ops.ptx.cvt import bf16_high, bf16_low, bits_float, float_bits
from nbcnn.ops.ptx.mbarrier import bar_sync, mbarrier_arrive, mbarrier_wait
from nbcnn.ops.ptx.shared import load_words_1, load_words_4, store_words_4
from nbcnn.ops.ptx.vector import store4

_ALL = 0xFFFFFFFF


@cache
def add_pixels(tile: PixelTile, columns: int) -> Any:
    """Device function (sums, at, wanted0, wanted1): sums[0:8] += what this lane owns of the wanted pixels of a tile `columns` wide.

    wanted0, wanted1: a bit for each of the 64 pixels.
    """
    CHUNKS, PANEL_BYTES = columns // 8, tile.panel_bytes
    TEAMS, LOG_CHUNKS = 32 // CHUNKS, CHUNKS.bit_length() - 1

    @jit(device=True)
    def read(start, inside, pixel):
        return load_words_4(start + pixel * ROW_BYTES + ((inside ^ pixel) & 7) * 16)

    @jit(device=True)
    def add(sums, words):
        for q in range(4):
            sums[2 * q] += bf16_low(words[q])
            sums[2 * q + 1] += bf16_high(words[q])

    @jit(device=True)
    def add_rest(sums, start, inside, wanted, base):
        while wanted != 0:
            add(sums, read(start, inside, cuda.ffs(wanted) + base))
            wanted &= wanted - 1

    @jit(device=True)
    def run(sums, at, lane, wanted0, wanted1):
        # Bits of pixels: unsigned, whatever made them.
        wanted0, wanted1 = u4(wanted0), u4(wanted1)
        chunk, team = lane, 0
        if TEAMS > 1:
            chunk, team = lane & CHUNKS - 1, lane >> LOG_CHUNKS
        # A lane's pixels in two words, and the pixel before the first of each: cuda.ffs counts from 1.
        one, other, base_one, base_other = wanted0, wanted1, -1, 31
        if TEAMS > 1:
            mine = wanted1 if team & 1 == 1 else wanted0
            base_one = (team & 1) * 32 - 1
            base_other = base_one
            if TEAMS == 4:
                mine &= u4(0xFFFF0000) if team >= 2 else 0x0000FFFF
            one, other = mine & 0x00FF00FF, mine & 0xFF00FF00
        if chunk >= CHUNKS:
            one, other = 0, 0
        start = at + (chunk >> 3) * PANEL_BYTES
        inside = chunk & 7
        # Eight reads are under way at a time, found along two independent chains.
        while cuda.popc(one) >= 4 and cuda.popc(other) >= 4:
            a = cuda.ffs(one) + base_one
            e = cuda.ffs(other) + base_other
            one &= one - 1
            other &= other - 1
            b = cuda.ffs(one) + base_one
            f = cuda.ffs(other) + base_other
            one &= one - 1
            other &= other - 1
            c = cuda.ffs(one) + base_one
            g = cuda.ffs(other) + base_other
            one &= one - 1
            other &= other - 1
            d = cuda.ffs(one) + base_one
            h = cuda.ffs(other) + base_other
            one &= one - 1
            other &= other - 1
            wa, wb, wc, wd = read(start, inside, a), read(start, inside, b), read(start, inside, c), read(start, inside, d)
            we, wf, wg, wh = read(start, inside, e), read(start, inside, f), read(start, inside, g), read(start, inside, h)
            add(sums, wa)
            add(sums, wb)
            add(sums, wc)
            add(sums, wd)
            add(sums, we)
            add(sums, wf)
            add(sums, wg)
            add(sums, wh)
        add_rest(sums, start, inside, one, base_one)
        add_rest(sums, start, inside, other, base_other)

    return run


@cache
def store_sums(columns: int) -> Any:
    """Device function (sums, partials_b, meeting, helper, lane, at): the sums over all helpers and teams to partials_b[at …]; at < 0: nowhere.

    `at` is the lane's own; `meeting` is the shared address at which the helpers meet.
    """
    CHUNKS = columns // 8
    TEAMS = 32 // CHUNKS
    helpers_meet = bar_sync(1, HELPERS * WARP)

    @jit(device=True)
    def run(sums, partials_b, meeting, helper, lane, at):
        mine = meeting + (helper * WARP + lane) * 32
        store_words_4(mine, float_bits(sums[0]), float_bits(sums[1]), float_bits(sums[2]), float_bits(sums[3]))
        store_words_4(mine + 16, float_bits(sums[4]), float_bits(sums[5]), float_bits(sums[6]), float_bits(sums[7]))
        helpers_meet()
        if helper == 0:
            for other in range(1, HELPERS):
                for q in range(8):
                    sums[q] += bits_float(load_words_1(mine + (other * WARP * 32 + q * 4)))
            for q in range(8):
                if TEAMS > 1:
                    sums[q] += cuda.shfl_xor_sync(_ALL, sums[q], 16)
                if TEAMS > 2:
                    sums[q] += cuda.shfl_xor_sync(_ALL, sums[q], 8)
            if lane < CHUNKS and at >= i8(0):
                store4(partials_b, at, sums[0], sums[1], sums[2], sums[3])
                store4(partials_b, at + i8(4), sums[4], sums[5], sums[6], sums[7])

    return run


@cache
def summer(tile: PixelTile, shifted: bool, leave: bool = False, planes: int = 1, plane_bytes: int = 0) -> Any:
    """Device function for the helper warps: add up the block's share of dy, taking turns, and store the sums in partials_b.

    partials_b: [z][column tile][m] where dy is stationary, [z][tap][c] where it is shifted. leave: consumers wait until the ring is free.
    planes: whose sum dy is, `plane_bytes` apart.
    """
    STAGE, BK, advance = tile.stage_bytes, tile.BK, next_stage(tile.slots)
    COLUMNS = tile.BN if shifted else tile.BM
    OFFSET = tile.BM // tile.panel * tile.panel_bytes if shifted else 0
    add, store = add_pixels(tile, COLUMNS), store_sums(COLUMNS)
    PLANES, PLANE = planes, plane_bytes
    LEAVES, (_, come) = leave, ring_is_free(tile.consumers, HELPERS)

    @jit(device=True)
    def run(partials_b, ring, full, empty, meeting, t, first, last, due, period, rows, columns, P, Q, at):
        """due, period: the steps in which to add; meeting: a shared address. rows, columns: all bits set if odd pixel rows (columns) are not
        wanted, else 0."""
        helper, lane = t >> 5, t & 31
        due, period = due + helper * period, HELPERS * period
        sums = cuda.local.array(8, f4)
        for q in range(8):
            sums[q] = 0.0
        stage, parity, step = 0, 0, first
        while step < last:
            mbarrier_wait(full + stage * 8, parity)
            if step == due:
                here = ring + stage * STAGE + OFFSET
                if shifted:
                    _, p0, q0 = split_pixel(step * BK + lane, P, Q)
                    _, p1, q1 = split_pixel(step * BK + 32 + lane, P, Q)
                    rows0, columns0 = cuda.ballot_sync(_ALL, p0 & 1), cuda.ballot_sync(_ALL, q0 & 1)
                    rows1, columns1 = cuda.ballot_sync(_ALL, p1 & 1), cuda.ballot_sync(_ALL, q1 & 1)
                    wanted0, wanted1 = (rows0 ^ rows) & (columns0 ^ columns), (rows1 ^ rows) & (columns1 ^ columns)
                    for plane in range(PLANES):
                        add(sums, here + plane * PLANE, lane, wanted0, wanted1)
                else:
                    for plane in range(PLANES):
                        add(sums, here + plane * PLANE, lane, -1, -1)
                due += period
            cuda.syncwarp()
            if lane == 0:
                mbarrier_arrive(empty + stage * 8)
            stage, parity = advance(stage, parity)
            step += 1
        if LEAVES:
            come()
        store(sums, partials_b, meeting, helper, lane, at)

    return run
