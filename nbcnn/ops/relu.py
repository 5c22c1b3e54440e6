"""ReLU: y = max(x, 0); dx = dy where y > 0.

The gradient is read off y, not x: y > 0 exactly where x > 0, and y is alive anyway as the next layer's input.
"""

from __future__ import annotations

import numpy as np

from nbcnn.cuda import cuda, f4, jit
from nbcnn.ops.call import Call, Launch, blocks

THREADS = 256


def relu_fprop(x: np.ndarray, y: np.ndarray) -> None:
    """y = max(x, 0), any shape."""
    np.maximum(x, 0, out=y)


def relu_dgrad(dy: np.ndarray, y: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy where y > 0, else 0, any shape."""
    np.multiply(dy, y > 0, out=dx)


@jit()
def relu_fprop_kernel(x, y, count):
    i = cuda.grid(1)
    if i < count:
        y[i] = max(x[i], f4(0))


@jit()
def relu_dgrad_kernel(dy, y, dx, count):
    i = cuda.grid(1)
    if i < count:
        dx[i] = dy[i] if y[i] > f4(0) else f4(0)


def bind_fprop(call: Call) -> list[Launch]:
    x, y = call.ins[0], call.outs[0]
    return [Launch(relu_fprop_kernel, blocks(x.size, THREADS), THREADS, (x, y, np.int32(x.size)))]


def bind_dgrad(call: Call) -> list[Launch]:
    (dy, y), (dx,) = call.ins, call.outs
    return [Launch(relu_dgrad_kernel, blocks(dy.size, THREADS), THREADS, (dy, y, dx, np.int32(dy.size)))]
