"""This module makes the PyTorch twin of a network of ours: the torch.nn.Module of `nbcnn.torch.to_module`, to be trained, and its loss.

It is made from the layers themselves, a list or a `Graph`, so that a network of the user's own has a twin, too. Its modules are PyTorch's own, and
its gradients autograd's: nothing of it but the names, the sizes and the wiring comes from our layers. This file needs torch; import it only where
torch is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from nbcnn.files.errors import UsageError
from nbcnn.nn import losses
from nbcnn.nn.corruption import MaskSquares, Noise
from nbcnn.nn.graphs import Graph
from nbcnn.torch.exporting import filled, module_of

LOSSES: dict[type, Callable[[Any], Callable[[Any, Any], Any]]] = {
    losses.MSE: lambda loss: F.mse_loss,
    losses.L1: lambda loss: F.l1_loss,
    losses.Huber: lambda loss: lambda y, target: F.huber_loss(y, target, delta=loss.delta),
    losses.BCEWithLogits: lambda loss: F.binary_cross_entropy_with_logits,
    losses.SoftmaxCrossEntropy: lambda loss: _CrossEntropy(loss),
}
"""By the class of a loss, the function that makes it of outputs and targets."""


class _CrossEntropy:
    def __init__(self, loss: Any) -> None:
        self.weight = loss.weight
        self.named = {"ignore_index": -100 if loss.ignore_index is None else loss.ignore_index, "label_smoothing": loss.label_smoothing}

    def __call__(self, y: Any, target: Any) -> Any:
        weight = None if self.weight is None else torch.tensor(self.weight, dtype=y.dtype, device=y.device)
        return F.cross_entropy(y, target, weight, **self.named)


def twin(layers: Sequence[Any]) -> Any:
    """The module of `layers`, a list or a graph whose sizes are filled in, in training mode with PyTorch's first weights.

    A loss at the end is left out. Its parameters and buffers have the names of our parameters and states. Raises UsageError, which names every layer
    that has no twin: one that PyTorch does not have, or one that draws random numbers, which no two libraries draw alike.
    """
    body: Any = layers.body if isinstance(layers, Graph) else [layer for layer in layers if not hasattr(layer, "needs_labels")]
    made = module_of(body)
    if drawing := [name for name, module in made.named_modules() if isinstance(getattr(module, "layer", module), nn.Dropout | Noise | MaskSquares)]:
        raise UsageError(f"the network has no peer: PyTorch draws other random numbers in {', '.join(drawing)}")
    return made


def load(module: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Give a twin our weights and states, float32, by name."""
    filled(module, {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()})


def loss_of(made: Sequence[Any]) -> Callable[[Any, Any], Any]:
    """PyTorch's form of the loss at the end of `made`: outputs, targets → mean loss. Raises UsageError for one that has no twin."""
    if type(made[-1]) not in LOSSES:
        raise UsageError(f"PyTorch's form of the loss {type(made[-1]).__name__} is not known here, so the network has no peer")
    return LOSSES[type(made[-1])](made[-1])
