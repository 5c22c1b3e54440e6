"""Average pooling: y[p,q] = the mean of a size × size window; windows lie fully inside, the rows and columns left over count nowhere.

dx is the transpose: dy / size², summed over the windows that contain an element. Kernels: window_sum.py.

    avgpool_fprop     x -> y                              avgpool_dgrad     dy -> dx          size, stride
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nbcnn.ops.images.window_sum import spread_reference, spread_windows, sum_reference, sum_windows, traffic_spread, traffic_sum
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import IMAGES, Case, Gradient, Shapes, normal
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.ops.kernel.windows import WINDOWS, pooled_shapes
from nbcnn.plan.op import Op


def avgpool_fprop(x: np.ndarray, y: np.ndarray, *, size: int, stride: int) -> None:
    """y (N,C,P,Q) = window means of x (N,C,H,W), P = (H - size) // stride + 1."""
    sum_reference(x, y, size, stride, 1 / size**2)


def avgpool_dgrad(dy: np.ndarray, dx: np.ndarray, *, size: int, stride: int) -> None:
    """dx (N,C,H,W) = the sum of dy (N,C,P,Q) / size² over the windows that contain each element."""
    spread_reference(dy, dx, size, stride, 1 / size**2)


def bind_fprop(call: Call) -> list[Launch]:
    """One launch of `window_sum.sum_windows`."""
    size, stride = call.attrs["size"], call.attrs["stride"]
    return sum_windows(call, size, stride, 1 / size**2)


def bind_dgrad(call: Call) -> list[Launch]:
    """One launch of `window_sum.spread_windows`."""
    size, stride = call.attrs["size"], call.attrs["stride"]
    return spread_windows(call, size, stride, 1 / size**2)


def traffic_fprop(call: Call) -> list[Traffic]:
    """Bytes of `bind_fprop`."""
    return traffic_sum(call, call.attrs["size"], call.attrs["stride"])


def traffic_dgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_dgrad`."""
    return traffic_spread(call, call.attrs["size"], call.attrs["stride"])


HOST = {Op("avgpool", "fprop"): host(avgpool_fprop), Op("avgpool", "dgrad"): host(avgpool_dgrad)}
OPS = {Op("avgpool", "fprop"): Impl(bind_fprop, traffic=traffic_fprop), Op("avgpool", "dgrad"): Impl(bind_dgrad, traffic=traffic_dgrad)}
GRADIENTS = {Op("avgpool", "dgrad"): Gradient(Op("avgpool", "fprop"), lambda ins, outs, v: (v,))}


def cases(images: Shapes = IMAGES, windows: Shapes = WINDOWS) -> Iterator[Case]:
    """Both passes, in windows (size, stride) that fit."""
    for label, shape, pooled, attrs in pooled_shapes(images, windows):
        terms = attrs["size"] ** 2
        yield Case(Op("avgpool", "fprop"), label, (normal(7, *shape),), ((pooled, "float32"),), attrs, terms)
        yield Case(Op("avgpool", "dgrad"), label, (normal(8, *pooled),), ((shape, "float32"),), attrs, terms)
