"""GLU over the channels of series: the first half of the channels, p, times the sigmoid of the second half, q.

    y = p·σ(q);   dp = dy·σ(q),   dq = dy·p·σ(q)·(1 − σ(q))

Source: Y. N. Dauphin, A. Fan, M. Auli, D. Grangier, "Language Modeling with Gated Convolutional Networks", arXiv:1612.08083.

    glu_fprop         x (N,2C,L) -> y (N,C,L)             glu_dgrad         dy, x -> dx
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.gpu.lockstep.arrays import on_arrays
from nbcnn.ops.activations.sigmoid import both_sides
from nbcnn.ops.kernel.call import Call, Impl, Launch, Place, host
from nbcnn.ops.kernel.case import SERIES, Case, Gradient, label_of, normal
from nbcnn.ops.kernel.maps import launch_map, supports
from nbcnn.ops.kernel.traffic import streamed
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

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
def _gated(p, q):
    return p * both_sides(q)[0]


@jit(device=True)
def _gradients(dy, p, q):
    """dp and dq."""
    gate, rest = both_sides(q)
    dp = dy * gate
    return dp, dp * (p * rest)


def in_halves(call: Call) -> Call:
    """The call with p and q, or dp and dq, in place of the operand of which they are the two halves of the channels."""
    n, c, length = call.out_shapes[0] if call.op.direction == "fprop" else call.in_shapes[0]

    def halves(side: str, arrays: Any, shapes: Any, dtypes: Any) -> tuple[Any, ...]:
        at = len(arrays) - 1
        places = {(side, at): Place(0, 2 * c), (side, at + 1): Place(c, 2 * c)}
        return (*arrays, arrays[at][c * length :]), (*shapes[:at], *2 * ((n, c, length),)), (*dtypes, *dtypes[at:]), places

    ins, in_shapes, in_dtypes, places = halves("in", call.ins, call.in_shapes, call.in_dtypes)
    made = replace(call, ins=ins, in_shapes=in_shapes, in_dtypes=in_dtypes, places=places)
    if call.op.direction == "fprop":
        return made
    outs, out_shapes, out_dtypes, more = halves("out", call.outs, call.out_shapes, call.out_dtypes)
    return replace(made, outs=outs, out_shapes=out_shapes, out_dtypes=out_dtypes, places=places | more)


def bind(call: Call) -> list[Launch]:
    """x (N,2C,L) -> y (N,C,L), or dy, x -> dx. One launch of the frame of maps; a thread has four neighbours where a row of C·L has fours."""
    halves = in_halves(call)
    function = _gated if call.op.direction == "fprop" else _gradients
    return launch_map(f"{call.op}_kernel", function, halves, single=numel(halves.out_shapes[0][1:]) % 4 != 0)


HOST = {Op("glu", "fprop"): host(glu_fprop), Op("glu", "dgrad"): host(glu_dgrad)}
OPS = {op: Impl(bind, supports=supports, traffic=streamed) for op in HOST}
GRADIENTS = {Op("glu", "dgrad"): Gradient(Op("glu", "fprop"), lambda ins, outs, v: (v, ins[0]))}


def cases() -> Iterator[Case]:
    """Both passes: one of everything, no multiple of four, more than a warp."""
    for n, c, length in SERIES:
        label, one, two = label_of((n, c, length)), ((n, c, length), "float32"), ((n, 2 * c, length), "float32")
        x, dy = normal(45, n, 2 * c, length), normal(46, n, c, length)
        yield Case(Op("glu", "fprop"), label, (x,), (one,), {}, 4)
        yield Case(Op("glu", "dgrad"), label, (dy, x), (two,), {}, 4)
