"""Shared parts of the steps, which none of them teaches: sizes as kernel arguments, which shapes run, how a step becomes an implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbcnn.gpu.target import Target
from nbcnn.ops.conv.naive import shape_of
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.plan.shapes import ConvShape, numel

THREADS = 256
LARGEST = 2**31
"""Elements of an operand, which a kernel numbers by 32-bit integers."""


def sizes(s: ConvShape) -> tuple[np.int32, ...]:
    """What every kernel of the convolution must know: C, H, W, K, P, Q, R, S, stride, padding."""
    return tuple(np.int32(value) for value in (s.C, s.H, s.W, s.K, s.P, s.Q, s.R, s.S, s.stride, s.pad))


def step(
    launch: Callable[[ConvShape, tuple[Any, ...]], Launch],
    traffic: Callable[[ConvShape], Traffic],
    *,
    biased: bool = False,
    refusal: Callable[[ConvShape], str | None] = lambda shape: None,
) -> Impl:
    """`conv_fprop` without a bias (`biased`: `conv_relu_fprop`) by one launch, which gets the arrays of x, w, with `biased` b, and y."""

    def bind(call: Call) -> list[Launch]:
        return [launch(shape_of(call), (*call.ins, *call.outs))]

    def supports(call: Call, target: Target) -> str | None:
        if not biased and len(call.in_shapes) > 2:
            return "a bias is added in step 5"
        if max(map(numel, (*call.in_shapes, *call.out_shapes))) >= LARGEST:
            return f"an operand has {LARGEST:,} elements or more"
        return refusal(shape_of(call))

    return Impl(bind, supports=supports, traffic=lambda call: [traffic(shape_of(call))])


def sum_step(kernel: Any, grid: Callable[[int], int]) -> Impl:
    """`bias_wgrad`, dy (N,C,H,W) -> db (C), by one launch of `grid(C)` blocks that reads dy once."""

    def bind(call: Call) -> list[Launch]:
        (N, C, H, W), (dy,), (db,) = call.in_shapes[0], call.ins, call.outs
        return [Launch(kernel, grid(C), THREADS, (dy, db, np.int32(N), np.int32(C), np.int32(H * W)))]

    def supports(call: Call, target: Target) -> str | None:
        return None if numel(call.in_shapes[0]) < LARGEST else f"dy has {LARGEST:,} elements or more"

    def traffic(call: Call) -> list[Traffic]:
        read, written = 4 * numel(call.in_shapes[0]), 4 * numel(call.out_shapes[0])
        return [Traffic(read, written, read)]

    return Impl(bind, supports=supports, traffic=traffic)
