"""The product behind a weight gradient, bfloat16: both operands have the pixels they are summed over as rows, as images lie in memory.

    D[m][(r,s), c] = Σ_(n,p,q) still[(n,p,q)][m] · moved[n, stride·p + r − top, stride·q + s − left][c]

`still` is read pixel by pixel, `moved` shifted by a tap (zero outside the image). conv_wgrad: still = dy, moved = x. upconv_wgrad:
still = x, moved = dy, whose 4×4 taps of stride 2 see every pixel of the doubled image.

wgmma sums over what a row of an MN-major tile stands for, so TMA's tiles [pixels][channels] need no transpose. One producer thread
fills a ring of slots; a slot holds BK pixels: BM/64 panels of `still`, BN/64 of `moved`, each panel one tap's 64 channels. Column
tiles are whole panels, so a tile may span taps.

The bias gradient is the sum of dy over all pixels. Consumers make it out of tiles of dy that lie in shared memory anyway,
while the tensor cores are at work.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.cuda import cuda, f4, i4, i8, jit, types, u4
from nbcnn.ops.conv.thin_shape import split_pixel, unrolled
from nbcnn.ops.conv.wgmma.tensor_maps import ROW_BYTES
from nbcnn.ops.conv.wgmma.wgrad_tile import PANEL, PixelTile
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.cvt import bf16_high, bf16_low, bits_float, float_bits
from nbcnn.ops.ptx.mbarrier import bar_sync, fence_mbarrier_init, mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait
from nbcnn.ops.ptx.shared import load_words_1, load_words_4, store_words_2
from nbcnn.ops.ptx.tma import fence_tensor_map, load_im2col_4d, load_tile_2d
from nbcnn.ops.ptx.vector import store2
from nbcnn.ops.ptx.wgmma import MN_STEP, mn_major, wgmma_bf16, wgmma_commit, wgmma_fence, wgmma_wait, wgmma_wait_all

u8, u2 = types.uint64, types.uint16
_NEVER = 1 << 30


@jit(device=True)
def panel_place(panel, panels, C, S):
    """(r, s, c): the tap and first channel of column panel `panel`; beyond the last, those of the last, whose sums nobody stores."""
    across = i4((C + i4(PANEL - 1)) >> i4(6))
    panel = min(i4(panel), i4(panels - i4(1)))
    tap = i4(u4(panel) // u4(across))
    r = i4(u4(tap) // u4(S))
    return r, i4(tap - r * S), i4((panel - tap * across) * i4(PANEL))


@jit(device=True)
def is_inner(r, s):
    """True for the inner four of 4×4 taps."""
    return (r == i4(1) or r == i4(2)) and (s == i4(1) or s == i4(2))


@cache
def producer(tile: PixelTile) -> Any:
    """Device function for one thread: fetch the steps first … last − 1 of a tile into the ring, each as soon as its slot is empty."""
    SLOT, SLOTS, PANEL_BYTES, BK = tile.slot_bytes, tile.slots, tile.panel_bytes, tile.BK
    PANELS_A, PANELS_B = tile.BM // PANEL, tile.BN // PANEL

    @jit(device=True)
    def run(maps, ring, full, empty, m0, panel0, panels, first, last, C, P, Q, S, stride, top, left):
        moved_map = maps + u8(ROW_BYTES)
        fence_tensor_map(maps)
        fence_tensor_map(moved_map)
        down = cuda.local.array(PANELS_B, u2)
        right = cuda.local.array(PANELS_B, u2)
        channel = cuda.local.array(PANELS_B, i4)
        for j in range(PANELS_B):
            r, s, channel[j] = panel_place(panel0 + i4(j), panels, C, S)
            down[j], right[j] = u2(r), u2(s)
        slot, parity, step = i4(0), u4(1), i4(first)
        while step < last:
            pixel = i4(step * i4(BK))
            image, p, q = split_pixel(pixel, P, Q)
            h, w = i4(p * stride - top), i4(q * stride - left)
            barrier = full + u4(slot * i4(8))
            to = ring + u4(slot * i4(SLOT))
            mbarrier_wait(empty + u4(slot * i4(8)), parity)
            mbarrier_arrive_expect_tx(barrier, u4(SLOT))
            for i in range(PANELS_A):
                load_tile_2d(to + u4(i * PANEL_BYTES), maps, m0 + i4(i * PANEL), pixel, barrier)
            for j in range(PANELS_B):
                load_im2col_4d(to + u4((PANELS_A + j) * PANEL_BYTES), moved_map, channel[j], w, h, image, barrier, right[j], down[j])
            slot = i4(slot + i4(1))
            if slot == i4(SLOTS):
                slot = i4(0)
                parity = parity ^ u4(1)
            step = i4(step + i4(1))

    return run


@cache
def _multiply_slot(tile: PixelTile) -> Any:
    """Device function (acc, a, b): issue acc += all products of one slot, of whose panels a warpgroup's own start at a, all columns' at b."""
    rows = tile.BM // tile.groups
    operand = mn_major(tile.panel_bytes)

    def instruction(half: int, step: int) -> Any:
        product = wgmma_bf16(tile.BN, half * tile.BN // 2, True, True)
        A_MORE, B_MORE = (half * tile.panel_bytes >> 4) + step * MN_STEP, step * MN_STEP

        @jit(device=True)
        def run(acc, a, b):
            product(acc, a + u8(A_MORE), b + u8(B_MORE), u4(1))

        return run

    every = unrolled([instruction(half, step) for half in range(rows // 64) for step in range(tile.BK // 16)])

    @jit(device=True)
    def run(acc, a, b):
        wgmma_fence()
        every(acc, operand(a), operand(b))
        wgmma_commit()

    return run


@cache
def add_pixels(tile: PixelTile, columns: int) -> Any:
    """Device function (sums, at, t): sums[0:8] += what consumer t owns of the column sums of the `columns`-wide panels at `at`.

    Consumer t owns eight columns, 16 bytes, of every 8th or 16th pixel; TMA has swizzled the 16 bytes by the pixel.
    """
    CHUNKS, PANEL_BYTES = columns // 8, tile.panel_bytes
    TEAMS = tile.consumers // CHUNKS
    ROUNDS, STEP = tile.BK // TEAMS, TEAMS * ROW_BYTES

    @jit(device=True)
    def run(sums, at, t):
        chunk = i4(u4(t) % u4(CHUNKS))
        pixel = i4(u4(t) // u4(CHUNKS))
        start = at + u4((chunk >> i4(3)) * i4(PANEL_BYTES) + pixel * i4(ROW_BYTES))
        for i in range(ROUNDS):
            inside = (chunk ^ (pixel + i4(i * TEAMS))) & i4(7)
            words = load_words_4(start + u4(i * STEP) + u4(inside * i4(16)))
            for q in range(4):
                sums[2 * q] += bf16_low(words[q])
                sums[2 * q + 1] += bf16_high(words[q])
        cuda.syncwarp()

    return run


@cache
def consumer(tile: PixelTile, columns: int, offset: int) -> Any:
    """Device function (acc, sums, ring, full, empty, t, first, last, due, period): multiply the slots that the producer fills.

    In step `due`, and every `period` steps from there, also add up the `columns` columns that lie `offset` bytes into the slot; 0: never.
    """
    SLOT, SLOTS, A_BYTES = tile.slot_bytes, tile.slots, tile.BM // PANEL * tile.panel_bytes
    GROUP_BYTES, SUMS = A_BYTES // tile.groups, tile.BM // tile.groups * tile.BN // 128
    multiply, one_running, all_done = _multiply_slot(tile), wgmma_wait(1), wgmma_wait_all(SUMS)
    ADDS, OFFSET = columns > 0, offset
    add = add_pixels(tile, columns or PANEL)

    @jit(device=True)
    def run(acc, sums, ring, full, empty, t, first, last, due, period):
        own = u4((t >> i4(7)) * i4(GROUP_BYTES))
        slot, parity, step, previous = i4(0), u4(0), i4(first), i4(0)
        # Ends in the middle: a block has at least one step, and a path around the products would have the sums copied.
        while True:
            mbarrier_wait(full + u4(slot * i4(8)), parity)
            here = ring + u4(slot * i4(SLOT))
            multiply(acc, here + own, here + u4(A_BYTES))
            if ADDS and step == due:
                add(sums, here + u4(OFFSET), t)
                due = i4(due + period)
            # The step before this one has left the tensor cores: its slot may be filled again.
            one_running()
            if t & i4(31) == i4(0) and step > first:
                mbarrier_arrive(empty + u4(previous * i4(8)))
            previous = slot
            slot = i4(slot + i4(1))
            if slot == i4(SLOTS):
                slot = i4(0)
                parity = parity ^ u4(1)
            step = i4(step + i4(1))
            if step >= last:
                break
        all_done(acc)

    return run


@cache
def store_product(tile: PixelTile) -> Any:
    """Device function (acc, partials, t, z, m0, panel0, panels, M, C, taps, S): the tile to partials[z][m][tap][c], 8 bytes a thread."""
    ROWS, EIGHTS, PANELS_B = tile.BM // tile.groups, tile.BN // 8, tile.BN // PANEL
    HALVES = ROWS // 64

    @jit(device=True)
    def run(acc, partials, t, z, m0, panel0, panels, M, C, taps, S):
        lane = t & i4(31)
        row = i4(m0 + (t >> i4(7)) * i4(ROWS) + ((t >> i4(5)) & i4(3)) * i4(16) + (lane >> i4(2)))
        for half in range(HALVES):
            for h in range(2):
                m = i4(row + i4(half * 64 + 8 * h))
                if m < M:
                    line = (i8(z) * i8(M) + i8(m)) * i8(taps * C)
                    for j in range(PANELS_B):
                        r, s, c0 = panel_place(panel0 + i4(j), panels, C, S)
                        c = i4(c0 + (lane & i4(3)) * i4(2))
                        at = line + i8((r * S + s) * C + c)
                        for i in range(8):
                            if panel0 + i4(j) < panels and c + i4(8 * i) < C:
                                e = (half * EIGHTS + j * 8 + i) * 4 + 2 * h
                                store2(partials, at + i8(8 * i), acc[e], acc[e + 1])

    return run


@cache
def gather_sums(tile: PixelTile, columns: int) -> tuple[Any, Any]:
    """Device functions: (sums, stage, t) of every consumer, once the ring is free; then (stage, column) -> the sum over all consumers."""
    CHUNKS = columns // 8
    TEAMS, ROW = tile.consumers // CHUNKS, columns * 4
    everyone = bar_sync(1, tile.consumers)

    @jit(device=True)
    def put(sums, stage, t):
        everyone()
        at = stage + u4(u4(t) // u4(CHUNKS) * u4(ROW) + u4(t) % u4(CHUNKS) * u4(32))
        for q in range(4):
            store_words_2(at + u4(8 * q), float_bits(sums[2 * q]), float_bits(sums[2 * q + 1]))
        everyone()

    @jit(device=True)
    def total(stage, column):
        made = f4(0)
        for team in range(TEAMS):
            made += bits_float(load_words_1(stage + u4(team * ROW) + u4(column * i4(4))))
        return made

    return put, total


@cache
def pixel_product(tile: PixelTile, bias: str) -> Any:
    SLOT, SLOTS, BM, BN, PANELS_B, CONSUMERS = tile.slot_bytes, tile.slots, tile.BM, tile.BN, tile.BN // PANEL, tile.consumers
    ACC, WARPS = tile.BM * tile.BN // tile.consumers, tile.consumers // 32
    A_BYTES = tile.BM // PANEL * tile.panel_bytes
    columns, offset = {"": (0, 0), "still": (tile.BM, 0), "moved": (tile.BN, A_BYTES)}[bias]
    produce, consume, store = producer(tile), consumer(tile, columns, offset), store_product(tile)
    put_sums, total = gather_sums(tile, columns or PANEL)
    STILL, MOVED, ROUNDS = bias == "still", bias == "moved", tile.BN // min(tile.BN, tile.consumers)

    @jit(launch_bounds=(tile.threads, 1))
    def pixel_product_kernel(maps, partials, partials_b, M, C, P, Q, R, S, stride, top, left, pixel_steps, steps, column_tiles):
        """partials[z][m][(r,s)][c] = Σ_pixel still[pixel][m] · moved[pixel moved by (r,s)][c] over part z; bias sums of it in partials_b.

        gemm: GM = M, GN = R·S·C, GK = pixels; block tile BM × BN, BK pixels a step.
        grid: (row tiles × column tiles, split), columns first: blocks that run together read the same pixels, out of L2.
        block: `groups` warpgroups that multiply, a warp whose first thread fetches; owns: a block BM × BN, a warpgroup BM/groups rows of it.
        shared: slots · BK · (BM + BN) · 2 bytes; moves per block: 2·steps·BK·(BM + BN) + 4·BM·BN bytes.
        needs: compute capability 9.0 (wgmma, TMA).
        bias: "still" sums still, the tiles of one row of tiles taking turns: partials_b[z][column tile][m]; "moved" sums the inner four
        of 4×4 taps of stride 2, which see each pixel once: partials_b[z][inner tap][c].
        """
        shared = cuda.shared.array(0, types.uint8)
        ring = (byte_address_shared(shared) + u4(1023)) & u4(0xFFFFFC00)
        full = ring + u4(SLOTS * SLOT)
        empty = full + u4(SLOTS * 8)
        t = i4(cuda.threadIdx.x)
        row_tile = i4(u4(cuda.blockIdx.x) // u4(column_tiles))
        column_tile = i4(i4(cuda.blockIdx.x) - row_tile * column_tiles)
        z = i4(cuda.blockIdx.y)
        m0, panel0 = i4(row_tile * i4(BM)), i4(column_tile * i4(PANELS_B))
        panels = i4(R * S * ((C + i4(PANEL - 1)) >> i4(6)))
        first = i4(z * steps)
        last = min(i4(first + steps), i4(pixel_steps))
        if t == i4(0):
            for slot in range(SLOTS):
                mbarrier_init(full + u4(slot * 8), u4(1))
                mbarrier_init(empty + u4(slot * 8), u4(WARPS))
            fence_mbarrier_init()
        cuda.syncthreads()
        if t >= i4(CONSUMERS):
            if t == i4(CONSUMERS):
                produce(byte_address_global(maps), ring, full, empty, m0, panel0, panels, first, last, C, P, Q, S, stride, top, left)
            return
        acc = cuda.local.array(ACC, f4)
        sums = cuda.local.array(8, f4)
        for i in range(ACC):
            acc[i] = f4(0)
        for i in range(8):
            sums[i] = f4(0)
        due, period = i4(first + column_tile), i4(column_tiles)
        if MOVED:
            due, period = i4(_NEVER), i4(1)
            for j in range(PANELS_B):
                r, s, _ = panel_place(panel0 + i4(j), panels, C, S)
                if is_inner(r, s) and row_tile == i4(0):
                    due = first
        consume(acc, sums, ring, full, empty, t, first, last, due, period)
        store(acc, partials, t, z, m0, panel0, panels, M, C, R * S, S)
        if STILL:
            put_sums(sums, ring, t)
            if t < i4(BM) and m0 + t < M:
                partials_b[i8(z * column_tiles + column_tile) * i8(M) + i8(m0 + t)] = total(ring, t)
        if MOVED and due < i4(_NEVER):
            put_sums(sums, ring, t)
            for i in range(ROUNDS):
                column = i4(t + i4(i * CONSUMERS))
                panel = i4(panel0 + (column >> i4(6)))
                r, s, c0 = panel_place(panel, panels, C, S)
                c = i4(c0 + (column & i4(63)))
                if column < i4(BN) and panel < panels and c < C and is_inner(r, s):
                    partials_b[i8(z * i4(4) + (r - i4(1)) * i4(2) + s - i4(1)) * i8(C) + i8(c)] = total(ring, column)

    return pixel_product_kernel
