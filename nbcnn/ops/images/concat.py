"""Concatenation over channels: y holds the channels of x₁, then those of x₂, and so on; its gradient hands every part of dy back.

In memory every operand is a matrix. Where images are stored NHWC, a row is a pixel with its channels; elsewhere (NCHW, series, vectors) a row
is an example. In both, y's rows are the rows of x₁, x₂, … one behind the other, so one kernel that copies a block of columns between two
matrices serves both passes, in every row of the table.

    concat_fprop      x₁ (N,C₁,…), x₂ (N,C₂,…), … -> y (N,C₁+C₂+…,…)        concat_dgrad      dy -> dx₁, dx₂, …
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, jit
from nbcnn.ops.kernel.call import Call, Impl, Launch, Shape, blocks, host
from nbcnn.ops.kernel.case import IMAGES, Case, Gradient, Shapes, label_of, normal
from nbcnn.ops.kernel.elementwise import supports
from nbcnn.ops.kernel.loops import quotient, within
from nbcnn.ops.kernel.stored import kinds, scalar_io, vector_io
from nbcnn.ops.kernel.traffic import Traffic, once, size
from nbcnn.plan.shapes import numel

THREADS = 256


def _parts(arrays: tuple[np.ndarray, ...], whole: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Every array with the view of `whole` that holds its channels."""
    at = 0
    for array in arrays:
        yield array, whole[:, at : at + array.shape[1]]
        at += array.shape[1]


def concat_fprop(*operands: np.ndarray) -> None:
    """The last operand, y (N,ΣCᵢ,…), = the others, xᵢ (N,Cᵢ,…), one behind the other along axis 1."""
    *xs, y = operands
    for x, part in _parts(tuple(xs), y):
        np.copyto(part, x)


def concat_dgrad(dy: np.ndarray, *dxs: np.ndarray) -> None:
    """Each dxᵢ (N,Cᵢ,…) = its channels of dy (N,ΣCᵢ,…)."""
    for dx, part in _parts(dxs, dy):
        np.copyto(dx, part)


@cache
def columns_kernel(source: str, target: str, four: bool) -> Any:
    """y[r·y_pitch + y_at + j] = x[r·x_pitch + x_at + j] for every row r and 0 ≤ j < width; x is stored as `source`, y as `target`.

    grid    ceil(rows·width / block's elements), block 256
    owns    thread: four elements of one row where widths, pitches and starts are multiples of four (`four`), else one
    moves   2·rows·width elements; neighbouring threads touch neighbouring elements of a row on both sides
    """
    io = vector_io if four else scalar_io
    (load, _), (_, store) = io(source), io(target)

    @jit()
    def columns_kernel(x, y, count, width, x_pitch, x_at, y_pitch, y_at):
        i = (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x) * (4 if four else 1)
        if within(i, count):
            row = quotient(i, width)
            column = i - row * width
            at, to = row * x_pitch + x_at + column, row * y_pitch + y_at + column
            if four:
                a, b, c, d = load(x, at)
                store(y, to, a, b, c, d)
            else:
                store(y, to, load(x, at))

    return columns_kernel


def _matrix(shape: Shape, layout: str) -> tuple[int, int]:
    """(rows, columns) of the matrix that a tensor of `shape` is in memory."""
    if layout == "NHWC" and len(shape) == 4:
        n, c, h, w = shape
        return n * h * w, c
    return shape[0], numel(shape[1:])


def _bind(call: Call, shapes: tuple[Shape, ...], whole: Shape, arrays: tuple[Any, ...], other: Any, gather: bool) -> list[Launch]:
    """One launch for every part, of `arrays` with `shapes`: out of `other`, of shape `whole`, or (`gather`) into it."""
    rows, pitch = _matrix(whole, call.layout)
    at, made = 0, []
    for shape, array in zip(shapes, arrays, strict=True):
        width = _matrix(shape, call.layout)[1]
        four = not any(number % 4 for number in (width, pitch, at))
        count, own, inside = rows * width, (width, 0), (pitch, at)
        operands = (array, other) if gather else (other, array)
        numbers = (count, width, *own, *inside) if gather else (count, width, *inside, *own)
        grid = blocks(count, 4 * THREADS if four else THREADS)
        made.append(Launch(columns_kernel(*kinds(call), four), grid, THREADS, (*operands, *(np.int32(n) for n in numbers))))
        at += width
    return made


def bind_fprop(call: Call) -> list[Launch]:
    """x₁ (N,C₁,…), x₂, … -> y (N,ΣCᵢ,…). One launch for every input."""
    return _bind(call, call.in_shapes, call.out_shapes[0], call.ins, call.outs[0], gather=True)


def bind_dgrad(call: Call) -> list[Launch]:
    """dy (N,ΣCᵢ,…) -> dx₁ (N,C₁,…), dx₂, …. One launch for every output."""
    return _bind(call, call.out_shapes, call.in_shapes[0], call.outs, call.ins[0], gather=False)


def traffic_fprop(call: Call) -> list[Traffic]:
    """Bytes of `bind_fprop`: every launch moves one input."""
    return [once(nbytes, nbytes) for nbytes in (size(call, "in", at) for at in range(len(call.in_shapes)))]


def traffic_dgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_dgrad`: every launch moves one output."""
    return [once(nbytes, nbytes) for nbytes in (size(call, "out", at) for at in range(len(call.out_shapes)))]


HOST = {"concat_fprop": host(concat_fprop), "concat_dgrad": host(concat_dgrad)}
OPS = {
    "concat_fprop": Impl(bind_fprop, supports=supports, traffic=traffic_fprop),
    "concat_dgrad": Impl(bind_dgrad, supports=supports, traffic=traffic_dgrad),
}
GRADIENTS = {"concat_dgrad": Gradient("concat_fprop", lambda ins, outs, v: (v,), of=(0, 1))}


def cases(images: Shapes = IMAGES) -> Iterator[Case]:
    """Both passes, of images with equal, more and fewer channels behind them, and of vectors."""
    for shape in (*images, (3, 5)):
        n, c, *rest = shape
        for more in (c, 3) if c != 3 else (4,):
            first, second, both = (n, c, *rest), (n, more, *rest), (n, c + more, *rest)
            label = f"{label_of(first)} + {more}"
            yield Case("concat_fprop", label, (normal(31, *first), normal(32, *second)), ((both, "float32"),))
            yield Case("concat_dgrad", label, (normal(33, *both),), ((first, "float32"), (second, "float32")))
