"""Sums and products of two tensors of one shape, element by element: y = a + b, as at the end of a residual block, with the ReLU behind it
y = max(a + b, 0), and y = a·b.

Their gradients need no op: of a sum da = db = dy, of a product da = dy·b and db = dy·a are products too. That of add_relu is relu's, dy where y > 0;
of a y that is read twice two gradients are added and masked in one pass.

    add, mul          a, b -> y                           add_relu          a, b -> y
    add_relu_dgrad    da, db, y -> dx
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.activations.functions import relu
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import IMAGES, Case, Shapes, label_of, normal
from nbcnn.ops.kernel.maps import element_part, launch_map, supports
from nbcnn.ops.kernel.traffic import streamed
from nbcnn.plan.op import Map, Mask, Op

ADD, ADD_RELU, MASKED, MUL = Op("add"), Op("add", after=(Map("relu"),)), Op("add", after=(Mask("relu"),)), Op("mul")


def add(a: np.ndarray, b: np.ndarray, y: np.ndarray) -> None:
    """y = a + b, any shape."""
    np.add(a, b, out=y)


def mul(a: np.ndarray, b: np.ndarray, y: np.ndarray) -> None:
    """y = a·b, any shape."""
    np.multiply(a, b, out=y)


def add_relu(a: np.ndarray, b: np.ndarray, y: np.ndarray) -> None:
    """y = max(a + b, 0), any shape; NaN stays NaN."""
    np.add(a, b, out=y)
    np.maximum(y, 0, out=y)


def add_relu_dgrad(da: np.ndarray, db: np.ndarray, y: np.ndarray, dx: np.ndarray) -> None:
    """dx = da + db where y > 0, else 0, any shape: `add`, then `relu_dgrad`."""
    np.multiply(da + db, y > 0, out=dx)


@jit(device=True)
def _sum(a, b):
    return a + b


@jit(device=True)
def _product(a, b):
    return a * b


@jit(device=True)
def _relu_of_sum(a, b):
    return relu(a + b)


@jit(device=True)
def _masked_sum(a, b, y):
    return 0.0 if y <= 0.0 else a + b


def bind(function: Any, call: Call) -> list[Launch]:
    """One launch of the frame of maps."""
    return launch_map(f"{call.op}_kernel", function, call)


HOST = {ADD: host(add), MUL: host(mul)}
OPS = {
    op: Impl(partial(bind, function), supports=supports, traffic=streamed, pitched=element_part)
    for op, function in ((ADD, _sum), (MUL, _product), (ADD_RELU, _relu_of_sum), (MASKED, _masked_sum))
}
REFERENCES = {ADD_RELU: add_relu, MASKED: add_relu_dgrad}


def cases(images: Shapes = IMAGES) -> Iterator[Case]:
    """Sums and products of two batches of images, plain and with a ReLU."""
    for shape in images:
        a, b, y = normal(5, *shape), normal(6, *shape), np.maximum(normal(7, *shape), 0)
        for op in (ADD, MUL, ADD_RELU):
            yield Case(op, label_of(shape), (a, b), ((shape, "float32"),))
        yield Case(MASKED, label_of(shape), (a, b, y), ((shape, "float32"),))
