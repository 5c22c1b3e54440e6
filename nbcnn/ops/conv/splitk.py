"""Split-K: several blocks share one output tile, each over a part of GK; then their partial results are added in order.

A GEMM with few output tiles (a small batch; any weight gradient) leaves most of the GPU idle. Cutting GK into `split`
parts gives every multiprocessor work, at the price of writing `split` partial results to scratch and reading them back.
Float atomics would save the second kernel, but add in another order each time; here part 0 comes first, always.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.cuda import cuda, i4, i8, jit
from nbcnn.ops.call import Launch, blocks

THREADS = 256


@jit(device=True)
def sum_of_planes(partials, at, count, planes):
    """partials[at] + partials[at + count] + …, `planes` terms, in this order."""
    total = partials[at]
    for z in range(i4(1), planes):
        total += partials[i8(z) * i8(count) + i8(at)]
    return total


@functools.cache
def sum_planes(bias: bool) -> Any:
    @jit()
    def sum_planes_kernel(partials, b, y, count, GN, planes):
        """y[i] = Σ_z partials[z·count + i] (+ b[i mod GN]).

        grid: one thread an element; moves: 4·count·(planes + 1) bytes.
        """
        i = i4(cuda.grid(1))
        if i < count:
            total = sum_of_planes(partials, i, count, planes)
            if bias:
                total += b[i % GN]
            y[i] = total

    return sum_planes_kernel


@functools.cache
def sum_filters(taps: int, bias: bool) -> Any:
    @jit()
    def sum_filters_kernel(partials, partials_b, dw, db, K, C, planes):
        """dw[k,c,r,s] = Σ_z partials[z][k][(r,s),c], and db[k] = Σ_z partials_b[z][k].

        grid: one thread an element in the order of the partials; moves: 4·K·C·R·S·(planes + 1) bytes.
        """
        i = i4(cuda.grid(1))
        row = i4(taps) * C
        count = K * row
        if i < count:
            k = i // row
            tap = (i - k * row) // C
            c = i - k * row - tap * C
            dw[(k * C + c) * i4(taps) + tap] = sum_of_planes(partials, i, count, planes)
        elif bias and i < count + K:
            db[i - count] = sum_of_planes(partials_b, i - count, K, planes)

    return sum_filters_kernel


def launch_sum_planes(partials: Any, b: Any, y: Any, count: int, GN: int, planes: int) -> Launch:
    """Launch of `sum_planes_kernel`; b is None, or GN values to add to each row of y."""
    args = (partials, y if b is None else b, y, np.int32(count), np.int32(GN), np.int32(planes))
    return Launch(sum_planes(b is not None), blocks(count, THREADS), THREADS, args)


def launch_sum_filters(partials: Any, partials_b: Any, dw: Any, db: Any, K: int, C: int, taps: int, planes: int) -> Launch:
    """Launch of `sum_filters_kernel`; db is None where no bias gradient is wanted (partials_b is then not read)."""
    args = (partials, partials_b, dw, dw if db is None else db, np.int32(K), np.int32(C), np.int32(planes))
    return Launch(sum_filters(taps, db is not None), blocks(K * C * taps + K, THREADS), THREADS, args)
