"""The second launch of a weight gradient: add the parts in order, and bring the sums into (K, C, R, S).

Parts are [z][m][tap][c], channels c fastest, as blocks of the product store them (C of them, or more in rows of whole quads). For
conv_wgrad m is the filter. For upconv_wgrad the operands have changed places, so m is the input channel and c the filter; and the
16 sums dG of a 4×4 window of stride 2 are folded into dW = Sᵀ dG S:  dW[a][b] = Σ dG[u][v] over u in {2 − a, 3 − a}, v in {2 − b, 3 − b}.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i8, jit
from nbcnn.ops.conv.frame.split import sum_of_partials
from nbcnn.ops.kernel.call import Call, Launch, blocks
from nbcnn.ops.kernel.traffic import Traffic, once, outputs

WIDTH = 32
"""Channels c of a block: 128 bytes of every part."""
MOST_TAPS = 256
_ROWS = 32
_LANES = 32


@cache
def sum_parts(taps: int, fold: bool, bias: bool) -> Any:
    add_quads, add_single = sum_of_partials(4), sum_of_partials(1)
    LINES, QUADS, PITCH = lines_of_a_block(taps), WIDTH // 4, WIDTH + 1
    SUMS, STAGED = LINES * taps * QUADS, max(LINES * taps * PITCH, threads_of_a_block(taps))
    WRITTEN = LINES * WIDTH * (9 if fold else taps)
    THREADS = threads_of_a_block(taps)
    WARPS = THREADS // _LANES

    @jit(device=True)
    def sum_bias(partials_b, db, count, parts, block, t, shared, total):
        """db[i] = Σ_z partials_b[z][i] of 32 elements; warp j adds the parts j, j + WARPS, …, then the warps' sums are added in order."""
        i = block * _LANES + (t & _LANES - 1)
        add_single(total, partials_b, i, count, t >> 5, WARPS, parts if i < count else 0)
        shared[t] = total[0]
        cuda.syncthreads()
        if t < _LANES and i < count:
            made = shared[t]
            for warp in range(1, WARPS):
                made += shared[t + warp * _LANES]
            db[i] = made

    @jit(launch_bounds=(THREADS, 1))
    def sum_parts_kernel(partials, dw, M, C, pitch, parts, partials_b, db, count_b, parts_b):
        """dw = Σ_z partials[z], reordered from [m][tap][c] to (m, c, tap), or folded to (c, m, 3×3); db = Σ_z partials_b[z].

        grid: (blocks of LINES rows m, then those of db, blocks of 32 channels c); owns: per thread four channels of one tap at a time.
        shared: 4·LINES·taps·33 bytes, where a block's sums change their order; moves: 4·M·taps·C·parts + 4·dw bytes.
        """
        shared = cuda.shared.array(STAGED, f4)
        total = cuda.local.array(4, f4)
        t = cuda.threadIdx.x
        row_blocks = (M + (LINES - 1)) // LINES
        if bias and cuda.blockIdx.x >= row_blocks:
            block = (cuda.blockIdx.x - row_blocks) * cuda.gridDim.y + cuda.blockIdx.y
            sum_bias(partials_b, db, count_b, parts_b, block, t, shared, total)
            return
        m0, c0 = cuda.blockIdx.x * LINES, cuda.blockIdx.y * WIDTH
        e = t
        while e < SUMS:
            row = e // QUADS
            quad = (e - row * QUADS) * 4
            wanted = m0 + row // taps < M and c0 + quad < C
            at = (m0 * taps + row) * pitch + c0 + quad
            add_quads(total, partials, at, M * taps * pitch, 0, 1, parts if wanted else 0)
            for q in range(4):
                shared[row * PITCH + quad + q] = total[q]
            e += THREADS
        cuda.syncthreads()
        e = t
        while e < WRITTEN:
            if fold:
                pair = e // 9
                tap = e - pair * 9
                c = pair // LINES
                line = pair - c * LINES
                a = tap // 3
                b = tap - a * 3
                first = (line * 16 + (2 - a) * 4 + 2 - b) * PITCH + c
                upper = shared[first] + shared[first + PITCH]
                lower = shared[first + 4 * PITCH] + shared[first + 5 * PITCH]
                if m0 + line < M and c0 + c < C:
                    dw[(i8(c0 + c) * M + (m0 + line)) * 9 + tap] = upper + lower
            else:
                pair = e // taps
                tap = e - pair * taps
                line = pair // WIDTH
                c = pair - line * WIDTH
                if m0 + line < M and c0 + c < C:
                    dw[(i8(m0 + line) * C + (c0 + c)) * taps + tap] = shared[(line * taps + tap) * PITCH + c]
            e += THREADS

    return sum_parts_kernel


def lines_of_a_block(taps: int) -> int:
    """Rows m of a block of `sum_parts_kernel`: enough for about one sum per thread."""
    return max(1, _ROWS // taps)


def threads_of_a_block(taps: int) -> int:
    """Threads of a block of `sum_parts_kernel`: one for every four sums, in whole warps, at most 256."""
    return min(256, -(-lines_of_a_block(taps) * taps * WIDTH // 4 // 32) * 32)


def launch_sum(
    partials: Any,
    dw: Any,
    M: int,
    C: int,
    taps: int,
    parts: int,
    fold: bool,
    partials_b: Any,
    db: Any,
    count_b: int,
    parts_b: int,
    pitch: int | None = None,
) -> Launch:
    """Launch of `sum_parts_kernel`; db is None where no bias gradient is wanted. pitch: from one tap of the parts to the next, C or more."""
    across = blocks(C, WIDTH)
    bias_blocks = 0 if db is None else blocks(blocks(count_b, _LANES), across)
    grid = (blocks(M, lines_of_a_block(taps)) + bias_blocks, across)
    args = (partials, dw, *map(np.int32, (M, C, pitch or C, parts)), partials_b, dw if db is None else db, *map(np.int32, (count_b, parts_b)))
    return Launch(sum_parts(taps, fold, db is not None), grid, threads_of_a_block(taps), args)


def sum_traffic(call: Call, partials: int) -> Traffic:
    """Bytes of `launch_sum` for a call of a weight gradient, with `partials` bytes of parts, those of the bias included."""
    return once(partials, outputs(call))
