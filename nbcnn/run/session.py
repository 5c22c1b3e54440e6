"""TrainingSession: a data set resident beside the weights, or streamed to them, and programs that train on it, one graph replay per step.

Everything is allocated before the first step. What changes between steps lives in one device StepState, so a captured
graph stays valid; the host only counts positions to know when the smaller last batch is due.

Several ranks (`nbcnn.ranks.team`) each hold the whole data set and compute their share of every batch; the plan then adds their gradients
between the backward pass and the update. Batches, positions and losses are of all ranks together, on the device a rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nbcnn.datasets import arrays
from nbcnn.datasets.augment import Augment
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.gpu.arrays import DeviceArray
from nbcnn.gpu.ranges import Mark, nothing
from nbcnn.nn.optim import Factors, check_number
from nbcnn.nn.params import ParameterError, under
from nbcnn.nn.whitening import fixed
from nbcnn.ops.update.advance import COUNT, EPOCH, LAST_LOSS, LOSS_SUM, NONFINITE, POSITION, SEED, STEP
from nbcnn.ranks.team import ALONE, Team
from nbcnn.run.colours import in_colours
from nbcnn.run.explain import explain
from nbcnn.run.net import Net
from nbcnn.run.peaks import peaks_of
from nbcnn.run.planning import Training
from nbcnn.run.program import Program
from nbcnn.run.resident import Images
from nbcnn.run.resident import resident as data_of
from nbcnn.run.resolve import resolved_tiles
from nbcnn.run.streaming import Batches, Feeder
from nbcnn.run.timeline import wait_launch, watch

_NEVER = 999_999
LAST_WEIGHTS = "optim.weights."
"""The names of the weights of the last training step in a state whose "param." are their average."""


@dataclass(frozen=True)
class Status:
    """Where training stands. Losses are means over images: of the epoch so far, and of the last batch."""

    step: int
    epoch: int
    position: int
    loss_mean: float
    last_loss: float
    nonfinite: bool


def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order in which an epoch visits `count` images, int32: Philox(seed, epoch), equal in every mode."""
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    return np.random.Generator(bits).permutation(count).astype(np.int32)


class TrainingSession:
    """Training of `net` on images (M, C, H, W), uint8 or float32, C-contiguous, or on windows of series (`nbcnn.datasets.series.Windows`).

    optimizer       `nbcnn.nn.optim.SGD` or `Adam`.
    learning_rates  float32, one per training step of the whole run.
    batch           images per training step; the last step of an epoch takes what is left.
    accumulate      so many batches make one training step: their gradients are added up, in order, before one update of the weights. `batch` of
                    the session, as an attribute, is then the images of a whole step.
    ema             the decay of an exponential moving average of the weights (`nbcnn.ops.update.ema`), by which the net is evaluated and saved, and
                    which it keeps when the training has ended; 0 without one.
    recompute       make outputs of norms again in the backward pass instead of keeping them (`nbcnn.plan.recompute`): less memory, the same bits.
    flip            mirror each image with probability 1/2, drawn from (seed, epoch, image): short for Augment(flip=True).
    augment         `nbcnn.datasets.augment.Augment`: what else is done at random to training images, drawn from (seed, epoch, image).
    resident        True keeps the images on the device, False streams them from the host (`nbcnn.run.streaming`), with the same bits; None streams
                    them if they would not fit.
    labels          classes (M,), or of pixels (M, H, W), needed if the loss takes classes; `test_labels` likewise.
    targets         uint8 or float32 (M, *output): values to be predicted by a network whose loss takes no classes, where they are not the images
                    themselves; `test_targets` likewise.
    shuffle         False: every epoch takes the images as they come.
    batches         a callable's batches (`nbcnn.run.streaming.Batches`) instead of images; images and targets then only say shapes and types.
    say             is called with a line about what takes long: kernels being compiled, tiles being tried.
    team            the ranks that train together; `batch` is of all of them, and all must call the same methods in the same order.
    sync_stats      take the statistics of a batch over all ranks, as one process would, instead of over each rank's own part.
    phase           is called with the name of every stage that has ended: planning, memory and launches, kernels, graphs.
    factors         of learning rate and weight decay by parameter (`nbcnn.nn.optim.Factor`); a parameter whose rate is 0 is frozen.
    tune            `nbcnn.run.autotune.tune`, to choose the tiles of a full training batch by measurement; None takes all from the committed tables.

    `mark` makes ranges around the plan's steps in `step_watched`, for profilers (`nbcnn.gpu.ranges`).

    Raises UsageError for inputs that do not fit, MemoryPlanError before anything large is allocated.
    """

    def __init__(
        self,
        net: Net,
        images: Any,
        *,
        optimizer: Any,
        learning_rates: np.ndarray,
        batch: int,
        seed: int = 0,
        flip: bool = False,
        test_images: Any = None,
        labels: np.ndarray | None = None,
        test_labels: np.ndarray | None = None,
        say: Callable[[str], None] | None = None,
        tune: Callable[..., Mapping[str, Any]] | None = None,
        team: Team = ALONE,
        sync_stats: bool = False,
        phase: Callable[[str], None] | None = None,
        augment: Augment | None = None,
        resident: bool | None = None,
        factors: Factors | None = None,
        targets: np.ndarray | None = None,
        test_targets: np.ndarray | None = None,
        shuffle: bool = True,
        batches: Batches | None = None,
        accumulate: int = 1,
        ema: float = 0.0,
        recompute: bool = False,
    ) -> None:
        check_number("TrainingSession", "accumulate", accumulate, least=1)
        check_number("TrainingSession", "ema", ema, below=1.0)
        if accumulate > 1 and batches:
            raise UsageError("batches of a callable cannot be accumulated: let the callable yield larger ones, or give arrays")
        micro, batch = batch, max(batch, min(batch * int(accumulate), len(images)))
        self.net, self.optimizer, self.seed, self.batch, self.team = net, optimizer, seed, batch, team
        self._averaging = False  # the net has the average of its weights, and the session the weights
        self._shuffle, self._batches = shuffle and batches is None, batches
        if net.takes_classes and isinstance(images, np.ndarray | DeviceArray):
            targets = labels if batches else arrays.labels(labels, len(images), net.classes, "training labels", net.plane, net.ignored)
            if test_images is not None:
                test_targets = arrays.labels(test_labels, len(test_images), net.classes, "test labels", net.plane, net.ignored)
        sets = {"train": data_of(images, targets, net.normalisation, classes=net.takes_classes, batches=batches)}
        if test_images is not None:
            sets["test"] = data_of(test_images, test_targets, net.normalisation, classes=net.takes_classes)
        self.count, self._say, ended = len(images), say, phase or (lambda name: None)
        self.mark: Mark = nothing
        self._not_captured: set[int] = set()  # sizes of smaller last batches of a callable, which nobody knew before
        self._rates = np.ascontiguousarray(learning_rates, np.float32)
        augment = augment or Augment()
        if flip and not augment.flip:
            augment = replace(augment, flip=True)
        own = fixed(net.layers) | dict(factors or {})
        self.training = Training(net, sets, optimizer, batch, len(self._rates), augment, team, sync_stats, own, micro, float(ema), recompute)
        self.training.check()
        if resident is False or batches:
            self.training = self.training.streamed()
        if team.size > 1:
            net.join(team)
            team.agree({"first weights": net.device.download(net.params.weights).tobytes()})
        self.steps_per_epoch = -(-self.count // batch)
        self.plans = self.training.plans()
        if tune is not None:
            # The full batch only: the smaller last one is a step in an epoch, and evaluation is rare.
            full = next(plan for (split, _), plan in self.plans.items() if split == "train")
            net.tiles.update(tune(net, [full], say))
            self.plans = self.training.plans()
        self.planned_bytes = self.training.memory(self.plans)
        if not self.training.fits(self.planned_bytes):
            self._save_memory(may_stream=resident is None)
        self.training.fit(self.planned_bytes)
        ended("planning")
        self._allocate(ended)

    def _save_memory(self, may_stream: bool) -> None:
        """Take the first of these that fits: plans that keep nothing longer for the sake of time; a streamed data set; both.

        Where none fits, the first is taken if it is smaller.
        """
        lean = replace(self.training, lean=True)
        ways = [lean]
        if may_stream and all(isinstance(data, Images) and not data.on_gpu() for data in self.training.sets.values()):
            ways += [self.training.streamed(), lean.streamed()]
        for way in ways:
            plans = way.plans()
            planned = way.memory(plans)
            fits = way.fits(planned)
            if fits or (way is lean and sum(planned.values()) < sum(self.planned_bytes.values())):
                self.training, self.plans, self.planned_bytes = way, plans, planned
            if fits:
                return

    @property
    def streamed_bytes(self) -> int:
        """Bytes of page-locked host memory through which the data set is streamed; 0 if it is resident."""
        return self.training.host_bytes

    def explain(self) -> str:
        """The training plan as a table: op, shapes, implementation, GFLOP, MB, floor, arena offset."""
        peak = "fp32 split" if self.net.row.mode == "tensorcore" and self.net.precision == "fp32" else self.net.precision
        return explain(self.plans["train", self.batch], peak, peaks_of(self.net.device, self.net.row))

    def tiles(self) -> dict[str, dict[str, int]]:
        """Every resolved tile, for config.json, the checkpoint, and `Net(tiles=…)` of a resumed run."""
        return resolved_tiles(list(self.plans.values()))

    # -- memory and programs

    def _allocate(self, ended: Callable[[str], None]) -> None:
        self._held = self.training.allocate(self.plans)
        ended("memory and launches")
        # The waiting kernel is no step of the plan: `step_watched` launches it before them.
        waiting = [wait_launch(0)] if self.net.device.name == "gpu" else []
        self.compiled = self._held.compile(self._say, waiting)
        ended("kernels")
        self._capture()
        for name, factor in self.training.rates.items():
            self._held.upload(name, self._rates * np.float32(factor))
        self._feeders = {
            split: Feeder(
                self.net.device,
                {name: self._held.array(f"{split}.{name}") for name in data.sources},
                data.sources,
                data.streamed,
                lambda: self.team.wait(self.net.device),
                data.batches,
            )
            for split, data in self.training.sets.items()
            if isinstance(data, Images) and data.streamed
        }
        if self.training.ema:
            self._held.upload("optim.average", self.net.params.download()[0])
        self.begin_epoch(0)
        ended("graphs")

    def _capture(self) -> None:
        """Capture every program. This runs each once, so weights and state are put back afterwards."""
        with self.net.params.kept():
            for program in self._held.programs.values():
                for split in self.training.sets:
                    self._held.upload(f"{split}.state", np.zeros(8, np.int64))
                program.prepare()
        self._held.clear_state()

    # -- running

    def begin_epoch(self, epoch: int) -> None:
        """Start `epoch`: its permutation goes to the device, position and loss sums to zero."""
        state = self._held.download("train.state")
        state[[EPOCH, POSITION, SEED]] = epoch, 0, self.seed
        self._held.upload("train.state", state)
        self._held.upload("train.sums", np.zeros(4))
        self._upload_order(epoch, 0)
        self._position, self._latest = 0, 0

    def _upload_order(self, epoch: int, position: int) -> None:
        """This rank's part of the permutation of `epoch` goes to the device, and to what streams images, from its own `position` on."""
        whole = epoch_order(self.seed, epoch, self.count) if self._shuffle else np.arange(self.count, dtype=np.int32)
        order = whole[self.training.places["train"]]
        self._held.upload("train.order", order)
        if "train" in self._feeders:
            self._feeders["train"].begin(order, position, epoch)

    def _feed(self, split: str, position: int) -> int:
        """Have the images of the step at `position` (of all ranks) on their way, if they are streamed; how many a callable's batch has, else 0."""
        if split not in self._feeders:
            return 0
        size = self._feeders[split].ready(int(np.searchsorted(self.training.places[split], position)))
        return size if self._batches and split == "train" else 0

    def step(self, run: Callable[[Program], None] = Program.replay) -> None:
        """One training step, asynchronously. Raises UsageError at the end of an epoch.

        `run` enqueues the bound plan, by default as one graph; the launches, and so the bits, are the same however it does that.
        """
        left = min(self.batch, self.count - self._position)
        if left <= 0:
            raise UsageError("the epoch is over: call begin_epoch")
        n = self._feed("train", self._position) or left
        if ("train", n) not in self._held.programs:
            self.plans["train", n] = self.training.plan("train", n)
            self._held.add(("train", n), self.plans["train", n])
            self._not_captured.add(n)
        # Capturing runs a plan once, and so would train on this batch twice.
        (Program.run if n in self._not_captured and run is Program.replay else run)(self._held.programs["train", n])
        self._position, self._latest = self._position + n if n == left else self.count, n

    @property
    def repeats(self) -> bool:
        """A training step can be taken again from an earlier state: a callable's batches are gone once they are trained on."""
        return self._batches is None

    def step_watched(self) -> Callable[[], dict[str, Any]]:
        """One training step, launch by launch; the function that comes back waits for it and says where its time went (`timeline.watch`)."""
        results: list[Callable[[], dict[str, Any]]] = []
        self.step(lambda program: results.append(watch(program, self.mark)))
        return results[0]

    @property
    def has_tests(self) -> bool:
        """There are test images to evaluate."""
        return "test" in self.training.sets

    @property
    def steps_left(self) -> int:
        """Training steps until the epoch is over."""
        return -(-(self.count - self._position) // self.batch)

    @property
    def program(self) -> Program:
        """The bound plan of a full batch's training step."""
        return self._held.programs["train", self.batch]

    def status(self) -> Status:
        """Where training stands, after everything enqueued has run."""
        state, sums = self._together()
        # Batches of which no label counts have lost nothing.
        mean = sums[LOSS_SUM] / sums[COUNT] if sums[COUNT] else 0.0 if state[POSITION] else float("nan")
        return Status(int(state[STEP]), int(state[EPOCH]), int(state[POSITION]), float(mean), float(sums[LAST_LOSS]), bool(state[NONFINITE]))

    def _together(self) -> tuple[np.ndarray, np.ndarray]:
        """StepState and sums over all ranks, equal on each."""
        state, parts = self._parts()
        return state, sum(parts)

    def _parts(self) -> tuple[np.ndarray, np.ndarray]:
        """StepState of all ranks, and by rank what each has of the sums, (ranks, 4): they add up, and the last of them is 0."""
        self.team.wait(self.net.device)
        state, sums = self._held.download("train.state"), self._held.download("train.sums")
        sums[LAST_LOSS] *= self.team.share(self._latest).weight if self._latest else 1.0
        parts = np.zeros((self.team.size, len(sums)))
        parts[self.team.rank] = *sums[:-1], state[NONFINITE]
        parts = self.team.sum(parts)
        state[[POSITION, NONFINITE]] = self._position, parts[:, -1].any()
        parts[:, -1] = 0
        return state, parts

    def evaluate(self) -> float:
        """Mean loss over the test images, by the average of the weights where there is one; training state is not touched.

        Raises UsageError without a test set.
        """
        with self.averaged():
            loss, count = self.team.sum(self.evaluate_share())
        return float(loss / count) if count else 0.0

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which the net has the average of its weights, where the session keeps one, for evaluations and predictions."""
        if not self.training.ema or self._averaging:
            yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def take_average(self) -> None:
        """Give the net the average of its weights for good, where the session keeps one: the training has ended."""
        if self.training.ema and not self._averaging:
            self._exchange()

    def _exchange(self) -> None:
        """Let the net's weights and their average change places."""
        params = self.net.params
        (weights, states), average = params.download(), self._held.download("optim.average")
        params.upload((average, states))
        self._held.upload("optim.average", weights)
        self._averaging = not self._averaging

    def evaluate_share(self) -> np.ndarray:
        """Sum of losses, and number, of this rank's test images, (2,) float64: what `evaluate` adds up. Others need not take part."""
        if "test" not in self.training.sets:
            raise UsageError("this session has no test images")
        count = len(self.training.sets["test"])
        self._held.upload("test.state", np.zeros(8, np.int64))
        self._held.upload("test.sums", np.zeros(4))
        size = max(n for split, n in self.plans if split == "test")
        if "test" in self._feeders:
            self._feeders["test"].begin(self.training.places["test"], 0)
        for start in range(0, count, size):
            self._feed("test", start)
            self._held.programs["test", min(size, count - start)].replay()
        return self._held.download("test.sums")[[LOSS_SUM, COUNT]]

    def reconstruct(self, images: np.ndarray) -> np.ndarray:
        """The network's output for a few images, float32, as values of pixels: a byte of 255 is 1."""
        return in_colours(self.net, self.net.predict(images, batch=len(images)), images)

    def first_nonfinite(self) -> str:
        """Repeat the step at the present position launch by launch; name the first result that is not finite."""
        n = min(self.batch, self.count - self._position)
        if n == 0:
            return "no step is left in this epoch to repeat"
        self._feed("train", self._position)
        at, name = self._held.programs["train", n].first_nonfinite(self.team.size > 1) or (_NEVER, "")
        # A rank that found nothing of its own meets another's NaN in their sum: the earliest is the origin.
        words = self.team.gather(f"{at:06} {name}".encode())
        return (
            self.team.broadcast(min(words, default=b""))[7:].decode()
            or "every step's result is finite now (the loss or the weights were not finite before)"
        )

    # -- saving and loading

    def state(self) -> dict[str, np.ndarray]:
        """Everything a run that is resumed on as many ranks needs to repeat this one bit for bit, by name.

        Running statistics are the mean of the ranks' own, which they all take over at an epoch's end. Resumed within an epoch they begin from
        that mean, and so repeat only up to rounding.
        """
        params, layout = self.net.params, self.net.params.layout
        weights, running = params.download()
        if self.team.size > 1 and running.size:
            running = (self.team.sum(running.astype(np.float64)) / self.team.size).astype(np.float32)
            if self._position == self.count:
                params.upload((weights, running))
        own = {}
        if self.training.ema:
            # What everybody loads from a checkpoint is the average; the weights are beside the optimizer's state.
            other = self._held.download("optim.average")
            weights, last = (weights, other) if self._averaging else (other, weights)
            own = {f"{LAST_WEIGHTS}{n}": t for n, t in layout.split(last).items()}
        made = {f"param.{n}": t for n, t in (layout.split(weights) | params.states.split(running)).items()} | own
        for moment in self.optimizer.moments:
            made |= {f"optim.{moment}.{n}": t for n, t in layout.split(self._held.download(f"optim.{moment}")).items()}
        state, parts = self._parts()
        return made | {"step_state": state, "sums": parts if self.team.size > 1 else parts[0]}

    def load_state(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Continue where `state()` was taken. Raises ParameterError naming the tensor, and changes nothing, if one does not fit."""
        layout = self.net.params.layout
        params, flat = self.net.params.flat(under("param.", tensors)), {}
        for moment in self.optimizer.moments:
            try:
                flat[moment] = layout.join(under(f"optim.{moment}.", tensors))
            except ParameterError as error:
                raise ParameterError(f"optimizer state {quoted(moment)}: {error}") from None
        last = None
        if self.training.ema:
            try:
                last = layout.join(under(LAST_WEIGHTS, tensors))
            except ParameterError as error:
                raise ParameterError(f"weights beside their average: {error}") from None
        state = _expect(tensors, "step_state", (8,), "int64")
        # Of one rank (4,), of several (ranks, 4): as many ranks go on with their own, so that they add in the same order.
        ranks = np.shape(tensors.get("sums", ()))[:-1]
        parts = _expect(tensors, "sums", (*ranks[:1], 4), "float64").reshape(-1, 4)
        known = ("param.", *(f"optim.{moment}." for moment in self.optimizer.moments), *([LAST_WEIGHTS] if self.training.ema else []))
        unknown = [name for name in tensors if not name.startswith(known) and name not in ("step_state", "sums")]
        if unknown:
            raise ParameterError(f"{quoted(unknown[0])} is no tensor of this training: another optimizer's, or not of a checkpoint")
        if not (0 <= state[POSITION] <= self.count and state[STEP] >= 0 and state[EPOCH] >= 0):
            raise ParameterError(f"step_state says position {state[POSITION]}, the training set has {self.count} images")
        self.seed = int(state[SEED])
        self.net.params.upload(params if last is None else (last, params[1]))
        if last is not None:
            self._held.upload("optim.average", params[0])
        self._averaging = False
        for moment in self.optimizer.moments:
            self._held.upload(f"optim.{moment}", flat[moment])
        self._position, self._latest, places = int(state[POSITION]), 0, self.training.places["train"]
        own = state.copy()
        own[POSITION] = np.searchsorted(places, self._position)
        self._held.upload("train.state", own)
        if len(parts) != self.team.size:
            parts = np.array([sum(parts)] + [np.zeros(4)] * (self.team.size - 1))
        self._held.upload("train.sums", parts[self.team.rank])
        self._upload_order(int(state[EPOCH]), int(own[POSITION]))

    def go_on(self, moments: Mapping[str, np.ndarray], step: int) -> None:
        """Continue, with the weights that the net has now, from the optimizer's state ("optim.*" of `state`) after `step` training steps.

        The table of learning rates must count from the first of these. Raises ParameterError if a tensor does not fit.
        """
        layout = self.net.params.layout
        for moment in self.optimizer.moments:
            self._held.upload(f"optim.{moment}", layout.join(under(f"optim.{moment}.", moments)))
        state = self._held.download("train.state")
        state[STEP] = step
        self._held.upload("train.state", state)

    def close(self) -> None:
        """Let the captured graphs go, which hold on to the ranks' connection, and end the threads that stream images.

        The net has the average of its weights then, where there is one.
        """
        self.net.device.synchronize()
        self.take_average()
        for feeder in self._feeders.values():
            feeder.close()
        self._held.close()


def _expect(tensors: Mapping[str, np.ndarray], name: str, shape: Sequence[int], dtype: str) -> np.ndarray:
    tensor: Any = tensors.get(name)
    if tensor is None or tensor.shape != tuple(shape) or tensor.dtype != dtype:
        found = "missing" if tensor is None else f"{tensor.dtype} {tensor.shape}"
        raise ParameterError(f"{quoted(name)} is {found}, a training checkpoint has {dtype} {tuple(shape)}")
    return tensor
