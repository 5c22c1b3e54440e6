"""This module plans Concat without copies: what is joined is written where the whole lies, and parts of a gradient are read where that lies.

In memory a value is a matrix whose rows are pixels (NHWC) or examples, and a concatenation over channels puts such rows side by side. So a value that
is joined can be a part of the whole from the start: its rows are then as far apart as those of the whole. Implementations say which of their operands
may be such parts (`nbcnn.ops.kernel.call.Impl.pitched`). Where all steps that touch a value take it so, it becomes a part, and the step that copies
it vanishes; a value that some step wants in one piece is copied as before, by a step of its own:

    concat_fprop  x₁, x₂, … -> y      xᵢ lies in y, wherever that lies: y may be a part of another whole (DenseNet)
    concat_dgrad  dy -> dx₁, dx₂, …   dxᵢ lies in dy

A value is a part of one whole at most. What several wholes have (layers that join all values before them) lies in the last of them; a whole made of
parts that already lie side by side in that one is a part of it, too, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import gcd
from typing import NamedTuple

import numpy as np

from nbcnn.plan.graph import Buf, Resolution, Step
from nbcnn.plan.op import Bias, Op
from nbcnn.plan.shapes import rows_of
from nbcnn.plan.storage import ITEMSIZE

Resolved = tuple[Step, Resolution]
FORWARD, BACKWARD = Op("concat", "fprop"), Op("concat", "dgrad")


def span(part: Buf, layout: str) -> slice:
    """Where a part of the channels of a larger value lies in the flat array of that: from its first element to its last."""
    rows, each = rows_of(part.shape, layout)
    start, pitch = (part.first or 0) * each, part.root.shape[1] * each
    return slice(start, start + (rows - 1) * pitch + part.shape[1] * each)


def own(flat: np.ndarray, buf: Buf, layout: str) -> np.ndarray:
    """The own elements of a Buf in its flat array, without those that lie between the rows of a part."""
    if buf.first is None:
        return flat
    rows, each = rows_of(buf.shape, layout)
    strides = (buf.root.shape[1] * each * flat.itemsize, flat.itemsize)
    return np.lib.stride_tricks.as_strided(flat, (rows, buf.shape[1] * each), strides)


class _Touch(NamedTuple):
    """A step that reads or writes a Buf: its number, the side and the position of the operand."""

    at: int
    side: str
    position: int
    buf: Buf


def with_parts(hows: Sequence[Resolved], layout: str, resolve: Callable[[Step], Resolution]) -> list[Resolved]:
    """The steps without the copies of Concat that are not needed; `resolve` says how the copies run that stay."""
    parts, joins = _Parts(hows, layout), [at for at, (step, _) in enumerate(hows) if step.op.plain in (FORWARD, BACKWARD)]
    # The last concatenation first, so that it is known where a whole lies before its parts are looked at; with gradients the other way round.
    for at in reversed(joins):
        if hows[at][0].op.plain == FORWARD:
            parts.join(at)
    for at in joins:
        if hows[at][0].op == BACKWARD:
            parts.split(at)
    made = list[Resolved]()
    for at, (step, how) in enumerate(hows):
        swapped = replace(step, ins=tuple(map(parts.placed, step.ins)), outs=tuple(map(parts.placed, step.outs)))
        copies = parts.copies(step, swapped) if at in joins else [swapped]
        made += [(each, how if each is swapped else resolve(each)) for each in copies]
    return made


class _Parts:
    """Which values lie in others: `places`, the whole and the first channel there by value."""

    def __init__(self, hows: Sequence[Resolved], layout: str) -> None:
        self.hows, self.layout = hows, layout
        self.places = dict[Buf, tuple[Buf, int]]()
        self.touches = dict[Buf, list[_Touch]]()
        for at, (step, _) in enumerate(hows):
            for side, bufs in (("in", step.ins), ("out", step.outs)):
                for position, buf in enumerate(bufs):
                    self.touches.setdefault(buf.root, []).append(_Touch(at, side, position, buf))

    def join(self, at: int) -> None:
        """Let the values that step `at` joins lie in its result, or that in the whole in which all of them lie already."""
        step, _ = self.hows[at]
        xs, y = _values(step), step.outs[0]
        if not self._own(y):
            return
        lying = [self.places.get(x) for x in xs]
        if y not in self.places and lying[0] is not None and lying == list(_side_by_side(xs, *lying[0])) and len(xs) == len(_parts_of(step)):
            self._place(y, *lying[0], at)
        for x, place in zip(xs, _side_by_side(_parts_of(step), *self.places.get(y, (y, 0))), strict=False):
            self._place(x, *place, at)

    def split(self, at: int) -> None:
        """Let the gradients that step `at` hands back lie in the one that it reads."""
        step, _ = self.hows[at]
        dy = step.ins[0]
        if self._own(dy):
            for dx, place in zip(step.outs, _side_by_side(step.outs, *self.places.get(dy, (dy, 0))), strict=True):
                self._place(dx, *place, at)

    def placed(self, buf: Buf) -> Buf:
        """A Buf where it lies."""
        return buf.within(*self.places[buf]) if buf in self.places else buf

    def copies(self, step: Step, swapped: Step) -> list[Step]:
        """What is left of a step that joins or splits; `swapped`: with its operands where they lie."""
        forward = step.op.plain == FORWARD
        whole, bufs = (step.outs[0], _parts_of(step)) if forward else (step.ins[0], step.outs)
        places = list(_side_by_side(bufs, *self.places.get(whole, (whole, 0))))
        left = [(buf, place) for buf, place in zip(bufs, places, strict=True) if self.places.get(buf) != place]
        if len(left) == len(bufs):
            return [swapped]
        made = list[Step]()
        for buf, place in left:
            # Of two values of which the last has a bias, that one is left: it is no part, as it is not what the whole has.
            bias = step.ins[-1:] if step.op.has(Bias) and buf is bufs[-1] else ()
            part, dense = buf.within(*place), self.placed(buf)
            ends = ((dense, *bias), (part,)) if forward else ((part,), (dense,))
            made.append(replace(step, op=step.op if bias else step.op.plain, ins=ends[0], outs=ends[1]))
        return made

    def _own(self, buf: Buf) -> bool:
        """Whether a Buf is a temporary that one step writes, once."""
        return buf.base is None and buf.home == "arena" and sum(each.side == "out" for each in self.touches[buf]) == 1

    def _place(self, buf: Buf, whole: Buf, first: int, by: int) -> None:
        """Let a value lie in a whole if all steps that touch it take it as a part, but for number `by`, which joins or splits it."""
        if buf in self.places or not self._own(buf) or buf.dtype != whole.dtype or sum(each.at == by for each in self.touches[buf]) > 1:
            return
        _, each = rows_of(buf.shape, self.layout)
        alignment = gcd(first * each, whole.shape[1] * each) * ITEMSIZE[whole.dtype]
        if all(self._takes(touch, alignment) for touch in self.touches[buf] if touch.at != by):
            self.places[buf] = whole, first

    def _takes(self, touch: _Touch, alignment: int) -> bool:
        """Whether a step takes an operand as a part of a whole."""
        how = self.hows[touch.at][1]
        split = touch.side == "in" and touch.position in how.splits
        return touch.buf.base is None and not split and how.pitched(touch.side, touch.position, alignment)


def _parts_of(step: Step) -> tuple[Buf, ...]:
    """What a step joins."""
    return step.ins[:-1] if step.op.has(Bias) else step.ins


def _values(step: Step) -> tuple[Buf, ...]:
    """The values that a step joins and the whole has as they are: a bias is added to the last."""
    return step.ins[:-2] if step.op.has(Bias) else step.ins


def _side_by_side(bufs: Sequence[Buf], whole: Buf, first: int) -> Iterator[tuple[Buf, int]]:
    """(whole, first channel) of values that lie side by side in a whole from channel `first` on."""
    for buf in bufs:
        yield whole, first
        first += buf.shape[1]
