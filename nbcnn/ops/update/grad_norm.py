"""Gradient norm: norm = √Σ g² over the whole gradient buffer, for clipping by norm.

grad_norm         g -> norm () float64
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import Case, normal
from nbcnn.ops.kernel.reduce import f8, launch_sum, scratch_of_sum, traffic_of_sum
from nbcnn.plan.op import Op


def grad_norm(g: np.ndarray, norm: np.ndarray) -> None:
    """norm () float64 = √Σ g², any shape."""
    norm[...] = np.sqrt(np.square(g, dtype=np.float64).sum())


@jit(device=True)
def _square(g):
    """g² in float64, where squares of float32 are exact."""
    return f8(g) * f8(g)


def bind(call: Call) -> list[Launch]:
    """The sum of squares and its root."""
    return launch_sum(_square, call, 1.0, 1, root=True)


HOST, OPS = {Op("grad_norm"): host(grad_norm)}, {Op("grad_norm"): Impl(bind, scratch_of_sum, traffic=traffic_of_sum)}


def cases(count: int = 1003) -> Iterator[Case]:
    """`count` gradients, which are one block's work if they are 1,003, and five times as many."""
    for each in (count, 5 * count):
        yield Case(Op("grad_norm"), f"{each}", (normal(18, each),), (((), "float64"),), {}, each)
