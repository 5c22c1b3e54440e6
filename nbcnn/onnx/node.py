"""This module is what the importer hands to the function of an op: one node with its operands and attributes, and the table of those functions.

A function of an op takes a `Node` and returns its outputs, in the node's order. It is entered into `OPS` by `op`, with a line for the table of the
documentation that says what is not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.files.quote import quoted
from nbcnn.onnx.errors import Unsupported
from nbcnn.onnx.values import Dims, Sheet, Val

BATCH = 7_919_000_003
"""The number of examples in a shape that a file computes: a prime that no other size is, and that no arithmetic leads to."""

Operand = Val | np.ndarray


@dataclass
class Node:
    """A node of the graph.

    op, name   of the node. opset  of the file as it was written.
    operands   its inputs: values, constants as arrays, None for one that is left out. names: what the file calls them.
    attributes by their names. outputs: how many it has, and `wanted` which of them are read.
    sheet      calls layers. batched  the first axis of arrays in the file counts examples.
    count      how many examples there are, None if the file leaves it open.
    """

    op: str
    name: str
    opset: int
    operands: Sequence[Operand | None]
    names: Sequence[str]
    attributes: Mapping[str, Any]
    outputs: int
    wanted: Sequence[bool]
    sheet: Sheet
    batched: bool
    count: int | None = None

    # -- operands

    def has(self, at: int) -> bool:
        """Whether operand `at` is given."""
        return at < len(self.operands) and self.operands[at] is not None

    def value(self, at: int = 0) -> Val:
        """Operand `at`, which must be a value that is computed of an example."""
        made = self.operands[at] if at < len(self.operands) else None
        if not isinstance(made, Val):
            raise Unsupported(f"its operand {at + 1} is a constant" if made is not None else f"its operand {at + 1} is missing")
        return made

    def called(self, **places: int) -> dict[str, str]:
        """What the file calls operands, by the names that a layer has for them: called(weight=1, bias=2)."""
        return {key: self.names[at] for key, at in places.items() if self.has(at)}

    def constant(self, at: int, default: Any = None) -> Any:
        """Operand `at` as an array; `default` if it is left out. Raises Unsupported if it is computed of an example."""
        if not self.has(at):
            return default
        made = self.operands[at]
        if isinstance(made, Val):
            raise Unsupported(f"its operand {at + 1} is computed, and must be a constant", self.names[at])
        return made

    def floats(self, at: int, default: Any = None) -> Any:
        """Operand `at` as an array of finite floats."""
        made = self.constant(at, default)
        if made is None:
            return None
        array = np.asarray(made)
        if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
            raise Unsupported(f"its operand {at + 1} is of {array.dtype}, and must be of floats", self.names[at])
        if not np.isfinite(array.astype(np.float64)).all():
            raise Unsupported(f"its operand {at + 1} holds NaN or Inf", self.names[at])
        return array.astype(np.float32)

    def number(self, at: int, default: Any = None) -> Any:
        """Operand `at` as one Python number."""
        made = self.constant(at)
        if made is None:
            return default
        if np.asarray(made).size != 1:
            raise Unsupported(f"its operand {at + 1} has {np.asarray(made).size} elements, and must have one", self.names[at])
        return np.asarray(made).reshape(-1)[0].item()

    def whole(self, at: int, attribute: str = "", default: Any = None) -> list[int] | None:
        """A list of whole numbers: operand `at`, or the attribute that it was in earlier opsets."""
        if self.has(at):
            made = np.asarray(self.constant(at))
            if made.dtype.kind not in "iu":
                raise Unsupported(f"its operand {at + 1} is of {made.dtype}, and must be of whole numbers", self.names[at])
            return [int(each) for each in made.reshape(-1)]
        found = self.attributes.get(attribute, default)
        return None if found is None else [int(each) for each in (found if isinstance(found, Sequence) else [found])]

    def ints(self, name: str, default: Sequence[int] | None = None) -> Any:
        """An attribute that is a list of whole numbers."""
        found = self.attributes.get(name, default)
        return None if found is None else [int(each) for each in found]

    def text(self, name: str, default: str) -> str:
        """An attribute that is a word."""
        made = self.attributes.get(name, default)
        return made.decode(errors="replace") if isinstance(made, bytes) else str(made)

    # -- axes

    def rank(self, x: Val) -> int:
        """The number of axes that `x` has in the file."""
        return len(x.dims) + self.batched

    def axis(self, x: Val, axis: int, rank: int | None = None) -> int:
        """The axis of an example that is axis `axis` in the file. Raises Unsupported for the axis of the examples."""
        rank = self.rank(x) if rank is None else rank
        if not -rank <= axis < rank:
            raise Unsupported(f"axis {axis} of {rank} axes")
        made = axis % rank - self.batched
        if made < 0:
            raise Unsupported(MIXES)
        return made

    def axes(self, x: Val, axes: Sequence[int]) -> list[int]:
        """The axes of an example that are `axes` in the file, each once (`axis`)."""
        made = [self.axis(x, axis) for axis in axes]
        if len(set(made)) < len(made):
            raise Unsupported(f"axes {quoted(list(axes))}, of which one is named twice")
        return made

    def broadcastable(self, array: np.ndarray, x: Val) -> np.ndarray:
        """A constant that goes together with `x`, without the axis of the examples."""
        array = np.asarray(array)
        if not self.batched or array.ndim < self.rank(x):
            return array
        if array.ndim > self.rank(x) or array.shape[0] != 1:
            raise Unsupported(f"a constant of {array.shape} beside examples of {x.dims}: {MIXES}")
        return array[0]

    def together(self, values: Sequence[Val]) -> Sequence[Val]:
        """Values that are joined, whose axes of the examples meet. Raises Unsupported if they do not."""
        if self.batched and len({len(each.dims) for each in values}) > 1:
            raise Unsupported(f"values of different numbers of axes: {MIXES}")
        return values

    def spatial(self, x: Val) -> tuple[int, Dims]:
        """(channels, extents) of images, of series, or of what has more axes. An input that is one example as a whole must have one image."""
        dims = x.dims
        if not self.batched:
            if not dims or dims[0] != 1:
                raise Unsupported(f"{dims[0] if dims else 'no'} images in what is taken for one example")
            dims = dims[1:]
        if len(dims) < 1:
            raise Unsupported(f"examples of {dims}, which have no channels")
        return dims[0], dims[1:]

    def outer(self, dims: Dims) -> Dims:
        """The dimensions of an example (C, …) as they are in the file."""
        return dims if self.batched else (1, *dims)


MIXES = "it mixes examples, which batched=False allows"
"""Why a node cannot be taken where the first axis counts examples."""


@dataclass(frozen=True)
class Op:
    """An op of ONNX: the function that makes layers of a node, and what the documentation says of it."""

    name: str
    make: Callable[[Node], Sequence[Operand | None]]
    layers: str
    limits: str


OPS: dict[str, Op] = {}
"""The ops that are taken, by name."""


def op(names: str, layers: str, limits: str = "") -> Callable[[Callable[[Node], Any]], Callable[[Node], Any]]:
    """Enter a function for the ops `names`; `layers` are what it makes, `limits` what it does not take, both for the documentation."""

    def enter(make: Callable[[Node], Any]) -> Callable[[Node], Any]:
        def outputs(node: Node) -> Sequence[Operand | None]:
            made = make(node)
            return made if isinstance(made, tuple | list) else (made,)

        for name in names.split():
            OPS[name] = Op(name, outputs, layers, limits)
        return make

    return enter
