"""The fused convolutions with few channels on one side (first and last layers): the kernels of thin/plain.py with another end or
another window. Which fused op has which thin side, and what serves it:

    conv_relu_fprop, conv_relu_pool_fprop          thin C: gather (thin/gather.py), with a ReLU, and pooled
    conv_pool_wgrad                                thin C: thin/wgrad.py, which un-pools what it reads (thin/wide.py)
    conv_dgrad_relu                                thin K: gather, masked
    upconv_dgrad, upconv_dgrad_relu                thin K: gather with the folded 4×4 window of stride 2 (folded.py)
    upconv_wgrad                                   thin K: thin/wgrad.py with that window
    upconv_fprop, upconv_relu_fprop, upconv_mse_fprop  thin K: nine products at low resolution, collected (thin/up.py)

Other sides of these ops run on im2col_fused.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from nbcnn.gpu.target import Target
from nbcnn.ops.conv.frame.folded import TERMS, gradient_filters
from nbcnn.ops.conv.thin import gather as thin_gather
from nbcnn.ops.conv.thin import scatter as thin_scatter
from nbcnn.ops.conv.thin import up as thin_up
from nbcnn.ops.conv.thin import wgrad as thin_wgrad
from nbcnn.ops.conv.thin.shape import correlation, refusal
from nbcnn.ops.kernel.call import Call, Impl
from nbcnn.plan.op import Loss, Map, Mask, Op, Pool, Unpool
from nbcnn.plan.shapes import numel


def supports_gather(call: Call, target: Target) -> str | None:
    """None, or the reason in words."""
    g = correlation(call)
    reason = refusal(call, call.in_shapes[1], (call.in_shapes[0], (g.N, g.K, g.P, g.Q)))
    return reason or (None if g.C < g.K else "only a thin source is gathered")


def supports_up(call: Call, target: Target) -> str | None:
    """None, or the reason in words."""
    g = correlation(call)
    reason = refusal(call, call.in_shapes[1], (call.in_shapes[0], (g.N, g.K, g.P, g.Q)))
    return reason or (None if g.K < g.C else "only a thin target is collected")


def supports_wgrad(call: Call, target: Target) -> str | None:
    """None, or the reason in words."""
    g = thin_wgrad.gradient(call)
    reason = refusal(call, call.out_shapes[0], ((g.N, g.C, g.H, g.W), (g.N, g.T, g.P, g.Q)))
    return reason or (None if g.T < g.C else f"the thin side must be {'dy' if g.folded else 'x'}")


def pack_folded(call: Call) -> np.ndarray:
    """Sums of w (K,C,3,3) as [(u,v)][K][C]."""
    shape = call.in_shapes[1]
    index = np.arange(numel(shape), dtype=np.int32).reshape(shape)
    return gradient_filters(index).transpose(0, 3, 4, 1, 2).reshape(TERMS, -1)


def _gather(after: str | None, pack: Callable[[Call], np.ndarray] = thin_gather.pack) -> Impl:
    bind, traffic = partial(thin_gather.bind, after=after), partial(thin_gather.traffic, after=after)
    return Impl(bind, thin_gather.scratch, supports_gather, thin_gather.tile, pack, traffic=traffic, engine="thin", estimate=thin_gather.estimate)


_UP = Impl(thin_up.bind, thin_up.scratch, supports_up, thin_scatter.tile, thin_scatter.pack, traffic=thin_up.traffic, engine="thin")
_WGRAD = Impl(
    thin_wgrad.bind,
    thin_wgrad.scratch,
    supports_wgrad,
    thin_wgrad.tile,
    traffic=thin_wgrad.traffic,
    engine="thin",
    estimate=thin_wgrad.estimate,
)

FUSED = {
    Op("conv", "fprop", after=(Map("relu"),)): _gather(None),
    Op("conv", "fprop", after=(Map("relu"), Pool())): _gather("pool"),
    Op("conv", "dgrad", after=(Mask("relu"),)): _gather("mask"),
    Op("conv", "wgrad", before=(Unpool(),)): _WGRAD,
    Op("upconv", "fprop"): _UP,
    Op("upconv", "fprop", after=(Map("relu"),)): _UP,
    Op("upconv", "fprop", after=(Loss("mse"),)): _UP,
    Op("upconv", "dgrad"): _gather(None, pack_folded),
    Op("upconv", "dgrad", after=(Mask("relu"),)): _gather("mask", pack_folded),
    Op("upconv", "wgrad"): _WGRAD,
}
"""The fused convolutions that a thin side is served by; they stand before those of im2col_fused.py in the row's chain."""
