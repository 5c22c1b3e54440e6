"""Addition of two tensors of one shape, as at the end of a residual block: y = a + b.

Its gradient needs no op: da = db = dy.

    add               a, b -> y
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import IMAGES, Case, Shapes, label_of, normal
from nbcnn.ops.kernel.elementwise import launch, supports
from nbcnn.ops.kernel.traffic import streamed


def add(a: np.ndarray, b: np.ndarray, y: np.ndarray) -> None:
    """y = a + b, any shape."""
    np.add(a, b, out=y)


@jit(device=True)
def _sum(a, b):
    return a + b


def bind(call: Call) -> list[Launch]:
    """One launch of `elementwise.binary`."""
    return launch("add_kernel", _sum, call)


HOST, OPS = {"add": host(add)}, {"add": Impl(bind, supports=supports, traffic=streamed)}


def cases(images: Shapes = IMAGES) -> Iterator[Case]:
    """Sums of two batches of images."""
    for shape in images:
        yield Case("add", label_of(shape), (normal(5, *shape), normal(6, *shape)), ((shape, "float32"),))
