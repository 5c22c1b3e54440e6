"""Losses of two tensors of one shape, element by element: loss = Σ f(y, target) / count, dy = f′(y, target) / count.

A loss is an entry of LOSSES; reference, kernels and cases of its two ops follow from it:

    mse_fprop, mse_dgrad       f = (y − t)²                                   f′ = 2 (y − t)
    l1_fprop, l1_dgrad         f = |y − t|                                    f′ = sign(y − t), 0 where they are equal
    huber_fprop, huber_dgrad   f = d²/2 where |d| ≤ delta, else delta·(|d| − delta/2), d = y − t        f′ = d cut to ±delta
    bce_fprop, bce_dgrad       f = max(y, 0) − y·t + log(1 + exp(−|y|)), y a logit, t in 0..1           f′ = sigmoid(y) − t

    NAME_fprop        y, target -> loss () float64                                            mean over all elements      delta of huber
    NAME_dgrad        y, target -> dy                                                                                     delta of huber

Sources: P. J. Huber, "Robust estimation of a location parameter", 1964; the form of the binary cross-entropy that takes no exponential of a
positive number is that of torch.nn.BCEWithLogitsLoss and tf.nn.sigmoid_cross_entropy_with_logits.

f is computed in float32, in a handful of roundings, and summed in float64 in a fixed order (kernel/reduce.py). A NaN stays a NaN. The square of mse
is float64: a difference rounded by a factor (1 + δ), |δ| ≤ 2^-24, has a square that is off by at most 2^-23, so the loss is within one float32 eps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, jit, types
from nbcnn.ops.activations.activation import frozen
from nbcnn.ops.activations.sigmoid import sigmoid
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import IMAGES, Case, Gradient, Shapes, label_of, normal
from nbcnn.ops.kernel.maps import launch_map
from nbcnn.ops.kernel.reduce import QUADS, QUADS_PER_BLOCK, THREADS, add_partials, block_sum, f8, partial_bytes, sum_blocks
from nbcnn.ops.kernel.stored import scalar_io, vector_load_if
from nbcnn.ops.kernel.traffic import Traffic, once, size, streamed
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel


@dataclass(frozen=True)
class Pairwise:
    """A loss f with its derivative in y: an entry of LOSSES.

    terms, slopes    the NumPy references: (y, target, **parameters) -> the elements of f, and of f′.
    value, gradient  the same for one element on the GPU: device functions (y, target, *parameters) -> float32, or float64 of f.
    parameters       f's parameters, with the values that its cases have.
    """

    name: str
    terms: Callable[..., np.ndarray]
    slopes: Callable[..., np.ndarray]
    value: Any
    gradient: Any
    parameters: Mapping[str, float] = field(default_factory=dict)

    def fprop(self, y: np.ndarray, target: np.ndarray, loss: np.ndarray, **parameters: float) -> None:
        """loss () float64 = the mean of f(y, target) over all elements; y and target of one shape."""
        loss[...] = self.terms(y, target, **parameters).mean(dtype=np.float64)

    def dgrad(self, y: np.ndarray, target: np.ndarray, dy: np.ndarray, **parameters: float) -> None:
        """dy = f′(y, target) / count."""
        np.multiply(self.slopes(y, target, **parameters), y.dtype.type(1 / y.size), out=dy)

    def frozen(self, function: Any, call: Call) -> Any:
        """The device function with the parameters of the call."""
        return frozen(function, tuple(float(call.attrs[name]) for name in self.parameters))

    def bind_fprop(self, call: Call) -> list[Launch]:
        """Partial sums of blocks, then their sum; one launch where one block is enough."""
        (y, target), (loss,) = call.ins, call.outs
        count = numel(call.in_shapes[0])
        grid, kernel = sum_blocks(count), fprop_kernel(self.name, self.frozen(self.value, call), *_kinds(call))
        if grid == 1:
            return [Launch(kernel, 1, THREADS, (y, target, np.int32(count), np.float64(1 / count), loss))]
        partials = call.scratch.view(np.float64)
        return [
            Launch(kernel, grid, THREADS, (y, target, np.int32(count), np.float64(1), partials)),
            add_partials(partials, grid, 1 / count, loss),
        ]

    def bind_dgrad(self, call: Call) -> list[Launch]:
        """One launch."""
        scale = np.float32(1 / numel(call.in_shapes[0]))
        return launch_map("pair_loss_dgrad_kernel", _scaled(self.frozen(self.gradient, call)), call, scale)


def _squares(y: np.ndarray, target: np.ndarray) -> np.ndarray:
    return np.square(y - target, dtype=np.float64)


@jit(device=True)
def _square(y, t):
    d = f8(y - t)
    return d * d


@jit(device=True)
def _twice_the_difference(y, t):
    return 2.0 * (y - t)


@jit(device=True)
def _distance(y, t):
    return abs(y - t)


@jit(device=True)
def _sign(y, t):
    d = y - t
    # NaN is neither, and stays: a difference that is lost would hide where a training run broke.
    return 1.0 if d > 0.0 else -1.0 if d < 0.0 else 0.0 * d


def _huber_terms(y: np.ndarray, target: np.ndarray, delta: float) -> np.ndarray:
    d = np.abs(y - target)
    return np.where(d <= delta, d * d / 2, delta * (d - delta / 2))


@jit(device=True)
def _huber(y, t, delta):
    d = abs(y - t)
    return d * d * 0.5 if d <= delta else delta * (d - delta / 2.0)


@jit(device=True)
def _huber_gradient(y, t, delta):
    d = y - t
    return delta if d > delta else -delta if d < -delta else d


def _bce_terms(y: np.ndarray, target: np.ndarray) -> np.ndarray:
    return np.maximum(y, 0) - y * target + np.log1p(np.exp(-np.abs(y)))


def _bce_slopes(y: np.ndarray, target: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(y))
    return np.where(y < 0, e, 1) / (1 + e) - target


@jit(device=True)
def _bce(y, t):
    return (0.0 if y < 0.0 else y) - y * t + math.log1p(math.exp(-abs(y)))


@jit(device=True)
def _bce_gradient(y, t):
    return sigmoid(y) - t


LOSSES = {
    each.name: each
    for each in (
        Pairwise("mse", _squares, lambda y, target: 2 * (y - target), _square, _twice_the_difference),
        Pairwise("l1", lambda y, target: np.abs(y - target), lambda y, target: np.sign(y - target), _distance, _sign),
        Pairwise(
            "huber",
            _huber_terms,
            lambda y, target, delta: np.clip(y - target, -delta, delta),
            _huber,
            _huber_gradient,
            {"delta": 0.7},
        ),
        Pairwise("bce", _bce_terms, _bce_slopes, _bce, _bce_gradient),
    )
}
"""By name: the ops are NAME_fprop and NAME_dgrad."""


@cache
def fprop_kernel(name: str, function: Any, kind: str, target_kind: str) -> Any:
    """The kernel of the sums of `function`; y stored as `kind`, target as `target_kind`."""
    load, load4_if = scalar_io(kind)[0], vector_load_if(kind)
    load_target, load4_target_if = scalar_io(target_kind)[0], vector_load_if(target_kind)

    @jit()
    def pair_loss_fprop_kernel(y, target, count, scale, total):
        """total[block] = scale · Σ f(y, target) over the elements of the block.

        grid    min(⌈count / 4096⌉, 1024), block 256
        owns    thread: four groups of four elements in every 4096·grid
        shared  2 KiB
        moves   8·count bytes of float32; y and target aligned for groups of four
        """
        sums = cuda.shared.array(THREADS, types.float64)
        tid = cuda.threadIdx.x
        block = cuda.blockIdx.x
        quads = count >> 2
        mine = f8(0)
        # Not a range: Numba counts its iterations by a 64-bit division when the stride is no constant.
        start = block * QUADS_PER_BLOCK
        while start < quads:
            for j in range(QUADS):
                quad = start + j * THREADS + tid
                y0, y1, y2, y3 = load4_if(y, quad * 4, quad < quads)
                t0, t1, t2, t3 = load4_target_if(target, quad * 4, quad < quads)
                if quad < quads:
                    mine += f8(function(y0, t0)) + f8(function(y1, t1)) + f8(function(y2, t2)) + f8(function(y3, t3))
            start += cuda.gridDim.x * QUADS_PER_BLOCK
        tail = 4 * quads + tid
        if block == 0 and tail < count:
            mine += f8(function(load(y, tail), load_target(target, tail)))
        value = block_sum(sums, mine)
        if tid == 0:
            total[block] = scale * value

    return pair_loss_fprop_kernel


@cache
def _scaled(slope: Any) -> Any:
    """Device function (y, target, scale) -> scale · f′(y, target)."""

    @jit(device=True)
    def scaled(y, target, scale):
        return scale * slope(y, target)

    return scaled


def _kinds(call: Call) -> tuple[str, str]:
    """How y and the target are stored."""
    return (call.in_dtypes[0], call.in_dtypes[1]) if call.in_dtypes else ("float32", "float32")


def scratch_fprop(call: Call) -> int:
    """Partial sums of the blocks."""
    return partial_bytes(sum_blocks(numel(call.in_shapes[0])))


def traffic_fprop(call: Call) -> list[Traffic]:
    """Bytes of `Pairwise.bind_fprop`."""
    read, grid = size(call, "in", 0) + size(call, "in", 1), sum_blocks(numel(call.in_shapes[0]))
    return [once(read, 8 * grid), *([once(8 * grid, 8)] if grid > 1 else [])]


def host_of(each: Pairwise) -> dict[Op, Impl]:
    """The references of both passes of a loss."""
    return {Op(each.name, "fprop"): host(each.fprop), Op(each.name, "dgrad"): host(each.dgrad)}


def ops_of(each: Pairwise) -> dict[Op, Impl]:
    """The kernels of both passes of a loss, in every GPU row."""
    fprop, dgrad = Impl(each.bind_fprop, scratch_fprop, traffic=traffic_fprop), Impl(each.bind_dgrad, traffic=streamed)
    return {Op(each.name, "fprop"): fprop, Op(each.name, "dgrad"): dgrad}


HOST = {op: impl for each in LOSSES.values() for op, impl in host_of(each).items()}
OPS = {op: impl for each in LOSSES.values() for op, impl in ops_of(each).items()}
GRADIENTS = {Op(name, "dgrad"): Gradient(Op(name, "fprop"), lambda ins, outs, v: (ins[0], ins[1]), loss=True) for name in LOSSES}


def cases(images: Shapes = IMAGES) -> Iterator[Case]:
    """Every loss and its gradient; targets of the binary cross-entropy lie in 0..1."""
    for shape in images:
        y, label = 2 * normal(12, *shape), label_of(shape)
        for each in LOSSES.values():
            target = normal(13, *shape)
            if each.name == "bce":
                target = np.clip(np.abs(target) / 2, 0, 1)
            attrs = dict(each.parameters)
            yield Case(Op(each.name, "fprop"), label, (y, target), (((), "float64"),), attrs, numel(shape))
            yield Case(Op(each.name, "dgrad"), label, (y, target), ((shape, "float32"),), attrs, 4)
