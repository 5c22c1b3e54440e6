"""This module says what an op is: a value, which `str` prints as one name. Nothing else reads that name but people and files.

    >>> str(Op("conv", "fprop", after=(Map("relu"), Pool())))
    'conv_relu_pool_fprop'
    >>> str(Op("conv", "dgrad", after=(Sums((Mask("relu6"),)),)))
    'conv_dgrad_batchnorm_relu6_sums'

A name that comes in from outside is looked up among the ops of the table of modes (`nbcnn.modes.named`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Map:
    """An activation of results, by its name."""

    name: str


@dataclass(frozen=True)
class Mask:
    """The gradient of an activation, by its name: a gradient is multiplied by it."""

    name: str


@dataclass(frozen=True)
class Add:
    """A residual added to results, or a second gradient to a gradient."""


@dataclass(frozen=True)
class Keep:
    """The gradient as it is at this point is a result, too: that of the other summand of a residual sum."""


@dataclass(frozen=True)
class Bias:
    """A bias for each channel is added to an operand."""


@dataclass(frozen=True)
class Pool:
    """The maximum of each 2×2 results, and which of the four it is."""


@dataclass(frozen=True)
class Unpool:
    """A gradient of maxima goes to the places where they were found."""


@dataclass(frozen=True)
class Moments:
    """Mean and variance of each channel of results, for the batch norm behind them."""


@dataclass(frozen=True)
class Sums:
    """The two sums of each channel that the gradient of a batch norm wants, of results that pass `of` first."""

    of: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Partials:
    """The "moments" or "sums" of each chunk of pixels alone, which another launch adds up. No op of the table: chunks are the tile's business."""

    of: str


@dataclass(frozen=True)
class Norm:
    """A norm of results, by its kind."""

    kind: str


@dataclass(frozen=True)
class Loss:
    """A loss of results and its gradient, by its kind."""

    kind: str


STATISTICS = ("eps", "momentum", "ranks")
"""What the statistics of a batch norm are made with; its other attributes are the parameters of the map behind it."""
MAPS: set[str] = set()
"""Kinds of ops that make each element of the same element of their operand: the table of activations enters its names."""

Part: TypeAlias = Map | Mask | Add | Keep | Bias | Pool | Unpool | Moments | Sums | Partials | Norm | Loss


@dataclass(frozen=True)
class Op:
    """What a step computes. It does not equal its name: `nbcnn.modes.named` finds the op that a file means.

    kind       what is computed with its gradients: conv, batchnorm, relu, add, …
    direction  which pass of it: fprop, dgrad, wgrad, grads (all gradients), infer (in evaluation), …; empty where there is one alone.
    before     what is done to the first operand on its way in, in order.
    after      what is done to the results on their way out, in order.
    """

    kind: str
    direction: str = ""
    before: tuple[Part, ...] = ()
    after: tuple[Part, ...] = ()

    @cached_property
    def _name(self) -> str:
        return _printed(self.kind, self.direction, self.before, self.after)

    def __str__(self) -> str:
        return self._name

    def __lt__(self, other: Op) -> bool:
        return self._name < other._name

    def __hash__(self) -> int:
        return hash(self._name)

    @property
    def plain(self) -> Op:
        """The op without what is done before and after."""
        return Op(self.kind, self.direction)

    def has(self, kind: type) -> bool:
        """Whether a part of this kind stands before or after."""
        return any(isinstance(part, kind) for part in (*self.before, *self.after))

    @property
    def map(self) -> str:
        """The activation of its results, "" without one."""
        return next((part.name for part in self.after if isinstance(part, Map)), "")

    @property
    def mask(self) -> str:
        """The activation by whose gradient its results are multiplied, "" without one."""
        return next((part.name for part in self.after if isinstance(part, Mask)), "")


def split_attrs(attrs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The attributes of a batch norm that its statistics are made with, and the parameters of the map behind it."""
    return tuple({name: value for name, value in attrs.items() if (name in STATISTICS) == made} for made in (True, False))  # type: ignore[return-value]


def undone(after: tuple[Part, ...]) -> tuple[Part, ...]:
    """What a gradient passes first on its way back through an op whose results pass `after`: the masks of activations; a sum gives it to both."""
    return tuple(Mask(part.name) if isinstance(part, Map) else Keep() for part in reversed(after))


_WORDS: dict[type, str] = {Add: "add", Keep: "add", Bias: "bias", Pool: "pool", Unpool: "pool", Moments: "statistics"}


def _word(part: Part) -> str:
    """The word of a part in the name of an op."""
    if isinstance(part, Map | Mask):
        return part.name
    if isinstance(part, Norm | Loss):
        return part.kind
    if isinstance(part, Partials):
        return part.of
    if isinstance(part, Sums):
        return "_".join(("batchnorm", *map(_word, reversed(part.of)), "sums"))
    return _WORDS[type(part)]


def _printed(kind: str, direction: str, before: tuple[Part, ...], after: tuple[Part, ...]) -> str:
    """The name of an op. What a gradient passes before it goes backward through `kind` stands behind that, as it did in the forward pass; what is
    done to the gradient of an input stands behind the direction.
    """
    back = direction == "dgrad"
    inner = [*map(_word, reversed(before)), *(() if back else map(_word, after))]
    masked = ["dgrad"] if not direction and any(isinstance(part, Mask) for part in after) else []
    return "_".join((kind, *inner, *([direction] if direction else masked), *(map(_word, after) if back else ())))
