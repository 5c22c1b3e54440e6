"""Ops of ONNX on constants: what a file computes of shapes and other constants is computed while it is read, by NumPy.

A result is made only after its size is known and small enough (`LARGEST` elements), and all results of a file share a `Room`, so no file asks for
more memory than that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from nbcnn.onnx.errors import OnnxError, Unsupported, onnx_package
from nbcnn.onnx.files import array
from nbcnn.onnx.node import BATCH

LARGEST = 2**25
"""Elements of a computed constant at most."""
ROOM = 1 << 28
"""Bytes of all computed constants of a file at most, beside four times those that the file has itself: int8 becomes float32."""

Attributes = dict[str, Any]


def _small(shape: Sequence[int]) -> tuple[int, ...]:
    made = tuple(int(size) for size in shape)
    if any(size >= BATCH for size in made):
        raise Unsupported("a constant that is repeated for every example")
    if any(size < 0 for size in made) or math.prod(made) > LARGEST:
        raise Unsupported(f"a computed constant of {made} elements; {LARGEST:,} are taken")
    return made


def _axes(given: Sequence[Any], at: int, attributes: Attributes, name: str = "axes") -> list[int] | None:
    if len(given) > at and given[at] is not None:
        return [int(each) for each in np.asarray(given[at]).reshape(-1)]
    found = attributes.get(name)
    return None if found is None else [int(each) for each in found]


def _both(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays that are repeated to one shape."""

    def made(given: Sequence[Any], attributes: Attributes) -> Any:
        _small(np.broadcast_shapes(*(each.shape for each in given)))
        return function(*given)

    return made


def _one(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda given, attributes: function(given[0])


def _divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b, of whole numbers towards zero as in C."""
    if a.dtype.kind in "iu":
        if not np.all(b):
            raise Unsupported("a division of whole numbers by zero")
        return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(a.dtype)
    return a / b


def _constant(given: Sequence[Any], attributes: Attributes) -> Any:
    onnx = onnx_package()
    for name, dtype in (("value_float", np.float32), ("value_floats", np.float32), ("value_int", np.int64), ("value_ints", np.int64)):
        if name in attributes:
            return np.array(attributes[name], dtype)
    if isinstance(attributes.get("value"), onnx.TensorProto):
        return array(attributes["value"])
    raise Unsupported("a constant that is no array of numbers")


def _constant_of_shape(given: Sequence[Any], attributes: Attributes) -> Any:
    value = array(attributes["value"]) if "value" in attributes else np.zeros(1, np.float32)
    return np.full(_small(given[0].reshape(-1)), value.reshape(-1)[0], value.dtype)


def _shape(given: Sequence[Any], attributes: Attributes) -> Any:
    sizes = np.array(given[0].shape, np.int64)
    return sizes[slice(int(attributes.get("start", 0)), attributes.get("end"))]


def _reshape(given: Sequence[Any], attributes: Attributes) -> Any:
    x, shape = given[0], [int(size) for size in given[1].reshape(-1)]
    if not attributes.get("allowzero", 0):
        shape = [x.shape[at] if size == 0 else size for at, size in enumerate(shape)]
    return x.reshape(shape)


def _squeeze(given: Sequence[Any], attributes: Attributes) -> Any:
    axes = _axes(given, 1, attributes)
    return np.squeeze(given[0], None if axes is None else tuple(axes))


def _unsqueeze(given: Sequence[Any], attributes: Attributes) -> Any:
    axes = _axes(given, 1, attributes) or []
    if given[0].ndim + len(axes) > 16:
        raise Unsupported(f"{given[0].ndim + len(axes)} axes")
    return np.expand_dims(given[0], tuple(axes))


def _slice(given: Sequence[Any], attributes: Attributes) -> Any:
    x = given[0]
    starts, ends = (_axes(given, at, attributes, name) or [] for at, name in ((1, "starts"), (2, "ends")))
    axes, steps = _axes(given, 3, attributes) or range(len(starts)), _axes(given, 4, attributes, "steps") or [1] * len(starts)
    places = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        places[axis] = slice(start, None if step < 0 and end < -x.shape[axis] else end, step)
    return x[tuple(places)]


def _gather(given: Sequence[Any], attributes: Attributes) -> Any:
    x, indices, axis = given[0], given[1], int(attributes.get("axis", 0))
    _small([*x.shape[:axis], *indices.shape, *x.shape[axis:][1:]])
    return x.take(indices, axis)


def _cast(given: Sequence[Any], attributes: Attributes) -> Any:
    dtype = onnx_package().helper.tensor_dtype_to_np_dtype(int(attributes["to"]))
    return given[0].astype(dtype)


def _range(given: Sequence[Any], attributes: Attributes) -> Any:
    start, limit, step = (each.reshape(-1)[0].item() for each in given)
    if not step or not math.isfinite(start + limit + step):
        raise Unsupported(f"a range from {start} to {limit} by {step}")
    _small([max(0, math.ceil((limit - start) / step))])
    return np.arange(start, limit, step).astype(given[0].dtype)


def _expand(given: Sequence[Any], attributes: Attributes) -> Any:
    shape = _small(np.broadcast_shapes(given[0].shape, tuple(int(size) for size in given[1].reshape(-1))))
    return np.broadcast_to(given[0], shape)


def _concat(given: Sequence[Any], attributes: Attributes) -> Any:
    _small([sum(each.size for each in given)])
    return np.concatenate(given, int(attributes["axis"]))


def _transpose(given: Sequence[Any], attributes: Attributes) -> Any:
    return given[0].transpose(attributes.get("perm"))


def _reduced(function: Callable[..., Any]) -> Callable[..., Any]:
    def made(given: Sequence[Any], attributes: Attributes) -> Any:
        axes = _axes(given, 1, attributes)
        if not axes and attributes.get("noop_with_empty_axes", 0):
            return given[0]
        return np.asarray(function(given[0], axis=None if not axes else tuple(axes), keepdims=bool(attributes.get("keepdims", 1))), given[0].dtype)

    return made


FOLDED: dict[str, Callable[[Sequence[Any], Attributes], Any]] = {
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Shape": _shape,
    "Size": lambda given, attributes: np.array(given[0].size, np.int64),
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Slice": _slice,
    "Gather": _gather,
    "Cast": _cast,
    "Range": _range,
    "Expand": _expand,
    "Concat": _concat,
    "Transpose": _transpose,
    "Identity": _one(lambda x: x),
    "Add": _both(np.add),
    "Sub": _both(np.subtract),
    "Mul": _both(np.multiply),
    "Div": _both(_divided),
    "Pow": _both(lambda a, b: np.power(a, b).astype(a.dtype)),
    "Neg": _one(np.negative),
    "Abs": _one(np.abs),
    "Sqrt": _one(np.sqrt),
    "Reciprocal": _one(lambda x: 1 / x),
    "Exp": _one(np.exp),
    "Floor": _one(np.floor),
    "Ceil": _one(np.ceil),
    "Equal": _both(np.equal),
    "Where": _both(np.where),
    "Min": _both(lambda *given: np.minimum.reduce(np.broadcast_arrays(*given))),
    "Max": _both(lambda *given: np.maximum.reduce(np.broadcast_arrays(*given))),
    "ReduceProd": _reduced(np.prod),
    "ReduceSum": _reduced(np.sum),
    "ReduceMin": _reduced(np.min),
    "ReduceMax": _reduced(np.max),
    "ReduceMean": _reduced(np.mean),
    "ReduceSumSquare": _reduced(lambda x, **how: np.sum(np.square(x), **how)),
    "ReduceL1": _reduced(lambda x, **how: np.sum(np.abs(x), **how)),
    "ReduceL2": _reduced(lambda x, **how: np.sqrt(np.sum(np.square(x), **how))),
    "Sum": _both(lambda *given: np.add.reduce(np.broadcast_arrays(*given))),
    "Log": _one(np.log),
    "Tanh": _one(np.tanh),
    "Sigmoid": _one(lambda x: 1 / (1 + np.exp(-x))),
    "Relu": _one(lambda x: np.maximum(x, 0)),
    "Sign": _one(np.sign),
    "Round": _one(np.round),
    "Not": _one(np.logical_not),
    "And": _both(np.logical_and),
    "Or": _both(np.logical_or),
    "Greater": _both(np.greater),
    "Less": _both(np.less),
    "GreaterOrEqual": _both(np.greater_equal),
    "LessOrEqual": _both(np.less_equal),
    "Mod": _both(np.mod),
    "Flatten": lambda given, attributes: given[0].reshape(math.prod(given[0].shape[: int(attributes.get("axis", 1))]), -1),
    "Tile": lambda given, attributes: (
        np.tile(given[0], _small(given[1].reshape(-1))) if _small([*np.multiply(given[0].shape, given[1].reshape(-1))]) else given[0]
    ),
}
"""Ops of constants: the operands as arrays and the attributes -> the one output."""


MOVES = ("Cast", "CastLike", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
"""Ops whose output is their first operand in another shape, order or width: one that is trained stays the same trained numbers."""


def origins(
    nodes: Iterable[Any], arrays: Mapping[str, np.ndarray], frozen: Container[str], numbers: Container[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Where the constants that `nodes` compute come from: the array that each is in another order (`MOVES`), and for each that is computed in another
    way one array that is trained. `arrays` are those of the file: floats of several elements that are not `frozen` are trained, and `numbers`."""
    floats = {name: each.size for name, each in arrays.items() if each.dtype.kind in "fV" and name not in frozen}  # V: bfloat16
    trained = {name for name, size in floats.items() if size > 1 or name in numbers}
    constants, sources, made_of = {"", *arrays}, dict[str, str](), dict[str, str]()
    for node in nodes:
        if node.op_type in ("Shape", "Size"):
            constants.update(node.output)
        elif node.op_type in (*FOLDED, "CastLike") and constants.issuperset(node.input[:1] if node.op_type == "CastLike" else node.input):
            constants.update(node.output)
            read = [sources.get(name, name) for name in node.input]
            if node.op_type in MOVES:
                sources.update(zip(node.output[:1], read, strict=False))
            elif found := trained.intersection(made_of.get(name, name) for name in read):
                made_of.update(dict.fromkeys(node.output, min(found)))
    return sources, made_of


def folded(op: str, given: Sequence[Any], attributes: Attributes) -> np.ndarray:
    """What an op of `FOLDED` makes of constants. Raises Unsupported where it cannot."""
    try:
        with np.errstate(all="ignore"):
            made = np.asarray(FOLDED[op](given, attributes))
    except OnnxError as error:
        raise Unsupported(str(error)) from None
    except (ValueError, IndexError, KeyError, TypeError, ArithmeticError, AttributeError, MemoryError) as error:
        raise Unsupported(f"it cannot be computed of its constants ({error})") from None
    if made.size > LARGEST or made.ndim > 16:
        raise Unsupported(f"a computed constant of {made.shape} elements; {LARGEST:,} are taken")
    return made


class Room:
    """What the constants that are computed of one file may take: twenty nodes of a file of 2 KB made 5 GB, none of which was too large alone."""

    def __init__(self) -> None:
        self._left, self._known = ROOM, dict[int, np.ndarray]()

    def folded(self, op: str, given: Sequence[Any], attributes: Attributes) -> np.ndarray:
        """Fold as `folded` does; raises Unsupported also where there is no room for the result. A view of a constant takes none."""
        for each in given:
            if isinstance(each, np.ndarray):
                self._enter(each, 4)
        made = folded(op, given, attributes)
        self._enter(made, 4 if op == "Constant" else -1)
        return made

    def _enter(self, made: np.ndarray, times: int) -> None:
        """Add `times` the bytes of an array that is seen for the first time to the room that is left."""
        while isinstance(made.base, np.ndarray):
            made = made.base
        if id(made) in self._known:
            return
        if self._left + times * made.nbytes < 0:
            raise Unsupported(f"the constants that the file has computed take {ROOM:,} bytes more than four times its own, and no more are taken")
        self._known[id(made)] = made  # held, so that no other array gets its number
        self._left += times * made.nbytes
