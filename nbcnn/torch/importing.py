"""This module reads a torch.nn.Module as a graph of layers with its weights.

The module is traced by torch.fx, or by torch.export where its Python decides by values, and run once on the example, so that the shape of every value
is known. Then every node becomes a layer: a module by its class (`MODULES`), a function, method or ATen op by its name (`FUNCTIONS`), whose handler
has PyTorch's own parameters. What has no handler, and what one refuses, is collected, and all of it is named in one error.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from nbcnn.datasets.arrays import Form, Forms
from nbcnn.files.errors import UsageError
from nbcnn.model.network import Model
from nbcnn.nn.activations import ELU, GELU, HardSwish, LeakyReLU, PReLU, ReLU, ReLU6, Sigmoid, Softmax, Swish, Tanh
from nbcnn.nn.corruption import Dropout
from nbcnn.nn.graphs import Graph, Input, Value
from nbcnn.nn.joins import Add, Concat, Mul, Pad, Reshape
from nbcnn.nn.layers import Conv2d, ConvTranspose2d, Flatten, Linear
from nbcnn.nn.norms import BatchNorm2d, GroupNorm, InstanceNorm2d, LayerNorm
from nbcnn.nn.resampling import AvgPool2d, GlobalAvgPool2d, MaxPool2d, Resize, Upsample2d
from nbcnn.torch import Unsupported
from nbcnn.torch.weights import array


class Refused(Exception):
    """A node has no counterpart as it is called; the message says why."""


@dataclass(frozen=True)
class Held:
    """A tensor of the module, and its name there."""

    name: str
    tensor: Tensor


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
        self.weights: dict[str, np.ndarray] = {}
        self.problems: list[str] = []
        self._names: dict[int, str] = {}
        self._layers: dict[str, Any] = {}
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
        named = replace(made, called=tuple(self._names[id(layer)] for layer in made.layers))
        wanted = {f"{name}." for name in named.called}
        self.weights = {name: values for name, values in self.weights.items() if name[: name.rindex(".") + 1] in wanted}
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
            call = Call(self, node, tuple(shape[1:]), module)
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

    def named(self, name: str, layer: Any) -> Any:
        """The layer called `name`, which is `layer` unless an equal one has this name already: it is shared then."""
        known = self._layers.setdefault(name, layer)
        if known == layer:
            self._names.setdefault(id(known), name)
            return known
        raise Refused(f"{name} is called in two forms: {known} and {layer}")

    def free(self, name: str) -> str:
        """`name`, or with a number behind it, if a layer or a module has it."""
        modules, made, at = dict(self.traced.named_modules()), name, 1
        while made in self._layers or made in modules:
            at += 1
            made = f"{name}_{at}"
        return made


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


@dataclass(frozen=True)
class Call:
    """One node: the shape of what it makes, without the batch, and what handlers do with it."""

    reading: _Reading
    node: fx.Node
    shape: tuple[int, ...]
    module: nn.Module | None

    def held(self, name: str) -> Held | None:
        """A tensor of the node's module, None if it has none of this name."""
        tensor = getattr(self.module, name)
        return None if tensor is None else Held(f"{self.node.target}.{name}", tensor)

    def make(self, layer: Any, x: Any, own: bool = True) -> Value:
        """The layer called on a value, or a list of them. Of a node that makes several layers `own` is the one that has its name."""
        if self.module is not None and own:
            where = str(self.node.target)
        else:
            where = self.reading.free(self.node.name if own else f"{self.node.name}_{layer.kind}")
        return self.reading.named(where, layer)(_values(x))

    def make_of(self, layer: Any, x: Any, **tensors: Held | None) -> Value:
        """The layer with weights called on a value; it has the name of the part of the module that holds its weight."""
        weight = next(each for each in tensors.values() if each is not None)
        home = weight.name.rpartition(".")[0]
        name = home or self.reading.free(self.node.name)
        made = self.reading.named(name, layer)
        for key, held in tensors.items():
            if held is not None:
                self.reading.weights[f"{name}.{key}"] = array(held.tensor, held.name)
        return made(_values(x))


def _values(x: Any) -> Any:
    """Values that a layer is called on. Raises Refused for tensors of the module and for numbers."""
    for each in x if isinstance(x, list) else [x]:
        if not isinstance(each, Value):
            raise Refused(f"an operand is {'a tensor of the module' if isinstance(each, Held) else repr(each)}, and layers are called on values")
    return x


def _image(x: Any) -> tuple[int, int, int]:
    """The shape (C, H, W) of a value that is an image."""
    if len(_values(x).shape) != 3:
        raise Refused(f"of {x.shape}, which is no image")
    channels, height, width = x.shape
    return channels, height, width


def _two(given: Any) -> tuple[int, int]:
    """Two numbers of one, or of two."""
    made = tuple(int(n) for n in given) if isinstance(given, Sequence) else (int(given),)
    return (made * 2)[:2] if len(made) == 1 else (made[0], made[1])


def _one(given: Any, what: str) -> int:
    """One number of equal ones."""
    a, b = _two(given)
    if a != b:
        raise Refused(f"a {what} of {a} and {b}")
    return a


def _held(given: Any, what: str) -> Held:
    if not isinstance(given, Held):
        raise Refused(f"its {what} is no tensor of the module")
    return given


# -- layers with weights


def conv2d(c: Call, input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Value:
    held = _held(weight, "weight")
    if held.tensor.ndim != 4:
        raise Refused(f"a convolution whose weight has {held.tensor.ndim} axes")
    k, channels, r, s = held.tensor.shape
    down, across = _two(dilation)
    if padding == "same":
        rows, columns = down * (r - 1), across * (s - 1)
        sides: Any = (rows // 2, rows - rows // 2, columns // 2, columns - columns // 2)
    else:
        sides = 0 if padding == "valid" else _two(padding)
    window, sizes = (r, s) if r != s else r, {"dilation": (down, across), "groups": groups, "in_channels": channels * groups}
    made = Conv2d(k, window, _two(stride), sides, bias is not None, **sizes)
    return c.make_of(made, input, weight=held, bias=bias)


def conv_transpose2d(
    c: Call, input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1
) -> Value:
    held = _held(weight, "weight")
    if groups != 1 or _two(dilation) != (1, 1) or held.tensor.ndim != 4:
        raise Refused("a transposed convolution with groups, with dilation, or of other axes than two")
    channels, k, r, s = held.tensor.shape
    numbers = (_one(stride, "stride"), _one(padding, "padding"), _one(output_padding, "output_padding"))
    return c.make_of(ConvTranspose2d(k, (r, s) if r != s else r, *numbers, bias is not None, in_channels=channels), input, weight=held, bias=bias)


def linear(c: Call, input: Any, weight: Any, bias: Any = None) -> Value:
    held = _held(weight, "weight")
    if len(_values(input).shape) != 1:
        raise Refused(f"along the last axis of {input.shape}; Linear takes vectors")
    k, features = held.tensor.shape
    return c.make_of(Linear(k, bias is not None, in_features=features), input, weight=held, bias=bias)


def batch_norm(
    c: Call,
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: Any = False,
    momentum: Any = 0.1,
    eps: float = 1e-5,
) -> Value:
    _image(input)
    mean, var = _held(running_mean, "running mean"), _held(running_var, "running variance")
    if momentum is None:
        raise Refused("momentum=None, a cumulative mean")
    channels = len(mean.tensor)
    home = mean.name.rpartition(".")[0]
    scale = weight or Held(f"{home}.weight", torch.ones(channels))
    offset = bias or Held(f"{home}.bias", torch.zeros(channels))
    made = BatchNorm2d(float(eps), float(momentum), channels=channels)
    return c.make_of(made, input, weight=scale, bias=offset, running_mean=mean, running_var=var)


def _aten_batch_norm(
    c: Call, input: Any, weight: Any, bias: Any, mean: Any, var: Any, training: Any, momentum: Any, eps: float, cudnn: Any = None
) -> Value:
    return batch_norm(c, input, mean, var, weight, bias, training, momentum, eps)


def _batch_norm(c: Call, input: Any, *given: Any, **more: Any) -> Value:
    """F.batch_norm and ATen's op have one name and another order."""
    return (_aten_batch_norm if len(given) > 7 else batch_norm)(c, input, *given, **more)


def group_norm(c: Call, input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn: Any = None) -> Value:
    scale, offset = _affine(c, input, weight, bias, _values(input).shape[:1])
    return c.make_of(GroupNorm(int(num_groups), float(eps), channels=input.shape[0]), input, weight=scale, bias=offset)


def layer_norm(c: Call, input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn: Any = None) -> Value:
    shape = tuple(int(n) for n in normalized_shape)
    if shape != _values(input).shape:
        raise Refused(f"over {shape} of {input.shape}; LayerNorm is over the whole example")
    scale, offset = _affine(c, input, weight, bias, shape)
    return c.make_of(LayerNorm(float(eps), normalized_shape=shape), input, weight=scale, bias=offset)


def _affine(c: Call, input: Any, weight: Any, bias: Any, shape: tuple[int, ...]) -> tuple[Held, Held]:
    """Weight and bias, ones and zeros where there are none."""
    home = next((each.name.rpartition(".")[0] for each in (weight, bias) if each), str(c.node.target) if c.module is not None else c.node.name)
    return weight or Held(f"{home}.weight", torch.ones(shape)), bias or Held(f"{home}.bias", torch.zeros(shape))


def instance_norm(
    c: Call,
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    own: Any = True,
    *rest: Any,
    eps: Any = 1e-5,
) -> Value:
    channels, *_ = _image(input)
    if running_mean is not None or running_var is not None:
        raise Refused("track_running_stats=True")
    layer = InstanceNorm2d(float(rest[1] if len(rest) > 1 else eps), weight is not None, channels=channels)
    if weight is None:
        return c.make(layer, input)
    return c.make_of(layer, input, weight=weight, bias=bias or Held(f"{weight.name.rpartition('.')[0]}.bias", torch.zeros(channels)))


def _instance_norm(c: Call, input: Any, *given: Any, **more: Any) -> Value:
    """F.instance_norm and ATen's op have one name and another order."""
    if len(given) > 7:
        weight, bias, mean, var, *rest = given
        return instance_norm(c, input, mean, var, weight, bias, *rest)
    more = {("own" if name == "use_input_stats" else name): value for name, value in more.items() if name != "momentum"}
    return instance_norm(c, input, *given, **more)


def prelu(c: Call, input: Any, weight: Any) -> Value:
    held = _held(weight, "weight")
    return c.make_of(PReLU(held.tensor.numel()), input, weight=held)


# -- layers without


def _plain(kind: Callable[..., Any], *known: str) -> Callable[..., Value]:
    """The handler of an element-wise function; `known` are its parameters, in PyTorch's order, by which `kind` is made."""

    def handler(c: Call, input: Any, *given: Any, inplace: Any = False, **more: Any) -> Value:
        values = dict(zip(known, given, strict=False)) | {name: value for name, value in more.items() if name in known}
        return c.make(kind(**values), input)

    return handler


def softmax(c: Call, input: Any, dim: Any = None, *_: Any, **__: Any) -> Value:
    axes = len(_values(input).shape) + 1
    if dim is None or dim % axes != 1:
        raise Refused(f"along axis {dim}; Softmax is along the channels, axis 1")
    return c.make(Softmax(), input)


def hardtanh(c: Call, input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: Any = False) -> Value:
    if (min_val, max_val) != (0, 6):
        raise Refused(f"between {min_val} and {max_val}; ReLU6 is between 0 and 6")
    return c.make(ReLU6(), input)


def elu(c: Call, input: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0, inplace: Any = False) -> Value:
    if scale not in (1, False) or input_scale != 1:
        raise Refused("with a scale")
    return c.make(ELU(float(alpha)), input)


def dropout(c: Call, input: Any, p: float = 0.5, training: Any = True, inplace: Any = False) -> Value:
    return c.make(Dropout(float(p)), input)


def _pool(kind: Any) -> Callable[..., Value]:
    def made(c: Call, input: Any, kernel_size: Any, stride: Any, padding: Any, **more: Any) -> Value:
        size = _two(kernel_size)
        return c.make(kind(size, _two(stride) if stride not in (None, [], ()) else None, _two(padding), **more), input)

    return made


def max_pool2d(
    c: Call,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Value:
    if _two(dilation) != (1, 1) or return_indices:
        raise Refused("with dilation, or with its indices")
    return _pool(MaxPool2d)(c, input, kernel_size, stride, padding, ceil_mode=bool(ceil_mode))


def avg_pool2d(
    c: Call,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: Any = None,
) -> Value:
    if divisor_override is not None:
        raise Refused("divisor_override")
    return _pool(AvgPool2d)(c, input, kernel_size, stride, padding, ceil_mode=bool(ceil_mode), count_include_pad=bool(count_include_pad))


def _adaptive(kind: Any) -> Callable[..., Value]:
    def handler(c: Call, input: Any, output_size: Any, return_indices: bool = False) -> Value:
        channels, height, width = _image(input)
        rows, columns = c.shape[1:]
        if height % rows or width % columns or return_indices:
            raise Refused(f"{height}×{width} to {rows}×{columns}, whose windows differ in size")
        if (rows, columns) == (1, 1) and kind is AvgPool2d:
            return c.make(Reshape((channels, 1, 1)), c.make(GlobalAvgPool2d(), input), own=False)
        return c.make(kind((height // rows, width // columns)), input)

    return handler


def mean(c: Call, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    axes = len(_values(input).shape) + 1
    found = sorted(each % axes for each in (dim if isinstance(dim, Sequence) else [-1 if dim is None else dim]))
    if axes != 4 or found != [2, 3]:
        raise Refused(f"over axes {dim}; GlobalAvgPool2d is the mean of rows and columns")
    made = c.make(GlobalAvgPool2d(), input)
    return c.make(Reshape((*made.shape, 1, 1)), made, own=False) if keepdim else made


def reshaped(c: Call, input: Any, *_: Any, **__: Any) -> Value:
    """Every way to give an example another shape without moving its elements: the shape is known from the example."""
    x, shape = _values(input), c.shape
    if x.shape == shape:
        return x
    if isinstance(x.layer, Reshape) and x.reads[0].shape == shape:
        return x.reads[0]
    if len(shape) not in (1, 3):
        raise Refused(f"an example becomes {shape}; it must be (F,) or (C, H, W)")
    return c.make(Flatten() if len(shape) == 1 and len(x.shape) == 3 else Reshape(shape), x)


def same(c: Call, input: Any, *_: Any, **__: Any) -> Value:
    """What changes nothing that layers see."""
    return _values(input)


def add(c: Call, input: Any, other: Any, *, alpha: Any = 1) -> Value:
    if alpha != 1:
        raise Refused(f"alpha={alpha}")
    return c.make(Add(), [input, other])


def mul(c: Call, input: Any, other: Any) -> Value:
    return c.make(Mul(), [input, other])


def cat(c: Call, tensors: Any, dim: Any = 0) -> Value:
    values = list(tensors)
    if dim % (len(_values(values)[0].shape) + 1) != 1:
        raise Refused(f"along axis {dim}; Concat is along the channels, axis 1")
    return c.make(Concat(), values)


def pad(c: Call, input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Value:
    sides = [int(n) for n in pad]
    if mode != "constant" or len(sides) not in (2, 4):
        raise Refused(f"mode {mode!r} of {len(sides) // 2} axes; Pad is constant, of rows and columns")
    left, right, top, bottom = [*sides, 0, 0][:4]
    return c.make(Pad((top, bottom, left, right), float(value or 0)), input)


def interpolate(
    c: Call, input: Any, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: Any = None, *_: Any, **__: Any
) -> Value:
    height, width = _image(input)[1:]
    rows, columns = c.shape[1:]
    if rows % height or columns % width or align_corners:
        raise Refused(f"{height}×{width} to {rows}×{columns}{', aligned at corners' if align_corners else ''}; Resize is by whole numbers")
    factors = (rows // height, columns // width)
    if mode in ("nearest", "nearest-exact"):
        return c.make(Upsample2d(factors[0]) if factors[0] == factors[1] else Resize(factors), input)
    if mode != "bilinear":
        raise Refused(f"mode {mode!r}")
    return c.make(Resize(factors[0] if factors[0] == factors[1] else factors, "bilinear"), input)


def _upsample(mode: str) -> Callable[..., Value]:
    """ATen's op of one mode, whose parameters have another order."""

    def handler(c: Call, input: Any, output_size: Any = None, *given: Any, **__: Any) -> Value:
        corners = bool(given[0]) if mode == "bilinear" and given else False
        return interpolate(c, input, mode=mode, align_corners=corners)

    return handler


FUNCTIONS: dict[str, Callable[..., Value]] = {
    "conv2d": conv2d,
    "conv_transpose2d": conv_transpose2d,
    "linear": linear,
    "batch_norm": _batch_norm,
    "group_norm": group_norm,
    "layer_norm": layer_norm,
    "instance_norm": _instance_norm,
    "prelu": prelu,
    "relu": _plain(ReLU),
    "relu6": _plain(ReLU6),
    "leaky_relu": _plain(LeakyReLU, "negative_slope"),
    "elu": elu,
    "gelu": _plain(GELU, "approximate"),
    "silu": _plain(Swish),
    "hardswish": _plain(HardSwish),
    "hardtanh": hardtanh,
    "sigmoid": _plain(Sigmoid),
    "tanh": _plain(Tanh),
    "softmax": softmax,
    "dropout": dropout,
    "max_pool2d": max_pool2d,
    "avg_pool2d": avg_pool2d,
    "adaptive_avg_pool2d": _adaptive(AvgPool2d),
    "adaptive_max_pool2d": _adaptive(MaxPool2d),
    "mean": mean,
    **dict.fromkeys(("flatten", "view", "reshape", "squeeze", "unsqueeze", "unflatten"), reshaped),
    **dict.fromkeys(("contiguous", "clone", "detach", "alias", "float"), same),
    "add": add,
    "mul": mul,
    "multiply": mul,
    **dict.fromkeys(("cat", "concat", "concatenate"), cat),
    "pad": pad,
    "constant_pad_nd": lambda c, input, sides, value=0: pad(c, input, sides, "constant", value),
    "interpolate": interpolate,
    "upsample_nearest2d": _upsample("nearest"),
    "upsample_bilinear2d": _upsample("bilinear"),
    operator.getitem.__name__: lambda c, input, at: _values(input[at] if isinstance(input, tuple | list) else None),
}
"""Functions, methods and ATen ops by name."""


def _conv(c: Call, m: Any, input: Any) -> Value:
    if m.padding_mode != "zeros":
        raise Refused(f"padding_mode={m.padding_mode!r}")
    return conv2d(c, input, c.held("weight"), c.held("bias"), m.stride, m.padding, m.dilation, m.groups)


def _conv_transpose(c: Call, m: Any, input: Any, output_size: Any = None) -> Value:
    if output_size is not None:
        raise Refused("output_size")
    return conv_transpose2d(c, input, c.held("weight"), c.held("bias"), m.stride, m.padding, m.output_padding, m.groups, m.dilation)


def _batch_norm_module(c: Call, m: Any, input: Any) -> Value:
    if not m.track_running_stats:
        raise Refused("track_running_stats=False")
    mean, var, weight, bias = map(c.held, ("running_mean", "running_var", "weight", "bias"))
    return batch_norm(c, input, mean, var, weight, bias, False, m.momentum, m.eps)


def _pad_module(c: Call, m: Any, input: Any) -> Value:
    return pad(c, input, m.padding, "constant", getattr(m, "value", 0))


MODULES: dict[type, Callable[..., Value]] = {
    nn.Conv2d: _conv,
    nn.ConvTranspose2d: _conv_transpose,
    nn.Linear: lambda c, m, x: linear(c, x, c.held("weight"), c.held("bias")),
    nn.BatchNorm2d: _batch_norm_module,
    nn.GroupNorm: lambda c, m, x: group_norm(c, x, m.num_groups, c.held("weight"), c.held("bias"), m.eps),
    nn.InstanceNorm2d: lambda c, m, x: instance_norm(c, x, *map(c.held, ("running_mean", "running_var", "weight", "bias")), eps=m.eps),
    nn.LayerNorm: lambda c, m, x: layer_norm(c, x, m.normalized_shape, c.held("weight"), c.held("bias"), m.eps),
    nn.PReLU: lambda c, m, x: prelu(c, x, c.held("weight")),
    nn.ReLU: lambda c, m, x: c.make(ReLU(), x),
    nn.ReLU6: lambda c, m, x: c.make(ReLU6(), x),
    nn.LeakyReLU: lambda c, m, x: c.make(LeakyReLU(float(m.negative_slope)), x),
    nn.ELU: lambda c, m, x: c.make(ELU(float(m.alpha)), x),
    nn.GELU: lambda c, m, x: c.make(GELU(approximate=m.approximate), x),
    nn.SiLU: lambda c, m, x: c.make(Swish(), x),
    nn.Hardswish: lambda c, m, x: c.make(HardSwish(), x),
    nn.Hardtanh: lambda c, m, x: hardtanh(c, x, m.min_val, m.max_val),
    nn.Sigmoid: lambda c, m, x: c.make(Sigmoid(), x),
    nn.Tanh: lambda c, m, x: c.make(Tanh(), x),
    nn.Softmax: lambda c, m, x: softmax(c, x, m.dim),
    nn.Softmax2d: lambda c, m, x: softmax(c, x, 1),
    nn.Dropout: lambda c, m, x: dropout(c, x, m.p),
    nn.MaxPool2d: lambda c, m, x: max_pool2d(c, x, m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode, m.return_indices),
    nn.AvgPool2d: lambda c, m, x: avg_pool2d(c, x, m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad, m.divisor_override),
    nn.AdaptiveAvgPool2d: lambda c, m, x: _adaptive(AvgPool2d)(c, x, m.output_size),
    nn.AdaptiveMaxPool2d: lambda c, m, x: _adaptive(MaxPool2d)(c, x, m.output_size, m.return_indices),
    nn.Flatten: lambda c, m, x: reshaped(c, x),
    nn.Unflatten: lambda c, m, x: reshaped(c, x),
    nn.Identity: lambda c, m, x: same(c, x),
    nn.ZeroPad2d: _pad_module,
    nn.ConstantPad2d: _pad_module,
    nn.Upsample: lambda c, m, x: interpolate(c, x, mode=m.mode, align_corners=m.align_corners),
}
"""Modules by their class."""
