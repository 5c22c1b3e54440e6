"""This module is what the importer hands to the handler of a node: the call with its module, and the names and weights that its layers get.

A handler has PyTorch's own parameters behind the call. What an operand of a node is to be, a value of layers, an image, a tensor that the module
holds or whole numbers, the functions at the end say, or raise Refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, fx, nn

from nbcnn.nn.graphs import Value
from nbcnn.torch.weights import array


class Refused(Exception):
    """A node has no counterpart as it is called; the message says why."""


@dataclass(frozen=True)
class Held:
    """A tensor of the module, and its name there."""

    name: str
    tensor: Tensor


class Layers:
    """The layers that have been made so far, with their names and weights; `taken` are the names of the modules."""

    def __init__(self, taken: set[str]) -> None:
        self.weights: dict[str, np.ndarray] = {}
        self._taken = taken
        self._names: dict[int, str] = {}
        self._made: dict[str, Any] = {}

    def named(self, name: str, layer: Any) -> Any:
        """The layer called `name`, which is `layer` unless an equal one has this name already: it is shared then. Raises Refused for another one."""
        known = self._made.setdefault(name, layer)
        if known == layer:
            self._names.setdefault(id(known), name)
            return known
        raise Refused(f"{name} is called in two forms: {known} and {layer}")

    def name(self, layer: Any) -> str:
        """The name of a layer that was made."""
        return self._names[id(layer)]

    def free(self, name: str) -> str:
        """`name`, or with a number behind it, if a layer or a module has it."""
        made, at = name, 1
        while made in self._made or made in self._taken:
            at += 1
            made = f"{name}_{at}"
        return made


@dataclass(frozen=True)
class Call:
    """One node: the shape of what it makes, without the batch, and what handlers do with it."""

    layers: Layers
    node: fx.Node
    shape: tuple[int, ...]
    module: nn.Module | None

    def held(self, name: str) -> Held | None:
        """A tensor of the node's module, None if it has none of this name."""
        tensor = getattr(self.module, name)
        return None if tensor is None else Held(f"{self.node.target}.{name}", tensor)

    def make(self, layer: Any, x: Any, own: bool = True) -> Value:
        """The layer called on a value, or a list of them. Of a node that makes several layers `own` is the one that has its name."""
        if self.module is not None and own:
            where = str(self.node.target)
        else:
            where = self.layers.free(self.node.name if own else f"{self.node.name}_{layer.kind}")
        return self.layers.named(where, layer)(values_of(x))

    def make_of(self, layer: Any, x: Any, **tensors: Held | None) -> Value:
        """The layer with weights called on a value; it has the name of the part of the module that holds its weight."""
        weight = next(each for each in tensors.values() if each is not None)
        home = weight.name.rpartition(".")[0]
        name = home or self.layers.free(self.node.name)
        made = self.layers.named(name, layer)
        for key, held in tensors.items():
            if held is not None:
                self.layers.weights[f"{name}.{key}"] = array(held.tensor, held.name)
        return made(values_of(x))


def values_of(x: Any) -> Any:
    """Values that a layer is called on. Raises Refused for tensors of the module and for numbers."""
    for each in x if isinstance(x, list) else [x]:
        if not isinstance(each, Value):
            raise Refused(f"an operand is {'a tensor of the module' if isinstance(each, Held) else repr(each)}, and layers are called on values")
    return x


def image_of(x: Any) -> tuple[int, int, int]:
    """The shape (C, H, W) of a value that is an image."""
    if len(values_of(x).shape) != 3:
        raise Refused(f"of {x.shape}, which is no image")
    channels, height, width = x.shape
    return channels, height, width


def two(given: Any) -> tuple[int, int]:
    """Two numbers of one, or of two."""
    made = tuple(int(n) for n in given) if isinstance(given, Sequence) else (int(given),)
    return (made * 2)[:2] if len(made) == 1 else (made[0], made[1])


def held_of(given: Any, what: str) -> Held:
    """An operand that must be a tensor of the module; `what` it is, in words, for the reason why not."""
    if not isinstance(given, Held):
        raise Refused(f"its {what} is no tensor of the module")
    return given
