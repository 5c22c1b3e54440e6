"""Nearest upsampling by an integer factor f: y[h,w] = x[h // f, w // f].

The transpose of summing f × f blocks, so dx is the sum of its f × f block of dy. Kernels: window_sum.py.

    upsample_fprop    x (N,C,H,W) -> y (N,C,fH,fW)        upsample_dgrad    dy -> dx          factor
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from nbcnn.ops.images.window_sum import spread_windows, sum_reference, sum_windows, traffic_spread, traffic_sum
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import IMAGES, Case, Gradient, Shapes, label_of, normal
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.ops.kernel.windows import taps
from nbcnn.plan.op import Op


def upsample_fprop(x: np.ndarray, y: np.ndarray, *, factor: int) -> None:
    """y (N,C,fH,fW) = each element of x (N,C,H,W) repeated in an f × f block."""
    for seen in taps(y, factor, factor, x.shape[2:]):
        np.copyto(seen, x)


def upsample_dgrad(dy: np.ndarray, dx: np.ndarray, *, factor: int) -> None:
    """dx (N,C,H,W) = the sum of each f × f block of dy (N,C,fH,fW)."""
    sum_reference(dy, dx, factor, factor, 1)


def bind_fprop(call: Call) -> list[Launch]:
    """One launch of `window_sum.spread_windows`."""
    factor = call.attrs["factor"]
    return spread_windows(call, factor, factor, 1)


def bind_dgrad(call: Call) -> list[Launch]:
    """One launch of `window_sum.sum_windows`."""
    factor = call.attrs["factor"]
    return sum_windows(call, factor, factor, 1)


def traffic_fprop(call: Call) -> list[Traffic]:
    """Bytes of `bind_fprop`."""
    return traffic_spread(call, call.attrs["factor"], call.attrs["factor"])


def traffic_dgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_dgrad`."""
    return traffic_sum(call, call.attrs["factor"], call.attrs["factor"])


HOST = {Op("upsample", "fprop"): host(upsample_fprop), Op("upsample", "dgrad"): host(upsample_dgrad)}
OPS = {Op("upsample", "fprop"): Impl(bind_fprop, traffic=traffic_fprop), Op("upsample", "dgrad"): Impl(bind_dgrad, traffic=traffic_dgrad)}
GRADIENTS = {Op("upsample", "dgrad"): Gradient(Op("upsample", "fprop"), lambda ins, outs, v: (v,))}


def cases(images: Shapes = IMAGES, factors: Sequence[int] = (1, 2, 3)) -> Iterator[Case]:
    """Both passes."""
    for shape in images:
        n, c, h, w = shape
        for factor in factors:
            large, label, attrs = (n, c, h * factor, w * factor), f"{label_of(shape)} ×{factor}", {"factor": factor}
            yield Case(Op("upsample", "fprop"), label, (normal(7, *shape),), ((large, "float32"),), attrs)
            yield Case(Op("upsample", "dgrad"), label, (normal(10, *large),), ((shape, "float32"),), attrs, factor**2)
