"""Convolutions with groups, dilation or uneven borders by an engine that knows none of these: their filters with the zeros written out.

    groups     a filter reads all channels, those of other groups with weight 0
    dilation   a filter of R taps, D apart, is one of (R − 1)·D + 1 taps of which R are not 0
    borders    what stands above and at the left by less than at the other sides is a row or column of zeros of the filter

The zeros are in no weight: an engine packs its filters by an index map (`Impl.pack`), where −1 adds nothing, and the map of the dense filter is
turned into one of the filter as it is. A weight gradient is computed dense into scratch, and what belongs to weights is taken out of it.

The products with zeros are the price: groups·R'·S' / (R·S) times as many. Tensor cores make some hundred products while the general kernel of
`grouped.py`, which reads two operands for each, makes one; on CUDA cores an engine makes about thirty. Which is
the faster is for `Impl.cost` to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, jit
from nbcnn.gpu.target import Target
from nbcnn.ops.conv.frame.composed import inner, middle, operands, rest
from nbcnn.ops.kernel.call import Call, HostCall, Impl, Launch, around, blocks
from nbcnn.ops.kernel.loops import quotient
from nbcnn.ops.kernel.refusals import too_large
from nbcnn.ops.kernel.traffic import Traffic, once
from nbcnn.ops.kernel.windows import position
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

THREADS = 256


@dataclass(frozen=True)
class Dense:
    """The convolution with the zeros written out: its filters (K, C, R', S'), stride and padding; and where tap (0, 0) of a filter stands in it."""

    filters: tuple[int, ...]
    stride: int
    pad: int
    first: tuple[int, int]


def dense(call: Call) -> Dense:
    """The convolution of a call of gconv_*, whose strides are one."""
    attrs, made = call.attrs, call.out_shapes[0]
    x, y = {
        Op("gconv", "fprop"): (call.in_shapes[0], made),
        Op("gconv", "dgrad"): (made, call.in_shapes[0]),
        Op("gconv", "wgrad"): call.in_shapes[:2],
    }[call.op]
    (_, c, *extent), (_, k, *out), stride = x, y, attrs["stride"][0]
    reach = [(r - 1) * d + 1 for r, d in zip(own_filters(call)[2:], attrs["dilation"], strict=True)]
    ends = [(p - 1) * stride + r - h - before for h, p, r, before in zip(extent, out, reach, attrs["pad"], strict=True)]
    pad = max(*attrs["pad"], *ends)
    first = tuple(pad - before for before in attrs["pad"])
    # At the other side as many zeros as keep the number of windows what it is.
    window = (max(f + r, h + 2 * pad - p * stride + 1) for f, r, h, p in zip(first, reach, extent, out, strict=True))
    return Dense((k, c, *window), stride, pad, (first[0], first[1]))


def own_filters(call: Call) -> tuple[int, ...]:
    """(K, C/groups, R, S) of a call."""
    return call.out_shapes[0] if call.op == Op("gconv", "wgrad") else call.in_shapes[1]


def places(call: Call) -> np.ndarray:
    """Where each weight (K, C/groups, R, S) stands in the dense filters, as an offset; int64."""
    g, own = dense(call), own_filters(call)
    k, c, r, s = np.ogrid[tuple(slice(extent) for extent in own)]
    (_, C, R, S), (down, right) = g.filters, call.attrs["dilation"]
    group = k // (own[0] // call.attrs["groups"])
    return ((k * C + group * own[1] + c) * R + g.first[0] + r * down) * S + g.first[1] + s * right


@jit()
def take_weights_kernel(whole, dw, count, K, CG, R, S, KG, C, RD, SD, down, right, top, left):
    """dw[k,c,r,s] = whole[k, ⌊k/KG⌋·CG + c, top + r·down, left + s·right], whole (K,C,RD,SD) the gradient of the dense filters.

    grid ⌈K·CG·R·S / 256⌉, block 256; a thread owns one weight. shared none; moves 8 bytes per weight.
    """
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < count:
        k, own, r, s = position(i, CG, R, S)
        c = quotient(k, KG) * CG + own
        dw[i] = whole[((k * C + c) * RD + top + r * down) * SD + left + s * right]


def grouped(engine: Mapping[Op, Impl]) -> dict[Op, Impl]:
    """gconv_fprop, gconv_dgrad and gconv_wgrad by the conv_* of `engine`."""

    def supports(call: Call, target: Target, impl: Impl, op: Op) -> str | None:
        down, right = call.attrs["stride"]
        if down != right:
            return f"strides of {down} and {right} are not one"
        return too_large(dense(call).filters, what="the filters with their zeros") or impl.supports(dense_call(call, op), target)

    def dense_call(call: Call, op: Op) -> Call:
        """The engine's call; of a weight gradient, into scratch."""
        g, ins, outs = dense(call), operands(call, "in"), operands(call, "out")
        attrs = {"stride": g.stride, "pad": g.pad}
        if op == Op("conv", "wgrad"):
            whole = middle(call, g.filters, "float32")
            return inner(call, op, ins, [whole, *outs[1:]], attrs=attrs, scratch=rest(call, whole))
        ins[1] = replace(ins[1], shape=g.filters)
        return inner(call, op, ins, outs, attrs=attrs)

    def made(op: Op, impl: Impl) -> Impl:
        pack = impl.pack

        def packed(call: Call) -> np.ndarray:
            assert pack is not None
            index, own = pack(dense_call(call, op)), np.full(numel(dense(call).filters), -1, np.int32)
            own[places(call)] = np.arange(numel(own_filters(call)), dtype=np.int32).reshape(own_filters(call))
            return np.where(index >= 0, own[np.maximum(index, 0)], -1).astype(np.int32)

        def bind(call: Call) -> list[Launch | HostCall]:
            launches = list(impl.bind(dense_call(call, op)))
            if op == Op("conv", "wgrad"):
                g, (k, cg, r, s) = dense(call), own_filters(call)
                whole = middle(call, g.filters, "float32").array
                numbers = (k * cg * r * s, k, cg, r, s, k // call.attrs["groups"], *g.filters[1:], *call.attrs["dilation"], *g.first)
                args = (whole, call.outs[0], *map(np.int32, numbers))
                launches.append(Launch(take_weights_kernel, blocks(numbers[0], THREADS), THREADS, args))
            return launches

        def scratch(call: Call) -> int:
            before = middle(call, dense(call).filters, "float32").nbytes if op == Op("conv", "wgrad") else 0
            return before + impl.scratch(dense_call(call, op))

        def traffic(call: Call) -> list[Traffic]:
            assert impl.traffic is not None
            return [*impl.traffic(dense_call(call, op)), *(own(call) if op == Op("conv", "wgrad") else [])]

        def own(call: Call) -> list[Traffic]:
            weights = 4 * numel(own_filters(call))
            return [once(weights, weights)]

        changes: dict[str, Any] = {
            "bind": bind,
            "scratch": scratch,
            "supports": lambda call, target: supports(call, target, impl, op),
            "estimate": around(impl, lambda call: dense_call(call, op), own if op == Op("conv", "wgrad") else None),
            "tile": lambda call, target: impl.tile(dense_call(call, op), target),
            "candidates": lambda call, target: impl.candidates(dense_call(call, op), target),
            "pack": None if pack is None else packed,
            "traffic": None if impl.traffic is None else traffic,
        }
        return replace(impl, **changes)

    return {replace(op, kind="gconv"): made(op, engine[op]) for op in (Op("conv", "fprop"), Op("conv", "dgrad"), Op("conv", "wgrad")) if op in engine}
