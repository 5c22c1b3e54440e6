"""This module makes a list of layers, or a graph, with its loss of what a caller gives as a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.nn.graphs import Graph, Value
from nbcnn.nn.joins import losses_of
from nbcnn.plan.graph import joins


def of_values(layers: Any) -> bool:
    """Whether these are the inputs of a graph, and no list of layers."""
    return isinstance(layers, Value) or (isinstance(layers, list | tuple) and bool(layers) and all(isinstance(each, Value) for each in layers))


def with_loss(layers: Any, loss: Any) -> Any:
    """The list of layers, or the graph, with its loss. Raises UsageError for what is no network."""
    if isinstance(layers, str) or not isinstance(layers, Sequence):
        line = f": Model([{type(layers).__name__}(…), …], loss=…)" if hasattr(layers, "build") else ""
        raise UsageError(f"layers must be a list of layers, got {type(layers).__name__}{line}")
    strange = [layer for layer in layers if isinstance(layer, type) or not hasattr(layer, "build")]
    if strange:
        at = " The loss follows the list: Model([…], loss=" + f"{strange[0]!r})" if isinstance(strange[0], str) else ""
        raise UsageError(f"{quoted(strange[0])} is no layer: a layer is made by its class, as in Linear(10).{at}")
    has_loss = bool(layers) and hasattr(layers[-1], "needs_labels")
    if loss is not None and has_loss:
        raise UsageError(f"the last layer {type(layers[-1]).__name__} is a loss already: leave loss= or the layer out")
    if isinstance(layers, Graph):
        return layers if loss is None else layers.with_loss(losses_of(loss, len(layers.outputs)))
    body = [*layers, *(() if loss is None else (losses_of(loss),))]
    if not [layer for layer in body if not hasattr(layer, "needs_labels")]:
        raise UsageError("a network needs at least one layer besides its loss")
    if any(joins(layer) for layer in body):
        name = next(type(layer).__name__ for layer in body if joins(layer))
        raise UsageError(f"{name} joins several values, and a list of layers has one after the other: call layers on values of nbcnn.Input")
    return body
