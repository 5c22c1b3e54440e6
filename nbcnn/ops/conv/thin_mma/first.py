"""The ops of a first layer, few input channels, on tensor cores: see first_fprop and first_wgrad."""

from __future__ import annotations

from nbcnn.ops.conv.thin_mma import first_fprop, first_wgrad
from nbcnn.ops.kernel.call import Impl
from nbcnn.plan.op import Map, Op, Pool, Unpool

PRECISIONS = ("bf16", "tf32")


def ops(precision: str) -> dict[Op, Impl]:
    """The implementations by op; none in fp32, which CUDA cores serve at the same, memory-bound, speed."""
    if precision not in PRECISIONS:
        return {}
    fprop, wgrad = first_fprop.implementation(precision), first_wgrad.implementation(precision)
    return {
        Op("conv", "fprop"): fprop,
        Op("conv", "fprop", after=(Map("relu"),)): fprop,
        Op("conv", "fprop", after=(Map("relu"), Pool())): fprop,
        Op("conv", "wgrad"): wgrad,
        Op("conv", "wgrad", before=(Unpool(),)): wgrad,
    }
