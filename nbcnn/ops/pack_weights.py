"""Packed weights: packed[i] = Σ_t params[map[t, i]], where a negative index adds nothing.

One launch at the start of every plan writes all copies of weights that an implementation wants in another order, padded,
or with taps summed, so that no copy can be stale. Sums are made in float32 and rounded once, to how the copy is stored.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.cuda import cuda, f4, i4, jit
from nbcnn.ops.call import Call, Impl, Launch, blocks
from nbcnn.ops.ptx.vector import load1_if, load_int4
from nbcnn.ops.stored import kinds, scalar_io, vector_io
from nbcnn.shapes import numel

THREADS = 256
WIDTH = 4
"""Neighbours that a thread owns, where the count is a multiple of them."""
TERMS = 4
"""Terms of a sum that are in flight at once, for each element."""


def pack_weights(params: np.ndarray, index: np.ndarray, packed: np.ndarray) -> None:
    """packed (n) = the sums over t of params (P) [index (terms, n) or (n) int32], negative indices adding nothing."""
    packed.fill(0)
    for row in index.reshape(-1, packed.size):
        packed += np.where(row >= 0, np.take(params, row, mode="clip"), 0)


@functools.cache
def pack_kernel(kind: str, terms: int, width: int) -> Any:
    """The kernel for `terms` terms an element, `width` (4 or 1) elements a thread, and a copy stored as `kind`."""
    (_, store), (_, store4) = scalar_io(kind), vector_io(kind)
    CHUNK = min(terms, TERMS)
    CHUNKS, PLACES = -(-terms // CHUNK), width * CHUNK

    @jit()
    def pack_weights_kernel(params, index, packed, count):
        """packed[i] = Σ_t params[index[t·count + i]] over the indices that are not negative.

        grid ceil(n / (256·width)), block 256, a thread owns `width` neighbours; moves (4·terms + size of an element)·n
        bytes, and the gathered params, which mostly come from L2.
        """
        i = i4(i4(cuda.grid(1)) * i4(width))
        if i >= count:
            return
        where = cuda.local.array(PLACES, i4)
        value = cuda.local.array(PLACES, f4)
        total = cuda.local.array(width, f4)
        for j in range(width):
            total[j] = f4(0)
        for chunk in range(CHUNKS):
            for t in range(CHUNK):
                row = i4(chunk * CHUNK + t)
                if width == 4:
                    at = i4(min(row, i4(terms - 1)) * count + i)
                    where[4 * t], where[4 * t + 1], where[4 * t + 2], where[4 * t + 3] = load_int4(index, at)
                else:
                    where[t] = index[i4(min(row, i4(terms - 1)) * count + i)]
                if terms % CHUNK != 0 and row >= i4(terms):
                    for j in range(width):
                        where[width * t + j] = i4(-1)
            for j in range(PLACES):
                value[j] = load1_if(params, where[j], where[j] >= i4(0))
            for j in range(PLACES):
                total[j % width] += value[j]
        if width == 4:
            store4(packed, i, total[0], total[1], total[2], total[3])
        else:
            store(packed, i, total[0])

    return pack_weights_kernel


def bind(call: Call) -> list[Launch]:
    """params (P), map (n) or (terms, n) int32 -> packed (n), stored as its dtype says."""
    (params, index), (packed,) = call.ins, call.outs
    count = numel(call.out_shapes[0])
    terms, width = numel(call.in_shapes[1]) // count, WIDTH if count % WIDTH == 0 else 1
    kernel = pack_kernel(kinds(call)[1], terms, width)
    return [Launch(kernel, blocks(count, width * THREADS), THREADS, (params, index, packed, np.int32(count)))]


IMPL = Impl(bind)
