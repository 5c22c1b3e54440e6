"""This module plans a training, one walk down from layers to programs; every method of `Training` is a stage of it, in this order.

    check      does what is to be trained fit together?
    record     layers → the steps of one training step: gather, forward, loss, backward, update, bookkeeping; dead ones dropped, others fused
    plan       steps → implementations, tiles, packed weights, offsets in the arena (`Net.lower`: `resolve.plan_on`, `lowering.lower`)
    plans      one for each batch size that an epoch and an evaluation have
    memory     what these plans take; `fit` refuses what is too much, and says which batch is not
    allocate   arrays allocated and filled, programs bound (`allocation.Allocated`, which also compiles them)

Before `allocate` nothing of a plan is allocated or compiled, so all plans of a GPU can be made without one (`nbcnn.lab.measure.plans`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from nbcnn.datasets.augment import NOTHING, Augment
from nbcnn.files.errors import UsageError
from nbcnn.nn.optim import PLAIN, Factor, Factors
from nbcnn.nn.params import padded
from nbcnn.ops.update.accumulate import COUNTED
from nbcnn.plan.arena import MOST_ARENA
from nbcnn.plan.graph import Buf, Plan, Sync, Tape, drop_dead
from nbcnn.plan.lowering import is_short, reads_little
from nbcnn.plan.op import Op
from nbcnn.plan.recompute import recomputed
from nbcnn.ranks.team import ALONE, Team
from nbcnn.run import streaming
from nbcnn.run.allocation import Allocated, check_memory, largest_batch
from nbcnn.run.net import Net, Recorded
from nbcnn.run.resident import Images, Series

BRANCHING = 64
"""Up to this batch size all weight gradients that read little run beside the rest of the backward pass: single kernels do not fill the GPU there. In
larger batches those that are short do, unless that makes the arena large, or the plan is to save memory."""


class Update(NamedTuple):
    """One step of the optimizer, on elements [start, stop) of the flat buffer, of which the first `decayed` decay."""

    start: int
    stop: int
    decayed: int
    factor: Factor


Plans = dict[tuple[str, int], Plan]
"""A plan's key: the split, "train" or "test", and the size of the batch."""


@dataclass(frozen=True)
class Training:
    """What is trained, on what and how, as given to `nbcnn.run.session.TrainingSession`; `steps` is the length of its table of learning rates.

    factors  of the learning rate and the weight decay, by parameter. Where there are any, every run of parameters with equal factors in the
             flat buffer has an update of its own, and what is frozen has none: its gradients are not even computed.
    micro    examples of a part of the batch, where one training step computes several and adds up their gradients; 0: the batch is one part.
    ema      the decay of the average of the weights (`nbcnn.ops.update.ema`), 0 without one.
    lean     plans keep nothing longer for the sake of time (but for the side branch of up to BRANCHING images): so is a training that would not fit.
    recompute  outputs of norms are made again in the backward pass instead of being kept (`nbcnn.plan.recompute`).
    """

    net: Net
    sets: Mapping[str, Images | Series]
    optimizer: Any
    batch: int
    steps: int
    augment: Augment = NOTHING
    team: Team = ALONE
    sync_stats: bool = False
    factors: Factors = field(default_factory=dict)
    micro: int = 0
    ema: float = 0.0
    recompute: bool = False
    lean: bool = False

    @property
    def _scaled(self) -> dict[str, bool]:
        """The attribute of updates with a loss scale, where the row has one."""
        return {"scaled": True} if self.net.row.scales_loss else {}

    @property
    def part(self) -> int:
        """Examples, of all ranks, that are computed at once: of a batch of more the gradients are added up, part by part."""
        return self.micro or self.batch

    def check(self) -> None:
        """Raise UsageError for what cannot be trained."""
        net, team, batch, count = self.net, self.team, self.part, len(self.sets["train"])
        if not net.has_loss:
            raise UsageError("this net has no loss, so it cannot be trained")
        if self.sync_stats and not net.params.states.size:
            raise UsageError("--sync-stats is for networks with statistics of a batch (BatchNorm2d, EvoNormB0); this one has none")
        for split, data in self.sets.items():
            data.check(net, split)
        if team.size > 1 and getattr(net.layers[-1], "of_batch", False):
            name = type(net.layers[-1]).__name__
            raise UsageError(f"the loss {name} is no mean over the batch, so ranks cannot share one: use another loss, or one process")
        if self.net.params.layout.names and not self.updates:
            raise UsageError("every parameter is frozen, so there is nothing to train")
        if odd := batch % team.size:
            near = " or ".join(str(n) for n in (batch - odd, batch - odd + team.size) if n)
            raise UsageError(f"batch {batch} does not divide among {team.size} ranks, of which each takes the same part: {near} would")
        if not 1 <= batch <= count:
            least = team.size
            largest = count - count % least
            raise UsageError(
                f"batch {batch} is not between 1 and the {count} {self.sets['train'].noun} of the training set; the largest batch is {largest}"
            )

    @cached_property
    def places(self) -> dict[str, np.ndarray]:
        """By split, the positions in an epoch's order that this rank computes."""
        return {split: self.team.places(len(data), min(len(data), self.part)) for split, data in self.sets.items()}

    def largest(self, split: str) -> int:
        """Examples of the largest step of a split: a batch of the training set, or a part of one of the test set."""
        return min(len(self.sets[split]), self.batch if split == "train" else self.part)

    @cached_property
    def bufs(self) -> dict[str, Buf]:
        """The Bufs that no layer owns, by name: moments of the optimizer, learning rates; of each split its data, order, StepState and sums."""
        size = self.net.params.layout.size
        made = {f"optim.{name}": Buf(f"optim.{name}", (size,), home="state") for name in self.optimizer.moments}
        if self.part < self.batch:
            made["optim.accumulated"] = Buf("accumulated gradients", (size,), home="state")
            made["optim.counted"] = Buf("what parts count", (COUNTED,), "float64", "state")
        if self.ema:
            made["optim.average"] = Buf("average of the weights", (size,), home="state")
        made |= {name: Buf("learning rates", (self.steps,), home="io") for name in self.rates}
        for split, data in self.sets.items():
            for name, (shape, dtype) in data.held().items():
                made[f"{split}.{name}"] = Buf(name, shape, dtype, "io")
            made[f"{split}.order"] = Buf("order", self.places[split].shape, "int32", "io")
            made[f"{split}.state"] = Buf("state", (8,), "int64", "state")
            made[f"{split}.sums"] = Buf("sums", (4,), "float64", "state")
        return made

    @cached_property
    def updates(self) -> list[Update]:
        """The runs of parameters in the flat buffer that are updated alike, in its order; one without factors, none of frozen parameters."""
        layout, made = self.net.params.layout, list[Update]()
        if not any(self.factors.get(name, PLAIN) != PLAIN for name in layout.names):
            return [Update(0, layout.size, layout.decayed, PLAIN)]
        for name in sorted(layout.names, key=layout.offsets.__getitem__):
            factor, start = self.factors.get(name, PLAIN), layout.offsets[name]
            stop, last = start + padded(layout.slice(name).stop - start), made[-1] if made else None
            decayed = stop - start if start < layout.decayed else 0
            if last and last.stop == start and last.factor == factor and bool(last.decayed) == bool(decayed):
                made[-1] = Update(last.start, stop, last.decayed + decayed, factor)
            elif factor.lr:
                made.append(Update(start, stop, decayed, factor))
        return made

    @cached_property
    def frozen(self) -> frozenset[str]:
        """The parameters that are not updated."""
        return frozenset(name for name, factor in self.factors.items() if not factor.lr)

    @cached_property
    def rates(self) -> dict[str, float]:
        """The tables of learning rates that the updates read, by the name of their Buf, and what they are multiplied by."""
        return {"rates": 1.0} | {f"rates·{each.factor.lr:g}": each.factor.lr for each in self.updates if each.factor.lr != 1}

    @cached_property
    def parts(self) -> dict[Buf, tuple[Buf, int, int]]:
        """The Bufs of `updates`, parts of the flat buffers."""
        return {part: (whole, each.start, each.stop) for each, bufs in self._parts.items() for part, whole in bufs}

    @cached_property
    def _parts(self) -> dict[Update, list[tuple[Buf, Buf]]]:
        """For each update the parts of weights, gradients and moments that it is of, each beside the whole; nothing for the whole of them."""
        whole = [self.net.flat_weights, self.net.flat_grads, *(self.bufs[f"optim.{name}"] for name in self.optimizer.moments)]
        size = self.net.params.layout.size
        return {
            each: [(Buf(f"{buf.name}[{each.start}:{each.stop}]", (each.stop - each.start,), buf.dtype, buf.home), buf) for buf in whole]
            for each in self.updates
            if (each.start, each.stop) != (0, size)
        }

    def record(self, split: str, batch: int) -> Recorded:
        """Gather, forward, loss; for the training set also backward and update; then advance the split's StepState.

        A batch that is larger than a part is computed part by part. Every rank computes its share of every part, so that all have as many.
        """
        bufs, training, several = self.bufs, split == "train", self.team.size > 1
        tape, state, sums = Tape(training), bufs[f"{split}.state"], bufs[f"{split}.sums"]
        parts = [min(self.part, batch - at) for at in range(0, batch, self.part)]
        tape.in_parts = len(parts) > 1
        for number, size in enumerate(parts, 1):
            share, ends = self.team.share(size), number == len(parts)
            tape.sync = Sync(self.team.rank, self.team.size, share.count, share.weight) if self.sync_stats and several else None
            tape.begin_part()
            tape.part, tape.together = share.weight if training else float(share.count > 0), training and several
            value, backward = self._record_part(tape, split, share.images)
            if training:
                backward()
                if len(parts) > 1:
                    value = self._accumulate(tape, value, share.count, size, self.team.share(batch).weight, number == 1, ends)
                if ends:
                    self._leave_frozen(tape)
                    self.record_update(tape, state, share.weight if len(parts) == 1 else 1.0)
            attrs = {"count": share.count} | ({} if ends else {"steps": 0}) | (self._scaled if training else {})
            tape.emit(Op("advance"), [value, state, sums, *([tape.count] if tape.count and ends else [])], [state, sums], "advance", **attrs)
        return self.net.merged(drop_dead(tape.steps), bufs)

    def _record_part(self, tape: Tape, split: str, images: int) -> tuple[Buf, Callable[[], Any]]:
        """Record gather, forward and loss of so many images; return the loss and what records the backward pass."""
        bufs, data = self.bufs, self.sets[split]
        held = {name: bufs[f"{split}.{name}"] for name in data.held()}
        order, state = bufs[f"{split}.order"], bufs[f"{split}.state"]
        x, y = data.record(tape, held, order, state, images, self.augment if tape.training else NOTHING)
        value, dy, backward = self.net.record_loss(tape, x, y)
        return value, lambda: backward(self.net.scaled(tape, dy, state))

    def _accumulate(self, tape: Tape, value: Buf, images: int, examples: int, share: float, first: bool, last: bool) -> Buf:
        """Add the gradients of a part to those of the parts before it; the last one's sum lies where the update reads gradients.

        value: the loss of the part, of which this rank has so many `images` and all ranks `examples`; `share` is the rank's of the batch. Returns
        the loss of the batch so far; what it counts is `tape.count` then.
        """
        grads, total, counted = self.net.flat_grads, self.bufs["optim.accumulated"], self.bufs["optim.counted"]
        batch_loss, count = tape.temp("loss of the batch", (), "float64"), tape.temp("count of the batch", (), "float64")
        given = [tape.count, tape.total] if tape.count and tape.total else []
        how = {"images": images, "examples": examples, "share": share, "root": getattr(self.net.layers[-1], "of_batch", False)}
        tape.emit(Op("weigh_part"), [value, counted, *given], [counted, batch_loss, count], "update", first=first, **how)
        tape.emit(Op("accumulate"), [grads, total, counted], [grads if last else total], "update", first=first, last=last)
        tape.count = count
        return batch_loss

    def record_update(self, tape: Tape, state: Buf, weight: float) -> None:
        """Add the ranks' gradients, of which this one's counts `weight`, and update the weights; nothing where there are none."""
        layout, grads = self.net.params.layout, self.net.flat_grads
        if not layout.size:
            return
        if self.team.size > 1:
            tape.emit(Op("all_reduce"), [grads], [grads], "update", weight=weight)
        if self._scaled:
            tape.emit(Op("unscale"), [grads, state], [grads, state], "update")
        moments = [self.bufs[f"optim.{name}"] for name in self.optimizer.moments]
        norm = self.optimizer.norm(tape, grads)
        for each in self.updates:
            bufs = [part for part, _ in self._parts.get(each, [])] or [self.net.flat_weights, grads, *moments]
            rates = self.bufs["rates" if each.factor.lr == 1 else f"rates·{each.factor.lr:g}"]
            self.optimizer.record(tape, bufs[0], bufs[1], bufs[2:], rates, state, each.decayed, norm, each.factor.weight_decay, **self._scaled)
        if self.ema:
            average = self.bufs["optim.average"]
            tape.emit(Op("ema"), [average, self.net.flat_weights, state], [average], "update", decay=self.ema)

    def _leave_frozen(self, tape: Tape) -> None:
        """Drop the steps that only make gradients of frozen parameters, whose gradients so stay the zeros of the beginning.

        Raises UsageError if a step makes such a gradient beside others and gradients are clipped by their norm, of which it would be a part.
        """
        if not self.frozen:
            return
        kept = []
        for step in tape.steps:
            made = {out.root.name for out in step.outs if out.root.home == "grad"}
            if made and all(out.root.home == "grad" and out.root.name in self.frozen for out in step.outs):
                continue
            if self.optimizer.clip_norm and made & self.frozen:
                raise UsageError(
                    f"clip_norm would count the gradient of the frozen {min(made & self.frozen)}: freeze all of its layer, or clip by value"
                )
            kept.append(step)
        tape.steps = kept

    def plan(self, split: str, batch: int) -> Plan:
        """The plan of one training step on `batch` images, or of the evaluation of as many of the test set."""
        recorded = self.record(split, batch)
        kept = self._lowered(recorded, batch, self.lean)
        if not self.recompute or split != "train":
            return kept
        ends = Op("weigh_part" if batch > self.part else "advance")
        losses = [step.ins[0] for step in recorded.steps if step.op == ends]
        steps = recomputed(recorded.steps, losses, self.net.row.ops)
        if len(steps) == len(recorded.steps):
            return kept
        # Side steps would hold what is made again for them until the branches meet, so there is no side branch of gradients.
        again = self.net.lower(replace(recorded, steps=tuple(steps)), lean=True)
        # What is made again must save memory by itself: the lean plan is as small without it, and faster.
        leanest = kept if self.lean else self._lowered(recorded, batch, lean=True)
        return again if again.arena_bytes < leanest.arena_bytes else kept

    def _lowered(self, recorded: Recorded, batch: int, lean: bool) -> Plan:
        """The plan of recorded steps on `batch` images, with weight gradients beside the rest of the backward pass where that is worth its memory."""
        large = self.team.share(batch).images > BRANCHING
        # A branch ends where gradients are first read, which of several parts is before the last has made its own.
        if batch > self.part or (large and lean):
            return self.net.lower(recorded, lean=lean)
        made = self.net.lower(recorded, is_short if large else reads_little, lean)
        if large and made.arena_bytes > MOST_ARENA and any(item.side and item.step.op != Op("pack_weights") for item in made.steps):
            return self.net.lower(recorded, lean=lean)
        return made

    def plans(self, batch: int | None = None) -> Plans:
        """Plans for full batches of the training and the test set, and their smaller last ones; `batch` None is the training's own.

        Of a training whose batch has parts, `batch` is that of a part.
        """
        of = self if batch is None else replace(self, batch=batch * -(-self.batch // self.part), micro=batch)
        wanted = []
        for split, data in self.sets.items():
            size = of.largest(split)
            wanted += [(split, n) for n in (size, len(data) % size) if n]
        return {(split, n): of.plan(split, n) for split, n in wanted}

    def memory(self, plans: Plans) -> dict[str, int]:
        """Bytes that `plans` and everything resident take, by name."""
        held = sum(self.bufs[f"{split}.{name}"].nbytes for split, data in self.sets.items() for name in data.held().keys() - data.on_gpu())
        tables = sum(b.nbytes for name, b in self.bufs.items() if name.endswith((".order", ".state", ".sums")))
        return {
            "arena": max(plan.arena_bytes for plan in plans.values()),
            "parameters and gradients": self.net.params.nbytes,
            "optimizer": sum(b.nbytes for name, b in self.bufs.items() if name.startswith("optim.")),
            "packing maps": sum(buf.nbytes for plan in plans.values() for buf in (*plan.packs.values(), *plan.tables.values())),
            "data set": held,
            "tables": tables + sum(self.bufs[name].nbytes for name in self.rates),
        }

    def streamed(self) -> Training:
        """The same training on data sets that stay on the host (`nbcnn.run.streaming`). Raises UsageError for series."""
        sets = {}
        for split, data in self.sets.items():
            if not isinstance(data, Images):
                raise UsageError("--resident no streams images; series take little memory and are always resident")
            share = self.team.share(self.largest(split)).images
            rows = data.batches.batch if data.batches else streaming.chunk_rows(share, data.row_bytes, len(self.places[split]))
            sets[split] = replace(data, streamed=rows)
        return replace(self, sets=sets)

    @property
    def host_bytes(self) -> int:
        """Bytes of page-locked host memory that streaming takes; 0 if everything is resident."""
        return sum(data.host_bytes for data in self.sets.values() if isinstance(data, Images))

    def fits(self, planned: Mapping[str, int]) -> bool:
        """True if the device has `planned` bytes free."""
        return sum(planned.values()) <= self.net.device.free_bytes()

    def fit(self, planned: Mapping[str, int]) -> None:
        """Raise MemoryPlanError, with the largest batch that fits, if `planned` bytes are more than there are."""
        ranks, lean = self.team.size, replace(self, lean=True)
        each = largest_batch(self.part // ranks, lambda size: lean.memory(lean.plans(size * ranks)))
        check_memory(self.net.device, planned, f"batch {self.part}", lambda free: (each(free) or 0) * ranks or None)

    def allocate(self, plans: Plans) -> Allocated:
        """`plans` in memory, with the data sets and this rank's orders; learning rates and all state are zero."""
        values = {name: np.zeros(self.steps, np.float32) for name in self.rates}
        for split, data in self.sets.items():
            values |= {f"{split}.{name}": array for name, array in data.arrays().items()}
            values[f"{split}.order"] = self.places[split].astype(np.int32)
        return Allocated(self.net, plans, self.bufs, values, self.parts)
