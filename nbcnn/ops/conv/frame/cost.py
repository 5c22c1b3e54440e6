"""A model of the time that a launch of tiles takes, by which engines choose among them.

A multiprocessor that has `together` blocks takes the tiles of a launch in waves. A step of a tile keeps three things busy: the tensor cores, shared
memory (which TMA writes and wgmma reads, 128 bytes a cycle), and the way from L2, of which every multiprocessor has a share. The slowest of them is
what a step takes, or the latency of a step where few blocks leave them idle; as they disturb each other, the largest is taken softly, as a p-norm.
A tile begins and ends beside: first loads, epilogue. What one block does then, others on the multiprocessor cover in part. No launch is faster than
its compulsory bytes out of memory, and a second launch adds up the parts of a split sum.

Rates are cycles and bytes, fitted to measured times of every tile of the convolutions of `bench nets` (`nbcnn.lab.studies.tiles`).
docs/log/tensor-cores.md has the regrets.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """What a launch of tiles asks for.

    tiles       blocks' tiles in all; `together` blocks share a multiprocessor
    persistent  blocks stay for many tiles, and fetch for the next while they finish one
    steps       of a tile; of each step, the cycles of tensor cores at their full rate, the bytes through shared memory, the bytes out of L2
    ends        bytes that the epilogue of a tile moves
    memory      compulsory bytes of the launch
    parts       bytes of the parts that a second launch adds, 0 without one
    """

    tiles: int
    together: int
    persistent: bool
    steps: float
    tensor: float
    shared: float
    fetched: float
    ends: float
    memory: float
    parts: float = 0.0


@dataclass(frozen=True)
class Rates:
    """What a multiprocessor does in a cycle, and the cycles that things take however small they are.

    tensor      part of the full rate of tensor cores; shared, fetched: bytes a cycle of a multiprocessor
    latency     cycles of a step at least
    start       cycles of a tile besides its steps, where blocks persist `start_persistent`; ends: bytes of the epilogue a cycle
    covered     part of a tile's beginning and end that other blocks on the multiprocessor cover
    memory      bytes a cycle of the whole GPU; parts: of the second launch, which takes `second` cycles at least
    soft        p of the norm
    """

    tensor: float
    shared: float
    fetched: float
    latency: float
    start: float
    start_persistent: float
    ends: float
    covered: float
    memory: float
    parts: float
    second: float
    soft: float


def cycles(work: Work, rates: Rates, multiprocessors: int) -> float:
    """Estimated cycles of a launch, and of the second one if it has parts."""

    def wave(blocks: int) -> float:
        busy = (blocks * work.tensor / rates.tensor, blocks * work.shared / rates.shared, blocks * work.fetched / rates.fetched, rates.latency)
        step = sum(each**rates.soft for each in busy) ** (1 / rates.soft)
        ends = (rates.start_persistent if work.persistent else rates.start) + blocks * work.ends / rates.ends
        return work.steps * step + ends * (1 - rates.covered * (blocks - 1) / blocks)

    full, rest = divmod(work.tiles, multiprocessors * work.together)
    product = full * wave(work.together) + (wave(-(-rest // multiprocessors)) if rest else 0.0)
    memory = work.memory / rates.memory
    product = (product**rates.soft + memory**rates.soft) ** (1 / rates.soft)
    return product + (rates.second + work.parts / rates.parts if work.parts else 0.0)


RATES = {
    ("columns", "bf16"): Rates(0.8, 100, 40, 450, 4000, 4000, 60, 0.5, 2400, 1500, 4000, 4),
    ("patches", "bf16"): Rates(0.85, 110, 40, 300, 2500, 2500, 80, 0.5, 2400, 1500, 4000, 4),
    ("pixels", "bf16"): Rates(0.8, 100, 40, 450, 5000, 5000, 60, 0.5, 2400, 1500, 4000, 4),
    ("squares", "bf16"): Rates(0.85, 110, 40, 450, 5000, 5000, 60, 0.5, 2400, 1500, 4000, 4),
    ("columns", "tf32"): Rates(0.8, 100, 40, 450, 4000, 4000, 60, 0.5, 2400, 1500, 4000, 4),
    ("patches", "tf32"): Rates(0.85, 110, 40, 300, 2500, 2500, 80, 0.5, 2400, 1500, 4000, 4),
    ("pixels", "tf32"): Rates(0.8, 100, 40, 600, 5000, 5000, 60, 0.5, 2400, 1500, 4000, 4),
    ("columns", "fp32"): Rates(0.7, 100, 40, 600, 4000, 4000, 60, 0.5, 2400, 1500, 4000, 4),
    ("pixels", "fp32"): Rates(0.7, 100, 40, 850, 5000, 5000, 60, 0.5, 2400, 1500, 4000, 4),
}
"""By kernel and precision: the correlation by columns and by patches, the weight gradient by pixels and by squares. At 1.755 GHz."""
