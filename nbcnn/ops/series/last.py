"""The last element of every series: y[n,c] = x[n,c,L−1]. Its gradient is zero everywhere else.

last_fprop        x (N,C,L) -> y (N,C)                last_dgrad        dy -> dx
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, jit
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.case import SERIES, Case, Gradient, label_of, normal
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.traffic import Traffic, once, outputs, size
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

THREADS = 256


def last_fprop(x: np.ndarray, y: np.ndarray) -> None:
    """y (N,C) = x (N,C,L)[:, :, L−1]."""
    np.copyto(y, x[:, :, -1])


def last_dgrad(dy: np.ndarray, dx: np.ndarray) -> None:
    """dx (N,C,L): dy (N,C) at L−1, zeros before."""
    dx[:, :, :-1] = 0
    dx[:, :, -1] = dy


@functools.cache
def fprop_kernel(kind: str) -> Any:
    """The forward kernel; x and y stored as `kind`."""
    load, store = scalar_io(kind)

    @jit()
    def last_fprop_kernel(x, y, count, L):
        """y[i] = x[i·L + L − 1].

        grid ⌈NC/256⌉, block 256; a thread owns one y. shared none; moves 8·NC bytes of float32, in sectors of 32 read for each 4.
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i < count:
            store(y, i, load(x, i * L + L - 1))

    return last_fprop_kernel


@functools.cache
def dgrad_kernel(kind: str) -> Any:
    """The backward kernel; dy and dx stored as `kind`."""
    load, store = scalar_io(kind)

    @jit()
    def last_dgrad_kernel(dy, dx, count, L):
        """dx[i] = dy[i / L] if i mod L = L − 1, else 0.

        grid ⌈NCL/256⌉, block 256; a thread owns one dx. shared none; moves 4·NCL + 4·NC bytes of float32.
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i < count:
            row = i // L
            value = 0.0
            if i - row * L == L - 1:
                value = load(dy, row)
            store(dx, i, value)

    return last_dgrad_kernel


def bind_fprop(call: Call) -> list[Launch]:
    """One launch."""
    count = numel(call.out_shapes[0])
    args = (*call.ins, *call.outs, np.int32(count), np.int32(call.in_shapes[0][2]))
    return [Launch(fprop_kernel(kinds(call)[0]), blocks(count, THREADS), THREADS, args)]


def bind_dgrad(call: Call) -> list[Launch]:
    """One launch."""
    count = numel(call.out_shapes[0])
    args = (*call.ins, *call.outs, np.int32(count), np.int32(call.out_shapes[0][2]))
    return [Launch(dgrad_kernel(kinds(call)[0]), blocks(count, THREADS), THREADS, args)]


def traffic_fprop(call: Call) -> list[Traffic]:
    """Bytes of `bind_fprop`: one element of every series."""
    return [once(outputs(call), outputs(call))]


def traffic_dgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_dgrad`: the last element of a series asks for dy, the others for nothing."""
    return [once(size(call, "in", 0), outputs(call))]


HOST = {Op("last", "fprop"): host(last_fprop), Op("last", "dgrad"): host(last_dgrad)}
OPS = {Op("last", "fprop"): Impl(bind_fprop, traffic=traffic_fprop), Op("last", "dgrad"): Impl(bind_dgrad, traffic=traffic_dgrad)}
GRADIENTS = {Op("last", "dgrad"): Gradient(Op("last", "fprop"), lambda ins, outs, v: (v,))}


def cases() -> Iterator[Case]:
    """Both passes: one of everything, no multiple of four, more than a warp."""
    for n, c, length in SERIES:
        label, one, dy = label_of((n, c, length)), ((n, c, length), "float32"), normal(46, n, c, length)
        yield Case(Op("last", "fprop"), label, (dy,), (((n, c), "float32"),))
        yield Case(Op("last", "dgrad"), label, (dy[:, :, 0].copy(),), (one,))
