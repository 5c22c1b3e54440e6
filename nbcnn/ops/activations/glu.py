"""GLU over the channels of series: the first half of the channels, p, times the sigmoid of the second half, q.

    y = p·σ(q);   dp = dy·σ(q),   dq = dy·p·σ(q)·(1 − σ(q))

Source: Y. N. Dauphin, A. Fan, M. Auli, D. Grangier, "Language Modeling with Gated Convolutional Networks", arXiv:1612.08083.

    glu_fprop         x (N,2C,L) -> y (N,C,L)             glu_dgrad         dy, x -> dx
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, jit, u4
from nbcnn.gpu.lockstep.arrays import on_arrays
from nbcnn.ops.activations.sigmoid import both_sides
from nbcnn.ops.kernel.call import Call, Impl, Launch, Shape, blocks, host
from nbcnn.ops.kernel.case import SERIES, Case, Gradient, label_of, normal
from nbcnn.ops.kernel.stored import kinds, scalar_io, vector_io
from nbcnn.ops.kernel.traffic import streamed
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

THREADS = 256


_gates = on_arrays(both_sides)


def glu_fprop(x: np.ndarray, y: np.ndarray) -> None:
    """y (N,C,L) = p·σ(q) from x (N,2C,L), p its first C channels and q the others."""
    c = y.shape[1]
    np.multiply(x[:, :c], _gates(x[:, c:])[0], out=y)


def glu_dgrad(dy: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    """dx (N,2C,L) from dy (N,C,L) and x (N,2C,L)."""
    c = dy.shape[1]
    gate, rest = _gates(x[:, c:])
    np.multiply(dy, gate, out=dx[:, :c])
    np.multiply(dx[:, :c], x[:, :c] * rest, out=dx[:, c:])


@jit(device=True)
def _gradients(dy, p, q):
    """dp and dq."""
    gate, rest = both_sides(q)
    dp = dy * gate
    return dp, dp * (p * rest)


@functools.cache
def fprop_kernel(kind: str, four: bool) -> Any:
    """The forward kernel; x and y stored as `kind`. four: volumes are multiples of four."""
    (load, store), (load4, store4) = scalar_io(kind), vector_io(kind)

    @jit()
    def glu_fprop_kernel(x, y, count, volume):
        """y[n,i] = x[n,i]·σ(x[n,volume+i]) with volume = C·L.

        grid ⌈NCL/256⌉, or a fourth of it; block 256; a thread owns one y, or four neighbours.
        shared none; moves 12·NCL bytes of float32. source: the definition.
        """
        i = u4(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x) * (4 if four else 1)
        if i < u4(count):
            at = i + i // u4(volume) * volume
            if four:
                p0, p1, p2, p3 = load4(x, at)
                q0, q1, q2, q3 = load4(x, at + volume)
                store4(y, i, p0 * both_sides(q0)[0], p1 * both_sides(q1)[0], p2 * both_sides(q2)[0], p3 * both_sides(q3)[0])
            else:
                store(y, i, load(x, at) * both_sides(load(x, at + volume))[0])

    return glu_fprop_kernel


@functools.cache
def dgrad_kernel(kind: str, four: bool) -> Any:
    """The backward kernel; dy, x and dx stored as `kind`. four: volumes are multiples of four."""
    (load, store), (load4, store4) = scalar_io(kind), vector_io(kind)

    @jit()
    def glu_dgrad_kernel(dy, x, dx, count, volume):
        """dx[n,i] = dy·σ(q), dx[n,volume+i] = dy·p·σ(q)·(1−σ(q)) with p = x[n,i], q = x[n,volume+i], volume = C·L.

        grid ⌈NCL/256⌉, or a fourth of it; block 256; a thread owns one dp and its dq, or four neighbours of each.
        shared none; moves 20·NCL bytes of float32. source: the definition.
        """
        i = u4(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x) * (4 if four else 1)
        if i < u4(count):
            at = i + i // u4(volume) * volume
            if four:
                d0, d1, d2, d3 = load4(dy, i)
                p0, p1, p2, p3 = load4(x, at)
                q0, q1, q2, q3 = load4(x, at + volume)
                a0, b0 = _gradients(d0, p0, q0)
                a1, b1 = _gradients(d1, p1, q1)
                a2, b2 = _gradients(d2, p2, q2)
                a3, b3 = _gradients(d3, p3, q3)
                store4(dx, at, a0, a1, a2, a3)
                store4(dx, at + volume, b0, b1, b2, b3)
            else:
                a0, b0 = _gradients(load(dy, i), load(x, at), load(x, at + volume))
                store(dx, at, a0)
                store(dx, at + volume, b0)

    return glu_dgrad_kernel


def _launch(factory: Any, call: Call, shape: Shape) -> list[Launch]:
    """One launch over the elements of `shape`, (N,C,L)."""
    count, volume = numel(shape), numel(shape[1:])
    four = volume % 4 == 0
    args = (*call.ins, *call.outs, np.int32(count), np.int32(volume))
    return [Launch(factory(kinds(call)[0], four), blocks(count, 4 * THREADS if four else THREADS), THREADS, args)]


def bind_fprop(call: Call) -> list[Launch]:
    """x (N,2C,L) -> y (N,C,L). One launch."""
    return _launch(fprop_kernel, call, call.out_shapes[0])


def bind_dgrad(call: Call) -> list[Launch]:
    """dy (N,C,L), x (N,2C,L) -> dx (N,2C,L). One launch."""
    return _launch(dgrad_kernel, call, call.in_shapes[0])


HOST = {Op("glu", "fprop"): host(glu_fprop), Op("glu", "dgrad"): host(glu_dgrad)}
OPS = {Op("glu", "fprop"): Impl(bind_fprop, traffic=streamed), Op("glu", "dgrad"): Impl(bind_dgrad, traffic=streamed)}
GRADIENTS = {Op("glu", "dgrad"): Gradient(Op("glu", "fprop"), lambda ins, outs, v: (v, ins[0]))}


def cases() -> Iterator[Case]:
    """Both passes: one of everything, no multiple of four, more than a warp."""
    for n, c, length in SERIES:
        label, one, two = label_of((n, c, length)), ((n, c, length), "float32"), ((n, 2 * c, length), "float32")
        x, dy = normal(45, n, 2 * c, length), normal(46, n, c, length)
        yield Case(Op("glu", "fprop"), label, (x,), (one,), {}, 4)
        yield Case(Op("glu", "dgrad"), label, (dy, x), (two,), {}, 4)
