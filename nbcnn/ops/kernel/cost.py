"""A model of the time of a call, by which a row chooses among implementations that can run it. Every implementation has a cost.

A call takes its products and its bytes, of which the longer one counts most (a p-norm, as they disturb each other), and a little for each launch.
The products' time is the engine's own model of tiles in waves. Bytes are those that its launches are counted to move (`Impl.traffic`). Memory moves
the different ones and caches all of them, at the same time: the slower of the two counts. Where there is no model of products the bytes are all that
counts (`stream`): so it is for everything that reads and writes its operands once. What another implementation's launches stand between, adds its own
launches to their cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbcnn.ops.kernel.traffic import Traffic

if TYPE_CHECKING:
    from nbcnn.gpu.target import Target
    from nbcnn.ops.kernel.call import Call

CYCLES_A_MICROSECOND = 1755.0
"""The clock at which the models of products count cycles, that of an H200 under load."""


@dataclass(frozen=True)
class Speed:
    """How fast an engine is, measured on an H100 (`study engines`).

    launch   microseconds of each launch, however little it does
    scale    how many times the time of its model the products take
    soft     p of the norm of products and bytes: 1 where one follows the other, 4 where they overlap
    """

    launch: float
    scale: float
    soft: float


MEMORY, CACHE = 2.8e6, 8e6
"""Bytes a microsecond of the whole GPU: different ones out of memory, all of them through caches."""

SPEEDS = {
    "im2col": Speed(2.1, 0.850, 2),
    "pointwise": Speed(2.1, 0.880, 2),
    "winograd": Speed(0.91, 1.08, 2),
    "winograd with norm": Speed(0.91, 1.08, 2),
    "nine products": Speed(0.91, 1.08, 2),
}
"""By engine: those on CUDA cores, whose model of tiles was fitted on an H200. mma and wgmma have rates of their own for this (BESIDE).

Fitted to 390 times on an H100, so that ratios within a step count more than times (tests/lab/engines_h100.json).
"""

STREAM = Speed(2.0, 1.0, 1)
"""Launches that move bytes: a batch norm's gradients of 25 MB by one launch take 14.8 µs, by three of 44 MB 28.7 (H100)."""


def moved(launches: Iterable[Traffic]) -> float:
    """Microseconds in which launches move their bytes."""
    return sum(max(each.least / MEMORY, each.logical / CACHE) for each in launches)


def microseconds(products: float, launches: Sequence[Traffic], speed: Speed) -> float:
    """Estimated time of launches that move so many bytes, and whose products alone take so long by the model of their engine."""
    took = float((speed.scale * products) ** speed.soft + moved(launches) ** speed.soft) ** (1 / speed.soft)
    return speed.launch * len(launches) + took


def stream(launches: Sequence[Traffic]) -> float:
    """Estimated time of launches that do little more than to move bytes."""
    return microseconds(0.0, launches, STREAM)


def estimate(engine: str, products: Callable[[Call, Target], float], traffic: Callable[[Call], Sequence[Traffic]]) -> Callable[[Call, Target], float]:
    """The `Impl.estimate` of an engine whose products alone take the microseconds that `products` says."""
    return lambda call, target: microseconds(products(call, target), traffic(call), SPEEDS[engine])
