"""k-sparse codes: of the channels of a pixel only the k largest pass, and so do their gradients.

    y[n, c, h, w] = x[n, c, h, w] if fewer than k channels of its pixel are larger, else 0
    dx            = dy where y ≠ 0, else 0

Of equal values all pass or none. Behind a ReLU a pixel that has fewer than k positive channels keeps all of them.

Source: A. Makhzani, B. Frey, "k-sparse autoencoders", arXiv:1312.5663.

    ksparse_fprop     x (N,C,H,W) -> y                    ksparse_dgrad     dy, y -> dx         k
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, jit
from nbcnn.ops.kernel import maps
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.case import IMAGES, Case, Gradient, Shapes, label_of, normal
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.traffic import Traffic, element, outputs, streamed
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

THREADS = 256


def ksparse_fprop(x: np.ndarray, y: np.ndarray, *, k: int) -> None:
    """y (N,C,H,W) = x where it is among the k largest channels of its pixel, else 0."""
    largest = np.sort(x, axis=1)[:, -min(k, x.shape[1])]  # (N, H, W), the smallest that passes
    np.multiply(x, x >= largest[:, None], out=y)


def ksparse_dgrad(dy: np.ndarray, y: np.ndarray, dx: np.ndarray, *, k: int) -> None:
    """dx = dy where y ≠ 0, else 0."""
    np.multiply(dy, y != 0, out=dx)


@cache
def ksparse_kernel(source: str, target: str, channels_last: bool) -> Any:
    """The kernel for images stored as `source`, into images stored as `target`."""
    (load, _), (_, store) = scalar_io(source), scalar_io(target)

    @jit()
    def ksparse_kernel(x, y, count, k, C, plane):
        """y[i] = x[i] if fewer than k channels of its pixel are larger, else 0.

        grid ⌈count/256⌉, block 256; owns: per thread one element; shared none; moves C values per element through the caches, where a warp's lanes
        read the same ones (NHWC) or neighbours (NCHW), and y once; source: the definition, by counting: no order of the channels is made.
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i < count:
            pixel = i // C if channels_last else i // (C * plane) * plane + i % plane
            first = pixel * C if channels_last else pixel // plane * (C * plane) + pixel % plane
            step = 1 if channels_last else plane
            value, larger = load(x, i), 0
            for c in range(C):
                if load(x, first + c * step) > value:
                    larger += 1
            store(y, i, value if larger < k else 0.0)

    return ksparse_kernel


@jit(device=True)
def _where_kept(dy, y):
    return dy if y != 0.0 else 0.0


def bind(call: Call) -> list[Launch]:
    """One launch."""
    N, C, H, W = call.in_shapes[0]
    kernel = ksparse_kernel(*kinds(call), call.layout == "NHWC")
    sizes = (np.int32(size) for size in (N * C * H * W, call.attrs["k"], C, H * W))
    return [Launch(kernel, blocks(N * C * H * W, THREADS), THREADS, (*call.ins, *call.outs, *sizes))]


def bind_dgrad(call: Call) -> list[Launch]:
    """One launch of the frame of maps."""
    return maps.launch_map("ksparse_dgrad_kernel", _where_kept, call)


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`: all channels of its pixel for every element."""
    each = element(call) * numel(call.in_shapes[0])
    return [Traffic(each * (call.in_shapes[0][1] + 1), outputs(call), each)]


HOST = {Op("ksparse", "fprop"): host(ksparse_fprop), Op("ksparse", "dgrad"): host(ksparse_dgrad)}
OPS = {
    Op("ksparse", "fprop"): Impl(bind, supports=maps.supports, traffic=traffic),
    Op("ksparse", "dgrad"): Impl(bind_dgrad, supports=maps.supports, traffic=streamed, pitched=maps.element_part),
}
GRADIENTS = {Op("ksparse", "dgrad"): Gradient(Op("ksparse", "fprop"), lambda ins, outs, v: (v, outs[0]))}


def cases(images: Shapes = IMAGES) -> Iterator[Case]:
    """Both passes with fewer channels than there are, and with more."""
    for shape in images:
        # A channel's rank in its pixel, an eighth apart: values that bfloat16 keeps apart, so that a small step changes no choice, and none is 0.
        rank = np.random.default_rng(39).permuted(np.broadcast_to(np.arange(shape[1])[:, None, None], shape), axis=1)
        x = ((rank + 0.75) / 8 - shape[1] / 16).astype(np.float32)
        dy, out = normal(40, *shape), ((shape, "float32"),)
        k = 2 if shape[1] != 3 else 5
        y = np.empty(shape, np.float32)
        ksparse_fprop(x, y, k=k)
        yield Case(Op("ksparse", "fprop"), f"{k} of {label_of(shape)}", (x,), out, {"k": k})
        yield Case(Op("ksparse", "dgrad"), f"{k} of {label_of(shape)}", (dy, y), out, {"k": k})
