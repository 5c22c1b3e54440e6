"""This module makes an `nbcnn.Model` of an ONNX file: it walks over the nodes in order, computes constants, and calls layers on what examples become.

A node that cannot be taken does not end the walk: what reads it is left out, and one error names all reasons.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.datasets.arrays import Form, Forms
from nbcnn.files import document
from nbcnn.files.errors import UsageError
from nbcnn.files.masked import refuse_masked
from nbcnn.files.quote import brief, quoted, word
from nbcnn.files.warn import warn
from nbcnn.model.network import Model
from nbcnn.nn import description
from nbcnn.nn.activations import LogSoftmax, Scale, Softmax
from nbcnn.nn.ends import MOVES
from nbcnn.nn.graphs import Graph, Input, Value
from nbcnn.nn.losses import SoftmaxCrossEntropy
from nbcnn.onnx import elementwise, norms, reductions, windows  # noqa: F401  # they enter their ops, as shapes does
from nbcnn.onnx.constants import FOLDED, Room, origins
from nbcnn.onnx.erf import ERF, Erf, erf_of
from nbcnn.onnx.errors import NAMED, OnnxError, Unsupported, UnsupportedNodes, onnx_package
from nbcnn.onnx.exporter import noted
from nbcnn.onnx.files import File, inferred, initialisers, label, read
from nbcnn.onnx.node import BATCH, OPS, Node
from nbcnn.onnx.products import PRODUCTS, one_constant
from nbcnn.onnx.restored import restored, shapes_of, trained
from nbcnn.onnx.shapes import entered, shape_of
from nbcnn.onnx.values import Dims, Sheet, Val, apart, limited, natural
from nbcnn.plan.graph import ShapeError
from nbcnn.plan.shapes import numel

LOSSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
_KNOWN = frozenset((*OPS, *FOLDED, *LOSSES, ERF))
_NUMBERED = re.compile(r"(val|_?onnx::\w+?|\S*_output)_\d+")
"""What PyTorch's exporters call values that have no name in the module."""
NOTES = {"classes": (None, [str]), "forms": [{"scale": (None, [float]), "channels_last": bool, "span?": (None, [float])}]}
"""What `to_onnx` writes into the metadata of a file, beside the loss."""


@dataclass(frozen=True)
class Imported:
    """A model, and the names of its inputs and outputs in the file with the shapes of one example there."""

    model: Model
    inputs: Mapping[str, Dims]
    outputs: Mapping[str, Dims]
    labels: str = ""


class _AllBut:
    """All names but some."""

    def __init__(self, names: Container[str]) -> None:
        self._names = names

    def __contains__(self, name: object) -> bool:
        return name not in self._names


class _Left:
    """The place of a constant that a node which cannot be taken would have written."""


class _LeftValue(_Left):
    """The place of a value computed of examples that such a node would have written."""


_COMPUTED = (Val, Erf, _LeftValue)
"""What stands for a value that is computed of examples."""


class _Labels:
    """The labels of a loss, an input that no layer reads."""


class _Loss:
    """The output of a loss: it is computed of labels, and no layer reads it."""


def imported(
    source: Path | str | bytes | Any,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    constants: Mapping[str, Any] | None = None,
    batched: bool = True,
    numbers: Sequence[str] = (),
    loss: Any = None,
    mode: str = "auto",
    precision: str | None = None,
) -> Imported:
    """The model of a file, with the names of its inputs and outputs; see `nbcnn.onnx.from_onnx`."""
    file = read(source)
    if not shapes and not constants and not numbers and batched and (made := _restored(file, loss, mode, precision)) is not None:
        return made
    for name, value in (constants or {}).items():
        refuse_masked(value, f"the values of the constant {quoted(name)}")
    walk = _Walk(file, dict(shapes or {}), {name: np.asarray(value) for name, value in (constants or {}).items()}, batched, loss is not None, numbers)
    graph = walk.graph()
    walk.warn()
    notes = _notes(file, len(graph.inputs))
    model = Model(graph, loss=loss or walk.loss or notes.get("loss"), mode=mode, precision=precision, classes=notes.get("classes"))
    known = model.net.params.as_dict()
    model.net.params.load_dict(known | walk.sheet.arrays(graph))
    for name in walk.sheet.untrained(graph):
        model.freeze(name)
    if "forms" in notes:  # the nodes of the file scale, and have become layers
        notes["forms"] = [each if each.scale in (None, (0.0, 1.0)) else replace(each, scale=(0.0, 1.0), span=each.scale) for each in notes["forms"]]
    _learn(model, notes, graph.inputs)
    return Imported(model, walk.inputs, walk.outputs, walk.labels)


def _restored(file: File, loss: Any, mode: str, precision: str | None) -> Imported | None:
    """The network that `to_onnx` noted in a file whose graph is still that network's; else None."""
    notes = _notes(file, len(file.graph.input))
    model = restored(file, loss or notes.get("loss"), mode, precision, lambda made: _learn(made, notes, shapes_of(made)[0]))
    if model is None:
        return None
    model.classes = tuple(notes["classes"]) if notes.get("classes") else None
    inputs, outputs = shapes_of(model)
    kept = trained(file)
    for name in model.net.params.layout.names:
        if kept is not None and name not in kept:
            model.freeze(name)
    names = [[each.name for each in given] for given in (file.graph.input, file.graph.output)]
    return Imported(model, dict(zip(names[0], inputs, strict=True)), dict(zip(names[1], outputs, strict=True)))


def _learn(model: Model, notes: Mapping[str, Any], shapes: Sequence[Dims]) -> None:
    """Let a model take examples of the noted forms, or floats as they are."""
    forms = notes.get("forms") or [Form(shape, scale=(0.0, 1.0), known=False) for shape in shapes]
    known = [replace(each, shape=shape) for each, shape in zip(forms, shapes, strict=True)]
    model.learn(known[0] if len(known) == 1 else Forms(tuple(known)))


def _notes(file: File, inputs: int) -> dict[str, Any]:
    """What `to_onnx` wrote beside the graph: loss, classes, forms of examples. Raises OnnxError for notes that it cannot have written."""
    said = noted(file.model)
    made: dict[str, Any] = {}
    try:
        for key, form in NOTES.items():
            if key in said:
                made[key] = document.parse(said[key], f"nbcnn.{key}")
                document.fits(made[key], form, f"nbcnn.{key}")
        if "forms" in made:
            made["forms"] = [Form.noted((), each) for each in made["forms"]]
            if len(made["forms"]) != inputs:
                raise OnnxError(f"{file.name}: the note nbcnn.forms is of {len(made['forms'])} inputs, and there are {inputs}")
        if "loss" in said:
            made["loss"] = description.from_data(document.parse(said["loss"], "nbcnn.loss"))[0]
    except (ValueError, IndexError, KeyError, TypeError, RecursionError) as error:
        raise OnnxError(f"{file.name}: a note of nbcnn in its metadata is damaged ({brief(error)})") from None
    return made


class _Walk:
    """One walk over the nodes of a file."""

    def __init__(
        self,
        file: File,
        shapes: Mapping[str, Sequence[int]],
        constants: Mapping[str, np.ndarray],
        batched: bool,
        all_outputs: bool,
        numbers: Sequence[str],
    ) -> None:
        self.file, self.batched, self._all = file, batched, all_outputs
        self.count: int | None = None
        self.loss: Any = None
        self.labels = ""
        self.inputs: dict[str, Dims] = {}
        self.outputs: dict[str, Dims] = {}
        self._entered: list[Value] = []
        self._scores: Any = None
        graph = file.graph
        self._read = {name for node in graph.node for name in node.input} | {each.name for each in graph.output}
        self._reasons: list[tuple[str, str, str]] = []
        self._inferred: Mapping[str, Dims] | None = None
        self._room = Room()
        self._values: dict[str, Any] = dict(initialisers(file))
        if strange := sorted({numbers} if isinstance(numbers, str) else set(numbers) - set(self._values)):
            raise UsageError(f"numbers names {quoted(strange[0])}, which is no initialiser of the file that a node reads (give a list of names)")
        kept = trained(file)
        frozen: Container[str] = () if kept is None else _AllBut(kept | set(numbers))
        self._known = (kept or set()) | set(numbers)
        inputs = {each.name: each for each in file.graph.input if each.name not in self._values}
        for what, given in (("shapes", shapes), ("constants", constants)):
            if strange := sorted(set(given) - {each.name for each in file.graph.input}):
                raise UsageError(f"{what} names {quoted(strange[0])}, and the inputs of the file are {brief(', '.join(inputs))}")
        self._values |= constants
        self._sources, made_of = origins(graph.node, self._values, frozen, self._known)
        reads = ((node.op_type, [self._source(name) for name in node.input if self._source(name) in self._values]) for node in graph.node)
        self.sheet = Sheet(
            frozen=frozen,
            apart=apart(each for node, each in zip(graph.node, reads, strict=True) if self._sources.keys().isdisjoint(node.output)),
            made_of=made_of,
            numbers=None if kept is not None else self._known,
        )
        labels = {node.input[1] for node in file.graph.node if node.op_type in LOSSES and len(node.input) > 1}
        for name, each in inputs.items():
            if name in labels and name not in constants:
                self.labels, self._values[name] = name, _Labels()
            elif name not in constants:
                self._enter(name, each.type, shapes.get(name))
        if not self._entered:
            raise OnnxError(f"{file.name}: the graph has no input but constants")

    def _source(self, name: str) -> str:
        """What the file calls the array that `name` has in another shape or order."""
        return self._sources.get(name, name)

    def _enter(self, name: str, kind: Any, shape: Sequence[int] | None) -> None:
        """Make an input of the graph. Raises OnnxError for what is no array of floats whose shape is known."""
        onnx = onnx_package()
        if not kind.HasField("tensor_type"):
            raise OnnxError(f"{self.file.name}: input {quoted(name)} is a {kind.WhichOneof('value')}, and must be a tensor")
        tensor = kind.tensor_type
        if tensor.elem_type != onnx.TensorProto.FLOAT:
            named = onnx.TensorProto.DataType.Name(tensor.elem_type) if tensor.elem_type in onnx.TensorProto.DataType.values() else tensor.elem_type
            raise OnnxError(f"{self.file.name}: input {quoted(name)} is of type {named}, and networks take FLOAT (constants gives an input a value)")
        said = [each.dim_value if each.HasField("dim_value") else None for each in tensor.shape.dim] if tensor.HasField("shape") else None
        if self.batched and said:
            self.count = said[0] if said[0] and not self._entered else (self.count if said[0] == self.count else None)
        if said is not None and self.batched and not said:
            raise OnnxError(f"{self.file.name}: input {quoted(name)} has no axes, so none counts examples: batched=False takes it as one example")
        dims = None if said is None else said[int(self.batched) :]
        if shape is not None:
            if dims is not None and (len(dims) != len(shape) or any(a is not None and a != b for a, b in zip(dims, shape, strict=True))):
                raise UsageError(f"shapes has {quoted(tuple(shape))} for the input {quoted(name)}, and the file says {quoted(tuple(dims))}")
            dims = list(shape)
        if dims is None or None in dims:
            called = quoted(name)
            raise OnnxError(f"{self.file.name}: the shape of input {called} is left open ({quoted(dims)}): give it by shapes={{{called}: (…)}}")
        try:
            made = limited([size for size in dims if size is not None])
            value = Input(entered(made))
        except Unsupported as error:
            raise OnnxError(f"{self.file.name}: input {quoted(name)}: {error}") from None
        self._entered.append(value)
        self.inputs[name] = made
        self._values[name] = Val(value, made)

    def warn(self) -> None:
        """Warn of single numbers and divisors that became constants, although the file may train them; what exporters number is no weight."""
        tensors = {each.name for each in self.file.graph.initializer}
        lost = [name for name in self.sheet.lost if name in tensors and not _NUMBERED.fullmatch(name)]
        if lost:
            named = ", ".join(map(quoted, lost[:NAMED])) + (f" and {len(lost) - NAMED} more" if lost[NAMED:] else "")
            warn(
                f"{self.file.name}: {named}: constants here, which training leaves as they are, for no file says whether numbers and divisors are "
                f"trained; numbers=[{quoted(lost[0])}, …] of from_onnx has them trained"
            )

    # -- nodes

    def graph(self) -> Graph:
        """The graph of layers. Raises UnsupportedNodes, OnnxError."""
        for at, node in enumerate(self.file.graph.node):
            self.sheet.node, self.sheet.number = node.name, at
            self._node(node, label(node, at))
        outputs = self._outputs()
        if self._reasons:
            raise UnsupportedNodes(f"{self.file.name}: {len(self._reasons)} nodes cannot be taken:", self._lines())
        try:
            made = Graph.of(self._entered, [self._final(each) for each in outputs.values()])
        except UsageError as error:
            raise OnnxError(f"{self.file.name}: {error}") from None
        self.outputs = {name: each.dims for name, each in outputs.items()}
        return replace(made, called=self.sheet.called(made.layers))

    def _lines(self) -> list[str]:
        """A line for each kind of reason, with the nodes that have it. The number of examples, which stands for any, is called N."""
        kinds: dict[tuple[str, str], list[str]] = {}
        for called, op, why in self._reasons:
            said = re.sub(r"\d{10,40}", lambda found: _examples(int(found[0])), why)
            kinds.setdefault((op, said), []).append(called)
        lines = list[str]()
        for (op, why), places in kinds.items():
            named = ", ".join(each.removeprefix(f"{op} ") for each in places[:NAMED]) + (f" and {len(places) - NAMED} more" if places[NAMED:] else "")
            lines.append(f"{places[0]}: {why}" if len(places) == 1 else f"{op}, {len(places)}×: {why}: {named}")
        return lines

    def _node(self, node: Any, called: str) -> None:
        """Compute a node's outputs, or say why not."""
        operands = [self._values[name] if name else None for name in node.input]
        left = _LeftValue() if any(isinstance(each, _COMPUTED) for each in operands) else _Left()
        try:
            if node.domain not in ("", "ai.onnx") or node.op_type not in _KNOWN:
                raise Unsupported(f"there is nothing for the op {quoted(f'{node.domain}.{node.op_type}'.lstrip('.'))}")
            if any(isinstance(each, _Left) for each in operands):
                if node.op_type in PRODUCTS:
                    one_constant(operands, _COMPUTED)
                made: Sequence[Any] = [left] * len(node.output)
            else:
                made = self._made(node, operands)
        except (Unsupported, OnnxError, UsageError, ShapeError) as error:
            self._reasons.append((error.beside(called) if isinstance(error, Unsupported) else called, word(node.op_type), str(error)))
            made = self._missing(node, left)
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:  # operands of sizes that the op's own arithmetic does not take
            self._reasons.append((called, word(node.op_type), f"its operands and attributes do not go together ({brief(error)})"))
            made = self._missing(node, left)
        self._values.update({name: each for name, each in zip(node.output, made, strict=False) if name})

    def _missing(self, node: Any, left: _Left) -> list[Any]:
        """What stands for the outputs of a node that cannot be taken. Of values whose shape the file tells those behind it are read on, so that what
        cannot be taken of them is named, too."""
        if not isinstance(left, _LeftValue):
            return [left] * len(node.output)
        if self._inferred is None:
            self._inferred = inferred(self.file, self.inputs, (self.count or "N") if self.batched else None)
        shapes = [self._inferred.get(name) for name in node.output]
        return [left if dims is None else Val(Value(natural(dims)), dims) for dims in shapes]

    def _made(self, node: Any, operands: list[Any]) -> Sequence[Any]:
        op, attributes = node.op_type, _attributes(node, self.file.opset)
        if op in LOSSES:
            return self._lost(node, operands, attributes)
        if any(isinstance(each, _Loss | _Labels) for each in operands):
            raise Unsupported("it reads labels, or the value of a loss")
        if op in ("Shape", "Size") and isinstance(operands[0], Val):
            return [self._size(op, operands[0], attributes)]
        if not any(isinstance(each, Val | Erf) for each in operands):
            if op in FOLDED:
                return [self._room.folded(op, operands, attributes)]
            raise Unsupported("all its operands are constants, and what it makes of them is not computed")
        if op == ERF or any(isinstance(each, Erf) for each in operands):
            return [erf_of(self.sheet, op, operands)]
        if op not in OPS:
            raise Unsupported("it is taken where all its operands are constants")
        made = Node(
            op,
            node.name,
            self.file.written,
            operands,
            [self._source(name) for name in node.input],
            attributes,
            len(node.output),
            [bool(name) and name in self._read for name in node.output],
            self.sheet,
            self.batched,
            self.count,
        )
        self.sheet.claimed.clear()
        outputs = OPS[op].make(made)
        for name, each in zip(made.names, operands, strict=True):
            if name in self._known - self.sheet.claimed and isinstance(each, np.ndarray):
                raise Unsupported("a tensor that is trained, and no layer has it as a weight here", name)
        return outputs

    def _size(self, op: str, x: Val, attributes: Mapping[str, Any]) -> np.ndarray:
        """What Shape and Size give of a value."""
        if op == "Size":
            if self.batched:
                raise Unsupported("it counts the elements of all examples")
            return np.array(numel(x.dims), np.int64)
        sizes = shape_of(x, self.batched)
        return sizes[slice(int(attributes.get("start", 0)), attributes.get("end"))]

    def _lost(self, node: Any, operands: list[Any], attributes: Mapping[str, Any]) -> Sequence[Any]:
        """The loss of the model, and its second output, the logarithms of the probabilities."""
        logits, labels = operands[0], self._values.get(node.input[1])
        reduction = attributes.get("reduction", b"mean").decode()
        if self.loss is not None:
            raise Unsupported("a second loss")
        if not isinstance(logits, Val) or not self.batched or len(logits.dims) < 1:
            raise Unsupported("it takes scores of classes, (N, C, …), of a network whose first axis counts examples")
        if not isinstance(labels, _Labels):
            raise Unsupported("its labels are no input of the graph")
        if reduction != "mean":
            raise Unsupported(f"reduction {quoted(reduction)}; a loss is a mean")
        if node.op_type == "NegativeLogLikelihoodLoss" and not isinstance(logits.value.layer, LogSoftmax):
            raise Unsupported("it is taken right behind a LogSoftmax alone, with which it is the cross-entropy")
        weight = operands[2] if len(operands) > 2 else None
        if weight is not None and (isinstance(weight, Val) or np.shape(weight) != (logits.dims[0],)):
            raise Unsupported("its weights are no constant with a number for each class")
        ignore = attributes.get("ignore_index")
        self.loss = SoftmaxCrossEntropy(weight=None if weight is None else tuple(np.asarray(weight, float).tolist()), ignore_index=ignore)
        behind = logits.value
        while isinstance(behind.layer, MOVES):
            behind = behind.reads[0]
        if isinstance(behind.layer, Softmax):
            # The file takes the softmax of these probabilities, and a model whose last layer is a Softmax would not.
            logits = self.sheet.alike(Scale(), logits)
        # Scores of a vector, or of pixels: (C,) or (C, H, W), whatever axes the file has.
        shape = logits.dims if len(logits.dims) in (1, 3) else (logits.dims[0], 1, numel(logits.dims[1:]))
        scores = Val(self.sheet.shaped(logits, shape), logits.dims)
        if isinstance(logits.value.layer, LogSoftmax) and scores.value is logits.value:
            chances = scores
        else:
            chances = Val(self.sheet.call(LogSoftmax(), scores.value), logits.dims)
        # What the cross-entropy makes of log-probabilities it makes of the scores, too: softmax does not see what is added to all.
        self._scores = chances if len(node.output) > 1 and node.output[1] else scores
        return [_Loss(), chances][: len(node.output)]

    def _outputs(self) -> dict[str, Val]:
        """The outputs of the graph by name; of a loss what it is computed of, alone, because a model's loss is of all its outputs."""
        made: dict[str, Val] = {}
        for each in self.file.graph.output:
            value = self._values[each.name]
            if isinstance(value, _Loss):
                if not any(self._is_scores(self._values[other.name]) for other in self.file.graph.output):
                    made[f"scores of {each.name}"] = self._scores
            elif isinstance(value, Val):
                made[each.name] = value
            elif isinstance(value, Erf):
                self._reasons.append((f"output {quoted(each.name)}", "", "it is Erf, which is taken as a part of a GELU alone"))
            elif not isinstance(value, _Left):
                self._reasons.append((f"output {quoted(each.name)}", "", "it is a constant, which no example changes"))
        return made if self.loss is None or self._all else {name: each for name, each in made.items() if self._is_scores(each)}

    def _is_scores(self, x: Any) -> bool:
        """Whether this is what the file's loss is computed of."""
        return isinstance(x, Val) and (x.value, x.dims) == (self._scores.value, self._scores.dims)

    def _final(self, x: Val) -> Value:
        """An output; what the loss reads keeps the shape that it has for it."""
        return self.sheet.final(x, keep=self.loss is not None and self._is_scores(x))


def _examples(number: int) -> str:
    """A number in words: a multiple of the number of examples as such."""
    return str(number) if number % BATCH else "N" if number == BATCH else f"{number // BATCH}·N"


@cache
def _schema(op: str, opset: int) -> Mapping[str, Any]:
    """The attributes that ONNX defines for an op, by name; none for an op that it does not define."""
    defs = onnx_package().defs
    try:
        return dict(defs.get_schema(op, opset, "").attributes)
    except defs.SchemaError:
        return {}


def _attributes(node: Any, opset: int) -> dict[str, Any]:
    """The attributes of a node: numbers, words, lists, tensors. Raises Unsupported for subgraphs, and for types that are not those of the op."""
    onnx = onnx_package()
    made, known = {}, _schema(node.op_type, opset)
    for each in node.attribute:
        if each.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) or each.ref_attr_name:
            raise Unsupported(f"its attribute {quoted(each.name)} is a graph, or of a function")
        if each.name in known and each.type != int(known[each.name].type):
            raise Unsupported(f"its attribute {each.name} is of another type than {known[each.name].type.name}")
        made[each.name] = onnx.helper.get_attribute_value(each)
    if lacking := [name for name, each in known.items() if each.required and name not in made]:
        raise Unsupported(f"it lacks its attribute {lacking[0]}")
    return made
