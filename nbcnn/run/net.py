"""This module defines `Net`: layers on one row of the op table, with their parameters. It records what is to be computed and plans it on the row.

Choosing the row is `rows`, finding an implementation for every step `resolve`; predictions and gradients of arrays are `inference`, training is
`session`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nbcnn.datasets.normalisation import Normalisation
from nbcnn.files.errors import UsageError
from nbcnn.gpu.device import Gpu, Host
from nbcnn.nn.ends import before_ends, ended
from nbcnn.nn.graphs import Graph, pack, unpack, wired
from nbcnn.nn.layer import parameters, sized, states
from nbcnn.nn.params import ParameterBuffer
from nbcnn.ops.kernel.call import Impl
from nbcnn.ops.update.advance import STATE_SIZE
from nbcnn.plan.graph import Buf, Fusion, Plan, Step, Tape, Wired, drop_dead, trace_nodes
from nbcnn.plan.lowering import Beside
from nbcnn.plan.merging import merge
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel
from nbcnn.ranks.team import Team
from nbcnn.run import inference
from nbcnn.run.allocation import Allocated
from nbcnn.run.resident import record_gather
from nbcnn.run.resolve import Tiles, costs, fallbacks, plan_on
from nbcnn.run.rows import Choice, choose_mode


@dataclass(frozen=True)
class Recorded:
    """A recorded list of steps with the Bufs that the caller fills or reads, and the fusions that made it."""

    steps: tuple[Step, ...]
    io: Mapping[str, Buf]
    fusions: tuple[Fusion, ...] = ()


class Net:
    """A list of layers, or a graph of them, on one mode.

    layers       `nbcnn.nn.layers`, the loss last (an encoder cut off an autoencoder has none and can only predict), or `nbcnn.nn.graphs.Graph`;
                 sizes of inputs that are left out are filled in.
    input_shape  (C, H, W) for images, (F,) for vectors (both uint8, 255 becomes 1), or (F, L) for series of floats. Several inputs of a graph are
                 one vector, `Graph.input_shape`; several outputs are one vector too (`output_shapes` has theirs).
    mode         auto, cpu, naive, tiled, im2col, cudacore, tensorcore; `precision` None takes the mode's own.
    engine       auto, wgmma, mma: which of tensorcore's kernels.
    dwconv       auto, or the variant of depthwise convolution (`nbcnn.modes.DWCONV`). fusing: fuse steps, where the mode has ops for it.
    seed, init   first weights: see `ParameterLayout.initial`.
    strict       refuse a net of which a step does not run in the asked mode.
    tiles        tiles of an earlier run (`TrainingSession.tiles`), so that a resumed run repeats its bits.
    choice       a row that `choose_mode` has chosen already: mode, precision, engine and dwconv then say nothing.
    device       where arrays are, if not on the row's own GPU or host: plans are made for its `target`.
    normalisation   `nbcnn.datasets.normalisation.Normalisation` of the images, in training and in predictions; None: bytes are divided by 255.

    Raises UsageError, GpuUnavailable, and ShapeError if the layers do not fit each other.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        input_shape: tuple[int, ...],
        *,
        mode: str = "auto",
        precision: str | None = None,
        engine: str = "auto",
        dwconv: str = "auto",
        fusing: bool = True,
        seed: int = 0,
        init: str = "torch",
        strict: bool = False,
        tiles: Tiles | None = None,
        choice: Choice | None = None,
        device: Any = None,
        normalisation: Normalisation | None = None,
    ) -> None:
        self.layers, self.input_shape, self.strict = sized(layers, tuple(input_shape)), tuple(input_shape), strict
        self.fusing, self.normalisation = fusing, normalisation
        self.row, self.why = choice or choose_mode(mode, precision, engine, dwconv=dwconv, strict=strict)
        self.mode, self.precision = self.row.mode, self.row.precision
        self.device: Any = device or (Gpu() if self.row.device == "gpu" else Host())
        self.device_name = self.device.device_name
        self.tiles = dict(tiles or {})
        self.params = ParameterBuffer(parameters(self.layers), self.device, states(self.layers))
        self.params.initialise(seed, init)
        self.flat_weights = Buf("all weights", (self.params.layout.size,), home="param")
        self.flat_grads = Buf("all gradients", (self.params.layout.size,), home="grad")
        self.prepared: dict[tuple[int, str], Allocated] = {}  # inference plans in memory, by size of batch and dtype of the images
        if normalisation and (len(self.input_shape) not in (1, 3) or len(normalisation.mean) != self.input_shape[0]):
            raise UsageError(f"a normalisation of {len(normalisation.mean)} channels does not fit inputs of {self.input_shape}")
        recorded = self.record_predict(1)
        self.lower(recorded)  # a shape that does not fit is an error now, not at the first step
        self.output_shape = recorded.io["output"].shape[1:]
        self.output_shapes = self._output_shapes()

    def join(self, team: Team) -> None:
        """Let plans hold the step `all_reduce` (gradients, in place; attribute `weight`) among the ranks of `team`."""
        team.connect(self.device)
        reduce = Impl(lambda call: [team.all_reduce(call.ins[0], call.attrs["weight"])])
        self.row = replace(self.row, fallbacks=(*self.row.fallbacks, ("ranks", {Op("all_reduce"): reduce})))

    @property
    def has_loss(self) -> bool:
        return hasattr(self.layers[-1], "needs_labels")

    @property
    def label_dtype(self) -> str:
        """The type of the targets that the loss takes: int32 for classes, or float32 for values."""
        return getattr(self.layers[-1], "label_dtype", "int32")

    @property
    def takes_classes(self) -> bool:
        """Its loss wants one class per example."""
        return self.has_loss and self.layers[-1].needs_labels and self.label_dtype == "int32"

    @property
    def ignored(self) -> int | None:
        """The label that its loss ignores, None where it ignores none."""
        found: int | None = getattr(self.layers[-1], "ignore_index", None)
        return found

    @property
    def ended(self) -> list[bool]:
        """For each output whether it comes out of the activation that its loss has itself, so that it is a probability (`nbcnn.nn.ends`)."""
        return ended(wired(self.layers), self._inputs()) if self.has_loss else [False] * len(self.output_shapes)

    @property
    def needs_values(self) -> bool:
        """Its loss takes no labels, and its output has another shape than its input, which so cannot be the target."""
        return self.has_loss and not self.layers[-1].needs_labels and self.output_shape != self.input_shape

    @property
    def plane(self) -> tuple[int, ...]:
        """(H, W) of an output that is an image, of which every pixel may have a class; () of vectors; (outputs, 1) of several outputs."""
        if len(self.output_shapes) > 1:
            return (len(self.output_shapes), 1)
        return self.output_shape[1:] if len(self.output_shape) == 3 else ()

    @property
    def is_series(self) -> bool:
        """Whether its inputs are float32 series (F, L), not uint8 images."""
        return len(self.input_shape) == 2

    @property
    def body(self) -> Any:
        """The layers, or the graph, without the loss."""
        if isinstance(self.layers, Graph):
            return self.layers.body
        return self.layers[:-1] if self.has_loss else self.layers

    @property
    def fusing_ops(self) -> Container[Op]:
        """The ops that steps may be put together for."""
        return self.row.ops if self.fusing else ()

    def merged(self, steps: Sequence[Step], io: Mapping[str, Buf]) -> Recorded:
        """Recorded steps, fused where the row has the ops and the estimated time does not grow."""
        told: list[Fusion] = []
        return Recorded(tuple(merge(steps, self.fusing_ops, costs(self.row, self.device.target), told)), io, tuple(told))

    def _inputs(self) -> list[tuple[int, ...]]:
        """The shapes of the inputs of an example."""
        return list(self.layers.inputs) if isinstance(self.layers, Graph) else [self.input_shape]

    @property
    def classes(self) -> int:
        """How many classes its output has scores of; of several outputs the most."""
        return max(shape[0] for shape in self.output_shapes)

    def _output_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the outputs of an example."""
        if not isinstance(self.layers, Graph):
            return [self.output_shape]
        shapes = self.layers.shapes()
        return [shapes[at] for at in self.layers.outputs]

    def _trace(self, tape: Tape, body: Wired, x: Buf) -> tuple[list[Buf], Callable[[Sequence[Buf]], Buf]]:
        """Record `body` forward from `x`, which holds all of its inputs; return the outputs, and what records its backward and returns dx."""
        ys, backward = trace_nodes(tape, body, unpack(tape, x, self._inputs(), "inputs"))
        return ys, lambda dys: pack(tape, backward(dys), "inputs.dx")

    def record_predict(self, batch: int, dtype: str = "uint8") -> Recorded:
        """Gather `batch` images of `dtype`, forward, output: io `images`, `order`, `state`, `output`; series come as they are, as `images`."""
        tape = Tape(training=False)
        if self.is_series:
            x = Buf("series", (batch, *self.input_shape), home="io")
            io = {"images": x}
        else:
            shape = (batch, *self.input_shape)
            io = {
                "images": Buf("images", shape if dtype == "uint8" else (numel(shape),), dtype, "io"),
                "order": Buf("order", (batch,), "int32", "io"),
                "state": Buf("state", (8,), "int64", "state"),
            }
            normal = self.normalisation.attributes(dtype) if self.normalisation else {}
            x = record_gather(tape, io["images"], io["order"], io["state"], shape, **normal)
        ys, _ = self._trace(tape, wired(self.body), x)
        y = pack(tape, ys, "outputs")
        output = Buf("output", y.shape, home="io")
        return self.merged(_substitute(tape.steps, y.root, output), io | {"output": output})

    def record_gradients(self, batch: int) -> Recorded:
        """Forward, loss and backward on the caller's own floats: io `x`, `labels` (if the loss needs them, or the targets), `loss`, `dx`.

        With a loss scale also `state`; `dx` is then of the scaled loss.
        """
        tape = Tape(training=True)
        x = Buf("x", (batch, *self.input_shape), home="io")
        if self.needs_values:
            labels = Buf("labels", (batch, *self.output_shape), home="io")
        else:
            labels = Buf("labels", (batch, *(self.plane if self.takes_classes else ())), self.label_dtype, "io")
        state = Buf("state", (STATE_SIZE,), "int64", "state")
        value, dy, backward = self.record_loss(tape, x, labels if self.needs_values or self.layers[-1].needs_labels else None)
        dx = backward(self.scaled(tape, dy, state))
        io = {"x": x, "labels": labels, "loss": Buf("loss", (), "float64", "io"), "dx": Buf("dx", x.shape, home="io")}
        if self.row.scales_loss:
            io["state"] = state
            if self.params.layout.size:
                tape.emit(Op("unscale"), [self.flat_grads, state], [self.flat_grads, state], "update")
        steps = _substitute(_substitute(tape.steps, value, io["loss"]), dx.root, io["dx"])
        return self.merged(drop_dead(steps), io)

    def record_loss(self, tape: Tape, x: Buf, target: Buf | None) -> tuple[Buf, Any, Callable[[Any], Buf]]:
        """Record forward and loss; return its value, its gradient, and the backward of the body.

        A `target` of None is the input, as the layers in front that prepare it leave it. Of several outputs the gradient is a list.
        """
        if not self.has_loss:
            raise UsageError("this net has no loss: the last entry of its layers must be one (MSE, SoftmaxCrossEntropy)")
        calls = before_ends(wired(self.layers), self._inputs())
        *body, last = calls.nodes
        loss = last.layer
        ys, backward = self._trace(tape, Wired(tuple(body), last.reads, calls.inputs), x)
        # Of several inputs a layer prepares one, and the target is all of them.
        own = tape.prepared or x if calls.inputs == 1 else x
        value, dy = loss.build(tape, ys if len(ys) > 1 else ys[0], own if target is None else target, loss.kind)
        return value, dy, lambda dy: backward(dy if len(ys) > 1 else [dy])

    def scaled(self, tape: Tape, dy: Any, state: Buf) -> Any:
        """The gradient of the loss, or a list of them, times the loss scale in `state`, where the row has one."""
        return scaled(tape, dy, state) if self.row.scales_loss else dy

    def lower(self, recorded: Recorded, beside: Beside | None = None, lean: bool = False) -> Plan:
        """The plan of recorded steps on this net's row; `beside` and `lean` as in `lowering.lower`.

        Raises UsageError if a Buf is too large or `strict` is violated.
        """
        plan = plan_on(
            self.row,
            recorded.steps,
            self.flat_weights,
            target=self.device.target,
            tiles=self.tiles,
            beside=beside,
            lean=lean,
            fusing=self.fusing,
            fusions=recorded.fusions,
        )
        if self.strict and (lines := self.fallbacks(plan)):
            raise UsageError(f"--strict: not every step runs in mode {self.mode}: " + "; ".join(lines))
        return plan

    def fallbacks(self, plan: Plan) -> list[str]:
        """One line for every step that does not run in the asked mode, with the reason."""
        return fallbacks(self.row, plan)

    def fixed(self) -> dict[Buf, Any]:
        """Arrays of the flat parameter views."""
        return {self.flat_weights: self.params.weights, self.flat_grads: self.params.grads}

    def predict(self, images: np.ndarray, batch: int = 256) -> np.ndarray:
        """The network's output, float32, for uint8 or float32 `images` (M, C, H, W) or (M, F), or float32 series (M, F, L), in batches of `batch`."""
        return inference.whole(self, images, batch)

    def predict_batches(self, images: np.ndarray, batch: int = 256) -> Iterator[np.ndarray]:
        """Yield the output of `images` batch by batch. Raises UsageError if `images` has another shape or dtype."""
        return inference.outputs(self, images, batch)

    def close(self) -> None:
        """Let the plans of predictions go, their memory and their captured graphs; the next prediction makes them again."""
        self.device.synchronize()
        for held in self.prepared.values():
            held.close()
        self.prepared = {}

    def gradients(self, x: np.ndarray, labels: np.ndarray | None = None) -> tuple[float, dict[str, np.ndarray]]:
        """Loss and parameter gradients for float32 inputs `x`: `inference.gradients`."""
        return inference.gradients(self, x, labels)


def scaled(tape: Tape, dy: Any, state: Buf) -> Any:
    """Record that the gradient of the loss, or each of a list of them, is multiplied by the loss scale in `state`; return what comes of it."""
    if isinstance(dy, list):
        return [scaled(tape, each, state) for each in dy]
    made = tape.temp(f"{dy.name} scaled", dy.shape)
    tape.emit(Op("scale_loss"), [dy, state], [made], "loss")
    return made


def _substitute(steps: Sequence[Step], old: Buf, new: Buf) -> list[Step]:
    """The steps with every use of `old`'s memory replaced by `new`'s."""

    def swap(buf: Buf) -> Buf:
        if buf.root is not old.root:
            return buf
        return new if buf.shape == new.shape else new.reshaped(buf.shape)

    return [Step(s.op, tuple(map(swap, s.ins)), tuple(map(swap, s.outs)), s.attrs, s.scope) for s in steps]
