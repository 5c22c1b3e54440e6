"""Layers as data: what a file says of a network, and the layers that are made of it again.

A layer is an object with its class under "layer" and its fields, {"layer": "Conv2d", "out_channels": 64, "kernel_size": 3, …}; of a Residual
"body" lists the layers inside. Nothing is executed on reading: names are looked up among the layers of this package and those that the
caller gives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from typing import Any

from nbcnn.files import document
from nbcnn.nn import activations, corruption, losses, norms, resampling, series_layers, whitening
from nbcnn.nn import layers as plain_layers
from nbcnn.nn.layers import Residual

KEY = "network"
"""The name under which the metadata of a file holds a network."""
FORM = {
    "layers": [object],
    "input_shape": [int],
    "precision?": str,
    "classes?": (None, [str]),
    "scale?": (None, [float]),
    "channels_last?": bool,
}


class DescriptionError(ValueError):
    """A file's description of a network is not one, or names a layer that is not known; the message says which."""

    exit_code = 3


def known_layers() -> dict[str, type]:
    """The layers and losses of this package by the name of their class."""
    modules = (plain_layers, norms, series_layers, activations, losses, resampling, whitening, corruption)
    found = [value for module in modules for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]
    return {kind.__name__: kind for kind in found if hasattr(kind, "build") and hasattr(kind, "kind") and not kind.__name__.startswith("_")}


def as_data(layers: Sequence[Any]) -> list[dict[str, Any]]:
    """The layers, loss included, as objects of JSON."""
    made = []
    for layer in layers:
        values = {each.name: getattr(layer, each.name) for each in fields(layer) if not _left_out(layer, each)}
        if isinstance(layer, Residual):
            values = {"body": as_data(layer.body)}
        made.append({"layer": type(layer).__name__} | values)
    return made


def _left_out(layer: Any, each: Field[Any]) -> bool:
    """A field that layers of earlier versions did not have, where it is what they did (`layers.later`)."""
    return bool(each.metadata.get("later")) and getattr(layer, each.name) == each.default


def from_data(data: Any, more: Sequence[type] = ()) -> list[Any]:
    """The layers that `as_data` described; `more` are classes of the caller's own. Raises DescriptionError."""
    known = known_layers() | {kind.__name__: kind for kind in more}
    if not isinstance(data, list):
        raise DescriptionError(f"layers must be a list, got {type(data).__name__}")
    made = []
    for at, item in enumerate(data, 1):
        if not isinstance(item, dict) or not isinstance(item.get("layer"), str):
            raise DescriptionError(f"layer {at} is no object with the name of a layer under 'layer'")
        name, values = item["layer"], {key: value for key, value in item.items() if key != "layer"}
        if name not in known:
            raise DescriptionError(f"layer {at} is a {name}, which nbcnn does not have: give its class, as in nbcnn.load(path, layers=[{name}])")
        try:
            if known[name] is Residual:
                made.append(Residual(*from_data(values["body"], more)))
            else:
                made.append(known[name](**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}))
        except (TypeError, KeyError, ValueError) as error:
            raise DescriptionError(f"layer {at}, {name}: {error}") from None
    return made


def dumps(layers: Sequence[Any], input_shape: Sequence[int], **more: Any) -> str:
    """A network as one string, for the metadata of a file; `more` as in FORM."""
    return json.dumps({"layers": as_data(layers), "input_shape": list(input_shape)} | more)


def loads(text: str, where: str, more: Sequence[type] = ()) -> dict[str, Any]:
    """What `dumps` wrote, checked, with the layers made. Raises DescriptionError."""
    try:
        found: Mapping[str, Any] = document.parse(text, where)
        document.fits(found, FORM, where)
        return {**found, "layers": from_data(found["layers"], more), "input_shape": tuple(found["input_shape"])}
    except document.DocumentError as error:
        raise DescriptionError(str(error)) from None
    except DescriptionError as error:
        raise DescriptionError(f"{where}: {error}") from None
