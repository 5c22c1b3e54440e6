"""This module times every implementation that could run each step of networks' plans, and says what the choice among them costs: its regret.

The regret of a choice is how much longer the chosen implementation takes than the fastest. Steps are those of the training plans of `bench nets` and
of `engine_nets`, at their batch and at 33, in the rows of tensorcore and cudacore.
Operands, caches and clocks are those of the study of tiles: random values, several sets in turn. Every result is held against that of the choice.

    python -m nbcnn study engines --rows bf16,fp32 --seconds 280 --out engines.json        on a GPU
    python -m nbcnn.lab.studies.engines engines.json                                       anywhere: what today's choices cost by those times
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.check.one_op import pack_array
from nbcnn.gpu import compile_pool, driver
from nbcnn.gpu.language import SIMULATOR
from nbcnn.gpu.target import H200, Target
from nbcnn.lab.measure.nets import Network, examples
from nbcnn.lab.studies import tiles
from nbcnn.lab.studies.engine_nets import ALL, SMALL_BATCH
from nbcnn.modes import MODES, named
from nbcnn.nn.optim import SGD
from nbcnn.ops.kernel.call import Call, Impl, bare_call
from nbcnn.ops.kernel.row import Row
from nbcnn.plan.bounds import parity_bound
from nbcnn.plan.flops import conv_shape, fewest_flops, step_bytes
from nbcnn.plan.graph import Buf, Step
from nbcnn.plan.shapes import numel
from nbcnn.plan.storage import ITEMSIZE, decode, encode
from nbcnn.run.net import Net
from nbcnn.run.planning import Training
from nbcnn.run.resident import resident
from nbcnn.run.resolve import resolver
from nbcnn.run.rows import Choice

ROWS = {
    "bf16": MODES["tensorcore", "bf16"],
    "tf32": MODES["tensorcore", "tf32"],
    "fp32": MODES["tensorcore", "fp32"],
    "cudacore": MODES["cudacore", "fp32"],
}
"""The rows that choose among implementations, by the name that the study has for them."""
_TFLOPS = {"bf16": 400.0, "tf32": 200.0, "fp32": 100.0, "cudacore": 40.0}
_TBS, _LAUNCH_US = 2.5, 2.0
"""Rates by which the steps of the largest share of a network's time are found before anything is timed."""
_LEFT_OUT = (
    *("gather", "gather_labels", "gather_windows", "convert", "pack_weights"),
    "sgd",
    "adam",
    "advance",
    "ema",
    "accumulate",
    "all_reduce",
    "grad_norm",
    "noise",
    "mask_squares",
    "dropout",
)
"""Kinds of ops that have one implementation, and want operands of which random values are none."""
CHUNK = 40
"""Steps whose kernels are compiled together, beside the timing of those before."""


@dataclass(frozen=True)
class Way:
    """An implementation that can run a step, with a tile."""

    part: str
    impl: Impl
    tile: Any

    @property
    def named(self) -> dict[str, Any]:
        made: dict[str, Any] = {"part": self.part, "engine": self.impl.engine or self.part}
        if self.tile is not None:
            made |= {"tile": asdict(self.tile), "kind": type(self.tile).__name__}
        return made


@dataclass(frozen=True)
class Task:
    """A step of a row's plans: the ways to run it, today's choice first; how often each network has it, and its largest share of a network's time."""

    row: str
    step: Step
    ways: tuple[Way, ...]
    networks: Mapping[str, int]
    share: float

    @property
    def call(self) -> Call:
        return bare_call(self.step, ROWS[self.row].layout)

    @property
    def named(self) -> dict[str, Any]:
        """What a row of the study says of the step."""
        step = self.step
        operands = {side: [[list(buf.shape), buf.dtype] for buf in bufs] for side, bufs in (("ins", step.ins), ("outs", step.outs))}
        attrs = {name: value for name, value in step.attrs.items() if isinstance(value, (int, float, str, tuple, list))}
        counted = {"flops": fewest_flops(step), "bytes": step_bytes(step)}
        return {
            "row": self.row,
            "op": str(step.op),
            **operands,
            "attrs": attrs,
            **counted,
            "networks": dict(self.networks),
            "share": round(self.share, 5),
        }


def ways(row: str, step: Step, target: Target, most_tiles: int = 1) -> tuple[Way, ...]:
    """Today's choice, then every other implementation that can run a step; of each the chosen tile and further ones up to `most_tiles`."""
    how = resolver(ROWS[row], target)(step)
    call, made = bare_call(step, ROWS[row].layout), [Way(how.mode, _kept(how.impl), how.tile)]
    for part, impl in ROWS[row].chain(step.op):
        if not impl.lacks(target) and impl.supports(call, target) is None:
            tile = impl.tile(call, target)
            offered = [tile, *(other for other in impl.candidates(call, target) if other != tile)] if tile is not None else [None]
            made += [Way(part, _kept(impl), each) for each in offered[:most_tiles]]
    return tuple(
        {(id(way.impl.bind), way.tile): way for way in reversed(made)}[key] for key in dict.fromkeys((id(way.impl.bind), way.tile) for way in made)
    )


def _plan(network: Network, row: Row, batch: int, device: Any) -> Any:
    net = Net(network.layers(), network.shape, choice=Choice(row, "as asked"), device=device)
    images, targets = examples(net, batch)
    return Training(net, {"train": resident(images, targets, classes=net.takes_classes)}, SGD(), batch, steps=1).plan("train", batch)


def tasks(names: Sequence[str], rows: Sequence[str], device: Any, most_tiles: int = 1, batches: Sequence[int] = (0, SMALL_BATCH)) -> list[Task]:
    """The different steps of the training plans of networks; those with a choice first, by their largest share of a network's time.

    batches: 0 is the network's own.
    """
    found: dict[Any, Task] = {}
    for row in rows:
        for name in names:
            for batch in batches:
                label = f"{name}@{batch}" if batch else name
                steps = [item.step for item in _plan(ALL[name], ROWS[row], batch or ALL[name].batch, device).steps]
                times = [max(fewest_flops(step) / _TFLOPS[row] / 1e6, step_bytes(step) / _TBS / 1e6) + _LAUNCH_US for step in steps]
                for step, us in zip(steps, times, strict=True):
                    if step.op.kind in _LEFT_OUT:
                        continue
                    key = (
                        row,
                        step.op,
                        *((buf.shape, buf.dtype) for buf in (*step.ins, *step.outs)),
                        str(sorted(step.attrs.items(), key=lambda pair: pair[0])),
                    )
                    task = found.get(key) or Task(row, step, ways(row, step, device.target, most_tiles), {}, 0.0)
                    count = task.networks.get(label, 0) + 1
                    share = max(task.share, count * us / sum(times))
                    found[key] = replace(task, networks=dict(task.networks) | {label: count}, share=share)
    return sorted(found.values(), key=lambda task: (len(task.ways) < 2, -task.share))


# -- times


_FLOATS = ("float32", "bfloat16", "tfloat32")


class Pools:
    """Operands by how a row stores images: a `tiles.Pool` for each kind of values, large enough for every task; what is no float is zero."""

    def __init__(self, device: Any, found: Sequence[Task]) -> None:
        self.device, self.made = device, {}
        others = [numel(shape) * ITEMSIZE[dtype] for task in found for shape, dtype in _operands(task) if dtype not in _FLOATS]
        self.zeros = device.empty(max([1024, *others]), "uint8")
        device.upload(self.zeros, np.zeros(self.zeros.size, np.uint8))
        for precision in dict.fromkeys(ROWS[task.row].precision for task in found):
            sizes = [_sizes(task) for task in found if ROWS[task.row].precision == precision]
            read, written = max(read * tiles.sets_of(read) for read, _ in sizes), max(written for _, written in sizes)
            self.made[precision] = tiles.Pool(device, precision, read, written)

    def of(self, task: Task) -> tiles.Pool:
        return self.made[ROWS[task.row].precision]

    def launches(self, task: Task, way: Way, sets: int) -> list[Any]:
        """The launches of a way on `sets` sets of operands."""
        made: list[Any] = []
        for call in self.of(task).calls(_problem(task, way), way.tile, sets):
            if not made and call.packed is not None:
                self._pack(call, way)
            ins = list(call.ins)
            for at, (shape, dtype) in enumerate(zip(call.in_shapes, call.in_dtypes, strict=True)):
                if dtype not in _FLOATS:
                    ins[at] = self.device.view(self.zeros, 0, numel(shape), dtype)
            made += way.impl.bind(replace(call, ins=tuple(ins)))
        return made

    def _pack(self, call: Call, way: Way) -> None:
        """Pack the weights of the first set, whose results are compared; those of the others are random values, too."""
        assert way.impl.pack is not None
        weight = decode(self.device.download(call.ins[1]), call.in_dtypes[1]).reshape(call.in_shapes[1])
        self.device.upload(call.packed, encode(pack_array(weight, way.impl.pack(call)), way.impl.packed))


def _operands(task: Task) -> Iterator[tuple[Any, str]]:
    yield from zip(task.call.in_shapes, task.call.in_dtypes, strict=True)


def _problem(task: Task, way: Way) -> tiles.Problem:
    """A way to run a task, as a problem of the study of tiles."""
    row = ROWS[task.row]
    return tiles.Problem(task.step, way.part, way.impl, row.layout, row.precision, (way.tile,), task.networks)


def _kept(impl: Impl) -> Impl:
    """`impl`, of whose packed weights the index is made once: of a wide linear layer that takes a tenth of a second."""
    pack = impl.pack
    if pack is None:
        return impl
    known: dict[Any, np.ndarray] = {}

    def packed(call: Call) -> np.ndarray:
        key = (call.op, call.in_shapes, call.tile)
        if key not in known:
            known.clear()
            known[key] = pack(call)
        return known[key]

    return replace(impl, pack=packed)


def _sizes(task: Task) -> tuple[int, int]:
    """Bytes that a set of operands reads, and that outputs and scratch take, of the way that wants most."""
    each = [tiles.bytes_of(_problem(task, way)) for way in task.ways]
    return max(read for read, _ in each), max(written for _, written in each)


def measure(
    found: Sequence[Task], device: Any, seconds: float, say: Callable[[str], None], keep: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """A row for each task: `ways`, each with its microseconds or with why it has none, today's choice first. `keep` is handed each row.

    seconds: begin nothing new where so many have gone by. Kernels of the next CHUNK tasks are compiled by other processes meanwhile.
    """
    began = time.perf_counter()
    rows: list[dict[str, Any]] = []
    pools = Pools(device, found)

    def gone() -> float:
        return time.perf_counter() - began

    chunks = [found[start : start + CHUNK] for start in range(0, len(found), CHUNK)]
    coming = _Compiled(pools, chunks[0]) if chunks else None
    for number, chunk in enumerate(chunks):
        assert coming is not None
        compiled, failed = coming.wait()
        say(f"{gone():6.1f} s  {compiled} kernels compiled for steps {number * CHUNK + 1} to {number * CHUNK + len(chunk)} of {len(found)}{failed}")
        more = number + 1 < len(chunks) and gone() < seconds
        coming = _Compiled(pools, chunks[number + 1]) if more else None
        for task in chunk:
            if gone() > seconds:
                say(f"{gone():6.1f} s  {len(found) - len(rows)} of {len(found)} steps are left out")
                return rows
            row = task.named | {"ways": list(_timed(pools, task))}
            rows.append(row)
            keep(row)
            if len(task.ways) > 1:
                times = ", ".join(f"{way['engine']} {way.get('us', 0):.1f}" for way in row["ways"])
                say(f"{gone():6.1f} s  {label(row)}: {times} µs")
    return rows


class _Compiled:
    """What the tasks of a chunk launch, compiled by a thread of its own onto the disk: it loads nothing, so a graph may be captured meanwhile."""

    def __init__(self, pools: Pools, chunk: Sequence[Task]) -> None:
        self._launches: list[Any] = []
        self._count, self._error = 0, ""
        for task in chunk:
            for way in task.ways:
                try:
                    self._launches += pools.launches(task, way, 1)
                except Exception as error:  # the row of the way that cannot be bound will say so, too
                    self._error = f"; not every way can be bound: {' '.join(str(error).split())[:150]}"
        self._thread = threading.Thread(target=self._compile)
        self._thread.start()

    def _compile(self) -> None:
        try:
            self._count = len(compile_pool.compile_for(self._launches, driver.arch())) if not SIMULATOR else 0
        except Exception as error:  # the row of the kernel that does not compile will say so, too
            self._error = f"; not every kernel compiles: {' '.join(str(error).split())[:150]}"

    def wait(self) -> tuple[int, str]:
        self._thread.join()
        return self._count, self._error


def _timed(pools: Pools, task: Task) -> Iterator[dict[str, Any]]:
    pool, limit = pools.of(task), _limit(task)
    sets = tiles.sets_of(_sizes(task)[0])
    # Weights that an earlier task packed lie here: read as images or filters they are mostly zeros and numbers too small for float32.
    pool.fill(_sizes(task)[0])
    wanted: list[np.ndarray] | None = None
    for way in task.ways:
        row = way.named
        try:
            launches = pools.launches(task, way, sets)
            each, problem = len(launches) // sets, _problem(task, way)
            row["launches"] = each
            if way.impl.traffic is not None:
                row["traffic"] = [[made.read, made.write, made.distinct] for made in way.impl.traffic(replace(task.call, tile=way.tile))]
            tiles.poison(pool, problem)
            for launch in launches[:each]:
                launch.run(pool.device.stream)
            got = tiles.results_of(pool, problem)
            wanted = wanted if wanted is not None else got
            apart = max((_apart(a, b) for a, b in zip(got, wanted, strict=True)), default=0.0)
            if not apart <= limit:
                yield row | {"why": f"its results are {apart:.1e} apart from those of the choice, {limit:.1e} is allowed"}
                continue
            yield row | {"us": round(1e3 * tiles.milliseconds(pool.device, launches, sets), 3)}
        except Exception as error:  # whatever the compiler or the driver say, the other ways are still to be timed
            yield row | {"why": " ".join(f"{type(error).__name__}: {error}".split())[:200]}


def _limit(task: Task) -> float:
    """How far apart two results may be: each is within the bound of the truth."""
    shape, op = conv_shape(task.step), task.step.op
    path = op.direction if op.direction in ("dgrad", "wgrad") else "fprop"
    terms = shape.gemm(path)[2] if shape else max(numel(of) for of, _ in _operands(task))
    return 2 * parity_bound(terms, ROWS[task.row].precision)


def _apart(got: np.ndarray, want: np.ndarray) -> float:
    """How far apart two results are, by `tiles.apart`; where both are NaN, which random variances make, they are equal."""
    if got.dtype.kind == "f":
        known = np.isfinite(got) | np.isfinite(want)
        got, want = got[known], want[known]
    return tiles.apart(got, want) if got.size else 0.0


# -- regret


def fastest(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fastest way of a row of the study."""
    return min((way for way in row["ways"] if "us" in way), key=lambda way: way["us"], default={})


def regret(row: Mapping[str, Any]) -> float | None:
    """How much longer the choice takes than the fastest way, as a part of the latter; None where it has no time or there is one way."""
    timed = [way for way in row["ways"] if "us" in way]
    return row["ways"][0]["us"] / fastest(row)["us"] - 1 if len(timed) > 1 and "us" in row["ways"][0] else None


def step_of(row: Mapping[str, Any]) -> Step:
    """The step that a row is about."""
    bufs = {side: tuple(Buf(f"{side}{at}", tuple(shape), dtype) for at, (shape, dtype) in enumerate(row[side])) for side in ("ins", "outs")}
    attrs = {name: tuple(value) if isinstance(value, list) else value for name, value in row["attrs"].items()}
    return Step(named(row["op"]), bufs["ins"], bufs["outs"], attrs)


def judged(rows: Iterable[Mapping[str, Any]], target: Target = H200) -> list[dict[str, Any]]:
    """Rows of an earlier measurement with the way first that is chosen today; without a time if it was not timed then.

    Times are those of the step and of the packing of its weights, which is estimated: a plan does that before every run.
    """
    made = []
    for row in rows:
        step = step_of(row)
        found = ways(row["row"], step, target)
        call, chosen = bare_call(step, ROWS[row["row"]].layout), found[0].named
        packing = {(way.part, way.named["engine"]): way.impl.packing(call) for way in found}
        timed = [way | ({"us": way["us"] + packing.get((way["part"], way["engine"]), 0.0)} if "us" in way else {}) for way in row["ways"]]
        same = [way for way in timed if all(way.get(name) == chosen.get(name) for name in ("part", "engine", "tile", "kind"))]
        first = same[0] if same else chosen | {"why": "it was not timed"}
        made.append({**row, "ways": [first, *(way for way in timed if way is not first)]})
    return made


def label(row: Mapping[str, Any]) -> str:
    """A step in few words: row, op, source, result."""
    return f"{row['row']} {row['op']} {'×'.join(map(str, row['ins'][0][0]))} → {'×'.join(map(str, row['outs'][0][0]))}"


def lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The steps with the largest regrets, and by row of the table the mean and the largest regret, and what the choices cost of all time."""
    text = [f"{'µs':>8}{'best':>8}{'regret':>8}  step: choice → fastest"]
    for row in sorted(rows, key=lambda row: -(regret(row) or 0)):
        if (lost := regret(row)) and lost > 0.03:
            chosen, best = row["ways"][0], fastest(row)
            text.append(f"{chosen['us']:8.1f}{best['us']:8.1f}{100 * lost:7.1f}%  {label(row)}: {chosen['engine']} → {best['engine']}")
    for name in ROWS:
        of = [row for row in rows if row["row"] == name and regret(row) is not None]
        if of:
            regrets = [regret(row) or 0.0 for row in of]
            took, could = (sum(sum(row["networks"].values()) * way(row)["us"] for row in of) for way in (lambda row: row["ways"][0], fastest))
            text.append(
                f"{name}: {len(of)} steps with a choice, regret {100 * float(np.mean(regrets)):.1f} % mean, {100 * max(regrets):.1f} % at most;"
                f" over all steps {100 * (took / could - 1):.1f} % of the time"
            )
    return [*text, *(f"left out: {label(row)}: {way['engine']} {way['why']}" for row in rows for way in row["ways"] if "why" in way)]


def main() -> None:
    """Print what today's choices cost by the times in the files that are named."""
    print("\n".join(lines(judged([row for path in sys.argv[1:] for row in json.loads(Path(path).read_text())]))))


if __name__ == "__main__":
    main()
