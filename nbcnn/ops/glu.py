"""GLU over the channels of series: the first half of the channels, p, times the sigmoid of the second half, q.

    y = p·σ(q);   dp = dy·σ(q),   dq = dy·p·σ(q)·(1 − σ(q))

With e = exp(−|q|) and t = 1/(1 + e), σ(q) and 1 − σ(q) are t and e·t in one order or the other, as for swish.
Source: Y. N. Dauphin, A. Fan, M. Auli, D. Grangier, "Language Modeling with Gated Convolutional Networks", arXiv:1612.08083.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from nbcnn.cuda import cuda, f4, i4, jit, u4
from nbcnn.ops.call import Call, Launch, blocks
from nbcnn.ops.sigmoid import divide
from nbcnn.ops.stored import kinds, scalar_io
from nbcnn.shapes import numel

THREADS = 256


def _gates(q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """σ(q) and 1 − σ(q)."""
    e = np.exp(-np.abs(q))
    t = 1 / (1 + e)
    return np.where(q < 0, e, 1) * t, np.where(q < 0, 1, e) * t


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
def gates_of(q):
    """σ(q) and 1 − σ(q)."""
    e = f4(math.exp(-abs(q)))
    t = divide(f4(1), f4(1) + e)
    return (e * t if q < f4(0) else t), (t if q < f4(0) else e * t)


@functools.cache
def fprop_kernel(kind: str) -> Any:
    """The forward kernel; x and y stored as `kind`."""
    load, store = scalar_io(kind)

    @jit()
    def glu_fprop_kernel(x, y, count, volume):
        """y[n,i] = x[n,i]·σ(x[n,volume+i]) with volume = C·L.

        grid ⌈NCL/256⌉, block 256; a thread owns one y, neighbours are neighbours in all three streams.
        shared none; moves 12·NCL bytes of float32. source: the definition.
        """
        i = i4(cuda.grid(1))
        if i < count:
            at = u4(u4(i) + u4(i) // u4(volume) * u4(volume))
            gate, _ = gates_of(load(x, u4(at + u4(volume))))
            store(y, u4(i), load(x, at) * gate)

    return glu_fprop_kernel


@functools.cache
def dgrad_kernel(kind: str) -> Any:
    """The backward kernel; dy, x and dx stored as `kind`."""
    load, store = scalar_io(kind)

    @jit()
    def glu_dgrad_kernel(dy, x, dx, count, volume):
        """dx[n,i] = dy·σ(q), dx[n,volume+i] = dy·p·σ(q)·(1−σ(q)) with p = x[n,i], q = x[n,volume+i], volume = C·L.

        grid ⌈NCL/256⌉, block 256; a thread owns one dp and its dq.
        shared none; moves 20·NCL bytes of float32. source: the definition.
        """
        i = i4(cuda.grid(1))
        if i < count:
            at = u4(u4(i) + u4(i) // u4(volume) * u4(volume))
            p, q = load(x, at), load(x, u4(at + u4(volume)))
            gate, rest = gates_of(q)
            dp = load(dy, u4(i)) * gate
            store(dx, at, dp)
            store(dx, u4(at + u4(volume)), dp * (p * rest))

    return glu_dgrad_kernel


def bind_fprop(call: Call) -> list[Launch]:
    """One launch."""
    shape = call.out_shapes[0]
    args = (*call.ins, *call.outs, np.int32(numel(shape)), np.int32(numel(shape[1:])))
    return [Launch(fprop_kernel(kinds(call)[0]), blocks(numel(shape), THREADS), THREADS, args)]


def bind_dgrad(call: Call) -> list[Launch]:
    """One launch."""
    shape = call.in_shapes[0]
    args = (*call.ins, *call.outs, np.int32(numel(shape)), np.int32(numel(shape[1:])))
    return [Launch(dgrad_kernel(kinds(call)[0]), blocks(numel(shape), THREADS), THREADS, args)]
