"""Concatenation over channels: y holds the channels of x₁, then those of x₂, and so on; its gradient hands every part of dy back.

In memory every operand is a matrix. Where images are stored NHWC, a row is a pixel with its channels; elsewhere (NCHW, series, vectors) a row
is an example. In both, y's rows are the rows of x₁, x₂, … one behind the other, so one kernel that copies a block of columns between two
matrices serves both passes, in every row of the table.

    concat_fprop      x₁ (N,C₁,…), x₂ (N,C₂,…), … -> y (N,C₁+C₂+…,…)        concat_dgrad      dy -> dx₁, dx₂, …

Behind a transposed convolution, whose bias is a pass of its own, the copy adds it:

    concat_bias_fprop  x₁ (N,C₁,H,W), x₂ (N,C₂,H,W), b (C₂) -> y, whose last channels are x₂ + b

Of what lies in the whole from the start (`nbcnn.plan.parts`) there is no copy: the ops then have the other operands alone, and a part of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.ops.kernel.call import Call, Impl, Launch, Shape, any_part, blocks, host
from nbcnn.ops.kernel.case import IMAGES, Case, Gradient, Shapes, label_of, normal
from nbcnn.ops.kernel.loops import quotient, within
from nbcnn.ops.kernel.maps import supports
from nbcnn.ops.kernel.share import lanes_io
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.traffic import Traffic, once, size
from nbcnn.plan.op import Bias, Op
from nbcnn.plan.shapes import rows_of
from nbcnn.plan.storage import HALVES

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


def concat_bias_fprop(first: np.ndarray, second: np.ndarray, b: np.ndarray, y: np.ndarray) -> None:
    """y (N,C₁+C₂,H,W) = first (N,C₁,H,W), then second (N,C₂,H,W) + b (C₂) by channel."""
    concat_fprop(first, second + b[:, None, None], y)


@cache
def columns_kernel(source: str, target: str, together: int, biased: bool = False) -> Any:
    """y[r·y_pitch + y_at + j] = x[r·x_pitch + x_at + j] for every row r and 0 ≤ j < width; x is stored as `source`, y as `target`.

    `biased`: plus b[j/plane].

    grid    ceil(rows·width / block's elements), block 256
    owns    thread: `together` elements of one row, 8 or 4 where widths, pitches and starts are multiples of that, else one
    moves   2·rows·width elements; neighbouring threads touch neighbouring elements of a row on both sides
    """
    (load, _), (_, store) = lanes_io(source, together), lanes_io(target, together)
    (load_one, _), (_, store_one) = scalar_io(source), scalar_io(target)
    TOGETHER, IN_LANES = together, together > 1 or biased

    @jit()
    def columns_kernel(x, b, y, count, width, plane, x_pitch, x_at, y_pitch, y_at):
        values = cuda.local.array(TOGETHER, f4)
        i = (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x) * TOGETHER
        if within(i, count):
            row = quotient(i, width)
            column = i - row * width
            at, to = row * x_pitch + x_at + column, row * y_pitch + y_at + column
            if IN_LANES:
                load(x, at, values, 0)
                if biased:
                    for q in range(TOGETHER):
                        values[q] += b[quotient(column + q, plane)]
                store(y, to, values, 0)
            else:
                # Whatever its type: classes are copied, too.
                store_one(y, to, load_one(x, at))

    return columns_kernel


def _bind(
    call: Call, shapes: tuple[Shape, ...], whole: Shape, arrays: tuple[Any, ...], other: Any, gather: bool, bias: Any = None
) -> list[Launch]:  # fmt: skip
    """One launch for every part, of `arrays` with `shapes`: out of `other`, of shape `whole`, or (`gather`) into it.

    bias: what is added to the last part.
    """
    rows, each = rows_of(whole, call.layout)
    part, joined = ("in", "out") if gather else ("out", "in")
    pitch, front = each * call.channels(joined, 0), each * call.first(joined, 0)
    at, made, types = 0, [], kinds(call)
    for number, (shape, array) in enumerate(zip(shapes, arrays, strict=True), 1):
        width, own_pitch, before = each * shape[1], each * call.channels(part, number - 1), each * call.first(part, number - 1)
        wide = (8, 4) if types[0] == types[1] and types[0] in HALVES else (4,)
        together = next((lanes for lanes in wide if not any(extent % lanes for extent in (width, pitch, front + at, own_pitch, before))), 1)
        count, own, inside = rows * width, (own_pitch, 0), (pitch, at)
        biased = bias is not None and number == len(shapes)
        x, y = (array, other) if gather else (other, array)
        extents = (count, width, width // shape[1], *((*own, *inside) if gather else (*inside, *own)))
        operands = (x, bias if biased else x, y, *(np.int32(n) for n in extents))
        made.append(Launch(columns_kernel(*types, together, biased), blocks(count, together * THREADS), THREADS, operands))
        at += width
    return made


def bind_fprop(call: Call) -> list[Launch]:
    """x₁ (N,C₁,…), x₂, … -> y (N,ΣCᵢ,…). One launch for every input."""
    return _bind(call, call.in_shapes, call.out_shapes[0], call.ins, call.outs[0], gather=True)


def bind_bias(call: Call) -> list[Launch]:
    """x₁ (N,C₁,H,W), x₂ (N,C₂,H,W), b (C₂) -> y, or x₂, b -> a part of y. One launch for each of the images."""
    return _bind(call, call.in_shapes[:-1], call.out_shapes[0], call.ins[:-1], call.outs[0], gather=True, bias=call.ins[-1])


def bind_dgrad(call: Call) -> list[Launch]:
    """dy (N,ΣCᵢ,…) -> dx₁ (N,C₁,…), dx₂, …. One launch for every output."""
    return _bind(call, call.out_shapes, call.in_shapes[0], call.outs, call.ins[0], gather=False)


def traffic_fprop(call: Call) -> list[Traffic]:
    """Bytes of `bind_fprop`: every launch moves one input."""
    return [once(nbytes, nbytes) for nbytes in (size(call, "in", at) for at in range(len(call.in_shapes) - call.op.has(Bias)))]


def traffic_dgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_dgrad`: every launch moves one output."""
    return [once(nbytes, nbytes) for nbytes in (size(call, "out", at) for at in range(len(call.out_shapes)))]


HOST = {Op("concat", "fprop"): host(concat_fprop), Op("concat", "dgrad"): host(concat_dgrad)}
OPS = {
    Op("concat", "fprop"): Impl(bind_fprop, supports=supports, traffic=traffic_fprop, pitched=any_part),
    Op("concat", "fprop", before=(Bias(),)): Impl(bind_bias, supports=supports, traffic=traffic_fprop, pitched=any_part),
    Op("concat", "dgrad"): Impl(bind_dgrad, supports=supports, traffic=traffic_dgrad, pitched=any_part),
}
REFERENCES = {Op("concat", "fprop", before=(Bias(),)): concat_bias_fprop}
GRADIENTS = {Op("concat", "dgrad"): Gradient(Op("concat", "fprop"), lambda ins, outs, v: (v,), of=(0, 1))}


def cases(images: Shapes = IMAGES) -> Iterator[Case]:
    """Both passes, of images with equal, more and fewer channels behind them, also with a bias, and of vectors."""
    for shape in (*images, (3, 5)):
        n, c, *rest = shape
        for more in (c, 3) if c != 3 else (4,):
            first, second, both = (n, c, *rest), (n, more, *rest), (n, c + more, *rest)
            label = f"{label_of(first)} + {more}"
            yield Case(Op("concat", "fprop"), label, (normal(31, *first), normal(32, *second)), ((both, "float32"),))
            if rest[1:]:
                yield Case(
                    Op("concat", "fprop", before=(Bias(),)), label, (normal(31, *first), normal(32, *second), normal(34, more)), ((both, "float32"),)
                )
            yield Case(Op("concat", "dgrad"), label, (normal(33, *both),), ((first, "float32"), (second, "float32")))
