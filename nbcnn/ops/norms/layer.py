"""Layer normalisation: y = weight·(x − μ)/√(σ² + eps) + bias, μ and σ² of all elements of one example; the same in training and inference.

weight and bias have a value for every element of an example; the ops see them flat, in the order of the example's axes (of images C, H, W). With
g = dy, h = weight·g, x̂ = (x − μ)·rstd, rstd = 1/√(σ² + eps), K elements in an example:

    dbias = Σ_n g      dweight = Σ_n g·x̂      dx = rstd·(h − Σ h/K − x̂·Σ h·x̂/K)

An example is one row of elements, of which threads load 16 bytes at a time; its second reading begins where the first ended, and hits a cache. Of
images stored NHWC the parameters, which are in the order C, H, W, are put into storage order by a kernel of their own before: read where they lie,
each would be a load of its own. The mean is kept as one float32, as in batch normalisation.
Source: J. L. Ba, J. R. Kiros, G. E. Hinton, "Layer Normalization", arXiv:1607.06450.

    layernorm_fprop   x (N, …), weight, bias (K) -> y, mean, rstd (N)                         eps
    layernorm_grads   dy, x, weight, mean, rstd -> dx, dweight, dbias
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import SIMULATOR, cuda, f4, jit
from nbcnn.ops.kernel import maps
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.case import Case, Gradient, Shapes, label_of, normal
from nbcnn.ops.kernel.loops import power_of_two, quotient
from nbcnn.ops.kernel.share import IN_FLIGHT, Share, floats_io, lanes_io, rows_sum
from nbcnn.ops.kernel.stored import kinds, widest
from nbcnn.ops.kernel.traffic import Traffic, once, size
from nbcnn.ops.kernel.windows import split
from nbcnn.ops.norms.plane import column_sum, inverse_deviation, not_negative, rstd_of
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

Array = np.ndarray

LARGEST_BLOCK, SMALLEST_BLOCK = (16, 8) if SIMULATOR else (256, 32)
ACCESSES = 4
"""Accesses that a thread should have before a block gets more threads."""
ORDERED_THREADS = 8 if SIMULATOR else 256
"""Threads of a block that puts parameters into another order."""
GRADS_IN_FLIGHT = 2
"""Accesses to each of x and dy that a thread of the gradient has in flight."""
COLUMNS, ROWS = (4, 2) if SIMULATOR else (32, 8)
"""Elements and examples that a block adds side by side for the gradients of the parameters."""


def layernorm_fprop(x: Array, weight: Array, bias: Array, y: Array, mean: Array, rstd: Array, *, eps: float) -> None:
    """y = weight·x̂ + bias, and the statistics mean, rstd (N) that the gradients want."""
    flat = x.reshape(len(x), -1)
    away = flat - flat[:, :1]
    offset = away.mean(1)
    away = away - offset[:, None]
    mean[...] = flat[:, 0] + offset
    rstd[...] = inverse_deviation(np.square(away).mean(1) + eps)
    y[...] = (away * rstd[:, None] * weight + bias).reshape(x.shape)


def layernorm_grads(
    dy: Array, x: Array, weight: Array, mean: Array, rstd: Array, dx: Array, dweight: Array, dbias: Array
) -> None:  # fmt: skip
    """dx, dweight, dbias from dy and what the forward pass read and kept."""
    flat, g = x.reshape(len(x), -1), dy.reshape(len(x), -1)
    scale, h = rstd[:, None], g * weight
    normalised = (flat - mean[:, None]) * scale
    dweight[...], dbias[...] = (g * normalised).sum(0), g.sum(0)
    dx[...] = (scale * (h - h.mean(1, keepdims=True) - normalised * (h * normalised).mean(1, keepdims=True))).reshape(x.shape)


@cache
def ordered_kernel(back: bool) -> Any:
    """`back`: from storage order to that of the example's axes, else the other way round."""

    @jit()
    def layernorm_ordered_kernel(a, b, to_a, to_b, K, C, HW):
        """to_a, to_b = a, b of every element of an example of images stored NHWC, in the other order.

        grid ⌈K/256⌉, block 256; owns: one thread per element; shared none; moves 16·K bytes.
        """
        e = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if e < K:
            pixel, channel = split(e, C)
            at = channel * HW + pixel
            source, target = (e, at) if back else (at, e)
            to_a[target], to_b[target] = a[source], b[source]

    return layernorm_ordered_kernel


@cache
def fprop_kernel(kind: str, width: int, threads: int) -> Any:
    (load, store), (load_floats, _), in_block = lanes_io(kind, width), floats_io(width), column_sum(1, threads)
    WIDTH, THREADS, STEP, FLOATS, FLIGHT = width, threads, threads * width, IN_FLIGHT * width, IN_FLIGHT

    @jit(launch_bounds=(THREADS, 2))
    def layernorm_fprop_kernel(x, weight, bias, y, mean, rstd, K, eps):
        """y = weight·(x − μ)·rstd + bias; mean, rstd of every example. Sums are of distances from the example's first element.

        grid N, block 32–256; owns: one block per example, per thread `width` neighbouring elements of every THREADS·width.
        shared 4 bytes per thread; moves 8·x bytes (x is read again from its end, out of a cache). source: arXiv:1607.06450.
        """
        sums = cuda.shared.array(THREADS, f4)
        values = cuda.local.array(FLOATS, f4)
        factors = cuda.local.array(WIDTH, f4)
        biases = cuda.local.array(WIDTH, f4)
        n, tid = cuda.blockIdx.x, cuda.threadIdx.x
        start = n * K
        load(x, start, values, 0)
        lead, total, squares = values[0], 0.0, 0.0
        e = tid * WIDTH
        while e + (FLIGHT - 1) * STEP < K:
            for j in range(FLIGHT):
                load(x, start + e + j * STEP, values, j * WIDTH)
            for k in range(FLOATS):
                away = values[k] - lead
                total += away
                squares += away * away
            e += FLIGHT * STEP
        while e < K:
            load(x, start + e, values, 0)
            for q in range(WIDTH):
                away = values[q] - lead
                total += away
                squares += away * away
            e += STEP
        offset = in_block(sums, total) / K
        variance = in_block(sums, squares) / K - offset * offset
        scale = rstd_of(not_negative(variance) + eps)
        centre = lead + offset
        if tid == 0:
            mean[n] = centre
            rstd[n] = scale
        e = tid * WIDTH + quotient(K - 1 - tid * WIDTH, STEP) * STEP if tid * WIDTH < K else -1
        while e >= (FLIGHT - 1) * STEP:
            for j in range(FLIGHT):
                load(x, start + e - j * STEP, values, j * WIDTH)
            for j in range(FLIGHT):
                load_floats(weight, e - j * STEP, factors)
                load_floats(bias, e - j * STEP, biases)
                for q in range(WIDTH):
                    values[j * WIDTH + q] = (values[j * WIDTH + q] - centre) * scale * factors[q] + biases[q]
                store(y, start + e - j * STEP, values, j * WIDTH)
            e -= FLIGHT * STEP
        while e >= 0:
            load(x, start + e, values, 0)
            load_floats(weight, e, factors)
            load_floats(bias, e, biases)
            for q in range(WIDTH):
                values[q] = (values[q] - centre) * scale * factors[q] + biases[q]
            store(y, start + e, values, 0)
            e -= STEP

    return layernorm_fprop_kernel


@cache
def dgrad_kernel(kind: str, width: int, threads: int) -> Any:
    (load, store), (load_floats, _), in_block = lanes_io(kind, width), floats_io(width), column_sum(1, threads)
    WIDTH, THREADS, STEP, FLOATS, FLIGHT = width, threads, threads * width, GRADS_IN_FLIGHT * width, GRADS_IN_FLIGHT

    @jit(launch_bounds=(THREADS, 2))
    def layernorm_dgrad_kernel(dy, x, weight, mean, rstd, dx, K):
        """dx = rstd·(h − Σ h/K − x̂·Σ h·x̂/K), h = weight·dy.

        grid N, block 32–256; owns: one block per example, per thread `width` neighbouring elements of every THREADS·width.
        shared 4 bytes per thread; moves 12·x bytes (x and dy are read again from their end, out of a cache).
        """
        sums = cuda.shared.array(THREADS, f4)
        values = cuda.local.array(FLOATS, f4)
        grads = cuda.local.array(FLOATS, f4)
        factors = cuda.local.array(WIDTH, f4)
        n, tid = cuda.blockIdx.x, cuda.threadIdx.x
        start, centre, scale = n * K, mean[n], rstd[n]
        pull, slope = 0.0, 0.0
        e = tid * WIDTH
        while e + (FLIGHT - 1) * STEP < K:
            for j in range(FLIGHT):
                load(dy, start + e + j * STEP, grads, j * WIDTH)
                load(x, start + e + j * STEP, values, j * WIDTH)
            for j in range(FLIGHT):
                load_floats(weight, e + j * STEP, factors)
                for q in range(WIDTH):
                    h = grads[j * WIDTH + q] * factors[q]
                    pull += h
                    slope += h * (values[j * WIDTH + q] - centre)
            e += FLIGHT * STEP
        while e < K:
            load(dy, start + e, grads, 0)
            load(x, start + e, values, 0)
            load_floats(weight, e, factors)
            for q in range(WIDTH):
                h = grads[q] * factors[q]
                pull += h
                slope += h * (values[q] - centre)
            e += STEP
        pull, slope = in_block(sums, pull) / K, in_block(sums, slope) * scale * scale / K
        e = tid * WIDTH + quotient(K - 1 - tid * WIDTH, STEP) * STEP if tid * WIDTH < K else -1
        while e >= (FLIGHT - 1) * STEP:
            for j in range(FLIGHT):
                load(dy, start + e - j * STEP, grads, j * WIDTH)
                load(x, start + e - j * STEP, values, j * WIDTH)
            for j in range(FLIGHT):
                load_floats(weight, e - j * STEP, factors)
                for q in range(WIDTH):
                    h = grads[j * WIDTH + q] * factors[q]
                    values[j * WIDTH + q] = scale * (h - pull - slope * (values[j * WIDTH + q] - centre))
                store(dx, start + e - j * STEP, values, j * WIDTH)
            e -= FLIGHT * STEP
        while e >= 0:
            load(dy, start + e, grads, 0)
            load(x, start + e, values, 0)
            load_floats(weight, e, factors)
            for q in range(WIDTH):
                values[q] = scale * (grads[q] * factors[q] - pull - slope * (values[q] - centre))
            store(dx, start + e, values, 0)
            e -= STEP

    return layernorm_dgrad_kernel


@cache
def wgrad_kernel(kind: str, width: int) -> Any:
    share = Share(width, COLUMNS, ROWS, True)
    (load, _), (_, store_floats), add = lanes_io(kind, width), floats_io(width), rows_sum(share, 2 * width)
    WIDTH, THREADS, SUMS, MEMORY = width, share.threads, 2 * width, 2 * width * share.threads

    @jit()
    def layernorm_wgrad_kernel(dy, x, mean, rstd, dweight, dbias, N, K):
        """dweight = Σ_n dy·x̂, dbias = Σ_n dy of every element of an example.

        grid ⌈K/(32·width)⌉, block 256; owns: per thread `width` neighbouring elements of every eighth example. shared 8·width bytes per thread;
        moves 8·x bytes.
        """
        memory = cuda.shared.array(MEMORY, f4)
        values = cuda.local.array(WIDTH, f4)
        grads = cuda.local.array(WIDTH, f4)
        sums = cuda.local.array(SUMS, f4)
        tid = cuda.threadIdx.x
        row = tid // COLUMNS
        e = (cuda.blockIdx.x * COLUMNS + (tid - row * COLUMNS)) * WIDTH
        for k in range(SUMS):
            sums[k] = 0.0
        for n in range(row, N if e < K else 0, ROWS):
            load(dy, n * K + e, grads, 0)
            load(x, n * K + e, values, 0)
            centre, scale = mean[n], rstd[n]
            for q in range(WIDTH):
                sums[q] += grads[q]
                sums[WIDTH + q] += grads[q] * (values[q] - centre) * scale
        add(memory, sums)
        if row == 0 and e < K:
            for q in range(WIDTH):
                grads[q], values[q] = memory[q * THREADS + tid], memory[(WIDTH + q) * THREADS + tid]
            store_floats(dbias, e, grads)
            store_floats(dweight, e, values)

    return layernorm_wgrad_kernel


@dataclass(frozen=True)
class _Sizes:
    """How a call's examples are stored: elements of one, channels and pixels if weights lie in another order (NHWC), elements of an access."""

    kind: str
    volume: int
    planes: tuple[int, int] | None
    width: int

    @property
    def threads(self) -> int:
        """Threads of a block that has an example."""
        return min(max(power_of_two(-(-self.volume // (ACCESSES * self.width))), SMALLEST_BLOCK), LARGEST_BLOCK)

    def ordered(self, back: bool, arrays: Sequence[Any]) -> Launch:
        """The launch of `ordered_kernel` on two arrays and those that they go to."""
        assert self.planes is not None
        args = (*arrays, *(np.int32(each) for each in (self.volume, *self.planes)))
        return Launch(ordered_kernel(back), blocks(self.volume, ORDERED_THREADS), ORDERED_THREADS, args)


def _sizes(call: Call, image: int) -> _Sizes:
    shape, kind = call.in_shapes[image], kinds(call)[0]
    volume = numel(shape[1:])
    planes = (shape[1], volume // shape[1]) if len(shape) == 4 and call.layout == "NHWC" else None
    return _Sizes(kind, volume, planes, next(width for width in ((8, 4, 1) if widest(kind) == 8 else (4, 1)) if volume % width == 0))


def bind_fprop(call: Call) -> list[Launch]:
    """One launch; before it one that orders the parameters as the images are stored."""
    at, (x, weight, bias) = _sizes(call, 0), call.ins
    first = []
    if at.planes:
        stored = call.scratch[: scratch_fprop(call)].view(np.float32)
        first = [at.ordered(False, (weight, bias, stored[: at.volume], stored[at.volume :]))]
        weight, bias = stored[: at.volume], stored[at.volume :]
    args = (x, weight, bias, *call.outs, np.int32(at.volume), np.float32(call.attrs["eps"]))
    return [*first, Launch(fprop_kernel(at.kind, at.width, at.threads), call.in_shapes[0][0], at.threads, args)]


def bind_grads(call: Call) -> list[Launch]:
    """Two launches: dx; the gradients of the parameters. Around them those that order the parameters as the images are stored, and back."""
    at, (dy, x, weight, mean, rstd), (dx, dweight, dbias), n = _sizes(call, 1), call.ins, call.outs, call.in_shapes[1][0]
    first, last = [], []
    if at.planes:
        stored = call.scratch[: scratch_grads(call)].view(np.float32)
        one, two, three = (stored[k * at.volume : (k + 1) * at.volume] for k in range(3))
        first = [at.ordered(False, (weight, weight, one, two))]
        last = [at.ordered(True, (two, three, dweight, dbias))]
        weight, dweight, dbias = one, two, three
    k = np.int32(at.volume)
    grid, args = blocks(at.volume, COLUMNS * at.width), (dy, x, mean, rstd, dweight, dbias, np.int32(n), k)
    return [
        *first,
        Launch(dgrad_kernel(at.kind, at.width, at.threads), n, at.threads, (dy, x, weight, mean, rstd, dx, k)),
        Launch(wgrad_kernel(at.kind, at.width), grid, COLUMNS * ROWS, args),
        *last,
    ]


def scratch_fprop(call: Call) -> int:
    """Bytes of weight and bias in storage order, where that is another."""
    at = _sizes(call, 0)
    return 8 * at.volume if at.planes else 0


def scratch_grads(call: Call) -> int:
    """Bytes of the weight and of both gradients in storage order, where that is another."""
    at = _sizes(call, 1)
    return 12 * at.volume if at.planes else 0


def traffic_fprop(call: Call) -> list[Traffic]:
    """The parameters in another order; x twice, and the parameters for every example; y and two statistics."""
    x, n, volume = size(call, "in", 0), call.in_shapes[0][0], size(call, "in", 1)
    first = [once(2 * volume, 2 * volume)] if _sizes(call, 0).planes else []
    return [*first, Traffic(2 * x + 2 * n * volume, size(call, "out", 0) + 8 * n, x + 2 * volume)]


def traffic_grads(call: Call) -> list[Traffic]:
    """x and dy twice, and the weight for every example, dx; x and dy once more, the gradients of the parameters; these in another order."""
    both, n, volume = size(call, "in", 0) + size(call, "in", 1), call.in_shapes[1][0], size(call, "in", 2)
    first = Traffic(2 * both + 2 * n * volume + 8 * n, size(call, "out", 0), both + volume + 8 * n)
    made = [first, Traffic(both + 8 * n, 2 * volume, both + 8 * n)]
    return [Traffic(2 * volume, 2 * volume, volume), *made, once(2 * volume, 2 * volume)] if _sizes(call, 1).planes else made


HOST = {Op("layernorm", "fprop"): host(layernorm_fprop), Op("layernorm", "grads"): host(layernorm_grads)}
OPS = {
    Op("layernorm", "fprop"): Impl(bind_fprop, scratch_fprop, maps.supports, traffic=traffic_fprop),
    Op("layernorm", "grads"): Impl(bind_grads, scratch_grads, maps.supports, traffic=traffic_grads),
}


def _operands(ins: Any, outs: Any, v: np.ndarray) -> tuple[np.ndarray, ...]:
    return v, *ins[:2], *outs[1:]


GRADIENTS = {Op("layernorm", "grads"): Gradient(Op("layernorm", "fprop"), _operands, of=(0, 1, 2))}


def cases(shapes: Shapes = ((2, 7), (3, 40), (1, 3, 5, 3), (2, 8, 2, 3), (2, 3, 5))) -> Iterator[Case]:
    """Vectors, images and series, ten deviations from zero."""
    for shape in shapes:
        volume, n = numel(shape[1:]), shape[0]
        x, dy, weight, bias = normal(90, *shape) + np.float32(10), normal(91, *shape), 1 + 0.3 * normal(92, volume), normal(93, volume)
        out, kept, each, label, terms = (shape, "float32"), ((n,), "float32"), ((volume,), "float32"), label_of(shape), max(volume, n)
        statistics = np.empty((2, n), np.float32)
        layernorm_fprop(x, weight, bias, np.empty_like(x), *statistics, eps=1e-5)
        yield Case(Op("layernorm", "fprop"), label, (x, weight, bias), (out, kept, kept), {"eps": 1e-5}, terms)
        yield Case(Op("layernorm", "grads"), label, (dy, x, weight, *statistics), (out, each, each), {}, terms)


def real_cases() -> Iterator[Case]:
    """Examples larger than a block, and more of them than a block adds at once."""
    yield from cases(((300, 1000), (16, 24, 17, 15)))
