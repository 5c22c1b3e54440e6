"""The bias of a transposed convolution, whose product is a convolution's dgrad and has none: y = x + b by channel, and db = Σ dy.

db is summed as the general convolution sums its own: in parts of the pixels, which a second launch adds in order (grouped.py).

    bias_fprop        x (N,C,H,W), b (C) -> y (N,C,H,W)       bias_wgrad        dy -> db (C)
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, jit
from nbcnn.ops.conv.grouped import FILTERS, LINES, THREADS, launch_sum, parts_of, wgrad_kernel
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.case import IMAGES, Case, Gradient, Shapes, label_of, normal
from nbcnn.ops.kernel.elementwise import supports
from nbcnn.ops.kernel.loops import quotient, within
from nbcnn.ops.kernel.stored import kinds, scalar_io, vector_io
from nbcnn.ops.kernel.traffic import streamed
from nbcnn.ops.kernel.windows import lanes_of, planes
from nbcnn.plan.shapes import numel


def bias_fprop(x: np.ndarray, b: np.ndarray, y: np.ndarray) -> None:
    """y (N,C,H,W) = x (N,C,H,W) + b (C) by channel."""
    np.add(x, b[:, None, None], out=y)


def bias_wgrad(dy: np.ndarray, db: np.ndarray) -> None:
    """db (C) = the sum of dy (N,C,H,W) over images and pixels."""
    np.sum(dy, axis=(0, 2, 3), out=db)


@cache
def bias_kernel(kind: str, nhwc: bool, four: bool) -> Any:
    """The kernel of y = x + b by channel; x and y are stored as `kind`."""
    load, store = vector_io(kind) if four else scalar_io(kind)

    @jit()
    def bias_kernel(x, b, y, count, C, plane):
        """y[i] = x[i] + b[c], c the channel of element i.

        grid ⌈count / block's elements⌉, block 256; a thread owns four channels of a pixel (NHWC, C a multiple of four), else one element.
        shared none; moves every element of x and of y once.
        """
        i = (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x) * (4 if four else 1)
        if within(i, count):
            row = quotient(i, C if nhwc else plane)
            if four:
                c = i - row * C
                p, q, r, s = load(x, i)
                store(y, i, p + b[c], q + b[c + 1], r + b[c + 2], s + b[c + 3])
            else:
                c = i - row * C if nhwc else row - quotient(row, C) * C
                store(y, i, load(x, i) + b[c])

    return bias_kernel


def bind_fprop(call: Call) -> list[Launch]:
    """x, b -> y. One launch."""
    (_, c, h, w), count = call.out_shapes[0], numel(call.out_shapes[0])
    nhwc, four = call.layout == "NHWC", lanes_of(planes(call.out_shapes[0], call.layout)[1]) == 4
    args = (*call.ins, *call.outs, *(np.int32(n) for n in (count, c, h * w)))
    return [Launch(bias_kernel(kinds(call)[0], nhwc, four), blocks(count, 4 * THREADS if four else THREADS), THREADS, args)]


def scratch_wgrad(call: Call) -> int:
    """Bytes of the parts of the sums."""
    n, c, h, w = call.in_shapes[0]
    return 4 * parts_of(n * h * w) * c


def bind_wgrad(call: Call) -> list[Launch]:
    """dy -> db. Two launches: a convolution's weight gradient without weights, so that its bias alone is left."""
    (n, c, h, w), (dy,), (db,) = call.in_shapes[0], call.ins, call.outs
    pixels, parts, partials = n * h * w, parts_of(n * h * w), call.scratch.view(np.float32)
    # No channels a group: the one tap is the bias, and the images are never read.
    numbers = (pixels, blocks(pixels, parts), c, h, w, c, h, w, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 1)
    grid = (blocks(c, FILTERS), 1, parts)
    made = wgrad_kernel(kinds(call)[0], call.layout == "NHWC")
    first = Launch(made, grid, (FILTERS, LINES), (dy, dy, partials, *(np.int32(number) for number in numbers)))
    return [first, launch_sum(partials, db, [db], c, 1, parts)]


HOST = {"bias_fprop": host(bias_fprop), "bias_wgrad": host(bias_wgrad)}
OPS = {
    "bias_fprop": Impl(bind_fprop, supports=supports, traffic=streamed),
    "bias_wgrad": Impl(bind_wgrad, scratch=scratch_wgrad, supports=supports),
}
GRADIENTS = {"bias_wgrad": Gradient("bias_fprop", lambda ins, outs, v: (v,), of=(1,))}


def cases(images: Shapes = IMAGES) -> Iterator[Case]:
    """Both passes."""
    for shape in images:
        n, c, h, w = shape
        yield Case("bias_fprop", label_of(shape), (normal(55, *shape), normal(56, c)), ((shape, "float32"),))
        yield Case("bias_wgrad", label_of(shape), (normal(57, *shape),), (((c,), "float32"),), {}, n * h * w)
