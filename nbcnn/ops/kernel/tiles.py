"""This module has what tiles of products share: a tile without its split, and partial sums in scratch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

Tile = TypeVar("Tile", bound=Any)


def unsplit(tile: Tile) -> Tile:
    """`tile` without its split, which is a matter of the grid: what kernels are compiled for."""
    made: Tile = replace(tile, split=1)
    return made


def partial_bytes(split: int, count: int) -> int:
    """Bytes of `split` partial sums of `count` results in scratch; none where the sum is whole."""
    return 4 * split * count if split > 1 else 0
