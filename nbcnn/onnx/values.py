"""This module holds what an importer knows of the values of a file, and puts layers behind them.

A value of a file has any number of axes; one of a graph of layers is an image (C, H, W) or a vector (F,). `Val` has both: `dims`, the shape of one
example in the file, and a graph's value with the same elements in the same order. They meet in `Sheet`: it calls layers, and puts a Reshape in
front of one that wants its elements in another shape. Around one axis every array is (outer, extent, inner), and images of that shape are what
most maps take.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nbcnn.files.quote import brief
from nbcnn.nn.activations import Power, Scale
from nbcnn.nn.graphs import Graph, Value
from nbcnn.nn.joins import Add, Concat, Mul, Reshape
from nbcnn.nn.layers import Conv2d
from nbcnn.nn.maps import LinearMap, Permute
from nbcnn.nn.resampling import MaxPool2d
from nbcnn.onnx.errors import Unsupported
from nbcnn.onnx.rows import Rows, taken
from nbcnn.plan.shapes import numel

Dims = tuple[int, ...]
LARGEST = 2**31 - 1
"""Elements of an example at most: what indices of kernels reach."""
STATE = "running"
"""How the names of what training updates in place begin, which no optimizer trains."""
TAPS = 2**22
"""Entries of the table of a linear map at most."""


@dataclass(frozen=True)
class Val:
    """A value: `dims` of one example in the file, and `value`, its elements in a graph of layers."""

    value: Value
    dims: Dims

    def seen(self, dims: Sequence[int]) -> Val:
        """The same elements under other dimensions."""
        return Val(self.value, tuple(int(size) for size in dims))


def natural(dims: Dims) -> Dims:
    """The shape of a graph's value for an example of `dims`: images and vectors as they are, (C, L) as one row, others as vectors."""
    if len(dims) in (1, 3):
        return dims
    return (dims[0], 1, dims[1]) if len(dims) == 2 else (numel(dims),)


def around(dims: Dims, axis: int) -> tuple[int, int, int]:
    """(outer, extent, inner) around an axis."""
    return numel(dims[:axis]), dims[axis], numel(dims[axis + 1 :])


def limited(dims: Sequence[int]) -> Dims:
    """`dims`, if an array of them is no larger than kernels take, and not empty."""
    made = tuple(int(size) for size in dims)
    if any(size < 1 for size in made) or numel(made) > LARGEST:
        raise Unsupported(f"an example of {made} elements: each axis must have at least one, all together at most {LARGEST:,}")
    return made


@dataclass
class Placed:
    """A layer that was called for the node `number` of the file, called `node`.

    arrays  the values of its parameters and states, by the layer's own names for them.
    names   what the file calls these; a parameter without a name is one that the file does not have, and training leaves it as it is.
    """

    layer: Any
    node: str
    number: int
    arrays: Mapping[str, np.ndarray]
    names: Mapping[str, str]

    @property
    def prefix(self) -> str:
        """What the file calls the layer, if it calls its weight so."""
        return next((name.rpartition(".")[0] for name in self.names.values() if name.endswith((".weight", ".scale", ".gamma"))), "")


@dataclass
class Sheet:
    """The layers called so far.

    frozen  the arrays of the file that training leaves as they are, by name.
    apart   those that several nodes read, each with other arrays beside it: each of these is a layer of its own, so that it stays one weight.
    claimed the arrays that layers have as parameters, since it was cleared.
    made_of the arrays that the file computes of trained ones, with one of these: no layer has them as parameters.
    numbers the single numbers and divisors that are trained, by name; None: whatever is not frozen is. A file of another program does not say so, and
            these are constants then.
    lost    arrays that became constants and may be trained, by name: a file that does not say so is warned of.
    """

    frozen: Container[str] = ()
    apart: Container[str] = ()
    made_of: Mapping[str, str] = field(default_factory=dict)
    numbers: Container[str] | None = ()
    placed: list[Placed] = field(default_factory=list)
    node: str = ""
    number: int = 0
    claimed: set[str] = field(default_factory=set)
    lost: dict[str, None] = field(default_factory=dict)
    _shared: dict[Any, Placed] = field(default_factory=dict)
    _owners: dict[str, tuple[Any, str]] = field(default_factory=dict)

    # -- calls

    def call(
        self, layer: Any, x: Value | list[Value], arrays: Mapping[str, np.ndarray] | None = None, names: Mapping[str, str] | None = None
    ) -> Value:
        """`layer` called on `x`. `arrays` are its parameters and states, `names` what the file calls them: one layer for the same ones.

        Raises Unsupported where the file trains one array as the parameter of two layers, or a parameter is computed of a trained array.
        """
        held = {key: np.asarray(array, np.float32) for key, array in (arrays or {}).items()}
        called = {key: name for key, name in (names or {}).items() if name and key in held}
        self.claimed.update(called.values())
        mark = (layer, *sorted(called.items())) if called else None
        known = self._shared.get(mark) if mark else None
        if known is not None and all(np.array_equal(array, known.arrays[key]) for key, array in held.items()):
            shared: Value = known.layer(x)
            return shared
        for key, name in called.items():
            if not key.startswith(STATE):
                self._check_source(name)
            if not key.startswith(STATE) and name not in self.frozen and self._owners.setdefault(name, (layer, key))[0] is not layer:
                other = type(self._owners[name][0]).__name__
                raise Unsupported(f"a tensor that is trained as the weight of a {other} already, which another layer cannot share", name)
        made: Value = layer(x)
        placed = Placed(layer, self.node, self.number, held, called)
        if mark is not None:
            self._shared[mark] = placed
        self.placed.append(placed)
        return made

    def final(self, x: Val, keep: bool = False) -> Value:
        """An output, in the shape that values of graphs have for such examples, or as it is (`keep`). An input that is an output gets a layer that
        changes nothing."""
        value = x.value if keep else self.shaped(x, natural(x.dims))
        return self.call(Scale(), value) if value.layer is None else value

    def apart_of(self, names: Mapping[str, str]) -> bool:
        """Whether one of the arrays must be a layer of its own (`apart`)."""
        return len(names) > 1 and any(name in self.apart for name in names.values())

    def trains(self, name: str, number: bool) -> bool:
        """Whether an array is trained; `number`: it is a single number, or a divisor."""
        return bool(name) and name not in self.frozen and (not number or self.numbers is None or name in self.numbers)

    def constant(self, names: Mapping[str, str]) -> None:
        """Note arrays that become constants. Raises Unsupported for one that is trained, where a layer would train copies of it, or nothing."""
        for name in filter(None, names.values()):
            source = self.made_of.get(name, name)
            if self.trains(source, number=True):
                self._check_source(name)
                raise Unsupported("a tensor that is trained, and what is made of it here is no layer's weight", name)
            if source not in self.frozen:
                self.lost[source] = None

    def _check_source(self, name: str) -> None:
        """Raise Unsupported for an array that is computed of a trained one."""
        if name in self.made_of:
            raise Unsupported(
                "a weight that is computed of one that is trained, and training would not reach that: fold the constants of the file first, to train "
                "what is computed of them",
                self.made_of[name],
            )

    # -- what is made of them

    def called(self, layers: Sequence[Any]) -> tuple[str, ...]:
        """A name for each layer: what the file calls its weights, else its node, else kind and number."""
        wanted: dict[int, str] = {}
        by_node: dict[int, list[Placed]] = {}
        for each in self.placed:
            by_node.setdefault(each.number, []).append(each)
            if each.prefix:
                wanted.setdefault(id(each.layer), each.prefix)
        for placed in by_node.values():
            main = next((each for each in placed if each.names), next((each for each in placed if each.arrays), placed[-1]))
            if main.node:
                wanted.setdefault(id(main.layer), main.node)
        clean = {key: re.sub(r"[^\w./:-]+", "_", name).strip("/.") for key, name in wanted.items()}
        made, taken, kept = list[str](), set[str](), set(clean.values())
        numbers: dict[str, int] = {}
        for layer in layers:
            name = clean.get(id(layer), "")
            if not name or name in taken:
                # A name of kind and number must not be one that a later layer is to have.
                while not name or name in taken or name in kept:
                    numbers[layer.kind] = numbers.get(layer.kind, 0) + 1
                    name = f"{layer.kind}{numbers[layer.kind]}"
            taken.add(name)
            made.append(name)
        return tuple(made)

    def arrays(self, graph: Graph) -> dict[str, np.ndarray]:
        """Parameters and states of the layers of `graph` by their full names."""
        found = {id(each.layer): each.arrays for each in self.placed if each.arrays}
        made: dict[str, np.ndarray] = {}
        for name, layer in zip(graph.called, graph.layers, strict=True):
            made |= {f"{name}.{key}": np.ascontiguousarray(value, np.float32) for key, value in found.get(id(layer), {}).items()}
        return made

    def untrained(self, graph: Graph) -> list[str]:
        """The full names of the parameters of `graph` that training leaves as they are: those that the file does not have, and `frozen` ones."""
        found = {id(each.layer): each for each in self.placed if each.arrays}
        made = list[str]()
        for name, layer in zip(graph.called, graph.layers, strict=True):
            if (placed := found.get(id(layer))) is not None:
                own = [key for key in placed.arrays if not key.startswith(STATE)]
                made += [f"{name}.{key}" for key in own if key not in placed.names or placed.names[key] in self.frozen]
        return made

    def alike(self, layer: Any, x: Val) -> Val:
        """`layer`, which takes any shape and keeps it, called on `x`."""
        return Val(self.call(layer, x.value), x.dims)

    def shaped(self, x: Val, shape: Dims) -> Value:
        """The graph's value of `x` in `shape`: (C, H, W) or (F,)."""
        return x.value if x.value.shape == shape else self.call(Reshape(shape), x.value)

    # -- along axes

    def mapped(self, x: Val, axis: int, rows: Rows) -> Val:
        """A linear map along an axis."""
        dims = limited((*x.dims[:axis], len(rows), *x.dims[axis + 1 :]))
        if rows == [[(at, 1.0)] for at in range(x.dims[axis])]:
            return x
        if sum(map(len, rows)) + len(rows) > TAPS:
            raise Unsupported(f"a linear map of {sum(map(len, rows)):,} products for each element of the other axes; {TAPS:,} are taken")
        shape = x.dims if len(x.dims) == 3 and x.value.shape == x.dims else around(x.dims, axis)
        number = axis + 1 if shape is x.dims else 2
        indices = tuple(tuple(at for at, _ in row) for row in rows)
        weights = tuple(tuple(weight for _, weight in row) for row in rows)
        plain = all(weight == 1.0 for row in weights for weight in row)
        layer = LinearMap(number, x.dims[axis], indices=indices, weights=None if plain else weights)
        return Val(self.call(layer, self.shaped(x, shape)), dims)

    def expanded(self, x: Val, dims: Dims) -> Val:
        """`x` repeated along its axes of one element, until it has `dims`."""
        made = x.seen((1,) * (len(dims) - len(x.dims)) + x.dims)
        for axis, size in enumerate(dims):
            if made.dims[axis] != size:
                made = self.mapped(made, axis, taken([0] * size))
        return made

    def permuted(self, x: Val, axes: Sequence[int]) -> Val:
        """The axes in another order: axis i of what is made is `axes`[i] of `x`."""
        dims = tuple(x.dims[axis] for axis in axes)
        large = [axis for axis in axes if x.dims[axis] > 1]
        if large == sorted(large):
            return x.seen(dims)
        before = x.value.layer
        if isinstance(before, Permute):
            # Two orders, one behind the other, are one, and an order and its opposite are none.
            source = x.value.reads[0]
            seen = before.shape or source.shape
            if tuple(seen[axis] for axis in before.axes) == x.dims:
                return self.permuted(Val(source, seen), [before.axes[axis] for axis in axes])
        shape = None if x.value.shape == x.dims and len(x.dims) == 3 else x.dims
        return Val(self.call(Permute(tuple(axes), shape), x.value), dims)

    def first(self, x: Val, axis: int) -> Value:
        """`x` with an axis in front: images (extent, outer, inner); (C, H, W) and vectors as they are, where it is their first."""
        if axis == 0 and len(x.dims) in (1, 3):
            return self.shaped(x, x.dims)
        outer, extent, inner = around(x.dims, axis)
        return self.shaped(self.permuted(x.seen((outer, extent, inner)), (1, 0, 2)), (extent, outer, inner))

    def back(self, y: Value, axis: int, dims: Dims) -> Val:
        """What a layer made of `first`'s images, with the axis in its place again; `dims` are those of what is made."""
        if axis == 0 and len(dims) in (1, 3):
            return Val(y, dims)
        return self.permuted(Val(y, y.shape), (1, 0, 2)).seen(dims)

    # -- arithmetic

    def joined(self, layer: Any, values: Sequence[Val]) -> Val:
        """Values of one shape, after repetition, joined element by element."""
        dims = broadcast([each.dims for each in values])
        whole = [self.expanded(each, dims) for each in values]
        shape = whole[0].value.shape
        return Val(self.call(layer, [self.shaped(each, shape) for each in whole]), dims)

    def sum(self, values: Sequence[Val]) -> Val:
        """The sum of values, which are repeated to one shape."""
        return self.joined(Add(), values) if len(values) > 1 else values[0]

    def larger(self, a: Val, b: Val) -> Val:
        """The larger of each two elements, which are repeated to one shape: a maximum over the two rows of an image, so without any rounding."""
        dims = broadcast([a.dims, b.dims])
        size = numel(dims)
        rows = self.call(Concat(), [self.shaped(self.expanded(each, dims), (size,)) for each in (a, b)])
        made = self.call(MaxPool2d((2, 1)), self.call(Reshape((1, 2, size)), rows))
        return Val(self.call(Reshape((size,)), made), dims)

    def product(self, a: Val, b: Val) -> Val:
        """a·b, element by element, repeated to one shape. A factor for each channel of images is repeated by the layer itself."""
        for x, factor in ((a, b), (b, a)):
            image = len(x.dims) == 3 and x.value.shape == x.dims and numel(x.dims[1:]) > 1
            if image and factor.dims == (x.dims[0], 1, 1) and factor.value.shape in (factor.dims, factor.dims[:1]):
                return Val(self.call(Mul(), [x.value, factor.value]), x.dims)
        return self.joined(Mul(), [a, b])

    def filled(self, x: Val, array: np.ndarray, name: str) -> Val:
        """A trained array beside every example, in the shape that it and `x` have together: 0·x + array."""
        return self.affine(self.scaled(x, 0.0), None, array, {"bias": name})

    def scaled(self, x: Val, factor: float = 1.0, shift: float = 0.0) -> Val:
        """factor·x + shift."""
        before = x.value.layer
        if factor == 1 and isinstance(before, Scale) and not before.shift:
            # What only adds is one layer with what only multiplies before it.
            factor, x = before.factor, Val(x.value.reads[0], x.dims)
        return x if factor == 1 and shift == 0 else self.alike(Scale(float(factor), float(shift)), x)

    def power(self, x: Val, exponent: float) -> Val:
        """x to the power of `exponent`."""
        return x if exponent == 1 else self.alike(Power(float(exponent)), x)

    def affine(self, x: Val, weight: np.ndarray | None, bias: np.ndarray | None, names: Mapping[str, str] | None = None) -> Val:
        """weight·x + bias, with arrays that have the axes of one example, or fewer; `names` of those that the file has, "weight" and "bias".

        Constants of one element are a Scale. Others are a depthwise convolution of 1×1, which has a weight and a bias for each channel. The axes of
        what is trained are put in front, so that each of its elements is one channel, and all elements are one channel of a single number; the
        channels of what is not are the elements of the axes along which the constants vary, and of those before them.
        """
        arrays = {key: np.asarray(each, np.float64) for key, each in (("weight", weight), ("bias", bias)) if each is not None}
        names = {key: name for key, name in (names or {}).items() if name and key in arrays}
        if any(not np.isfinite(each).all() for each in arrays.values()):
            raise Unsupported("a constant that is no finite number")
        dims = broadcast([x.dims, *(each.shape for each in arrays.values())])
        if all(each.size == 1 for each in arrays.values()):
            single = {key: name for key, name in names.items() if not self.trains(name, number=True)}
            self.constant(single)
            names = {key: name for key, name in names.items() if key not in single}
            if not names:
                factor, shift = (float(arrays[key].reshape(())) if key in arrays else default for key, default in (("weight", 1.0), ("bias", 0.0)))
                return self.scaled(self.expanded(x, dims), factor, shift)
        x = self.expanded(x, dims)
        whole = {key: each.reshape((1,) * (len(dims) - each.ndim) + each.shape) for key, each in arrays.items()}
        axes = {key: [axis for axis in range(len(dims)) if each.shape[axis] > 1] for key, each in whole.items()}
        trained = any(name not in self.frozen for name in names.values())
        if trained and len(arrays) == 2 and (axes["weight"] != axes["bias"] or self.apart_of(names)):
            y = self.affine(x, arrays["weight"], None, names)
            return self.affine(y, None, arrays["bias"], {"bias": names.get("bias", "")})
        vary = sorted(set().union(*axes.values()))
        large = [axis for axis in range(len(dims)) if dims[axis] > 1]
        if trained and large[: len(vary)] != vary:
            order = [*vary, *(axis for axis in range(len(dims)) if axis not in vary)]
            moved = {key: each.transpose(order) for key, each in whole.items()}
            y = self.affine(self.permuted(x, order), moved.get("weight"), moved.get("bias"), names)
            return self.permuted(y, [order.index(axis) for axis in range(len(dims))])
        front = dims[: vary[-1] + 1] if vary else ()
        channels, inner = numel(front), numel(dims[len(front) :])
        spread = {key: np.broadcast_to(each.reshape(each.shape[: len(front)]), front).reshape(channels) for key, each in whole.items()}
        layer = Conv2d(channels, 1, groups=channels, bias="bias" in spread)
        held: dict[str, np.ndarray] = spread | {"weight": spread.get("weight", np.ones(channels)).reshape(channels, 1, 1, 1)}
        shape = x.value.shape if len(x.value.shape) == 3 and x.value.shape[0] == channels else (channels, inner, 1)
        return Val(self.call(layer, self.shaped(x, shape), held, names), dims)


def apart(reads: Iterable[tuple[str, Sequence[str]]]) -> set[str]:
    """The arrays that two nodes read with others beside them, and not the same ones; `reads` has for each node its op and its arrays."""
    beside: dict[str, set[tuple[str, ...]]] = {}
    for op, names in reads:
        for name in names:
            beside.setdefault(name, set()).add((op, *names))
    return {name for name, places in beside.items() if len(places) > 1}


def broadcast(shapes: Sequence[Dims]) -> Dims:
    """The shape that arrays of `shapes` have together, by the rules of NumPy."""
    try:
        return limited(np.broadcast_shapes(*shapes))
    except ValueError:
        raise Unsupported(f"shapes that do not go together: {brief(', '.join(str(tuple(each)) for each in shapes))}") from None
