"""Net: layers on one mode. Traces, lowers and plans them, owns the parameters, and binds plans to memory.

Only this module sees all three: steps (graph), implementations (ops) and arrays (cuda).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from nbcnn.files.suggest import nearest
from nbcnn.gpu.compile_pool import compile_all
from nbcnn.gpu.device import Gpu, GpuUnavailable, Host, gpu_missing
from nbcnn.modes import DEFAULT_PRECISION, ENGINES, MODES, Row, only_engine, with_dwconv
from nbcnn.nn.fuse import fuse
from nbcnn.nn.layers import parameters, states
from nbcnn.nn.params import ParameterBuffer
from nbcnn.ops.kernel.call import Impl, bare_call
from nbcnn.plan.graph import Buf, Plan, Resolution, Step, Tape, drop_dead, lower, named, trace
from nbcnn.plan.shapes import numel
from nbcnn.ranks.team import Team
from nbcnn.run.program import Program

_INDEX_LIMIT = 2**31


class UsageError(ValueError):
    """What was asked for cannot be done; the message says what can."""

    exit_code = 2


class MemoryPlanError(RuntimeError):
    """The plan needs more memory than there is; the message says how much, and the largest batch that fits."""

    exit_code = 5


TENSOR_CORES = (8, 0)
"""The compute capability from which on mode tensorcore runs."""


def choose_mode(
    mode: str, precision: str | None, engine: str = "auto", capability: tuple[int, int] | None = None, dwconv: str = "auto"
) -> tuple[Row, str]:
    """The row for `mode` and `precision`, and why. `auto` takes the fastest that this machine has.

    On a GPU without usable tensor cores, tensorcore becomes im2col, the next best row, and the reason says so.
    `engine` (auto, wgmma, mma) chooses among tensorcore's kernels, `dwconv` (auto or one of `ops.DWCONV`) the depthwise
    convolutions of a GPU mode. `capability` None asks the GPU.
    Raises UsageError for what does not exist or does not go together, GpuUnavailable if the row needs a GPU and there is none.
    """
    known = sorted({name for name, _ in MODES})
    missing = gpu_missing()
    if mode not in ("auto", *known):
        raise UsageError(f"no mode {mode!r} (there are auto, {', '.join(known)}){nearest(mode, ['auto', *known])}")
    if capability is None:
        capability = (0, 0) if missing else Gpu().capability
    why = "as asked"
    if mode == "auto":
        fast = precision in (None, *(p for m, p in MODES if m == "tensorcore")) and capability >= TENSOR_CORES
        mode = "cpu" if missing else "tensorcore" if fast else "im2col"
        why = "no usable GPU here" if missing else "the fastest mode on this GPU"
    elif mode == "tensorcore" and not missing and capability < TENSOR_CORES:
        mode, precision = "im2col", None
        why = f"the next best: tensorcore needs compute capability 8.0, this GPU has {'.'.join(map(str, capability))}"
    precision = precision or DEFAULT_PRECISION[mode]
    if (mode, precision) not in MODES:
        raise UsageError(f"mode {mode} has no precision {precision!r}; it has {', '.join(p for m, p in MODES if m == mode)}")
    row = MODES[mode, precision]
    if row.place == "gpu" and missing:
        raise GpuUnavailable(missing)
    if engine != "auto":
        if mode != "tensorcore":
            raise UsageError(f"--engine {engine} belongs to mode tensorcore, this is {mode}")
        if capability < ENGINES[engine] or (engine == "wgmma" and capability != ENGINES[engine]):
            needed, own = (".".join(map(str, one)) for one in (ENGINES[engine], capability))
            raise UsageError(f"--engine {engine} needs compute capability {needed}, this GPU has {own}")
        row = only_engine(row, engine)
    if dwconv != "auto":
        if row.place != "gpu":
            raise UsageError(f"--dwconv {dwconv} chooses among kernels for a GPU, this is mode {mode}")
        row = with_dwconv(row, dwconv)
    return row, why


def resolver(
    row: Row, multiprocessors: int, capability: tuple[int, int], tiles: Mapping[str, Mapping[str, int]] | None = None
) -> Callable[[Step], Resolution]:
    """A function that says how a step runs on `row`: the first implementation of its chain that supports it.

    `tiles` are earlier resolved tiles by step key (`tile_key`), which are used instead of choosing anew.
    Raises UsageError if no implementation supports a step.
    """

    def refusal(impl: Any, call: Any) -> str | None:
        return impl.lacks(capability) or impl.supports(call)

    def resolve(step: Step) -> Resolution:
        reasons = []
        call = bare_call(step, row.layout)
        for part, impl in row.chain(step.op):
            reason = refusal(impl, call)
            if reason:
                reasons.append(f"{part}: {reason}")
                continue
            tile = impl.tile(call, multiprocessors)
            saved = (tiles or {}).get(tile_key(step, part)) if tile is not None else None
            if saved is not None:
                # An implementation may have more than one kind of tile; the names of the fields say which this one is.
                kinds = {type(known) for known in (tile, *impl.candidates(call, multiprocessors))}
                tile = next((kind(**saved) for kind in kinds if saved.keys() == {field.name for field in fields(kind)}), tile)
            call = bare_call(step, row.layout, tile)
            packs = None
            if impl.pack is not None:
                index = impl.pack(call)
                packs = (index.shape[0] if index.ndim == 2 else 1, index.shape[-1])
            return Resolution(impl, part, tile, impl.scratch(call), packs, impl.packed, tuple(reasons))
        raise UsageError(f"{step.scope}: mode {row.mode} has no {step.op} for this shape" + "".join(f"; {r}" for r in reasons))

    return resolve


def tile_key(step: Step, part: str) -> str:
    """The name under which a step's tile is saved: layer, op, batch size, and the part of the row that it is a tile of."""
    return f"{step.scope}.{step.op}.n{step.ins[0].shape[0]}.{part}"


@dataclass(frozen=True)
class Recorded:
    """A recorded list of steps with the Bufs that the caller fills or reads."""

    steps: tuple[Step, ...]
    io: Mapping[str, Buf]


class Net:
    """A list of layers on one mode.

    layers       `nbcnn.nn.layers`, the loss last (an encoder cut off an autoencoder has none and can only predict).
    input_shape  (C, H, W), (F,), or (F, L) for series.
    mode         auto, cpu, naive, tiled, im2col, tensorcore; `precision` None takes the mode's own.
    engine       auto, wgmma, mma: which of tensorcore's kernels.
    dwconv       auto, or the variant of depthwise convolution (`ops.DWCONV`). fusing: put fused layers in, where the mode has them.
    seed, init   first weights: see `ParameterLayout.initial`.
    strict       refuse a net of which a step does not run in the asked mode.
    tiles        tiles of an earlier run (`TrainingSession.tiles`), so that a resumed run repeats its bits.

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
        tiles: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        self.layers, self.input_shape, self.strict = list(layers), tuple(input_shape), strict
        self.fusing = fusing
        self.row, self.why = choose_mode(mode, precision, engine, dwconv=dwconv)
        self.mode, self.precision = self.row.mode, self.row.precision
        if strict and mode not in ("auto", self.mode):
            raise UsageError(f"--strict: mode {mode} became {self.mode}, {self.why}")
        self.place: Any = Gpu() if self.row.place == "gpu" else Host()
        self.device_name = self.place.device_name
        self.tiles = dict(tiles or {})
        self.params = ParameterBuffer(parameters(self.layers), self.place, states(self.layers))
        self.params.initialise(seed, init)
        self.flat_weights = Buf("all weights", (self.params.layout.size,), home="param")
        self.flat_grads = Buf("all gradients", (self.params.layout.size,), home="grad")
        self._predictors: dict[int, tuple[Program, dict[str, Any]]] = {}
        self.lower(self.record_predict(1))  # a shape that does not fit is an error now, not at the first step

    def join(self, team: Team) -> None:
        """Let plans hold the step `all_reduce` (gradients, in place; attribute `weight`) among the ranks of `team`."""
        team.connect(self.place)
        reduce = Impl(lambda call: [team.all_reduce(call.ins[0], call.attrs["weight"])])
        self.row = replace(self.row, parts=(*self.row.parts, ("ranks", {"all_reduce": reduce})))

    @property
    def has_loss(self) -> bool:
        return hasattr(self.layers[-1], "needs_labels")

    @property
    def label_dtype(self) -> str:
        """What the loss takes beside the output: int32 classes, or float32 values."""
        return getattr(self.layers[-1], "label_dtype", "int32")

    @property
    def is_series(self) -> bool:
        """Its inputs are float32 series (F, L), not uint8 images."""
        return len(self.input_shape) == 2

    @property
    def body(self) -> list[Any]:
        """The layers without the loss."""
        return self.layers[:-1] if self.has_loss else self.layers

    def _fused(self, layers: Sequence[Any]) -> list[Any]:
        """`layers` with their names, fused as far as the row has the ops."""
        return fuse(named(layers), self.row.ops if self.fusing else ())

    def record_predict(self, batch: int) -> Recorded:
        """Gather `batch` images, forward, output: io `images`, `order`, `state`, `output`; series come as they are, as `images`."""
        tape = Tape(training=False)
        if self.is_series:
            x = Buf("series", (batch, *self.input_shape), home="io")
            io = {"images": x}
        else:
            io, x = self.record_gather(tape, batch, count=batch, flip=False)
        y, _ = trace(tape, self._fused(self.body), x)
        output = Buf("output", y.shape, home="io")
        return Recorded(tuple(_substitute(tape.steps, y.root, output)), io | {"output": output})

    def record_gradients(self, batch: int) -> Recorded:
        """Forward, loss and backward on the caller's own floats: io `x`, `labels` (if the loss needs them), `loss`, `dx`."""
        tape = Tape(training=True)
        x = Buf("x", (batch, *self.input_shape), home="io")
        labels = Buf("labels", (batch,), self.label_dtype, "io")
        value, dy, backward = self.record_loss(tape, x, labels)
        dx = backward(dy)
        io = {"x": x, "labels": labels, "loss": Buf("loss", (), "float64", "io"), "dx": Buf("dx", x.shape, home="io")}
        steps = _substitute(_substitute(tape.steps, value, io["loss"]), dx.root, io["dx"])
        return Recorded(tuple(drop_dead(steps)), io)

    def record_gather(self, tape: Tape, batch: int, count: int, flip: bool) -> tuple[dict[str, Buf], Buf]:
        """Record the assembly of a batch from a resident set of `count` uint8 images."""
        io = {
            "images": Buf("images", (count, *self.input_shape), "uint8", "io"),
            "order": Buf("order", (count,), "int32", "io"),
            "state": Buf("state", (8,), "int64", "state"),
        }
        x = tape.temp("batch", (batch, *self.input_shape))
        tape.emit("gather", [io["images"], io["order"], io["state"]], [x], "input", flip=flip)
        return io, x

    def record_loss(self, tape: Tape, x: Buf, labels: Buf) -> tuple[Buf, Buf, Callable[[Buf], Buf]]:
        """Record forward and loss; return its value, its gradient, and the backward of the body."""
        if not self.has_loss:
            raise UsageError("this net has no loss: the last entry of its layers must be one (MSE, SoftmaxCrossEntropy)")
        *body, (_, loss) = self._fused(self.layers)
        y, backward = trace(tape, body, x)
        value, dy = loss.build(tape, y, labels if loss.needs_labels else x, loss.kind)
        return value, dy, backward

    def lower(self, recorded: Recorded, branching: bool = False) -> Plan:
        """The plan of recorded steps on this net's row; `branching` as in `graph.lower`.

        Raises UsageError if a Buf is too large or `strict` is violated.
        """
        for step in recorded.steps:
            for buf in (*step.ins, *step.outs):
                if numel(buf.shape) >= _INDEX_LIMIT:
                    raise UsageError(f"{buf.name} {buf.shape} has 2^31 elements or more, kernels index with 32 bits: choose a smaller batch")
        resolve = resolver(self.row, self.place.multiprocessors, self.place.capability, self.tiles)
        plan = lower(recorded.steps, self.row.layout, resolve, self.flat_weights, self.row.store, branching)
        fallbacks = self.fallbacks(plan)
        if self.strict and fallbacks:
            raise UsageError(f"--strict: not every step runs in mode {self.mode}: " + "; ".join(fallbacks))
        return plan

    def fallbacks(self, plan: Plan) -> list[str]:
        """One line for every step that does not run in the asked mode, with the reason."""
        return [
            f"{p.step.scope}.{p.step.op} runs as {p.how.mode} ({'; '.join(p.how.reasons)})"
            for p in plan.steps
            if p.how.reasons and p.how.mode not in self.row.own
        ]

    def fixed(self) -> dict[Buf, Any]:
        """Arrays of the flat parameter views."""
        return {self.flat_weights: self.params.weights, self.flat_grads: self.params.grads}

    def predict(self, images: np.ndarray, batch: int = 256) -> np.ndarray:
        """The network's output, float32, for uint8 `images` (M, C, H, W), or float32 series (M, F, L), in batches of `batch`."""
        return np.concatenate(list(self.predict_batches(images, batch)))

    def predict_batches(self, images: np.ndarray, batch: int = 256):
        """Yield the output of `images` batch by batch. Raises UsageError if `images` has another shape or dtype."""
        name, dtype = ("series", np.float32) if self.is_series else ("images", np.uint8)
        if images.dtype != dtype or images.shape[1:] != self.input_shape:
            raise UsageError(f"{name} must be {dtype.__name__} (M, {', '.join(map(str, self.input_shape))}), got {images.dtype} {images.shape}")
        for start in range(0, len(images), batch):
            part = images[start : start + batch]
            program, arrays = self._predictor(len(part))
            self.place.upload(arrays["images"], part)
            program.replay()
            output = self.place.download(arrays["output"])
            yield output.reshape(arrays["shape"])

    def _predictor(self, batch: int) -> tuple[Program, dict[str, Any]]:
        if batch not in self._predictors:
            recorded = self.record_predict(batch)
            plan = self.lower(recorded)
            check_memory(self.place, self._predictor_bytes(batch), f"a batch of {batch}", largest_batch(batch, self._predictor_bytes))
            arrays = {name: self.place.empty(numel(buf.shape), buf.dtype) for name, buf in recorded.io.items()}
            if "order" in arrays:
                self.place.upload(arrays["order"], np.arange(batch, dtype=np.int32))
                self.place.upload(arrays["state"], np.zeros(8, np.int64))
            self.place.upload(arrays["images"], np.zeros((batch, *self.input_shape), recorded.io["images"].dtype))
            fixed = self.fixed() | {buf: arrays[name] for name, buf in recorded.io.items()}
            program = Program(plan, self.params, self.place.empty(plan.arena_bytes, "uint8"), fixed)
            compile_all(program.launches)
            self._predictors[batch] = program, arrays | {"shape": recorded.io["output"].shape}
        return self._predictors[batch]

    def _predictor_bytes(self, batch: int) -> dict[str, int]:
        recorded = self.record_predict(batch)
        return {"arena": self.lower(recorded).arena_bytes, "images and output": sum(buf.nbytes for buf in recorded.io.values())}

    def gradients(self, x: np.ndarray, labels: np.ndarray | None = None) -> tuple[float, dict[str, np.ndarray]]:
        """Loss and parameter gradients for float32 inputs `x` (N, C, H, W); `labels` int32 (N,) if the loss needs them.

        For tests and for `gradcheck`: allocates on every call. The arena starts as NaN.
        """
        recorded = self.record_gradients(len(x))
        plan = self.lower(recorded)
        arrays = {name: self.place.empty(numel(buf.shape), buf.dtype) for name, buf in recorded.io.items()}
        self.place.upload(arrays["x"], x.astype(np.float32))
        self.place.upload(arrays["labels"], np.zeros(len(x), self.label_dtype) if labels is None else labels)
        arena = self.place.empty(plan.arena_bytes, "uint8")
        self.place.upload(arena, np.full(plan.arena_bytes, 0xFF, np.uint8))
        self.place.upload(self.params.grads, np.full(self.params.layout.size, np.nan, np.float32))
        program = Program(plan, self.params, arena, self.fixed() | {buf: arrays[name] for name, buf in recorded.io.items()})
        program.run()
        return float(self.place.download(arrays["loss"])[0]), self.params.grads_dict()


def check_memory(place: Any, planned: Mapping[str, int], what: str, largest: Callable[[int], int | None] | None = None) -> None:
    """Raise MemoryPlanError if the sum of `planned` bytes is more than `place` has free.

    `largest(free)` gives the largest batch that fits into `free` bytes, None if none does; it is asked only on failure.
    """
    needed, free = sum(planned.values()), place.free_bytes()
    if needed <= free:
        return
    message = f"{what} needs {gib(needed)}, {gib(free)} free"
    fits = largest(free) if largest else None
    raise MemoryPlanError(message + (f"; the largest batch that fits is {fits}" if fits else ""))


def largest_batch(tried: int, planned: Callable[[int], Mapping[str, int]]) -> Callable[[int], int | None]:
    """For `check_memory`: a search for the largest batch below `tried` whose `planned` bytes fit into a given number."""

    def search(free: int) -> int | None:
        low, high = 0, tried
        while high - low > 1:
            middle = (low + high) // 2
            if sum(planned(middle).values()) <= free:
                low = middle
            else:
                high = middle
        return low or None

    return search


def gib(count: int) -> str:
    """Bytes in words: GiB from one GiB up, else MiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def resolved_tiles(plans: Sequence[Plan]) -> dict[str, dict[str, int]]:
    """Every step's tile by step key, ready for JSON."""
    return {tile_key(item.step, item.how.mode): asdict(item.how.tile) for plan in plans for item in plan.steps if item.how.tile is not None}


def _substitute(steps: Sequence[Step], old: Buf, new: Buf) -> list[Step]:
    """The steps with every use of `old`'s memory replaced by `new`'s."""

    def swap(buf: Buf) -> Buf:
        if buf.root is not old.root:
            return buf
        return new if buf.shape == new.shape else new.reshaped(buf.shape)

    return [Step(s.op, tuple(map(swap, s.ins)), tuple(map(swap, s.outs)), s.attrs, s.scope) for s in steps]
