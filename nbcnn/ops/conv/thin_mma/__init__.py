"""Convolutions with one thin side on tensor cores: `first` where the input has few channels, the others where the output has."""

from __future__ import annotations

from nbcnn.ops.call import Impl
from nbcnn.ops.conv.thin_mma import first, folded_fprop, last


def parts(precision: str) -> list[dict[str, Impl]]:
    """The implementations of a first layer and of a last layer in one precision, by op, in the order in which a call tries them."""
    folded = folded_fprop.implementation(precision)
    forward = dict.fromkeys(("upconv_fprop", "upconv_relu_fprop", "upconv_mse_fprop"), folded)
    return [first.ops(precision), forward | last.ops(precision)]
