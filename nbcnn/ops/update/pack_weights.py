"""Packed weights: packed[i] = Σ_t params[map[t, i]], where a negative index adds nothing.

One launch at the start of every plan writes all copies of weights that an implementation wants in another order, padded,
or with taps summed, so that no copy can be stale. Sums are made in float32 and rounded once, to how the copy is stored.

    pack_weights      params (P), map (n) int32 -> packed (n)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i4, jit
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.case import Case, normal
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.traffic import Traffic, outputs
from nbcnn.ops.ptx.vector import load1_if
from nbcnn.plan.shapes import numel

THREADS = 256
ELEMENTS = 4
"""Elements of one thread, THREADS apart: neighbouring lanes write neighbouring elements, whose sources mostly lie within a few lines."""
TERMS = 4
"""Terms of a sum that are in flight at once, for each element."""


def pack_weights(params: np.ndarray, index: np.ndarray, packed: np.ndarray) -> None:
    """packed (n) = the sums over t of params (P) [index (terms, n) or (n) int32], negative indices adding nothing."""
    packed.fill(0)
    for row in index.reshape(-1, packed.size):
        packed += np.where(row >= 0, np.take(params, row, mode="clip"), 0)


@functools.cache
def pack_kernel(kind: str, terms: int) -> Any:
    """The kernel for `terms` terms an element and a copy stored as `kind`."""
    _, store = scalar_io(kind)
    CHUNK = min(terms, TERMS)
    CHUNKS, INDICES = -(-terms // CHUNK), ELEMENTS * CHUNK

    @jit()
    def pack_weights_kernel(params, index, packed, count):
        """packed[i] = Σ_t params[index[t·count + i]] over the indices that are not negative.

        grid ⌈n/1024⌉, block 256, a thread owns four elements; moves (4·terms + size of an element)·n bytes, and the
        gathered params, which mostly come from L2.
        """
        first = cuda.blockIdx.x * (ELEMENTS * THREADS) + cuda.threadIdx.x
        where = cuda.local.array(INDICES, i4)
        value = cuda.local.array(INDICES, f4)
        total = cuda.local.array(ELEMENTS, f4)
        for j in range(ELEMENTS):
            total[j] = 0.0
        for chunk in range(CHUNKS):
            for t in range(CHUNK):
                row = chunk * CHUNK + t
                for j in range(ELEMENTS):
                    # Beyond the end the last element's index is read again, and its sum not stored.
                    i = min(first + j * THREADS, count - 1)
                    where[ELEMENTS * t + j] = index[min(row, terms - 1) * count + i]
                    if terms % CHUNK != 0 and row >= terms:
                        where[ELEMENTS * t + j] = -1
            for j in range(INDICES):
                value[j] = load1_if(params, where[j], where[j] >= 0)
            for j in range(INDICES):
                total[j % ELEMENTS] += value[j]
        for j in range(ELEMENTS):
            i = first + j * THREADS
            if i < count:
                store(packed, i, total[j])

    return pack_weights_kernel


def bind(call: Call) -> list[Launch]:
    """params (P), map (n) or (terms, n) int32 -> packed (n), stored as its dtype says."""
    (params, index), (packed,) = call.ins, call.outs
    count = numel(call.out_shapes[0])
    kernel = pack_kernel(kinds(call)[1], numel(call.in_shapes[1]) // count)
    return [Launch(kernel, blocks(count, ELEMENTS * THREADS), THREADS, (params, index, packed, np.int32(count)))]


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`, as if no index were negative: the map of a call is not known here, and few of its indices are.

    Whole blocks fetch indices and weights: beyond the end those of the last element again, and of terms whole chunks of indices.
    """
    count = numel(call.out_shapes[0])
    terms = numel(call.in_shapes[1]) // count
    chunk = min(terms, TERMS)
    threads = blocks(count, ELEMENTS * THREADS) * ELEMENTS * THREADS
    gathered = min(numel(call.in_shapes[0]), terms * count)
    return [Traffic(4 * threads * (ceil_div(terms, chunk) * chunk + terms), outputs(call), 4 * (terms * count + gathered))]


HOST, OPS = {"pack_weights": host(pack_weights)}, {"pack_weights": Impl(bind, traffic=traffic)}


def cases(count: int = 1003) -> Iterator[Case]:
    """Weights picked out of `count`, and sums of several of them."""
    w = normal(17, count)
    index = np.random.default_rng(21).integers(-1, count, 777).astype(np.int32)
    yield Case("pack_weights", f"777 of {count}", (w, index), (((777,), "float32"),))
    for terms in (1, 4, 6):
        sums = np.random.default_rng(22).integers(-1, count, (terms, 260)).astype(np.int32)
        yield Case("pack_weights", f"{terms} terms", (w, sums), (((260,), "float32"),), {}, terms)
