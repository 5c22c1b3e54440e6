"""Root mean squared logarithmic error of predictions p = unit·y against targets t, both counted from 0 up:

    d_i  = log(1 + max(p_i, 0) + ε) − log(1 + max(t_i, 0) + ε),   loss = √(mean d²)
    dy_i = unit·[p_i > 0]·d_i / (n·loss·(1 + p_i + ε)),           all 0 where the loss is 0

`unit` lets a network whose outputs are near 1 predict large readings. A prediction below 0 has no gradient.

    rmsle_fprop       y, target -> loss () float64                                            unit
    rmsle_dgrad       y, target, loss -> dy                                                   unit
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit, types
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.case import Case, Gradient, normal
from nbcnn.ops.kernel.maps import launch_map
from nbcnn.ops.kernel.reduce import MAX_BLOCKS, THREADS, block_sum, f8, partial_bytes, sum_of
from nbcnn.ops.kernel.stored import scalar_io
from nbcnn.ops.kernel.traffic import Traffic, once, outputs, size
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

EPSILON = 1e-6


def _differences(y: np.ndarray, target: np.ndarray, unit: float) -> tuple[np.ndarray, np.ndarray]:
    """d and max(p, 0), of y's dtype."""
    p = np.maximum(y * y.dtype.type(unit), 0)
    return np.log1p(p + y.dtype.type(EPSILON)) - np.log1p(np.maximum(target, 0) + y.dtype.type(EPSILON)), p


def rmsle_fprop(y: np.ndarray, target: np.ndarray, loss: np.ndarray, *, unit: float) -> None:
    """loss () float64 = √(mean d²); y and target of one shape."""
    loss[...] = np.sqrt(np.square(_differences(y, target, unit)[0], dtype=np.float64).mean())


def rmsle_dgrad(y: np.ndarray, target: np.ndarray, loss: np.ndarray, dy: np.ndarray, *, unit: float) -> None:
    """dy from y, target and the loss () float64 that `rmsle_fprop` made of them."""
    d, p = _differences(y, target, unit)
    scale = unit / (y.size * float(loss)) if float(loss) > 0 else 0.0
    np.multiply(np.where(p > 0, d / (1 + p + y.dtype.type(EPSILON)), 0), y.dtype.type(scale), out=dy)


@jit(device=True)
def _log_of(value):
    return math.log1p(max(value, 0.0) + EPSILON)


@functools.cache
def fprop_kernel(kind: str, target_kind: str) -> Any:
    """The kernel of the sums; y stored as `kind`, target as `target_kind`."""
    load, load_target = scalar_io(kind)[0], scalar_io(target_kind)[0]

    @jit()
    def rmsle_fprop_kernel(y, target, count, unit, total):
        """total[block] = Σ d² over every (256·grid)th element from the block's on.

        grid min(⌈count/256⌉, 1024), block 256; a thread owns every (256·grid)th element. shared 2 KiB; moves 8·count bytes of float32.
        """
        sums = cuda.shared.array(THREADS, types.float64)
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        mine = f8(0)
        while i < count:
            p = unit * load(y, i)
            d = f8(_log_of(p) - _log_of(load_target(target, i)))
            # max drops a NaN: without this line a diverged network would look finite.
            mine += d * d if p == p else f8(p)
            i += THREADS * cuda.gridDim.x
        value = block_sum(sums, mine)
        if cuda.threadIdx.x == 0:
            total[cuda.blockIdx.x] = value

    return rmsle_fprop_kernel


@jit()
def root_mean_kernel(partials, count, scale, loss):
    """loss = √(scale · Σ partials[:count]).

    grid 1, block 256, owns the sum; shared 2 KiB; moves 8·count bytes.
    """
    value = sum_of(partials, count)
    if cuda.threadIdx.x == 0:
        loss[0] = math.sqrt(scale * value)


@jit(device=True)
def _settings(loss, state, norm, numbers):
    """unit, and unit/(count·loss), 0 where the loss is 0: one division in float64 per thread."""
    whole = loss[0]
    return numbers[0], f4(numbers[1] / whole) if whole > f8(0) else 0.0


@jit(device=True)
def _gradient(y, target, unit, factor):
    """factor·[p > 0]·d/(1 + p + ε) with p = unit·y; 0 where the loss is 0."""
    p = unit * y
    return factor * ((_log_of(p) - _log_of(target)) / (1.0 + p + EPSILON)) if p > 0.0 and factor > 0.0 else 0.0


def _kinds(call: Call) -> tuple[str, str]:
    return (call.in_dtypes[0], call.in_dtypes[1]) if call.in_dtypes else ("float32", "float32")


def _grid(call: Call) -> int:
    return min(blocks(numel(call.in_shapes[0]), THREADS), MAX_BLOCKS)


def scratch_fprop(call: Call) -> int:
    """One float64 per block, also for a single one: the root is taken of the sum."""
    return max(partial_bytes(_grid(call)), 8)


def bind_fprop(call: Call) -> list[Launch]:
    """Partial sums, then the root of their mean."""
    (y, target), (loss,) = call.ins, call.outs
    count, grid, partials = numel(call.in_shapes[0]), _grid(call), call.scratch.view(np.float64)
    sums = Launch(fprop_kernel(*_kinds(call)), grid, THREADS, (y, target, np.int32(count), np.float32(call.attrs["unit"]), partials))
    return [sums, Launch(root_mean_kernel, 1, THREADS, (partials, np.int32(grid), np.float64(1 / count), loss))]


def bind_dgrad(call: Call) -> list[Launch]:
    """One launch."""
    unit, loss = call.attrs["unit"], call.ins[2]
    numbers = np.float32(unit), np.float64(unit / numel(call.in_shapes[0]))
    return launch_map("rmsle_dgrad_kernel", _gradient, call, *numbers, reads=2, prelude=_settings, arrays=(loss,))


def traffic_fprop(call: Call) -> list[Traffic]:
    """Bytes of `bind_fprop`: predictions and targets, partial sums; then those."""
    partials = 8 * _grid(call)
    return [once(size(call, "in", 0) + size(call, "in", 1), partials), once(partials, 8)]


def traffic_dgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_dgrad`, where every prediction is above 0; for others the target is not read."""
    return [once(size(call, "in", 0) + size(call, "in", 1), outputs(call))]


HOST = {Op("rmsle", "fprop"): host(rmsle_fprop), Op("rmsle", "dgrad"): host(rmsle_dgrad)}
OPS = {Op("rmsle", "fprop"): Impl(bind_fprop, scratch_fprop, traffic=traffic_fprop), Op("rmsle", "dgrad"): Impl(bind_dgrad, traffic=traffic_dgrad)}
GRADIENTS = {Op("rmsle", "dgrad"): Gradient(Op("rmsle", "fprop"), lambda ins, outs, v: (ins[0], ins[1], outs[0]), loss=True)}


def cases() -> Iterator[Case]:
    """The loss and its gradient, of batches of one, of less than a warp, and of more than a block."""
    for n in (1, 7, 600):
        y, target = normal(47, n, 1) + np.float32(0.8), np.abs(9 * normal(48, n, 1))
        p, t = (np.log1p(np.maximum(v.astype(np.float64), 0) + 1e-6) for v in (3 * y, target))
        loss = np.array(np.sqrt(np.square(p - t).mean()))
        yield Case(Op("rmsle", "fprop"), f"{n}", (y, target), (((), "float64"),), {"unit": 3.0}, n)
        yield Case(Op("rmsle", "dgrad"), f"{n}", (y, target, loss), (((n, 1), "float32"),), {"unit": 3.0}, 16)
