"""Weight and bias gradients of a last layer on tensor cores, behind an upsampling or not.

    G[j][c] = Σ_m D[m][j] · x[m][c]      (columns j ≤ 32 of dy: last_columns.py)
    dw[k,c,R−1−r,R−1−s] = G[(r,s,k)][c],   db[k] = Σ dy, the sum of the middle tap's column

x is read once, past registers of a thread that hold 32 columns by 4·E of its channels. A lane's 16 bytes are channels of one pixel;
the product wants pixels in a word, and byte permutations of two neighbouring pixels' words give that in bfloat16 (in tf32 a word is a pixel).
Every block leaves partial sums of its pixels in scratch, which the second kernel of thin/wgrad.py adds in order.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i8, jit, types, u4
from nbcnn.gpu.target import Target
from nbcnn.ops.conv.thin.wgrad import IN_FLIGHT, LANES, total_kernel, total_traffic
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
from nbcnn.ops.conv.thin_mma.last_shape import LastLayer, last_layer, refusal, word_elements
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks
from nbcnn.ops.kernel.loops import power_of_two
from nbcnn.ops.kernel.traffic import Traffic, size
from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared
from nbcnn.ops.ptx.cp_async import cp_async_wait
from nbcnn.ops.ptx.cvt import bits_float, float_bits
from nbcnn.ops.ptx.ldmatrix import ldmatrix_x4
from nbcnn.ops.ptx.mma import mma_bf16, mma_tf32
from nbcnn.ops.ptx.packed import permute_bytes
from nbcnn.ops.ptx.shared import load_words_1, load_words_4, store_words_1, store_words_4
from nbcnn.ops.ptx.shuffle import warp_sum
from nbcnn.ops.ptx.vector import store4

LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632
"""Selectors of `prmt`: the lower (upper) halves of two words, the first word's below."""


@functools.cache
def partial_kernel(E: int, R: int, K: int, F: int, bias: bool, CW: int, PW: int, PX: int, STAGES: int, resident: int) -> Any:
    """The kernel for E elements per word, K filters of R×R behind an upsampling by F, and a tile."""
    THREADS, GROUP, GN = 32 * CW * PW, 4 * E, R * R * K
    PITCH, BUFFER = columns_pitch(E, PX, False), columns_bytes(E, PX, False)
    OF_WARP, STAGE, AHEAD, SLOT = PX // PW, SLOTS * 16 * THREADS, STAGES - 1, 16 * THREADS
    SUMS, STEPS, BESIDE = 8 * GROUP, PX // PW // STEP, 32 * CW
    PRODUCTS, QUADS, TASKS, SHARE = 2 // E, 2 * BUFFER // 16, -(-PX * K // THREADS), PX // 32
    mma = mma_bf16 if E == 2 else mma_tf32
    build, fetch, wait = columns_of(E, R, K, F, PX, THREADS, False, bias), fetch_of(E, THREADS), cp_async_wait(STAGES - 2)
    further, advance = next_pixels(OF_WARP, STEPS), next_stage(STAGE, STAGES * STAGE)
    wait_all = cp_async_wait(0)

    @jit(launch_bounds=(THREADS, resident))
    def last_partial_kernel(x, dy, partial, M, C, H, W, chunks, row):
        """partial[block][j][c] = Σ_m D[m][j] · x[m][c], and behind it Σ dy[k], over the block's pixels.

        gemm   R·R·K ≤ 32 columns × C channels × M pixels
        grid   (blocks that share the chunks of PX pixels, ⌈C/(CW·32E)⌉), block 32·CW·PW
        owns   warp: 32 columns × 32·E channels × PX/PW pixels of a chunk, 16 pixels per step
        shared two buffers of columns, 32·(4·PX/E + 16) bytes each, and `stages` steps of 64 bytes per thread
        moves  x once, dy about (1 + 2/F)² times (from L2), 4·row bytes of partial sums per block; needs compute capability 8.0
        """
        shared = cuda.shared.array(0, types.uint32)
        base = byte_address_shared(shared)
        source = byte_address_global(x)
        acc = cuda.local.array(SUMS, f4)
        words = cuda.local.array(16, u4)
        columns = cuda.local.array(8, u4)
        total = cuda.local.array(TASKS, f4)
        for j in range(SUMS):
            acc[j] = 0.0
        for j in range(TASKS):
            total[j] = 0.0
        tid = cuda.threadIdx.x
        lane, warp = tid & 31, tid >> 5
        g, t = lane >> 2, lane & 3
        across, down = warp % CW, warp // CW
        first = (cuda.blockIdx.y * CW + across) * (32 * E)
        channel = first + g * GROUP
        chunk = cuda.blockIdx.x
        stride = cuda.gridDim.x * PX
        slots = base + 2 * BUFFER + tid * 16
        read, write = slots, slots + AHEAD * STAGE
        # Where the next step to fetch begins for this thread, and how many of the chunk's steps are left.
        ahead, left = chunk * PX + down * OF_WARP + 2 * t, STEPS
        for s in range(AHEAD):
            fetch(slots + s * STAGE, source, ahead, M, C, channel)
            ahead, left = further(ahead, left, stride)
        # Rows beyond the last column are multiplied too; what they give is not stored, but must not trap as NaN in a sum.
        i = tid
        while i < QUADS:
            store_words_4(base + i * 16, 0, 0, 0, 0)
            i += THREADS
        cuda.syncthreads()
        build(base, dy, chunk * PX, M, H, W, total)
        cuda.syncthreads()
        half = 0
        # Matrices of A: eight columns, the next eight, and both again four words further.
        row_at = (lane & 15) * PITCH + (lane >> 4) * 16 + down * (OF_WARP * 4 // E)
        while chunk < chunks:
            following = chunk + cuda.gridDim.x
            if following < chunks:
                build(base + (BUFFER - half), dy, following * PX, M, H, W, total)
            at, step = base + half + row_at, 0
            while step < STEPS:
                wait()
                for v in range(SLOTS):
                    w = load_words_4(read + v * SLOT)
                    words[4 * v], words[4 * v + 1], words[4 * v + 2], words[4 * v + 3] = w
                # The slots that are filled now were read a step ago.
                fetch(write, source, ahead, M, C, channel)
                for s in range(PRODUCTS):
                    for tile in range(2):
                        v = ldmatrix_x4(at + (16 * tile * PITCH + 32 * s))
                        columns[4 * tile], columns[4 * tile + 1], columns[4 * tile + 2], columns[4 * tile + 3] = v
                    for n in range(GROUP):
                        if E == 2:
                            chosen = u4(HIGH_HALVES) if n % 2 else u4(LOW_HALVES)
                            b0 = permute_bytes(words[n // 2], words[4 + n // 2], chosen)
                            b1 = permute_bytes(words[8 + n // 2], words[12 + n // 2], chosen)
                        else:
                            b0, b1 = words[8 * s + n], words[8 * s + 4 + n]
                        for tile in range(2):
                            a, c = 4 * tile, 4 * (tile * GROUP + n)
                            acc[c], acc[c + 1], acc[c + 2], acc[c + 3] = mma(
                                columns[a], columns[a + 1], columns[a + 2], columns[a + 3], b0, b1, acc[c], acc[c + 1], acc[c + 2], acc[c + 3]
                            )
                read, write = advance(read, slots), advance(write, slots)
                ahead, left = further(ahead, left, stride)
                at, step = at + STEP * 4 // E, step + 1
            cuda.syncthreads()
            chunk, half = following, BUFFER - half

        wait_all()
        cuda.syncthreads()
        # Warps of the same channels leave their sums in shared memory; the first of them adds, in order.
        mine = base + (across * 32 + lane) * 4
        if down > 0:
            for j in range(SUMS):
                store_words_1(mine + ((down - 1) * SUMS + j) * (4 * BESIDE), float_bits(acc[j]))
        cuda.syncthreads()
        begin = i8(cuda.blockIdx.x) * row
        if down == 0:
            for p in range(PW - 1):
                for j in range(SUMS):
                    acc[j] += bits_float(load_words_1(mine + (p * SUMS + j) * 4 * BESIDE))
            for tile in range(2):
                for below in range(2):
                    for i in range(2):
                        column, c = 16 * tile + 8 * below + g, first + 2 * GROUP * t + GROUP * i
                        if (column < GN) & (c < C):
                            for q in range(E):
                                e = 4 * (tile * GROUP + 4 * q) + 2 * below + i
                                store4(partial, begin + i8(column * C + c + 4 * q), acc[e], acc[e + 4], acc[e + 8], acc[e + 12])
        if bias and cuda.blockIdx.y == 0:
            cuda.syncthreads()
            for j in range(TASKS):
                value = warp_sum(total[j])
                if lane == 0:
                    store_words_1(base + (j * (THREADS // 32) + warp) * 4, float_bits(value))
            cuda.syncthreads()
            if tid < K:
                value = 0.0
                for j in range(SHARE):
                    value += bits_float(load_words_1(base + (tid * SHARE + j) * 4))
                partial[begin + i8(GN * C + tid)] = value

    return last_partial_kernel


def _row(layer: LastLayer, bias: bool) -> int:
    """Floats of a block's partial sums, a multiple of four."""
    return layer.columns * layer.C + (4 if bias else 0)


def _blocks(call: Call) -> int:
    """Blocks that share the pixels."""
    return min(call.tile.blocks, blocks(last_layer(call).pixels, call.tile.PX))


def scratch(call: Call) -> int:
    """Bytes of the partial sums."""
    return 4 * _blocks(call) * _row(last_layer(call), len(call.out_shapes) > 1)


def bind(call: Call, precision: str) -> list[Launch]:
    """x (N,C,H,W), dy (N,K,F·H,F·W) -> dw (K,C,R,R)[, db (K)]."""
    layer, tile, E = last_layer(call), call.tile, word_elements(precision)
    bias, rows = len(call.outs) > 1, _blocks(call)
    row, partial = _row(layer, bias), call.scratch.view(np.float32)
    kernel = partial_kernel(E, layer.R, layer.K, layer.F, bias, tile.CW, tile.PW, tile.PX, tile.stages, tile.resident)
    sizes = map(np.int32, (layer.pixels, layer.C, layer.H, layer.W, blocks(layer.pixels, tile.PX), row))
    reduced = 4 * 32 * tile.CW * (tile.PW - 1) * 32 * E
    shared = max(2 * columns_bytes(E, tile.PX, False) + tile.slot_bytes, reduced)
    used = layer.columns * layer.C + (layer.K if bias else 0)
    lanes = min(LANES, power_of_two(-(-rows // IN_FLIGHT)))
    numbers = map(np.int32, (layer.C, row, rows, used))
    return [
        Launch(kernel, (rows, grid_y(layer, precision, tile)), tile.threads, (*call.ins, partial, *sizes), shared),
        Launch(
            total_kernel(layer.R, layer.R, layer.K, False, False, lanes),
            blocks(used, 32),
            32 * lanes,
            (partial, call.outs[0], call.outs[-1], *numbers),
        ),
    ]


def traffic(call: Call, precision: str) -> list[Traffic]:
    """Bytes of `bind`: x once, dy once per tap of its window and column of blocks, the blocks' sums."""
    layer, rows = last_layer(call), _blocks(call)
    x, sums = size(call, "in", 0), layer.columns * layer.C
    dy = 4 // word_elements(precision) * gradient_reads(layer) * grid_y(layer, precision, call.tile)
    partials = 4 * rows * (sums + (layer.K if len(call.out_shapes) > 1 else 0))
    return [Traffic(x + dy, partials, x + size(call, "in", 1)), total_traffic(call, sums, sums, rows, False)]


def implementation(precision: str) -> Impl:
    """conv_wgrad or upconv_wgrad of a last layer in bf16 or tf32."""

    def tile(call: Call, target: Target) -> LastTile:
        return last_tile(last_layer(call), precision, target)

    return Impl(
        bind=lambda call: bind(call, precision),
        scratch=scratch,
        supports=lambda call, target: refusal(call, precision),
        tile=tile,
        needs=(8, 0),
        traffic=lambda call: traffic(call, precision),
        engine="thin mma",
    )
