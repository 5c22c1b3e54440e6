"""Product of two tensors of one shape, element by element: y = a·b.

Its gradient needs no op of its own: da = dy·b and db = dy·a are products too.

    mul               a, b -> y
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import IMAGES, Case, Shapes, label_of, normal
from nbcnn.ops.kernel.maps import launch_map, supports
from nbcnn.ops.kernel.traffic import streamed
from nbcnn.plan.op import Op


def mul(a: np.ndarray, b: np.ndarray, y: np.ndarray) -> None:
    """y = a·b, any shape."""
    np.multiply(a, b, out=y)


@jit(device=True)
def _product(a, b):
    return a * b


def bind(call: Call) -> list[Launch]:
    """One launch of the frame of maps."""
    return launch_map("mul_kernel", _product, call)


HOST, OPS = {Op("mul"): host(mul)}, {Op("mul"): Impl(bind, supports=supports, traffic=streamed)}


def cases(images: Shapes = IMAGES) -> Iterator[Case]:
    """Products of two batches of images."""
    for shape in images:
        yield Case(Op("mul"), label_of(shape), (normal(25, *shape), normal(26, *shape)), ((shape, "float32"),))
