"""ReLU and 2×2 max pooling of what a thread has in registers, with the packed index (fused.py says how it is packed).

Kernels that pool number their output pixels window by window, the four pixels of a window one after the other, so that a
window is four neighbouring rows of a product, and a 4×4 patch of a thread is one window of four channels: a float4 of y
and one byte of the index.
"""

from __future__ import annotations

import functools
from typing import Any

from nbcnn.gpu.language import cuda, f4, i8, jit, types
from nbcnn.ops.kernel.loops import quotient
from nbcnn.ops.ptx.vector import store4

PATCH = 16


@jit(device=True)
def window_pixel(m, P, Q):
    """(n, p, q) of pixel m of images of P×Q pixels (both even), numbered window by window."""
    window = m >> 2
    across = Q >> 1
    line = quotient(window, across)
    image = quotient(line, P >> 1)
    p = (line - image * (P >> 1)) * 2 + ((m >> 1) & 1)
    q = (window - line * across) * 2 + (m & 1)
    return image, p, q


@jit(device=True)
def window_offsets(window, n, GN):
    """Where channels n … n+3 of a window go in y and in index, of GN channels."""
    return i8(window) * GN + n, i8(window) * (GN + 3 >> 2) + (n >> 2)


@functools.cache
def store_pooled(vector: bool) -> Any:
    """Device function (patch, y, index, at, byte, left): relu and pool a window of four channels, of which `left` exist.

    patch: 16 floats, four pixels of four channels. at, byte: where they go in y and in index. vector: `left` is 4 or more.
    """

    @jit(device=True)
    def store(patch, y, index, at, byte, left):
        best = cuda.local.array(4, f4)
        places = 0
        for q in range(4):
            largest, place = patch[q], 0
            for t in range(1, 4):
                v = patch[4 * t + q]
                # A NaN wins and stays.
                wins = (not (v <= largest)) & (largest == largest)
                largest = v if wins else largest
                place = t if wins else place
            # After the ReLU all elements of a window without a positive one are equal: the first wins.
            flat = largest <= 0.0
            best[q] = 0.0 if flat else largest
            place = 0 if flat else place
            if vector:
                places |= place << 2 * q
            else:
                places |= place << 2 * q if q < left else 0
        if vector:
            store4(y, at, best[0], best[1], best[2], best[3])
        else:
            for q in range(4):
                if q < left:
                    y[at + q] = best[q]
        index[byte] = types.uint8(places)

    return store
