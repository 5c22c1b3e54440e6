"""This module defines the layers that move elements or mix them linearly, by constants: LinearMap along one axis, and Permute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from nbcnn.files.errors import UsageError
from nbcnn.nn.arguments import finite
from nbcnn.nn.graphs import reshape
from nbcnn.nn.layer import Built, NoParams, images
from nbcnn.plan.graph import Buf, ShapeError, Tape
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

_LARGEST = 1 << 24
"""Indices of a table are float32, exact below this."""

Rows = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class LinearMap(NoParams):
    """A sparse linear map along one axis of images: y[…, p, …] = Σ_k weights[p, k] · x[…, indices[p, k], …].

    Interpolation to any size, slices, flips, repetition, mirrored borders, means and sums along an axis are such maps. It has no parameters.

    Shapes: (N, C, H, W), float32 → the same but for `axis` (1: channels, 2: rows, 3: columns), which gets len(indices) elements.

    `extent` is how many elements the axis has; `indices` has for each element that is made the elements that it is made of, and `weights`, of the
    same form, what they count; None is 1 for all. An element that is made of none is 0. Raises UsageError for other numbers, and, when the
    network is built, ShapeError for what is no image or has another extent.

    Example, every second column, from the last one on:
        >>> import numpy as np, nbcnn
        >>> model = nbcnn.Model([nbcnn.LinearMap(3, 4, indices=((3,), (1,)))], mode="cpu").build((1, 1, 4))
        >>> model.predict(np.array([[[[0, 51, 102, 255]]]], np.uint8)).round(3)
        array([[[[1. , 0.2]]]], dtype=float32)
    """

    axis: int
    extent: int
    _: KW_ONLY
    indices: Rows
    weights: Rows | None = None
    kind: ClassVar[str] = "map"

    def __post_init__(self) -> None:
        object.__setattr__(self, "indices", _rows(self.indices))
        if self.axis not in (1, 2, 3) or not _counts((self.extent,), 1, _LARGEST):
            raise UsageError(f"LinearMap takes axis 1 (channels), 2 (rows) or 3 (columns) of at least one element, got {self.axis} of {self.extent}")
        if not self.indices or not all(_counts(row, 0, self.extent) for row in self.indices):
            raise UsageError(f"LinearMap needs for each element that it makes a list of whole numbers of 0 to {self.extent - 1}")
        if self.weights is None:
            return
        object.__setattr__(self, "weights", tuple(tuple(float(each) for each in row) for row in _rows(self.weights)))
        if [len(row) for row in self.weights] != [len(row) for row in self.indices] or not all(finite(n) for row in self.weights for n in row):
            raise UsageError("LinearMap needs a finite weight for each of its indices")

    def rows(self) -> list[list[tuple[int, float]]]:
        """For each element that is made its (index, weight)."""
        weights = self.weights or tuple((1.0,) * len(row) for row in self.indices)
        return [list(zip(index, weight, strict=True)) for index, weight in zip(self.indices, weights, strict=True)]

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        shape = list(images(x, scope))
        if shape[self.axis] != self.extent:
            raise ShapeError(f"{scope} maps {self.extent} elements of axis {self.axis}, got {x.shape}")
        rows = self.rows()
        shape[self.axis] = len(rows)
        y = tape.temp(f"{scope}.y", tuple(shape))
        tape.emit(Op("axis_map"), [x, tape.const(f"{scope}.table", _table(rows))], [y], scope, axis=self.axis)

        def backward(dy: Buf) -> Buf:
            transposed: list[list[tuple[int, float]]] = [[] for _ in range(self.extent)]
            for at, row in enumerate(rows):
                for index, weight in row:
                    transposed[index].append((at, weight))
            dx = tape.temp(f"{scope}.dx", x.shape)
            tape.emit(Op("axis_map"), [dy, tape.const(f"{scope}.transposed", _table(transposed))], [dx], scope, axis=self.axis)
            return dx

        return y, backward


def _rows(given: Any) -> Rows:
    """Lists of lists, as files have them, as tuples."""
    if not isinstance(given, Sequence) or not all(isinstance(row, Sequence) for row in given):
        raise UsageError("LinearMap takes indices and weights as a list for each element that it makes")
    return tuple(tuple(row) for row in given)


def _counts(numbers: Sequence[Any], least: int, end: int) -> bool:
    """Whether these are whole numbers from `least` to `end` − 1."""
    return all(isinstance(n, int) and not isinstance(n, bool) and least <= n < end for n in numbers)


def _table(rows: Sequence[Sequence[tuple[int, float]]]) -> list[float]:
    """The table of the op `axis_map`: indices, then weights, as many for each row as the longest has."""
    taps = max(1, *map(len, rows))
    filled = [[*row, *([(-1, 0.0)] * (taps - len(row)))] for row in rows]
    return [float(pair[part]) for part in (0, 1) for row in filled for pair in row]


@dataclass(frozen=True)
class Permute(NoParams):
    """The axes of each example in another order, as torch.permute without the batch.

    Shapes: (N, …), float32 → (N, …) of as many elements: (N, C, H, W) with its axes in another order, or a vector (N, F).

    `axes` has for each axis that is made the one that it was, counted from 0 without the batch. `shape` is what an example is seen as, in C, H, W
    order; None is the image's own. What is made is an image if it has three axes, else a vector: a Reshape behind gives it another shape.
    Raises UsageError for what is no order of the axes, and, when the network is built, ShapeError for another number of elements.

    Example, a pixel shuffle: four channels become 2×2 pixels:
        >>> import numpy as np, nbcnn
        >>> layers = [nbcnn.Permute((2, 0, 3, 1), (2, 2, 3, 3)), nbcnn.Reshape((1, 6, 6))]
        >>> nbcnn.Model(layers, mode="cpu").build((4, 3, 3)).predict(np.zeros((5, 4, 3, 3), np.uint8)).shape
        (5, 1, 6, 6)
    """

    axes: tuple[int, ...]
    shape: tuple[int, ...] | None = None
    kind: ClassVar[str] = "permute"

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(self.axes))
        if sorted(self.axes) != list(range(len(self.axes))) or not self.axes:
            raise UsageError(f"Permute needs each axis of an example once, counted from 0, got {self.axes}")
        if self.shape is None:
            return
        object.__setattr__(self, "shape", tuple(self.shape))
        if len(self.shape) != len(self.axes) or not _counts(self.shape, 1, 2**31):
            raise UsageError(f"Permute needs a shape of as many axes as it orders, got {self.shape} and {self.axes}")

    def build(self, tape: Tape, x: Buf, scope: str) -> Built:
        n, shape = x.shape[0], self.shape or x.shape[1:]
        if len(shape) != len(self.axes) or numel(shape) != numel(x.shape[1:]):
            raise ShapeError(f"{scope} orders {len(self.axes)} axes{f' of {self.shape}' if self.shape else ''}, got {x.shape[1:]}")
        made = tuple(shape[axis] for axis in self.axes)
        back = tuple(self.axes.index(axis) for axis in range(len(made)))
        flat = (n, numel(made))

        def moved(source: Buf, seen: tuple[int, ...], axes: tuple[int, ...], target: tuple[int, ...], name: str) -> Buf:
            vectors, y = reshape(tape, source, flat, f"{name}.flat", scope), tape.temp(name, flat)
            tape.emit(Op("permute"), [vectors], [y], scope, shape=seen, axes=axes)
            return reshape(tape, y, target, name, scope)

        y = moved(x, shape, self.axes, (n, *made) if len(made) == 3 else flat, f"{scope}.y")
        return y, lambda dy: moved(dy, made, back, x.shape, f"{scope}.dx")
