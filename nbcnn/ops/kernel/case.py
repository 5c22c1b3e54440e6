"""The parts of a test of an op: `Case`, one call with its operands, and `Gradient`, which forward op a backward op belongs to.

Cases stand with the op: its module has `cases()`, shapes that are mean on purpose and small enough for the simulator (one image, one
channel, odd heights and widths, filters that are no multiple of a tile, stride 2, windows that overlap or leave gaps), and where real
shapes find what small ones do not, `real_cases()`. `cases.py` collects them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nbcnn.ops.kernel.call import Out
from nbcnn.plan.op import Op

Shapes = Sequence[tuple[int, ...]]

IMAGES: Shapes = ((1, 1, 5, 7), (2, 3, 4, 6), (1, 5, 7, 3), (2, 8, 6, 6))
"""Batches (N, C, H, W) for ops that take any: one channel, odd extents, channels in fours."""

SERIES: Shapes = ((1, 1, 1), (2, 3, 5), (3, 4, 130))
"""Batches (N, C, L) for ops that take any: one of everything, odd extents, series longer than a warp."""


@dataclass(frozen=True)
class Case:
    """One call of one op.

    ins    NumPy operands: float32 and integers.
    outs   what it writes: (shape, dtype), or the position of an operand updated in place.
    terms  the longest sum behind one result: rounding grows with its square root.
    """

    op: Op
    label: str
    ins: tuple[np.ndarray, ...]
    outs: tuple[Out, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    terms: int = 1


@dataclass(frozen=True)
class Gradient:
    """The forward op whose derivative a backward op computes: what `gradcheck` differentiates. Modules export them as `GRADIENTS`, by backward op.

    forward   the forward op.
    operands  (ins, outs, v) -> the backward's operands, from the forward's inputs, its float64 outputs and the cotangent v.
    of        the forward operands that are differentiated.
    beside    for every further output of the backward op (the gradient of a bias), the axis of the first of `of` that it has the extent of.
    loss      the forward's value is a scalar, and the backward op takes no cotangent.
    """

    forward: Op
    operands: Callable[[Sequence[np.ndarray], Sequence[np.ndarray], np.ndarray], tuple[np.ndarray, ...]]
    of: tuple[int, ...] = (0,)
    beside: tuple[int, ...] = ()
    loss: bool = False


def normal(seed: int, *shape: int) -> np.ndarray:
    """Standard normal float32 values, the same for the same seed and shape."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def label_of(shape: tuple[int, ...]) -> str:
    """1×5×7×3 of (1, 5, 7, 3)."""
    return "×".join(map(str, shape))
