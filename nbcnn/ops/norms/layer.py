"""Layer normalisation: y = weight·(x − μ)/√(σ² + eps) + bias, μ and σ² of all elements of one example; the same in training and inference.

weight and bias have a value for every element of an example; the ops see them flat, in the order of the example's axes (of images C, H, W). With
g = dy, h = weight·g, x̂ = (x − μ)·rstd, rstd = 1/√(σ² + eps), K elements in an example:

    dbias = Σ_n g      dweight = Σ_n g·x̂      dx = rstd·(h − Σ h/K − x̂·Σ h·x̂/K)

A mean is kept as its distance from the first element of its example (its *shift*), so that x − μ keeps its digits under a large offset.
Source: J. L. Ba, J. R. Kiros, G. E. Hinton, "Layer Normalization", arXiv:1607.06450.

    layernorm_fprop   x (N, …), weight, bias (K) -> y, shift, rstd (N)                        eps
    layernorm_grads   dy, x, weight, shift, rstd -> dx, dweight, dbias
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import SIMULATOR, cuda, f4, jit
from nbcnn.ops.kernel import elementwise
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.case import Case, Gradient, Shapes, label_of, normal
from nbcnn.ops.kernel.loops import power_of_two
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.traffic import Traffic, size
from nbcnn.ops.kernel.windows import split
from nbcnn.ops.norms.plane import column_sum
from nbcnn.plan.shapes import numel

Array = np.ndarray

LARGEST_BLOCK, SMALLEST_BLOCK = (16, 8) if SIMULATOR else (256, 32)
ELEMENTS_PER_THREAD = 4
"""Elements that a thread should have before a block gets more threads."""
COLUMNS, ROWS = (4, 2) if SIMULATOR else (32, 8)
"""Elements and examples that a block adds side by side for the gradients of the parameters."""


def layernorm_fprop(x: Array, weight: Array, bias: Array, y: Array, shift: Array, rstd: Array, *, eps: float) -> None:
    """y = weight·x̂ + bias, and the statistics shift, rstd (N) that the gradients want."""
    flat = x.reshape(len(x), -1)
    away = flat - flat[:, :1]
    shift[...] = away.mean(1)
    away = away - shift[:, None]
    rstd[...] = 1 / np.sqrt(np.square(away).mean(1) + eps)
    y[...] = (away * rstd[:, None] * weight + bias).reshape(x.shape)


def layernorm_grads(
    dy: Array, x: Array, weight: Array, shift: Array, rstd: Array, dx: Array, dweight: Array, dbias: Array
) -> None:  # fmt: skip
    """dx, dweight, dbias from dy and what the forward pass read and kept."""
    flat, g = x.reshape(len(x), -1), dy.reshape(len(x), -1)
    scale, h = rstd[:, None], g * weight
    normalised = (flat - flat[:, :1] - shift[:, None]) * scale
    dweight[...], dbias[...] = (g * normalised).sum(0), g.sum(0)
    dx[...] = (scale * (h - h.mean(1, keepdims=True) - normalised * (h * normalised).mean(1, keepdims=True))).reshape(x.shape)


@cache
def weight_of(planes: bool) -> Any:
    """Device function (e, C, HW) -> the place in the weight of element e of an example, as it is stored; `planes`: of images stored NHWC."""

    @jit(device=True)
    def of_pixels(e, C, HW):
        pixel, channel = split(e, C)
        return channel * HW + pixel

    @jit(device=True)
    def same(e, C, HW):
        return e

    return of_pixels if planes else same


@cache
def fprop_kernel(kind: str, threads: int, planes: bool) -> Any:
    (load, store), in_block, place = scalar_io(kind), column_sum(1, threads), weight_of(planes)
    THREADS = threads

    @jit()
    def layernorm_fprop_kernel(x, weight, bias, y, shift, rstd, K, C, HW, eps):
        """y = weight·(x − μ)·rstd + bias; shift, rstd of every example.

        grid N, block 32–256; owns: a block an example, a thread every THREADS-th element of it.
        shared 4 bytes a thread; moves 8·x bytes (two further reads of x hit a cache). source: arXiv:1607.06450.
        """
        values = cuda.shared.array(THREADS, f4)
        n, tid = cuda.blockIdx.x, cuda.threadIdx.x
        start = n * K
        lead, total = load(x, start), 0.0
        for e in range(tid, K, THREADS):
            total += load(x, start + e) - lead
        offset = in_block(values, total) / K
        total = 0.0
        for e in range(tid, K, THREADS):
            away = load(x, start + e) - lead - offset
            total += away * away
        scale = 1.0 / math.sqrt(in_block(values, total) / K + eps)
        if tid == 0:
            shift[n] = offset
            rstd[n] = scale
        for e in range(tid, K, THREADS):
            at = place(e, C, HW)
            store(y, start + e, (load(x, start + e) - lead - offset) * scale * weight[at] + bias[at])

    return layernorm_fprop_kernel


@cache
def dgrad_kernel(kind: str, threads: int, planes: bool) -> Any:
    (load, store), in_block, place = scalar_io(kind), column_sum(1, threads), weight_of(planes)
    THREADS = threads

    @jit()
    def layernorm_dgrad_kernel(dy, x, weight, shift, rstd, dx, K, C, HW):
        """dx = rstd·(h − Σ h/K − x̂·Σ h·x̂/K), h = weight·dy.

        grid N, block 32–256; owns: a block an example, a thread every THREADS-th element of it.
        shared 4 bytes a thread; moves 12·x bytes (the second read of x and dy hits a cache).
        """
        values = cuda.shared.array(THREADS, f4)
        n, tid = cuda.blockIdx.x, cuda.threadIdx.x
        start = n * K
        lead, offset, scale = load(x, start), shift[n], rstd[n]
        pull, slope = 0.0, 0.0
        for e in range(tid, K, THREADS):
            h = load(dy, start + e) * weight[place(e, C, HW)]
            pull += h
            slope += h * (load(x, start + e) - lead - offset)
        pull, slope = in_block(values, pull) / K, in_block(values, slope) * scale * scale / K
        for e in range(tid, K, THREADS):
            h = load(dy, start + e) * weight[place(e, C, HW)]
            store(dx, start + e, scale * (h - pull - slope * (load(x, start + e) - lead - offset)))

    return layernorm_dgrad_kernel


@cache
def wgrad_kernel(kind: str, planes: bool) -> Any:
    (load, _), in_column, place = scalar_io(kind), column_sum(COLUMNS, COLUMNS * ROWS), weight_of(planes)
    THREADS = COLUMNS * ROWS

    @jit()
    def layernorm_wgrad_kernel(dy, x, shift, rstd, dweight, dbias, N, K, C, HW):
        """dweight = Σ_n dy·x̂, dbias = Σ_n dy of every element of an example.

        grid ⌈K/32⌉, block 256; owns: a block 32 elements, a thread every eighth example of one. shared 4 bytes a thread; moves 8·x bytes.
        """
        values = cuda.shared.array(THREADS, f4)
        tid = cuda.threadIdx.x
        e = cuda.blockIdx.x * COLUMNS + (tid & COLUMNS - 1)
        plain, centred = 0.0, 0.0
        for n in range(tid // COLUMNS, N if e < K else 0, ROWS):
            g = load(dy, n * K + e)
            plain += g
            centred += g * (load(x, n * K + e) - load(x, n * K) - shift[n]) * rstd[n]
        plain, centred = in_column(values, plain), in_column(values, centred)
        if tid < COLUMNS and e < K:
            at = place(e, C, HW)
            dbias[at], dweight[at] = plain, centred

    return layernorm_wgrad_kernel


def _extents(call: Call, image: int) -> tuple[bool, int, tuple[np.int32, ...]]:
    """Whether weights lie in another order than elements, threads of a block, and (K, C, H·W)."""
    shape = call.in_shapes[image]
    volume = numel(shape[1:])
    planes = len(shape) == 4 and call.layout == "NHWC"
    threads = min(max(power_of_two(-(-volume // ELEMENTS_PER_THREAD)), SMALLEST_BLOCK), LARGEST_BLOCK)
    c = shape[1] if planes else 1
    return planes, threads, tuple(np.int32(each) for each in (volume, c, volume // c))


def bind_fprop(call: Call) -> list[Launch]:
    """One launch."""
    planes, threads, extents = _extents(call, 0)
    args = (*call.ins, *call.outs, *extents, np.float32(call.attrs["eps"]))
    return [Launch(fprop_kernel(kinds(call)[0], threads, planes), call.in_shapes[0][0], threads, args)]


def bind_grads(call: Call) -> list[Launch]:
    """Two launches: dx; the gradients of the parameters."""
    planes, threads, extents = _extents(call, 1)
    (dy, x, _, shift, rstd), (dx, dweight, dbias), n = call.ins, call.outs, call.in_shapes[1][0]
    kind = kinds(call)[0]
    args = (dy, x, shift, rstd, dweight, dbias, np.int32(n), *extents)
    return [
        Launch(dgrad_kernel(kind, threads, planes), n, threads, (*call.ins, dx, *extents)),
        Launch(wgrad_kernel(kind, planes), blocks(int(extents[0]), COLUMNS), COLUMNS * ROWS, args),
    ]


def traffic_fprop(call: Call) -> list[Traffic]:
    """x three times, and the parameters for every example; y and two statistics."""
    x, n, volume = size(call, "in", 0), call.in_shapes[0][0], size(call, "in", 1)
    return [Traffic(3 * x + 2 * n * volume, size(call, "out", 0) + 8 * n, x + 2 * volume)]


def traffic_grads(call: Call) -> list[Traffic]:
    """x and dy twice, and the weight for every example, dx; x and dy once more, the gradients of the parameters."""
    both, n, volume = size(call, "in", 0) + size(call, "in", 1), call.in_shapes[1][0], size(call, "in", 2)
    first = Traffic(2 * both + 2 * n * volume + 8 * n, size(call, "out", 0), both + volume + 8 * n)
    return [first, Traffic(both + 8 * n, 2 * volume, both + 8 * n)]


HOST = {"layernorm_fprop": host(layernorm_fprop), "layernorm_grads": host(layernorm_grads)}
OPS = {
    "layernorm_fprop": Impl(bind_fprop, supports=elementwise.supports, traffic=traffic_fprop),
    "layernorm_grads": Impl(bind_grads, supports=elementwise.supports, traffic=traffic_grads),
}


def _operands(ins: Any, outs: Any, v: np.ndarray) -> tuple[np.ndarray, ...]:
    return v, *ins[:2], *outs[1:]


GRADIENTS = {"layernorm_grads": Gradient("layernorm_fprop", _operands, of=(0, 1, 2))}


def cases(shapes: Shapes = ((2, 7), (3, 40), (1, 3, 5, 3), (2, 8, 2, 3), (2, 3, 5))) -> Iterator[Case]:
    """Vectors, images and series, ten deviations from zero."""
    for shape in shapes:
        volume, n = numel(shape[1:]), shape[0]
        x, dy, weight, bias = normal(90, *shape) + np.float32(10), normal(91, *shape), 1 + 0.3 * normal(92, volume), normal(93, volume)
        out, kept, each, label, terms = (shape, "float32"), ((n,), "float32"), ((volume,), "float32"), label_of(shape), max(volume, n)
        statistics = np.empty((2, n), np.float32)
        layernorm_fprop(x, weight, bias, np.empty_like(x), *statistics, eps=1e-5)
        yield Case("layernorm_fprop", label, (x, weight, bias), (out, kept, kept), {"eps": 1e-5}, terms)
        yield Case("layernorm_grads", label, (dy, x, weight, *statistics), (out, each, each), {}, terms)


def real_cases() -> Iterator[Case]:
    """Examples larger than a block, and more of them than a block adds at once."""
    yield from cases(((300, 1000), (16, 24, 17, 15)))
