"""This module says what a layer is: its parameters, the sizes of its input, and what is asked of a list of layers.

A layer is a frozen dataclass whose arguments have PyTorch's names; behind the first one or two they are given by name (`arguments.py`). What
its input's size is may be left out (`in_channels`, `in_features`, `channels`: None), and `sized` fills it in from the shape of one example.
`build(tape, x, scope)` records its forward and returns (y, backward); `backward(dy)` records its backward and returns dx. `params()` names its
parameters, `state()`, where a layer has it, what training updates in place (norms.py). Shapes are logical: images (N, C, H, W), vectors (N, F),
series (N, C, L); values are float32 as the caller sees them, whatever a mode stores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.nn.graphs import Graph, Layer, filled
from nbcnn.plan.graph import Backward, Buf, ShapeError, Tape, named
from nbcnn.plan.op import Op

Built = tuple[Buf, Backward]


@dataclass(frozen=True)
class Param:
    """A parameter's shape; `fan_in` sets the scale of its first values, unless `first` makes them (a NumPy generator, the shape ->
    array); `decay` says whether weight decay applies."""

    shape: tuple[int, ...]
    fan_in: int
    decay: bool = True
    bias: bool = False
    first: Callable[[Any, tuple[int, ...]], Any] | None = None


def constant(value: float) -> Callable[[Any, tuple[int, ...]], Any]:
    """A function for `Param.first` that sets every element to `value`."""
    return lambda random, shape: np.full(shape, value)


def unsized() -> Any:
    """The field of a layer that holds the size of its input, by keyword only; None until `sized` knows it."""
    return field(default=None, kw_only=True)


def later(default: Any) -> Any:
    """A field that the layer of an earlier version did not have.

    What a file says of a network leaves it out where it is `default` (`description.as_data`), so that older files, and the digests by which a run
    knows its network, stay what they are.
    """
    return field(default=default, kw_only=True, metadata={"later": True})


def counts(layer: Any, *names: str, least: int = 1) -> None:
    """Raise UsageError unless the fields `names` of `layer` are whole numbers, or pairs of them, of at least `least`; None is no number yet.

    Numbers of NumPy become ints, which files can hold.
    """
    for name in names:
        value = getattr(layer, name)
        if isinstance(value, np.integer) or (isinstance(value, tuple) and any(isinstance(each, np.integer) for each in value)):
            value = tuple(map(_plain, value)) if isinstance(value, tuple) else _plain(value)
            object.__setattr__(layer, name, value)
        for each in value if isinstance(value, tuple) else (value,):
            if value is not None and (isinstance(each, bool) or not isinstance(each, int) or each < least):
                raise _no_count(type(layer).__name__, name, value, f"at least {least}")
        if isinstance(value, tuple) and len(value) != 2:
            raise UsageError(f"{type(layer).__name__} takes one {name} or a pair, got {quoted(value)}")


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, np.integer) else value


def whole_number(owner: str, name: str, value: Any, least: int = 1, below: float = math.inf) -> int:
    """`value` as an int: an int, or a number of NumPy or a float that is whole. Raises UsageError for another, and outside of `least` to `below`."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or int(value) != value or not least <= int(value) < below:
        raise _no_count(owner, name, value, f"at least {least}" + (f" and less than {below:,}" if below < math.inf else ""))
    return int(value)


def _no_count(owner: str, name: str, value: Any, bounds: str) -> UsageError:
    return UsageError(f"{owner} needs a whole number of {bounds} as {name}, got {quoted(value)}")


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def images(x: Buf, scope: str) -> tuple[int, int, int, int]:
    """x's shape; raises ShapeError if x is no batch of images."""
    if len(x.shape) != 4:
        raise ShapeError(f"{scope} takes images (N, C, H, W), got {x.shape}")
    n, c, h, w = x.shape
    return n, c, h, w


def fitting(scope: str, x: Buf, make: Any) -> Any:
    """The result of `make()`; its error names the layer and its input if the shape does not fit."""
    try:
        return make()
    except ValueError as error:
        raise ShapeError(f"{scope}: {error} (its input is {x.shape})") from None


class NoParams(Layer):
    def params(self) -> dict[str, Param]:
        return {}


def linear_map(tape: Tape, x: Buf, scope: str, kind: str, shape: tuple[int, ...], **attrs: Any) -> Built:
    """y = A x with a constant A: dx = Aᵀ dy needs nothing from the forward pass."""
    y = tape.temp(f"{scope}.y", shape)
    tape.emit(Op(kind, "fprop"), [x], [y], scope, **attrs)

    def backward(dy: Buf) -> Buf:
        dx = tape.temp(f"{scope}.dx", x.shape)
        tape.emit(Op(kind, "dgrad"), [dy], [dx], scope, **attrs)
        return dx

    return y, backward


def parameters(layers: Sequence[Any]) -> dict[str, Param]:
    """All parameters of a list of layers under their full names (conv1.weight, residual1.conv1.bias, …)."""
    made: dict[str, Param] = {}
    for name, layer in named(layers):
        made.update({f"{name}.{inner}": param for inner, param in layer.params().items()})
    return made


def states(layers: Sequence[Any]) -> dict[str, Param]:
    """All states of a list of layers, which training updates in place (running statistics), under full names like parameters."""
    made: dict[str, Param] = {}
    for name, layer in named(layers):
        own = layer.state() if hasattr(layer, "state") else {}
        made.update({f"{name}.{inner}": state for inner, state in own.items()})
    return made


def known(layer: Any) -> int:
    """The size of the layer's input. Raises UsageError if it was left out and nothing has filled it in."""
    size = getattr(layer, layer.size_of_input)
    if size is None:
        raise UsageError(f"{type(layer).__name__} does not know its {layer.size_of_input} yet: build the network for a shape first, or give it")
    return int(size)


def sized(layers: Sequence[Any], shape: tuple[int, ...]) -> Any:
    """A list of `layers`, or a graph, with the sizes of inputs filled in, for examples of `shape`: (C, H, W), (F,) or (F, L). A loss stays as it is.

    Raises UsageError for no layers, for a loss that is not the last of them, and for a layer object with parameters that is there twice; ShapeError
    if a layer does not take what it gets.
    """
    if isinstance(layers, Graph):
        return layers.sized(shape)
    if not [layer for layer in layers if not hasattr(layer, "needs_labels")]:
        raise UsageError("a network needs at least one layer besides its loss")
    early = [at for at, layer in enumerate(layers[:-1]) if hasattr(layer, "needs_labels")]
    if early:
        raise UsageError(f"the loss {type(layers[early[0]]).__name__} is layer {early[0] + 1} of {len(layers)}: a loss must be the last")
    made, x, tape = [], Buf("x", (1, *shape)), Tape(training=False)
    for name, layer in named(layers):
        if hasattr(layer, "needs_labels"):
            made.append(layer)
            continue
        made.append(filled(layer, x, name))
        x, _ = made[-1].build(tape, x, name)
        before = next((at for at, other in enumerate(layers[: len(made) - 1]) if other is layer), None)
        if before is not None and made[-1].params():
            kind = type(layer).__name__
            raise UsageError(
                f"layers {before + 1} and {len(made)} of the list are one {kind} object: for two sets of weights make two, [{kind}(…), {kind}(…)] "
                f"and not [{kind}(…)] * 2; to share one set, call it twice on values: x = nbcnn.Input(shape); Model(x, layer(layer(x)), loss=…)"
            )
    return made
