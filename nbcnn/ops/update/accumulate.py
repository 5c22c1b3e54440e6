"""Gradients of the parts of a batch, added up: out = weight·g + total, and weight·g for the first part.

A batch that is computed in parts has the gradient Σ_i n_i/n·g_i, where part i has n_i of the n examples and g_i is the gradient of its mean loss.
The parts are added in their order, in one more buffer of the gradients' layout, so the sum has the same bits every time.

    accumulate        g (P), total (P) -> total, or g for the last part   (in place)                weight, first
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, jit
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.case import Case, normal
from nbcnn.ops.kernel.traffic import Traffic, once, size
from nbcnn.ops.ptx.vector import load4, store4
from nbcnn.plan.shapes import numel

THREADS = 256


def accumulate(g: np.ndarray, total: np.ndarray, out: np.ndarray, *, weight: float, first: bool) -> None:
    """out (P) = weight·g + total, without total where `first`; `out` is g or total itself."""
    added = g.dtype.type(weight) * g
    np.copyto(out, added if first else added + total)


@functools.cache
def accumulate_kernel(first: bool) -> Any:
    """The kernel of the first part, which reads no total, or of the others."""

    @jit()
    def accumulate_gradients_kernel(g, total, out, count, weight):
        """out = weight·g + total, or weight·g for the first part.

        grid    ⌈P / 1024⌉, block 256
        owns    thread: four neighbours, and the first threads one each of the last P % 4
        shared  none
        moves   12·P bytes, for the first part 8·P; 16-byte aligned arrays
        """
        thread = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        quads = count >> 2
        if thread < quads:
            i = 4 * thread
            a, b, c, d = load4(g, i)
            a, b, c, d = weight * a, weight * b, weight * c, weight * d
            if not first:
                s, t, u, v = load4(total, i)
                a, b, c, d = a + s, b + t, c + u, d + v
            store4(out, i, a, b, c, d)
        j = 4 * quads + thread
        if j < count:
            value = weight * g[j]
            if not first:
                value = value + total[j]
            out[j] = value

    return accumulate_gradients_kernel


def bind(call: Call) -> list[Launch]:
    """One launch."""
    (g, total), (out,) = call.ins, call.outs
    count = numel(call.in_shapes[0])
    args = (g, total, out, np.int32(count), np.float32(call.attrs["weight"]))
    return [Launch(accumulate_kernel(bool(call.attrs["first"])), blocks(count, 4 * THREADS), THREADS, args)]


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`."""
    return [once(size(call, "in", 0) * (1 if call.attrs["first"] else 2), size(call, "out", 0))]


HOST, OPS = {"accumulate": host(accumulate)}, {"accumulate": Impl(bind, traffic=traffic)}


def cases(count: int = 1003) -> Iterator[Case]:
    """The first of several parts, one between, the last."""
    g, total = normal(18, count), normal(19, count)
    for first, out in ((True, 1), (False, 1), (False, 0)):
        yield Case("accumulate", "first" if first else f"into {out}", (g, total), (out,), {"weight": 0.375, "first": first}, 2)
