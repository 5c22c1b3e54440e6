"""Pointwise convolution of series: a matrix product over channels at every time, y[n,k,l] = Σ_c w[k,c]·x[n,c,l] (+ b[k]).

It is a 1×1 convolution of images that are L pixels high and one wide, so every engine that convolves serves it:

    straight    of an engine for NCHW images: (N,C,L) is such an image already
    transposed  of an engine for NHWC images: x and dy are transposed into scratch, and y or dx out of it

Transposing costs two passes over memory; the depthwise convolution beside it wants its series with time last.

    pwconv1d_fprop    x (N,C,L), w (K,C)[, b (K)] -> y (N,K,L)
    pwconv1d_dgrad    dy (N,K,L), w (K,C) -> dx (N,C,L)
    pwconv1d_wgrad    x (N,C,L), dy (N,K,L) -> dw (K,C)[, db (K)]
    pwconv1d_glu_fprop    x (N,C,L), w (2K,C), b (2K)[, r (N,K,L)] -> y (N,K,L)[, z (N,2K,L)]   y = GLU of z (+ r); only in row cudacore
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nbcnn.ops.activations import glu
from nbcnn.ops.conv import reference
from nbcnn.ops.images.convert import traffic_transpose, transpose
from nbcnn.ops.kernel.call import Call, Impl, Launch, Shape, around, host
from nbcnn.ops.kernel.case import Case, Gradient, normal
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.plan.op import Map, Op
from nbcnn.plan.shapes import numel
from nbcnn.plan.storage import ITEMSIZE, numpy_dtype

PATHS = ("fprop", "dgrad", "wgrad")
_ALIGN = 256


def pwconv1d_fprop(x: np.ndarray, w: np.ndarray, *b_and_y: np.ndarray) -> None:
    """y (N,K,L) from x (N,C,L), w (K,C) and, if it is given before y, b (K)."""
    *b, y = b_and_y
    reference.conv_fprop(x[..., None], w[..., None, None], *b, y[..., None], stride=1, pad=0)


def pwconv1d_dgrad(dy: np.ndarray, w: np.ndarray, dx: np.ndarray) -> None:
    """dx (N,C,L) from dy (N,K,L) and w (K,C)."""
    reference.conv_dgrad(dy[..., None], w[..., None, None], dx[..., None], stride=1, pad=0)


def pwconv1d_wgrad(x: np.ndarray, dy: np.ndarray, dw: np.ndarray, *db: np.ndarray) -> None:
    """dw (K,C) and, if wanted, db (K) from x (N,C,L) and dy (N,K,L)."""
    reference.conv_wgrad(x[..., None], dy[..., None], dw[..., None, None], *db, stride=1, pad=0)


def pwconv1d_glu_fprop(x: np.ndarray, w: np.ndarray, b: np.ndarray, *rest: np.ndarray) -> None:
    """x, w, b[, r], y[, z]: z (N,2C',L) from x (N,C,L), w (2C',C) and b (2C'); y (N,C',L) = GLU of z, plus r (N,C',L)."""
    kept = rest[-1].shape[1] == len(w)
    *r, y = rest[:-1] if kept else rest
    z = rest[-1] if kept else np.empty((len(x), len(w), x.shape[2]), y.dtype)
    pwconv1d_fprop(x, w, b, z)
    glu.glu_fprop(z, y)
    for each in r:
        y += each


HOST = {Op("pwconv1d", "fprop"): host(pwconv1d_fprop), Op("pwconv1d", "dgrad"): host(pwconv1d_dgrad), Op("pwconv1d", "wgrad"): host(pwconv1d_wgrad)}
REFERENCES = {Op("pwconv1d", "fprop", after=(Map("glu"),)): pwconv1d_glu_fprop}
"""The reference of the fused op, which only row cudacore has (pwconv1d_gated.py)."""


def _as_image(shape: Shape) -> Shape:
    """A series (N,C,L) as (N,C,L,1), a weight (K,C) as (K,C,1,1), a bias as it is."""
    return {1: shape, 2: (*shape, 1, 1), 3: (*shape, 1)}[len(shape)]


def as_convolution(call: Call, layout: str) -> Call:
    """The 1×1 convolution that a call means; its arrays are still those of the series."""
    return replace(
        call,
        op=replace(call.op, kind="conv"),
        in_shapes=tuple(map(_as_image, call.in_shapes)),
        out_shapes=tuple(map(_as_image, call.out_shapes)),
        attrs={"stride": 1, "pad": 0},
        layout=layout,
    )


def _series(shapes: Sequence[Shape]) -> list[int]:
    """The operands that are series."""
    return [at for at, shape in enumerate(shapes) if len(shape) == 3]


def _places(call: Call) -> list[tuple[str, int, int, int]]:
    """(side, operand, first byte, bytes) of every series in scratch, and behind them ("", 0, first free byte, 0)."""
    made, at = [], 0
    for side, shapes, dtypes in (("in", call.in_shapes, call.in_dtypes), ("out", call.out_shapes, call.out_dtypes)):
        for operand in _series(shapes):
            nbytes = numel(shapes[operand]) * ITEMSIZE[dtypes[operand] if dtypes else "float32"]
            made.append((side, operand, at, nbytes))
            at += -(-nbytes // _ALIGN) * _ALIGN
    return [*made, ("", 0, at, 0)]


def _bind_transposed(impl: Impl, call: Call) -> list[Any]:
    """Transposes of what is read, the engine's launches, and the transpose of what is written."""
    ins, outs = list(call.ins), list(call.outs)
    before, after = [], []
    *places, (_, _, free, _) = _places(call)
    for side, operand, first, nbytes in places:
        dtypes = call.in_dtypes if side == "in" else call.out_dtypes
        dtype = dtypes[operand] if dtypes else "float32"
        transposed = call.scratch[first : first + nbytes].view(numpy_dtype(dtype))
        n, c, length = (call.in_shapes if side == "in" else call.out_shapes)[operand]
        if side == "in":
            before += _transpose(ins[operand], transposed, dtype, n, c, length)
            ins[operand] = transposed
        else:
            after += _transpose(transposed, outs[operand], dtype, n, length, c)
            outs[operand] = transposed
    inner = replace(as_convolution(call, "NHWC"), ins=tuple(ins), outs=tuple(outs))
    rest = call.scratch[free : free + impl.scratch(inner)] if impl.scratch(inner) else None
    return [*before, *impl.bind(replace(inner, scratch=rest)), *after]


def _traffic_of_transposes(call: Call, side: str) -> list[Traffic]:
    """Bytes of the transposes before ("in") or behind ("out") the engine."""
    made = []
    for at, operand, _, _ in _places(call)[:-1]:
        if at == side:
            shapes, dtypes = (call.in_shapes, call.in_dtypes) if side == "in" else (call.out_shapes, call.out_dtypes)
            (n, c, length), dtype = shapes[operand], dtypes[operand] if dtypes else "float32"
            rows, cols = (c, length) if side == "in" else (length, c)
            transposed = Call(Op("convert"), (), (), ((n, rows, cols),), ((n, cols, rows),), in_dtypes=(dtype,), out_dtypes=(dtype,))
            made += traffic_transpose(transposed, n, rows, cols)
    return made


def _transpose(source: Any, target: Any, dtype: str, batch: int, rows: int, cols: int) -> list[Launch]:
    """target (batch, cols, rows) from source (batch, rows, cols)."""
    shapes = ((batch, rows, cols),), ((batch, cols, rows),)
    return transpose(Call(Op("convert"), (source,), (target,), *shapes, in_dtypes=(dtype,), out_dtypes=(dtype,)), batch, rows, cols)


def _through(impl: Impl, layout: str) -> Impl:
    """The pointwise convolution that convolves by `impl`, which stores images as `layout`."""

    def inner(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda call, *rest: function(as_convolution(call, layout), *rest)

    def traffic(call: Call) -> list[Traffic]:
        """The engine's bytes, between those of the transposes."""
        assert impl.traffic is not None
        made = list(impl.traffic(as_convolution(call, layout)))
        return made if layout == "NCHW" else [*_traffic_of_transposes(call, "in"), *made, *_traffic_of_transposes(call, "out")]

    def own(call: Call) -> list[Traffic]:
        return [] if layout == "NCHW" else [*_traffic_of_transposes(call, "in"), *_traffic_of_transposes(call, "out")]

    if layout == "NCHW":
        bind, scratch = inner(impl.bind), inner(impl.scratch)
    else:

        def bind(call: Call) -> list[Any]:
            return _bind_transposed(impl, call)

        def scratch(call: Call) -> int:
            return _places(call)[-1][2] + impl.scratch(as_convolution(call, layout))

    return replace(
        impl,
        bind=bind,
        scratch=scratch,
        supports=inner(impl.supports),
        estimate=around(impl, lambda call: as_convolution(call, layout), own),
        tile=inner(impl.tile),
        pack=inner(impl.pack) if impl.pack is not None else None,
        candidates=inner(impl.candidates),
        traffic=traffic if impl.traffic is not None else None,
    )


def straight(ops: dict[Op, Impl]) -> dict[Op, Impl]:
    """The three passes by an engine for NCHW images."""
    return {Op("pwconv1d", path): _through(ops[Op("conv", path)], "NCHW") for path in PATHS if Op("conv", path) in ops}


def transposed(ops: dict[Op, Impl]) -> dict[Op, Impl]:
    """The three passes by an engine for NHWC images."""
    return {Op("pwconv1d", path): _through(ops[Op("conv", path)], "NHWC") for path in PATHS if Op("conv", path) in ops}


GRADIENTS = {
    Op("pwconv1d", "dgrad"): Gradient(Op("pwconv1d", "fprop"), lambda ins, outs, v: (v, ins[1])),
    Op("pwconv1d", "wgrad"): Gradient(Op("pwconv1d", "fprop"), lambda ins, outs, v: (ins[0], v), of=(1,)),
}

MEAN_POINTWISE = ((1, 1, 1, 1), (2, 3, 5, 7), (3, 4, 9, 13), (2, 20, 7, 6))
REAL_POINTWISE = ((9, 128, 48, 256), (5, 4, 48, 128))
MEAN_GATED, REAL_GATED = ((2, 3, 8, 5),), ((9, 128, 48, 128), (5, 37, 20, 67))


def pointwise_cases(n: int, c: int, length: int, k: int) -> Iterator[Case]:
    """The three passes of a pointwise convolution of series c → k, with and without a bias."""
    x, w, b, dy = normal(35, n, c, length), normal(36, k, c), normal(37, k), normal(38, n, k, length)
    y, dw, db = ((n, k, length), "float32"), ((k, c), "float32"), ((k,), "float32")
    label = f"{n}×{c}×{length} to {k}"
    yield Case(Op("pwconv1d", "fprop"), label, (x, w), (y,), {}, c)
    yield Case(Op("pwconv1d", "fprop"), label + " bias", (x, w, b), (y,), {}, c + 1)
    yield Case(Op("pwconv1d", "dgrad"), label, (dy, w), (((n, c, length), "float32"),), {}, k)
    yield Case(Op("pwconv1d", "wgrad"), label, (x, dy), (dw,), {}, n * length)
    yield Case(Op("pwconv1d", "wgrad"), label + " bias", (x, dy), (dw, db), {}, n * length)


def gated_cases(shapes: Sequence[tuple[int, int, int, int]] = MEAN_GATED) -> Iterator[Case]:
    """Pointwise convolutions (N, C, L, channels) with GLU behind them: in training and inference, with and without what is added."""
    for n, c, length, channels in shapes:
        x, w, b, r = normal(16, n, c, length), normal(17, 2 * channels, c), normal(18, 2 * channels), normal(19, n, channels, length)
        y, z = ((n, channels, length), "float32"), ((n, 2 * channels, length), "float32")
        for plus in ((), (r,)):
            for kept in ((), (z,)):
                label = f"{n}×{c}×{length} to {channels}" + " added" * bool(plus) + " kept" * bool(kept)
                yield Case(Op("pwconv1d", "fprop", after=(Map("glu"),)), label, (x, w, b, *plus), (y, *kept), {}, c + 1)


def cases() -> Iterator[Case]:
    """Shapes small enough for the simulator."""
    for pointwise in MEAN_POINTWISE:
        yield from pointwise_cases(*pointwise)
    yield from gated_cases(MEAN_GATED)


def real_cases() -> Iterator[Case]:
    """The lengths that are measured."""
    for pointwise in REAL_POINTWISE:
        yield from pointwise_cases(*pointwise)
    yield from gated_cases(REAL_GATED)
