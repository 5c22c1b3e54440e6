"""Losses of two tensors of one shape, element by element: loss = Σ f(y, target) / count, dy = f′(y, target) / count.

A loss is an entry of LOSSES; reference, kernels and cases of its two ops follow from it:

    mse_fprop, mse_dgrad       f = (y − t)²                                   f′ = 2 (y − t)
    l1_fprop, l1_dgrad         f = |y − t|                                    f′ = sign(y − t), 0 where they are equal
    huber_fprop, huber_dgrad   f = d²/2 where |d| ≤ delta, else delta·(|d| − delta/2), d = y − t        f′ = d cut to ±delta
    bce_fprop, bce_dgrad       f = max(y, 0) − y·t + log(1 + exp(−|y|)), y a logit, t in 0..1           f′ = sigmoid(y) − t

    rmsle_fprop, rmsle_dgrad   the root of the mean of f = d², d = log(1 + max(p, 0) + ε) − log(1 + max(t, 0) + ε), p = unit·y
                                                                                f′ = 2·unit·[p > 0]·d / (1 + p + ε)

    NAME_fprop        y, target -> loss () float64            mean over all elements; delta of huber, unit of rmsle
    NAME_dgrad        y, target[, loss of rmsle] -> dy        delta of huber, unit of rmsle

RMSLE, the root mean squared logarithmic error, is of predictions p and targets t that both count from 0 up. `unit` lets a network whose outputs are
near 1 predict large readings. A prediction below 0 has no gradient, and where the loss is 0 none has: √m has the derivative 1/(2·√m).

Sources: P. J. Huber, "Robust estimation of a location parameter", 1964; the form of the binary cross-entropy that takes no exponential of a
positive number is that of torch.nn.BCEWithLogitsLoss and tf.nn.sigmoid_cross_entropy_with_logits.

f is computed in float32, in a handful of roundings, and summed in float64 in a fixed order (kernel/reduce.py). A NaN stays a NaN, but in
RMSLE, where a prediction of NaN has the gradient 0 and a target of NaN may count as 0. The square of mse
is float64: a difference rounded by a factor (1 + δ), |δ| ≤ 2^-24, has a square that is off by at most 2^-23, so the loss is within one float32 eps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import f4, jit
from nbcnn.gpu.lockstep.arrays import on_arrays
from nbcnn.ops.activations.activation import frozen
from nbcnn.ops.activations.sigmoid import sigmoid
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import IMAGES, Case, Gradient, Shapes, label_of, normal
from nbcnn.ops.kernel.maps import launch_map
from nbcnn.ops.kernel.reduce import f8, launch_sum, scratch_of_sum, traffic_of_sum
from nbcnn.ops.kernel.traffic import mapped
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel


@dataclass(frozen=True)
class Pairwise:
    """A loss f with its derivative in y: an entry of LOSSES.

    value, gradient  f and f′ for one element: device functions (y, target, *parameters) -> float32, or float64 of f. NumPy runs them on arrays.
    parameters       f's parameters, with the values that its cases have.
    root             the loss is √(mean of f), and its gradient reads it.
    """

    name: str
    value: Any
    gradient: Any
    parameters: Mapping[str, float] = field(default_factory=dict)
    root: bool = False

    def frozen(self, function: Any, attrs: Mapping[str, Any]) -> Any:
        """`value` or `gradient` with the parameters of a step."""
        return frozen(function, tuple(float(attrs[name]) for name in self.parameters))

    def terms(self, y: np.ndarray, target: np.ndarray, **attrs: float) -> np.ndarray:
        """f of every element."""
        return on_arrays(self.frozen(self.value, attrs))(y, np.asarray(target, y.dtype))

    def slopes(self, y: np.ndarray, target: np.ndarray, **attrs: float) -> np.ndarray:
        """f′ of every element."""
        return on_arrays(self.frozen(self.gradient, attrs))(y, np.asarray(target, y.dtype))

    def fprop(self, y: np.ndarray, target: np.ndarray, loss: np.ndarray, **attrs: float) -> None:
        """loss () float64 = the mean of f(y, target) over all elements, or its root; y and target of one shape."""
        mean = self.terms(y, target, **attrs).mean(dtype=np.float64)
        loss[...] = np.sqrt(mean) if self.root else mean

    def dgrad(self, y: np.ndarray, target: np.ndarray, *operands: np.ndarray, **attrs: float) -> None:
        """dy = f′(y, target) / count; operands: [the loss () float64, of whose root it is the gradient,] dy."""
        *loss, dy = operands
        scale = 1 / y.size
        if self.root:
            scale = 0.5 / (y.size * float(loss[0])) if float(loss[0]) > 0 else 0.0
        np.multiply(self.slopes(y, target, **attrs), y.dtype.type(scale), out=dy)

    def bind_fprop(self, call: Call) -> list[Launch]:
        """Partial sums of blocks, then their sum; one launch where one block is enough."""
        return launch_sum(self.frozen(self.value, call.attrs), call, 1 / numel(call.in_shapes[0]), 2, self.root)

    def bind_dgrad(self, call: Call) -> list[Launch]:
        """One launch."""
        function, count = _scaled(self.frozen(self.gradient, call.attrs)), numel(call.in_shapes[0])
        if not self.root:
            return launch_map("pair_loss_dgrad_kernel", function, call, np.float32(1 / count))
        return launch_map("root_loss_dgrad_kernel", function, call, np.float64(0.5 / count), reads=2, prelude=_of_root, arrays=call.ins[2:])


@cache
def _scaled(slope: Any) -> Any:
    """Device function (y, target, scale) -> scale · f′(y, target)."""

    @jit(device=True)
    def scaled(y, target, scale):
        return scale * slope(y, target)

    return scaled


@jit(device=True)
def _of_root(loss, state, norm, numbers):
    """1 / (2·count·loss), 0 where the loss is 0: one division in float64 per thread."""
    whole = loss[0]
    return (f4(numbers[0] / whole) if whole > f8(0) else 0.0,)


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


@jit(device=True)
def _huber(y, t, delta):
    d = abs(y - t)
    return d * d * 0.5 if d <= delta else delta * (d - delta / 2.0)


@jit(device=True)
def _huber_gradient(y, t, delta):
    d = y - t
    return delta if d > delta else -delta if d < -delta else d


@jit(device=True)
def _bce(y, t):
    return (0.0 if y < 0.0 else y) - y * t + math.log1p(math.exp(-abs(y)))


@jit(device=True)
def _bce_gradient(y, t):
    return sigmoid(y) - t


EPSILON = 1e-6


@jit(device=True)
def _log_of(value):
    return math.log1p(max(value, 0.0) + EPSILON)


@jit(device=True)
def _square_of_logs(y, t, unit):
    p = unit * y
    d = f8(_log_of(p) - _log_of(t))
    # max drops a NaN: without this line a diverged network would look finite.
    return d * d if p == p else f8(p)


@jit(device=True)
def _square_of_logs_gradient(y, t, unit):
    p = unit * y
    return 2.0 * unit * ((_log_of(p) - _log_of(t)) / (1.0 + p + EPSILON)) if p > 0.0 else 0.0


LOSSES = {
    each.name: each
    for each in (
        Pairwise("mse", _square, _twice_the_difference),
        Pairwise("l1", _distance, _sign),
        Pairwise("huber", _huber, _huber_gradient, {"delta": 0.7}),
        Pairwise("bce", _bce, _bce_gradient),
        Pairwise("rmsle", _square_of_logs, _square_of_logs_gradient, {"unit": 3.0}, root=True),
    )
}
"""By name: the ops are NAME_fprop and NAME_dgrad."""


def host_of(each: Pairwise) -> dict[Op, Impl]:
    """The references of both passes of a loss."""
    return {Op(each.name, "fprop"): host(each.fprop), Op(each.name, "dgrad"): host(each.dgrad)}


def ops_of(each: Pairwise) -> dict[Op, Impl]:
    """The kernels of both passes of a loss, in every GPU row."""
    fprop, dgrad = Impl(each.bind_fprop, scratch_of_sum, traffic=traffic_of_sum), Impl(each.bind_dgrad, traffic=mapped(2))
    return {Op(each.name, "fprop"): fprop, Op(each.name, "dgrad"): dgrad}


HOST = {op: impl for each in LOSSES.values() for op, impl in host_of(each).items()}
OPS = {op: impl for each in LOSSES.values() for op, impl in ops_of(each).items()}
GRADIENTS = {
    Op(name, "dgrad"): Gradient(Op(name, "fprop"), lambda ins, outs, v, root=each.root: (*ins, *(outs if root else ())), loss=True)  # type: ignore[misc]
    for name, each in LOSSES.items()
}


def cases(images: Shapes = IMAGES) -> Iterator[Case]:
    """Every loss and its gradient; targets of the binary cross-entropy lie in 0..1, those of RMSLE count from 0 up."""
    for shape in images:
        y, label = 2 * normal(12, *shape), label_of(shape)
        for each in LOSSES.values():
            target = normal(13, *shape)
            if each.name == "bce":
                target = np.clip(np.abs(target) / 2, 0, 1)
            if each.name == "rmsle":
                target = np.abs(9 * target)
            attrs, loss = dict(each.parameters), np.empty(())
            each.fprop(y.astype(np.float64), target, loss, **attrs)
            yield Case(Op(each.name, "fprop"), label, (y, target), (((), "float64"),), attrs, numel(shape))
            yield Case(
                Op(each.name, "dgrad"), label, (y, target, *((loss,) if each.root else ())), ((shape, "float32"),), attrs, 16 if each.root else 4
            )
