"""A row of the table of modes: which implementations a mode and precision have for each op, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nbcnn.ops.kernel.call import Impl
from nbcnn.plan.bounds import STORE
from nbcnn.plan.op import Op

Ops = dict[Op, Impl]


@dataclass(frozen=True)
class Row:
    """One mode and precision: where it runs, and its implementations of every op.

    device  "host" or "gpu".
    layout  how images are stored between the layers.
    fallbacks  (name, ops) in the order in which a step looks for an implementation that supports it.
    by_cost  whether a step takes the cheapest implementation that supports it (`Impl.cost`), in place of the first.
    own     the names of the fallbacks that count as the mode itself: another runs a step where none of these can, and is reported. Empty: the
            mode's name.
    asked   the name of a fallback that was asked for: it runs what it supports, whatever it costs.

    Raises TypeError where an op is given by its name.
    """

    mode: str
    precision: str
    device: str
    layout: str
    fallbacks: tuple[tuple[str, Ops], ...]
    own: tuple[str, ...] = ()
    by_cost: bool = False
    asked: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "own", self.own or (self.mode,))
        for name, ops in self.fallbacks:
            for op in ops:
                if not isinstance(op, Op):
                    raise TypeError(f"fallback {name} of mode {self.mode}: {op!r} is not an op; write nbcnn.modes.named({op!r})")

    @property
    def store(self) -> str:
        """How activations are stored (`nbcnn.plan.storage`)."""
        return STORE[self.precision]

    @property
    def scales_loss(self) -> bool:
        """Whether gradients are those of the loss times a scale (`nbcnn.ops.update.loss_scale`): float16 would lose small ones."""
        return self.store == "float16"

    def chain(self, op: Op) -> Iterator[tuple[str, Impl]]:
        """The implementations of `op` in this row, first choice first, with the name of the fallback they come from."""
        return ((name, ops[op]) for name, ops in self.fallbacks if op in ops)

    @property
    def ops(self) -> list[Op]:
        """All ops in this row, by their names."""
        return sorted({op for _, ops in self.fallbacks for op in ops})
