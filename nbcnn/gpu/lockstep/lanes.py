"""The lanes that are active, and how threads part and meet again.

A *lane* is a thread of one of the blocks that run together; a *mask* is a bool array with one element per lane, or None when all lanes are active.
`now`
has the mask of the statement that is being executed. The code that `rewrite` makes calls the rest: `split` for an `if`, `over` and `Loop` for loops,
`Returns` for a return that not all threads reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np


class NotSimulated(NotImplementedError):
    """A kernel names what the simulator has no form of, such as the tensor cores of Hopper."""


Mask = Any
"""bool (lanes,), or None: all lanes."""
BOOL = np.dtype(np.bool_)
I4 = np.dtype(np.int32)


class Now:
    """The lanes of the blocks that run now, and which of them are active."""

    mask: Mask = None
    empty: Any = np.zeros(0, np.bool_)
    """The mask of no lane: always this object, so that code may ask `now.mask is now.empty`."""
    lanes = 0
    block: Any = None
    """`launch.Blocks`: indices, shared memory, the launch they belong to."""


now = Now()


def active() -> np.ndarray:
    """Numbers of the active lanes."""
    return np.arange(now.lanes) if now.mask is None else np.flatnonzero(now.mask)


def lane_array(value: Any) -> np.ndarray:
    """`value` with one element per lane."""
    return value if type(value) is np.ndarray else np.broadcast_to(np.asarray(value), (now.lanes,))


def truth(value: np.ndarray) -> np.ndarray:
    """A condition as bools."""
    return value if value.dtype is BOOL else value != 0


def union(a: Mask, b: Mask) -> Mask:
    """The lanes of either of two masks."""
    if a is None or b is now.empty:
        return a
    if b is None or a is now.empty:
        return b
    return a | b


def without(mask: Mask, gone: Mask) -> Mask:
    """The lanes of `mask` less those of `gone`, which may be None: no lane."""
    if gone is None:
        return mask
    left = ~gone if mask is None else mask & ~gone
    return left if left.any() else now.empty


class _Uniform:
    """An `if` whose condition is the same in all active lanes."""

    def __init__(self, yes: bool) -> None:
        self.yes = yes

    def other(self) -> bool:
        return not self.yes

    def join(self) -> None:
        pass

    skip = join


_TRUE, _FALSE = _Uniform(True), _Uniform(False)


class _Parted:
    """An `if` that some lanes take and others do not."""

    __slots__ = ("before", "end", "no", "took")
    yes = True

    def __init__(self, before: Mask, took: Mask, no: Mask) -> None:
        self.before, self.took, self.no = before, took, no
        now.mask = took

    def other(self) -> bool:
        """Go on with the lanes that have not taken it."""
        self.end = now.mask
        now.mask = self.no
        return True

    def join(self) -> None:
        """Go on with those that have reached the end of either branch."""
        now.mask = self.before if self.end is self.took and now.mask is self.no else union(self.end, now.mask)

    def skip(self) -> None:
        """`join` where there is no `else`."""
        now.mask = self.before if now.mask is self.took else union(now.mask, self.no)


def split(condition: Any) -> Any:
    """Part the active lanes by a condition: those where it is true go first."""
    if type(condition) is not np.ndarray:
        return _TRUE if condition else _FALSE
    condition, mask = truth(condition), now.mask
    took = condition if mask is None else condition & mask
    if not took.any():
        return _FALSE
    no = ~condition if mask is None else mask & ~condition
    return _Parted(mask, took, no) if no.any() else _TRUE


class Returns:
    """What the lanes of a call that have returned early give back."""

    __slots__ = ("gone", "value")

    def __init__(self, of_kernel: bool = False) -> None:
        self.gone: Mask = None
        self.value: Any = None
        if of_kernel:
            now.block.exits = self

    def give(self, value: Any) -> None:
        """The active lanes return `value`."""
        from nbcnn.gpu.lockstep.numbers import put

        self.value = value if self.gone is None else put(self.value, value)
        mask = np.ones(now.lanes, np.bool_) if now.mask is None else now.mask
        self.gone = mask if self.gone is None else self.gone | mask
        now.mask = now.empty

    def last(self, value: Any) -> Any:
        """All lanes that are left return `value`: what the call gives back."""
        if self.gone is None:
            return value
        from nbcnn.gpu.lockstep.numbers import put

        return put(self.value, value)


class Loop:
    """A loop that lanes may leave one by one. `returns` has those that leave the function in it, too."""

    __slots__ = ("before", "continued", "left", "returns")

    def __init__(self, returns: Returns | None = None) -> None:
        self.before, self.returns = now.mask, returns
        self.continued: Mask = None
        self.left = False

    def leave(self) -> None:
        """`break` of the active lanes."""
        self.left = True
        now.mask = now.empty

    def next(self) -> None:
        """`continue` of the active lanes."""
        mask = np.ones(now.lanes, np.bool_) if now.mask is None else now.mask
        self.continued = mask if self.continued is None else self.continued | mask
        now.mask = now.empty

    def again(self) -> bool:
        """At the end of an iteration: True if a lane is in the loop yet."""
        if self.continued is not None:
            now.mask = union(now.mask, self.continued)
            self.continued = None
        return now.mask is not now.empty

    def end(self) -> None:
        """Behind the loop: everybody who was before it, and has not returned."""
        now.mask = self.before if self.returns is None else without(self.before, self.returns.gone)

    def goes_on(self, condition: Any) -> bool:
        """The test of a `while`: the active lanes where it is true go on."""
        if now.mask is now.empty:
            return False
        if type(condition) is not np.ndarray:
            return bool(condition)
        stay = truth(condition) if now.mask is None else truth(condition) & now.mask
        count = int(np.count_nonzero(stay))
        if count == 0:
            return False
        if count != now.lanes and not (now.mask is not None and count == np.count_nonzero(now.mask)):
            now.mask = stay
        return True

    def each(self, values: Iterable[Any]) -> Iterator[Any]:
        """A `for` over values that are the same in all lanes."""
        for value in values:
            yield value
            if not self.again():
                break
        self.end()

    def over(self, *bounds: Any) -> Iterator[Any]:
        """A `for` over a range."""
        if not any(type(bound) is np.ndarray for bound in bounds):
            return self.each(range(*map(int, bounds)))
        return self._parting(*bounds)

    def _parting(self, *bounds: Any) -> Iterator[Any]:
        start, stop, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
        if type(step) is np.ndarray:
            up = bool((step[active()] > 0).all())
        else:
            up = step > 0
        i = start.copy() if type(start) is np.ndarray else np.full(now.lanes, start, I4)
        while self.goes_on(i < stop if up else i > stop):
            yield i
            if not self.again():
                break
            i = i + step
        self.end()


def over(*bounds: Any) -> Iterable[Any]:
    """A `for` over a range whose body no lane leaves before its end."""
    if not any(type(bound) is np.ndarray for bound in bounds):
        return range(*map(int, bounds))
    return Loop().over(*bounds)


def both(a: Any, later: Callable[[], Any]) -> Any:
    """`a and b`: b is looked at for the lanes where a is true."""
    if type(a) is not np.ndarray:
        return later() if a else a
    a, mask = truth(a), now.mask
    ask = a if mask is None else a & mask
    if not ask.any():
        return False
    now.mask = ask
    b = later()
    now.mask = mask
    return a & truth(b) if type(b) is np.ndarray else a if b else False


def either(a: Any, later: Callable[[], Any]) -> Any:
    """`a or b`: b is looked at for the lanes where a is false."""
    if type(a) is not np.ndarray:
        return a if a else later()
    a, mask = truth(a), now.mask
    ask = ~a if mask is None else mask & ~a
    if not ask.any():
        return True
    now.mask = ask
    b = later()
    now.mask = mask
    return a | truth(b) if type(b) is np.ndarray else True if b else a


def choose(condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """`a if condition else b`: each is looked at for the lanes that take it."""
    if type(condition) is not np.ndarray:
        return yes() if condition else no()
    from nbcnn.gpu.lockstep.numbers import where

    condition, mask = truth(condition), now.mask
    take = condition if mask is None else condition & mask
    if not take.any():
        return no()
    leave = ~condition if mask is None else mask & ~condition
    if not leave.any():
        return yes()
    now.mask = take
    a = yes()
    now.mask = leave
    b = no()
    now.mask = mask
    return where(condition, a, b)


def negated(value: Any) -> Any:
    """`not value`."""
    return ~truth(value) if type(value) is np.ndarray else not value
