"""This module reads a torch.nn.Module as a graph of layers with its weights.

The module is traced by torch.fx, or by torch.export where its Python decides by values, and run once on the example, so that the shape of every value
is known. Then every node becomes layers: a module by its class (`modules.MODULES`), a function, method or ATen op by its name
(`functions.FUNCTIONS`), whose handler has PyTorch's own parameters. What has no handler, and what one refuses, is collected, and all of it is named
in one error.

A module is traced twice, in evaluation and in training: what differs, but for the flags of norms and dropouts, has no graph that is right for both.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from nbcnn.datasets.arrays import Form, Forms
from nbcnn.files.errors import UsageError
from nbcnn.model.network import Model
from nbcnn.nn.graphs import Graph, Input, Value
from nbcnn.nn.joins import Detach
from nbcnn.onnx.errors import BothComputed, grouped
from nbcnn.onnx.values import Sheet, Val, apart, natural
from nbcnn.torch import Unsupported
from nbcnn.torch.calls import Call, Held, Refused, key_of
from nbcnn.torch.functions import FLAGGED, FUNCTIONS
from nbcnn.torch.modules import MODULES, Own


def imported(module: Any, example: Any, *, loss: Any, mode: str, precision: str | None, **options: Any) -> Model:
    """See `nbcnn.torch.from_module`."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"from_module takes a torch.nn.Module, got {type(module).__name__}")
    examples = tuple(example) if isinstance(example, tuple | list) else (example,)
    for each in examples:
        if not isinstance(each, Tensor) or each.ndim < 2 or not each.numel():
            what = tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__
            raise UsageError(f"the example must be a tensor (N, C, H, W) or (N, F), or a tuple of them, one for each input, got {what}")
    examples = tuple(each.detach().to("cpu", torch.float32) for each in examples)
    traced = _traced(module, examples)
    reading = _Reading(type(module).__name__, traced, examples)
    graph = reading.graph()
    model = Model(graph, loss=loss, mode=mode, precision=precision, **options)
    model.net.params.load_dict(model.net.params.as_dict() | reading.sheet.arrays(graph))
    for name in dict.fromkeys([*reading.sheet.untrained(graph), *_unreached(graph, model.net.params.layout.names)]):
        model.freeze(name)
    forms = tuple(Form(shape, scale=(0.0, 1.0), known=False) for shape in graph.inputs)
    model.learn(forms[0] if len(forms) == 1 else Forms(forms))
    return model


def _unreached(graph: Graph, parameters: list[str]) -> list[str]:
    """The parameters to which no gradient comes, because a Detach stands between them and every output: PyTorch leaves them as they are."""
    first, waiting = len(graph.inputs), list(graph.outputs)
    seen, reached = set[int](), set[int]()
    while waiting:
        at = waiting.pop()
        if at < first or at in seen:
            continue
        seen.add(at)
        layer, reads = graph.calls[at - first]
        if not isinstance(graph.layers[layer], Detach):
            reached.add(layer)
            waiting += reads
    idle = [f"{name}." for at, name in enumerate(graph.called) if at not in reached]
    return [name for name in parameters if any(name.startswith(each) for each in idle)]


# -- traces


@dataclass(frozen=True)
class _Traced:
    """The graph of a module in evaluation.

    tensors  its tensors by their identity (`calls.key_of`).
    trains   the modules that are in training mode when the network is. differs  the nodes that have other numbers in training.
    """

    graph: fx.GraphModule
    tensors: dict[Any, Held]
    trains: frozenset[str]
    differs: frozenset[fx.Node]


class _Tracer(fx.Tracer):
    """Notes of every node whether gradients pass through it, and does not look into layers of nbcnn."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is one node."""
        return isinstance(m, Own) or super().is_leaf_module(m, module_qualified_name)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Make a node."""
        node = super().create_node(*args, **kwargs)
        node.meta["gradients"] = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        return node


def _traced(module: nn.Module, examples: tuple[Tensor, ...]) -> _Traced:
    """A module that is traced; `module` stays as it is. Raises UsageError where no tracer can, Unsupported for a training that has other nodes."""
    name, copied = type(module).__name__, copy.deepcopy(module).to("cpu", torch.float32)
    # Whoever trains a network with a part in evaluation mode means that part to stay there.
    stays = {at for at, each in module.named_modules() if module.training and not each.training}
    copied.train()
    stays |= {at for at, each in copied.named_modules() if not each.training}
    trains = frozenset(at for at, _ in copied.named_modules() if at not in stays)
    parameters = {key_of(each): Held(at, each, each.requires_grad) for at, each in copied.named_parameters()}
    tensors = {key_of(each): Held(at, each, False) for at, each in copied.named_buffers()} | parameters
    made: list[fx.GraphModule] = []
    export = False
    with torch.enable_grad():
        for training in (False, True):
            for at, each in copied.named_modules():
                each.training = training and at in trains
            if not export:
                try:
                    made.append(fx.GraphModule(copied, _Tracer().trace(copied), name))
                    continue
                except Exception as error:  # whatever the module's own code raises on symbolic values
                    reason, export = _first_line(error), True
                    if training:
                        made = [_exported(copied.eval(), examples, name, reason)]
                        for at, each in copied.named_modules():
                            each.training = at in trains
            made.append(_exported(copied, examples, name, reason))
        copied.eval()
    return _Traced(made[0], tensors, trains, frozenset(_differing(made[0], made[1], name)))


def _exported(module: nn.Module, examples: tuple[Tensor, ...], name: str, reason: str) -> fx.GraphModule:
    # Norms refuse to train on one example.
    twice = tuple(torch.cat([each, each]) if len(each) == 1 and module.training else each for each in examples)
    try:
        made: fx.GraphModule = torch.export.export(module, twice).module()
    except Exception as error:
        raise UsageError(f"{name} cannot be traced: torch.fx says: {reason}; torch.export says: {_first_line(error)}") from None
    return made


def _steps(traced: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes that lead to an output, in order, and inputs; counters of batches are none."""
    used = set[fx.Node]()
    for node in reversed(traced.graph.nodes):
        if node.op in ("output", "placeholder") or node in used:
            used.update(node.all_input_nodes, [node])
    return iter([node for node in traced.graph.nodes if node in used])


def _differing(evaluation: fx.GraphModule, training: fx.GraphModule, name: str) -> Iterator[fx.Node]:
    """The nodes that have other numbers in training. Raises Unsupported where there are other nodes."""
    one, other = list(_steps(evaluation)), list(_steps(training))
    number = [{node: at for at, node in enumerate(each)} for each in (one, other)]

    def written(node: fx.Node, which: int) -> tuple[Any, Any]:
        given = fx.node.map_arg((node.args, node.kwargs), lambda each: f"value {number[which][each]}")
        return (node.op, node.target if isinstance(node.target, str) else str(node.target)), given

    for a, b in zip(one, other, strict=False):
        (kind, given), (kind_b, given_b) = written(a, 0), written(b, 1)
        if kind != kind_b and not (a.op == b.op == "get_attr" and _equal(_attribute(evaluation, a), _attribute(training, b))):
            raise _other_training(name, a, b)
        if given != given_b:
            yield a
    if len(one) != len(other):
        raise _other_training(name, one[-1], other[-1])


def _attribute(traced: fx.GraphModule, node: fx.Node) -> Any:
    """What a node of a module's attribute gives."""
    held: Any = traced
    for part in str(node.target).split("."):
        held = getattr(held, part)
    return held


def _equal(one: Any, other: Any) -> bool:
    """Whether two tensors that were made while the module was traced, once for each trace, are the same."""
    return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)


def _other_training(name: str, evaluation: fx.Node, training: fx.Node) -> Unsupported:
    said = f"{evaluation.name} in evaluation, {training.name} in training"
    return Unsupported(f"{name} computes something else in training than in evaluation, and a network is one graph for both", [said])


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class _Shapes(fx.Interpreter):
    """Runs a graph and keeps of every node what it made, of tensors the shape; and tensors that no example changes as they are."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.made: dict[fx.Node, Any] = {}
        self.constants: dict[fx.Node, Any] = {}
        self._changing = set[fx.Node]()

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        result = super().run_node(n)
        self.made[n] = _noted(result)
        if n.op == "placeholder" or any(each in self._changing for each in n.all_input_nodes):
            self._changing.add(n)
        else:
            self.constants[n] = result
        return result


class _Shape(tuple[int, ...]):
    """The shape of a tensor, which a tuple of the module's own numbers is not; `dtype` is its type."""

    dtype: Any = torch.float32


def _noted(result: Any) -> Any:
    """The result of a node with the shape in the place of every tensor."""
    if isinstance(result, Tensor):
        shape = _Shape(int(n) for n in result.shape)
        shape.dtype = result.dtype
        return shape
    return tuple(map(_noted, result)) if isinstance(result, tuple | list) else result


def _stand_in(shape: Any) -> Any:
    """Values of the shapes that a node without a counterpart makes: what comes after it is read on, so that it is named too."""
    if isinstance(shape, _Shape):
        dims = tuple(shape[1:])
        return Val(Value(natural(dims) if dims else (1,)), dims)
    return tuple(map(_stand_in, shape)) if isinstance(shape, tuple) else shape


class _Reading:
    """A traced module that is read node by node into values of layers, with the layers' names and weights."""

    def __init__(self, name: str, traced: _Traced, examples: tuple[Tensor, ...]) -> None:
        self.name, self.traced, self._trace = name, traced.graph, traced
        self._problems: list[tuple[str, str, str]] = []
        self._left = set[fx.Node]()
        nodes = self.traced.graph.nodes
        self._order = {node: at for at, node in enumerate(nodes)}
        taken = [node for node in nodes if node.op == "placeholder"]
        if len(taken) != len(examples):
            raise UsageError(f"{name} takes {len(taken)} inputs, and there are {len(examples)} examples: give a tuple with one for each")
        shapes = _Shapes(self.traced)
        try:
            with torch.no_grad():
                shapes.run(*examples)
        except Exception as error:  # of the module's own code
            raise UsageError(f"{name} does not run on the example: {_first_line(error)}") from None
        self._shapes, self._constants, self._batch = shapes.made, shapes.constants, len(examples[0])
        frozen = {held.name for held in traced.tensors.values() if not held.trained}
        self._frozen = frozen
        self.sheet = Sheet(frozen=frozen, apart=apart(self._reads()), numbers=None)
        self._inputs = [Input(natural(tuple(each.shape[1:]))) for each in examples]
        self._env: dict[fx.Node, Any] = {
            node: Val(value, tuple(each.shape[1:])) for node, value, each in zip(taken, self._inputs, examples, strict=True)
        }
        self._outputs: Any = None
        for node in nodes:
            if node.op == "output":
                self._outputs = fx.node.map_arg(node.args[0], lambda each: self._operand(each, True))
            elif node.op != "placeholder":
                self._env[node] = self._read(node)

    def graph(self) -> Graph:
        """The graph, with names. Raises Unsupported if a node has no counterpart."""
        outputs = list(self._outputs) if isinstance(self._outputs, tuple | list) else [self._outputs]
        if not all(isinstance(each, Val) for each in outputs):
            self._problems.append(("output", type(self._outputs).__name__, "a network gives a tensor or a tuple of tensors"))
        if self._problems:
            count = f"{len(self._problems)} parts" if len(self._problems) > 1 else "one part"
            raise Unsupported(f"nbcnn has no counterpart of {count} of {self.name}", grouped(self._problems))
        made = Graph.of(self._inputs, [self.sheet.final(each) for each in outputs])
        return replace(made, called=self.sheet.called(made.layers))

    # -- nodes

    def _held(self, tensor: Tensor, name: str) -> Held:
        """A tensor of the module under the module's own name for it."""
        known = self._trace.tensors.get(key_of(tensor))
        if known is None:
            if tensor.grad_fn is not None:
                raise Refused("it was computed of tensors that are trained while the module was traced, and training would not reach them")
            self._frozen.add(name)
            return Held(name, tensor, False)
        return known

    def _reads(self) -> Iterator[tuple[str, list[str]]]:
        """For each node its op and the names of the tensors that it takes."""
        for node in self.traced.graph.nodes:
            if node.op == "call_module":
                module = self.traced.get_submodule(str(node.target))
                found = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
                yield type(module).__name__, [self._trace.tensors[key_of(each)].name for each in found if key_of(each) in self._trace.tensors]
            elif node.op in ("call_function", "call_method"):
                given = [self._constants.get(each) for each in node.all_input_nodes if each.op == "get_attr"]
                keys = [key_of(each) for each in given if isinstance(each, Tensor)]
                yield _name_of(node), [self._trace.tensors[key].name for key in keys if key in self._trace.tensors]

    def _operand(self, node: fx.Node, gradients: bool) -> Any:
        """What a node made, for one that gradients pass through: detached if they do not pass through the node itself."""
        made = self._env[node]
        if not gradients or node.meta.get("gradients", True) or node.op == "placeholder":
            return made
        if isinstance(made, Val):
            return self.sheet.alike(Detach(), made)
        return tuple(self.sheet.alike(Detach(), each) for each in made) if _all_values(made) else made

    def _read(self, node: fx.Node) -> Any:
        """What a node makes: a value of layers, a tensor that the module holds, or a number of Python's."""
        shape = self._shapes[node]
        if node.op == "get_attr":
            held = self._constants[node]
            try:
                return self._held(held, str(node.target)) if isinstance(held, Tensor) else held
            except Refused as error:
                self._problems.append((", ".join(each.name for each in node.users), "tensor", str(error)))
                self._left.add(node)
                return _stand_in(shape)
        if not _tensors(shape):
            return shape
        module = self.traced.get_submodule(str(node.target)) if node.op == "call_module" else None
        what = type(module).__name__ if module is not None else _name_of(node)
        place = str(node.target) if module is not None else node.name
        self.sheet.node, self.sheet.number = place, self._order[node]
        gradients = node.meta.get("gradients", True)
        args, kwargs = (fx.node.map_arg(given, lambda each: self._operand(each, gradients)) for given in (node.args, node.kwargs))
        batch = self._batch_of(node)
        try:
            if node in self._constants:
                return self._constant(node)
            handler = _handler(module, what)
            if self._changes_what_is_read(node, module):
                raise Refused("it changes in place what another part reads afterwards")
            for each in _tensors(shape):
                if each[:1] != (batch,):
                    raise Refused(f"it makes {tuple(each)} of a batch of {batch}, which is no batch")
                if each.dtype != torch.float32:
                    raise Refused(f"it makes {each.dtype}")
            made = self._made(node, module, handler, shape, args, kwargs)
        except (Refused, UsageError, ValueError, TypeError) as error:
            if batch is not None or isinstance(error, _Unknown | BothComputed):
                where = error.beside(place) if isinstance(error, Refused) else place
                self._problems.append((where, what, "" if isinstance(error, _Unknown) else str(error)))
            self._left.add(node)
            made = self._constants.get(node)
            # What reads a constant is read on, with the constant as the example has it.
            return Held(node.name, made.detach(), False) if isinstance(made, Tensor) else _stand_in(shape)
        if self._left.intersection(node.all_input_nodes):
            self._left.add(node)
        return made

    def _batch_of(self, node: fx.Node) -> int | None:
        """The length of the first axis of what a node reads. It is that of the batch, but behind what is missing: windows of images, say, that a part
        without a counterpart put beside the examples. None where operands differ in it, so that nothing can be said of the node."""
        if not self._left.intersection(node.all_input_nodes):
            return self._batch
        reads = [self._shapes[each] for each in node.all_input_nodes if each not in self._constants]
        found = {each[:1] for shape in reads for each in _tensors(shape)}
        return found.pop()[0] if len(found) == 1 and () not in found else None

    def _made(self, node: fx.Node, module: nn.Module | None, handler: Any, shape: Any, args: Any, kwargs: Any) -> Any:
        """What the handler of a node makes, of the shapes that PyTorch made."""
        trains = str(node.target) in self._trace.trains if module is not None else None
        differs = node in self._trace.differs
        if differs and _name_of(node) not in FLAGGED:
            raise Refused("it has other numbers in training than in evaluation")
        dims = tuple(shape[1:]) if isinstance(shape, _Shape) else ()
        call = Call(self.sheet, node, dims, module, self._trace.tensors, trains, differs)
        if module is not None and (module._forward_hooks or module._forward_pre_hooks):
            raise Refused("it has hooks, which a network does not run: remove them first")
        made = handler(call, *args, **kwargs) if module is None else handler(call, module, *args, **kwargs)
        wanted = [tuple(each[1:]) for each in _tensors(shape)]
        found = [each.dims for each in (made if isinstance(made, tuple | list) else [made])]
        if wanted != found:
            raise Refused(f"it makes {wanted} of an example, and layers {found}")
        return made

    def _constant(self, node: fx.Node) -> Any:
        """A tensor that no example changes. Raises Refused if the module trains what it is made of."""
        waiting, seen = [node], set[fx.Node]()
        while waiting:
            each = waiting.pop()
            held = self._env.get(each)
            if isinstance(held, Held) and held.trained:
                raise Refused("it computes with a tensor that is trained, before a layer takes it", held.name)
            if each not in seen:
                seen.add(each)
                waiting += each.all_input_nodes
        made = self._constants[node]
        return self._held(made, node.name) if isinstance(made, Tensor) else made

    def _changes_what_is_read(self, node: fx.Node, module: nn.Module | None) -> bool:
        """Whether a node writes over a value that a later one reads."""
        name = _raw_name(node)
        if module is not None:
            inplace = bool(getattr(module, "inplace", False))
        else:
            inplace = name.endswith("_") or name in _INPLACE or bool(node.kwargs.get("inplace"))
        source = node.args[0] if inplace and node.args else None
        return isinstance(source, fx.Node) and any(self._order[user] > self._order[node] for user in source.users if user is not node)


class _Unknown(Refused):
    """There is no handler."""

    def __init__(self) -> None:
        super().__init__("")


def _handler(module: nn.Module | None, what: str) -> Any:
    """What reads a module, or the function called `what`. Raises _Unknown if nothing does."""
    found = FUNCTIONS.get(what) if module is None else next((MODULES[kind] for kind in type(module).__mro__ if kind in MODULES), None)
    if found is None:
        raise _Unknown
    return found


def _all_values(made: Any) -> bool:
    return isinstance(made, tuple) and all(isinstance(each, Val) for each in made)


def _tensors(shape: Any) -> list[_Shape]:
    """The shapes of the tensors among what a node makes."""
    if isinstance(shape, _Shape):
        return [shape]
    return [each for part in shape for each in _tensors(part)] if isinstance(shape, tuple) else []


_INPLACE = {"iadd": "add", "imul": "mul", "isub": "sub", "itruediv": "div", "ior": ""}


def _raw_name(node: fx.Node) -> str:
    """The name of a function, method or ATen op."""
    target: Any = node.target
    if isinstance(target, str):
        return target
    if schema := getattr(target, "_schema", None):
        return str(schema.name.split("::")[-1])
    return str(getattr(target, "__name__", target))


def _name_of(node: fx.Node) -> str:
    """The name under which `FUNCTIONS` has it: that of the form that works in place is the other one's."""
    name = _raw_name(node)
    return _INPLACE.get(name) or (name.rstrip("_") if not name.startswith("_") else name)
