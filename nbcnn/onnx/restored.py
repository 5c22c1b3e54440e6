"""This module restores the network of a file that `to_onnx` wrote, layer by layer, where the file's graph is still what that network is written as.

The nodes of a file do not say everything: a Dropout is no node, a matrix may be a constant or a weight. So `to_onnx` notes the layers in the
metadata. The graph is what counts: the noted layers, with the file's weights, are written again, and only if that gives the file's nodes and tensors
are they taken. Else the nodes are read like those of any other program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbcnn.datasets.normalisation import Normalisation
from nbcnn.files import document
from nbcnn.files.errors import UsageError
from nbcnn.model.network import Model
from nbcnn.nn import description
from nbcnn.nn.graphs import Graph
from nbcnn.nn.layer import parameters, states
from nbcnn.onnx.errors import OnnxError, UnsupportedNodes
from nbcnn.onnx.exporter import NORMALISATION, TRAINED, exported, noted
from nbcnn.onnx.files import File, initialisers
from nbcnn.plan.graph import ShapeError
from nbcnn.plan.shapes import numel


def trained(file: File) -> set[str] | None:
    """The parameters that the network of a file trains, by name; None if the file does not say so. Raises OnnxError for a note that is none."""
    said = noted(file.model).get(TRAINED)
    if said is None:
        return None
    try:
        names = document.parse(said, f"nbcnn.{TRAINED}")
    except document.DocumentError:
        names = None
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise OnnxError(f"{file.name}: the note nbcnn.{TRAINED} is no list of names")
    return set(names)


def restored(file: File, loss: Any, mode: str, precision: str | None, learn: Callable[[Model], None]) -> Model | None:
    """The model whose network a file notes, with the file's weights; None if there is no such note, or the graph is another one's.

    `learn` has it take the noted forms of examples, whose scale is a part of the graph.
    """
    said = noted(file.model)
    if description.KEY not in said:
        return None
    try:
        about = description.loads(said[description.KEY], file.name)
        layers, shape = about["layers"], about["input_shape"]
        known = dict(initialisers(file))
        wanted = parameters(layers) | states(layers)
        # Nothing is allocated for a note whose weights the file does not have.
        if any(name not in known or known[name].size != numel(each.shape) for name, each in wanted.items()):
            return None
        normal = Normalisation.parse(said[NORMALISATION]) if NORMALISATION in said else None
        model = Model(layers, loss=loss, mode=mode, precision=precision, normalisation=normal).build(shape)
        model.net.params.load_dict({name: np.asarray(known[name], np.float32).reshape(each.shape) for name, each in wanted.items()})
        learn(model)
        again = exported(model)
    except (
        description.DescriptionError,
        UsageError,
        UnsupportedNodes,
        ShapeError,
        ValueError,
        TypeError,
        ArithmeticError,
        AttributeError,
        LookupError,
    ):
        return None
    graphs = file.graph, again.graph
    same = all(list(one) == list(other) for one, other in zip(*[(each.node, each.initializer) for each in graphs], strict=True))
    return model if same and len({_doors(each) for each in graphs}) == 1 else None


def _doors(graph: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The names and shapes of inputs and outputs, without the number of examples."""
    return tuple((each.name, tuple(size.dim_value for size in each.type.tensor_type.shape.dim)[1:]) for each in (*graph.input, *graph.output))


def shapes_of(model: Model) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The shapes of examples of a model's inputs and outputs."""
    net = model.net
    return list(net.layers.inputs) if isinstance(net.layers, Graph) else [net.input_shape], list(net.output_shapes)
