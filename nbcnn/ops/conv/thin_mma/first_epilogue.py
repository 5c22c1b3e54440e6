"""This module is the epilogue of a first layer's forward kernel, a window a lane: ReLU, 2×2 maximum with its argmax, rounding, stores.

A lane holds the 4 pixels of a window for 4·E neighbouring filters: values[pixel · 4·E + filter], pixel = 2·row + column.
Pooling compares what would be stored, rounded, as pooling after the convolution would.
"""

from __future__ import annotations

import functools
from typing import Any

from nbcnn.gpu.language import cuda, i8, jit, types, u4
from nbcnn.ops.activations.table import applied
from nbcnn.ops.ptx.cvt import bf16x2, bits_float, float_bits, tf32
from nbcnn.ops.ptx.packed import greater_bf16x2, max_bf16x2, relu_bf16x2
from nbcnn.ops.ptx.words import load_4_words, load_half, load_word, store_4_words, store_half

u1, u2 = types.uint8, types.uint16


@functools.cache
def pooled_bf16() -> Any:
    """Device function (out, values) -> 16 bits of places: the maxima of 8 filters as four words, two filters at a time."""

    @jit(device=True)
    def run(out, values):
        places = u4(0)
        for j in range(4):
            a = relu_bf16x2(values[2 * j], values[2 * j + 1])
            b = relu_bf16x2(values[8 + 2 * j], values[9 + 2 * j])
            c = relu_bf16x2(values[16 + 2 * j], values[17 + 2 * j])
            d = relu_bf16x2(values[24 + 2 * j], values[25 + 2 * j])
            upper, lower = max_bf16x2(a, b), max_bf16x2(c, d)
            out[j] = max_bf16x2(upper, lower)
            row = greater_bf16x2(lower, upper)
            column = (greater_bf16x2(d, c) & row) | (greater_bf16x2(b, a) & ~row)
            # Even bits say the column, odd bits the row; of them two for each filter are kept, where the filters before left room.
            both = (column & 0x55555555) | (row & 0xAAAAAAAA)
            places |= both & 0x00030003 << 4 * j
        return (places & 0xFFFF) | (places >> 14)

    return run


@functools.cache
def pooled_tf32() -> Any:
    """Device function (out, values) -> 8 bits of places: the maxima of 4 filters.

    The two lowest bits of a value, which tf32 does not keep, carry 3 − place: one maximum finds both, and of equals the first.
    """

    @jit(device=True)
    def run(out, values):
        places = u4(0)
        for j in range(4):
            a = bits_float(float_bits(max(values[j], 0.0)) | 3)
            b = bits_float((float_bits(values[4 + j]) & 0xFFFFFFFC) | 2)
            c = bits_float((float_bits(values[8 + j]) & 0xFFFFFFFC) | 1)
            d = bits_float(float_bits(values[12 + j]) & 0xFFFFFFFC)
            best = max(max(a, b), max(c, d))
            out[j] = float_bits(tf32(best))
            places |= (float_bits(best) & 3) << 2 * j
        return places ^ 0xFF

    return run


@functools.cache
def pooled(E: int, whole: bool) -> Any:
    """Device function (values, y, index, n, p, q, k, P, Q, K): the window (p,q) of P×Q, filters from k on; whole: K is a multiple of 4·E."""
    FILTERS = 4 * E
    reduce = pooled_bf16() if E == 2 else pooled_tf32()
    put = stores(E, whole)

    @jit(device=True)
    def run(values, y, index, n, p, q, k, P, Q, K):
        out = cuda.local.array(4, u4)
        places = reduce(out, values)
        if p < P and q < Q and k < K:
            pixel = (n * P + p) * Q + q
            put(y, pixel, k, K, out)
            byte = i8(pixel) * ((K + 3) >> 2) + (k >> 2)
            if whole and E == 2:
                store_half(index, byte, places)
            else:
                for i in range(FILTERS // 4):
                    left = K - k - 4 * i
                    if left > 0:
                        kept = 0xFF if left >= 4 else (1 << (left * 2)) - 1
                        index[byte + i8(i)] = u1((places >> 8 * i) & kept)

    return run


@functools.cache
def unpooled(E: int, whole: bool, after: Any) -> Any:
    """`pooled` without pooling: the four pixels of the window, of P×Q. after: None, the device function of an activation, or "mask":
    zero where index, an image, is 0."""
    FILTERS = 4 * E
    put, get = stores(E, whole), loads(E, whole)
    (ACTIVATES, activate), MASK = applied(after), after == "mask"

    @jit(device=True)
    def round_two(a, b):
        return bf16x2(activate(a), activate(b)) if ACTIVATES else bf16x2(a, b)

    @jit(device=True)
    def run(values, y, index, n, p, q, k, P, Q, K):
        out = cuda.local.array(4, u4)
        seen = cuda.local.array(4, u4)
        for pixel in range(4):
            row, column = 2 * p + pixel // 2, 2 * q + pixel % 2
            inside = (row < P) & (column < Q) & (k < K)
            at = (n * P + row) * Q + column
            if MASK:
                get(seen, index, at, k, K, inside)
            for j in range(4):
                if E == 2:
                    out[j] = round_two(values[pixel * FILTERS + 2 * j], values[pixel * FILTERS + 2 * j + 1])
                    if MASK:
                        out[j] = out[j] & greater_bf16x2(seen[j], 0)
                else:
                    value = values[pixel * FILTERS + j]
                    out[j] = float_bits(tf32(activate(value) if ACTIVATES else value))
                    if MASK and not bits_float(seen[j]) > 0.0:
                        out[j] = 0
            if inside:
                put(y, at, k, K, out)

    return run


@functools.cache
def loads(E: int, whole: bool) -> Any:
    """Device function (words, x, pixel, k, K, wanted): the reverse of `stores`, zeros where not wanted or beyond K."""

    @jit(device=True)
    def run(words, x, pixel, k, K, wanted):
        at = i8(i8(pixel) * K + k) * (4 // E)
        if whole:
            words[0], words[1], words[2], words[3] = load_4_words(x, at, wanted)
        else:
            for i in range(4):
                if E == 2:
                    low = load_half(x, at + i8(4 * i), wanted & (k + 2 * i < K))
                    words[i] = low | (load_half(x, at + i8(4 * i + 2), wanted & (k + (2 * i + 1) < K)) << 16)
                else:
                    words[i] = load_word(x, at + i8(4 * i), wanted & (k + i < K))

    return run


@functools.cache
def stores(E: int, whole: bool) -> Any:
    """Device function (y, pixel, k, K, words): four words, 4·E filters from k on, at once or, where K is not whole, one by one."""

    @jit(device=True)
    def run(y, pixel, k, K, words):
        at = i8(pixel) * K + k
        if whole:
            store_4_words(y, at * i8(4 // E), words[0], words[1], words[2], words[3])
        else:
            for i in range(4):
                if E == 2:
                    if k + 2 * i < K:
                        y[at + i8(2 * i)] = u2(words[i] & 0xFFFF)
                    if k + (2 * i + 1) < K:
                        y[at + i8(2 * i + 1)] = u2(words[i] >> 16)
                elif k + i < K:
                    y[at + i8(i)] = bits_float(words[i])

    return run
