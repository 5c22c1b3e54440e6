"""A network of the user's own for `--model`: file.py:function, or package.module:function."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

from nbcnn.files import user_code
from nbcnn.files.errors import UsageError


def is_own(model: str) -> bool:
    """`model` names a function of the user's, no ready-made network."""
    return ":" in model


def function_of(model: str) -> Callable[..., Any]:
    """The function that `model` names; its file or module is run. Raises UsageError if there is no such file, module or function."""
    return user_code.function_of(model, "--model")


def layers_of(model: str, shape: Sequence[int], function: Callable[..., Any] | None = None) -> Any:
    """The layers that the function makes, a list or a `Graph` (of a `Model` its layers).

    The function, that of `function_of` unless it is given, is called without arguments, or with channels, height and width if it takes some.

    Raises UsageError as `function_of`, if the function raises, or if what it returns is no list of layers with a loss.
    """
    from nbcnn.model.network import Model
    from nbcnn.nn.graphs import Graph

    function = function or function_of(model)
    needed = [each for each in inspect.signature(function).parameters.values() if each.default is each.empty and each.kind < each.VAR_POSITIONAL]
    try:
        made = function(*shape) if needed else function()
    except Exception as error:
        raise UsageError(f"{model} raised {type(error).__name__}: {error}") from error
    if isinstance(made, Model):
        held, made = made, made.layers
        held.close()
    if not isinstance(made, list | tuple | Graph) or not made or not all(hasattr(layer, "build") for layer in made):
        strange = [each for each in made if not hasattr(each, "build")] if isinstance(made, list | tuple) else []
        what = f"a list with {strange[0]!r}, which is no layer" if strange else type(made).__name__
        line = "; a loss is a layer there, such as SoftmaxCrossEntropy() or MSE()" if strange and isinstance(strange[0], str) else ""
        raise UsageError(f"{model} must return a list of layers, a Graph or a Model, got {what}{line}")
    if not hasattr(made[-1], "needs_labels"):
        line = 'Graph.of(x, y, "cross_entropy")' if isinstance(made, Graph) else "[…, SoftmaxCrossEntropy()], of classes, or […, MSE()]"
        raise UsageError(f"the last layer of {model} must be a loss, and is {type(made[-1]).__name__}: return {line}")
    if isinstance(made, Graph):
        if made.input_shape != tuple(shape):
            raise UsageError(
                f"the graph of {model} takes {made.input_shape}, and the images are {tuple(shape)}: let it take channels, height and width"
            )
        if len(made.inputs) > 1 or len(made.outputs) > 1:
            raise UsageError(f"the graph of {model} has several inputs or outputs, and a data set has one array of each: train it by Model.fit")
        return made
    return list(made)


def digest(layers: Sequence[Any]) -> str:
    """What a resumed run holds its layers against: it would not be the same run with others."""
    from nbcnn.nn.description import as_data, wiring

    graph = wiring(layers)
    return hashlib.sha256(json.dumps([as_data(layers), graph] if graph else as_data(layers), sort_keys=True).encode()).hexdigest()
