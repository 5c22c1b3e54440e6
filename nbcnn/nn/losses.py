"""The losses L1, Huber and BCEWithLogits; MSE and SoftmaxCrossEntropy stand in `layers.py`, those of series in `series_layers.py`.

Each is a mean over all elements of a batch, compared with targets of the output's shape: values, images, or without them the network's input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nbcnn.files.errors import UsageError
from nbcnn.nn.layers import PairLoss


@dataclass(frozen=True)
class L1(PairLoss):
    """mean(|y − target|) over all elements of the batch. `loss="l1"` means it.

    Shapes: y and target of any shape, the same for both, float32 → a float64 scalar. Raises ShapeError if they differ, when the network is built.

    Example:
        >>> import numpy as np, nbcnn
        >>> model = nbcnn.Model([nbcnn.Linear(1)], "l1", mode="cpu")
        >>> history = model.fit(np.zeros((4, 3), np.uint8), [1, 2, 3, 4], epochs=2, verbose=0)
        >>> model.loss
        L1()
    """

    kind: ClassVar[str] = "l1"

    def terms(self, outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return np.abs(outputs - targets)


@dataclass(frozen=True)
class Huber(PairLoss):
    """The mean of d²/2 where |d| ≤ delta and delta·(|d| − delta/2) elsewhere, d = y − target (as torch.nn.HuberLoss). `loss="huber"` means it.

    Shapes: y and target of any shape, the same for both, float32 → a float64 scalar. Raises UsageError unless `delta` is positive and finite, and
    ShapeError if the shapes differ, when the network is built. Source: P. J. Huber, "Robust estimation of a location parameter", 1964.

    Example:
        >>> import nbcnn
        >>> nbcnn.Model([nbcnn.Linear(1)], nbcnn.Huber(delta=0.5), mode="cpu").build((3,)).loss
        Huber(delta=0.5)
    """

    delta: float = 1.0
    kind: ClassVar[str] = "huber"

    def __post_init__(self) -> None:
        if not 0 < self.delta < math.inf:
            raise UsageError(f"Huber needs a positive, finite delta, got {self.delta}")

    def terms(self, outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        d = np.abs(outputs - targets)
        return np.where(d <= self.delta, d * d / 2, self.delta * (d - self.delta / 2))


@dataclass(frozen=True)
class BCEWithLogits(PairLoss):
    """The mean of the binary cross-entropy of sigmoid(y) with targets in 0..1, in nats (as torch.nn.BCEWithLogitsLoss). `loss="bce"` means it.

    Every output is a probability of its own: for several labels an example, or pixels in 0..1. The output is a logit, so no Sigmoid precedes; the
    sigmoid of what `predict` gives is the probability.

    Shapes: y and target of any shape, the same for both, float32 → a float64 scalar. Raises ShapeError if they differ, when the network is built.

    Example, two labels an example:
        >>> import numpy as np, nbcnn
        >>> model = nbcnn.Model([nbcnn.Linear(2)], "bce", mode="cpu")
        >>> history = model.fit(np.zeros((4, 3), np.uint8), [[0, 1], [1, 1], [0, 0], [1, 0]], verbose=0)
        >>> len(history)
        1
    """

    kind: ClassVar[str] = "bce"

    def terms(self, outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return np.maximum(outputs, 0) - outputs * targets + np.log1p(np.exp(-np.abs(outputs)))
