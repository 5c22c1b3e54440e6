"""This module times every tile that could serve each convolution of `bench nets`, and says what the choice of a tile by its model costs: its regret.

The regret of a choice is how much longer the chosen tile takes than the fastest of all. Operands lie in random values, several sets of them in turn,
so that what a step would find in the second-level cache it finds here: little. A tile that wants operands in planes is timed with all launches that
split them, of which a plan shares about half. Every tile's results are held against those of the chosen one, at the beginning, in the middle and at
the end of each output, before it gets a time.

    python -m nbcnn bench nets --tiles --precision bf16 --json > tiles.json         on a GPU
    python -m nbcnn.lab.studies.tiles tiles.json                                    anywhere: what today's choices cost by those times

"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.gpu.compile_pool import compile_all
from nbcnn.gpu.device import elapsed_ms, event
from nbcnn.gpu.target import H200, Target
from nbcnn.lab.measure.nets import Network, training
from nbcnn.modes import MODES, named
from nbcnn.ops.kernel.call import Call, Impl, bare_call
from nbcnn.plan.arena import align
from nbcnn.plan.bounds import STORE, parity_bound
from nbcnn.plan.flops import conv_shape, fewest_flops
from nbcnn.plan.graph import Step
from nbcnn.plan.shapes import numel
from nbcnn.plan.storage import ITEMSIZE, decode, encode

ENGINES = ("wgmma", "mma")
"""The parts of a row whose tiles are of products."""
ALIGNMENT = 1024
CALLS_MS, REPLAYS = 1.0, 3
"""Milliseconds of the calls that are captured as one graph, and how often it is replayed; the shortest counts."""
EVICTED = 160 * 2**20
"""Bytes of all sets of operands together, three times the second-level cache of an H200."""
MOST_SETS = 6
CHUNK = 48
SAMPLE = 1 << 16
"""Elements of each of three parts of an output that are compared."""


@dataclass(frozen=True)
class Problem:
    """One convolution: its step, how it is implemented, the tiles that could serve it, the chosen one first, and how often each network has it."""

    step: Step
    part: str
    impl: Impl
    layout: str
    precision: str
    tiles: tuple[Any, ...]
    networks: Mapping[str, int]

    @property
    def call(self) -> Call:
        return bare_call(self.step, self.layout)

    @property
    def named(self) -> dict[str, Any]:
        """What a row says of the problem."""
        step = self.step
        shapes = {"ins": [list(buf.shape) for buf in step.ins], "outs": [list(buf.shape) for buf in step.outs]}
        geometry = {name: value for name, value in step.attrs.items() if name in ("stride", "pad")}
        return {"op": str(step.op), "part": self.part, "precision": self.precision, **shapes, **geometry, "networks": dict(self.networks)}


def problems(networks: Sequence[Network], precision: str, device: Any) -> list[Problem]:
    """The different convolutions of the training steps of `networks` that have a choice of tiles, those of the most work first."""
    found: dict[Any, Problem] = {}
    for network in networks:
        work = training(network, precision, device)
        for item in work.plan("train", network.batch).steps:
            step, how = item.step, item.how
            if how.mode not in ENGINES or how.tile is None or conv_shape(step) is None:
                continue
            key = (how.mode, step.op, tuple(buf.shape for buf in (*step.ins, *step.outs)), tuple(sorted(step.attrs.items())))
            if key not in found:
                call = bare_call(step, work.net.row.layout)
                tiles = dict.fromkeys((how.tile, *how.impl.candidates(call, device.target)))
                found[key] = Problem(step, how.mode, how.impl, work.net.row.layout, precision, tuple(tiles), {})
            known = dict(found[key].networks)
            found[key] = replace(found[key], networks=known | {network.name: known.get(network.name, 0) + 1})
    chosen = [problem for problem in found.values() if len(problem.tiles) > 1]
    return sorted(chosen, key=lambda problem: -fewest_flops(problem.step) * sum(problem.networks.values()))


# -- operands


class Pool:
    """Memory that all problems share: one part of random values to read, one to write."""

    def __init__(self, device: Any, precision: str, read: int, written: int) -> None:
        self.device = device
        self.source, self.target = device.empty(read, "uint8"), device.empty(written, "uint8")
        values = np.random.default_rng(0).standard_normal(1 << 22).astype(np.float32)
        self.noise = encode(values, STORE[precision]).view(np.uint8)
        self.fill(read)

    def fill(self, read: int) -> None:
        """Random values in the first `read` bytes of what problems read, where packed weights of an earlier problem may lie."""
        for at in range(0, read, self.noise.size):
            self.device.upload(self.source[at : min(read, at + self.noise.size)], self.noise[: min(self.noise.size, read - at)])

    def calls(self, problem: Problem, tile: Any, sets: int) -> list[Call]:
        """The problem with a tile, bound to `sets` sets of operands, which share outputs and scratch."""
        bare = replace(problem.call, tile=tile)
        packed = 0 if problem.impl.pack is None else problem.impl.pack(bare).shape[-1]
        scratch = -(-problem.impl.scratch(bare) // 8) * 8
        made, at = [], 0
        for _ in range(sets):
            ins = []
            for shape, dtype in zip(bare.in_shapes, bare.in_dtypes, strict=True):
                ins.append(self.device.view(self.source, at, numel(shape), dtype))
                at = _aligned(at + numel(shape) * ITEMSIZE[dtype])
            weights = self.device.view(self.source, at, packed, problem.impl.packed) if packed else None
            at = _aligned(at + packed * 4)
            to, outs = 0, []
            for shape, dtype in zip(bare.out_shapes, bare.out_dtypes, strict=True):
                outs.append(self.device.view(self.target, to, numel(shape), dtype))
                to = _aligned(to + numel(shape) * ITEMSIZE[dtype])
            room = self.target[to : to + scratch] if scratch else None
            made.append(replace(bare, ins=tuple(ins), outs=tuple(outs), packed=weights, scratch=room))
        return made


def _aligned(at: int) -> int:
    return align(at, ALIGNMENT)


def bytes_of(problem: Problem) -> tuple[int, int]:
    """Bytes that a set of operands reads, and that outputs and the largest scratch take."""
    bare = problem.call
    read = sum(_aligned(numel(shape) * ITEMSIZE[dtype]) for shape, dtype in zip(bare.in_shapes, bare.in_dtypes, strict=True))
    if problem.impl.pack is not None:
        read += _aligned(4 * int(problem.impl.pack(replace(bare, tile=problem.tiles[0])).shape[-1]))
    written = sum(_aligned(numel(shape) * ITEMSIZE[dtype]) for shape, dtype in zip(bare.out_shapes, bare.out_dtypes, strict=True))
    return read, written + max(_aligned(problem.impl.scratch(replace(bare, tile=tile))) for tile in problem.tiles)


def sets_of(read: int) -> int:
    """How many sets of operands of so many bytes are taken in turn."""
    return max(1, min(MOST_SETS, EVICTED // max(1, read)))


# -- times


def measure(
    found: Sequence[Problem], device: Any, seconds: float | None = None, say: Callable[[str], None] | None = None
) -> Iterator[dict[str, Any]]:
    """A row for each problem: `tiles`, each with its microseconds, or with why it has none; the chosen one first.

    seconds: begin nothing new where so many have gone by. Kernels are compiled for CHUNK problems at a time.
    """
    began = time.perf_counter()
    sizes = [bytes_of(problem) for problem in found]
    read, written = max(read * sets_of(read) for read, _ in sizes), max(written for _, written in sizes)
    pool = Pool(device, found[0].precision, read, written)

    def tell(text: str) -> None:
        if say:
            say(f"{time.perf_counter() - began:6.1f} s  {text}")

    for start in range(0, len(found), CHUNK):
        if seconds is not None and time.perf_counter() - began > seconds:
            tell(f"{len(found) - start} of {len(found)} convolutions are left out")
            return
        some = found[start : start + CHUNK]
        try:
            made = compile_all(launch for problem in some for tile in problem.tiles for launch in _launches(pool, problem, tile, 1) or ())
            tell(f"{made} kernels compiled for {len(some)} convolutions")
        except Exception as error:  # the row of the tile that does not compile will say so, too
            tell(f"not every kernel compiles: {' '.join(str(error).split())[:200]}")
        for problem, (each, _) in zip(some, sizes[start : start + CHUNK], strict=True):
            row = problem.named | {"tiles": list(_timed(pool, problem, sets_of(each)))}
            tell(f"{label(row)}: {row['tiles'][0].get('us', 0):.1f} µs, best {fastest(row).get('us', 0):.1f}")
            yield row


def _launches(pool: Pool, problem: Problem, tile: Any, sets: int) -> list[Any] | None:
    """The launches of a problem with a tile, None where they cannot be made."""
    try:
        return [launch for call in pool.calls(problem, tile, sets) for launch in problem.impl.bind(call)]
    except (ValueError, RuntimeError):
        return None


def _timed(pool: Pool, problem: Problem, sets: int) -> Iterator[dict[str, Any]]:
    shape, step = conv_shape(problem.step), problem.step
    path = step.op.direction if step.op.direction in ("dgrad", "wgrad") else "fprop"
    limit = 2 * parity_bound(shape.gemm(path)[2] if shape else 1, problem.precision)  # two results, each within the bound of the truth
    wanted: list[np.ndarray] | None = None
    for tile in problem.tiles:
        row = {"tile": asdict(tile), "kind": type(tile).__name__}
        launches = _launches(pool, problem, tile, sets)
        if launches is None:
            yield row | {"why": "it cannot be bound"}
            continue
        each = len(launches) // sets
        try:
            poison(pool, problem)
            for launch in launches[:each]:
                launch.run(pool.device.stream)
            got = results_of(pool, problem)
            if wanted is None:
                wanted = got
            most = max(apart(a, b) for a, b in zip(got, wanted, strict=True))
            if not most <= limit:
                yield row | {"why": f"its results are {most:.1e} apart from those of the chosen tile, {limit:.1e} is allowed"}
                continue
            yield row | {"us": round(1e3 * milliseconds(pool.device, launches, sets), 3)}
        except Exception as error:  # whatever the compiler or the driver say, the other tiles are still to be timed
            yield row | {"why": " ".join(f"{type(error).__name__}: {error}".split())[:200]}


def milliseconds(device: Any, launches: list[Any], sets: int) -> float:
    """The time of a call in a captured graph of all sets: the shortest of a few replays."""

    def spent(replay: Callable[[], None]) -> float:
        before, behind = event(), event()
        before.record(device.stream)
        replay()
        behind.record(device.stream)
        device.synchronize()
        return float(elapsed_ms(before, behind))

    replay = device.replayable(launches)
    replay()
    calls = max(1, min(20, int(CALLS_MS / max(spent(replay), 1e-3))))
    many = device.replayable(launches * calls) if calls > 1 else replay
    many()
    return min(spent(many) for _ in range(REPLAYS)) / (calls * sets)


def _samples(pool: Pool, problem: Problem) -> Iterator[tuple[Any, str]]:
    """Three parts of every output, and how it is stored."""
    (call,) = pool.calls(problem, problem.tiles[0], 1)
    for array, dtype in zip(call.outs, call.out_dtypes, strict=True):
        for start in sorted({0, max(0, (array.size - SAMPLE) // 2), max(0, array.size - SAMPLE)}):
            yield array[start : min(array.size, start + SAMPLE)], dtype


def poison(pool: Pool, problem: Problem) -> None:
    """Fill what is compared of the outputs with ones in every bit."""
    for part, _ in _samples(pool, problem):
        pool.device.upload(part, np.full(part.size * part.dtype.itemsize, 0xFF, np.uint8).view(part.dtype))


def results_of(pool: Pool, problem: Problem) -> list[np.ndarray]:
    """What is compared of the outputs, as float32 or integers."""
    pool.device.synchronize()
    return [decode(pool.device.download(part), dtype) for part, dtype in _samples(pool, problem)]


def apart(got: np.ndarray, want: np.ndarray) -> float:
    """The relative distance of two results; of integers 1.0 where more than a few differ, else 0.0."""
    if got.dtype.kind in "iu":
        # An argmax may differ: two sums of normal values come as close as float32 rounds less than once in a thousand windows.
        return float(np.mean(got != want) > 4e-3)
    difference = np.linalg.norm(got.astype(np.float64) - want)
    return float(difference / (np.linalg.norm(want.astype(np.float64)) or 1.0))


# -- regret


def fastest(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fastest tile of a row."""
    timed = [tile for tile in row["tiles"] if "us" in tile]
    return min(timed, key=lambda tile: tile["us"]) if timed else {}


def regret(row: Mapping[str, Any]) -> float | None:
    """How much longer the chosen tile takes than the fastest, as a part of the latter; None where the chosen one has no time."""
    chosen = row["tiles"][0]
    return chosen["us"] / fastest(row)["us"] - 1 if "us" in chosen else None


_OF_STATISTICS = {"eps": 1e-5, "momentum": 0.1}
"""What some convolutions have besides their geometry; no tile depends on it."""


def judged(rows: Sequence[Mapping[str, Any]], target: Target = H200) -> list[dict[str, Any]]:
    """Rows of an earlier measurement with the tile first that is chosen today; a row whose tile was not timed then has no regret."""
    made = []
    for row in rows:
        attrs = {name: row[name] for name in ("stride", "pad") if name in row} | _OF_STATISTICS
        ins, outs, store = tuple(map(tuple, row["ins"])), tuple(map(tuple, row["outs"])), STORE[row["precision"]]
        stored: dict[str, Any] = {"in_dtypes": (store,) * len(ins), "out_dtypes": (store,) * len(outs)}
        op = named(row["op"])
        call = Call(op, (), (), ins, outs, attrs, "NHWC", **stored)
        impl = next(impl for part, impl in MODES["tensorcore", row["precision"]].chain(op) if part == row["part"])
        tile = impl.tile(call, target)
        said = {"tile": asdict(tile), "kind": type(tile).__name__}
        found = next((known for known in row["tiles"] if {name: known[name] for name in said} == said), said | {"why": "it was not timed"})
        made.append({**row, "tiles": [found, *(known for known in row["tiles"] if known is not found)]})
    return made


def label(row: Mapping[str, Any]) -> str:
    """A problem in few words: op, source, filter."""
    return f"{row['op']} {'×'.join(map(str, row['ins'][0]))} → {'×'.join(map(str, row['outs'][0]))}"


def lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The problems with the largest regrets, and by precision the mean and the largest regret, and what the choices cost of all time."""
    text = [f"{'µs':>8}{'best':>8}{'regret':>8}  convolution, chosen tile → fastest"]
    for row in sorted(rows, key=lambda row: -(regret(row) or 0)):
        lost, best = regret(row), fastest(row)
        if lost is None or lost > 0.02:
            chosen = row["tiles"][0]
            said = "no time" if lost is None else f"{chosen['us']:8.1f}{best['us']:8.1f}{100 * lost:7.1f}%"
            text.append(f"{said}  {row['precision']} {row['part']} {label(row)}: {_short(chosen)} → {_short(best)}")
    for precision in dict.fromkeys(row["precision"] for row in rows):
        of = [row for row in rows if row["precision"] == precision and regret(row) is not None]
        if not of:
            continue
        counts = [sum(row["networks"].values()) for row in of]
        took = sum(count * row["tiles"][0]["us"] for count, row in zip(counts, of, strict=True))
        could = sum(count * fastest(row)["us"] for count, row in zip(counts, of, strict=True))
        regrets = [regret(row) or 0.0 for row in of]
        text.append(
            f"{precision}: {len(of)} convolutions, {sum(len(row['tiles']) for row in of)} tiles; regret {100 * float(np.mean(regrets)):.1f} % mean,"
            f" {100 * max(regrets):.1f} % at most; over all steps {100 * (took / could - 1):.1f} % of the time"
        )
    wrong = [f"{label(row)}: {_short(tile)} {tile['why']}" for row in rows for tile in row["tiles"] if "why" in tile]
    return [*text, *(f"left out: {each}" for each in wrong)]


def _short(tile: Mapping[str, Any]) -> str:
    return f"{tile['kind']}({','.join(str(value) for value in tile['tile'].values())})" if tile else "none"


def main() -> None:
    """Print what today's choices of tiles cost by the times in the files that are named."""
    rows = [row for path in sys.argv[1:] for row in json.loads(Path(path).read_text())]
    print("\n".join(lines(judged(rows))))


if __name__ == "__main__":
    main()
