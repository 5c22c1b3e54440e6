"""PReLU: y = x where x > 0, else a[c]·x, with a slope for each channel c, or one for all; dx = dy where x > 0, else a[c]·dy;
da[c] = Σ dy·x over the elements of the channel with x ≤ 0.

Source: K. He, X. Zhang, S. Ren, J. Sun, "Delving deep into rectifiers", arXiv:1502.01852.

    prelu_fprop       x, a (C or 1) -> y                                        x images (N,C,H,W), series (N,C,L) or vectors (N,C)
    prelu_dgrad       dy, x, a -> dx
    prelu_wgrad       dy, x -> da (C or 1)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.kernel.by_channel import launch_by_channel
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import IMAGES, Case, Gradient, label_of, normal
from nbcnn.ops.kernel.channel_sums import launch_sums, scratch_of_sums, traffic_of_sums
from nbcnn.ops.kernel.maps import element_part, supports
from nbcnn.ops.kernel.traffic import Traffic, outputs, size
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel


def _of_channels(x: np.ndarray, a: np.ndarray) -> np.ndarray:
    """`a`, shaped so that it stands beside the channels of x."""
    return a.reshape(1, -1, *(1,) * (x.ndim - 2))


def prelu_fprop(x: np.ndarray, a: np.ndarray, y: np.ndarray) -> None:
    """y = x where x > 0, else a·x; NaN stays NaN."""
    np.multiply(x, _of_channels(x, a), out=y)
    np.copyto(y, x, where=x > 0)


def prelu_dgrad(dy: np.ndarray, x: np.ndarray, a: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy where x > 0, else a·dy."""
    np.multiply(dy, _of_channels(x, a), out=dx)
    np.copyto(dx, dy, where=x > 0)


def prelu_wgrad(dy: np.ndarray, x: np.ndarray, da: np.ndarray) -> None:
    """da = the sum of dy·x where x ≤ 0, of each channel, or of all."""
    each = np.where(x > 0, 0, dy * x)
    axes = tuple(axis for axis in range(x.ndim) if axis != 1 or da.size == 1)
    da[...] = each.sum(axes, dtype=np.float64)


@jit(device=True)
def _prelu(x, a):
    return x if x > 0.0 else x * a


@jit(device=True)
def _prelu_gradient(dy, x, a):
    return dy if x > 0.0 else dy * a


@jit(device=True)
def _slope_gradient(dy, x):
    """dy·x where x ≤ 0, and NaN where x is."""
    return 0.0 if x > 0.0 else dy * x


def as_images(call: Call) -> Call:
    """The call of the sums with images (N,C,H,W) in place of series, vectors and what one slope serves."""
    x, slopes = call.in_shapes[1], numel(call.out_shapes[0])
    shape = (1, 1, 1, numel(x)) if slopes == 1 else (*x[:2], *(1,) * (4 - len(x)), *x[2:])
    layout = "NHWC" if len(x) == 2 else call.layout if shape == x else "NCHW"
    return replace(call, in_shapes=(shape, shape), layout=layout)


def bind_fprop(call: Call) -> list[Launch]:
    """One launch."""
    return launch_by_channel("prelu_fprop_kernel", _prelu, call)


def bind_dgrad(call: Call) -> list[Launch]:
    """One launch."""
    return launch_by_channel("prelu_dgrad_kernel", _prelu_gradient, call)


def bind_wgrad(call: Call) -> list[Launch]:
    """Two launches."""
    return launch_sums(_slope_gradient, as_images(call))


def scratch_wgrad(call: Call) -> int:
    """Bytes of the partial sums of `launch_sums`."""
    return scratch_of_sums(as_images(call))


def traffic_fprop(call: Call) -> list[Traffic]:
    """Bytes of `bind_fprop`, where every element is negative and asks for its slope."""
    count = numel(call.in_shapes[0])
    return [Traffic(size(call, "in", 0) + 4 * count, outputs(call), size(call, "in", 0) + size(call, "in", 1))]


def traffic_dgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_dgrad`, where every element is negative and asks for its slope."""
    both, count = size(call, "in", 0) + size(call, "in", 1), numel(call.in_shapes[0])
    return [Traffic(both + 4 * count, outputs(call), both + size(call, "in", 2))]


def traffic_wgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_wgrad`."""
    return traffic_of_sums(as_images(call))


HOST = {Op("prelu", "fprop"): host(prelu_fprop), Op("prelu", "dgrad"): host(prelu_dgrad), Op("prelu", "wgrad"): host(prelu_wgrad)}
OPS = {
    Op("prelu", "fprop"): Impl(bind_fprop, supports=supports, traffic=traffic_fprop, pitched=element_part),
    Op("prelu", "dgrad"): Impl(bind_dgrad, supports=supports, traffic=traffic_dgrad, pitched=element_part),
    Op("prelu", "wgrad"): Impl(bind_wgrad, scratch_wgrad, supports=supports, traffic=traffic_wgrad),
}
GRADIENTS = {
    Op("prelu", "dgrad"): Gradient(Op("prelu", "fprop"), lambda ins, outs, v: (v, *ins)),
    Op("prelu", "wgrad"): Gradient(Op("prelu", "fprop"), lambda ins, outs, v: (v, ins[0]), of=(1,)),
}


def cases() -> Iterator[Case]:
    """All three, of images, series and vectors, with a slope for each channel and with one."""
    for shape in (*IMAGES[:3], (3, 5, 9), (70, 33)):
        for slopes in dict.fromkeys((shape[1], 1)):
            x, dy, a, label = normal(5, *shape), normal(6, *shape), normal(7, slopes), f"{label_of(shape)}, {slopes}"
            yield Case(Op("prelu", "fprop"), label, (x, a), ((shape, "float32"),), {}, 4)
            yield Case(Op("prelu", "dgrad"), label, (dy, x, a), ((shape, "float32"),), {}, 4)
            yield Case(Op("prelu", "wgrad"), label, (dy, x), (((slopes,), "float32"),), {}, numel(shape) // slopes)
