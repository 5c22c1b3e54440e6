"""This module makes a function of layers, with its gradient, that reads and writes arrays of the caller where they lie.

Other frameworks call it as an op of theirs (`nbcnn.torch.module`). The forward and the backward pass are one recorded list of steps, planned on one
row of the op table, and cut where the first step reads the output's gradient. What the second part reads of the first part's temporaries is `kept`
by the caller between the two; all other temporaries share an arena that a part needs only while it runs. A backward pass writes nothing that is
kept, so it may run twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from nbcnn.files.errors import UsageError
from nbcnn.gpu import driver
from nbcnn.gpu.capture import ALONE
from nbcnn.gpu.compile_pool import compile_all
from nbcnn.gpu.compiler import SIMULATOR
from nbcnn.nn.graphs import wired
from nbcnn.ops.kernel.row import Row
from nbcnn.plan.arena import ALIGNMENT, align, plan_arena
from nbcnn.plan.graph import Buf, Plan, Planned, Step, Tape, drop_dead, trace_nodes
from nbcnn.plan.merging import merge
from nbcnn.plan.shapes import numel
from nbcnn.run.program import Program, constants
from nbcnn.run.resolve import costs, plan_on

BOUND = 64
"""Sets of addresses for which a function keeps its bound launches; the one that was used longest ago goes first. An allocator that reuses memory
gives few sets, and the launches of a set that is known are enqueued without being bound again."""

FORWARD, BACKWARD, PARAMETERS = "forward", "backward", "parameters"
"""The parts of a function; PARAMETERS is the backward pass without the gradient of the input."""


class Function:
    """y = f(x; parameters, states) of `layers`, a list of them or a graph with one input, without a loss.

    shape        of a whole batch of inputs. row, device  where it runs.
    training     in which form layers are recorded. gradients  whether a backward pass is planned.
    dtype        "float32", or "float64" on the host, whose NumPy references compute in the precision of their arrays.
    fusing       fuse steps, where the row has ops for it.

    `run` takes flat arrays of the device by name: "x", "y", "dy", "dx", "kept" and "arena" (uint8), parameters and states by their names, and
    gradients of parameters by "grad." and theirs; of several outputs the further ones are "y2", "y3", … with "dy2", …. `input_shape`,
    `output_shape` (of y) and `output_shapes` (by the name of each output) are shapes of batches, `params` and `states` shapes by name,
    `kept_bytes` and `arena_bytes` sizes; `reads` names which of "x" and the outputs the backward pass reads. States are updated in place.
    `no_gradient` says why there is no backward pass, where one was wanted and a layer has none in this form.

    Raises UsageError for layers that are no function, and ShapeError where they do not fit.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        shape: tuple[int, ...],
        row: Row,
        device: Any,
        *,
        training: bool,
        gradients: bool,
        dtype: str = "float32",
        fusing: bool = True,
    ) -> None:
        if dtype == "float64" and row.device == "gpu":
            raise UsageError(f"mode {row.mode} computes in float32; float64 is for the CPU")
        self.device, self._bound = device, OrderedDict[Any, list[Any]]()
        tape, x = Tape(training), Buf("x", shape, home="io")
        made, back = trace_nodes(tape, wired(layers), [x])
        ys = {f"y{at}" if at > 1 else "y": y for at, y in enumerate(made, 1)}
        dys = [Buf(f"d{name}", y.shape, home="io") for name, y in ys.items()]
        ends = {y.root: Buf(name, y.shape, home="io") for name, y in ys.items()}
        self.no_gradient = ""
        if gradients:
            count = len(tape.steps)
            try:
                dx = back(dys)[0]
                ends[dx.root] = Buf("dx", dx.shape, home="io")
            except ValueError as error:
                # A norm in evaluation: its output is wanted all the same, and whoever asks for a gradient is told then.
                self.no_gradient = str(error)
                del tape.steps[count:]
        if x in ends or any(dy in ends for dy in dys):
            raise UsageError("these layers compute nothing: they give their input back")
        if len({y.root for y in made}) < len(made):
            raise UsageError("two outputs of these layers are the same value: give it once")
        self.input_shape, self.output_shape = x.shape, made[0].shape
        self.output_shapes = {name: y.shape for name, y in ys.items()}
        self.params = {name: buf.shape for name, buf in tape.params.items()}
        self.states = {name: buf.shape for name, buf in tape.states.items()}
        # A parameter of the caller is to a plan what another step's weight is, which has an array of its own and one axis.
        given = {buf: Buf(name, (numel(buf.shape),)) for name, buf in tape.params.items()}
        kinds = _kinds(dtype)
        steps = merge(drop_dead(_swapped(tape.steps, lambda root: ends.get(root, root))), row.ops if fusing else (), costs(row, device.target))
        steps = _swapped(steps, lambda root: kinds(given.get(root, root)))
        self._given = {kinds(buf): buf.name for buf in given.values()}
        # No flat buffer of parameters: each is packed from its own array.
        plan = plan_on(row, steps, None, target=device.target, fusing=fusing)
        self._cut(plan)
        self._constants: dict[Buf, Any] = {}

    def _cut(self, plan: Plan) -> None:
        """Cut the plan where the first step reads dy, and give what the second part reads of the first a place in what is kept."""
        steps = plan.steps
        grads = [f"d{name}" for name in self.output_shapes]
        at = next((number for number, item in enumerate(steps) if any(_is(root, *grads) for root in _reads(item))), len(steps))
        first, second = steps[:at], steps[at:]
        written = {buf.root for item in first for buf in item.step.outs if buf.root.home == "arena"}
        self._kept: dict[Buf, int] = {}
        self.kept_bytes = 0
        for root in dict.fromkeys(root for item in second for root in _reads(item)):
            if root in written:
                self._kept[root] = self.kept_bytes
                self.kept_bytes += align(root.nbytes, ALIGNMENT)
        self.reads = tuple(name for name in ("x", *self.output_shapes) if any(_is(root, name) for item in second for root in _reads(item)))
        # A step may make the gradient of the input beside those of parameters: where nobody asks for it, it is a temporary.
        spare = {buf.root: replace(buf.root, home="arena") for item in second for buf in item.step.outs if _is(buf.root, "dx")}
        alone = [replace(item, step=_swapped([item.step], lambda root: spare.get(root, root))[0]) for item in _leading_to_gradients(second)]
        wanted = {FORWARD: first, BACKWARD: second, PARAMETERS: alone}
        self._parts = {name: self._part(plan, items) for name, items in wanted.items()}
        self.arena_bytes = {name: part.arena_bytes for name, part in self._parts.items()}

    def _part(self, plan: Plan, items: Sequence[Planned]) -> Plan:
        """Some steps of the plan, with an arena for those temporaries that have no place elsewhere."""
        elsewhere = {*self._kept, *self._given}

        def here(bufs: tuple[Buf, ...]) -> tuple[Buf, ...]:
            return tuple(buf for buf in bufs if buf.root not in elsewhere)

        own = [replace(item, step=replace(item.step, ins=here(item.step.ins), outs=here(item.step.outs))) for item in items]
        offsets, total = plan_arena(own)
        made = {buf for item in items for buf in item.step.outs}
        packs = {packed: index for packed, index in plan.packs.items() if packed in made}
        return replace(plan, steps=tuple(items), offsets=offsets, arena_bytes=total, packs=packs)

    def run(self, part: str, arrays: Mapping[str, Any], stream: Any = 0) -> None:
        """Enqueue a part on `stream`; what it reads must stay in place until it has run. On the host it has run when this returns."""
        if self.device.name != "gpu" or SIMULATOR:
            for launch in self._launches(part, arrays):
                launch.run()
            return
        driver.device()  # the thread of a backward pass is one of the caller's framework, and enters the GPU's context here
        key = (part, *(array.address for array in arrays.values()))
        with nullcontext() if stream else ALONE:
            if key not in self._bound:
                while len(self._bound) >= BOUND:
                    self._bound.popitem(last=False)
                self._bound[key] = self.bound(part, arrays)
            self._bound.move_to_end(key)
            for launch in self._bound[key]:
                launch.run(stream)

    def bound(self, part: str, arrays: Mapping[str, Any]) -> list[Any]:
        """The launches of a part, compiled, and bound to these arrays."""
        with ALONE:
            made = self._launches(part, arrays)
            compile_all(made)
            return made

    def _launches(self, part: str, arrays: Mapping[str, Any]) -> list[Any]:
        """The launches of a part, bound to these arrays."""
        plan = self._parts[part]

        def view(home: str, name: str) -> Any:
            return arrays[f"grad.{name}" if home == "grad" else name]

        params = SimpleNamespace(device=self.device, layout=None, view=view)
        self._constants |= constants(plan, params, self._constants)
        fixed = self._constants | {root: arrays[name] for root, name in self._given.items()}
        fixed |= {root: arrays[root.name] for root in _roots(plan) if root.home == "io"}
        if self._kept:
            fixed |= {root: self.device.view(arrays["kept"], at, numel(root.shape), root.dtype) for root, at in self._kept.items()}
        return Program(plan, params, arrays["arena"], fixed).launches  # type: ignore[arg-type]


def _kinds(dtype: str) -> Callable[[Buf], Buf]:
    """A function that gives floats of a plan another dtype: of each root the same Buf."""
    if dtype == "float32":
        return lambda root: root
    known: dict[Buf, Buf] = {}

    def wide(root: Buf) -> Buf:
        return known.setdefault(root, replace(root, dtype=dtype)) if root.dtype == "float32" else root

    return wide


def _swapped(steps: Sequence[Step], of: Callable[[Buf], Buf]) -> list[Step]:
    """The steps with the memory of every Buf replaced by what `of` says of its root."""

    def swap(buf: Buf) -> Buf:
        made = of(buf.root)
        if made is buf.root:
            return buf
        return made if buf.shape == made.shape else made.reshaped(buf.shape)

    return [replace(step, ins=tuple(map(swap, step.ins)), outs=tuple(map(swap, step.outs))) for step in steps]


def _is(root: Buf, *names: str) -> bool:
    return root.home == "io" and root.name in names


def _reads(item: Planned) -> list[Buf]:
    """The memory that a step reads."""
    return [*(buf.root for buf in item.step.ins), *([item.packed[0].root] if item.packed else [])]


def _roots(plan: Plan) -> set[Buf]:
    return {buf.root for item in plan.steps for buf in (*item.step.ins, *item.step.outs)}


def _leading_to_gradients(items: Sequence[Planned]) -> list[Planned]:
    """The steps of a backward pass that gradients of parameters need."""
    wanted, kept = set[Buf](), list[Planned]()
    for item in reversed(items):
        if any(out.root.home == "grad" or out.root in wanted for out in item.step.outs):
            kept.append(item)
            wanted.update(_reads(item))
    return kept[::-1]
