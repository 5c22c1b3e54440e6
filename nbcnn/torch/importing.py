"""This module reads a torch.nn.Module as a graph of layers with its weights.

The module is traced by torch.fx, or by torch.export where its Python decides by values, and run once on the example, so that the shape of every value
is known. Then every node becomes a layer: a module by its class (`modules.MODULES`), a function, method or ATen op by its name
(`functions.FUNCTIONS`), whose handler has PyTorch's own parameters. What has no handler, and what one refuses, is collected, and all of it is named
in one error.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from nbcnn.datasets.arrays import Form, Forms
from nbcnn.files.errors import UsageError
from nbcnn.model.network import Model
from nbcnn.nn.graphs import Graph, Input, Value
from nbcnn.torch import Unsupported
from nbcnn.torch.calls import Call, Held, Layers, Refused
from nbcnn.torch.functions import FUNCTIONS
from nbcnn.torch.modules import MODULES


def imported(module: Any, example: Any, *, loss: Any, mode: str, precision: str | None, **options: Any) -> Model:
    """See `nbcnn.torch.from_module`."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"from_module takes a torch.nn.Module, got {type(module).__name__}")
    examples = tuple(example) if isinstance(example, tuple | list) else (example,)
    for each in examples:
        if not isinstance(each, Tensor) or each.ndim not in (2, 4) or not each.numel():
            what = tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__
            raise UsageError(f"the example must be a tensor (N, C, H, W) or (N, F), or a tuple of them, one for each input, got {what}")
    copied, name = copy.deepcopy(module).to("cpu", torch.float32).eval(), type(module).__name__
    examples = tuple(each.detach().to("cpu", torch.float32) for each in examples)
    reading = _Reading(name, _traced(copied, examples, name), examples)
    graph = reading.graph()
    model = Model(graph, loss=loss, mode=mode, precision=precision, **options)
    model.net.params.load_dict({name: np.ascontiguousarray(array, np.float32) for name, array in reading.weights.items()})
    forms = tuple(Form(shape, scale=(0.0, 1.0)) for shape in graph.inputs)
    model.learn(forms[0] if len(forms) == 1 else Forms(forms))
    return model


def _traced(module: nn.Module, examples: tuple[Tensor, ...], name: str) -> fx.GraphModule:
    """The module as a graph. Raises UsageError, with the reasons of both tracers, where neither can."""
    try:
        return fx.symbolic_trace(module)
    except Exception as error:  # whatever the module's own code raises on symbolic values
        reason = _first_line(error)
    try:
        made: fx.GraphModule = torch.export.export(module, examples).module()
    except Exception as error:
        raise UsageError(f"{name} cannot be traced: torch.fx says: {reason}; torch.export says: {_first_line(error)}") from None
    return made


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class _Shapes(fx.Interpreter):
    """Runs a graph and keeps of every node what it made, of tensors the shape."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.made: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        result = super().run_node(n)
        self.made[n] = _noted(result)
        return result


class _Shape(tuple[int, ...]):
    """The shape of a tensor, which a tuple of the module's own numbers is not."""


def _noted(result: Any) -> Any:
    """The result of a node with the shape in the place of every tensor."""
    if isinstance(result, Tensor):
        return _Shape(int(n) for n in result.shape)
    return tuple(map(_noted, result)) if isinstance(result, tuple | list) else result


def _stand_in(shape: Any) -> Any:
    """Values of the shapes that a node without a counterpart makes: what comes after it is read on, so that it is named too."""
    if isinstance(shape, _Shape):
        return Value(tuple(shape[1:]))
    return tuple(map(_stand_in, shape)) if isinstance(shape, tuple) else shape


class _Reading:
    """A traced module that is read node by node into values of layers, with the layers' names and weights."""

    def __init__(self, name: str, traced: fx.GraphModule, examples: tuple[Tensor, ...]) -> None:
        self.name, self.traced = name, traced
        self.problems: list[str] = []
        self.weights: dict[str, np.ndarray] = {}
        self._layers = Layers(set(dict(traced.named_modules())))
        self._order = {node: at for at, node in enumerate(traced.graph.nodes)}
        taken = [node for node in traced.graph.nodes if node.op == "placeholder"]
        if len(taken) != len(examples):
            raise UsageError(f"{name} takes {len(taken)} inputs, and there are {len(examples)} examples: give a tuple with one for each")
        shapes = _Shapes(traced)
        try:
            with torch.no_grad():
                shapes.run(*examples)
        except Exception as error:  # of the module's own code
            raise UsageError(f"{name} does not run on the example: {_first_line(error)}") from None
        self._shapes, self._batch = shapes.made, len(examples[0])
        self._inputs = [Input(tuple(each.shape[1:])) for each in examples]
        self._env: dict[fx.Node, Any] = dict(zip(taken, self._inputs, strict=True))
        self._outputs: Any = None
        for node in traced.graph.nodes:
            if node.op == "output":
                self._outputs = fx.node.map_arg(node.args[0], lambda each: self._env[each])
            elif node.op != "placeholder":
                self._env[node] = self._read(node)

    def graph(self) -> Graph:
        """The graph, with names. Raises Unsupported if a node has no counterpart."""
        outputs = list(self._outputs) if isinstance(self._outputs, tuple | list) else [self._outputs]
        if not all(isinstance(each, Value) for each in outputs):
            self.problems.append(f"output: {type(self._outputs).__name__} (a network gives a tensor or a tuple of tensors)")
        if self.problems:
            count = f"{len(self.problems)} parts" if len(self.problems) > 1 else "one part"
            raise Unsupported(f"nbcnn has no counterpart of {count} of {self.name}", self.problems)
        made = Graph.of(self._inputs, outputs)
        named = replace(made, called=tuple(self._layers.name(layer) for layer in made.layers))
        wanted = {f"{name}." for name in named.called}
        self.weights = {name: values for name, values in self._layers.weights.items() if name[: name.rindex(".") + 1] in wanted}
        return named

    # -- nodes

    def _read(self, node: fx.Node) -> Any:
        """What a node makes: a value of layers, a tensor that the module holds, or a number of Python's."""
        if node.op == "get_attr":
            held: Any = self.traced
            for part in str(node.target).split("."):
                held = getattr(held, part)
            return Held(str(node.target), held) if isinstance(held, Tensor) else held
        shape = self._shapes[node]
        if not _has_tensors(shape):
            return shape
        args, kwargs = (fx.node.map_arg(given, lambda each: self._env[each]) for given in (node.args, node.kwargs))
        module = self.traced.get_submodule(str(node.target)) if node.op == "call_module" else None
        what = type(module).__name__ if module is not None else _name_of(node)
        try:
            if self._changes_what_is_read(node, module):
                raise Refused("it changes in place what another part reads afterwards")
            if not isinstance(shape, _Shape):
                raise Refused("it makes several tensors")
            if shape[:1] != (self._batch,):
                raise Refused(f"it makes {tuple(shape)} of a batch of {self._batch}, which is no batch")
            call = Call(self._layers, node, tuple(shape[1:]), module)
            if module is None:
                handler = FUNCTIONS.get(what)
                if handler is None:
                    raise Refused("")
                return handler(call, *args, **kwargs)
            known = next((MODULES[kind] for kind in type(module).__mro__ if kind in MODULES), None)
            if known is None:
                raise Refused("")
            return known(call, module, *args, **kwargs)
        except (Refused, ValueError, TypeError) as error:
            place = str(node.target) if module is not None else node.name
            self.problems.append(f"{place}: {what}" + (f" ({error})" if str(error) else ""))
            return _stand_in(shape)

    def _changes_what_is_read(self, node: fx.Node, module: nn.Module | None) -> bool:
        """Whether a node writes over a value that a later one reads."""
        name = _raw_name(node)
        if module is not None:
            inplace = bool(getattr(module, "inplace", False))
        else:
            inplace = name.endswith("_") or name in _INPLACE or bool(node.kwargs.get("inplace"))
        source = node.args[0] if inplace and node.args else None
        return isinstance(source, fx.Node) and any(self._order[user] > self._order[node] for user in source.users if user is not node)


def _has_tensors(shape: Any) -> bool:
    return isinstance(shape, _Shape) or (isinstance(shape, tuple) and any(map(_has_tensors, shape)))


_INPLACE = {"iadd": "add", "imul": "mul", "ior": "", "isub": ""}


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
