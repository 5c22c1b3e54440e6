"""EvoNorm-B0's y from x and all statistics, of images stored NHWC: a thread has one quad of channels, neighbouring threads all of a pixel.

So what a warp reads and writes lies side by side, where slabs of a few channels (b0_held.py) move a sector of 32 bytes here and there.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i8, jit
from nbcnn.ops.kernel.call import Call, Launch
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.stored import kinds, vector_io
from nbcnn.ops.norms.quads import QUAD
from nbcnn.ops.ptx.fast import larger, reciprocal

_THREADS, _PIXELS = 256, 8
"""Threads of a block, at most; pixels that a thread has in flight."""


def serves(call: Call) -> bool:
    """True if pixels are whole quads of channels that lie side by side, and a block can have all of them."""
    return call.layout == "NHWC" and call.in_shapes[0][1] % QUAD == 0 and call.in_shapes[0][1] <= QUAD * _THREADS


@cache
def apply_wide_kernel(kind: str, quads: int) -> Any:
    load, store = vector_io(kind)
    QUADS, ROWS, PIXELS, FLOATS = quads, _THREADS // quads, _PIXELS, QUAD * _PIXELS

    @jit(launch_bounds=(quads * (_THREADS // quads), 4))
    def evonorm_b0_apply_wide_kernel(x, gamma, beta, v, std, batch_std, y, HW, parts):
        """y = γ·x/max(s_B, v·x + s_I) + β; x, y (N,H,W,C), C = 4·quads.

        grid N·parts, block up to 256; owns: per block PIXELS·ROWS pixels of an image, per thread a quad of channels of PIXELS of them
        moves x and y once, and of every block the statistics of its channels. source: arXiv:2004.02967
        """
        values = cuda.local.array(FLOATS, f4)
        factors = cuda.local.array(QUAD, f4)
        plus = cuda.local.array(QUAD, f4)
        slopes = cuda.local.array(QUAD, f4)
        scales = cuda.local.array(QUAD, f4)
        leasts = cuda.local.array(QUAD, f4)
        tid, block = cuda.threadIdx.x, cuda.blockIdx.x
        n = block // parts
        row = tid // QUADS
        c = (tid - row * QUADS) * QUAD
        pixel = (block - n * parts) * (PIXELS * ROWS) + row
        at = (i8(n) * HW + pixel) * (QUAD * QUADS) + c
        for j in range(PIXELS):
            # Beyond the last pixel an earlier one is read once more: loads without branches, all in flight.
            here = at + i8(j * ROWS * QUADS * QUAD) if pixel + j * ROWS < HW else i8(n) * HW * (QUAD * QUADS) + c
            values[4 * j], values[4 * j + 1], values[4 * j + 2], values[4 * j + 3] = load(x, here)
        for q in range(QUAD):
            own = c + q
            factors[q], plus[q], slopes[q], leasts[q] = gamma[own], beta[own], v[own], batch_std[own]
            scales[q] = std[n * (QUAD * QUADS) + c + q]
        for j in range(PIXELS):
            for q in range(QUAD):
                value = values[4 * j + q]
                values[4 * j + q] = factors[q] * (value * reciprocal(larger(leasts[q], slopes[q] * value + scales[q]))) + plus[q]
            if pixel + j * ROWS < HW:
                store(y, at + i8(j * ROWS * QUADS * QUAD), values[4 * j], values[4 * j + 1], values[4 * j + 2], values[4 * j + 3])

    return evonorm_b0_apply_wide_kernel


def launch(call: Call) -> Launch:
    """The launch of a call that it `serves`."""
    (x, gamma, beta, v, _), (y, _, std, _, batch_std, _) = call.ins, call.outs
    n, c, h, w = call.in_shapes[0]
    quads = c // QUAD
    rows = _THREADS // quads
    parts = ceil_div(h * w, _PIXELS * rows)
    args = (x, gamma, beta, v, std, batch_std, y, np.int32(h * w), np.int32(parts))
    return Launch(apply_wide_kernel(kinds(call)[0], quads), n * parts, quads * rows, args)
