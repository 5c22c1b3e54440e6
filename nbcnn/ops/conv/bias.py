"""The bias of a transposed convolution, whose product is a convolution's dgrad and has none: y = x + b by channel, and db = Σ dy.

bias_fprop        x (N,C,H,W), b (C) -> y (N,C,H,W)       bias_wgrad        dy -> db (C)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.kernel.by_channel import launch_by_channel
from nbcnn.ops.kernel.call import Call, Impl, Launch, host, parts
from nbcnn.ops.kernel.case import IMAGES, Case, Gradient, Shapes, label_of, normal
from nbcnn.ops.kernel.channel_sums import launch_sums, scratch_of_sums, traffic_of_sums
from nbcnn.ops.kernel.maps import element_part, same, supports
from nbcnn.ops.kernel.traffic import streamed
from nbcnn.plan.op import Op


def bias_fprop(x: np.ndarray, b: np.ndarray, y: np.ndarray) -> None:
    """y (N,C,H,W) = x (N,C,H,W) + b (C) by channel."""
    np.add(x, b[:, None, None], out=y)


def bias_wgrad(dy: np.ndarray, db: np.ndarray) -> None:
    """db (C) = the sum of dy (N,C,H,W) over images and pixels."""
    np.sum(dy, axis=(0, 2, 3), out=db)


@jit(device=True)
def _sum(x, b):
    return x + b


def bind_fprop(call: Call) -> list[Launch]:
    """x, b -> y. One launch."""
    return launch_by_channel("bias_kernel", _sum, call)


def bind_wgrad(call: Call) -> list[Launch]:
    """dy -> db. Two launches."""
    return launch_sums(same, call)


HOST = {Op("bias", "fprop"): host(bias_fprop), Op("bias", "wgrad"): host(bias_wgrad)}
OPS = {
    Op("bias", "fprop"): Impl(bind_fprop, supports=supports, traffic=streamed, pitched=element_part),
    Op("bias", "wgrad"): Impl(bind_wgrad, scratch=scratch_of_sums, supports=supports, traffic=traffic_of_sums, pitched=parts(ins=(0,))),
}
GRADIENTS = {Op("bias", "wgrad"): Gradient(Op("bias", "fprop"), lambda ins, outs, v: (v,), of=(1,))}


def cases(images: Shapes = IMAGES) -> Iterator[Case]:
    """Both passes."""
    for shape in images:
        n, c, h, w = shape
        yield Case(Op("bias", "fprop"), label_of(shape), (normal(55, *shape), normal(56, c)), ((shape, "float32"),))
        yield Case(Op("bias", "wgrad"), label_of(shape), (normal(57, *shape),), (((c,), "float32"),), {}, n * h * w)
