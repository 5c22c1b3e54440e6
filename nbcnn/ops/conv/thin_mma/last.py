"""The ops of a last layer, few filters, on tensor cores: see last_fprop, last_dgrad and last_wgrad."""

from __future__ import annotations

from nbcnn.ops.conv.thin_mma import last_dgrad, last_fprop, last_wgrad
from nbcnn.ops.kernel.call import Impl
from nbcnn.plan.op import Loss, Map, Mask, Op


def ops(precision: str) -> dict[Op, Impl]:
    """The implementations by op, in bf16 or tf32."""
    forward = (
        Op("conv", "fprop"),
        Op("conv", "fprop", after=(Map("relu"),)),
        Op("upconv", "fprop"),
        Op("upconv", "fprop", after=(Map("relu"),)),
        Op("upconv", "fprop", after=(Loss("mse"),)),
    )
    images = (Op("conv", "dgrad"), Op("conv", "dgrad", after=(Mask("relu"),)), Op("upconv", "dgrad"), Op("upconv", "dgrad", after=(Mask("relu"),)))
    weights = (Op("conv", "wgrad"), Op("upconv", "wgrad"))
    made = ((forward, last_fprop), (images, last_dgrad), (weights, last_wgrad))
    return {name: impl for names, module in made for name, impl in dict.fromkeys(names, module.implementation(precision)).items()}
