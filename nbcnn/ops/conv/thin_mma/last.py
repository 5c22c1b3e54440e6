"""The ops of a last layer, few filters, on tensor cores: see last_fprop, last_dgrad and last_wgrad."""

from __future__ import annotations

from nbcnn.ops.conv.thin_mma import last_dgrad, last_fprop, last_wgrad
from nbcnn.ops.kernel.call import Impl


def ops(precision: str) -> dict[str, Impl]:
    """The implementations by op, in bf16 or tf32."""
    forward = ("conv_fprop", "conv_relu_fprop", "upconv_fprop", "upconv_relu_fprop", "upconv_mse_fprop")
    images = ("conv_dgrad", "conv_dgrad_relu", "upconv_dgrad", "upconv_dgrad_relu")
    weights = ("conv_wgrad", "upconv_wgrad")
    made = ((forward, last_fprop), (images, last_dgrad), (weights, last_wgrad))
    return {name: impl for names, module in made for name, impl in dict.fromkeys(names, module.implementation(precision)).items()}
