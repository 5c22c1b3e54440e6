"""Kernels that apply one scalar function to every element, `unary` (y = f(x)), `binary` (z = f(a, b)) and `ternary` (z = f(a, b, c)), and what an
activation is made of.

The activation files hand in their functions (`Activation`); they are frozen into the kernel and inlined. Nothing is reused, so memory
bandwidth is the only limit: a thread loads 16 bytes of each input before it stores any, which keeps enough bytes in flight,
as a multiprocessor has 2,048 threads, and no thread loops. Arrays may alias: an element is read before it is
written. Functions take and give float32, however the operands are stored (stored.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.gpu.target import Target
from nbcnn.ops.kernel.call import Call, Launch, blocks
from nbcnn.ops.kernel.stored import kinds, scalar_io, vector_io
from nbcnn.plan.shapes import numel

THREADS = 256
SPAN = 4 * THREADS
"""Elements between the vectors of one thread: at each step a block touches SPAN elements in a row."""
BLOCK = 2 * SPAN
"""Elements of one block at most."""
LIMIT = 2**31 - BLOCK
"""Elements of the largest tensor: indices are int32, and the last block looks up to BLOCK elements ahead."""


def supports(call: Call, target: Target) -> str | None:
    """None, or the reason in words why a tensor is too large for int32 indices; for every op that stands on this file or windows.py."""
    largest = max(numel(shape) for shape in (*call.in_shapes, *call.out_shapes))
    return None if largest <= LIMIT else f"a tensor of {largest:,} elements is more than 32-bit indices reach ({LIMIT:,})"


def vectors_of(kind: str) -> int:
    """Groups of four elements that a thread loads of an input stored as `kind`: 16 bytes."""
    return 2 if kind == "bfloat16" else 1


def named_kernel(name: str, body: Callable[..., None]) -> Any:
    """`jit()(body)` under a name that profilers and compile reports then show."""
    body.__name__ = body.__qualname__ = name
    return jit()(body)


@cache
def unary(name: str, function: Any, source: str = "float32", target: str = "float32") -> Any:
    """The kernel `name`(x, y, count) of a device function float32 -> float32; x is stored as `source`, y as `target`.

    y[i] = function(x[i])

    grid    ceil(count / block's elements), block THREADS
    owns    thread: one group of four, or two SPAN elements apart (the last block: elements one by one)
    moves   8·count bytes of float32
    """
    load, _ = scalar_io(source)
    load4, _ = vector_io(source)
    _, store = scalar_io(target)
    _, store4 = vector_io(target)
    VECTORS = vectors_of(source)
    FLOATS, ALL = 4 * VECTORS, VECTORS * SPAN

    def body(x, y, count):
        a = cuda.local.array(FLOATS, f4)
        start = cuda.blockIdx.x * ALL + 4 * cuda.threadIdx.x
        if start + ALL - SPAN + 4 <= count:
            for v in range(VECTORS):
                a[4 * v], a[4 * v + 1], a[4 * v + 2], a[4 * v + 3] = load4(x, start + v * SPAN)
            for v in range(VECTORS):
                store4(y, start + v * SPAN, function(a[4 * v]), function(a[4 * v + 1]), function(a[4 * v + 2]), function(a[4 * v + 3]))
        else:
            for vector in range(VECTORS):
                for lane in range(4):
                    i = start + vector * SPAN + lane
                    if i < count:
                        store(y, i, function(load(x, i)))

    return named_kernel(name, body)


@cache
def binary(name: str, function: Any, kind: str = "float32") -> Any:
    """The kernel `name`(a, b, z, count) of a device function (float32, float32) -> float32; a, b, z are stored as `kind`.

    z[i] = function(a[i], b[i])

    grid    ceil(count / block's elements), block THREADS
    owns    thread: one group of four, or two SPAN elements apart (the last block: elements one by one)
    moves   12·count bytes of float32
    """
    (load, store), (load4, store4) = scalar_io(kind), vector_io(kind)
    VECTORS = vectors_of(kind)
    FLOATS, ALL = 4 * VECTORS, VECTORS * SPAN

    def body(a, b, z, count):
        c = cuda.local.array(FLOATS, f4)
        d = cuda.local.array(FLOATS, f4)
        start = cuda.blockIdx.x * ALL + 4 * cuda.threadIdx.x
        if start + ALL - SPAN + 4 <= count:
            for v in range(VECTORS):
                c[4 * v], c[4 * v + 1], c[4 * v + 2], c[4 * v + 3] = load4(a, start + v * SPAN)
                d[4 * v], d[4 * v + 1], d[4 * v + 2], d[4 * v + 3] = load4(b, start + v * SPAN)
            for v in range(VECTORS):
                for e in range(4):
                    c[4 * v + e] = function(c[4 * v + e], d[4 * v + e])
                store4(z, start + v * SPAN, c[4 * v], c[4 * v + 1], c[4 * v + 2], c[4 * v + 3])
        else:
            for vector in range(VECTORS):
                for lane in range(4):
                    i = start + vector * SPAN + lane
                    if i < count:
                        store(z, i, function(load(a, i), load(b, i)))

    return named_kernel(name, body)


@cache
def ternary(name: str, function: Any, kind: str = "float32") -> Any:
    """The kernel `name`(a, b, c, z, count) of a device function of three float32; a, b, c, z are stored as `kind`.

    z[i] = function(a[i], b[i], c[i])

    grid    ceil(count / block's elements), block THREADS
    owns    thread: one group of four, or two SPAN elements apart (the last block: elements one by one)
    moves   16·count bytes of float32
    """
    (load, store), (load4, store4) = scalar_io(kind), vector_io(kind)
    VECTORS = vectors_of(kind)
    FLOATS, ALL = 4 * VECTORS, VECTORS * SPAN

    def body(a, b, c, z, count):
        d = cuda.local.array(FLOATS, f4)
        e = cuda.local.array(FLOATS, f4)
        f = cuda.local.array(FLOATS, f4)
        start = cuda.blockIdx.x * ALL + 4 * cuda.threadIdx.x
        if start + ALL - SPAN + 4 <= count:
            for v in range(VECTORS):
                d[4 * v], d[4 * v + 1], d[4 * v + 2], d[4 * v + 3] = load4(a, start + v * SPAN)
                e[4 * v], e[4 * v + 1], e[4 * v + 2], e[4 * v + 3] = load4(b, start + v * SPAN)
                f[4 * v], f[4 * v + 1], f[4 * v + 2], f[4 * v + 3] = load4(c, start + v * SPAN)
            for v in range(VECTORS):
                for j in range(4):
                    d[4 * v + j] = function(d[4 * v + j], e[4 * v + j], f[4 * v + j])
                store4(z, start + v * SPAN, d[4 * v], d[4 * v + 1], d[4 * v + 2], d[4 * v + 3])
        else:
            for vector in range(VECTORS):
                for lane in range(4):
                    i = start + vector * SPAN + lane
                    if i < count:
                        store(z, i, function(load(a, i), load(b, i), load(c, i)))

    return named_kernel(name, body)


def launch(name: str, function: Any, call: Call) -> list[Launch]:
    """`function` over all elements of the call: of its one input, or of its two or three. Shapes and layout do not matter."""
    count = call.outs[0].size
    source, target = kinds(call)
    kernel = unary(name, function, source, target) if len(call.ins) == 1 else (binary, ternary)[len(call.ins) - 2](name, function, target)
    return [Launch(kernel, blocks(count, vectors_of(source) * SPAN), THREADS, (*call.ins, *call.outs, np.int32(count)))]


@jit(device=True)
def _same(x):
    return x


def copy(call: Call) -> list[Launch]:
    """The call's input copied to its output, element by element in storage order."""
    return launch("copy_kernel", _same, call)


@dataclass(frozen=True)
class Activation:
    """An element-wise function f with its derivative: an entry of the table in activations/table.py, from which its ops and their cases follow.

    fprop, dgrad        the NumPy references: (x, y, **parameters) and (dy, saved, dx, **parameters), which write y and dx.
    function, gradient  the same for one element on the GPU: device functions x -> y and (dy, saved) -> dx. With parameters, functions that
                        make them: (**parameters) -> device function, cached, since each one made is compiled.
    reads               what `saved` is: "x", or "y", which is alive anyway as the next layer's input. Reading y suits an f whose slope
                        follows from its value.
    parameters          f's parameters, with the values that its cases have.
    epilogue            whether convolutions may apply f to their results: the rows that fuse then have conv_NAME_fprop (conv/fused.py).
    """

    name: str
    fprop: Callable[..., None]
    dgrad: Callable[..., None]
    function: Any
    gradient: Any
    reads: str
    parameters: Mapping[str, float] = field(default_factory=dict)
    epilogue: bool = False

    def bind_fprop(self, call: Call) -> list[Launch]:
        """One launch of `unary`."""
        return launch(f"{self.name}_fprop_kernel", self._frozen(self.function, call), call)

    def bind_dgrad(self, call: Call) -> list[Launch]:
        """One launch of `binary`."""
        return launch(f"{self.name}_dgrad_kernel", self._frozen(self.gradient, call), call)

    def _frozen(self, function: Any, call: Call) -> Any:
        """The device function with the parameters of the call."""
        return function(**{name: float(call.attrs[name]) for name in self.parameters}) if self.parameters else function
