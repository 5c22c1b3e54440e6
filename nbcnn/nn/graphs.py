"""This module defines graphs of layers: symbolic values that layers are called on, and `Graph`, the calls between inputs and outputs as data.

    x = Input((3, 32, 32))
    y = Conv2d(64, 3, padding=1)(x)          a layer called on a value gives a value
    y = y + ReLU()(y)                        Add; `*` is Mul
    graph = Graph.of(x, y)                   the calls that lead from x to y, in the order in which they were made

A layer object that is called twice is one layer with one set of parameters. A list of layers is the simple form of a graph: whatever plans networks
takes both, through `wired`. Several inputs or outputs are one vector per example outside of the network: `pack` and `unpack` stand at its doors, so
data sets, batches and targets have one array whatever the graph.
"""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.nn.arguments import Arguments
from nbcnn.plan import graph as plan
from nbcnn.plan.graph import Buf, Node, ShapeError, Tape, Wired, chain, joins, named
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

Shape = tuple[int, ...]

_number = itertools.count()


class Layer(Arguments):
    """What a layer inherits to be called on values: `layer(x)`, or `layer([a, b])` of a layer that joins values.

    A custom layer is a frozen dataclass with `kind`, `params()` and `build(tape, x, scope)`. Raises UsageError for what is no value.

    Example:
        >>> import nbcnn
        >>> x = nbcnn.Input((3, 8, 8))
        >>> isinstance(nbcnn.ReLU(), nbcnn.Layer), nbcnn.ReLU()(x).shape
        (True, (3, 8, 8))
    """

    def __call__(self, values: Any, *more: Any) -> Value:
        """The value that the layer makes of a value, or of a list of them. Raises UsageError, which shows the line to write, for several values."""
        if more:
            name = type(self).__name__
            line = f"several values go into a list: {name}()([a, b])" if joins(self) else f"it takes one value: {name}(…)(x)"
            raise UsageError(f"{name} is called on {1 + len(more)} arguments; {line}")
        return _call(self, values)


class Value:
    """A symbolic result: of `Input`, or of a layer called on other values. `shape` is that of one example, without the batch.

    `a + b` is `Add()([a, b])`, `a * b` is `Mul()([a, b])`; with numbers `2 * a + 1`, `a / 2` and `-a` are `Scale`, and `a - b` is `a + -b`.
    """

    __array_ufunc__ = None  # a number of NumPy on the left leaves the result to the methods below

    def __init__(self, shape: Shape, layer: Any = None, reads: tuple[Value, ...] = ()) -> None:
        self.shape, self.layer, self.reads, self.number = shape, layer, reads, next(_number)

    def __add__(self, other: Any) -> Value:
        from nbcnn.nn.joins import Add  # a layer, so it imports this module

        return Add()([self, other]) if isinstance(other, Value) else self._scaled("+", other, shift=other)

    def __mul__(self, other: Any) -> Value:
        from nbcnn.nn.joins import Mul

        return Mul()([self, other]) if isinstance(other, Value) else self._scaled("*", other, factor=other)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Value:
        return self * -1

    def __sub__(self, other: Any) -> Value:
        return self + (-other if isinstance(other, Value) or _is_number(other) else other)

    def __rsub__(self, other: Any) -> Value:
        return -self + other

    def __truediv__(self, other: Any) -> Value:
        if not _is_number(other) or not other:
            raise UsageError(f"a value of a graph is divided by a number other than 0, got {_what(other)}")
        return self * (1 / other)

    def _scaled(self, sign: str, other: Any, factor: Any = 1.0, shift: Any = 0.0) -> Value:
        """factor·self + shift. Raises UsageError for what is no number."""
        from nbcnn.nn.activations import Scale

        if not _is_number(other):
            raise UsageError(f"{sign} joins two values of a graph, or a value and a number, got {_what(other)}")
        return Scale(float(factor), float(shift))(self)

    def __repr__(self) -> str:
        return f"<{type(self.layer).__name__ if self.layer else 'Input'} {'×'.join(map(str, self.shape))}>"


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _what(value: Any) -> str:
    """A wrong operand of a value, in words."""
    if hasattr(value, "build"):
        return f"the layer {type(value).__name__}: call it on a value first, {type(value).__name__}(…)(x)"
    return quoted(value) if isinstance(value, str | bool | numbers.Real | None) else type(value).__name__


def Input(shape: Sequence[int], *args: int) -> Value:
    """An input of a graph; `shape` is that of one example: images (C, H, W) or vectors (F,).

    Raises UsageError for another number of axes, or sizes below 1.

    Example, a convolution with a shortcut around it:
        >>> import nbcnn
        >>> x = nbcnn.Input((3, 8, 8))
        >>> y = x + nbcnn.Conv2d(3, 3, padding=1)(x)
        >>> nbcnn.Model(x, y, mode="cpu")
        <Model [Conv2d, Add], 3×8×8, 84 parameters, cpu fp32>
    """
    if args:
        raise UsageError(f"Input takes the shape as one tuple: Input({(shape, *args)})")
    made = tuple(shape) if isinstance(shape, Sequence) else ()
    if len(made) not in (1, 3) or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in made):
        raise UsageError(f"Input needs the shape of one example, (C, H, W) or (F,), each a whole number of at least 1, got {quoted(shape)}")
    return Value(made)


def _call(layer: Any, given: Any) -> Value:
    """The value of `layer` called on `given`. Raises UsageError or ShapeError, which names the class of the layer."""
    name = type(layer).__name__
    if hasattr(layer, "needs_labels"):
        raise UsageError(f"{name} is a loss, which no value is made of: give it to Model as loss=")
    reads = tuple(given) if isinstance(given, list | tuple) else (given,)
    strange = [each for each in reads if not isinstance(each, Value)]
    if strange or not reads:
        what = type(strange[0]).__name__ if strange else "no value"
        raise UsageError(f"{name} is called on values that begin with nbcnn.Input, got {what}; Model(…).predict computes arrays")
    if joins(layer) != isinstance(given, list | tuple):
        raise UsageError(f"{name} takes {'a list of values, as in ' + name + '()([a, b])' if joins(layer) else 'one value, not a list'}")
    made = _Sizing([each.shape for each in reads]).call(layer, tuple(range(len(reads))), name)
    return Value(made.shape[1:], layer, reads)


class _Sizing:
    """The shapes of a graph's values, one call after the other."""

    def __init__(self, inputs: Sequence[Shape]) -> None:
        self.tape, self.values = Tape(training=False), [Buf(f"input{at}", (1, *shape)) for at, shape in enumerate(inputs, 1)]

    def call(self, layer: Any, reads: Sequence[int], scope: str) -> Buf:
        """The value of one call; the layer's sizes are filled in on the way (`filled`)."""
        read = [self.values[at] for at in reads]
        y, _ = filled(layer, read[0], scope).build(self.tape, read if joins(layer) else read[0], scope)
        self.values.append(y)
        return y


def filled(layer: Any, x: Buf, scope: str) -> Any:
    """`layer` with the size of its input `x`, where that is not known yet. Raises ShapeError for a layer of vectors on images."""
    if hasattr(layer, "sized"):
        return layer.sized(x.shape[1:])
    name = getattr(layer, "size_of_input", None)
    if name is None or getattr(layer, name) is not None:
        return layer
    if name == "in_features" and len(x.shape) != 2:
        raise ShapeError(f"{scope} takes vectors (N, F), got {x.shape}; Flatten makes vectors of images")
    return replace(layer, **{name: x.shape[1:] if name == "image" else x.shape[1]})


@dataclass(frozen=True)
class Graph(Sequence[Any]):
    """Layers and the calls of them between inputs and outputs, as data; as a sequence it is its layers in the order of their first calls, loss last.

    inputs   shapes of one example. Values 0, 1, … are the inputs, then one for each call.
    layers   each layer once.
    calls    (number of the layer, numbers of the values that it reads), in the order of the plan.
    outputs  numbers of values.
    loss     the loss layer that reads the outputs; None for a graph that only predicts.
    called   names of the layers; () takes kind and number (conv1, relu1, …). The second call of conv1 is named conv1@2.

    `Graph.of(inputs, outputs, loss)` makes one of values. It is what a function for `--model` returns, and `Model` takes it in the place of a list.
    Raises UsageError for calls of what is not there.

    Example:
        >>> import nbcnn
        >>> x = nbcnn.Input((3, 8, 8))
        >>> graph = nbcnn.Graph.of(x, x + nbcnn.Conv2d(3, 3, padding=1)(x), nbcnn.MSE())
        >>> graph.names
        ('conv1', 'add1', 'mse1')
    """

    inputs: tuple[Shape, ...]
    layers: tuple[Any, ...]
    calls: tuple[tuple[int, tuple[int, ...]], ...]
    outputs: tuple[int, ...]
    loss: Any = None
    called: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not self.called:
            object.__setattr__(self, "called", tuple(plan.names(list(self.layers))))
        for at, (layer, reads) in enumerate(self.calls):
            known = len(self.inputs) + at
            if not 0 <= layer < len(self.layers) or not reads or not all(0 <= each < known for each in reads):
                raise UsageError(
                    f"call {at + 1} of the graph is of layer {layer} on values {reads}; there are {len(self.layers)} and {known} before it"
                )
            if len(reads) > 1 and not joins(self.layers[layer]):
                raise UsageError(f"call {at + 1} of the graph gives {self.called[layer]} {len(reads)} values, and it takes one")
        count = len(self.inputs) + len(self.calls)
        if not self.inputs or not self.calls or not self.outputs or not all(0 <= each < count for each in self.outputs):
            raise UsageError(f"a graph needs inputs, at least one call of a layer, and outputs among its {count} values, got {self.outputs}")
        needed = self._needed(self.outputs)
        if idle := [at for at in range(count) if at not in needed]:
            what = f"input {idle[0] + 1}" if idle[0] < len(self.inputs) else f"call {idle[0] - len(self.inputs) + 1}"
            raise UsageError(f"{what} of the graph leads to no output: leave it out")
        if set(range(len(self.layers))) != {layer for layer, _ in self.calls}:
            raise UsageError("a layer of the graph is never called: leave it out")

    @classmethod
    def of(cls, inputs: Any, outputs: Any, loss: Any = None) -> Graph:
        """The graph of the calls that lead from `inputs` to `outputs`, a value or a list of values each; `loss` is a loss layer, or its name.

        Raises UsageError where an output depends on an input that is not among them, or an input on nothing.
        """
        ins, outs = (_values(each, what) for each, what in ((inputs, "inputs"), (outputs, "outputs")))
        if any(each.layer is not None for each in ins) or len(set(ins)) < len(ins):
            raise UsageError("inputs must be values of nbcnn.Input, each once")
        found, waiting = set(ins), list(outs)
        while waiting:
            value = waiting.pop()
            if value not in found:
                found.add(value)
                waiting += value.reads
                if value.layer is None:
                    raise UsageError(f"an output depends on {quoted(value)}, which is not among the inputs")
        made = sorted((each for each in found if each.layer is not None), key=lambda each: each.number)
        at = {value: number for number, value in enumerate((*ins, *made))}
        layers: dict[int, tuple[int, Any]] = {}
        for value in made:
            layers.setdefault(id(value.layer), (len(layers), value.layer))
        calls = tuple((layers[id(value.layer)][0], tuple(at[each] for each in value.reads)) for value in made)
        shapes = tuple(each.shape for each in ins)
        graph = cls(shapes, tuple(layer for _, layer in layers.values()), calls, tuple(at[each] for each in outs))
        if loss is None:
            return graph
        from nbcnn.nn.joins import losses_of  # a loss is a layer, so it imports this module

        return graph.with_loss(losses_of(loss, len(outs)))

    # -- as a sequence of layers

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the layers, then that of the loss."""
        return (*self.called, *(f"{self.loss.kind}1" for _ in range(self.loss is not None)))

    def __len__(self) -> int:
        return len(self.layers) + (self.loss is not None)

    @overload
    def __getitem__(self, at: int) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> Any: ...
    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            raise TypeError("a part of a graph's layers is no network: `body` is the graph without its loss, `cut` what leads to a layer")
        # Without a tuple of all of them: whoever looks at the last layer once per layer would take time that grows with their square.
        if self.loss is not None and at in (-1, len(self.layers)):
            return self.loss
        return self.layers[at + 1 if at < 0 and self.loss is not None else at]

    # -- what is made of it

    @property
    def input_shape(self) -> Shape:
        """The shape of an example as the network takes it: that of the one input, or the vector of all of them."""
        return packed_shape(self.inputs)

    @property
    def body(self) -> Graph:
        """The graph without its loss."""
        return replace(self, loss=None)

    def with_loss(self, loss: Any) -> Graph:
        """The graph with this loss."""
        return replace(self, loss=loss)

    def sized(self, shape: Shape | None = None) -> Graph:
        """The graph with the sizes of its layers' inputs filled in. Raises ShapeError if one does not take what it gets, or for another `shape`."""
        if shape is not None and shape != self.input_shape:
            raise ShapeError(f"the graph's input is {self.input_shape}, the examples are {shape}")
        layers, sizing, ready = list(self.layers), _Sizing(self.inputs), set[int]()
        for (layer, reads), name in zip(self.calls, self.call_names(), strict=True):
            if layer not in ready:
                ready.add(layer)
                layers[layer] = filled(layers[layer], sizing.values[reads[0]], name)
            sizing.call(layers[layer], reads, name)
        return replace(self, layers=tuple(layers))

    def shapes(self) -> list[Shape]:
        """The shapes of all values, without the batch."""
        sizing = _Sizing(self.inputs)
        for (layer, reads), name in zip(self.calls, self.call_names(), strict=True):
            sizing.call(self.layers[layer], reads, name)
        return [value.shape[1:] for value in sizing.values]

    def call_names(self) -> list[str]:
        """One name for each call: the layer's, from its second call on with @ and the number of the call."""
        seen: dict[int, int] = {}
        made = []
        for layer, _ in self.calls:
            seen[layer] = seen.get(layer, 0) + 1
            made.append(self.called[layer] + (f"@{seen[layer]}" if seen[layer] > 1 else ""))
        return made

    def wired(self) -> Wired:
        """The calls as nodes; a loss is the last of them and reads the outputs."""
        first = len(self.inputs)
        nodes = [
            Node(name, self.layers[layer], reads, first + at)
            for at, ((layer, reads), name) in enumerate(zip(self.calls, self.call_names(), strict=True))
        ]
        if self.loss is None:
            return Wired(tuple(nodes), self.outputs, first)
        value = first + len(nodes)
        return Wired((*nodes, Node(self.names[-1], self.loss, self.outputs, value)), (value,), first)

    def cut(self, name: str) -> Graph:
        """The part that leads to the output of the call `name`; layers keep their names. Raises UsageError if there is none."""
        names, first = self.call_names(), len(self.inputs)
        if name not in names:
            raise UsageError(f"no layer {quoted(name)} whose output could be the code; the layers are {', '.join(names)}")
        end = first + names.index(name)
        needed = self._needed((end,))
        if idle := [at for at in range(first) if at not in needed]:
            raise UsageError(f"the output of {name} does not depend on input {idle[0] + 1}, and a network takes all of its inputs")
        kept = [at for at in range(len(self.calls)) if first + at in needed]
        values = {at: at for at in range(first)} | {first + at: first + new for new, at in enumerate(kept)}
        layers = sorted({self.calls[at][0] for at in kept})
        calls = tuple((layers.index(self.calls[at][0]), tuple(values[each] for each in self.calls[at][1])) for at in kept)
        chosen, called = tuple(self.layers[at] for at in layers), tuple(self.called[at] for at in layers)
        return Graph(self.inputs, chosen, calls, (values[end],), None, called)

    def behind(self, front: Sequence[Any]) -> Graph:
        """The graph with layers in front, one after another: whatever read the one input reads what the last of them makes.

        Raises UsageError for a graph of several inputs.
        """
        if not front:
            return self
        if len(self.inputs) > 1:
            raise UsageError(f"layers can be put in front of one input, and this graph has {len(self.inputs)}: call them on its values")
        n = len(front)
        calls = (*((at, (at,)) for at in range(n)), *((layer + n, tuple(each + n for each in reads)) for layer, reads in self.calls))
        return Graph(self.inputs, (*front, *self.layers), calls, tuple(each + n for each in self.outputs), self.loss)

    def without(self, idle: Callable[[Any], bool]) -> Graph:
        """The graph without the layers of which `idle` is true: who reads what one of them makes reads its input. The others keep their names.

        Raises UsageError if no layer stays.
        """
        first = len(self.inputs)
        values = {at: at for at in range(first)}
        layers: list[int] = []
        calls: list[tuple[int, tuple[int, ...]]] = []
        for at, (layer, reads) in enumerate(self.calls, first):
            if idle(self.layers[layer]):
                values[at] = values[reads[0]]
                continue
            if layer not in layers:
                layers.append(layer)
            values[at] = first + len(calls)
            calls.append((layers.index(layer), tuple(values[each] for each in reads)))
        chosen, called = tuple(self.layers[at] for at in layers), tuple(self.called[at] for at in layers)
        return Graph(self.inputs, chosen, tuple(calls), tuple(values[each] for each in self.outputs), self.loss, called)

    def _needed(self, outputs: Sequence[int]) -> set[int]:
        """The values that lead to `outputs`."""
        needed, waiting, first = set[int](), list(outputs), len(self.inputs)
        while waiting:
            at = waiting.pop()
            if at not in needed:
                needed.add(at)
                waiting += self.calls[at - first][1] if at >= first else ()
        return needed

    def lines(self) -> list[tuple[str, Any, Shape, str]]:
        """For each call its name, layer, output's shape, and the names of what it reads."""
        names, shapes, first = self.call_names(), self.shapes(), len(self.inputs)
        of = [*(f"input{at}" for at in range(1, first + 1)), *names] if first > 1 else ["input", *names]
        return [
            (names[at], self.layers[layer], shapes[first + at], ", ".join(of[each] for each in reads)) for at, (layer, reads) in enumerate(self.calls)
        ]


def _values(given: Any, what: str) -> tuple[Value, ...]:
    made = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not made or not all(isinstance(each, Value) for each in made):
        raise UsageError(f"{what} of a graph must be a value or a list of values, made by nbcnn.Input and layers called on it, got {quoted(given)}")
    return made


def wired(layers: Sequence[Any]) -> Wired:
    """A list of layers, or a graph, as nodes."""
    return layers.wired() if isinstance(layers, Graph) else chain(named(layers))


# -- several inputs and outputs


def packed_shape(shapes: Sequence[Shape]) -> Shape:
    """The shape of one array that holds tensors of `shapes`: the one itself, or a vector of all of them, each in C, H, W order."""
    return shapes[0] if len(shapes) == 1 else (sum(map(numel, shapes)),)


def pack(tape: Tape, xs: Sequence[Buf], scope: str) -> Buf:
    """Record the vector (N, F) of all elements of `xs`; one alone stays as it is."""
    if len(xs) == 1:
        return xs[0]
    flat = [_flat(tape, x, f"{scope}.flat{at}", scope) for at, x in enumerate(xs, 1)]
    y = tape.temp(f"{scope}.packed", (xs[0].shape[0], sum(x.shape[1] for x in flat)))
    tape.emit(Op("concat", "fprop"), flat, [y], scope)
    return y


def unpack(tape: Tape, y: Buf, shapes: Sequence[Shape], scope: str) -> list[Buf]:
    """Record the tensors (N, *shape) that `pack` made the vectors `y` of. Parts of what no row of the op table rounds, because it has one axis
    (targets), have one axis too.
    """
    if len(shapes) == 1:
        return [y]
    n, exact, flat = y.shape[0], len(y.root.shape) == 1, []
    for at, shape in enumerate(shapes, 1):
        made = (n, numel(shape))
        flat.append(tape.temp(f"{scope}.flat{at}", (numel(made),) if exact else made, y.dtype).reshaped(made))
    tape.emit(Op("concat", "dgrad"), [y], flat, scope)
    return [_shaped(tape, x, (n, *shape), f"{scope}.part{at}", scope) for at, (x, shape) in enumerate(zip(flat, shapes, strict=True), 1)]


def _flat(tape: Tape, x: Buf, name: str, scope: str) -> Buf:
    """Record images (N, C, H, W) as vectors (N, C·H·W) in C, H, W order; what is stored in that order anyway is only seen as such."""
    shape = (x.shape[0], numel(x.shape[1:]))
    if len(x.shape) != 4:
        return x.reshaped(shape)
    y = tape.temp(name, shape)
    tape.emit(Op("flatten", "fprop"), [x], [y], scope)
    return y


def _shaped(tape: Tape, x: Buf, shape: Shape, name: str, scope: str) -> Buf:
    """Record vectors as tensors of `shape` (N, …), the opposite of `_flat`."""
    if len(shape) != 4:
        return x.reshaped(shape)
    y = tape.temp(name, shape)
    tape.emit(Op("flatten", "dgrad"), [x], [y], scope)
    return y


def reshape(tape: Tape, x: Buf, shape: Shape, name: str, scope: str) -> Buf:
    """Record `x` (N, …) with its elements, in C, H, W order, as a tensor of `shape` (N, …) of as many."""
    return _shaped(tape, _flat(tape, x, f"{name}.flat", scope), shape, name, scope)
