"""This module plans a training, one walk down from layers to programs; every method of `Training` is a stage of it, in this order.

    check      does what is to be trained fit together?
    record     layers, fused → the steps of one training step: gather, forward, loss, backward, update, bookkeeping; dead ones dropped
    plan       steps → implementations, tiles, packed weights, offsets in the arena (`Net.lower`: `resolve.plan_on`, `graph.lower`)
    plans      one for each batch size that an epoch and an evaluation have
    memory     what these plans take; `fit` refuses what is too much, and says which batch is not
    allocate   arrays allocated and filled, programs bound (`allocation.Allocated`, which also compiles them)

Before `allocate` nothing of a plan is allocated or compiled, so all plans of a GPU can be made without one (`nbcnn.lab.measure.plans`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from nbcnn.files.errors import UsageError
from nbcnn.plan.graph import Buf, Plan, Sync, Tape, drop_dead
from nbcnn.ranks.team import ALONE, Team
from nbcnn.run.allocation import Allocated, check_memory, largest_batch
from nbcnn.run.net import Net, Recorded
from nbcnn.run.resident import Images, Series

BRANCHING = 64
"""Up to this batch size weight gradients run beside the rest of the backward pass: single kernels do not fill the GPU there."""

Plans = dict[tuple[str, int], Plan]
"""A plan's key: the split, "train" or "test", and the size of the batch."""


@dataclass(frozen=True)
class Training:
    """What is trained, on what and how, as given to `nbcnn.run.session.TrainingSession`; `steps` is the length of its table of learning rates."""

    net: Net
    sets: Mapping[str, Images | Series]
    optimizer: Any
    batch: int
    steps: int
    flip: bool = False
    team: Team = ALONE
    sync_stats: bool = False

    def check(self) -> None:
        """Raise UsageError for what cannot be trained."""
        net, team, batch, count = self.net, self.team, self.batch, len(self.sets["train"])
        if not net.has_loss:
            raise UsageError("this net has no loss, so it cannot be trained")
        if self.sync_stats and not net.params.states.size:
            raise UsageError("--sync-stats is for networks with statistics of a batch (EvoNorm-B0); this one has none")
        for split, data in self.sets.items():
            data.check(net, split)
        if team.size > 1 and getattr(net.layers[-1], "of_batch", False):
            name = type(net.layers[-1]).__name__
            raise UsageError(f"the loss {name} is no mean over the batch, so ranks cannot share one: use another loss, or one process")
        if odd := batch % team.size:
            near = " or ".join(str(n) for n in (batch - odd, batch - odd + team.size) if n)
            raise UsageError(f"batch {batch} does not divide among {team.size} ranks, of which each takes the same part: {near} would")
        if not 1 <= batch <= count:
            raise UsageError(f"batch {batch} is not between 1 and the {count} {self.sets['train'].noun} of the training set")

    @cached_property
    def places(self) -> dict[str, np.ndarray]:
        """By split, the positions in an epoch's order that this rank computes."""
        return {split: self.team.places(len(data), min(len(data), self.batch)) for split, data in self.sets.items()}

    @cached_property
    def bufs(self) -> dict[str, Buf]:
        """The Bufs that no layer owns, by name: moments of the optimizer, learning rates; of each split its data, order, StepState and sums."""
        size = self.net.params.layout.size
        made = {f"optim.{name}": Buf(f"optim.{name}", (size,), home="state") for name in self.optimizer.moments}
        made["rates"] = Buf("learning rates", (self.steps,), home="io")
        for split, data in self.sets.items():
            for name, array in data.arrays().items():
                made[f"{split}.{name}"] = Buf(name, array.shape, array.dtype.name, "io")
            made[f"{split}.order"] = Buf("order", self.places[split].shape, "int32", "io")
            made[f"{split}.state"] = Buf("state", (8,), "int64", "state")
            made[f"{split}.sums"] = Buf("sums", (4,), "float64", "state")
        return made

    def record(self, split: str, batch: int) -> Recorded:
        """Gather, forward, loss; for the training set also backward and update; then advance the split's StepState."""
        net, bufs, data, share, training = self.net, self.bufs, self.sets[split], self.team.share(batch), split == "train"
        sync = Sync(self.team.rank, self.team.size, share.count, share.weight) if self.sync_stats and self.team.size > 1 else None
        tape = Tape(training, sync)
        state, sums, order = (bufs[f"{split}.{name}"] for name in ("state", "sums", "order"))
        held = {name: bufs[f"{split}.{name}"] for name in data.arrays()}
        x, y = data.record(tape, held, order, state, share.images, self.flip and training)
        value, dy, backward = net.record_loss(tape, x, y)
        if training:
            backward(dy)
            self._record_update(tape, state, share.weight)
        tape.emit("advance", [value, state, sums], [state, sums], "advance", count=share.count)
        return Recorded(tuple(drop_dead(tape.steps)), bufs)

    def _record_update(self, tape: Tape, state: Buf, weight: float) -> None:
        """Add the ranks' gradients, of which this one's counts `weight`, and update the weights; nothing where there are none."""
        layout, grads = self.net.params.layout, self.net.flat_grads
        if not layout.size:
            return
        if self.team.size > 1:
            tape.emit("all_reduce", [grads], [grads], "update", weight=weight)
        moments = [self.bufs[f"optim.{name}"] for name in self.optimizer.moments]
        self.optimizer.record(tape, self.net.flat_weights, grads, moments, self.bufs["rates"], state, layout.decayed)

    def plan(self, split: str, batch: int) -> Plan:
        """The plan of one training step on `batch` images, or of the evaluation of as many of the test set."""
        return self.net.lower(self.record(split, batch), branching=self.team.share(batch).images <= BRANCHING)

    def plans(self, batch: int | None = None) -> Plans:
        """Plans for full batches of the training and the test set, and their smaller last ones; `batch` None is the training's own."""
        wanted = []
        for split, data in self.sets.items():
            size = min(len(data), batch or self.batch)
            wanted += [(split, n) for n in (size, len(data) % size) if n]
        return {(split, n): self.plan(split, n) for split, n in wanted}

    def memory(self, plans: Plans) -> dict[str, int]:
        """Bytes that `plans` and everything resident take, by name."""
        held = sum(array.nbytes for data in self.sets.values() for array in data.arrays().values())
        tables = sum(b.nbytes for name, b in self.bufs.items() if name.endswith((".order", ".state", ".sums")))
        return {
            "arena": max(plan.arena_bytes for plan in plans.values()),
            "parameters and gradients": self.net.params.nbytes,
            "optimizer": sum(b.nbytes for name, b in self.bufs.items() if name.startswith("optim.")),
            "packing maps": sum(index.nbytes for plan in plans.values() for index in plan.packs.values()),
            "data set": held,
            "tables": tables + self.bufs["rates"].nbytes,
        }

    def fit(self, planned: Mapping[str, int]) -> None:
        """Raise MemoryPlanError, with the largest batch that fits, if `planned` bytes are more than there are."""
        ranks = self.team.size
        each = largest_batch(self.batch // ranks, lambda size: self.memory(self.plans(size * ranks)))
        check_memory(self.net.device, planned, f"batch {self.batch}", lambda free: (each(free) or 0) * ranks or None)

    def allocate(self, plans: Plans) -> Allocated:
        """`plans` in memory, with the data sets and this rank's orders; learning rates and all state are zero."""
        values = {"rates": np.zeros(self.steps, np.float32)}
        for split, data in self.sets.items():
            values |= {f"{split}.{name}": array for name, array in data.arrays().items()}
            values[f"{split}.order"] = self.places[split].astype(np.int32)
        return Allocated(self.net, plans, self.bufs, values)
