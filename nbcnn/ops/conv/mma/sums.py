"""The second kernel of a split product: adds the parts in order, then does what the first would have done with its sums."""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import cuda, f4, i8, jit
from nbcnn.ops.conv.frame.split import sum_of_elements
from nbcnn.ops.conv.mma.epilogue import load_bias, load_mask, pixel_epilogue, window_epilogue
from nbcnn.ops.conv.mma.tile import KINDS
from nbcnn.ops.ptx.vector import load1_if, load4_if

THREADS = 64
"""Few: a small problem should reach every multiprocessor."""


@cache
def _quad(whole: bool) -> Any:
    """Device function (values, first, partials, at, n, K, wanted): channels n … n+3 at element `at` into values[first …]; zeros beyond K.

    whole: K is a multiple of four, so that four channels are one access; else each is loaded by itself.
    """

    @jit(device=True)
    def run(values, first, partials, at, n, K, wanted):
        if whole:
            values[first], values[first + 1], values[first + 2], values[first + 3] = load4_if(partials, at, wanted)
        else:
            for q in range(4):
                values[first + q] = load1_if(partials, at + q, wanted & (n + q < K))

    return run


@cache
def sum_pixels(kind_name: str, bias: bool, after: Any, mask: bool, whole: bool) -> Any:
    """The kernel for what does not become windows. whole: K is a multiple of four."""
    store = KINDS[kind_name].store
    put, get_bias, get_mask = pixel_epilogue(store, after, mask, whole), load_bias(bias), load_mask(store, whole)
    add = sum_of_elements(4, whole)

    @jit()
    def sum_pixels_kernel(partials, b, x, y, GM, K, P, Q, up, planes, apart, x_apart):
        """y[pixel of (phase, m)][n] = epilogue(Σ_z partials[z][phase][m][n] + b[n]).

        Pixels of y lie `apart` elements from each other, those of x `x_apart`.

        grid: quads of four channels / 64; owns: per thread four channels of a pixel, or the up to three that are left of K.
        moves: 4·phases·GM·K·planes bytes, and y once (x too for a mask).
        """
        phases = 1 << 2 * up
        quads = K >> 2 if whole else K + 3 >> 2
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        row = i // quads
        n = (i - row * quads) * 4
        if row >= GM * phases:
            return
        target = row
        if up > 0:
            phase = row // GM
            m = row - phase * GM
            line = m // Q
            target = (2 * line + (phase >> 1)) * 2 * Q + 2 * (m - line * Q) + (phase & 1)
        shift = cuda.local.array(4, f4)
        masks = cuda.local.array(4, f4)
        total = cuda.local.array(4, f4)
        get_bias(shift, b, n, K)
        if mask:
            get_mask(masks, 0, x, target, n, K, x_apart)
        add(total, partials, i * 4 if whole else row * K + n, GM * phases * K, 0, 1, planes, K - n)
        put(total, shift, masks, 0, y, target, n, K, apart)

    return sum_pixels_kernel


@cache
def sum_windows(kind_name: str, bias: bool, whole: bool) -> Any:
    """The kernel for pooling windows. whole: K is a multiple of four."""
    put, get_bias, load = window_epilogue(KINDS[kind_name].store, whole), load_bias(bias), _quad(whole)

    @jit()
    def sum_windows_kernel(partials, b, y, index, GM, K, planes):
        """y, index of a window [n] = pooled relu(Σ_z partials[z][4·window + t][n] + b[n]) over t < 4.

        grid: windows · quads of four channels / 64; owns: per thread four channels of a window, or the up to three that are left of K.
        moves: 4·GM·K·planes bytes, and y and index once.
        """
        quads = K >> 2 if whole else K + 3 >> 2
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        window = i // quads
        n = (i - window * quads) * 4
        if window >= GM >> 2:
            return
        shift = cuda.local.array(4, f4)
        patch = cuda.local.array(16, f4)
        values = cuda.local.array(16, f4)
        get_bias(shift, b, n, K)
        for q in range(16):
            patch[q] = 0.0
        z = 0
        while z < planes:
            for t in range(4):
                at = (i8(z) * GM + (4 * window + t)) * K + n
                load(values, 4 * t, partials, at, n, K, True)
            for q in range(16):
                patch[q] += values[q]
            z += 1
        put(patch, shift, y, index, window, n, K)

    return sum_windows_kernel
