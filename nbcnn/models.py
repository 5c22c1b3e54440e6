"""The networks that come with nbcnn, as lists of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbcnn.layers import MSE, Conv2d, MaxPool2d, ReLU, Upsample2d


def autoencoder(channels: int = 3, wide: int = 256, code: int = 128) -> list[Any]:
    """The convolutional autoencoder: channels→wide→code | code→wide→channels, 3×3 convolutions, 2×2 pooling/upsampling.

    With the defaults: 751,875 parameters; images 3×32×32 become a code of 128×8×8 = 8,192 features.
    """
    return [
        Conv2d(channels, wide, 3, pad=1),
        ReLU(),
        MaxPool2d(2),
        Conv2d(wide, code, 3, pad=1),
        ReLU(),
        MaxPool2d(2),
        Conv2d(code, code, 3, pad=1),
        ReLU(),
        Upsample2d(2),
        Conv2d(code, wide, 3, pad=1),
        ReLU(),
        Upsample2d(2),
        Conv2d(wide, channels, 3, pad=1),
        MSE(),
    ]


MODELS = {"autoencoder": autoencoder}
"""By the name that `--model` takes."""


def encoder(layers: Sequence[Any]) -> list[Any]:
    """The part of an autoencoder that makes the code: everything up to and including the last pooling layer.

    Raises ValueError if the list has no pooling layer.
    """
    pools = [at for at, layer in enumerate(layers) if isinstance(layer, MaxPool2d)]
    if not pools:
        raise ValueError("this list of layers has no pooling layer, so it has no encoder to cut off")
    return list(layers[: pools[-1] + 1])
