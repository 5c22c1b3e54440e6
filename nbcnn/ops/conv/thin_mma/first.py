"""The ops of a first layer, few input channels, on tensor cores: see first_fprop and first_wgrad."""

from __future__ import annotations

from nbcnn.ops.conv.thin_mma import first_fprop, first_wgrad
from nbcnn.ops.kernel.call import Impl

PRECISIONS = ("bf16", "tf32")


def ops(precision: str) -> dict[str, Impl]:
    """The implementations by op; none in fp32, which CUDA cores serve at the same, memory-bound, speed."""
    if precision not in PRECISIONS:
        return {}
    fprop, wgrad = first_fprop.implementation(precision), first_wgrad.implementation(precision)
    return {"conv_fprop": fprop, "conv_relu_fprop": fprop, "conv_relu_pool_fprop": fprop, "conv_wgrad": wgrad, "conv_pool_wgrad": wgrad}
