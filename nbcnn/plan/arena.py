"""This module gives every temporary of planned steps an offset in one block of memory, the arena: none that is still read is written over."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from nbcnn.plan.graph import Buf, Planned, Step

ALIGNMENT = 256
"""Every Buf in the arena starts at a multiple of so many bytes."""

MOST_ARENA = 8 << 30
"""Bytes of an arena up to which a plan keeps more for the sake of time: a tenth of the memory of the smallest GPU that has wgmma. Where that is
more than a GPU has free, the plan is made anew without (`nbcnn.run.planning.Training.lean`)."""


def align(count: int, to: int) -> int:
    """`count`, rounded up to a multiple of `to`."""
    return -(-count // to) * to


def side_ends(planned: Sequence[Planned]) -> list[int]:
    """The numbers of the steps before which the side branch must have ended: the first that reads weights packed there, or a gradient."""
    beside = {buf for item in planned if item.side for buf in item.step.outs}
    packed = next((at for at, item in enumerate(planned) if item.packed is not None and item.packed[0] in beside), len(planned))
    return [packed, next((at for at, item in enumerate(planned) if reads_gradient(item.step)), len(planned))]


def reads_gradient(step: Step) -> bool:
    """Whether a step reads a gradient of parameters."""
    return any(buf.root.home == "grad" for buf in step.ins)


def lifetimes(planned: Sequence[Planned]) -> dict[Buf, tuple[int, int]]:
    """First and last step during which each temporary is needed."""
    spans: dict[Buf, tuple[int, int]] = {}
    joined = side_ends(planned)
    for at, item in enumerate(planned):
        last = min((each for each in joined if each > at), default=at) if item.side else at
        # Of an operand in planes that an earlier step has made nothing else is read.
        made = {each.position for each in item.planes if each.made}
        touched = [*(buf for position, buf in enumerate(item.step.ins) if position not in made), *item.step.outs]
        if item.scratch is not None:
            touched.append(item.scratch)
        if item.packed is not None:
            touched.append(item.packed[0])
        touched += [each.buf for each in item.planes]
        for buf in touched:
            root = buf.root
            if root.home == "arena":
                first, known = spans.get(root, (at, at))
                spans[root] = (first, max(known, last))
    return spans


def plan_arena(planned: Sequence[Planned]) -> tuple[dict[Buf, int], int]:
    """Returns offsets in bytes for all temporaries, and the arena's size: greedy by size over lifetimes first use..last use.

    Largest first, each at the lowest offset that is free during its whole life (best known simple heuristic for offline
    allocation; Pisarchyk and Lee, "Efficient memory management for deep neural net inference", 2020).
    """
    spans, beside = _places(planned)
    placed, offsets, top = _Placed(len(planned) + 1), dict[Buf, int](), 0
    for buf in sorted(spans, key=lambda b: (-b.nbytes, spans[b][0])):
        at = 0
        for start, end in placed.during(*spans[buf]):
            if start < at + buf.nbytes and at < end:
                at = align(end, ALIGNMENT)
        offsets[buf], end = at, at + max(buf.nbytes, 1)
        placed.add(at, end, *spans[buf])
        top = max(top, end)
    offsets |= {buf: offsets[largest] for buf, largest in beside.items()}
    return offsets, align(top, ALIGNMENT)


class _Placed:
    """The places that are taken, found by the steps during which they are: in time that grows with what is found, not with all that is placed."""

    def __init__(self, steps: int) -> None:
        self._leaves = max(1, steps)
        # A place stands at the nodes of a binary tree over the steps that together cover its life, so a step finds it on its way to the root.
        self._covering: list[list[int]] = [[] for _ in range(2 * self._leaves)]
        self._begins: list[tuple[int, int]] = []  # (first step, number), sorted
        self._places: list[tuple[int, int]] = []

    def add(self, start: int, end: int, first: int, last: int) -> None:
        """Take the bytes `start` to `end` during the steps `first` to `last`."""
        number = len(self._places)
        self._places.append((start, end))
        insort(self._begins, (first, number))
        low, high = first + self._leaves, last + self._leaves + 1
        while low < high:
            if low & 1:
                self._covering[low].append(number)
                low += 1
            if high & 1:
                high -= 1
                self._covering[high].append(number)
            low, high = low >> 1, high >> 1

    def during(self, first: int, last: int) -> list[tuple[int, int]]:
        """The (start, end) of all that is taken at one of the steps `first` to `last`, by their starts."""
        found, node = list[int](), first + self._leaves
        while node:
            found += self._covering[node]
            node >>= 1
        begins = self._begins
        found += [number for _, number in begins[bisect_left(begins, (first + 1, -1)) : bisect_left(begins, (last + 1, -1))]]
        return [self._places[number] for number in sorted(found, key=lambda number: (self._places[number][0], number))]


def _places(planned: Sequence[Planned]) -> tuple[dict[Buf, tuple[int, int]], dict[Buf, Buf]]:
    """The lifetimes of what wants a place of its own, and by Buf the one in whose place it lies.

    Steps of the side branch run one after another, so one scratch, as large as the largest, serves them all: at batch 1 that is half of the arena.
    """
    spans = lifetimes(planned)
    beside = sorted((item.scratch for item in planned if item.side and item.scratch is not None), key=lambda buf: -buf.nbytes)
    if len(beside) < 2:
        return spans, {}
    largest, *others = beside
    lives = [spans.pop(buf) for buf in beside]
    spans[largest] = min(first for first, _ in lives), max(last for _, last in lives)
    return spans, dict.fromkeys(others, largest)


def live_bytes(planned: Sequence[Planned]) -> int:
    """The largest sum of temporaries alive at one step: no arena can be smaller."""
    spans, _ = _places(planned)
    return max((sum(b.nbytes for b, (first, last) in spans.items() if first <= at <= last) for at in range(len(planned))), default=0)
