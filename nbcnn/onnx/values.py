"""This module holds what an importer knows of the values of a file, and puts layers behind them.

A value of a file has any number of axes; one of a graph of layers is an image (C, H, W) or a vector (F,). `Val` has both: `dims`, the shape of one
example in the file, and a graph's value with the same elements in the same order. They meet in `Sheet`: it calls layers, and puts a Reshape in
front of one that wants its elements in another shape. Around one axis every array is (outer, extent, inner), and images of that shape are what
most maps take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nbcnn.nn.activations import Power, Scale
from nbcnn.nn.graphs import Value
from nbcnn.nn.joins import Add, Mul, Reshape
from nbcnn.nn.layers import Conv2d
from nbcnn.nn.maps import LinearMap, Permute
from nbcnn.onnx.errors import Unsupported
from nbcnn.onnx.rows import Rows, taken
from nbcnn.plan.shapes import numel

Dims = tuple[int, ...]
LARGEST = 2**31 - 1
"""Elements of an example at most: what indices of kernels reach."""
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
    """A layer that was called for the node `number` of the file, called `node`, and the values that its parameters and states get."""

    layer: Any
    node: str
    number: int
    arrays: Mapping[str, np.ndarray]
    prefix: str


@dataclass
class Sheet:
    """The layers called so far."""

    placed: list[Placed] = field(default_factory=list)
    node: str = ""
    number: int = 0
    _shared: dict[Any, Any] = field(default_factory=dict)

    # -- calls

    def call(self, layer: Any, x: Value | list[Value], arrays: Mapping[str, np.ndarray] | None = None, names: Sequence[str] = ()) -> Value:
        """`layer` called on `x`. `arrays` are its parameters and states, `names` what the file calls them: one layer for the same ones."""
        held = {name: np.asarray(array, np.float32) for name, array in (arrays or {}).items()}
        key = (layer, tuple(names)) if held and names and all(names) else None
        known, same = self._shared.get(key, (None, {}))
        if known is not None and all(np.array_equal(array, same[name]) for name, array in held.items()):
            return known(x)
        made = layer(x)
        if key is not None:
            self._shared[key] = layer, held
        prefix = next((name.rpartition(".")[0] for name in names if name.endswith((".weight", ".scale", ".gamma"))), "")
        self.placed.append(Placed(layer, self.node, self.number, held, prefix))
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

    def product(self, a: Val, b: Val) -> Val:
        """a·b, element by element, repeated to one shape."""
        return self.joined(Mul(), [a, b])

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

    def affine(self, x: Val, weight: np.ndarray | None, bias: np.ndarray | None, names: Sequence[str] = ()) -> Val:
        """weight·x + bias, with constants that have the axes of one example, or fewer.

        Constants of one element are a Scale. Others are a depthwise convolution of 1×1, which has a weight and a bias for each channel: the channels
        are the elements of the axes along which the constants vary, and of those before them.
        """
        given = [np.asarray(each, np.float64) for each in (weight, bias) if each is not None]
        if any(not np.isfinite(each).all() for each in given):
            raise Unsupported("a constant that is no finite number")
        dims = broadcast([x.dims, *(each.shape for each in given)])
        if all(each.size == 1 for each in given):
            factor, shift = (default if each is None else float(np.asarray(each).reshape(())) for each, default in ((weight, 1.0), (bias, 0.0)))
            return self.scaled(self.expanded(x, dims), factor, shift)
        x = self.expanded(x, dims)
        whole = [each.reshape((1,) * (len(dims) - each.ndim) + each.shape) for each in given]
        last = max(axis for axis in range(len(dims)) if any(each.shape[axis] > 1 for each in whole))
        front = dims[: last + 1]
        channels, inner = numel(front), numel(dims[last + 1 :])
        spread = [np.broadcast_to(each.reshape(each.shape[: last + 1]), front).reshape(channels).astype(np.float32) for each in whole]
        arrays: dict[str, np.ndarray] = {
            "weight": (spread.pop(0) if weight is not None else np.ones(channels, np.float32)).reshape(channels, 1, 1, 1)
        }
        arrays |= {"bias": spread.pop(0)} if bias is not None else {}
        layer = Conv2d(channels, 1, groups=channels, bias=bias is not None)
        shape = x.value.shape if len(x.value.shape) == 3 and x.value.shape[0] == channels else (channels, inner, 1)
        return Val(self.call(layer, self.shaped(x, shape), arrays, names), dims)


def broadcast(shapes: Sequence[Dims]) -> Dims:
    """The shape that arrays of `shapes` have together, by the rules of NumPy."""
    try:
        return limited(np.broadcast_shapes(*shapes))
    except ValueError:
        raise Unsupported(f"shapes that do not go together: {', '.join(str(tuple(each)) for each in shapes)}") from None
