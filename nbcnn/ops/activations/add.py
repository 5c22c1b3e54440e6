"""Addition of two tensors of one shape, as at the end of a residual block: y = a + b, and with the ReLU behind it y = max(a + b, 0).

The gradient of a sum needs no op: da = db = dy. That of add_relu is relu's, dy where y > 0; of a y that is read twice two gradients are added and
masked in one pass.

    add               a, b -> y                           add_relu          a, b -> y
    add_relu_dgrad    da, db, y -> dx
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.activations.functions import relu
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import IMAGES, Case, Shapes, label_of, normal
from nbcnn.ops.kernel.maps import launch_map, supports
from nbcnn.ops.kernel.traffic import streamed
from nbcnn.plan.op import Map, Mask, Op


def add(a: np.ndarray, b: np.ndarray, y: np.ndarray) -> None:
    """y = a + b, any shape."""
    np.add(a, b, out=y)


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
def _relu_of_sum(a, b):
    return relu(a + b)


@jit(device=True)
def _masked_sum(a, b, y):
    return 0.0 if y <= 0.0 else a + b


def bind(call: Call) -> list[Launch]:
    """One launch of the frame of maps."""
    return launch_map("add_kernel", _sum, call)


def bind_relu(call: Call) -> list[Launch]:
    """One launch of the frame of maps."""
    return launch_map("add_relu_kernel", _relu_of_sum, call)


def bind_relu_dgrad(call: Call) -> list[Launch]:
    """One launch of the frame of maps."""
    return launch_map("add_relu_dgrad_kernel", _masked_sum, call)


HOST = {Op("add"): host(add)}
OPS = {
    op: Impl(bound, supports=supports, traffic=streamed)
    for op, bound in ((Op("add"), bind), (Op("add", after=(Map("relu"),)), bind_relu), (Op("add", after=(Mask("relu"),)), bind_relu_dgrad))
}
REFERENCES = {Op("add", after=(Map("relu"),)): add_relu, Op("add", after=(Mask("relu"),)): add_relu_dgrad}


def cases(images: Shapes = IMAGES) -> Iterator[Case]:
    """Sums of two batches of images, plain and with a ReLU."""
    for shape in images:
        for op in (Op("add"), Op("add", after=(Map("relu"),))):
            yield Case(op, label_of(shape), (normal(5, *shape), normal(6, *shape)), ((shape, "float32"),))
        y = np.maximum(normal(7, *shape), 0)
        yield Case(Op("add", after=(Mask("relu"),)), label_of(shape), (normal(5, *shape), normal(6, *shape), y), ((shape, "float32"),))
