"""Input gradient of a last layer on tensor cores, behind an upsampling or not, with or without a ReLU's mask.

    dx[m][c] = Σ_j w[j][c] · D[m][j], where x[m][c] > 0      (columns j ≤ 32 of dy: last_columns.py)

Memory decides: x is read once and dx written once, beside which dy and the filters are nothing. Channels stand in the rows of the
product, two to a row pair, and pixels in its columns. So a lane's results are 16 bytes of neighbouring channels of a pixel, stored
as they are, under the mask of the 16 bytes of x that the lane itself fetched. Filters stay in registers for the whole kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i8, jit, types, u4
from nbcnn.gpu.target import Target
from nbcnn.ops.conv.thin_mma.last_columns import (
    SLOTS,
    STEP,
    LastTile,
    columns_bytes,
    columns_of,
    columns_pitch,
    fetch_of,
    gradient_reads,
    grid_y,
    last_tile,
    next_pixels,
    next_stage,
)
from nbcnn.ops.conv.thin_mma.last_shape import last_layer, pack_channels_by_columns, refusal, word_elements
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks
from nbcnn.ops.kernel.traffic import Traffic, outputs, size
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.cp_async import cp_async_wait
from nbcnn.ops.ptx.cvt import bf16x2, bits_float, float_bits, tf32
from nbcnn.ops.ptx.ldmatrix import ldmatrix_x4
from nbcnn.ops.ptx.mma import mma_bf16, mma_tf32
from nbcnn.ops.ptx.packed import greater_bf16x2
from nbcnn.ops.ptx.shared import load_words_4, store_words_4
from nbcnn.ops.ptx.words import load_4_words, store_4_words
from nbcnn.plan.bounds import STORE

FRAGMENTS = 8
"""16-byte fragments of filters that a lane holds: 32·E channels by 32 columns."""


@functools.cache
def dgrad_kernel(E: int, R: int, K: int, F: int, masked: bool, CW: int, PW: int, PX: int, STAGES: int, resident: int) -> Any:
    """The kernel for E elements per word, K filters of R×R behind an upsampling by F, and a tile."""
    THREADS, BYTES, GROUP, TILES = 32 * CW * PW, 4 // E, 4 * E, 2 * E
    PITCH, BUFFER = columns_pitch(E, PX, True), columns_bytes(E, PX, True)
    PRODUCTS, OF_WARP, STAGE, AHEAD, SLOT = 4 // E, PX // PW, SLOTS * 16 * THREADS, STAGES - 1, 16 * THREADS
    SUMS, STEPS, WORDS = 4 * TILES, PX // PW // STEP, 4 * FRAGMENTS
    COLUMN_WORDS, QUADS = 2 * PRODUCTS, 2 * BUFFER // 16
    LOADS = COLUMN_WORDS // 4
    mma = mma_bf16 if E == 2 else mma_tf32
    build, fetch, wait = columns_of(E, R, K, F, PX, THREADS, True, False), fetch_of(E, THREADS), cp_async_wait(STAGES - 2)
    further, advance = next_pixels(OF_WARP, STEPS), next_stage(STAGE, STAGES * STAGE)

    @jit(device=True)
    def pair(low, high, kept):
        """Word(s) of two neighbouring channels, zeros where the word(s) `kept` of x are not positive."""
        if E == 2:
            word = bf16x2(low, high)
            if masked:
                word &= greater_bf16x2(kept[0], 0)
            return word, u4(0)
        if masked:
            low = low if bits_float(kept[0]) > 0.0 else 0.0
            high = high if bits_float(kept[1]) > 0.0 else 0.0
        return float_bits(tf32(low)), float_bits(tf32(high))

    @jit(launch_bounds=(THREADS, resident))
    def last_dgrad_kernel(dy, packed, x, dx, M, C, H, W, chunks, filter_blocks):
        """dx[m][c] = Σ_j w[j][c] · D[m][j] (where x[m][c] > 0) for pixels m < M, c < C.

        gemm   C channels × M pixels × R·R·K ≤ 32 columns
        grid   (blocks that share the chunks of PX pixels, ⌈C/(CW·32E)⌉), block 32·CW·PW
        owns   warp: 32·E channels × PX/PW pixels of a chunk, 16 pixels per step
        shared two buffers of columns, PX·(128/E + 16) bytes each; with a mask `stages` steps of 64 bytes per thread
        moves  x and dx once, dy about (1 + 2/F)² times (from L2); needs compute capability 8.0
        """
        shared = cuda.shared.array(0, types.uint32)
        base = byte_address_shared(shared)
        source = byte_address_global(x)
        filters = cuda.local.array(WORDS, u4)
        acc = cuda.local.array(SUMS, f4)
        columns = cuda.local.array(COLUMN_WORDS, u4)
        nothing = cuda.local.array(1, f4)
        nothing[0] = 0.0
        tid = cuda.threadIdx.x
        lane, warp = tid & 31, tid >> 5
        g, t = lane >> 2, lane & 3
        across, down = warp % CW, warp // CW
        block = cuda.blockIdx.y * CW + across
        channel = block * (32 * E) + g * GROUP
        chunk = cuda.blockIdx.x
        stride = cuda.gridDim.x * PX
        slots = base + 2 * BUFFER + tid * 16
        read, write = slots, slots + AHEAD * STAGE
        # Where the next step to fetch begins for this thread, and how many of the chunk's steps are left.
        ahead, left = chunk * PX + down * OF_WARP + 2 * t, STEPS
        if masked:
            for s in range(AHEAD):
                fetch(slots + s * STAGE, source, ahead, M, C, channel)
                ahead, left = further(ahead, left, stride)
        for f in range(FRAGMENTS):
            v = load_4_words(packed, i8((block * FRAGMENTS + f) * 32 + lane) * 16, block < filter_blocks)
            filters[4 * f], filters[4 * f + 1], filters[4 * f + 2], filters[4 * f + 3] = v
        # Columns beyond the last tap are multiplied too, so they must hold zeros.
        i = tid
        while i < QUADS:
            store_words_4(base + i * 16, 0, 0, 0, 0)
            i += THREADS
        cuda.syncthreads()
        build(base, dy, chunk * PX, M, H, W, nothing)
        cuda.syncthreads()
        half = 0
        row = (down * OF_WARP + (lane & 7)) * PITCH + (lane >> 3) * 16
        while chunk < chunks:
            following = chunk + cuda.gridDim.x
            if following < chunks:
                build(base + (BUFFER - half), dy, following * PX, M, H, W, nothing)
            m = chunk * PX + down * OF_WARP + 2 * t
            at, step = base + half + row, 0
            while step < STEPS:
                if masked:
                    wait()
                for u in range(2):
                    for l in range(LOADS):
                        v = ldmatrix_x4(at + (8 * u * PITCH + 64 * l))
                        columns[4 * l], columns[4 * l + 1], columns[4 * l + 2], columns[4 * l + 3] = v
                    for j in range(SUMS):
                        acc[j] = 0.0
                    for s in range(PRODUCTS):
                        for tile in range(TILES):
                            f, a = 4 * (s * TILES + tile), 4 * tile
                            acc[a], acc[a + 1], acc[a + 2], acc[a + 3] = mma(
                                filters[f], filters[f + 1], filters[f + 2], filters[f + 3],
                                columns[2 * s], columns[2 * s + 1], acc[a], acc[a + 1], acc[a + 2], acc[a + 3],
                            )  # fmt: skip
                    for i in range(2):
                        kept = (0, 0, 0, 0)
                        if masked:
                            kept = load_words_4(read + (2 * u + i) * SLOT)
                        pixel = m + (8 * u + i)
                        if E == 2:
                            a, _ = pair(acc[i], acc[i + 2], (kept[0], kept[0]))
                            b, _ = pair(acc[4 + i], acc[4 + i + 2], (kept[1], kept[1]))
                            c, _ = pair(acc[SUMS - 8 + i], acc[SUMS - 8 + i + 2], (kept[2], kept[2]))
                            d, _ = pair(acc[SUMS - 4 + i], acc[SUMS - 4 + i + 2], (kept[3], kept[3]))
                        else:
                            a, b = pair(acc[i], acc[i + 2], (kept[0], kept[1]))
                            c, d = pair(acc[4 + i], acc[4 + i + 2], (kept[2], kept[3]))
                        if (pixel < M) & (channel < C):
                            store_4_words(dx, i8(pixel * C + channel) * BYTES, a, b, c, d)
                if masked:
                    # The slots that are filled now were read a step ago.
                    fetch(write, source, ahead, M, C, channel)
                    read, write = advance(read, slots), advance(write, slots)
                    ahead, left = further(ahead, left, stride)
                m, at, step = m + STEP, at + STEP * PITCH, step + 1
            cuda.syncthreads()
            chunk, half = following, BUFFER - half

    return last_dgrad_kernel


def bind(call: Call, precision: str) -> list[Launch]:
    """dy (N,K,F·H,F·W), w (K,C,R,R)[, x (N,C,H,W)] -> dx (N,C,H,W)."""
    layer, tile, E = last_layer(call), call.tile, word_elements(precision)
    masked = len(call.ins) > 2
    kernel = dgrad_kernel(E, layer.R, layer.K, layer.F, masked, tile.CW, tile.PW, tile.PX, tile.stages, tile.resident)
    chunks, filter_blocks = blocks(layer.pixels, tile.PX), blocks(layer.C, 32 * E)
    sizes = map(np.int32, (layer.pixels, layer.C, layer.H, layer.W, chunks, filter_blocks))
    shared = 2 * columns_bytes(E, tile.PX, True) + (tile.slot_bytes if masked else 0)
    args = (call.ins[0], call.packed, call.ins[2] if masked else call.outs[0], call.outs[0], *sizes)
    return [Launch(kernel, (min(tile.blocks, chunks), grid_y(layer, precision, tile)), tile.threads, args, shared)]


def traffic(call: Call, precision: str) -> list[Traffic]:
    """Bytes of `bind`: dy once per tap of its window and column of blocks, filters once per row of warps, x where it masks."""
    layer, tile = last_layer(call), call.tile
    filters = 512 * FRAGMENTS * blocks(layer.C, 32 * word_elements(precision))
    mask, rows = size(call, "in", 2) if len(call.in_shapes) > 2 else 0, min(tile.blocks, blocks(layer.pixels, tile.PX)) * tile.PW
    dy = 4 // word_elements(precision) * gradient_reads(layer) * grid_y(layer, precision, tile)
    return [Traffic(dy + filters * rows + mask, outputs(call), size(call, "in", 0) + filters + mask)]


def implementation(precision: str) -> Impl:
    """conv_dgrad, upconv_dgrad, or either with a mask, of a last layer in bf16 or tf32."""

    def tile(call: Call, target: Target) -> LastTile:
        return last_tile(last_layer(call), precision, target)

    return Impl(
        bind=lambda call: bind(call, precision),
        supports=lambda call, target: refusal(call, precision),
        tile=tile,
        pack=lambda call: pack_channels_by_columns(call, word_elements(precision)),
        packed=STORE[precision],
        needs=(8, 0),
        traffic=lambda call: traffic(call, precision),
        engine="thin mma",
    )
