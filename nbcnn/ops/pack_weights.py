"""Packed weights: packed[i] = params[map[i]], or 0 where map[i] < 0.

One launch at the start of every plan writes all copies of weights that an implementation wants in another order or
padded, so that no copy can be stale.
"""

from __future__ import annotations

import numpy as np

from nbcnn.cuda import cuda, f4, i4, jit
from nbcnn.ops.call import Call, Impl, Launch, blocks

THREADS = 256
PER_THREAD = 4


def pack_weights(params: np.ndarray, index: np.ndarray, packed: np.ndarray) -> None:
    """packed (n) = params (P) [index (n) int32], 0 where the index is negative."""
    # "clip" makes a negative index 0, and lets NumPy write into `packed` without a buffer.
    np.take(params, index, out=packed, mode="clip")
    packed[index < 0] = 0


@jit()
def pack_weights_kernel(params, index, packed, count):
    """packed[i] = params[index[i]] if index[i] >= 0 else 0.

    grid ceil(n / 1024), block 256, a thread owns four elements 256 apart (four independent reads in flight);
    moves 12·n bytes, of which the reads of params mostly come from L2.
    """
    first = i4(i4(cuda.blockIdx.x) * i4(PER_THREAD * THREADS) + i4(cuda.threadIdx.x))
    for j in range(PER_THREAD):
        i = i4(first + i4(j) * i4(THREADS))
        if i < count:
            source = index[i]
            packed[i] = params[source] if source >= i4(0) else f4(0)


def bind(call: Call) -> list[Launch]:
    (params, index), (packed,) = call.ins, call.outs
    (count,) = call.out_shapes[0]
    return [Launch(pack_weights_kernel, blocks(count, PER_THREAD * THREADS), THREADS, (params, index, packed, np.int32(count)))]


IMPL = Impl(bind)
