"""The backward ops of a last layer, few filters, on tensor cores: see last_dgrad and last_wgrad."""

from __future__ import annotations

from nbcnn.ops.call import Impl
from nbcnn.ops.conv.thin_mma import last_dgrad, last_wgrad


def ops(precision: str) -> dict[str, Impl]:
    """The implementations by op, in bf16 or tf32."""
    images, weights = last_dgrad.implementation(precision), last_wgrad.implementation(precision)
    names = ("conv_dgrad", "conv_dgrad_relu", "upconv_dgrad", "upconv_dgrad_relu")
    return dict.fromkeys(names, images) | dict.fromkeys(("conv_wgrad", "upconv_wgrad"), weights)
