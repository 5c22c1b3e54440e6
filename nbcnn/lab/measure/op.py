"""This module verifies one op in any mode, engine or tile, makes it ready to be timed, and times several of them in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from nbcnn.check import gradcheck
from nbcnn.check.one_op import Bound, Unsupported
from nbcnn.files import numerals
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import nearest
from nbcnn.gpu.device import Gpu, Host
from nbcnn.gpu.target import Target
from nbcnn.lab.measure.caches import Calls, Flush, sets_for
from nbcnn.lab.measure.opcases import Problem
from nbcnn.lab.measure.sampling import Samples, median_interval, ratio_interval, sample
from nbcnn.lab.measure.steady import Warm, Work, warm_up
from nbcnn.lab.measure.timing import Timing, summarise
from nbcnn.modes import DWCONV, Row
from nbcnn.ops.kernel.call import Impl, bare_call
from nbcnn.plan.flops import fewest_flops, step_bytes, step_flops
from nbcnn.plan.graph import Buf, Step
from nbcnn.plan.lowering import stored_as
from nbcnn.plan.op import Loss, Op
from nbcnn.run.peaks import peaks_of
from nbcnn.run.resolve import offered
from nbcnn.run.rows import choose_mode


class NotTimed(RuntimeError):
    """The implementation fails parity: a wrong result has no time."""


@dataclass(frozen=True)
class Choice:
    """What runs an op: "MODE[:PRECISION[:ENGINE]][/PART][@TILE]", e.g. im2col, tensorcore:tf32, tensorcore:bf16/mma, im2col@128,128,16,8,8,2.

    part  an engine or a part of the mode's row; None: what a plan would choose. For a depthwise convolution of
          series also a variant of it, as --dwconv takes it: naive/warp.
    tile  the fields of its tile in order; None: its own choice.
    """

    mode: str
    precision: str | None = None
    engine: str = "auto"
    part: str | None = None
    tile: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, text: str) -> Choice:
        """Raises UsageError for text that is no choice."""
        rest, _, tile = text.partition("@")
        rest, _, part = rest.partition("/")
        mode, precision, engine = (*rest.split(":"), "", "")[:3]
        try:
            numbers = tuple(map(numerals.whole, tile.split(","))) if tile else None
        except ValueError:
            raise UsageError(f"the tile of {quoted(text)} is not numbers with commas between them") from None
        return cls(mode, precision or None, engine or "auto", part or None, numbers)

    @property
    def label(self) -> str:
        """The choice as text, which `parse` reads."""
        words = [self.mode, *([self.precision] if self.precision else []), *([self.engine] if self.engine != "auto" else [])]
        return ":".join(words) + (f"/{self.part}" if self.part else "") + (f"@{','.join(map(str, self.tile))}" if self.tile else "")


@dataclass(frozen=True)
class Prepared:
    """An op bound to operands and verified: `bounds[i]` is the op on the i-th set of operands; error and limit of its parity."""

    label: str
    op: Op
    row: Row
    part: str
    device: Any
    bounds: tuple[Bound, ...]
    error: float
    limit: float

    @property
    def step(self) -> Step:
        """The op as a step of a plan: what flops and bytes are counted of."""
        call = self.bounds[0].call

        def bufs(shapes: Sequence[Any], dtypes: Sequence[str]) -> tuple[Buf, ...]:
            return tuple(Buf("", shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True))

        return Step(self.op, bufs(call.in_shapes, call.in_dtypes), bufs(call.out_shapes, call.out_dtypes), call.attrs)

    @property
    def floor_ms(self) -> float | None:
        """Milliseconds below which it cannot run, by the datasheet: flops at their peak, compulsory bytes at the bandwidth."""
        peaks = peaks_of(self.device, self.row)
        if peaks is None:
            return None
        return max(fewest_flops(self.step) / peaks.flops[self.row.precision], step_bytes(self.step) / peaks.bandwidth) * 1e3

    def work(self, cache: str, *, graph: bool = False) -> Calls:
        """The op as work in a cache mode: "cold", "hot" or "rotate"."""
        bounds = self.bounds if cache == "rotate" else self.bounds[:1]
        flush = Flush(self.device) if cache == "cold" else None
        return Calls(self.label, self.device, [bound.launches for bound in bounds], graph=graph, flush=flush)


@dataclass(frozen=True)
class BoundOp:
    """An op bound to operands at full size and not verified yet; `more(n)` binds it to n other sets."""

    row: Row
    part: str
    impl: Impl
    device: Any
    first: Bound
    more: Callable[[int], Iterator[Bound]]


def bound_of(choice: Choice, problem: Problem) -> BoundOp:
    """Bind the op of `problem`, with the tile of its full size. Raises UsageError for a mode, part or tile that there is not."""
    variant = choice.part if choice.part in DWCONV and problem.op in DWCONV[choice.part] else "auto"
    row, _ = choose_mode(choice.mode, choice.precision, choice.engine, dwconv=variant)
    device = Gpu() if row.device == "gpu" else Host()
    ins, outs = problem.operands()
    options: dict[str, Any] = {"attrs": problem.small.attrs, "device": device, "layout": row.layout, "store": row.store}
    options["target"] = device.target
    part, impl, first = _first(row, choice, problem, ins, outs, options)
    options["tile"] = first.call.tile
    return BoundOp(row, part, impl, device, first, lambda n: (Bound(impl, problem.op, ins, outs, **options) for _ in range(n)))


def prepare(choice: Choice, problem: Problem, *, rotate: bool = True, sets: int | None = None) -> Prepared:
    """Verify the op of `problem` with the tile of its full size, and bind it to as many sets of operands as `rotate` needs (or `sets`).

    Raises NotTimed if it fails parity, UsageError for a mode, part or tile that there is not.
    """
    made = bound_of(choice, problem)
    row, first = made.row, made.first
    error, limit = _verified(row, made.impl, problem, made.device, first.call.tile)
    if not error <= limit:
        raise NotTimed(f"{row.mode} {row.precision} {problem.op} {problem.small.label} is not timed: error {error:.1e} is over its bound {limit:.1e}")
    moved = sum(array.size * array.dtype.itemsize for array in (*first.call.ins, *first.call.outs))
    count = sets or (sets_for(moved, made.device) if rotate else 1)
    return Prepared(choice.label, problem.op, row, made.part, made.device, (first, *made.more(count - 1)), error, limit)


def _first(row: Row, choice: Choice, problem: Problem, ins: Any, outs: Any, options: dict[str, Any]) -> tuple[str, Impl, Bound]:
    """The part that runs the op on the full operands here, its implementation, and the bound op.

    Without a part that is what a plan would choose; of a part that the plan does not choose, the first in the row's order.
    """
    reasons = []
    able = gradcheck.runnable(row, problem.op, options["device"])
    named = [each for each in able if each[1].engine == choice.part] or [each for each in able if each[0] == choice.part]
    allowed = able if choice.part is None else named
    for part, impl in _in_order(row, problem.op, allowed, ins, outs, options):
        try:
            bound = Bound(impl, problem.op, ins, outs, **options)
            if choice.tile is None:
                return part, impl, bound
        except Unsupported as error:
            reasons.append(f"{part}: {error}")
            continue
        try:
            tile = tile_of(impl, bound, choice.tile, options["target"])
            return part, impl, Bound(impl, problem.op, ins, outs, **options, tile=tile)
        except ValueError as error:  # the part may have a second implementation, with other tiles
            reasons.append(f"{part}: {error}")
    parts = tuple(dict.fromkeys(name for part, impl in able for name in (part, impl.engine) if name))
    if choice.part is not None and choice.part not in parts:
        raise UsageError(
            f"{row.mode} {row.precision} runs {problem.op} in no part {quoted(choice.part)}{nearest(choice.part, parts)}; it has {parts}"
        )
    raise UsageError(
        f"{row.mode} {row.precision} has no {problem.op} for this{' tile and' if choice.tile else ''} shape"
        + "".join(f"; {reason}" for reason in reasons)
    )


def _in_order(row: Row, op: Op, allowed: Sequence[Any], ins: Any, outs: Any, options: dict[str, Any]) -> list[tuple[str, Impl]]:
    """`allowed` pairs of part and implementation, in front the one that a plan would choose if it is among them."""
    if not row.by_cost:
        return list(allowed)
    reads = tuple(Buf("", each.shape, str(each.dtype)) for each in ins)
    step = Step(op, reads, tuple(reads[out] if isinstance(out, int) else Buf("", *out) for out in outs), options["attrs"])
    found, _ = offered(row, bare_call(stored_as([step], row.store)[0], row.layout), options["target"])
    preferred = [each.impl for each in found]
    return sorted(allowed, key=lambda each: preferred.index(each[1]) if each[1] in preferred else len(preferred))


def tile_of(impl: Impl, bound: Bound, numbers: tuple[int, ...], target: Target) -> Any:
    """The tile whose fields are `numbers`, of a kind that `impl` has for this shape. Raises ValueError if it has none."""
    known = [bound.call.tile, *impl.candidates(bound.call, target)]
    for kind in dict.fromkeys(type(tile) for tile in known if tile is not None):
        if len(fields(kind)) == len(numbers):
            return kind(**dict(zip((field.name for field in fields(kind)), numbers, strict=True)))
    raise ValueError(f"no tile of {len(numbers)} numbers here; its own is {bound.call.tile}")


def _verified(row: Row, impl: Impl, problem: Problem, device: Any, tile: Any) -> tuple[float, float]:
    """(error, bound) on few images, or on as many more as the implementation of the full batch wants (Winograd's does)."""
    while True:
        try:
            return gradcheck.parity(row, impl, problem.small, device, tile), gradcheck.bound(problem.small, row.precision)
        except Unsupported:
            images = len(problem.small.ins[0])
            if problem.batch is None or images >= problem.batch:
                raise
            problem = problem.with_images(min(4 * images, problem.batch))


def full_bound(problem: Problem, precision: str) -> float:
    """The parity bound at full size: sums over images (of a weight gradient, of a loss) have that many more terms."""
    small, images = problem.small, problem.batch
    over_images = problem.op.direction == "wgrad" or problem.op.has(Loss) or problem.op.kind == "mse"
    terms = small.terms * images // len(small.ins[0]) if images and over_images else small.terms
    return gradcheck.bound(replace(small, terms=max(1, terms)), precision)


@dataclass(frozen=True)
class Measured:
    """One variant in one cache mode at one number of calls: samples of all variants, and which column is its own."""

    samples: Samples
    column: int

    @property
    def timing(self) -> Timing:
        return summarise(list(self.samples.ms[:, self.column]))

    def against(self, other: Measured) -> tuple[float, float, float]:
        """(ratio, low, high): how many times as long the other one takes, paired within repetitions."""
        return ratio_interval(other.samples.ms[:, other.column], self.samples.ms[:, self.column])


def timed_in_turn(works: Sequence[Work], n: int, warm: Warm, watch: Any, cap: float) -> list[Measured]:
    """`n` calls of every work, interleaved."""
    found = sample(works, n, warm, watch, cap)
    return [Measured(found, column) for column in range(len(works))]


def study(
    prepared: Sequence[Prepared],
    watch: Any,
    *,
    caches: Sequence[str],
    iterations: Sequence[int],
    graphs: Sequence[bool] = (False,),
    warmup: float | None = None,
    cap: float = 3.0,
    peers: Any = None,
) -> Iterator[dict[str, Any]]:
    """A row for every cache mode, number of calls, plain or as a graph, and variant. `warmup` None waits until the GPU is steady.

    cold knows one number of calls only, 1: every call is timed alone. `peers(cache, graph) -> works` are timed in the same turns.
    """
    for cache in caches:
        for graph in graphs:
            ours = [each.work(cache, graph=graph) for each in prepared]
            theirs = list(peers(cache, graph)) if peers else []
            works: list[Any] = [*ours, *theirs]
            warm = warm_up(works, watch, warmup)
            for n in iterations if cache != "cold" else (1,):
                found = timed_in_turn(works, n, warm, watch, cap)
                for at, (work, measured) in enumerate(zip(works, found, strict=True)):
                    of = prepared[at] if at < len(prepared) else None
                    row = row_of(work.label, of or prepared[0], measured, {"cache": cache, "iterations": n, "graph": graph}, peer=of is None)
                    row["host_ms"] = round(getattr(work, "host_ms", 0.0), 5)
                    row["warmup_seconds"] = round(warm.seconds, 3)
                    if at:
                        row["times_the_first"] = dict(zip(("ratio", "low", "high"), found[0].against(measured), strict=True))
                    yield row


def row_of(label: str, prepared: Prepared, measured: Measured, how: dict[str, Any], peer: bool = False) -> dict[str, Any]:
    """What results files keep: who, how, time, rates, part of the roofline, and the state of the GPU."""
    timing, step, floor = measured.timing, prepared.step, prepared.floor_ms
    low, high, _ = median_interval(measured.samples.ms[:, measured.column])
    call = prepared.bounds[0].call
    flops, moved = step_flops(step), step_bytes(step)
    own = {
        "mode": prepared.row.mode,
        "runs_as": prepared.part,
        "tile": None if call.tile is None else {field.name: getattr(call.tile, field.name) for field in fields(call.tile)},
        "error": prepared.error,
        "bound": prepared.limit,
    }
    return {
        "variant": label,
        "op": str(prepared.op),
        "shapes": [list(shape) for shape in (*call.in_shapes, *call.out_shapes)],
        "precision": prepared.row.precision,
        **({} if peer else own),
        **how,
        "ms": timing.as_dict(),
        "median_interval": [round(low, 5), round(high, 5)],
        "flops": flops,
        "compulsory_bytes": moved,
        "gbytes_per_second": moved / timing.median / 1e6,
        "tflops": flops / timing.median / 1e9 if flops else None,
        "roofline": floor / timing.median if floor else None,
        **measured.samples.gpu,
        "steady": measured.samples.steady,
        "discarded": measured.samples.discarded,
    }
