"""Addition of two tensors of one shape, as at the end of a residual block: y = a + b, and with the ReLU behind it y = max(a + b, 0).

The gradient of a sum needs no op: da = db = dy. That of add_relu is relu's, dy where y > 0.

    add               a, b -> y                           add_relu          a, b -> y
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.activations.relu import relu
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import IMAGES, Case, Shapes, label_of, normal
from nbcnn.ops.kernel.elementwise import launch, supports
from nbcnn.ops.kernel.traffic import streamed


def add(a: np.ndarray, b: np.ndarray, y: np.ndarray) -> None:
    """y = a + b, any shape."""
    np.add(a, b, out=y)


def add_relu(a: np.ndarray, b: np.ndarray, y: np.ndarray) -> None:
    """y = max(a + b, 0), any shape; NaN stays NaN."""
    np.add(a, b, out=y)
    np.maximum(y, 0, out=y)


@jit(device=True)
def _sum(a, b):
    return a + b


@jit(device=True)
def _relu_of_sum(a, b):
    return relu(a + b)


def bind(call: Call) -> list[Launch]:
    """One launch of `elementwise.binary`."""
    return launch("add_kernel", _sum, call)


def bind_relu(call: Call) -> list[Launch]:
    """One launch of `elementwise.binary`."""
    return launch("add_relu_kernel", _relu_of_sum, call)


HOST = {"add": host(add)}
OPS = {"add": Impl(bind, supports=supports, traffic=streamed), "add_relu": Impl(bind_relu, supports=supports, traffic=streamed)}
REFERENCES = {"add_relu": add_relu}


def cases(images: Shapes = IMAGES) -> Iterator[Case]:
    """Sums of two batches of images, plain and with a ReLU."""
    for shape in images:
        for op in ("add", "add_relu"):
            yield Case(op, label_of(shape), (normal(5, *shape), normal(6, *shape)), ((shape, "float32"),))
