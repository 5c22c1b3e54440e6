"""TrainingSession: a data set resident beside the weights, and programs that train on it, one graph replay a step.

Everything is allocated before the first step. What changes between steps lives in one device StepState, so a captured
graph stays valid; the host only counts positions to know when the smaller last batch is due.

Several ranks (`nbcnn.ranks.team`) each hold the whole data set and compute their share of every batch; the plan then adds their gradients
between the backward pass and the update. Batches, positions and losses are of all ranks together, on the device a rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.gpu.compile_pool import compile_all
from nbcnn.gpu.ranges import Mark, nothing
from nbcnn.nn.params import ParameterError
from nbcnn.ops.update.advance import COUNT, EPOCH, LAST_LOSS, LOSS_SUM, NONFINITE, POSITION, SEED, STEP
from nbcnn.plan.graph import Buf, Plan, Sync, Tape, drop_dead
from nbcnn.plan.shapes import numel
from nbcnn.ranks.team import ALONE, Team
from nbcnn.run.explain import explain
from nbcnn.run.net import Net, Recorded, UsageError, check_memory, largest_batch, resolved_tiles
from nbcnn.run.program import Program
from nbcnn.run.resident import resident
from nbcnn.run.timeline import wait_launch, watch

_NEVER = 999_999

BRANCHING = 64
"""Up to this batch size weight gradients run beside the rest of the backward pass: single kernels do not fill the GPU there."""


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
    """Training of `net` on resident uint8 images (M, C, H, W), or windows of series (`nbcnn.datasets.series.Windows`).

    optimizer       `nbcnn.nn.optim.SGD` or `Adam`.
    learning_rates  float32, one per training step of the whole run.
    batch           images per training step; the last step of an epoch takes what is left.
    flip            mirror each image with probability 1/2, drawn from (seed, epoch, image).
    labels          int32 (M,), needed if the loss needs them; `test_labels` likewise.
    say             is told what takes long: kernels being compiled, tiles being tried.
    team            the ranks that train together; `batch` is of all of them, and all must call the same methods in the same order.
    sync_stats      take the statistics of a batch over all ranks, as one process would, instead of over each rank's own part.
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
    ) -> None:
        self.net, self.optimizer, self.seed, self.flip, self.batch = net, optimizer, seed, flip, batch
        given = {"train": (images, labels), "test": (test_images, test_labels)}
        self._sets = {split: resident(*data) for split, data in given.items() if data[0] is not None}
        self.count, self._say = len(images), say
        self.mark: Mark = nothing
        self.team, self.sync_stats = team, sync_stats
        self._check()
        if team.size > 1:
            net.join(team)
            team.agree("first weights", net.place.download(net.params.weights).tobytes())
        self.steps_per_epoch = -(-self.count // batch)
        self._rates = np.ascontiguousarray(learning_rates, np.float32)
        self._places = {split: team.places(len(data), min(len(data), batch)) for split, data in self._sets.items()}
        self._bufs = self._make_bufs(len(self._rates))
        self.plans = self._plan(batch)
        if tune is not None:
            # The full batch only: the smaller last one is a step in an epoch, and evaluation is rare.
            full = next(plan for (split, _), plan in self.plans.items() if split == "train")
            net.tiles.update(tune(net, [full], say))
            self.plans = self._plan(batch)
        self.planned_bytes = self._memory(self.plans)
        each = largest_batch(batch // team.size, lambda size: self._memory(self._plan(size * team.size)))
        check_memory(net.place, self.planned_bytes, f"batch {batch}", lambda free: (each(free) or 0) * team.size or None)
        self._allocate()

    # -- planning: no arrays

    def _check(self) -> None:
        if not self.net.has_loss:
            raise UsageError("this net has no loss, so it cannot be trained")
        if self.sync_stats and not self.net.params.states.size:
            raise UsageError("--sync-stats is for networks with statistics of a batch (EvoNorm-B0); this one has none")
        for split, data in self._sets.items():
            data.check(self.net, split)
        if self.team.size > 1 and getattr(self.net.layers[-1], "of_batch", False):
            name = type(self.net.layers[-1]).__name__
            raise UsageError(f"the loss {name} is no mean over the batch, so ranks cannot share one: use another loss, or one process")
        if odd := self.batch % self.team.size:
            near = " or ".join(str(n) for n in (self.batch - odd, self.batch - odd + self.team.size) if n)
            raise UsageError(f"batch {self.batch} does not divide among {self.team.size} ranks, of which each takes the same part: {near} would")
        if not 1 <= self.batch <= self.count:
            raise UsageError(f"batch {self.batch} is not between 1 and the {self.count} {self._sets['train'].noun} of the training set")

    def _make_bufs(self, steps: int) -> dict[str, Buf]:
        size = self.net.params.layout.size
        made = {f"optim.{name}": Buf(f"optim.{name}", (size,), home="state") for name in self.optimizer.moments}
        made["rates"] = Buf("learning rates", (steps,), home="io")
        for split, data in self._sets.items():
            for name, array in data.arrays().items():
                made[f"{split}.{name}"] = Buf(name, array.shape, array.dtype.name, "io")
            made[f"{split}.order"] = Buf("order", self._places[split].shape, "int32", "io")
            made[f"{split}.state"] = Buf("state", (8,), "int64", "state")
            made[f"{split}.sums"] = Buf("sums", (4,), "float64", "state")
        return made

    def _record(self, split: str, batch: int) -> Recorded:
        """Gather, forward, loss; for the training set also backward and update; then advance the split's StepState."""
        training, bufs = split == "train", self._bufs
        data, share = self._sets[split], self.team.share(batch)
        sync = Sync(self.team.rank, self.team.size, share.count, share.weight) if self.sync_stats and self.team.size > 1 else None
        tape = Tape(training, sync)
        state, order = bufs[f"{split}.state"], bufs[f"{split}.order"]
        held = {name: bufs[f"{split}.{name}"] for name in data.arrays()}
        x, y = data.record(tape, held, order, state, share.images, self.flip and training)
        value, dy, backward = self.net.record_loss(tape, x, y)
        if training:
            backward(dy)
            moments = [bufs[f"optim.{name}"] for name in self.optimizer.moments]
            weights, grads, decayed = self.net.flat_weights, self.net.flat_grads, self.net.params.layout.decayed
            if self.team.size > 1:
                tape.emit("all_reduce", [grads], [grads], "update", weight=share.weight)
            self.optimizer.record(tape, weights, grads, moments, bufs["rates"], state, decayed)
        sums = bufs[f"{split}.sums"]
        tape.emit("advance", [value, state, sums], [state, sums], "advance", count=share.count)
        return Recorded(tuple(drop_dead(tape.steps)), {})

    def _plan(self, batch: int) -> dict[tuple[str, int], Plan]:
        """Plans by split and batch size: full batches of the training and the test set, and their smaller last ones."""
        wanted = []
        for split, data in self._sets.items():
            size = min(len(data), batch)
            wanted += [(split, n) for n in (size, len(data) % size) if n]
        return {(split, n): self.net.lower(self._record(split, n), branching=self.team.share(n).images <= BRANCHING) for split, n in wanted}

    def _memory(self, plans: Mapping[tuple[str, int], Plan]) -> dict[str, int]:
        held = sum(array.nbytes for data in self._sets.values() for array in data.arrays().values())
        tables = sum(b.nbytes for name, b in self._bufs.items() if name.endswith((".order", ".state", ".sums")))
        return {
            "arena": max(plan.arena_bytes for plan in plans.values()),
            "parameters and gradients": self.net.params.nbytes,
            "optimizer": sum(b.nbytes for name, b in self._bufs.items() if name.startswith("optim.")),
            "packing maps": sum(index.nbytes for plan in plans.values() for index in plan.packs.values()),
            "data set": held,
            "tables": tables + self._bufs["rates"].nbytes,
        }

    def explain(self) -> str:
        """The training plan as a table: op, shapes, implementation, GFLOP, MB, floor, arena offset."""
        peak = "fp32 split" if self.net.row.mode == "tensorcore" and self.net.precision == "fp32" else self.net.precision
        return explain(self.plans["train", self.batch], peak, self.net.place.ceilings())

    def tiles(self) -> dict[str, dict[str, int]]:
        """Every resolved tile, for config.json, the checkpoint, and `Net(tiles=…)` of a resumed run."""
        return resolved_tiles(list(self.plans.values()))

    # -- memory and programs

    def _allocate(self) -> None:
        net, place = self.net, self.net.place
        self._arena = place.empty(self.planned_bytes["arena"], "uint8")
        self._arrays = {name: place.empty(numel(buf.shape), buf.dtype) for name, buf in self._bufs.items()}
        for name, buf in self._bufs.items():
            if buf.home == "state":
                self._upload(name, np.zeros(numel(buf.shape), buf.dtype))
        for split, data in self._sets.items():
            for name, array in data.arrays().items():
                self._upload(f"{split}.{name}", array)
            self._upload(f"{split}.order", self._places[split].astype(np.int32))
        self._upload("rates", np.zeros_like(self._rates))
        fixed = net.fixed() | {self._bufs[name]: array for name, array in self._arrays.items()}
        self._programs = {key: Program(plan, net.params, self._arena, fixed) for key, plan in self.plans.items()}
        self._prepare()
        self.begin_epoch(0)

    def _prepare(self) -> None:
        """Compile (`compiled` kernels) and capture every program. This runs each once, so weights and state are put back afterwards."""
        waiting = [wait_launch(0)] if self.net.place.name == "gpu" else []
        self.compiled = compile_all([*waiting, *(launch for program in self._programs.values() for launch in program.launches)], self._say)
        before = self.net.params.download()
        for program in self._programs.values():
            for split in ("train", "test"):
                if f"{split}.state" in self._arrays:
                    self._upload(f"{split}.state", np.zeros(8, np.int64))
            program.prepare()
        self.net.params.upload(before)
        for name, buf in self._bufs.items():
            if buf.home == "state":
                self._upload(name, np.zeros(numel(buf.shape), buf.dtype))
        self._upload("rates", self._rates)

    def _upload(self, name: str, values: np.ndarray) -> None:
        if values.size:
            self.net.place.upload(self._arrays[name], values)

    def _download(self, name: str) -> np.ndarray:
        return self.net.place.download(self._arrays[name])[: numel(self._bufs[name].shape)]

    # -- running

    def begin_epoch(self, epoch: int) -> None:
        """Start `epoch`: its permutation goes to the device, position and loss sums to zero."""
        state = self._download("train.state")
        state[[EPOCH, POSITION, SEED]] = epoch, 0, self.seed
        self._upload("train.state", state)
        self._upload("train.sums", np.zeros(4))
        self._upload("train.order", epoch_order(self.seed, epoch, self.count)[self._places["train"]])
        self._position, self._latest = 0, 0

    def step(self, run: Callable[[Program], None] = Program.replay) -> None:
        """One training step, asynchronously. Raises UsageError at the end of an epoch.

        `run` enqueues the bound plan, by default as one graph; the launches, and so the bits, are the same however it does that.
        """
        n = min(self.batch, self.count - self._position)
        if n <= 0:
            raise UsageError("the epoch is over: call begin_epoch")
        run(self._programs["train", n])
        self._position, self._latest = self._position + n, n

    def step_watched(self) -> Callable[[], dict[str, Any]]:
        """One training step, launch by launch; the function that comes back waits for it and says where its time went (`timeline.watch`)."""
        results: list[Callable[[], dict[str, Any]]] = []
        self.step(lambda program: results.append(watch(program, self.mark)))
        return results[0]

    @property
    def steps_left(self) -> int:
        """Training steps until the epoch is over."""
        return -(-(self.count - self._position) // self.batch)

    @property
    def program(self) -> Program:
        """The bound plan of a full batch's training step."""
        return self._programs["train", self.batch]

    def status(self) -> Status:
        """Where training stands, after everything enqueued has run."""
        state, sums = self._together()
        mean = sums[LOSS_SUM] / sums[COUNT] if sums[COUNT] else float("nan")
        return Status(int(state[STEP]), int(state[EPOCH]), int(state[POSITION]), float(mean), float(sums[LAST_LOSS]), bool(state[NONFINITE]))

    def _together(self) -> tuple[np.ndarray, np.ndarray]:
        """StepState and sums of all ranks: the same on each."""
        self.team.wait(self.net.place)
        state, sums = self._download("train.state"), self._download("train.sums")
        weight = self.team.share(self._latest).weight if self._latest else 1.0
        total = self.team.sum(np.array([sums[LOSS_SUM], sums[COUNT], weight * sums[LAST_LOSS], state[NONFINITE]]))
        sums[[LOSS_SUM, COUNT, LAST_LOSS]] = total[:3]
        state[[POSITION, NONFINITE]] = self._position, total[3] > 0
        return state, sums

    def evaluate(self) -> float:
        """Mean loss over the test images; training state is not touched. Raises UsageError without a test set."""
        loss, count = self.team.sum(self.evaluate_share())
        return float(loss / count)

    def evaluate_share(self) -> np.ndarray:
        """Sum of losses, and number, of this rank's test images, (2,) float64: what `evaluate` adds up. Others need not take part."""
        if "test" not in self._sets:
            raise UsageError("this session has no test images")
        count = len(self._sets["test"])
        self._upload("test.state", np.zeros(8, np.int64))
        self._upload("test.sums", np.zeros(4))
        size = max(n for split, n in self.plans if split == "test")
        for start in range(0, count, size):
            self._programs["test", min(size, count - start)].replay()
        return self._download("test.sums")[[LOSS_SUM, COUNT]]

    def reconstruct(self, images: np.ndarray) -> np.ndarray:
        """The network's output for a few uint8 images, float32."""
        return self.net.predict(images, batch=len(images))

    def first_nonfinite(self) -> str:
        """Repeat the step at the present position launch by launch; name the first result that is not finite."""
        n = min(self.batch, self.count - self._position)
        if n == 0:
            return "no step is left in this epoch to repeat"
        at, name = self._programs["train", n].first_nonfinite(self.team.size > 1) or (_NEVER, "")
        # A rank that found nothing of its own meets another's NaN in their sum: the earliest is the origin.
        words = self.team.gathered(f"{at:06} {name}".encode())
        return (
            self.team.told(min(words, default=b""))[7:].decode()
            or "every step's result is finite now (the loss or the weights were not finite before)"
        )

    # -- saving and loading

    def state(self) -> dict[str, np.ndarray]:
        """Everything a resumed run needs to repeat this one bit for bit, by name. Running statistics become the mean of the ranks'."""
        if self.team.size > 1 and self.net.params.states.size:
            weights, own = self.net.params.download()
            self.net.params.upload((weights, (self.team.sum(own.astype(np.float64)) / self.team.size).astype(np.float32)))
        layout, made = self.net.params.layout, {f"param.{n}": t for n, t in self.net.params.as_dict().items()}
        for moment in self.optimizer.moments:
            made |= {f"optim.{moment}.{n}": t for n, t in layout.split(self._download(f"optim.{moment}")).items()}
        state, sums = self._together()
        return made | {"step_state": state, "sums": sums}

    def load_state(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Continue where `state()` was taken. Raises ParameterError naming the tensor, and changes nothing, if one does not fit."""
        layout = self.net.params.layout
        params, flat = self.net.params.flat(_under("param.", tensors)), {}
        for moment in self.optimizer.moments:
            try:
                flat[moment] = layout.join(_under(f"optim.{moment}.", tensors))
            except ParameterError as error:
                raise ParameterError(f"optimizer state {moment!r}: {error}") from None
        state = _expect(tensors, "step_state", (8,), "int64")
        sums = _expect(tensors, "sums", (4,), "float64")
        if not (0 <= state[POSITION] <= self.count and state[STEP] >= 0 and state[EPOCH] >= 0):
            raise ParameterError(f"step_state says position {state[POSITION]}, the training set has {self.count} images")
        self.seed = int(state[SEED])
        self.net.params.upload(params)
        for moment in self.optimizer.moments:
            self._upload(f"optim.{moment}", flat[moment])
        self._position, self._latest, places = int(state[POSITION]), 0, self._places["train"]
        own = state.copy()
        own[POSITION] = np.searchsorted(places, self._position)
        self._upload("train.state", own)
        self._upload("train.sums", sums if self.team.leads else np.zeros(4))
        self._upload("train.order", epoch_order(self.seed, int(state[EPOCH]), self.count)[places])

    def close(self) -> None:
        """Let the captured graphs go, which hold on to the ranks' connection."""
        self.net.place.synchronize()
        for program in self._programs.values():
            program.close()


def _under(prefix: str, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _expect(tensors: Mapping[str, np.ndarray], name: str, shape: Sequence[int], dtype: str) -> np.ndarray:
    tensor: Any = tensors.get(name)
    if tensor is None or tensor.shape != tuple(shape) or tensor.dtype != dtype:
        found = "missing" if tensor is None else f"{tensor.dtype} {tensor.shape}"
        raise ParameterError(f"{name!r} is {found}, a training checkpoint has {dtype} {tuple(shape)}")
    return tensor
