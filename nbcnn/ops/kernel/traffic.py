"""The bytes that kernels ask memory for, computed on the host from shape and tile, as the line `moves` of a kernel's docstring says them.

The bytes of tensors that threads, or TMA for them, load from global memory and store to it are counted: the *logical* bytes. What
lies outside an image is not loaded and not counted; what is fetched ahead and never used is. Of the bytes read, `distinct` are
different ones; the others are read again, mostly out of a cache. No kernel stores a byte twice. So, whatever the caches do, a launch
that finds nothing in them reads between `distinct` and `read` bytes from memory. A docstring's `moves` says in words which of both it means.

Biases, scalars, StepState, the table of learning rates and tensor maps are not counted; they are thousands of times smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from nbcnn.plan.shapes import numel
from nbcnn.plan.storage import ITEMSIZE

if TYPE_CHECKING:
    from nbcnn.ops.kernel.call import Call


@dataclass(frozen=True)
class Traffic:
    """Bytes of one launch: asked for by loads, by stores, and how many of those loaded are different bytes."""

    read: int
    write: int
    distinct: int

    @property
    def logical(self) -> int:
        """Bytes that are asked for."""
        return self.read + self.write

    @property
    def least(self) -> int:
        """Bytes that the launch cannot do without: every different byte once."""
        return self.distinct + self.write

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.read + other.read, self.write + other.write, self.distinct + other.distinct)


def total(launches: Iterable[Traffic]) -> Traffic:
    """The sum over launches. Bytes that one launch writes and the next reads count in both."""
    return sum(launches, Traffic(0, 0, 0))


def once(read: int, write: int) -> Traffic:
    """A launch that reads every byte once."""
    return Traffic(read, write, read)


def size(call: Call, side: str, at: int) -> int:
    """Bytes of operand `at` of the call's `side`, "in" or "out"; float32 where the call does not say how it is stored."""
    shapes, dtypes = (call.in_shapes, call.in_dtypes) if side == "in" else (call.out_shapes, call.out_dtypes)
    return numel(shapes[at]) * ITEMSIZE[dtypes[at] if dtypes else "float32"]


def element(call: Call, side: str = "in", at: int = 0) -> int:
    """Bytes of one element of an operand."""
    dtypes = call.in_dtypes if side == "in" else call.out_dtypes
    return ITEMSIZE[dtypes[at] if dtypes else "float32"]


def outputs(call: Call) -> int:
    """Bytes of all outputs."""
    return sum(size(call, "out", at) for at in range(len(call.out_shapes)))


def streamed(call: Call) -> list[Traffic]:
    """One launch that reads every input and writes every output once."""
    return [once(sum(size(call, "in", at) for at in range(len(call.in_shapes))), outputs(call))]


def mapped(reads: int) -> Callable[[Call], list[Traffic]]:
    """The bytes of a map that reads its first `reads` inputs element by element, other ones as settings, and writes its first output."""
    return lambda call: [once(sum(size(call, "in", at) for at in range(reads)), size(call, "out", 0))]


@cache
def windows(count: int, taps: int, extent: int, stride: int = 1, first: int = 0, dilate: int = 1) -> tuple[int, int]:
    """Along one axis, `count` windows of `taps` positions, window i from stride·i − first on: (taps inside `extent`, different positions).

    dilate: positions that it does not divide count as outside, the others as (position / dilate).
    """
    positions = [stride * i - first + tap for i in range(count) for tap in range(taps)]
    inside = [at // dilate for at in positions if at % dilate == 0 and 0 <= at // dilate < extent]
    return len(inside), len(set(inside))


@cache
def met(count: int, taps: int, extent: int, stride: int = 1, first: int = 0, dilate: int = 1) -> tuple[int, int]:
    """Counts of the same windows: (windows with a tap inside, taps that are inside some window)."""
    inside = {(i, tap) for i in range(count) for tap in range(taps) if (at := stride * i - first + tap) % dilate == 0 and 0 <= at // dilate < extent}
    return len({i for i, _ in inside}), len({tap for _, tap in inside})


@cache
def clipped(extent: int, tile: int, parts: int = 1) -> int:
    """Rows that tiles read of `parts` matrices of `extent` rows, one behind the other: a last tile goes on into the next, not beyond the last."""
    whole = -(-extent // tile) * tile
    return sum(min(whole, (parts - part) * extent) for part in range(parts))
