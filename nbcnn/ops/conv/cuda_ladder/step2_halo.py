"""Step 2, a tile with its halo: the 256 threads of a block own 16×16 neighbouring pixels, whose windows overlap. They fetch the pixels of all those
windows once into shared memory, a channel at a time, and every thread reads its window from there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.conv.cuda_ladder.parts import THREADS, sizes, step
from nbcnn.ops.conv.cuda_ladder.step1_thread import products
from nbcnn.ops.kernel.call import Launch
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.traffic import Traffic, windows
from nbcnn.plan.shapes import ConvShape, numel

SIDE = 16
"""Rows and columns of y that a block owns."""
WINDOW, STRIDE = 7, 2
"""The largest window and stride whose halo has room."""
HALO = (SIDE - 1) * STRIDE + WINDOW
"""Rows and columns of the largest halo: 37, 5.5 KB."""
PIXELS, TAPS = HALO * HALO, WINDOW * WINDOW


@jit(launch_bounds=(THREADS, 4))
def halo_kernel(x, w, y, C, H, W, K, P, Q, R, S, stride, pad, across, down):
    """y[n,k,p,q] = Σ_{c,r,s} w[k,c,r,s] · x[n,c,p·stride+r−pad,q·stride+s−pad].

    grid    N·K·⌈P/16⌉·⌈Q/16⌉, block 256.
    owns    block 16 × 16 pixels of one image and filter, thread one of them.
    shared  the pixels under the block's windows and the window's weights, both of one channel, 5.7 KB.
    moves   x K times, with the halo between blocks; the filters once per block; y once.
    source  D. Kirk, W. Hwu, "Programming Massively Parallel Processors", chapter on convolution.
    """
    tile, weights = cuda.shared.array(PIXELS, f4), cuda.shared.array(TAPS, f4)
    t, b = cuda.threadIdx.x, cuda.blockIdx.x
    column0, row0, k, n = b % across * SIDE, b // across % down * SIDE, b // (across * down) % K, b // (across * down * K)
    row, column = t // SIDE, t % SIDE
    tall, wide = (SIDE - 1) * stride + R, (SIDE - 1) * stride + S
    total = 0.0
    for c in range(C):
        for e in range(t, tall * wide, THREADS):
            h, v = row0 * stride - pad + e // wide, column0 * stride - pad + e % wide
            inside = 0 <= h < H and 0 <= v < W
            tile[e] = x[((n * C + c) * H + h) * W + v] if inside else 0.0
        if t < R * S:
            weights[t] = w[(k * C + c) * R * S + t]
        cuda.syncthreads()
        for r in range(R):
            for s in range(S):
                total += weights[r * S + s] * tile[(row * stride + r) * wide + column * stride + s]
        # Nobody may fetch the next channel while somebody still reads this one.
        cuda.syncthreads()
    if row0 + row < P and column0 + column < Q:
        y[((n * K + k) * P + row0 + row) * Q + column0 + column] = total


def traffic(s: ConvShape) -> Traffic:
    """Per block: the pixels under its windows inside the image, and its filter."""
    tiles = ceil_div(s.P, SIDE) * ceil_div(s.Q, SIDE)
    # A block's rows of y, each a window of `tall` rows every SIDE·stride rows.
    rows = windows(ceil_div(s.P, SIDE), (SIDE - 1) * s.stride + s.R, s.H, SIDE * s.stride, s.pad)[0]
    columns = windows(ceil_div(s.Q, SIDE), (SIDE - 1) * s.stride + s.S, s.W, SIDE * s.stride, s.pad)[0]
    read = s.N * s.K * s.C * (rows * columns + tiles * s.R * s.S)
    return Traffic(4 * read, 4 * numel(s.y_shape), products(s)[1])


def launch(s: ConvShape, arrays: tuple[Any, ...]) -> Launch:
    """One launch of a block per image, filter and tile of pixels."""
    across, down = ceil_div(s.Q, SIDE), ceil_div(s.P, SIDE)
    return Launch(halo_kernel, s.N * s.K * down * across, THREADS, (*arrays, *sizes(s), np.int32(across), np.int32(down)))


def refusal(s: ConvShape) -> str | None:
    """Why the halo of a shape has no room, or None."""
    fits = max(s.R, s.S) <= WINDOW and s.stride <= STRIDE
    return None if fits else f"a window of {s.R}×{s.S} with stride {s.stride} is over {WINDOW}×{WINDOW} with stride {STRIDE}"


IMPL = step(launch, traffic, refusal=refusal)
