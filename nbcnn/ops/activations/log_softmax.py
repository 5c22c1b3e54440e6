"""The logarithm of softmax along axis 1: y[f] = x[f] − max − log Σ exp(x − max); dx[f] = dy[f] − exp(y[f])·Σ dy.

Rows and kernels are those of softmax.py. The logarithm of what it computes would be −∞ where a probability is too small for float32; this is not.

    log_softmax_fprop     x (N,F), (N,C,L) or (N,C,H,W) -> y
    log_softmax_dgrad     dy, y -> dx
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nbcnn.ops.activations import softmax
from nbcnn.ops.kernel import maps
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import Case, Gradient, Shapes, label_of, normal
from nbcnn.ops.kernel.traffic import Traffic, size
from nbcnn.plan.op import Op


def log_softmax_fprop(x: np.ndarray, y: np.ndarray) -> None:
    """y = log softmax of x along axis 1."""
    np.subtract(x, x.max(1, keepdims=True), out=y)
    np.subtract(y, np.log(np.exp(y).sum(1, keepdims=True)), out=y)


def log_softmax_dgrad(dy: np.ndarray, y: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy − exp(y)·Σ dy, the sum along axis 1."""
    np.subtract(dy, np.exp(y) * dy.sum(1, keepdims=True), out=dx)


def bind_fprop(call: Call) -> list[Launch]:
    """One launch."""
    return softmax.launch(softmax.fprop_kernel, call, True)


def bind_dgrad(call: Call) -> list[Launch]:
    """One launch."""
    return softmax.launch(softmax.dgrad_kernel, call, True)


def traffic_dgrad(call: Call) -> list[Traffic]:
    """dy twice, y once; dx."""
    dy, y = size(call, "in", 0), size(call, "in", 1)
    return [Traffic(2 * dy + y, size(call, "out", 0), dy + y)]


HOST = {Op("log_softmax", "fprop"): host(log_softmax_fprop), Op("log_softmax", "dgrad"): host(log_softmax_dgrad)}
OPS = {
    Op("log_softmax", "fprop"): Impl(bind_fprop, supports=maps.supports, traffic=softmax.traffic_fprop),
    Op("log_softmax", "dgrad"): Impl(bind_dgrad, supports=maps.supports, traffic=traffic_dgrad),
}
GRADIENTS = {Op("log_softmax", "dgrad"): Gradient(Op("log_softmax", "fprop"), lambda ins, outs, v: (v, outs[0]))}


def cases(shapes: Shapes = ((3, 2), (5, 33), (2, 3, 5), (2, 3, 3, 5))) -> Iterator[Case]:
    """Vectors, series and images: two classes, more classes than a warp, rows in planes."""
    for shape in shapes:
        x, dy, out = 3 * normal(47, *shape), normal(48, *shape), ((shape, "float32"),)
        y = np.empty(shape)
        log_softmax_fprop(x.astype(np.float64), y)
        yield Case(Op("log_softmax", "fprop"), label_of(shape), (x,), out, {}, shape[1])
        yield Case(Op("log_softmax", "dgrad"), label_of(shape), (dy, y.astype(np.float32)), out, {}, shape[1])
