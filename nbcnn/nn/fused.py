"""This module is what fused layers share: the plain layers inside, the first of which gives name and parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nbcnn.nn.layer import Param
from nbcnn.plan.graph import Named
from nbcnn.plan.op import Op


@dataclass(frozen=True)
class Fused:
    """`parts`: the plain layers with their names, in order; the first of them has the parameters. `ops`: what a row must have for it."""

    parts: tuple[Named, ...]
    ops: ClassVar[tuple[Op, ...]]

    @property
    def scope(self) -> str:
        """The name of the first part, which is the prefix of the parameters' names."""
        return self.parts[0][0]

    def params(self) -> dict[str, Param]:
        return self.parts[0][1].params()
