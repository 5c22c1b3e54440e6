"""This module records a network as a flat list of steps; it knows no arrays and no device.

`Tape` records; `trace` and `trace_nodes` run the layers of a list or a graph over it, forward and then backward; `drop_dead` removes what nobody
reads. `nbcnn.plan.merging` merges neighbours, `nbcnn.plan.lowering` fits the list to a row of the op table, and `nbcnn.plan.arena` gives every
temporary an offset in one block of memory: a `Plan` says both.
A backward closure mentions the Bufs it needs, and what it mentions stays alive: nothing is marked "save for backward".
Gradients overwrite. Where a value or a parameter has a second gradient, whoever makes that one adds it to the first by a step of its own, so
gradients are added in the order of the plan.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from nbcnn.plan.op import Op
from nbcnn.plan.packing import Placement
from nbcnn.plan.shapes import numel
from nbcnn.plan.storage import ITEMSIZE

_KEPT_HOMES = frozenset({"param", "grad", "state", "io"})

Shape = tuple[int, ...]


class ShapeError(ValueError):
    """A layer was given an input that it cannot take; the message names the layer and both shapes. On the command line the exit code is 2.

    Example:
        >>> import nbcnn
        >>> try:
        ...     nbcnn.Model([nbcnn.Conv2d(4, 9)], mode="cpu").build((3, 8, 8))
        ... except nbcnn.ShapeError as error:
        ...     print(error)
        conv1: a window of 9 does not fit into 8 elements padded by 0 (its input is (1, 3, 8, 8))
    """

    exit_code = 2


@dataclass(frozen=True, eq=False)
class Buf:
    """A symbolic array: logical shape (images N, C, H, W), dtype, and where it lives.

    home  arena (a temporary), param, grad, state (updated in place, survives steps), io (the caller's data),
          const (made once when a plan is bound).
    base  the Buf whose memory this one shares: the same elements under another shape, or a part of its channels; None for a Buf of its own.
    first  of a part of the channels of `base` the first; None where it is no part.
    values  what a const that a layer made holds (`Tape.const`).
    """

    name: str
    shape: Shape
    dtype: str = "float32"
    home: str = "arena"
    base: Buf | None = None
    first: int | None = None
    values: tuple[float, ...] | None = None

    @property
    def root(self) -> Buf:
        """The Buf that owns the memory."""
        return self if self.base is None else self.base.root

    @property
    def nbytes(self) -> int:
        return numel(self.shape) * ITEMSIZE[self.dtype]

    def reshaped(self, shape: Shape) -> Buf:
        """The same memory under another shape of equal size; raises ShapeError if the sizes differ."""
        if numel(shape) != numel(self.shape):
            raise ShapeError(f"{self.name}: {self.shape} has {numel(self.shape)} elements, {shape} has {numel(shape)}")
        return replace(self, shape=shape, base=self.root)

    def within(self, whole: Buf, first: int) -> Buf:
        """This value as a part of another: it lies in the channels of `whole` from `first` on."""
        return replace(self, base=whole, first=first)


@dataclass(frozen=True, eq=False)
class Step:
    """One step of the plan: an op, what it reads, what it writes, and the layer that recorded it."""

    op: Op
    ins: tuple[Buf, ...]
    outs: tuple[Buf, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    scope: str = ""


class Fusion(NamedTuple):
    """Steps that were to go and those that were to come in their place, each with its estimated microseconds, and whether they did."""

    gone: Mapping[Step, float]
    come: Mapping[Step, float]
    kept: bool


Backward = Callable[[Buf], Buf]


@dataclass(frozen=True)
class Sync:
    """Statistics of a batch are taken over all ranks: this is `rank` of `ranks`, which has `images` of the batch, a part of `weight`."""

    rank: int
    ranks: int
    images: int
    weight: float


class Tape:
    """Records steps. `training` says which form a layer should record; `sync` whether statistics of a batch are of several ranks.

    part      what this rank's examples count in the batch of all ranks, 0 to 1; in an evaluation, where ranks do not meet, 1, or 0 for a rank that
              has no example of the batch.
    together  several ranks train together, so that a loss whose mean is over something else than examples must add that up.
    count     what the loss of this rank's examples counts in the mean of an epoch, where a loss sets it (a float64 scalar); None: its examples.
    total     where a loss sets `count`, what the examples of all ranks count (1,).
    in_parts  the batch is computed in parts: such a loss divides each by its rows, not by `total`, which is 0 where labels of a part count nothing.
    """

    def __init__(self, training: bool, sync: Sync | None = None) -> None:
        self.training, self.sync = training, sync
        # (order, state): which examples the batch has, and which epoch it is, for layers that draw random numbers; None for a caller's own batch.
        self.examples: tuple[Buf, Buf] | None = None
        self.steps: list[Step] = []
        self.params: dict[str, Buf] = {}
        # The names of those that layers of this part of a batch have asked for, in order.
        self.asked: dict[str, None] = {}
        self.states: dict[str, Buf] = {}
        self.part, self.together, self.in_parts = 1.0, False, False
        self.count: Buf | None = None
        self.total: Buf | None = None
        # The input as the layers in front leave it that prepare it (whitening), which an autoencoder gives back; None without such layers.
        self.prepared: Buf | None = None
        self._graded: set[str] = set()

    def begin_part(self) -> None:
        """Begin another part of a batch: the network is recorded once more, and its gradients take the place of those of the part before."""
        self.asked, self._graded, self.count, self.total, self.prepared = {}, set(), None, None, None

    def temp(self, name: str, shape: Shape, dtype: str = "float32") -> Buf:
        """A new temporary."""
        return Buf(name, shape, dtype)

    def param(self, scope: str, name: str, shape: Shape) -> Buf:
        """The parameter `scope.name`; the same Buf however often it is asked for, and by whichever call of a shared layer."""
        full = f"{layer_of(scope)}.{name}"
        self.asked[full] = None
        return self.params.setdefault(full, Buf(full, shape, home="param"))

    def state(self, scope: str, name: str, shape: Shape) -> Buf:
        """The layer state `scope.name`; the same Buf however often it is asked for."""
        full = f"{layer_of(scope)}.{name}"
        return self.states.setdefault(full, Buf(full, shape, home="state"))

    def const(self, name: str, values: Sequence[float]) -> Buf:
        """A float32 vector of constants, made when the plan is bound."""
        return Buf(name, (len(values),), home="const", values=tuple(values))

    def grad(self, param: Buf) -> Buf:
        """The Buf of `param`'s gradient."""
        return Buf(param.name, param.shape, home="grad")

    def emit(self, op: Op, ins: Iterable[Buf], outs: Iterable[Buf], scope: str = "", **attrs: Any) -> None:
        """Record one step. A parameter's second gradient is made as a temporary, and the step that follows adds it to the first."""
        ins, made, second = tuple(ins), list(outs), []
        for at, buf in enumerate(made):
            grad = buf.root
            if grad.home != "grad" or any(each.root.name == grad.name for each in ins if each.root.home == "grad"):
                continue
            if grad.name in self._graded:
                # One axis, so that no row of the op table rounds it.
                temp = Buf(f"{grad.name}.second", (numel(grad.shape),))
                made[at] = temp.reshaped(buf.shape)
                second.append((grad.reshaped(temp.shape), temp))
            self._graded.add(grad.name)
        self.steps.append(Step(op, ins, tuple(made), attrs, scope))
        self.steps += [Step(Op("add"), (first, temp), (first,), {}, scope) for first, temp in second]


_CALL = re.compile(r"@\d+")


def layer_of(scope: str) -> str:
    """The name of the layer of which `scope` is a call: conv1 of conv1@2, the second call of a shared layer."""
    return _CALL.sub("", scope)


def names(layers: Sequence[Any]) -> list[str]:
    """One name per layer: its kind and its number among that kind (conv1, relu1, pool1, conv2, …); a graph knows those of its layers."""
    if hasattr(layers, "names"):
        return list(layers.names)
    seen: dict[str, int] = {}
    made = []
    for layer in layers:
        seen[layer.kind] = seen.get(layer.kind, 0) + 1
        made.append(f"{layer.kind}{seen[layer.kind]}")
    return made


Named = tuple[str, Any]
"""A layer with its name, which is the scope of its steps."""


def named(layers: Sequence[Any], prefix: str = "") -> list[Named]:
    """The layers with their names, `prefix` before each."""
    return [(prefix + name, layer) for name, layer in zip(names(layers), layers, strict=True)]


class Node(NamedTuple):
    """One call of a layer: the name of the call, and by their numbers the values that it reads and the one that it writes."""

    name: str
    layer: Any
    reads: tuple[int, ...]
    writes: int


@dataclass(frozen=True)
class Wired:
    """Layers and how they are wired: the nodes in the order of the plan, and the numbers of the outputs. Values 0, 1, … are the `inputs`."""

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    inputs: int = 1


def chain(layers: Sequence[Named]) -> Wired:
    """A list of layers, each of which reads what the one before it writes."""
    return Wired(tuple(Node(name, layer, (at,), at + 1) for at, (name, layer) in enumerate(layers)), (len(layers),))


def trace(tape: Tape, layers: Sequence[Named], x: Buf) -> tuple[Buf, Backward]:
    """Record a list of `layers` forward from `x`; return the output and the function that records their backward in reverse."""
    (y,), backward = trace_nodes(tape, chain(layers), [x])
    return y, lambda dy: backward([dy])[0]


def trace_nodes(tape: Tape, wired: Wired, inputs: Sequence[Buf]) -> tuple[list[Buf], Callable[[Sequence[Buf]], list[Buf]]]:
    """Record the calls of `wired` forward from `inputs`; return the outputs, and the function from their gradients to those of the inputs.

    A layer that joins values (`joins`) takes a list of them and gives a gradient for each. A value that is read twice has two gradients: the
    sum is recorded behind the one that is made later.
    """
    values, backwards = dict(enumerate(inputs)), list[Callable[[Buf], Any]]()
    for node in wired.nodes:
        read = [values[at] for at in node.reads]
        values[node.writes], backward = node.layer.build(tape, read if joins(node.layer) else read[0], node.name)
        backwards.append(backward)

    def backward_all(dys: Sequence[Buf]) -> list[Buf]:
        grads: dict[int, Buf] = {}

        def give(at: int, dy: Buf, scope: str) -> None:
            if at in grads:
                first = grads[at]
                total = tape.temp(f"{scope}.sum", dy.shape)
                tape.emit(Op("add"), [first, dy], [total], scope)
                dy = total
            grads[at] = dy

        for at, dy in zip(wired.outputs, dys, strict=True):
            give(at, dy, "outputs")
        for node, backward in zip(reversed(wired.nodes), reversed(backwards), strict=True):
            made = backward(grads.pop(node.writes))
            for at, dx in zip(node.reads, made if joins(node.layer) else (made,), strict=True):
                give(at, dx, node.name)
        return [grads[at] for at in range(wired.inputs)]

    return [values[at] for at in wired.outputs], backward_all


def joins(layer: Any) -> bool:
    """Whether a layer takes a list of values (Add, Mul, Concat)."""
    return bool(getattr(layer, "joins", False))


def drop_dead(steps: Sequence[Step], outputs: Iterable[Buf] = ()) -> list[Step]:
    """The steps whose results are read, in order.

    A step lives if it writes a parameter, a gradient, state, the caller's data, one of `outputs`, or an input of a step
    that lives. The first convolution's dgrad vanishes here without an `if`.
    """
    wanted = {buf.root for buf in outputs}
    kept = []
    for step in reversed(steps):
        if any(out.home in _KEPT_HOMES or out.root in wanted for out in step.outs):
            kept.append(step)
            wanted.update(buf.root for buf in step.ins)
    return kept[::-1]


@dataclass(frozen=True)
class Resolution:
    """How one step runs: the implementation, its tile, and what it needs besides its operands.

    mode     the name of the row's fallback that the implementation comes from.
    packs    (terms, elements) of the packed weight that it reads, and `packed` its dtype; None if it reads no packed weight.
    splits   by position of the operands that it splits into planes of bfloat16, the bytes that these take of its scratch.
    placement  how that copy is written without an index map; None if it wants one.
    reasons  why other implementations of the chain cannot run the step, in words.
    pitched  side, position, alignment -> whether that operand may be a part of a larger one (`nbcnn.plan.parts`).
    offered  the implementations that can, the chosen one first, each with its estimated time where that is known, in words.
    """

    impl: Any
    mode: str
    tile: Any = None
    scratch_bytes: int = 0
    packs: tuple[int, int] | None = None
    packed: str = "float32"
    reasons: tuple[str, ...] = ()
    placement: Placement | None = None
    splits: Mapping[int, int] = field(default_factory=dict)
    offered: tuple[str, ...] = ()
    pitched: Callable[[str, int, int], bool] = lambda side, position, alignment: False


class SharedPlanes(NamedTuple):
    """The planes of bfloat16 of a step's operand, which another step reads too; `made` by an earlier one, or by this one."""

    position: int
    buf: Buf
    made: bool


@dataclass(frozen=True, eq=False)
class Planned:
    """A step with its resolution, its scratch Buf (None without) and its slice of the packed weights (Buf, start, count in elements).

    `planes`: those that it shares with other steps, which have no place in its scratch.

    `side`: it may run beside the steps that follow it, up to the first that reads a gradient, or weights that were packed there.
    """

    step: Step
    how: Resolution
    scratch: Buf | None = None
    packed: tuple[Buf, int, int] | None = None
    side: bool = False
    planes: tuple[SharedPlanes, ...] = ()


@dataclass(frozen=True, eq=False)
class Plan:
    """A lowered list of steps with an offset in the arena for every temporary.

    packs   the Bufs of packed weights, one or two for each dtype that is wanted, with the Bufs of their index maps.
    tables  of those of which copies need no map, the Bufs of the tables that say how they are written (`nbcnn.plan.packing`).
    store   how activations are stored.
    fusions  what recorded steps were fused to, and what was not for its cost.
    """

    steps: tuple[Planned, ...]
    offsets: Mapping[Buf, int]
    arena_bytes: int
    packs: Mapping[Buf, Buf]
    layout: str
    store: str
    tables: Mapping[Buf, Buf] = field(default_factory=dict)
    fusions: tuple[Fusion, ...] = ()
