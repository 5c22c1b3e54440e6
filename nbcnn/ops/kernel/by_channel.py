"""Maps with an operand by channel, y[n,c,…] = f(x[n,c,…], v[c]) or f(x[n,c,…], v[n,c]): biases, slopes, factors.

Four neighbours look for their channel once: they are four channels of a pixel, or four pixels of a channel. Where an image is not made of such
fours, a thread has one element.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.kernel.call import Call, Launch
from nbcnn.ops.kernel.loops import quotient
from nbcnn.ops.kernel.maps import launch_map
from nbcnn.ops.kernel.stored import scalar_io
from nbcnn.plan.shapes import numel


@jit(device=True)
def _settings(values, state, norm, numbers):
    return values, numbers[0], numbers[1]


@cache
def _place(last: bool, per_image: bool) -> Any:
    @jit(device=True)
    def place(i, settings):
        """Where the value of element i stands. last: channels are neighbours."""
        _, C, plane = settings
        if last:
            row = quotient(i, C)
            c = i - row * C
            return quotient(row, plane) * C + c if per_image else c
        row = quotient(i, plane)
        return row if per_image else row - quotient(row, C) * C

    return place


@cache
def _with_value(function: Any, kind: str, four: bool) -> Any:
    load, _ = scalar_io(kind)

    @jit(device=True)
    def with_value(i, elements, settings, at):
        value = (load(settings[0], at + (i & 3) if four else at),)
        return function(*(elements + value))

    return with_value


def launch_by_channel(name: str, function: Callable[..., Any], call: Call, *, per_image: bool = False) -> list[Launch]:
    """One launch: y = function(elements …, value) for all inputs of the call but the last, which is (C), (1) for all alike, or per image (N, C)."""
    shape, values = call.in_shapes[0], call.in_shapes[-1]
    channels, plane = values[-1], numel(shape[2:]) if numel(values) > 1 or per_image else numel(shape)
    last = channels == shape[1] and (plane == 1 or (call.layout == "NHWC" and len(shape) == 4))
    four = (channels if last else plane) % 4 == 0
    kind = call.in_dtypes[-1] if call.in_dtypes else "float32"
    return launch_map(
        name,
        _with_value(function, kind, last and four),
        call,
        np.int32(channels),
        np.int32(plane),
        reads=len(call.ins) - 1,
        prelude=_settings,
        indexed=True,
        arrays=call.ins[-1:],
        shared=_place(last, per_image),
        single=not four,
    )
