"""Colours: `in_colours` turns what a network reconstructs into values of pixels that a person can look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nbcnn.datasets import arrays
from nbcnn.nn.whitening import Whiten, undone

if TYPE_CHECKING:
    from nbcnn.run.net import Net


def in_colours(net: Net, outputs: np.ndarray, images: np.ndarray) -> np.ndarray:
    """`outputs` (n, C, H, W) of the autoencoder `net` for `images` as values of pixels, float32: a byte of 255 is 1.

    What `net` does to its input is undone: whitening, with each image's own mean and contrast, and normalisation.
    """
    layer = net.layers[0]
    if type(layer) is Whiten:
        seen = net.normalisation.done(images) if net.normalisation else arrays.seen(images)
        outputs = undone(outputs, seen, layer, net.params.read("whiten1.mean"), net.params.read("whiten1.filters"))
    return net.normalisation.undone(outputs) if net.normalisation else outputs
