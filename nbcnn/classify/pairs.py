"""This module solves all pairs of classes: ranks share them, and each rank shares its part among its processes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import closing

import numpy as np

from nbcnn.classify import ovo, workers
from nbcnn.classify.blocks import Blocks
from nbcnn.ranks.team import LONG, Team

# Below this many samples the pairs are solved sooner than worker processes start.
_ALONE = 4000


def default_jobs(sizes: tuple[int, ...], pairs: int, team: Team) -> int:
    """Processes for one rank's part of `pairs`: what its part of the machine's cores and memory allow."""
    if sum(sizes) <= _ALONE:
        return 1
    largest = sum(sorted(sizes)[-2:])
    return min(max(1, workers.affordable(ovo.worker_bytes(largest)) // team.beside), len(team.mine(pairs)) or 1)


def solve(blocks: Blocks, C: float, pairs: Sequence[tuple[int, int]], jobs: int, team: Team, done: Callable[[int], object]) -> list[ovo.PairMachine]:
    """The machines of `pairs`, in their order, on rank 0; elsewhere an empty list. `done` is called for each that this rank has solved."""
    # The longest first, so that no process starts on one when the others are finished.
    order = sorted(range(len(pairs)), key=lambda at: -sum(blocks.sizes[c] for c in pairs[at]))
    mine = [order[place] for place in team.mine(len(pairs))]
    found: dict[int, ovo.PairMachine] = {}
    with closing(workers.parallel(ovo.solve_pair, (blocks, C), [pairs[at] for at in mine], jobs)) as solved:
        for position, machine in solved:
            found[mine[position]] = machine
            done(1)
    if team.size > 1:
        for part in team.gather(_packed(found), LONG):
            found |= _unpacked(part)
    return [found[at] for at in range(len(pairs))] if team.leads else []


def _packed(machines: dict[int, ovo.PairMachine]) -> bytes:
    buffer = io.BytesIO()
    arrays: dict[str, np.ndarray] = {}
    for at, machine in machines.items():
        arrays[f"{at}.support"], arrays[f"{at}.dual"] = machine.support, machine.dual
        arrays[f"{at}.rest"] = np.array([machine.intercept, machine.iterations])
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def _unpacked(content: bytes) -> dict[int, ovo.PairMachine]:
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        numbers = sorted({int(name.split(".")[0]) for name in arrays.files})
        made = {}
        for at in numbers:
            intercept, iterations = arrays[f"{at}.rest"].tolist()
            made[at] = ovo.PairMachine(arrays[f"{at}.support"], arrays[f"{at}.dual"], intercept, int(iterations))
        return made
