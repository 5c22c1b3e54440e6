"""Sums over 2×2 boxes of an image, at every position: what makes nine products of the gradients of a folded upsampling (folded.py).

    s[n,p,q,c] = Σ_{r,s < 2} dy[n, p-1+r, q-1+s, c]      0 <= p <= H, 0 <= q <= W, zero outside dy (N,C,H,W), stored NHWC

One tap of the 3×3 filter meets, for the pixel (i,j) of x, the 2×2 gradients of one box: they are summed once, here, instead of
being multiplied one by one. The rest is a 3×3 convolution of stride 2 over s, without padding.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.kernel.call import Launch, Shape, blocks
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.ops.kernel.traffic import windows as windows_along
from nbcnn.ops.kernel.windows import position
from nbcnn.ops.ptx.vector import load1_if, load4_if, store4

THREADS = 256


@cache
def box_kernel(lanes: int) -> Any:
    """The kernel for `lanes` (4 or 1) channels per thread."""

    @jit()
    def box_sums_kernel(dy, s, count, H, W, groups):
        """s[n,p,q] = dy[n,p-1,q-1] + dy[n,p-1,q] + dy[n,p,q-1] + dy[n,p,q], channels in groups of `lanes`.

        grid ceil(count / 256), block 256, count = N·(H+1)·(W+1)·groups; a thread owns one group of one box.
        moves 4·(dy + s) bytes; the boxes' rereads meet in the cache.
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i >= count:
            return
        n, p, q, group = position(i, H + 1, W + 1, groups)
        total, part = cuda.local.array(4, f4), cuda.local.array(16, f4)
        for b in range(4):
            h, w = p - 1 + b // 2, q - 1 + b % 2
            inside = (h >= 0) & (h < H) & (w >= 0) & (w < W)
            at = (((n * H + h) * W + w) * groups + group) * lanes
            if lanes == 4:
                part[4 * b], part[4 * b + 1], part[4 * b + 2], part[4 * b + 3] = load4_if(dy, at, inside)
            else:
                part[4 * b] = load1_if(dy, at, inside)
        for q_ in range(lanes):
            total[q_] = (part[q_] + part[4 + q_]) + (part[8 + q_] + part[12 + q_])
        if lanes == 4:
            store4(s, 4 * i, total[0], total[1], total[2], total[3])
        else:
            s[i] = total[0]

    return box_sums_kernel


def extents(dy: Shape) -> Shape:
    """Logical shape of the box sums of dy (N,C,H,W)."""
    N, C, H, W = dy
    return N, C, H + 1, W + 1


def launch_boxes(dy: Any, s: Any, shape: Shape) -> Launch:
    """Launch of `box_sums_kernel` for dy of logical `shape` (N,C,H,W)."""
    N, C, H, W = shape
    lanes = 4 if C % 4 == 0 else 1
    count = N * (H + 1) * (W + 1) * C // lanes
    sizes = (np.int32(v) for v in (count, H, W, C // lanes))
    return Launch(box_kernel(lanes), blocks(count, THREADS), THREADS, (dy, s, *sizes))


def box_traffic(shape: Shape) -> Traffic:
    """Bytes of `launch_boxes`: every element is in four boxes."""
    N, C, H, W = shape
    down, across = windows_along(H + 1, 2, H, first=1)[0], windows_along(W + 1, 2, W, first=1)[0]
    return Traffic(4 * N * C * down * across, 4 * N * (H + 1) * (W + 1) * C, 4 * N * H * W * C)
