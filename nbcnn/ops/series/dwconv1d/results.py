"""The way back of variant best: a thread's twelve results through shared memory, so that a warp stores elements in a row."""

from __future__ import annotations

import functools
from typing import Any

from nbcnn.gpu.language import jit
from nbcnn.ops.kernel.stored import scalar_io, vector_io
from nbcnn.ops.ptx.shuffle import WARP
from nbcnn.ops.ptx.vector import shared_load4, shared_store4
from nbcnn.ops.series.dwconv1d.sliding import RESULTS, ROWS


@jit(device=True)
def put_results(acc, shared, to):
    """shared[to : to+12] = acc; `to` is a multiple of four."""
    for q in range(RESULTS // 4):
        shared_store4(shared, to + 4 * q, acc[4 * q], acc[4 * q + 1], acc[4 * q + 2], acc[4 * q + 3])


@functools.cache
def store_rows(kind: str, vector: bool, warps: int, pack: int, tile: int) -> Any:
    """A device function with which `warps` warps store 32 staged rows of `tile` elements as `kind`; `vector`: L is a multiple of four.

    store(shared, at, pitch, out, n0, part0, N, C, c, L, tid): row r goes to series n0 + r // pack, tile part0 + r % pack.
    """
    _, store1 = scalar_io(kind)
    _, store4 = vector_io(kind)
    SHIFT, MASK, STEP, THREADS = pack.bit_length() - 1, pack - 1, 4 if vector else 1, WARP * warps
    PIECES = tile // STEP

    @jit(device=True)
    def store(shared, at, pitch, out, n0, part0, N, C, c, L, tid):
        e = tid
        while e < ROWS * PIECES:
            row = e // PIECES
            s = STEP * (e - row * PIECES)
            n = n0 + (row >> SHIFT)
            t = (part0 + (row & MASK)) * tile + s
            if n < N and t < L:
                if vector:
                    a, b, c_, d = shared_load4(shared, at + row * pitch + s)
                    store4(out, (n * C + c) * L + t, a, b, c_, d)
                else:
                    store1(out, (n * C + c) * L + t, shared[at + row * pitch + s])
            e += THREADS

    return store
