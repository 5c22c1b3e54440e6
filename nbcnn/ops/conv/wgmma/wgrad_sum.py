"""The second launch of a weight gradient: add the parts in order, and bring the sums into (K, C, R, S).

Parts are [z][m][tap][c], channels c fastest, as blocks of the product store them. For conv_wgrad m is the filter. For upconv_wgrad the
operands have changed places, so m is the input channel and c the filter; and the 16 sums dG of a 4×4 window of stride 2 are folded into
dW = Sᵀ dG S:  dW[a][b] = Σ dG[u][v] over u in {2 − a, 3 − a}, v in {2 − b, 3 − b}.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from nbcnn.cuda import cuda, f4, i4, i8, jit, u4
from nbcnn.ops.call import Launch, blocks
from nbcnn.ops.conv.splitk import sum_of_planes

WIDTH = 32
"""Channels c of a block: 128 bytes of every part."""
MOST_TAPS = 256
_ROWS = 32
_LANES = 32
_BIAS_THREADS = 256


@cache
def sum_parts(taps: int, fold: bool) -> Any:
    add_quads = sum_of_planes(4)
    LINES, QUADS, PITCH = lines_of_a_block(taps), WIDTH // 4, WIDTH + 1
    SUMS, STAGED = LINES * taps * QUADS, LINES * taps * PITCH
    WRITTEN = LINES * WIDTH * (9 if fold else taps)
    THREADS = threads_of_a_block(taps)

    @jit(launch_bounds=(THREADS, 1))
    def sum_parts_kernel(partials, dw, M, C, planes):
        """dw = Σ_z partials[z], reordered from [m][tap][c] to (m, c, tap), or folded to (c, m, 3×3).

        grid: (blocks of LINES rows m, blocks of 32 channels c); owns: a thread four channels of one tap at a time.
        shared: 4·LINES·taps·33 bytes, where a block's sums change their order; moves: 4·M·taps·C·planes + 4·dw bytes.
        """
        shared = cuda.shared.array(STAGED, f4)
        total = cuda.local.array(4, f4)
        t = i4(cuda.threadIdx.x)
        m0, c0 = i4(i4(cuda.blockIdx.x) * i4(LINES)), i4(i4(cuda.blockIdx.y) * i4(WIDTH))
        e = t
        while e < i4(SUMS):
            row = i4(u4(e) // u4(QUADS))
            quad = i4((e - row * i4(QUADS)) * i4(4))
            wanted = m0 + i4(u4(row) // u4(taps)) < M and c0 + quad < C
            at = i4((m0 * i4(taps) + row) * C + c0 + quad)
            add_quads(total, partials, at, i4(M * i4(taps)) * C, i4(0), i4(1), planes if wanted else i4(0))
            for q in range(4):
                shared[row * i4(PITCH) + quad + i4(q)] = total[q]
            e = i4(e + i4(THREADS))
        cuda.syncthreads()
        e = t
        while e < i4(WRITTEN):
            if fold:
                pair = i4(u4(e) // u4(9))
                tap = i4(e - pair * i4(9))
                c = i4(u4(pair) // u4(LINES))
                line = i4(pair - c * i4(LINES))
                a = i4(u4(tap) // u4(3))
                b = i4(tap - a * i4(3))
                first = i4((line * i4(16) + (i4(2) - a) * i4(4) + i4(2) - b) * i4(PITCH) + c)
                upper = shared[first] + shared[first + i4(PITCH)]
                lower = shared[first + i4(4 * PITCH)] + shared[first + i4(5 * PITCH)]
                if m0 + line < M and c0 + c < C:
                    dw[(i8(c0 + c) * i8(M) + i8(m0 + line)) * i8(9) + i8(tap)] = upper + lower
            else:
                pair = i4(u4(e) // u4(taps))
                tap = i4(e - pair * i4(taps))
                line = i4(u4(pair) // u4(WIDTH))
                c = i4(pair - line * i4(WIDTH))
                if m0 + line < M and c0 + c < C:
                    dw[(i8(m0 + line) * i8(C) + i8(c0 + c)) * i8(taps) + i8(tap)] = shared[(line * i4(taps) + tap) * i4(PITCH) + c]
            e = i4(e + i4(THREADS))

    return sum_parts_kernel


@cache
def sum_bias() -> Any:
    add_planes = sum_of_planes(1)
    TEAMS = _BIAS_THREADS // _LANES

    @jit()
    def sum_bias_kernel(partials, db, count, planes):
        """db[i] = Σ_z partials[z][i]. grid: blocks of 32 elements; team j of eight adds the parts j, j + 8, …, then the teams are added in order."""
        shared = cuda.shared.array(_BIAS_THREADS, f4)
        total = cuda.local.array(1, f4)
        t = i4(cuda.threadIdx.x)
        i = i4(i4(cuda.blockIdx.x) * i4(_LANES) + (t & i4(_LANES - 1)))
        add_planes(total, partials, i, count, i4(t >> i4(5)), i4(TEAMS), planes if i < count else i4(0))
        shared[t] = total[0]
        cuda.syncthreads()
        if t < i4(_LANES) and i < count:
            made = shared[t]
            for team in range(1, TEAMS):
                made += shared[t + i4(team * _LANES)]
            db[i] = made

    return sum_bias_kernel


def lines_of_a_block(taps: int) -> int:
    """Rows m of a block of `sum_parts_kernel`: enough for about one sum a thread."""
    return max(1, _ROWS // taps)


def threads_of_a_block(taps: int) -> int:
    """Threads of a block of `sum_parts_kernel`: one for every four sums, in whole warps, at most 256."""
    return min(256, -(-lines_of_a_block(taps) * taps * WIDTH // 4 // 32) * 32)


def launch_sum(partials: Any, dw: Any, M: int, C: int, taps: int, planes: int, fold: bool) -> Launch:
    """Launch of `sum_parts_kernel`."""
    grid = (blocks(M, lines_of_a_block(taps)), blocks(C, WIDTH))
    return Launch(sum_parts(taps, fold), grid, threads_of_a_block(taps), (partials, dw, np.int32(M), np.int32(C), np.int32(planes)))


def launch_sum_bias(partials: Any, db: Any, count: int, planes: int) -> Launch:
    """Launch of `sum_bias_kernel`."""
    return Launch(sum_bias(), blocks(count, _LANES), _BIAS_THREADS, (partials, db, np.int32(count), np.int32(planes)))
