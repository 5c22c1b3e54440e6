"""The product behind a weight gradient: both operands have the pixels they are summed over as rows, as images lie in memory.

    D[m][(r,s), c] = Σ_(n,p,q) stationary[(n,p,q)][m] · shifted[n, stride·p + r − top, stride·q + s − left][c]

`stationary` is read pixel by pixel, `shifted` a tap further (zero outside the image). conv_wgrad: stationary = dy, shifted = x.
upconv_wgrad: stationary = x, shifted = dy, whose 4×4 taps of stride 2 see every pixel of the doubled image.

One producer thread fills a ring of stages (ring.py); a stage holds BK pixels: panels of both operands, each 128 bytes of one tap's channels.
Column tiles are whole panels, so a tile may span taps. wgmma can sum over the rows of a tile of bfloat16 (MN-major), so TMA's
tiles [pixels][channels] need no transpose; those of four-byte elements have a product of their own: `wgrad_registers`. Where float32
comes as three planes of bfloat16 (split.py), each has a tensor map of its own: what lies behind its last pixel reads as zero.

The bias gradient comes out of the same tiles: `wgrad_bias`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, i4, i8, jit, types
from nbcnn.ops.conv.wgmma.ring import aligned, claim_stage, init_ring, next_stage, products_of_stage, promoting_consumer
from nbcnn.ops.conv.wgmma.ring import consumer as ring_consumer
from nbcnn.ops.conv.wgmma.split import PRODUCTS
from nbcnn.ops.conv.wgmma.tile import WARPGROUP
from nbcnn.ops.conv.wgmma.wgrad_bias import summer
from nbcnn.ops.conv.wgmma.wgrad_place import panel_place
from nbcnn.ops.conv.wgmma.wgrad_tile import BARRIERS, HELPERS, WARP, PixelTile
from nbcnn.ops.kernel.loops import split_pixel
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.mbarrier import fence_mbarrier_init
from nbcnn.ops.ptx.tma import fence_tensor_map, load_im2col_4d, load_tile_2d
from nbcnn.ops.ptx.vector import store2
from nbcnn.ops.ptx.wgmma import MN_STEP, mn_major, wgmma_bf16

u8, u2 = types.uint64, types.uint16


@cache
def producer(tile: PixelTile) -> Any:
    """Device function for one thread: fetch the steps first … last − 1 of a tile into the ring, each as soon as its stage is empty."""
    STAGE, PANEL_BYTES, BK, PANEL = tile.stage_bytes, tile.panel_bytes, tile.BK, tile.panel
    PANELS_A, PANELS_B, PLANES, PLANE = tile.BM // PANEL, tile.BN // PANEL, tile.planes_in_memory, tile.plane_bytes
    place, claim, advance = panel_place(PANEL), claim_stage(tile.landed_bytes), next_stage(tile.slots)

    @jit(device=True)
    def run(maps, ring, full, empty, m0, panel0, panels, first, last, C, P, Q, S, stride, top, left):
        shifted_map = maps + u8(PLANES * ROW_BYTES)
        for each in range(2 * PLANES):
            fence_tensor_map(maps + u8(each * ROW_BYTES))
        down = cuda.local.array(PANELS_B, u2)
        right = cuda.local.array(PANELS_B, u2)
        channel = cuda.local.array(PANELS_B, i4)
        for j in range(PANELS_B):
            r, s, channel[j] = place(panel0 + j, panels, C, S)
            down[j], right[j] = u2(r), u2(s)
        stage, parity, step = 0, 1, first
        while step < last:
            pixel = step * BK
            image, p, q = split_pixel(pixel, P, Q)
            h, w = p * stride - top, q * stride - left
            barrier = claim(full, empty, stage, parity)
            for plane in range(PLANES):
                to = ring + stage * STAGE + plane * PLANE
                a_map, b_map = maps + u8(plane * ROW_BYTES), shifted_map + u8(plane * ROW_BYTES)
                for i in range(PANELS_A):
                    load_tile_2d(to + i * PANEL_BYTES, a_map, m0 + i * PANEL, pixel, barrier)
                for j in range(PANELS_B):
                    load_im2col_4d(to + (PANELS_A + j) * PANEL_BYTES, b_map, channel[j], w, h, image, barrier, right[j], down[j])
            stage, parity = advance(stage, parity)
            step += 1

    return run


@cache
def _multiply_stage(tile: PixelTile) -> Any:
    """Device function (acc, a, b, add): issue acc (+)= all products of one stage; a warpgroup's own rows start at a, all columns at b.

    add 0 forgets the old sums.
    """
    ROWS, PLANE, HALF = tile.BM // tile.groups, tile.plane_bytes >> 4, tile.panel_bytes >> 4
    instructions = [
        (
            wgmma_bf16(tile.BN, half * tile.BN // 2, a_mn_major=True, b_mn_major=True),
            half * HALF + step * MN_STEP + plane_a * PLANE,
            step * MN_STEP + plane_b * PLANE,
            step == 0 and i == 0,
        )
        for half in range(ROWS // 64)
        for i, (plane_a, plane_b) in enumerate(PRODUCTS[tile.planes])
        for step in range(tile.BK // 16)
    ]
    return products_of_stage(instructions, mn_major(tile.panel_bytes))


@cache
def consumer(tile: PixelTile) -> Any:
    """The ring's consumer for a tile, as `ring.consumer`; sums of planes are promoted after each step."""
    sums, b_offset = tile.BM // tile.groups * tile.BN // WARPGROUP, tile.BM // tile.panel * tile.panel_bytes
    shape = sums, tile.slots, tile.stage_bytes, b_offset
    return promoting_consumer(_multiply_stage(tile), *shape) if tile.planes > 1 else ring_consumer((_multiply_stage(tile),), *shape)


@cache
def store_product(tile: PixelTile) -> Any:
    """Device function (acc, partials, t, z, m0, panel0, panels, M, C, taps, S): the tile to partials[z][m][tap][c], 8 bytes per thread."""
    ROWS, EIGHTS, PANELS_B = tile.BM // tile.groups, tile.BN // 8, tile.BN // tile.panel
    HALVES, EIGHTS_OF_PANEL, place = ROWS // 64, tile.panel // 8, panel_place(tile.panel)

    @jit(device=True)
    def run(acc, partials, t, z, m0, panel0, panels, M, C, taps, S):
        lane = t & 31
        row = m0 + (t >> 7) * ROWS + ((t >> 5) & 3) * 16 + (lane >> 2)
        for half in range(HALVES):
            for h in range(2):
                m = row + (half * 64 + 8 * h)
                if m < M:
                    line = (i8(z) * M + m) * (taps * C)
                    for j in range(PANELS_B):
                        r, s, c0 = place(panel0 + j, panels, C, S)
                        c = c0 + (lane & 3) * 2
                        at = line + i8((r * S + s) * C + c)
                        for i in range(EIGHTS_OF_PANEL):
                            if panel0 + j < panels and c + 8 * i < C:
                                e = (half * EIGHTS + j * EIGHTS_OF_PANEL + i) * 4 + 2 * h
                                store2(partials, at + i8(8 * i), acc[e], acc[e + 1])

    return run


@cache
def pixel_product(tile: PixelTile, bias: str) -> Any:
    STAGES, BM, PANEL, CONSUMERS = tile.slots, tile.BM, tile.panel, tile.consumers
    RING, GROUP_BYTES = STAGES * tile.stage_bytes, tile.BM // tile.panel * tile.panel_bytes // tile.groups
    ACC, PANELS_B = tile.BM * tile.BN // tile.consumers, tile.BN // tile.panel
    ARRIVALS = tile.consumers // WARP + (HELPERS if bias else 0)
    init, produce, consume = init_ring(STAGES, ARRIVALS), producer(tile), consumer(tile)
    store = store_product(tile)
    add_up, place = summer(tile, bias == "shifted", planes=tile.planes_in_memory, plane_bytes=tile.plane_bytes), panel_place(tile.panel)
    STATIONARY, SHIFTED = bias == "stationary", bias == "shifted"
    # 16 bytes of a pixel per lane; lanes beyond a pixel of few channels begin anew.
    CHUNK_BITS = min(31, tile.BN // 8 - 1) if tile.BN & (tile.BN - 1) == 0 else 31

    @jit(launch_bounds=(tile.threads(bias != ""), 1))
    def pixel_product_kernel(maps, partials, partials_b, M, C, P, Q, R, S, stride, top, left, pixel_steps, steps, column_tiles):
        """partials[z][m][(r,s)][c] = Σ_pixel stationary[pixel][m] · shifted[pixel shifted by (r,s)][c] over part z; bias sums of it in partials_b.

        gemm: GM = M, GN = R·S·C, GK = pixels; block tile BM × BN, BK pixels per step.
        grid: (row tiles × column tiles, split), columns first: blocks that run together read the same pixels, out of L2.
        block: `groups` warpgroups that multiply, a warp whose first thread fetches, three helper warps that add up dy if there is a bias.
        owns: per block BM × BN, per warpgroup BM/groups rows of it.
        shared: slots · BK · (BM + BN) · 2 · planes bytes; moves per block: 2·planes·steps·BK·(BM + BN) + 4·BM·BN bytes.
        needs: compute capability 9.0 (wgmma, TMA).
        bias: which operand is dy, "stationary" or "shifted"; "" where no bias gradient is wanted.
        """
        memory = cuda.shared.array(0, types.uint8)
        ring = aligned(byte_address_shared(memory))
        full = ring + RING
        empty = full + STAGES * 8
        meeting = full + BARRIERS
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
            fence_mbarrier_init()
        cuda.syncthreads()
        if t >= CONSUMERS:
            if t == CONSUMERS:
                produce(byte_address_global(maps), ring, full, empty, m0, panel0, panels, first, last, C, P, Q, S, stride, top, left)
            beside = t - (CONSUMERS + WARP)
            if STATIONARY and beside >= 0:
                m = m0 + (beside & 31) * 8
                at = i8(z * column_tiles + column_tile) * M + m if m < M else i8(-1)
                add_up(partials_b, ring, full, empty, meeting, beside, first, last, first + column_tile, column_tiles, 0, 0, P, Q, at)
            if SHIFTED and beside >= 0:
                chunk = beside & CHUNK_BITS
                panel = panel0 + (chunk >> 3)
                r, s, c0 = place(panel, panels, C, S)
                c = c0 + (chunk & 7) * 8
                at = i8(z * (R * S) + r * S + s) * C + c if row_tile == 0 and panel < panels and c < C else i8(-1)
                # Odd taps want even pixels; even taps want pixels as odd or even as the last.
                rows = 0 if r & 1 == 0 and P & 1 == 0 else -1
                columns = 0 if s & 1 == 0 and Q & 1 == 0 else -1
                due = first if row_tile == 0 else last
                add_up(partials_b, ring, full, empty, meeting, beside, first, last, due, 1, rows, columns, P, Q, at)
            return
        acc = cuda.local.array(ACC, f4)
        for i in range(ACC):
            acc[i] = 0.0
        consume(acc, ring, full, empty, (t >> 7) * GROUP_BYTES, t & 31, last - first, 0, 0)
        store(acc, partials, t, z, m0, panel0, panels, M, C, R * S, S)

    return pixel_product_kernel
