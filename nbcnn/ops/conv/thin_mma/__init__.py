"""Convolutions with one thin side on tensor cores: `first` where the input has few channels, the others where the output has."""

from __future__ import annotations

from nbcnn.ops.call import Impl
from nbcnn.ops.conv.thin_mma import backward, first, folded_fprop


def parts(precision: str) -> list[dict[str, Impl]]:
    """The implementations of a first layer and of a last layer in one precision, by op, in the order in which a call tries them."""
    folded = folded_fprop.implementation(precision)
    last = dict.fromkeys(("upconv_fprop", "upconv_relu_fprop", "upconv_mse_fprop"), folded)
    return [first.ops(precision), last | backward.ops(precision)]
