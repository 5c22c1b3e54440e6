"""This module records a network as a flat list of steps and plans where its temporaries lie; it knows no arrays and no device.

`Tape` records; `trace` and `trace_nodes` run the layers of a list or a graph over it, forward and then backward; `drop_dead` removes what nobody
reads, `merge_sums` sums that another step makes on its way; `lower` fits the list to a row of the op table; `plan_arena` gives every temporary an
offset in one block of memory.
A backward closure mentions the Bufs it needs, and what it mentions stays alive: nothing is marked "save for backward".
Gradients overwrite. Where a value or a parameter has a second gradient, whoever makes that one adds it to the first by a step of its own, so
gradients are added in the order of the plan.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from nbcnn.plan.shapes import numel
from nbcnn.plan.storage import ITEMSIZE

ALIGNMENT = 256
"""Every Buf in the arena starts at a multiple of so many bytes."""

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
    base  the Buf whose memory this one shares, for the same elements under another shape; None for a Buf of its own.
    values  what a const that a layer made holds (`Tape.const`).

    Two facts that let a layer fuse with its neighbour without knowing it:
    after_relu  the values came out of a ReLU: where they are 0, no gradient passes.
    masked      this gradient is already 0 wherever the tensor that it belongs to is 0 after a ReLU.
    """

    name: str
    shape: Shape
    dtype: str = "float32"
    home: str = "arena"
    base: Buf | None = None
    after_relu: bool = False
    masked: bool = False
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


@dataclass(frozen=True, eq=False)
class Step:
    """One step of the plan: an op, what it reads, what it writes, and the layer that recorded it."""

    op: str
    ins: tuple[Buf, ...]
    outs: tuple[Buf, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    scope: str = ""


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
    count     what the loss counts in the mean of an epoch, where a loss sets it (a float64 scalar); None: its examples.
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
        self.part, self.together = 1.0, False
        self.count: Buf | None = None
        # The input as the layers in front leave it that prepare it (whitening), which an autoencoder gives back; None without such layers.
        self.prepared: Buf | None = None
        self._graded: set[str] = set()

    def begin_part(self) -> None:
        """Begin another part of a batch: the network is recorded once more, and its gradients take the place of those of the part before."""
        self.asked, self._graded, self.count, self.prepared = {}, set(), None, None

    def temp(self, name: str, shape: Shape, dtype: str = "float32", *, after_relu: bool = False, masked: bool = False) -> Buf:
        """A new temporary; `Buf` explains `after_relu` and `masked`."""
        return Buf(name, shape, dtype, after_relu=after_relu, masked=masked)

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

    def emit(self, op: str, ins: Iterable[Buf], outs: Iterable[Buf], scope: str = "", **attrs: Any) -> None:
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
        self.steps += [Step("add", (first, temp), (first,), {}, scope) for first, temp in second]


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
"""A layer with its name: fused layers keep the names of the layers that they replace."""


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
    sum is recorded behind the one that is made later. A sum of gradients is masked only if both are (`Buf`).
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
                total = tape.temp(f"{scope}.sum", dy.shape, masked=first.masked and dy.masked)
                tape.emit("add", [first, dy], [total], scope)
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


ADDS_GRADIENTS = {"batchnorm_add_relu_grads": 6}
"""Ops whose first operand is a gradient to which they can add a second, and their operands without it: it comes behind these."""


def merge_sums(steps: Sequence[Step]) -> list[Step]:
    """The steps without the sums of two gradients that one step alone reads and can add by itself: what a value that is read twice has."""
    readers = Counter(buf.root for step in steps for buf in step.ins)
    sums = {step.outs[0].root: step for step in steps if step.op == "add" and step.outs[0].root.home == "arena"}
    made, gone = list[Step](), set[int]()
    for step in steps:
        total = sums.get(step.ins[0].root) if ADDS_GRADIENTS.get(step.op) == len(step.ins) else None
        if total is not None and readers[total.outs[0].root] == 1 and total.outs[0].shape == step.ins[0].shape:
            gone.add(id(total))
            step = replace(step, ins=(total.ins[0], *step.ins[1:], total.ins[1]))
        made.append(step)
    return [step for step in made if id(step) not in gone]


@dataclass(frozen=True)
class Resolution:
    """How one step runs: the implementation, its tile, and what it needs besides its operands.

    mode     the name of the row's fallback that the implementation comes from.
    packs    (terms, elements) of the packed weight that it reads, and `packed` its dtype; None if it reads no packed weight.
    reasons  why earlier implementations of the chain were passed over, in words.
    """

    impl: Any
    mode: str
    tile: Any = None
    scratch_bytes: int = 0
    packs: tuple[int, int] | None = None
    packed: str = "float32"
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Planned:
    """A step with its resolution, its scratch Buf (None without) and its slice of the packed weights (Buf, start, count in elements).

    `side`: it may run beside the steps that follow it, up to the first that reads a gradient.
    """

    step: Step
    how: Resolution
    scratch: Buf | None = None
    packed: tuple[Buf, int, int] | None = None
    side: bool = False


@dataclass(frozen=True, eq=False)
class Plan:
    """A lowered list of steps with an offset in the arena for every temporary.

    packs   the Bufs of packed weights, one for each dtype that is wanted, with the Bufs of their index maps.
    store   how activations are stored.
    """

    steps: tuple[Planned, ...]
    offsets: Mapping[Buf, int]
    arena_bytes: int
    packs: Mapping[Buf, Buf]
    layout: str
    store: str


def lower(
    steps: Sequence[Step],
    layout: str,
    resolve: Callable[[Step], Resolution],
    flat_params: Buf | None = None,
    store: str = "float32",
    branching: bool = False,
) -> Plan:
    """Fit recorded steps to a row: how activations are stored, converts at the two doors, packed weights, scratch, the arena.

    `resolve` says how a step runs. Weights that implementations want in another order are gathered by a `pack_weights`
    step for each dtype at the start of every plan, so an update or a loaded checkpoint can never leave a stale copy.
    `branching` lets weight gradients run beside the rest of the backward pass, which keeps what they read alive longer.
    """
    hows = [(step, resolve(step)) for step in _stored(_convert_doors(steps, layout, store), store)]
    slots, sizes = _place_packed(hows)
    packed = {dtype: Buf(f"packed weights {dtype}", (count,), dtype) for dtype, (_, count) in sizes.items()}
    maps = {packed[dtype]: Buf(f"pack map {dtype}", size, "int32", "const") for dtype, size in sizes.items()}
    if maps and flat_params is None:
        raise ValueError("a plan that packs weights needs the flat parameter Buf")
    # A shared layer's second gradient is added to its first within the backward pass: the side branch is joined there, and not opened again.
    joined = next((at for at, (step, _) in enumerate(hows) if _reads_gradient(step)), len(hows))
    planned = []
    for buf, index in maps.items():
        pack = Step("pack_weights", (flat_params, index), (buf,), {}, "pack")  # type: ignore[arg-type]
        planned.append(Planned(pack, resolve(pack)))
    for at, ((step, how), slot) in enumerate(zip(hows, slots, strict=True)):
        scratch = Buf(f"{step.scope}.{step.op}.scratch", (how.scratch_bytes,), "uint8") if how.scratch_bytes else None
        side = branching and at < joined and all(buf.root.home == "grad" for buf in step.outs)
        planned.append(Planned(step, how, scratch, slot and (packed[how.packed], *slot), side))
    planned = _pack_made(planned, maps, resolve)
    offsets, total = plan_arena(planned)
    return Plan(tuple(planned), offsets, total, maps, layout, store)


def _place_packed(hows: Sequence[tuple[Step, Resolution]]) -> tuple[list[tuple[int, int] | None], dict[str, tuple[int, int]]]:
    """(start, count) of every step's packed weight, and by dtype the (terms, elements) of all of them together.

    A weight that another step makes is none of these: `_pack_made`. Steps that run alike on one weight, as those of the parts of a batch do, share a
    copy.
    """
    slots: list[tuple[int, int] | None] = []
    sizes: dict[str, tuple[int, int]] = {}
    known: dict[Any, tuple[int, int]] = {}
    for step, how in hows:
        if how.packs is None or _weight_made(step):
            slots.append(None)
            continue
        shapes = tuple(buf.shape for buf in (*step.ins, *step.outs))
        key = (step.op, step.ins[1].root, how.packed, how.packs, id(how.impl), how.tile, shapes, tuple(sorted(step.attrs.items())))
        if key in known:
            slots.append(known[key])
            continue
        terms, count = how.packs
        most, start = sizes.get(how.packed, (1, 0))
        known[key] = start, count
        slots.append((start, count))
        itemsize = ITEMSIZE[how.packed]
        sizes[how.packed] = max(most, terms), start + _align(count * itemsize, ALIGNMENT) // itemsize
    return slots, sizes


def _weight_made(step: Step) -> bool:
    """Whether another step makes the weight that this one reads: a temporary of one axis, which no row rounds."""
    return any(buf.root.home == "arena" and len(buf.root.shape) == 1 for buf in step.ins[1:2])


def _pack_made(planned: Sequence[Planned], maps: dict[Buf, Buf], resolve: Callable[[Step], Resolution]) -> list[Planned]:
    """The steps with a `pack_weights` step before each that wants a packed copy of a weight that a step makes (a folded norm); adds to `maps`."""
    made: list[Planned] = []
    for item in planned:
        if item.how.packs is not None and _weight_made(item.step):
            weight, size, name = item.step.ins[1].root, item.how.packs, f"{item.step.scope}.packed weight"
            packed, index = Buf(name, size[1:], item.how.packed), Buf(f"{name} map", size, "int32", "const")
            maps[packed] = index
            pack = Step("pack_weights", (weight, index), (packed,), {}, item.step.scope)
            made.append(Planned(pack, resolve(pack)))
            item = replace(item, packed=(packed, 0, size[1]))
        made.append(item)
    return made


def _stored(steps: Sequence[Step], store: str) -> list[Step]:
    """The steps with every activation and every gradient of one kept as `store`: temporaries of two axes or more."""
    if store == "float32":
        return list(steps)
    stored: dict[Buf, Buf] = {}

    def swap(buf: Buf) -> Buf:
        root = buf.root
        if root.home != "arena" or root.dtype != "float32" or len(root.shape) < 2:
            return buf
        kept = stored.setdefault(root, replace(root, dtype=store))
        return kept if buf is root else kept.reshaped(buf.shape)

    return [replace(step, ins=tuple(map(swap, step.ins)), outs=tuple(map(swap, step.outs))) for step in steps]


def _in_order(shape: Shape, layout: str) -> bool:
    """Whether images of this shape lie in memory in C, H, W order: always in NCHW, and where there is one channel or one pixel."""
    return layout == "NCHW" or shape[1] == 1 or numel(shape[2:]) == 1


def _without_copies(steps: Sequence[Step], layout: str) -> list[Step]:
    """The steps without those that flatten images, or give vectors the shape of images, where both lie in memory alike: readers take the source.

    A result that is not a temporary is the caller's, who finds it where he looks; then the step stays, and copies.
    """
    instead: dict[Buf, Buf] = {}

    def swap(buf: Buf) -> Buf:
        source = instead.get(buf.root)
        return buf if source is None else source.reshaped(buf.shape)

    made: list[Step] = []
    for step in steps:
        step = replace(step, ins=tuple(map(swap, step.ins)), outs=tuple(map(swap, step.outs)))
        if step.op in ("flatten_fprop", "flatten_dgrad"):
            source, target = step.ins[0], step.outs[0]
            images = source if step.op == "flatten_fprop" else target
            if _in_order(images.shape, layout) and source.root.home == target.root.home == "arena":
                instead[target.root] = source.root
                continue
        made.append(step)
    return made


def _convert_doors(steps: Sequence[Step], layout: str, store: str) -> list[Step]:
    """Convert the caller's floats on their way in and out, where a row stores them in another layout or rounded."""
    inside: dict[Buf, Buf] = {}
    made: list[Step] = []
    steps = _without_copies(steps, layout)

    def is_door(buf: Buf) -> bool:
        other = (len(buf.shape) == 4 and not _in_order(buf.shape, layout)) or (store != "float32" and len(buf.shape) >= 2)
        return buf.home == "io" and buf.dtype == "float32" and other

    def convert(source: Buf, target: Buf, layouts: tuple[str, str], scope: str) -> Step:
        # Only images have two layouts: vectors and series are one row of channels an example.
        shape = source.shape if len(source.shape) == 4 else (source.shape[0], numel(source.shape[1:]), 1, 1)
        attrs = dict(zip(("source", "target"), layouts, strict=True))
        return Step("convert", (source.reshaped(shape),), (target.reshaped(shape),), attrs, scope)

    for step in steps:
        ins = []
        for buf in step.ins:
            if is_door(buf) and buf not in inside:
                inside[buf] = Buf(f"{buf.name}.{layout}", buf.shape, buf.dtype)
                made.append(convert(buf, inside[buf], ("NCHW", layout), step.scope))
            ins.append(inside.get(buf, buf))
        outs, leaving = [], []
        for buf in step.outs:
            if is_door(buf):
                kept = Buf(f"{buf.name}.{layout}", buf.shape, buf.dtype)
                leaving.append(convert(kept, buf, (layout, "NCHW"), step.scope))
                buf = kept
            outs.append(buf)
        made.append(replace(step, ins=tuple(ins), outs=tuple(outs)))
        made.extend(leaving)
    return made


def _align(count: int, to: int) -> int:
    return -(-count // to) * to


def join(planned: Sequence[Planned]) -> int:
    """The number of the first step that reads a gradient: the side branch must have ended by then."""
    return next((at for at, item in enumerate(planned) if _reads_gradient(item.step)), len(planned))


def _reads_gradient(step: Step) -> bool:
    return any(buf.root.home == "grad" for buf in step.ins)


def lifetimes(planned: Sequence[Planned]) -> dict[Buf, tuple[int, int]]:
    """First and last step during which each temporary is needed."""
    spans: dict[Buf, tuple[int, int]] = {}
    joined = join(planned)
    for at, item in enumerate(planned):
        last = max(at, joined) if item.side else at
        touched = [*item.step.ins, *item.step.outs]
        if item.scratch is not None:
            touched.append(item.scratch)
        if item.packed is not None:
            touched.append(item.packed[0])
        for buf in touched:
            root = buf.root
            if root.home == "arena":
                first, known = spans.get(root, (at, at))
                spans[root] = (first, max(known, last))
    return spans


def plan_arena(planned: Sequence[Planned]) -> tuple[dict[Buf, int], int]:
    """Returns offsets in bytes for all temporaries, and the arena's size: greedy by size over lifetimes first use..last use.

    Largest first, each at the lowest offset that is free during its whole life (best known simple heuristic for offline
    allocation; Pisarchyk and Lee, "Efficient memory management for deep neural net inference", 2020).
    """
    spans, beside = _places(planned)
    placed: list[tuple[int, int, Buf]] = []
    offsets: dict[Buf, int] = {}
    for buf in sorted(spans, key=lambda b: (-b.nbytes, spans[b][0])):
        first, last = spans[buf]
        at = 0
        for start, end, other in placed:
            overlaps = spans[other][0] <= last and first <= spans[other][1]
            if overlaps and start < at + buf.nbytes and at < end:
                at = _align(end, ALIGNMENT)
        offsets[buf] = at
        placed.append((at, at + max(buf.nbytes, 1), buf))
        placed.sort(key=lambda entry: entry[0])
    offsets |= {buf: offsets[largest] for buf, largest in beside.items()}
    return offsets, _align(max((end for _, end, _ in placed), default=0), ALIGNMENT)


def _places(planned: Sequence[Planned]) -> tuple[dict[Buf, tuple[int, int]], dict[Buf, Buf]]:
    """The lifetimes of what wants a place of its own, and by Buf the one in whose place it lies.

    Steps of the side branch run one after another, so one scratch, as large as the largest, serves them all: at batch 1 that is half of the arena.
    """
    spans = lifetimes(planned)
    beside = sorted((item.scratch for item in planned if item.side and item.scratch is not None), key=lambda buf: -buf.nbytes)
    if len(beside) < 2:
        return spans, {}
    largest, *others = beside
    lives = [spans.pop(buf) for buf in beside]
    spans[largest] = min(first for first, _ in lives), max(last for _, last in lives)
    return spans, dict.fromkeys(others, largest)


def live_bytes(planned: Sequence[Planned]) -> int:
    """The largest sum of temporaries alive at one step: no arena can be smaller."""
    spans, _ = _places(planned)
    return max((sum(b.nbytes for b, (first, last) in spans.items() if first <= at <= last) for at in range(len(planned))), default=0)
