"""Convolutions with one thin side on tensor cores: `first` where the input has few channels, `last` where the output has."""

from __future__ import annotations

from nbcnn.ops.conv.thin_mma import first, last
from nbcnn.ops.kernel.call import Impl
from nbcnn.plan.op import Op


def parts(precision: str) -> list[dict[Op, Impl]]:
    """The implementations of a first layer and of a last layer in one precision, by op, in the order in which a call tries them."""
    return [first.ops(precision), last.ops(precision)]
