"""Layers as data: what a file says of a network, and the layers that are made of it again.

A layer is an object with its class under "layer" and its fields, {"layer": "Conv2d", "out_channels": 64, "kernel_size": 3, …}; of a Residual
"body" lists the layers inside. A graph has "graph" beside "layers": the shapes of its inputs, its calls [layer, [values]], its outputs, and the
names of its layers where they are not kind and number. Nothing is executed on reading: names are looked up among the layers of this package and
those that the caller gives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from typing import Any

import numpy as np

from nbcnn.files import document
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import brief, quoted, word
from nbcnn.nn import activations, corruption, joins, losses, maps, norms, resampling, series_layers, whitening
from nbcnn.nn import layers as plain_layers
from nbcnn.nn.graphs import Graph
from nbcnn.nn.joins import Losses
from nbcnn.nn.layers import Residual
from nbcnn.plan.graph import ShapeError, names

NAME = re.compile(r"[\w.:-]+(/[\w.:-]+)*")
"""A name of a layer that a graph brings: letters, digits, underscores, and dots between the parts of another program's network."""
KEY = "network"
"""The name under which the metadata of a file holds a network."""
FORM = {
    "layers": [object],
    "input_shape": [int],
    "precision?": str,
    "classes?": (None, [str]),
    "scale?": (None, [float]),
    "span?": (None, [float]),
    "channels_last?": bool,
    "graph?": {"inputs": [[int]], "calls": [object], "outputs": [int], "names?": [str]},
    "frozen?": [str],
    "forms?": [{"scale": (None, [float]), "channels_last": bool, "span?": (None, [float])}],
}


DECLARED: dict[str, type] = {}
"""Classes of layers and losses that the user declared (`nbcnn.activation`, `nbcnn.loss`), by name."""


class DescriptionError(ValueError):
    """A file's description of a network is not one, or names a layer that is not known; the message says which."""

    exit_code = 3


def known_layers() -> dict[str, type]:
    """The layers and losses of this package by the name of their class."""
    modules = (plain_layers, norms, series_layers, activations, losses, resampling, whitening, corruption, joins, maps)
    found = [value for module in modules for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]
    return {kind.__name__: kind for kind in found if hasattr(kind, "build") and hasattr(kind, "kind") and not kind.__name__.startswith("_")}


def as_data(layers: Sequence[Any]) -> list[dict[str, Any]]:
    """The layers, loss included, as objects of JSON."""
    made = []
    for layer in layers:
        values = {each.name: _plain(getattr(layer, each.name)) for each in fields(layer) if not _left_out(layer, each)}
        if isinstance(layer, Residual):
            values = {"body": as_data(layer.body)}
        if isinstance(layer, Losses):
            values = {"parts": as_data(layer.parts)}
        made.append({"layer": type(layer).__name__} | values)
    return made


def _plain(value: Any) -> Any:
    """A number of NumPy as Python's, which JSON takes."""
    return value.item() if isinstance(value, np.generic) else value


def _left_out(layer: Any, each: Field[Any]) -> bool:
    """A field that layers of earlier versions did not have, where it is what they did (`layer.later`)."""
    return bool(each.metadata.get("later")) and getattr(layer, each.name) == each.default


def from_data(data: Any, more: Sequence[type] = ()) -> list[Any]:
    """The layers that `as_data` described; `more` are classes of the caller's own. Raises DescriptionError."""
    known = known_layers() | DECLARED | {kind.__name__: kind for kind in more}
    if not isinstance(data, list):
        raise DescriptionError(f"layers must be a list, got {type(data).__name__}")
    made = list[Any]()
    for at, item in enumerate(data, 1):
        if not isinstance(item, dict) or not isinstance(item.get("layer"), str):
            raise DescriptionError(f"layer {at} is no object with the name of a layer under 'layer'")
        name, values = item["layer"], {key: value for key, value in item.items() if key != "layer"}
        if name not in known:
            shown = word(name)
            advice = f"give its class, as in nbcnn.load(path, layers=[{shown}]), or import the file that declares it first"
            raise DescriptionError(f"layer {at} is a {shown}, which nbcnn does not have: {advice}")
        try:
            if known[name] is Residual:
                made.append(Residual(*from_data(values["body"], more)))
            elif known[name] is Losses:
                made.append(Losses(tuple(from_data(values["parts"], more))))
            else:
                made.append(known[name](**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}))
        except DescriptionError as error:
            raise DescriptionError(f"layer {at}, {name}: {error}") from None
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise DescriptionError(f"layer {at}, {name}: {brief(error)}") from None
    return made


def wiring(layers: Sequence[Any]) -> dict[str, Any]:
    """What stands beside the layers of a graph; nothing of a list."""
    if not isinstance(layers, Graph):
        return {}
    calls = [[layer, list(reads)] for layer, reads in layers.calls]
    # Names that follow from kinds and numbers are not written down, so that files stay what they were.
    named = {} if list(layers.called) == names(list(layers.layers)) else {"names": list(layers.called)}
    return {"graph": {"inputs": [list(shape) for shape in layers.inputs], "calls": calls, "outputs": list(layers.outputs)} | named}


def _is_name(name: str) -> bool:
    """Whether a layer may be called so: words with dots, as in PyTorch, or with slashes between them, as in ONNX files."""
    return bool(NAME.fullmatch(name)) and ".." not in name


def _graph(layers: list[Any], found: Mapping[str, Any]) -> Graph:
    """The graph of `layers`, loss last, that `wiring` described. Raises DescriptionError."""
    loss = layers.pop() if layers and hasattr(layers[-1], "needs_labels") else None
    calls = list[tuple[int, tuple[int, ...]]]()
    for at, call in enumerate(found["calls"], 1):
        try:
            document.fits(call, [object], f"call {at}")
            layer, reads = call
            document.fits([layer, *reads], [int], f"call {at}")
        except (document.DocumentError, ValueError, TypeError):
            raise DescriptionError(f"call {at} of the graph must be [layer, [values]], not {quoted(call)}") from None
        calls.append((layer, tuple(reads)))
    inputs = tuple(tuple(shape) for shape in found["inputs"])
    if not all(len(shape) in (1, 3) and min(shape) > 0 for shape in inputs):
        raise DescriptionError(f"inputs of the graph must be (C, H, W) or (F,), each at least 1, not {quoted(found['inputs'])}")
    called = tuple(found.get("names", ()))
    if called and (len(called) != len(layers) or len(set(called)) < len(called) or not all(map(_is_name, called))):
        raise DescriptionError(f"the graph has {len(layers)} layers, and names that are not one for each: {quoted(list(called))}")
    try:
        return Graph(inputs, tuple(layers), tuple(calls), tuple(found["outputs"]), loss, called).sized()
    except (UsageError, ShapeError) as error:
        raise DescriptionError(str(error)) from None


def dumps(layers: Sequence[Any], input_shape: Sequence[int], **more: Any) -> str:
    """A network as one string, for the metadata of a file; `more` as in FORM. Raises UsageError for what `loads` could not read again."""
    text = json.dumps({"layers": as_data(layers), "input_shape": list(input_shape)} | wiring(layers) | more)
    return document.readable(text, "the network")


def loads(text: str, where: str, more: Sequence[type] = ()) -> dict[str, Any]:
    """What `dumps` wrote, checked, with the layers made. Raises DescriptionError."""
    try:
        found: Mapping[str, Any] = document.parse(text, where)
        document.fits(found, FORM, where)
        layers = from_data(found["layers"], more)
        made = _graph(layers, found["graph"]) if "graph" in found else layers
        return {**found, "layers": made, "input_shape": tuple(found["input_shape"])}
    except document.DocumentError as error:
        raise DescriptionError(str(error)) from None
    except DescriptionError as error:
        raise DescriptionError(f"{where}: {error}") from None
