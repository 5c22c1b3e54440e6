"""This module says how each layer is written as nodes of ONNX: the functions of `WRITERS`, by the class of the layer.

Such a function takes a `Writer`, the layer, its name, and the names and shapes of what it reads; it puts nodes behind each other and returns
the name of the last one's output. The last node of a layer has the layer's name, and initialisers have the names of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nbcnn.nn import activations, joins, layers, maps, norms, resampling, whitening
from nbcnn.nn.corruption import Dropout, MaskSquares, Noise
from nbcnn.nn.graphs import Graph, Input, wired
from nbcnn.nn.joins import Detach
from nbcnn.nn.layer import pair
from nbcnn.onnx.errors import Unsupported, onnx_package
from nbcnn.plan.graph import Buf, Tape, layer_of
from nbcnn.plan.graph import joins as joins_several
from nbcnn.plan.shapes import numel, pooled_extent

LEFT_OUT = (Dropout, Noise, MaskSquares, Detach)
"""Layers that change nothing in a prediction."""

Shape = tuple[int, ...]
Writing = Callable[["Writer", Any, str, Sequence[str], Sequence[Shape]], str]
WRITERS: dict[type, Writing] = {}
"""What writes a layer, by its class."""


class Writer:
    """The nodes and initialisers so far."""

    def __init__(self, params: Mapping[str, np.ndarray]) -> None:
        self.params, self.nodes, self.reasons = params, list[Any](), list[str]()
        self._arrays: dict[str, np.ndarray] = {}

    def node(self, op: str, inputs: Sequence[str], name: str, output: str = "", **attributes: Any) -> str:
        """A node; returns the name of its output."""
        output = output or f"{name}.y"
        self.nodes.append(onnx_package().helper.make_node(op, list(inputs), [output], name=name, **attributes))
        return output

    def param(self, name: str, parameter: str) -> str:
        """The parameter or state of the layer that `name` calls, as an initialiser of its own name."""
        full = f"{layer_of(name)}.{parameter}"
        self._arrays[full] = self.params[full]
        return full

    def constant(self, name: str, value: Any, dtype: Any = np.float32) -> str:
        """An initialiser that is no parameter."""
        self._arrays[name] = np.asarray(value, dtype)
        return name

    def tensors(self) -> list[Any]:
        """All initialisers."""
        helper = onnx_package().numpy_helper
        return [helper.from_array(np.ascontiguousarray(array), name) for name, array in self._arrays.items()]

    def layer(self, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
        """The nodes of a layer; a reason instead, where there are none."""
        if isinstance(layer, LEFT_OUT):
            return reads[0]
        writing = WRITERS.get(type(layer)) or (_composed if hasattr(layer, "composition") else None)
        if writing is None:
            self.reasons.append(f"{name}: {type(layer).__name__}")
            return reads[0]
        try:
            return writing(self, layer, name, reads, shapes)
        except Unsupported as error:
            self.reasons.append(f"{name}: {type(layer).__name__}, {error}")
            return reads[0]


def _composed(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    """An activation of the user's own, by the layers that it says it is made of."""
    x = Input(shapes[0])
    graph = wired(Graph.of(x, layer.composition(x, **layer.attrs())))
    values, tape = {0: (reads[0], shapes[0])}, Tape(training=False)
    for node in graph.nodes:
        called = name if node.writes == graph.outputs[0] else f"{name}.{node.name}"
        read = [values[at] for at in node.reads]
        bufs = [Buf(each, (1, *shape)) for each, shape in read]
        made, _ = node.layer.build(tape, bufs if joins_several(node.layer) else bufs[0], called)
        values[node.writes] = writer.layer(node.layer, called, [each for each, _ in read], [shape for _, shape in read]), made.shape[1:]
    return values[graph.outputs[0]][0]


def writes(*kinds: type) -> Callable[[Writing], Writing]:
    """Enter a function for the layers `kinds`."""

    def enter(writing: Writing) -> Writing:
        WRITERS.update(dict.fromkeys(kinds, writing))
        return writing

    return enter


PLAIN: dict[type, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    activations.Softmax: ("Softmax", lambda layer: {"axis": 1}),
    activations.LogSoftmax: ("LogSoftmax", lambda layer: {"axis": 1}),
    layers.Flatten: ("Flatten", lambda layer: {"axis": 1}),
    joins.Add: ("Sum", lambda layer: {}),
    joins.Concat: ("Concat", lambda layer: {"axis": 1}),
}
"""Layers that are one node without parameters: its op and attributes."""


def _attributes(layer: activations.Elementwise) -> dict[str, Any]:
    return {attribute: getattr(layer, name) for name, (attribute, _) in layer.elsewhere.fields.items()}


PLAIN |= {each: (each.elsewhere.onnx, _attributes) for each in activations.ELEMENTWISE if each.elsewhere.onnx}


@writes(*PLAIN)
def _plain(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    op, attributes = PLAIN[type(layer)]
    return writer.node("Add" if op == "Sum" and len(reads) == 2 else op, reads, name, **attributes(layer))


@writes(joins.Mul)
def _product(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    # Broadcasting matches the last axes, and a factor (N, C) of images belongs to their channels.
    axes = max(map(len, shapes))
    wide = [(*shape, *(1,) * (axes - len(shape))) for shape in shapes]
    given = [
        x if shape == whole else _shaped(writer, x, f"{name}.factor{at}", whole)
        for at, (x, shape, whole) in enumerate(zip(reads, shapes, wide, strict=True), 1)
    ]
    return writer.node("Mul", given, name)


@writes(layers.Conv2d)
def _conv(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    top, bottom, left, right = layer.borders
    given = [*reads, *(writer.param(name, each) for each in layer.params())]
    shape = {"kernel_shape": pair(layer.kernel_size), "strides": pair(layer.stride), "dilations": pair(layer.dilation), "group": layer.groups}
    return writer.node("Conv", given, name, pads=[top, left, bottom, right], **shape)


@writes(layers.ConvTranspose2d)
def _conv_transpose(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    top, bottom, left, right = layer.borders
    given = [*reads, *(writer.param(name, each) for each in layer.params())]
    shape = {"kernel_shape": pair(layer.kernel_size), "strides": pair(layer.stride), "dilations": pair(layer.dilation), "group": layer.groups}
    return writer.node("ConvTranspose", given, name, pads=[top, left, bottom, right], output_padding=pair(layer.output_padding), **shape)


@writes(layers.Linear)
def _linear(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    return writer.node("Gemm", [*reads, *(writer.param(name, each) for each in layer.params())], name, transB=1)


@writes(layers.Residual)
def _residual(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    tape, value, shape = Tape(training=False), reads[0], shapes[0]
    for inner, each in layer.named_body(name):
        made, _ = each.build(tape, Buf(value, (1, *shape)), inner)
        value = writer.layer(each, inner, [value], [shape])
        shape = made.shape[1:]
    return writer.node("Add", [value, reads[0]], name)


@writes(joins.Reshape)
def _reshape(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    return _shaped(writer, reads[0], name, layer.shape)


def _shaped(writer: Writer, x: str, name: str, shape: Sequence[int]) -> str:
    # The first 0 keeps the number of examples.
    return writer.node("Reshape", [x, writer.constant(f"{name}.shape", (0, *shape), np.int64)], name)


@writes(joins.Pad)
def _pad(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    top, bottom, left, right = layer.sides()
    pads = writer.constant(f"{name}.pads", (0, 0, top, left, 0, 0, bottom, right), np.int64)
    return writer.node("Pad", [*reads, pads, writer.constant(f"{name}.value", layer.value)], name, mode="constant")


@writes(maps.Permute)
def _permute(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    x, seen = reads[0], layer.shape or shapes[0]
    if seen != shapes[0]:
        x = _shaped(writer, x, f"{name}.seen", seen)
    perm = [0, *(axis + 1 for axis in layer.axes)]
    if len(perm) == 4:
        return writer.node("Transpose", [x], name, perm=perm)
    moved = writer.node("Transpose", [x], f"{name}.moved", perm=perm)
    return _shaped(writer, moved, name, (numel(seen),))


@writes(maps.LinearMap)
def _linear_map(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    rows = layer.rows()
    if all(len(row) == 1 and row[0][1] == 1 for row in rows):
        indices = writer.constant(f"{name}.indices", [row[0][0] for row in rows], np.int64)
        return writer.node("Gather", [*reads, indices], name, axis=layer.axis)
    matrix = np.zeros((len(rows), layer.extent), np.float32)
    for at, row in enumerate(rows):
        for index, weight in row:
            matrix[at, index] += weight
    if layer.axis == 1:
        return writer.node("Conv", [*reads, writer.constant(f"{name}.matrix", matrix[:, :, None, None])], name)
    if layer.axis == 2:
        return writer.node("MatMul", [writer.constant(f"{name}.matrix", matrix), *reads], name)
    return writer.node("MatMul", [*reads, writer.constant(f"{name}.matrix", matrix.T)], name)


# -- images of other sizes


@writes(resampling.MaxPool2d)
def _max_pool(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    size, stride, before, after = _windows(layer, shapes[0])
    return writer.node("MaxPool", reads, name, kernel_shape=size, strides=stride, pads=[*before, *after])


@writes(resampling.AvgPool2d)
def _avg_pool(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    size, stride, before, after = _windows(layer, shapes[0])
    given, counted = {"kernel_shape": size, "strides": stride}, layer.count_include_pad
    if counted and after != before:
        # The zeros of the padding count, and what lies beyond it for the last window does not.
        beyond = [max(0, far - near) for near, far in zip(before, after, strict=True)]
        sides = writer.constant(f"{name}.pads", (0, 0, *before, 0, 0, *(far - more for far, more in zip(after, beyond, strict=True))), np.int64)
        padded = writer.node("Pad", [*reads, sides], f"{name}.padded", mode="constant")
        return writer.node("AveragePool", [padded], name, pads=[0, 0, *beyond], count_include_pad=0, **given)
    return writer.node("AveragePool", reads, name, pads=[*before, *after], count_include_pad=int(counted), **given)


def _windows(layer: Any, shape: Shape) -> tuple[Any, Any, list[int], list[int]]:
    """Sizes, strides, and paddings before and behind. ONNX's ceil_mode is left out: its checker counts windows that PyTorch leaves away."""
    size, stride, pad = layer.geometry()
    after = list(pad)
    for at, extent in enumerate(shape[1:]):
        count = pooled_extent(extent, size[at], stride[at], pad[at], layer.ceil_mode)
        if count > pooled_extent(extent, size[at], stride[at], pad[at]):
            after[at] = (count - 1) * stride[at] + size[at] - extent - pad[at]
    return size, stride, list(pad), after


@writes(resampling.GlobalAvgPool2d)
def _global(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    return writer.node("Flatten", [writer.node("GlobalAveragePool", reads, name)], f"{name}.flat", axis=1)


@writes(resampling.Upsample2d, resampling.Resize)
def _resize(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    down, across = pair(layer.scale_factor)
    given = [*reads, "", writer.constant(f"{name}.scales", (1, 1, down, across))]
    if getattr(layer, "mode", "nearest") == "bilinear":
        return writer.node("Resize", given, name, mode="linear", coordinate_transformation_mode="half_pixel")
    return writer.node("Resize", given, name, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor")


# -- norms


@writes(norms.BatchNorm2d)
def _batch_norm(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    given = [writer.param(name, each) for each in ("weight", "bias", "running_mean", "running_var")]
    # ONNX's momentum is what the statistics keep, PyTorch's and ours what the batch counts.
    return writer.node("BatchNormalization", [*reads, *given], name, epsilon=layer.eps, momentum=1 - layer.momentum)


@writes(norms.GroupNorm)
def _group_norm(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    given = [writer.param(name, each) for each in ("weight", "bias")]
    return writer.node("GroupNormalization", [*reads, *given], name, epsilon=layer.eps, num_groups=layer.num_groups)


@writes(norms.InstanceNorm2d)
def _instance_norm(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    if layer.affine:
        given = [writer.param(name, each) for each in ("weight", "bias")]
    else:
        given = [writer.constant(f"{name}.{each}", np.full(shapes[0][0], value)) for each, value in (("weight", 1), ("bias", 0))]
    return writer.node("InstanceNormalization", [*reads, *given], name, epsilon=layer.eps)


@writes(norms.LayerNorm)
def _layer_norm(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    given = [writer.param(name, each) for each in ("weight", "bias")]
    return writer.node("LayerNormalization", [*reads, *given], name, axis=1, epsilon=layer.eps)


def _wide(writer: Writer, name: str, parameter: str) -> str:
    """A parameter of channels, which broadcasting matches with images."""
    full = writer.param(name, parameter)
    return writer.constant(full, writer.params[full].reshape(-1, 1, 1))


def _deviation(writer: Writer, x: str, name: str, groups: int, eps: float, shape: Shape) -> str:
    """√(variance + eps) of each group of channels of an image, (N, groups, 1)."""
    flat = _shaped(writer, x, f"{name}.groups", (groups, numel(shape) // groups))
    axes = writer.constant(f"{name}.axes", [2], np.int64)
    centred = writer.node("Sub", [flat, writer.node("ReduceMean", [flat, axes], f"{name}.mean", keepdims=1)], f"{name}.centred")
    square = writer.node("Mul", [centred, centred], f"{name}.square")
    variance = writer.node("ReduceMean", [square, axes], f"{name}.variance", keepdims=1)
    return writer.node("Sqrt", [writer.node("Add", [variance, writer.constant(f"{name}.eps", eps)], f"{name}.raised")], f"{name}.std")


@writes(norms.EvoNormS0)
def _evonorm_s0(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    """γ·x·σ(v·x)/s + β."""
    c, h, w = shapes[0]
    std = _deviation(writer, reads[0], name, layer.groups, layer.eps, shapes[0])
    gate = writer.node("Sigmoid", [writer.node("Mul", [reads[0], _wide(writer, name, "v")], f"{name}.vx")], f"{name}.gate")
    gated = _shaped(
        writer, writer.node("Mul", [reads[0], gate], f"{name}.gated"), f"{name}.grouped", (layer.groups, numel(shapes[0]) // layer.groups)
    )
    made = _shaped(writer, writer.node("Div", [gated, std], f"{name}.quotient"), f"{name}.images", (c, h, w))
    scaled = writer.node("Mul", [made, _wide(writer, name, "gamma")], f"{name}.scaled")
    return writer.node("Add", [scaled, _wide(writer, name, "beta")], name)


@writes(norms.EvoNormB0)
def _evonorm_b0(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    """γ·x/max(√(running + eps), v·x + s) + β."""
    c = shapes[0][0]
    own = _shaped(writer, _deviation(writer, reads[0], name, c, layer.eps, shapes[0]), f"{name}.own", (c, 1, 1))
    other = writer.node("Add", [writer.node("Mul", [reads[0], _wide(writer, name, "v")], f"{name}.vx"), own], f"{name}.instance")
    raised = writer.node("Add", [_wide(writer, name, "running"), writer.constant(f"{name}.eps", layer.eps)], f"{name}.running.raised")
    batch = writer.node("Sqrt", [raised], f"{name}.batch")
    made = writer.node("Div", [reads[0], writer.node("Max", [other, batch], f"{name}.divisor")], f"{name}.quotient")
    scaled = writer.node("Mul", [made, _wide(writer, name, "gamma")], f"{name}.scaled")
    return writer.node("Add", [scaled, _wide(writer, name, "beta")], name)


# -- activations of several nodes


@writes(activations.Swish)
def _swish(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    return writer.node("Mul", [*reads, writer.node("Sigmoid", reads, f"{name}.sigmoid")], name)


@writes(activations.ReLU6, activations.Clip)
def _clip(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    low, high = (0.0, 6.0) if isinstance(layer, activations.ReLU6) else (layer.low, layer.high)
    ends = ["" if end is None else writer.constant(f"{name}.{which}", end) for which, end in (("low", low), ("high", high))]
    return writer.node("Clip", [*reads, *(ends if ends[1] else ends[:1])], name)


@writes(activations.PReLU)
def _prelu(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    writer.param(name, "weight")
    full = f"{layer_of(name)}.weight"
    slopes = writer.params[full].reshape(-1, *(1,) * (len(shapes[0]) - 1)) if layer.num_parameters > 1 else writer.params[full]
    return writer.node("PRelu", [*reads, writer.constant(full, slopes)], name)


@writes(activations.Power)
def _power(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    return writer.node("Pow", [*reads, writer.constant(f"{name}.exponent", layer.exponent)], name)


@writes(activations.Scale)
def _scale(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    if not layer.shift:
        return writer.node("Mul", [*reads, writer.constant(f"{name}.factor", layer.factor)], name)
    scaled = reads[0] if layer.factor == 1 else writer.node("Mul", [*reads, writer.constant(f"{name}.factor", layer.factor)], f"{name}.scaled")
    return writer.node("Add", [scaled, writer.constant(f"{name}.shift", layer.shift)], name)


@writes(activations.Threshold)
def _threshold(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    if not layer.value:
        return writer.node("ThresholdedRelu", reads, name, alpha=layer.limit)
    above = writer.node("Greater", [*reads, writer.constant(f"{name}.limit", layer.limit)], f"{name}.above")
    return writer.node("Where", [above, *reads, writer.constant(f"{name}.value", layer.value)], name)


@writes(whitening.Root)
def _root(writer: Writer, layer: Any, name: str, reads: Sequence[str], shapes: Sequence[Shape]) -> str:
    size = writer.node("Abs", reads, f"{name}.size")
    raised = writer.node("Add", [size, writer.constant(f"{name}.eps", layer.eps)], f"{name}.raised")
    return writer.node("Div", [*reads, writer.node("Sqrt", [raised], f"{name}.root")], name)
