"""The ladders of kernels: one op in several kernels, each with one idea more (`cuda_ladder`, `hopper_ladder` in `nbcnn.ops.conv`), verified and timed
in turn.

All kernels of a ladder are timed on the same operands, at a layer of the autoencoder. TFLOP/s count the layer's products, GB/s its operands once,
whatever else a kernel does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nbcnn.check import gradcheck
from nbcnn.gpu.device import Gpu, GpuUnavailable
from nbcnn.lab.measure.caches import Calls
from nbcnn.lab.measure.clocks import Watch
from nbcnn.lab.measure.op import Choice, NotTimed, prepare, timed_in_turn
from nbcnn.lab.measure.opcases import LAYERS, PARITY_IMAGES, Problem, conv_problem
from nbcnn.lab.measure.resources import resources
from nbcnn.lab.measure.roofline import aligned
from nbcnn.lab.measure.steady import warm_up
from nbcnn.lab.measure.timing import Timing, summarise
from nbcnn.modes import Row
from nbcnn.ops.conv import cuda_ladder, hopper_ladder
from nbcnn.ops.conv.bias import cases as bias_cases
from nbcnn.ops.conv.cuda_ladder.serial import compiled, loops
from nbcnn.ops.conv.fused import relu_cases
from nbcnn.ops.conv.hopper_ladder import Step
from nbcnn.ops.conv.reference import conv_cases
from nbcnn.ops.kernel.call import Call, Impl
from nbcnn.ops.kernel.case import Case
from nbcnn.ops.kernel.traffic import total
from nbcnn.plan.flops import step_bytes, step_flops
from nbcnn.plan.op import Map, Op
from nbcnn.plan.shapes import ConvShape
from nbcnn.run.peaks import peaks_of

LAYER = "conv2"
CONV, CONV_RELU = Op("conv", "fprop"), Op("conv", "fprop", after=(Map("relu"),))
BIAS = Op("bias", "wgrad")
CALLS = 10
"""Calls in one captured graph, unless it takes more to walk through all sets of operands."""
SECONDS = 3.0
"""All kernels together are sampled for at most so long."""
TURNS = 3
"""Runs of the serial loops, of one image each."""


@dataclass(frozen=True)
class Mode:
    """A rung that a mode of the framework runs: the same op by what the mode chooses."""

    name: str
    idea: str
    choice: Choice
    op: Op


@dataclass(frozen=True)
class Ladder:
    """Rungs in their order.

    name      its section of a results file, without the batch.
    operands  the rung whose operands all steps take.
    exactly   the compute capability that it needs, and no other; None: any.
    serial    whether nested loops on one core of the CPU stand before the first rung.
    """

    name: str
    batch: int
    rungs: tuple[Mode | Step, ...]
    operands: Mode
    exactly: tuple[int, int] | None = None
    serial: bool = False

    @property
    def steps(self) -> tuple[Step, ...]:
        """The rungs that are kernels of the ladder alone."""
        return tuple(rung for rung in self.rungs if isinstance(rung, Step))


IM2COL = Mode("mode im2col", "CUDA cores, float32", Choice("im2col"), CONV_RELU)
ENGINE = Mode("engine", "256-pixel tiles, patches kept", Choice("tensorcore", "bf16", part="wgmma"), CONV_RELU)
HOPPER = Ladder("hopper", 1024, (IM2COL, *hopper_ladder.STEPS, ENGINE), ENGINE, exactly=(9, 0))
TILED = Mode("mode tiled", "halo, 8 sums per thread", Choice("tiled", part="tiled"), CONV)
DIRECT = Mode("mode im2col", "larger tiles, loads ahead", Choice("im2col"), CONV_RELU)
WINOGRAD = Mode("Winograd", "2.25 times fewer products", Choice("cudacore", part="winograd"), CONV_RELU)
CUDA = Ladder("climb", 256, (*cuda_ladder.STEPS[:2], TILED, *cuda_ladder.STEPS[2:], DIRECT, WINOGRAD), TILED, serial=True)
SPREAD = Mode("mode tiled", "several blocks per channel", Choice("tiled"), BIAS)
SUMS = Ladder("sums", 256, (*cuda_ladder.SUMS, SPREAD), SPREAD)
LADDERS = {ladder.name: ladder for ladder in (CUDA, SUMS, HOPPER)}


def problem_of(op: Op, batch: int) -> Problem:
    """The op at the layer that all ladders climb, a convolution with its bias."""
    few = replace(LAYERS[LAYER], N=min(batch, PARITY_IMAGES))
    if op == BIAS:
        return Problem(op, next(case for case in bias_cases((few.y_shape,)) if case.op == op), batch)
    if op == CONV:
        return Problem(op, next(case for case in conv_cases(few) if case.op == op and len(case.ins) == 3), batch)
    return conv_problem(op, replace(LAYERS[LAYER], N=batch))


def case_of(step: Step, shape: ConvShape) -> Case:
    """The op of a step at `shape`: the convolution alone has no bias."""
    if step.op == BIAS:
        return next(case for case in bias_cases((shape.y_shape,)) if case.op == BIAS)
    made = (*conv_cases(shape), *relu_cases(shape))
    return next(case for case in made if case.op == step.op and (step.op != CONV or len(case.ins) == 2))


def call_of(step: Step, call: Call) -> Call:
    """The call of `operands`, as a step sees it: the same arrays, the same packed filters, without what it does not read."""
    count = 2 if step.op == CONV else len(call.ins)
    return replace(call, op=step.op, ins=call.ins[:count], in_shapes=call.in_shapes[:count], in_dtypes=call.in_dtypes[:count], tile=None)


def verified(step: Step, row: Row, device: Any, shape: ConvShape) -> tuple[float, float]:
    """(error, bound) of a step on few images against the NumPy reference. Raises NotTimed if the error is over its bound."""
    case = case_of(step, replace(shape, N=min(shape.N, PARITY_IMAGES)))
    error, limit = gradcheck.parity(row, step.impl, case, device), gradcheck.bound(case, row.precision)
    if not error <= limit:
        raise NotTimed(f"step {step.name} is not timed: error {error:.1e} is over its bound {limit:.1e}")
    return error, limit


def climb(ladder: Ladder, batch: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row per rung. Raises GpuUnavailable without the compute capability that the ladder needs, NotTimed where parity fails."""
    gpu = Gpu()
    if ladder.exactly not in (None, gpu.capability):
        has = ".".join(map(str, gpu.capability))
        raise GpuUnavailable(f"the ladder for Hopper needs compute capability 9.0 and no other (TMA, wgmma); this GPU has {has}")
    shape = replace(LAYERS[LAYER], N=batch)
    say(f"{ladder.name}, {LAYER}, batch {batch}: verifying and compiling …")
    modes = {rung.name: prepare(rung.choice, problem_of(rung.op, batch)) for rung in ladder.rungs if isinstance(rung, Mode)}
    given = modes[ladder.operands.name]
    works, launches, checked = [], [], []
    for rung in ladder.rungs:
        if isinstance(rung, Mode):
            mine = modes[rung.name]
            works.append(mine.work("rotate", graph=True))
            launches.append(list(mine.bounds[0].launches))
            checked.append((mine.error, mine.limit, mine.row.precision, _moved(mine.bounds[0].impl, mine.bounds[0].call)))
            continue
        checked.append((*verified(rung, given.row, gpu, shape), given.row.precision, _moved(rung.impl, call_of(rung, given.bounds[0].call))))
        sets = [list(rung.impl.bind(call_of(rung, bound.call))) for bound in given.bounds]
        launches.append(sets[0])
        works.append(Calls(rung.name, gpu, sets, graph=True))
    with Watch(gpu) as watch:
        say("timing all of them in turn …")
        warm = warm_up(works, watch)
        found = timed_in_turn(works, max(CALLS, len(given.bounds)), warm, watch, SECONDS)
    rows: list[dict[str, Any]] = _serial(shape, say) if ladder.serial else []
    peaks, flops, least = peaks_of(gpu), step_flops(given.step), step_bytes(given.step)
    for rung, measured, launched, (error, limit, precision, moves) in zip(ladder.rungs, found, launches, checked, strict=True):
        seconds = measured.timing.median / 1e3
        floor = None if peaks is None else max(flops / peaks.flops[precision], least / peaks.bandwidth)
        rows.append(
            {
                **_named(rung.name, rung.idea, rung.op, batch, precision, measured.timing, flops),
                "gb_per_second": least / seconds / 1e9,
                "percent_of_peak": None if floor is None else 100 * floor / seconds,
                "over_before": rows[-1]["ms"]["median"] / measured.timing.median if rows else None,
                "asked_bytes": moves,
                **taken(launched, gpu),
                "error": error,
                "bound": limit,
                **measured.samples.gpu,
                "steady": measured.samples.steady,
            }
        )
    return rows


def _moved(impl: Impl, call: Call) -> int | None:
    """The bytes that all threads of a call ask for; None where nobody has worked them out."""
    return None if impl.traffic is None else total(impl.traffic(call)).logical


def _named(name: str, idea: str, op: Op, batch: int, precision: str, timing: Timing, flops: int) -> dict[str, Any]:
    times = {"ms": timing.as_dict(), "tflops": flops / timing.median / 1e9}
    return {"variant": name, "idea": idea, "layer": LAYER, "op": str(op), "batch": batch, "precision": precision, **times}


def _serial(shape: ConvShape, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row of the nested loops on one core: one image is timed, and counts once per image of the batch. No row where Numba is not installed."""
    run = compiled(loops)
    if run is None:
        say("the serial loops are left out: they are compiled by Numba, which is not installed")
        return []
    one = replace(shape, N=1)
    case = case_of(cuda_ladder.STEPS[0], one)
    x, w = (np.ascontiguousarray(each, np.float32) for each in case.ins)
    y, times = np.empty(one.y_shape, np.float32), []
    for _ in range(1 + TURNS):
        start = time.perf_counter()
        run(x, w, y, one.stride, one.pad)
        times.append((time.perf_counter() - start) * 1e3 * shape.N)
    error, limit = gradcheck.relative_error(y, gradcheck.reference(case)[0]), gradcheck.bound(case)
    if not error <= limit:
        raise NotTimed(f"the serial loops are not timed: error {error:.1e} is over its bound {limit:.1e}")
    timing = summarise(times[1:])
    return [_named("serial", "seven nested loops, one CPU core", CONV, shape.N, "fp32", timing, shape.flops()) | {"error": error, "bound": limit}]


def taken(launches: Sequence[Any], gpu: Any) -> dict[str, Any]:
    """Registers per thread, spilled bytes, shared bytes per block, and blocks that a multiprocessor holds, of the launch that multiplies.

    That is the one with the most registers: the others of a convolution transform or add, and hold few values per thread.
    """
    for launch in launches:
        launch.run(gpu.stream)
    gpu.synchronize()
    found = max((resources(launch) or {} for launch in launches), key=lambda one: one.get("registers") or 0)
    return {
        "registers": found.get("registers"),
        "local_bytes": found.get("local_bytes"),
        "shared_bytes": found.get("shared_bytes"),
        "blocks": found.get("resident_blocks"),
    }


HEAD = ("kernel", "idea", "ms", "TFLOP/s", "GB/s", "% of peak", "× before", "GB asked", "registers", "shared KiB", "blocks/SM", "error/bound")


def table(rows: list[dict[str, Any]]) -> str:
    """The climb as text."""
    text = aligned([HEAD, *map(_cells, rows)], range(2))
    batch = rows[0]["batch"]
    text.append(
        f"{LAYER} at batch {batch:,}; % of peak: of the datasheet's, for the products or the operands once, whichever takes longer; "
        "GB asked: by all threads, mostly of caches; blocks/SM: blocks that a multiprocessor holds"
    )
    return "\n".join(text)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    def shown(key: str, form: str, scale: float = 1) -> str:
        return "" if row.get(key) is None else f"{row[key] / scale if scale != 1 else row[key]:{form}}"

    return (
        *(
            row["variant"],
            row["idea"],
            f"{row['ms']['median']:.3f}",
            f"{row['tflops']:.3g}",
            shown("gb_per_second", ".0f"),
            shown("percent_of_peak", ".0f"),
        ),
        *(shown("over_before", ".2f"), shown("asked_bytes", ".2f", 1e9), shown("registers", "d"), shown("shared_bytes", ".0f", 1024)),
        *(shown("blocks", "d"), f"{row['error'] / row['bound']:.2f}"),
    )
