"""This module is the epilogue of the mma engine, four channels at a time: bias, ReLU, mask or pooling, then rounding to the stored format.

The product and the sum of partials share it. The functions take float32 values, from shared memory or from partials. `vector`: the number of
channels is a multiple of four, so that four are one access.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, i8, jit, types
from nbcnn.ops.activations.table import EPILOGUES, RELU
from nbcnn.ops.kernel.stored import scalar_io, vector_io, vector_load_if
from nbcnn.ops.ptx.vector import load1_if


@cache
def load_bias(bias: bool) -> Any:
    """Device function (shift, b, n, K): b[n … n+3] into shift[0 … 3]; zeros beyond K, or where there is no bias."""

    @jit(device=True)
    def run(shift, b, n, K):
        for q in range(4):
            shift[q] = load1_if(b, n + q, n + q < K) if bias else 0.0

    return run


@cache
def load_mask(store: str, vector: bool) -> Any:
    """Device function (masks, first, x, target, n, K): x of pixel `target` and channels n … into masks[first …]; zeros outside."""
    load4 = vector_load_if(store)
    load1 = scalar_io(store)[0]

    @jit(device=True)
    def run(masks, first, x, target, n, K):
        at = target * K + n
        inside = (target >= 0) & (n < K)
        if vector:
            masks[first], masks[first + 1], masks[first + 2], masks[first + 3] = load4(x, at, inside)
        else:
            for q in range(4):
                masks[first + q] = load1(x, at + q) if inside & (n + q < K) else 0.0

    return run


@cache
def _put(store: str, vector: bool) -> Any:
    """Device function (values, y, target, n, K): values[0 … 3] to pixel `target`, channels n … of y, where there are such."""
    store4, store1 = vector_io(store)[1], scalar_io(store)[1]

    @jit(device=True)
    def run(values, y, target, n, K):
        at = i8(target) * K + n
        if vector:
            store4(y, at, values[0], values[1], values[2], values[3])
        else:
            for q in range(4):
                if n + q < K:
                    store1(y, at + i8(q), values[q])

    return run


@cache
def finish_pixel(store: str, after: str, mask: bool, vector: bool) -> Any:
    """Device function (values, shift, masks, first, y, target, n, K): four sums of one pixel, finished, to y. masks[first …] as loaded.

    after: "" or one of EPILOGUES.
    """
    put, ACTIVATES, activate = _put(store, vector), after in EPILOGUES, EPILOGUES.get(after, RELU).function

    @jit(device=True)
    def run(values, shift, masks, first, y, target, n, K):
        for q in range(4):
            v = values[q] + shift[q]
            if ACTIVATES:
                v = activate(v)
            if mask:
                v = v if masks[first + q] > 0.0 else 0.0
            values[q] = v
        put(values, y, target, n, K)

    return run


@cache
def finish_window(store: str, vector: bool) -> Any:
    """Device function (patch, shift, y, index, window, n, K): the sums of four pixels of a window, four channels each, to y and index.

    The largest after bias and ReLU, and its place; a window without a positive element gives its first place, a NaN stays.
    """
    put = _put(store, vector)

    @jit(device=True)
    def run(patch, shift, y, index, window, n, K):
        best = cuda.local.array(4, f4)
        places = 0
        for q in range(4):
            largest, place = 0.0, 0
            for t in range(4):
                v = patch[4 * t + q] + shift[q]
                v = 0.0 if v <= 0.0 else v
                if t == 0:
                    largest = v
                else:
                    wins = (not (v <= largest)) & (largest == largest)
                    largest = v if wins else largest
                    place = t if wins else place
            best[q] = largest
            places |= place << 2 * q if n + q < K else 0
        put(best, y, window, n, K)
        index[i8(window) * (K + 3 >> 2) + (n >> 2)] = types.uint8(places)

    return run
