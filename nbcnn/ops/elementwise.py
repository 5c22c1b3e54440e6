"""Kernels that apply one scalar function to every element: `unary` (y = f(x)) and `binary` (z = f(a, b)).

The activation files hand in their function; it is frozen into the kernel and inlined. Nothing is reused, so memory
bandwidth is the only limit: a thread loads VECTORS groups of four of each input before it stores any, which keeps enough
bytes in flight (32 a thread and input of float32), and no thread loops. Arrays may alias: an element is read before it is
written. Functions take and give float32, however the operands are stored (stored.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from nbcnn.cuda import cuda, i4, jit
from nbcnn.ops.call import Call, Launch, blocks
from nbcnn.ops.stored import kinds, scalar_io, vector_io
from nbcnn.shapes import numel

THREADS = 256
VECTORS = 2
SPAN = 4 * THREADS
"""Elements between the vectors of one thread: at each step a block touches SPAN elements in a row."""
BLOCK = VECTORS * SPAN
"""Elements of one block."""
LIMIT = 2**31 - BLOCK
"""Elements of the largest tensor: indices are int32, and the last block looks up to BLOCK elements ahead."""


def supports(call: Call) -> str | None:
    """None, or the reason in words why a tensor is too large for int32 indices; for every op that stands on this file or windows.py."""
    largest = max(numel(shape) for shape in (*call.in_shapes, *call.out_shapes))
    return None if largest <= LIMIT else f"a tensor of {largest:,} elements is more than 32-bit indices reach ({LIMIT:,})"


def named_kernel(name: str, body: Callable[..., None]) -> Any:
    """`jit()(body)` under a name that profilers and compile reports then show."""
    body.__name__ = body.__qualname__ = name
    return jit()(body)


@cache
def unary(name: str, function: Any, source: str = "float32", target: str = "float32") -> Any:
    """The kernel `name`(x, y, count) of a device function float32 -> float32; x is stored as `source`, y as `target`.

    y[i] = function(x[i])

    grid    ceil(count / BLOCK), block THREADS
    owns    thread: VECTORS groups of four, SPAN elements apart (the last block: elements one by one)
    moves   8·count bytes of float32
    """
    load, _ = scalar_io(source)
    load4, _ = vector_io(source)
    _, store = scalar_io(target)
    _, store4 = vector_io(target)

    def body(x, y, count):
        start = i4(i4(cuda.blockIdx.x) * i4(BLOCK)) + i4(4) * i4(cuda.threadIdx.x)
        if start + i4(BLOCK - SPAN + 4) <= count:
            a0, a1, a2, a3 = load4(x, start)
            b0, b1, b2, b3 = load4(x, start + i4(SPAN))
            store4(y, start, function(a0), function(a1), function(a2), function(a3))
            store4(y, start + i4(SPAN), function(b0), function(b1), function(b2), function(b3))
        else:
            for vector in range(VECTORS):
                for lane in range(4):
                    i = start + i4(vector) * i4(SPAN) + i4(lane)
                    if i < count:
                        store(y, i, function(load(x, i)))

    return named_kernel(name, body)


@cache
def binary(name: str, function: Any, kind: str = "float32") -> Any:
    """The kernel `name`(a, b, z, count) of a device function (float32, float32) -> float32; a, b, z are stored as `kind`.

    z[i] = function(a[i], b[i])

    grid    ceil(count / BLOCK), block THREADS
    owns    thread: VECTORS groups of four, SPAN elements apart (the last block: elements one by one)
    moves   12·count bytes of float32
    """
    (load, store), (load4, store4) = scalar_io(kind), vector_io(kind)

    def body(a, b, z, count):
        start = i4(i4(cuda.blockIdx.x) * i4(BLOCK)) + i4(4) * i4(cuda.threadIdx.x)
        if start + i4(BLOCK - SPAN + 4) <= count:
            a0, a1, a2, a3 = load4(a, start)
            b0, b1, b2, b3 = load4(b, start)
            c0, c1, c2, c3 = load4(a, start + i4(SPAN))
            d0, d1, d2, d3 = load4(b, start + i4(SPAN))
            store4(z, start, function(a0, b0), function(a1, b1), function(a2, b2), function(a3, b3))
            store4(z, start + i4(SPAN), function(c0, d0), function(c1, d1), function(c2, d2), function(c3, d3))
        else:
            for vector in range(VECTORS):
                for lane in range(4):
                    i = start + i4(vector) * i4(SPAN) + i4(lane)
                    if i < count:
                        store(z, i, function(load(a, i), load(b, i)))

    return named_kernel(name, body)


def launch(name: str, function: Any, call: Call) -> list[Launch]:
    """`function` over all elements of the call: of its one input, or of its two. Shapes and layout do not matter."""
    count = call.outs[0].size
    source, target = kinds(call)
    kernel = unary(name, function, source, target) if len(call.ins) == 1 else binary(name, function, target)
    return [Launch(kernel, blocks(count, BLOCK), THREADS, (*call.ins, *call.outs, np.int32(count)))]


@jit(device=True)
def _same(x):
    return x


def copy(call: Call) -> list[Launch]:
    """The call's input copied to its output, element by element in storage order."""
    return launch("copy_kernel", _same, call)
