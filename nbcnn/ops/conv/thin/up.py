"""An upsampling folded into a convolution with a thin target (a last layer): nine products where the plain form has 36.

The products of the pixels of x with the taps of the filter do not depend on where an output pixel lies, so they are made
at low resolution, by the kernel of thin/scatter.py, and collected from there at high resolution:

    parts[(a,b,k)][i,j] = Σ_c x[i,j,c] · w[k,c,a,b]        y[p,q,k] = b[k] + Σ_{a,b < 3} parts[(a,b,k)][(p+a-1)//2, (q+b-1)//2]

with zero outside the image. What is collected can end in the ReLU, or in the mean squared error and its gradient.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i8, jit, types
from nbcnn.ops.activations.table import applied, epilogue_function
from nbcnn.ops.conv.thin import scatter as thin_scatter
from nbcnn.ops.conv.thin.shape import correlation
from nbcnn.ops.kernel.call import Call, Launch, blocks
from nbcnn.ops.kernel.loops import split_pixel, unrolled, within
from nbcnn.ops.kernel.reduce import THREADS, add_partials, block_sum, f8
from nbcnn.ops.kernel.traffic import Traffic, once, size
from nbcnn.ops.ptx.vector import load1_if
from nbcnn.plan.arena import ALIGNMENT, align
from nbcnn.plan.op import Loss, Op
from nbcnn.plan.shapes import numel

# Along one axis: tap a, read from pixel i + d, reaches the output pixels 2i + r of these r. Tap 1 gives both the same.
REACH = ((0, -1, (0,)), (0, 0, (1,)), (1, 0, (0, 1)), (2, 0, (0,)), (2, 1, (1,)))


def make_part(K: int, down: tuple[int, int, tuple[int, ...]], across: tuple[int, int, tuple[int, ...]]) -> Any:
    """Device function (acc, parts, m, first, where): one tap read from one pixel, added to all outputs of the 2×2 that it reaches."""
    (a, dh, rows), (b, dw, columns) = down, across
    TAP, FIRST, MORE_H, MORE_W = (a * 3 + b) * K, (2 * rows[0] + columns[0]) * K, len(rows) == 2, len(columns) == 2

    @jit(device=True)
    def part(acc, parts, m, first, where):
        i, j, H, W, plane = where
        # As unsigned numbers, negative coordinates lie beyond any extent.
        ok = within(i + dh, H) & within(j + dw, W)
        at = first + i8(m + dh * W + dw) + i8(plane) * TAP
        for k in range(K):
            value = load1_if(parts, at + i8(plane) * k, ok)
            acc[FIRST + k] += value
            if MORE_W:
                acc[FIRST + K + k] += value
            if MORE_H:
                acc[FIRST + 2 * K + k] += value
            if MORE_H and MORE_W:
                acc[FIRST + 3 * K + k] += value

    return part


@functools.cache
def collect_kernel(K: int, split: int, after: Any) -> Any:
    """The collecting kernel for K channels, `split` threads per pixel of x. after: None, the device function of an activation, or "mse"."""
    PIXELS, OUTPUTS = THREADS // split, 4 * K
    collect = unrolled([make_part(K, down, across) for down in REACH for across in REACH])
    add_splits, (ACTIVATES, activate), MSE = thin_scatter.splits_added(OUTPUTS, split, PIXELS), applied(after), after == "mse"

    @jit(launch_bounds=(THREADS, 2))
    def thin_up_collect_kernel(parts, bias, target, y, total, M, H, W, plane, scale):
        """y[(n,2i+r,2j+s),k] = bias[k] + Σ_split Σ_{a,b} parts[split][(a,b,k)][n, i+(r+a-1)//2, j+(s+b-1)//2], (n,i,j) = m.

        grid   ⌈M/PIXELS⌉, block 256 = PIXELS·split; a thread owns the 2×2·K outputs of one pixel m and split, neighbours
               read neighbours; a tap (a,b) of two outputs that fall on the same pixel is read once: 25 reads, not 36
        shared 4·1,024·K bytes if split, 2 KiB for the loss
        moves  4·M·K·(9·split + 4) bytes; with the loss 4·M·K·(9·split + 8): y is then scale·(y - target), total[block] = Σ (y - target)²
        """
        t = cuda.threadIdx.x
        pixel, z = t % PIXELS, t // PIXELS
        m = cuda.blockIdx.x * PIXELS + pixel
        n, i, j = split_pixel(m, H, W)
        acc = cuda.local.array(OUTPUTS, f4)
        for o in range(OUTPUTS):
            acc[o] = 0.0
        collect(acc, parts, m, i8(z) * (9 * K) * plane, (i if m < M else -2, j, H, W, plane))
        add_splits(acc, t, z)
        squares = f8(0)
        if (z == 0) & (m < M):
            for r in range(2):
                row = i8(((n * H + i) * 2 + r) * 2) * W + 2 * j
                for s in range(2):
                    for k in range(K):
                        at = (row + s) * K + k
                        value = acc[(2 * r + s) * K + k] + bias[k]
                        if ACTIVATES:
                            value = activate(value)
                        if MSE:
                            value -= target[at]
                            squares += f8(value) * f8(value)
                            value *= scale
                        y[at] = value
        if MSE:
            terms = cuda.shared.array(THREADS, types.float64)
            whole = block_sum(terms, squares)
            if t == 0:
                total[cuda.blockIdx.x] = whole

    return thin_up_collect_kernel


def _grid(call: Call) -> int:
    N, _, H, W = call.in_shapes[0]
    return blocks(N * H * W, THREADS // call.tile.split)


def scratch(call: Call) -> int:
    """Bytes of the products, and of the partial losses behind them."""
    return _parts_bytes(call) + (8 * _grid(call) if call.op == Op("upconv", "fprop", after=(Loss("mse"),)) else 0)


def _parts_bytes(call: Call) -> int:
    return align(thin_scatter.scratch(call), ALIGNMENT)


def bind(call: Call) -> list[Launch]:
    """x (N,C,H,W), w (K,C,3,3), b (K)[, target] -> [loss (),] y (N,K,2H,2W)."""
    g, mse = correlation(call), call.op == Op("upconv", "fprop", after=(Loss("mse"),))
    after = "mse" if mse else epilogue_function(call)
    y, count = call.outs[-1], numel(call.out_shapes[-1])
    products = thin_scatter.parts_launch(call)
    total = call.scratch[_parts_bytes(call) : scratch(call)].view(np.float64) if mse else call.scratch.view(np.float64)
    parts = call.scratch.view(np.float32)
    sizes = (np.int32(v) for v in (g.N * g.H * g.W, g.H, g.W, thin_scatter.plane(g)))
    args = (parts, call.ins[2], call.ins[3] if mse else y, y, total, *sizes, np.float32(2 / count))
    made = [products, Launch(collect_kernel(g.K, call.tile.split, after), _grid(call), THREADS, args)]
    return [*made, add_partials(total, _grid(call), 1 / count, call.outs[0])] if mse else made


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`: 5n − 2 of `REACH` lie inside an axis of n pixels, and the collector reads nine planes."""
    grid, split, K = _grid(call), call.tile.split, correlation(call).K
    N, _, H, W = call.in_shapes[0]
    y = size(call, "out", len(call.out_shapes) - 1)
    mse = call.op == Op("upconv", "fprop", after=(Loss("mse"),))
    target, partials = (size(call, "in", 3), 8 * grid) if mse else (0, 0)
    read, distinct = 4 * split * N * K * (5 * H - 2) * (5 * W - 2), 4 * split * N * K * 3 * H * 3 * W
    first = Traffic(read + target, y + partials, distinct + target)
    made = [thin_scatter.parts_traffic(call), first]
    return [*made, once(partials, 8)] if mse else made
