"""This module defines a list of recorded steps that can be rewritten: steps take the place of others if they cost no more, or all is taken back.

The rules that rewrite it are in `nbcnn.plan.merging` and `nbcnn.plan.sums`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf

from nbcnn.plan.graph import Buf, Fusion, Step
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

Cost = Callable[[Step], float]
"""Least estimated microseconds of a step (`nbcnn.run.resolve.costs`): infinity where nothing runs it, 0 on rows that do not choose by cost."""


def free(step: Step) -> float:
    """The cost of a step where none is known."""
    return 0.0


class Steps:
    """A list of steps that rules rewrite, and who reads and writes each Buf. A rewrite costs no pass over the list.

    cost  what a step takes. told: where `settle` notes what it kept or took back; what nothing runs is not noted.
    """

    def __init__(self, steps: Sequence[Step], cost: Cost = free, told: list[Fusion] | None = None) -> None:
        self.cost, self.told = cost, told
        self.slots = [[step] for step in steps]
        self.index = {step: at for at, step in enumerate(steps)}
        self.readers, self.writers = dict[Buf, list[Step]](), dict[Buf, list[Step]]()
        self.puts: list[tuple[Sequence[Step], dict[Step, int], dict[int, list[Step]]]] = []
        for step in steps:
            self._count(step)

    def __iter__(self) -> Iterator[Step]:
        return (step for slot in self.slots for step in slot)

    def _count(self, step: Step) -> None:
        for bufs, known in ((step.ins, self.readers), (step.outs, self.writers)):
            for buf in bufs:
                known.setdefault(buf.root, []).append(step)

    def _forget(self, step: Step) -> None:
        for bufs, known in ((step.ins, self.readers), (step.outs, self.writers)):
            for buf in bufs:
                known[buf.root].remove(step)

    def put(self, place: Step, made: Sequence[Step], *gone: Step) -> Sequence[Step]:
        """Let `made` take the place of `place`, and those of `gone` go; return `made`."""
        went = {step: self.index[step] for step in (place, *gone)}
        slots = {slot: [*self.slots[slot]] for slot in went.values()}
        at = went[place]
        where = self.slots[at].index(place)
        self.slots[at][where:where] = made
        for step, slot in went.items():
            del self.index[step]
            self.slots[slot].remove(step)
            self._forget(step)
        for step in made:
            self.index[step] = at
            self._count(step)
        self.puts.append((made, went, slots))
        return made

    def settle(self) -> bool:
        """Keep what has been put since this was asked last, or take it all back if it costs more; say whether it was kept."""
        made = dict.fromkeys(step for steps, _, _ in self.puts for step in steps)
        went = {step: slot for _, steps, _ in self.puts for step, slot in steps.items()}
        # What came and went again is neither.
        gone = {each: self.cost(each) for each in sorted(went, key=went.__getitem__) if each not in made}
        come = {each: self.cost(each) for each in sorted((each for each in made if each not in went), key=self.index.__getitem__)}
        # The tolerance covers summation order.
        kept = sum(come.values()) <= sum(gone.values()) * (1 + 1e-12)
        if gone and self.told is not None and (kept or inf not in come.values()):
            self.told.append(Fusion(gone, come, kept))
        while self.puts and not kept:
            self._undo(*self.puts.pop())
        self.puts.clear()
        return kept

    def _undo(self, made: Sequence[Step], went: Mapping[Step, int], slots: Mapping[int, list[Step]]) -> None:
        for step in made:
            del self.index[step]
            self._forget(step)
        for step, slot in went.items():
            self.index[step] = slot
            self._count(step)
        for slot, steps in slots.items():
            self.slots[slot] = steps

    def reading(self, buf: Buf) -> list[Step]:
        """The steps that read a Buf, as often as they read it."""
        return self.readers.get(buf.root, [])

    def first(self, step: Step) -> bool:
        """Whether no step before this one reads its first operand, so that whoever makes that can come to this one's place."""
        return all(self.index[step] <= self.index[each] for each in self.reading(step.ins[0]))

    def between(self, read: Buf, *ops: Op) -> Step | None:
        """The step, of one of `ops` if any are given, that makes a temporary which one step alone reads, once, in the shape in which it is made."""
        return self.maker(read, *ops) if len(self.reading(read)) == 1 else None

    def maker(self, read: Buf, *ops: Op) -> Step | None:
        """The step, of one of `ops` if any are given, that alone makes a temporary, in the shape in which it is read; others may read it, too."""
        writers = self.writers.get(read.root, [])
        if read.root.home != "arena" or len(writers) != 1:
            return None
        (maker,) = writers
        return maker if (not ops or maker.op in ops) and maker.outs[0].root is read.root and alike(maker.outs[0], read) else None


def alike(a: Buf, b: Buf) -> bool:
    """Whether two shapes are equal but for axes of one element at the end, which move nothing in any layout: vectors as 1×1 images."""
    return numel(a.shape) == numel(b.shape) and all(m == n for m, n in zip(a.shape, b.shape, strict=False))


def like(buf: Buf, other: Buf) -> Buf:
    """A Buf in the shape of another of as many elements."""
    return buf if buf.shape == other.shape else buf.reshaped(other.shape)


def joined(fusions: Sequence[Fusion]) -> list[Fusion]:
    """The fusions that were kept, in which one that fuses further what another has made is one with that: from recorded steps to those that stay."""
    whole: list[Fusion] = []
    for each in fusions:
        if each.kept:
            parts = [*(known for known in whole if known.come.keys() & each.gone.keys()), each]
            gone = {step: us for part in parts for step, us in part.gone.items()}
            come = {step: us for part in parts for step, us in part.come.items()}
            whole = [known for known in whole if not any(known is part for part in parts)]
            for step in gone.keys() & come.keys():
                del gone[step], come[step]
            whole.append(Fusion(gone, come, True))
    return whole
