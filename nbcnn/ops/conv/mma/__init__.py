"""Convolutions for tensor cores of compute capability 8.0 and later: cp.async fetches tiles, mma.sync multiplies them; every shape."""

from __future__ import annotations

from nbcnn.ops.conv.mma import wgrad
from nbcnn.ops.conv.mma.engine import implementations
from nbcnn.ops.kernel.call import Impl
from nbcnn.plan.op import Op


def ops(precision: str) -> dict[Op, Impl]:
    """The ops of this engine in "bf16", "tf32" or "fp32"."""
    return implementations(precision) | wgrad.ops(precision)
