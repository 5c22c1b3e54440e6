"""This module writes an `nbcnn.Model` as an ONNX model: for each call of a layer the nodes that compute it.

`writers.py` has the nodes of each layer; this module calls them in the order of the graph, and adds inputs, outputs and metadata.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from nbcnn import __version__
from nbcnn.datasets.arrays import Form, Forms
from nbcnn.nn import description
from nbcnn.nn.graphs import Graph, wired
from nbcnn.onnx.errors import UnsupportedNodes, onnx_package
from nbcnn.onnx.writers import Shape, Writer
from nbcnn.plan.graph import Buf, Tape
from nbcnn.plan.graph import joins as joining

OPSET, IR_VERSION = 21, 10
"""What is written: the ops of ONNX 1.16, which has GroupNormalization with a weight for each channel."""


TRAINED, NORMALISATION = "trained", "normalisation"
"""Notes in the metadata: the names of the parameters that are trained, and the normalisation of the images."""
_PREFIX = "nbcnn."


def noted(file: Any) -> dict[str, str]:
    """The notes of `to_onnx` in the metadata of an onnx.ModelProto."""
    return {each.key.removeprefix(_PREFIX): each.value for each in file.metadata_props if each.key.startswith(_PREFIX)}


def exported(model: Any, batch: int | None = None) -> Any:
    """The onnx.ModelProto of `model`; see `nbcnn.onnx.to_onnx`."""
    onnx = onnx_package()
    net, helper = model.net, onnx.helper
    writer = Writer(net.params.as_dict())
    graph = wired(net.body)
    inputs = list(net.layers.inputs) if isinstance(net.layers, Graph) else [net.input_shape]
    names = ["x"] if len(inputs) == 1 else [f"x{at}" for at in range(1, len(inputs) + 1)]
    values = {at: (name, shape) for at, (name, shape) in enumerate(zip(names, inputs, strict=True))}
    if net.normalisation is not None:
        values[0] = (_normalised(writer, net.normalisation, *values[0]), values[0][1])
    tape = Tape(training=False)
    for node in graph.nodes:
        read = [values[at] for at in node.reads]
        bufs = [Buf(name, (1, *shape)) for name, shape in read]
        made, _ = node.layer.build(tape, bufs if joining(node.layer) else bufs[0], node.name)
        name = writer.layer(node.layer, node.name, [name for name, _ in read], [shape for _, shape in read])
        values[node.writes] = name, made.shape[1:]
    if writer.reasons:
        raise UnsupportedNodes(f"{len(writer.reasons)} layers have no form in ONNX:", writer.reasons)
    ends = [values[at] for at in graph.outputs]
    called = ["y"] if len(ends) == 1 else [f"y{at}" for at in range(1, len(ends) + 1)]
    for name, (end, _) in zip(called, ends, strict=True):
        writer.node("Identity", [end], name, output=name)
    size = "batch" if batch is None else int(batch)
    tensors = [
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [size, *shape]) for name, shape in zip(names, shapes, strict=True)]
        for names, shapes in ((names, inputs), (called, [shape for _, shape in ends]))
    ]
    made = helper.make_graph(writer.nodes, "nbcnn", tensors[0], tensors[1], writer.tensors())
    opsets = [helper.make_opsetid("", OPSET)]
    file = helper.make_model(made, opset_imports=opsets, ir_version=IR_VERSION, producer_name="nbcnn", producer_version=__version__)
    helper.set_model_props(file, _notes(model))
    return file


def _notes(model: Any) -> dict[str, str]:
    """What `from_onnx` takes from the metadata: forms of examples, names of classes, the loss, the layers, which parameters are trained."""
    net = model.net
    form = model.form or Form(net.input_shape)
    forms = form.parts if isinstance(form, Forms) else (form,)
    made: dict[str, Any] = {"forms": [{"scale": each.note(), "channels_last": each.channels_last} for each in forms]}
    if model.classes:
        made["classes"] = list(model.classes)
    if net.has_loss:
        made["loss"] = description.as_data([net.layers[-1]])
    made[TRAINED] = [name for name in net.params.layout.names if name not in model.frozen()]
    words = {description.KEY: description.dumps(net.body, net.input_shape)}
    words |= {NORMALISATION: net.normalisation.text()} if net.normalisation is not None else {}
    words |= {key: json.dumps(value) for key, value in made.items()} | {"input": _input_words(forms)}
    return {f"{_PREFIX}{key}": value for key, value in words.items()}


def _input_words(forms: Sequence[Form]) -> str:
    """What the inputs of the file are, for people who feed them: floats, which the network scales itself of `Model.predict` alone."""

    def one(form: Form) -> str:
        if not form.known:
            return form.words()
        if form.scale in (None, (0.0, 1.0)):
            return f"floats from 0 to 1{', bytes divided by 255' if form.scale is None else ''}"
        low, high = form.scale
        return f"(x - {low!r}) / {high - low!r} of values x, which lay from {low!r} to {high!r} in training"

    return "; ".join(one(form) for form in forms)


def _normalised(writer: Writer, normalisation: Any, x: str, shape: Shape) -> str:
    """(x − mean) / deviation, by channel, as the gather kernel does it."""
    by_channel = (-1, *(1,) * (len(shape) - 1))
    mean, factor = (np.array(each, np.float32).reshape(by_channel) for each in (normalisation.mean, [1 / d for d in normalisation.deviation]))
    centred = writer.node("Sub", [x, writer.constant("normalisation.mean", mean)], "normalisation.centred")
    return writer.node("Mul", [centred, writer.constant("normalisation.factor", factor)], "normalisation")
