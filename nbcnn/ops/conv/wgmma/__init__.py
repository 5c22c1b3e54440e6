"""Convolutions for Hopper: TMA fetches tiles, wgmma multiplies them; compute capability 9.0 only."""

from __future__ import annotations

from nbcnn.ops.conv.wgmma import wgrad
from nbcnn.ops.conv.wgmma.engine import implementations
from nbcnn.ops.kernel.call import Impl
from nbcnn.plan.op import Op


def ops(precision: str) -> dict[Op, Impl]:
    """The ops of this engine in "bf16", "tf32" or "fp32"."""
    return implementations(precision) | wgrad.ops(precision)
