"""This module makes a training step for a loop of one's own: outputs, gradients from whatever the caller computes of the outputs, updates.

The forward and the backward pass are a function of the layers (`nbcnn.run.function`) on memory that the step owns, the update is recorded as in
`fit` (`nbcnn.run.planning`). A pass that is taken a second time replays what it captured the first time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nbcnn.dictionary import fit as dictionary
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import counted
from nbcnn.gpu.arrays import DeviceArray, as_device_array, recorded
from nbcnn.gpu.compiler import SIMULATOR
from nbcnn.model import on_gpu
from nbcnn.model.turns import Turns, in_turn
from nbcnn.nn.corruption import draws, inside
from nbcnn.nn.graphs import Graph
from nbcnn.nn.optim import PLAIN, Factor, Optimizer
from nbcnn.nn.whitening import fixed
from nbcnn.ops.update.advance import NONFINITE, STATE_SIZE, SUMS_SIZE
from nbcnn.plan.graph import Buf, Tape, drop_dead, named
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel
from nbcnn.run.allocation import Allocated, check_memory
from nbcnn.run.function import BACKWARD, FORWARD, PARAMETERS, Function
from nbcnn.run.net import Net
from nbcnn.run.planning import Training

if TYPE_CHECKING:
    from nbcnn.model.network import Model

OPEN = 16
"""Forward passes that may wait for their backward pass: each holds the memory of its own."""
FIRST, SECOND = "first", "second"
"""Where a backward pass writes gradients of parameters: where the update reads them, or beside, from where they are added or dropped."""


class _Pass:
    """The memory of one forward pass with its backward pass, and what runs them; `outputs` is what the caller was given."""

    def __init__(self, net: Net, function: Function, arena: Any) -> None:
        self.device, self.function = net.device, function
        self.outputs: Any = None
        shapes = {"x": function.input_shape, "dx": function.input_shape, **function.output_shapes}
        shapes |= {f"d{name}": shape for name, shape in function.output_shapes.items()}
        self.arrays = {name: self.device.empty(numel(shape), "float32") for name, shape in shapes.items()}
        self._given = self.arrays | {"arena": arena, "kept": self.device.empty(max(1, function.kept_bytes), "uint8")}
        self._given |= {name: net.params.view("param", name) for name in function.params}
        self._given |= {name: net.params.view("state", name) for name in function.states}
        self._runs: dict[tuple[str, str], Any] = {}
        self._held: dict[str, Any] = {}

    def take(self, name: str, values: Any) -> None:
        """Copy what the caller gives into its place; an array on the GPU is held until the next one comes, as the copy may still read it."""
        if isinstance(values, DeviceArray):
            values.wait(self.device.stream)
            self.arrays[name].copy_from(values.flat, self.device.stream)
            self._held[name] = values
        else:
            self.device.upload(self.arrays[name], values)

    def give(self, name: str, shape: tuple[int, ...], on_gpu: bool) -> Any:
        """What was computed: a `DeviceArray` of this memory, or a host copy."""
        if on_gpu:
            return DeviceArray(self.arrays[name], shape, recorded(self.device.stream), self.device.stream)
        return self.device.download(self.arrays[name])[: numel(shape)].reshape(shape)

    def run(self, part: str, where: str = "", grads: Mapping[str, Any] | None = None) -> None:
        """Run a part, with the gradients of parameters in `grads`: the first time launch by launch, which is then captured."""
        if replay := self._runs.get((part, where)):
            replay()
            return
        launches = self.function.bound(part, self._given | {f"grad.{name}": array for name, array in (grads or {}).items()})
        self._runs[part, where] = self.device.replayable(launches)
        if SIMULATOR or self.device.name != "gpu":
            self._runs[part, where]()

    def close(self) -> None:
        """Let captured graphs go."""
        for each in self._runs.values():
            if close := getattr(each, "close", None):
                close()


class TrainingStep(Turns):
    """A training step of a model for a loop of your own: `Model.step` makes it.

        y = step.forward(x)      the output, in the form of training
        step.backward(dy)        gradients of the parameters from the gradient of your loss by y; they add up until the update
        step.update()            the optimizer moves the weights

    Arrays are NumPy's, or on the GPU those of any library with DLPack (PyTorch, CuPy, JAX), which take `y` without a copy (torch.from_dlpack(y)).
    On the GPU outputs lie in memory of the step: they hold until a forward pass takes the place of one that is over. Several forward passes may come
    before their backward passes. `predict`, `save` and `evaluate` of the model see every update.
    """

    def __init__(self, model: Model, optimizer: Optimizer, factors: Mapping[str, Factor], steps: int, steps_per_epoch: int) -> None:
        super().__init__()
        self._lock = model._lock  # calls of the model and of its steps take turns
        self._model, self._net = model, model.net
        _check(self._net)
        self._factors = _told(factors)
        own = fixed(self._net.layers) | self._factors
        rates = optimizer.rates(steps, steps_per_epoch)
        self._training = self._closed = False
        self._plans = Training(self._net, {}, optimizer, 1, len(rates), factors=own)
        if not self._plans.updates:
            raise UsageError("every parameter is frozen, so there is nothing to train")
        if optimizer.clip_norm and self._plans.frozen:
            raise UsageError(f"clip_norm would count the gradient of the frozen {min(self._plans.frozen)}: clip by value")
        self._functions: dict[int, tuple[Function, Any]] = {}
        self._free: dict[int, list[_Pass]] = {}
        self._open: list[_Pass] = []
        self._beside: Allocated | None = None
        self._updates, self._gradients = 0, 0
        self._held = self._allocate(rates)

    def _allocate(self, rates: np.ndarray) -> Allocated:
        """The program of the update, with the optimizer's state."""
        net, plans = self._net, self._plans
        own = {"state": Buf("state", (STATE_SIZE,), "int64", "state"), "sums": Buf("sums", (SUMS_SIZE,), "float64", "state")}
        own["loss"] = Buf("loss", (), "float64", "state")  # stays 0: the loss is the caller's
        tape = Tape(training=True)
        plans.record_update(tape, own["state"], 1.0)
        tape.emit(Op("advance"), [own["loss"], own["state"], own["sums"]], [own["state"], own["sums"]], "advance", count=0)
        bufs = plans.bufs | own
        plan = net.lower(net.merged(drop_dead(tape.steps), bufs))
        values = {name: rates * np.float32(factor) for name, factor in plans.rates.items()}
        check_memory(net.device, {"optimizer": plan.arena_bytes + sum(buf.nbytes for buf in bufs.values())}, "the optimizer's state")
        held = Allocated(net, {"update": plan}, bufs, values, plans.parts)
        held.compile()
        net.params.grads_of = None
        net.device.upload(net.params.grads, np.zeros(net.params.layout.size, np.float32))
        with net.params.kept():
            held.programs["update"].prepare()
        held.clear_state()
        return held

    # -- what a loop calls

    @in_turn
    def forward(self, x: Any, *, channels_last: bool | None = None) -> Any:
        """The output for a batch of examples, float32 (N, …), of several outputs a tuple: of the form of training, whose norms move their statistics.

        x  examples as `Model.predict` takes them; on the GPU float32. The output is where x is.
        Raises UsageError for other examples, where 16 forward passes wait for their backward pass, and after `close`; MemoryPlanError before anything
        is allocated.
        """
        if self._closed:
            raise UsageError("the step was closed, which let its memory go: make another one by model.step")
        values = self._examples(x, channels_last)
        if len(self._open) >= OPEN:
            raise UsageError(f"{OPEN} forward passes wait for their backward pass: update() lets them go, and predict computes without gradients")
        one = self._pass(len(values))
        one.take("x", values)
        one.run(FORWARD)
        made = tuple(one.give(name, shape, isinstance(values, DeviceArray)) for name, shape in one.function.output_shapes.items())
        one.outputs = made[0] if len(made) == 1 else made
        self._open.append(one)
        return one.outputs

    @in_turn
    def backward(self, dy: Any, of: Any = None, *, inputs: bool = False, parameters: bool = True) -> Any:
        """Add the gradients of the parameters to those since the last update; of the loss by the output they are `dy`, float32 (N, …).

        dy          of several outputs a tuple, with None where the loss does not read one.
        of          the output that `forward` gave, where several forward passes wait: `backward(da, of=a)`.
        inputs      return the gradient of the loss by x, float32 (N, …), where dy is, in the form that the network sees; else None.
        parameters  False leaves the gradients of the parameters as they are.
        Raises UsageError without a forward pass, for a dy of another shape, and where another step or `fit` took the place of the gradients so far.
        """
        if not (inputs or parameters):
            raise UsageError("backward was asked for no gradient: inputs=True, parameters=True, or both")
        if parameters and self._gradients:
            self._check_gradients()
        one = self._waiting(of)
        given = self._gradients_of(one, dy)
        for name, values in given.items():
            one.take(f"d{name}", values)
        where = FIRST if parameters and not self._gradients else SECOND
        one.run(BACKWARD if inputs else PARAMETERS, where, self._grads(where))
        if parameters:
            self._net.params.grads_of = self
            self._gradients += 1
            if where == SECOND:
                self._second().programs["add"].replay()
        self._done(one)
        return one.give("dx", one.function.input_shape, any(isinstance(each, DeviceArray) for each in given.values())) if inputs else None

    @in_turn
    def update(self) -> None:
        """Move the weights by the gradients since the last update, and forget these. Forward passes that wait are let go.

        Raises UsageError where there are no gradients, where another step or `fit` took their place, and where `freeze`, `unfreeze` or `set_factors`
        of the model came after `Model.step`, whose update is as they were then.
        """
        if _told(self._model._factors) != self._factors:
            raise UsageError("freeze, unfreeze or set_factors was called after model.step: make another step, which takes them")
        if not self._gradients:
            raise UsageError("there are no gradients since the last update: call forward and backward first")
        self._check_gradients()
        self._held.programs["update"].replay()
        self._updates += 1
        self.clear()

    @in_turn
    def clear(self) -> None:
        """Forget the gradients since the last update, and forward passes that wait."""
        self._gradients = 0
        for one in list(self._open):
            self._done(one)

    @property
    def updates(self) -> int:
        """How many updates there were."""
        return self._updates

    @in_turn
    def finite(self) -> bool:
        """Whether all weights have been finite after every update; waits for the GPU."""
        return not self._held.download("state")[NONFINITE]

    @in_turn
    def gradients(self) -> dict[str, np.ndarray]:
        """Host copies of the gradients since the last update, float32, by the parameter's name; zeros where there are none.

        Raises UsageError where another step or `fit` took their place.
        """
        if self._gradients:
            self._check_gradients()
        found = self._net.params.grads_dict()
        return found if self._gradients else {name: np.zeros_like(each) for name, each in found.items()}

    @in_turn
    def close(self) -> None:
        """Let the memory of the step go. The model stays."""
        self._net.device.synchronize()
        for one in (*self._open, *(each for free in self._free.values() for each in free)):
            one.close()
        for held in filter(None, (self._held, self._beside)):
            held.close()
        self._functions, self._free, self._open, self._beside, self._gradients, self._closed = {}, {}, [], None, 0, True

    # -- inside

    def _check_gradients(self) -> None:
        """Raise UsageError where the gradients of the model, which has room for one set of them, are no longer those of this step."""
        if self._net.params.grads_of is not self:
            raise UsageError(
                "another step of the model, or fit, has overwritten the gradients since backward: call clear(), then forward and backward again, "
                "and update before others train the model"
            )

    def _examples(self, x: Any, channels_last: bool | None) -> Any:
        """Examples as the network sees them: a float32 `DeviceArray`, or float32 (N, *shape) on the host."""
        model = self._model
        x = as_device_array(x, "examples")
        if isinstance(x, DeviceArray):
            made = model.learn_on_gpu(x, channels_last)
            if made.dtype != np.float32 or model.normalisation:
                raise UsageError(
                    "a loop of your own reads examples on the GPU as they are: give float32, and normalise them before, not by the model"
                )
            return made
        taken = model.learn_from(x, channels_last).take(x, channels_last)
        if not len(taken):
            raise UsageError("there are no examples: the array is empty")
        if model.normalisation:
            return model.normalisation.done(taken).astype(np.float32)
        return taken.astype(np.float32) / np.float32(255) if taken.dtype == np.uint8 else taken

    def _pass(self, count: int) -> _Pass:
        """A pass that nobody waits for, of so many examples."""
        if free := self._free.get(count):
            return free.pop()
        net = self._net
        if count not in self._functions:
            made = Function(net.body, (count, *net.input_shape), net.row, net.device, training=True, gradients=True, fusing=net.fusing)
            self._functions[count] = made, net.device.empty(max(1, *made.arena_bytes.values()), "uint8")
        function, arena = self._functions[count]
        values = 2 * (numel(function.input_shape) + sum(map(numel, function.output_shapes.values())))
        check_memory(net.device, {"kept": function.kept_bytes, "inputs and outputs": 4 * values}, f"a forward pass of {counted(count, 'example')}")
        return _Pass(net, function, arena)

    def _waiting(self, of: Any) -> _Pass:
        """The forward pass of an output, or the only one that waits. Raises UsageError where there is none, or several."""
        found = [one for one in self._open if of is None or one.outputs is of]
        if not found:
            raise UsageError("no forward pass waits for this backward pass: call forward first, and backward once for each, before update")
        if len(found) > 1:
            raise UsageError(f"{len(found)} forward passes wait: say of which output the gradient is, as in backward(dy, of=y)")
        return found[0]

    def _gradients_of(self, one: _Pass, dy: Any) -> dict[str, Any]:
        """The caller's gradients by the names of the outputs, checked; zeros where there is none."""
        shapes = one.function.output_shapes
        given = tuple(dy) if len(shapes) > 1 and isinstance(dy, tuple | list) else (dy,)
        if len(given) != len(shapes) or all(each is None for each in given):
            raise UsageError(f"the network has {counted(len(shapes), 'output')}: give a tuple with the gradient of each, None where there is none")
        made = {}
        for (name, shape), each in zip(shapes.items(), given, strict=True):
            values = np.zeros(shape, np.float32) if each is None else as_device_array(each, "dy")
            if not isinstance(values, DeviceArray):
                values = np.asarray(values)
            if values.shape != shape or values.dtype.kind != "f" or (isinstance(values, DeviceArray) and values.dtype != np.float32):
                raise UsageError(f"dy is {values.dtype} {values.shape}, and must be float32 {shape}, the shape of the output")
            if isinstance(values, DeviceArray):
                on_gpu.must_be_there(self._net)
            made[name] = values if isinstance(values, DeviceArray) else values.astype(np.float32)
        return made

    def _grads(self, where: str) -> dict[str, Any]:
        """The arrays of gradients by parameter."""
        params = self._net.params
        if where == FIRST:
            return {name: params.view("grad", name) for name in params.layout.names}
        beside = self._second().array("beside")
        return {name: beside[params.layout.slice(name)] for name in params.layout.names}

    def _second(self) -> Allocated:
        """Memory for gradients beside the first ones, and the program that adds them to these; made when it is first needed."""
        if self._beside is None:
            net = self._net
            beside = Buf("gradients beside", (net.params.layout.size,), home="state")
            tape = Tape(training=True)
            tape.emit(Op("add"), [net.flat_grads, beside], [net.flat_grads], "accumulate")
            check_memory(net.device, {"gradients": beside.nbytes}, "a second gradient")
            made = Allocated(net, {"add": net.lower(net.merged(tape.steps, {"beside": beside}))}, {"beside": beside}, {})
            made.compile()
            with net.params.kept():
                made.programs["add"].prepare()
            self._beside = made
        return self._beside

    def _done(self, one: _Pass) -> None:
        """The pass is over: another forward pass may take its place."""
        self._open.remove(one)
        one.outputs = None
        self._free.setdefault(one.function.input_shape[0], []).append(one)


def _told(factors: Mapping[str, Factor]) -> dict[str, Factor]:
    """The factors that are not 1."""
    return {name: factor for name, factor in factors.items() if factor != PLAIN}


def _check(net: Net) -> None:
    """Raise UsageError for a network that cannot be trained by a loop of the caller's own."""
    if isinstance(net.layers, Graph) and len(net.layers.inputs) > 1:
        raise UsageError("a loop of your own is for networks with one input; fit trains those with several")
    if net.row.scales_loss:
        raise UsageError('precision fp16 scales the loss, and here the loss is yours: take precision="bf16", or mode="cudacore" on a GPU without it')
    layers: Sequence[Any] = inside(named(net.body))
    if drawing := [name for name, layer in layers if draws(layer)]:
        raise UsageError(f"{drawing[0]} draws random numbers by the example's place in a data set, which a batch of your own has not: leave it out")
    if not dictionary.is_fitted(net):
        raise UsageError("Whiten is fitted to images before training: nbcnn.dictionary.fit.fit(model.net, images) does it")
