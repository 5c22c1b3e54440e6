"""This module makes a list of layers, or a graph, with its loss of what a caller gives as a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nbcnn.files.errors import UsageError
from nbcnn.files.suggest import nearest
from nbcnn.nn.graphs import Graph, Value
from nbcnn.nn.joins import Losses
from nbcnn.nn.losses import L1, MSE, BCEWithLogits, Huber, PairLoss, SoftmaxCrossEntropy
from nbcnn.plan.graph import joins

LOSSES: dict[str, Callable[[], Any]] = {"cross_entropy": SoftmaxCrossEntropy, "mse": MSE, "bce": BCEWithLogits, "l1": L1, "huber": Huber}
"""Losses by the names that `Model` takes."""


def of_values(layers: Any) -> bool:
    """Whether these are the inputs of a graph, and no list of layers."""
    return isinstance(layers, Value) or (isinstance(layers, list | tuple) and bool(layers) and all(isinstance(each, Value) for each in layers))


def with_loss(layers: Any, loss: Any) -> Any:
    """The list of layers, or the graph, with its loss. Raises UsageError for what is no network."""
    if isinstance(layers, str) or not isinstance(layers, Sequence):
        raise UsageError(f"layers must be a list of layers, got {type(layers).__name__}")
    strange = [layer for layer in layers if isinstance(layer, type) or not hasattr(layer, "build")]
    if strange:
        raise UsageError(f"{strange[0]!r} is no layer: a layer is made by its class, as in Linear(10)")
    has_loss = bool(layers) and hasattr(layers[-1], "needs_labels")
    if loss is not None and has_loss:
        raise UsageError(f"the last layer {type(layers[-1]).__name__} is a loss already: leave loss= or the layer out")
    if isinstance(layers, Graph):
        return layers if loss is None else layers.with_loss(_loss_of(loss, len(layers.outputs)))
    body = [*layers, *(() if loss is None else (_loss(loss),))]
    if not [layer for layer in body if not hasattr(layer, "needs_labels")]:
        raise UsageError("a network needs at least one layer besides its loss")
    if any(joins(layer) for layer in body):
        name = next(type(layer).__name__ for layer in body if joins(layer))
        raise UsageError(f"{name} joins several values, and a list of layers has one after the other: call layers on values of nbcnn.Input")
    return body


def _loss_of(loss: Any, outputs: int) -> Any:
    """The loss of a graph with so many outputs."""
    if outputs == 1 or isinstance(loss, Losses):
        return _loss(loss)
    parts = list(loss) if isinstance(loss, list | tuple) else [loss] * outputs
    if len(parts) != outputs:
        raise UsageError(f"the graph has {outputs} outputs, and there are {len(parts)} losses")
    return Losses(tuple(map(_loss, parts)))


def _loss(loss: Any) -> Any:
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise UsageError(f"no loss {loss!r}; there are {', '.join(LOSSES)}{nearest(loss, tuple(LOSSES))}")
        return LOSSES[loss]()
    if isinstance(loss, type) and issubclass(loss, PairLoss):
        return loss()
    if isinstance(loss, type) or not hasattr(loss, "needs_labels"):
        raise UsageError(f"loss must be one of {', '.join(LOSSES)}, or a loss layer (nbcnn.loss makes one of your own), got {loss!r}")
    return loss
