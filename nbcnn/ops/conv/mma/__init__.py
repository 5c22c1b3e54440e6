"""Convolutions for tensor cores from compute capability 8.0 on, in float16 7.5: cp.async fetches tiles, mma.sync multiplies them; every shape."""

from __future__ import annotations

from nbcnn.ops.conv.mma import wgrad
from nbcnn.ops.conv.mma.engine import implementations
from nbcnn.ops.kernel.call import Impl
from nbcnn.plan.op import Op


def ops(precision: str) -> dict[Op, Impl]:
    """The ops of this engine in "bf16", "tf32", "fp32" or "fp16"."""
    return implementations(precision) | wgrad.ops(precision)
