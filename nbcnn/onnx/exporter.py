"""This module writes an `nbcnn.Model` as an ONNX model: for each call of a layer the nodes that compute it.

`writers.py` has the nodes of each layer; this module calls them in the order of the graph, and adds inputs, outputs and metadata.
"""

from __future__ import annotations

import json
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
    forms = _forms(model)
    for at, form in enumerate(forms):
        values[at] = (_scaled(writer, form, *values[at]), values[at][1])
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
    said = [list(map(_words, forms)), [""] * len(ends)]
    tensors = [
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [size, *shape], words) for name, shape, words in zip(*each, strict=True)]
        for each in ((names, inputs, said[0]), (called, [shape for _, shape in ends], said[1]))
    ]
    made = helper.make_graph(writer.nodes, "nbcnn", tensors[0], tensors[1], writer.tensors())
    opsets = [helper.make_opsetid("", OPSET)]
    file = helper.make_model(made, opset_imports=opsets, ir_version=IR_VERSION, producer_name="nbcnn", producer_version=__version__)
    helper.set_model_props(file, _notes(model))
    return file


def _notes(model: Any) -> dict[str, str]:
    """What `from_onnx` takes from the metadata: forms of examples, names of classes, the loss, the layers, which parameters are trained."""
    net = model.net
    forms = _forms(model)
    made: dict[str, Any] = {"forms": [each.note() for each in forms]}
    if model.classes:
        made["classes"] = list(model.classes)
    if net.has_loss:
        made["loss"] = description.as_data([net.layers[-1]])
    made[TRAINED] = [name for name in net.params.layout.names if name not in model.frozen()]
    words = {description.KEY: description.dumps(net.body, net.input_shape)}
    words |= {NORMALISATION: net.normalisation.text()} if net.normalisation is not None else {}
    words |= {key: json.dumps(value) for key, value in made.items()} | {"input": "; ".join(map(_words, forms))}
    return {f"{_PREFIX}{key}": value for key, value in words.items()}


def _forms(model: Any) -> tuple[Form, ...]:
    """The forms of the examples of each input."""
    form = model.form or Form(model.net.input_shape)
    return form.parts if isinstance(form, Forms) else (form,)


def _words(form: Form) -> str:
    """What an input of the file is, for people who feed it: what `Model.predict` takes, but channels first, and no bytes."""
    if not form.known:
        return form.words()
    if form.scale is None:
        return "floats from 0 to 1: bytes divided by 255"
    if form.scale == (0.0, 1.0) and form.span is None:
        return "floats from 0 to 1"
    return "numbers as they are, from {:g} to {:g} in training".format(*(form.span or form.scale))


def _scaled(writer: Writer, form: Form, x: str, shape: Shape) -> str:
    """(x − low) / (high − low), as `Form.take` does it, where that is not x itself."""
    if form.scale in (None, (0.0, 1.0)):
        return x
    low, high = form.scale
    least, width = (np.full((1,) * (1 + len(shape)), number, np.float32) for number in (low, high - low))
    above = writer.node("Sub", [x, writer.constant(f"{x}.scale.low", least)], f"{x}.scale.above")
    return writer.node("Div", [above, writer.constant(f"{x}.scale.width", width)], f"{x}.scale")


def _normalised(writer: Writer, normalisation: Any, x: str, shape: Shape) -> str:
    """(x − mean) / deviation, by channel, as the gather kernel does it."""
    by_channel = (-1, *(1,) * (len(shape) - 1))
    mean, factor = (np.array(each, np.float32).reshape(by_channel) for each in (normalisation.mean, [1 / d for d in normalisation.deviation]))
    centred = writer.node("Sub", [x, writer.constant("normalisation.mean", mean)], "normalisation.centred")
    return writer.node("Mul", [centred, writer.constant("normalisation.factor", factor)], "normalisation")
