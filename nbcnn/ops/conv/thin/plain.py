"""Convolutions with few channels on one side (at most 4, as next to an image), stride 1, images in NHWC.

An ordinary implicit GEMM wastes itself on them: three columns of a 128-wide tile, or GK = 27 of a pipeline built for
thousands. Three kernels serve the six passes, chosen by where the few channels are:

    pass    thin C (a first layer)       thin K (a last layer)
    fprop   gather   (thin/gather.py)    scatter  (thin/scatter.py)
    dgrad   scatter                      gather
    wgrad   thin/wgrad.py                thin/wgrad.py

All are bound by reading or writing the wide images once, and by multiplying at the same rate: for 3×3 and three
channels 27 multiply-adds for the four bytes of a wide element, which on a GPU with 67 TFLOP/s and 4.8 TB/s take as long.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbcnn.gpu.target import Target
from nbcnn.ops.conv.thin import gather as thin_gather
from nbcnn.ops.conv.thin import scatter as thin_scatter
from nbcnn.ops.conv.thin import wgrad as thin_wgrad
from nbcnn.ops.conv.thin.shape import correlation, refusal
from nbcnn.ops.kernel.call import Call, Impl, Launch
from nbcnn.ops.kernel.cost import stream
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.plan.op import Op


def _form(call: Call) -> Any:
    """The module that serves an fprop or dgrad call: gather out of a thin source, or scatter into a thin target."""
    g = correlation(call)
    return thin_gather if g.C <= g.K else thin_scatter


def supports(call: Call, target: Target) -> str | None:
    return refusal(call, call.in_shapes[1], (call.in_shapes[0], call.out_shapes[0]))


def supports_wgrad(call: Call, target: Target) -> str | None:
    return refusal(call, call.out_shapes[0], call.in_shapes)


def bind(call: Call) -> list[Launch]:
    return _form(call).bind(call)


def scratch(call: Call) -> int:
    return _form(call).scratch(call)


def tile(call: Call, target: Target) -> Any:
    return _form(call).tile(call, target)


def pack(call: Call) -> np.ndarray:
    return _form(call).pack(call)


def traffic(call: Call) -> list[Traffic]:
    return _form(call).traffic(call)


def estimate(call: Call, target: Target) -> float:
    """Microseconds; scatter has no model but what it moves."""
    return thin_gather.estimate(call, target) if _form(call) is thin_gather else stream(traffic(call))


IMAGES = Impl(bind, scratch, supports, tile, pack, traffic=traffic, engine="thin", estimate=estimate)

OPS: dict[Op, Impl] = {
    Op("conv", "fprop"): IMAGES,
    Op("conv", "dgrad"): IMAGES,
    Op("conv", "wgrad"): Impl(
        thin_wgrad.bind, thin_wgrad.scratch, supports_wgrad, thin_wgrad.tile, traffic=thin_wgrad.traffic, engine="thin", estimate=thin_wgrad.estimate
    ),
}
