"""Recording a network as a flat list of steps, and planning where its temporaries live. No arrays, no device.

`Tape` records; `trace` runs the layers over it, forward and then backward; `drop_dead` removes what nobody reads;
`lower` fits the list to a row of the op table; `plan_arena` gives every temporary an offset in one block of memory.
A backward closure mentions the Bufs it needs, and what it mentions stays alive: nothing is marked "save for backward".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nbcnn.shapes import numel
from nbcnn.storage import ITEMSIZE

ALIGNMENT = 256
"""Bytes; every Buf in the arena starts at a multiple of it."""

_KEPT_HOMES = frozenset({"param", "grad", "state", "io"})

Shape = tuple[int, ...]


class ShapeError(ValueError):
    """A layer was given an input that it cannot take; the message names the layer and both shapes."""

    exit_code = 2


@dataclass(frozen=True, eq=False)
class Buf:
    """A symbolic array: logical shape (images N, C, H, W), dtype, and where it lives.

    home  arena (a temporary), param, grad, state (updated in place, survives steps), io (the caller's data),
          const (made once when a plan is bound).
    base  the Buf whose memory this one shares, for the same elements under another shape; None for a Buf of its own.
    """

    name: str
    shape: Shape
    dtype: str = "float32"
    home: str = "arena"
    base: Buf | None = None

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
    """One sentence of the plan: an op, what it reads, what it writes, and the layer that said it."""

    op: str
    ins: tuple[Buf, ...]
    outs: tuple[Buf, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    scope: str = ""


Backward = Callable[[Buf], Buf]


class Tape:
    """Records steps. `training` says which form a layer should record."""

    def __init__(self, training: bool) -> None:
        self.training = training
        self.steps: list[Step] = []
        self.params: dict[str, Buf] = {}

    def temp(self, name: str, shape: Shape, dtype: str = "float32") -> Buf:
        """A new temporary."""
        return Buf(name, shape, dtype)

    def param(self, scope: str, name: str, shape: Shape) -> Buf:
        """The parameter `scope.name`; the same Buf however often it is asked for."""
        full = f"{scope}.{name}"
        return self.params.setdefault(full, Buf(full, shape, home="param"))

    def grad(self, param: Buf) -> Buf:
        """The place of `param`'s gradient."""
        return Buf(param.name, param.shape, home="grad")

    def emit(self, op: str, ins: Iterable[Buf], outs: Iterable[Buf], scope: str = "", **attrs: Any) -> None:
        """Record one step."""
        self.steps.append(Step(op, tuple(ins), tuple(outs), attrs, scope))


def names(layers: Sequence[Any]) -> list[str]:
    """One name per layer: its kind and its number among that kind (conv1, relu1, pool1, conv2, …)."""
    seen: dict[str, int] = {}
    made = []
    for layer in layers:
        seen[layer.kind] = seen.get(layer.kind, 0) + 1
        made.append(f"{layer.kind}{seen[layer.kind]}")
    return made


def trace(tape: Tape, layers: Sequence[Any], x: Buf, prefix: str = "") -> tuple[Buf, Backward]:
    """Record `layers` forward from `x`; return the output and the function that records their backward in reverse."""
    backwards = []
    for name, layer in zip(names(layers), layers, strict=True):
        x, backward = layer.build(tape, x, prefix + name)
        backwards.append(backward)

    def backward_all(dy: Buf) -> Buf:
        for backward in reversed(backwards):
            dy = backward(dy)
        return dy

    return x, backward_all


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

    mode     the part of the row that the implementation comes from.
    reasons  why earlier implementations of the chain were passed over, in words.
    """

    impl: Any
    mode: str
    tile: Any = None
    scratch_bytes: int = 0
    packed_count: int = 0
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Planned:
    """A step with its resolution, its scratch Buf (None without) and its slice of the packed weights in elements."""

    step: Step
    how: Resolution
    scratch: Buf | None = None
    packed: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class Plan:
    """A lowered list of steps with an offset in the arena for every temporary."""

    steps: tuple[Planned, ...]
    offsets: Mapping[Buf, int]
    arena_bytes: int
    packed: Buf | None
    pack_map: Buf | None
    flat_params: Buf | None
    layout: str


def lower(steps: Sequence[Step], layout: str, resolve: Callable[[Step], Resolution], flat_params: Buf | None = None) -> Plan:
    """Fit recorded steps to a row: converts at the two doors, packed weights, scratch, then the arena.

    `resolve` says how a step runs. Weights that implementations want in another order are gathered by one
    `pack_weights` step at the start of every plan, so an update or a loaded checkpoint can never leave a stale copy.
    """
    doors = _convert_doors(steps, layout)
    planned: list[Planned] = []
    packed_at = 0
    for step in doors:
        how = resolve(step)
        scratch = Buf(f"{step.scope}.{step.op}.scratch", (how.scratch_bytes,), "uint8") if how.scratch_bytes else None
        packed = None
        if how.packed_count:
            packed = (packed_at, how.packed_count)
            packed_at += _align(how.packed_count * 4, ALIGNMENT) // 4
        planned.append(Planned(step, how, scratch, packed))
    packed_buf = pack_map = None
    if packed_at:
        if flat_params is None:
            raise ValueError("a plan that packs weights needs the flat parameter Buf")
        packed_buf = Buf("packed weights", (packed_at,))
        pack_map = Buf("pack map", (packed_at,), "int32", "const")
        pack = Step("pack_weights", (flat_params, pack_map), (packed_buf,), {}, "pack")
        planned.insert(0, Planned(pack, resolve(pack)))
    offsets, total = plan_arena(planned, packed_buf)
    return Plan(tuple(planned), offsets, total, packed_buf, pack_map, flat_params, layout)


def _convert_doors(steps: Sequence[Step], layout: str) -> list[Step]:
    """Where a row stores NHWC, convert the caller's float images on their way in and out."""
    if layout == "NCHW":
        return list(steps)
    inside: dict[Buf, Buf] = {}
    made: list[Step] = []
    for step in steps:
        ins = []
        for buf in step.ins:
            if _is_door(buf) and buf not in inside:
                inside[buf] = Buf(f"{buf.name}.{layout}", buf.shape, buf.dtype)
                made.append(Step("convert", (buf,), (inside[buf],), {"source": "NCHW", "target": layout}, step.scope))
            ins.append(inside.get(buf, buf))
        outs, leaving = [], []
        for buf in step.outs:
            if _is_door(buf):
                stored = Buf(f"{buf.name}.{layout}", buf.shape, buf.dtype)
                leaving.append(Step("convert", (stored,), (buf,), {"source": layout, "target": "NCHW"}, step.scope))
                buf = stored
            outs.append(buf)
        made.append(replace(step, ins=tuple(ins), outs=tuple(outs)))
        made.extend(leaving)
    return made


def _is_door(buf: Buf) -> bool:
    return buf.home == "io" and buf.dtype == "float32" and len(buf.shape) == 4


def _align(count: int, to: int) -> int:
    return -(-count // to) * to


def lifetimes(planned: Sequence[Planned], packed: Buf | None = None) -> dict[Buf, tuple[int, int]]:
    """First and last step that touches each temporary."""
    spans: dict[Buf, tuple[int, int]] = {}
    for at, item in enumerate(planned):
        touched = [*item.step.ins, *item.step.outs]
        if item.scratch is not None:
            touched.append(item.scratch)
        if item.packed is not None and packed is not None:
            touched.append(packed)
        for buf in touched:
            root = buf.root
            if root.home == "arena":
                spans[root] = (spans.get(root, (at, at))[0], at)
    return spans


def plan_arena(planned: Sequence[Planned], packed: Buf | None = None) -> tuple[dict[Buf, int], int]:
    """Offsets in bytes for all temporaries, and the arena's size: greedy by size over lifetimes first use..last use.

    Largest first, each at the lowest offset that is free during its whole life (best known simple heuristic for offline
    allocation; Pisarchyk and Lee, "Efficient memory management for deep neural net inference", 2020).
    """
    spans = lifetimes(planned, packed)
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
    return offsets, _align(max((end for _, end, _ in placed), default=0), ALIGNMENT)


def live_bytes(planned: Sequence[Planned], packed: Buf | None = None) -> int:
    """The largest sum of temporaries alive at one step: no arena can be smaller."""
    spans = lifetimes(planned, packed)
    return max((sum(b.nbytes for b, (first, last) in spans.items() if first <= at <= last) for at in range(len(planned))), default=0)
