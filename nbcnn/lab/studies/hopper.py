"""The ladder for Hopper: six kernels of one convolution, each with one idea more (`nbcnn.ops.conv.hopper_ladder`), verified and timed in turn.

They stand between mode im2col, which multiplies float32 on CUDA cores, and the engine that trains, `nbcnn.ops.conv.wgmma`. All are timed on the
same operands: the autoencoder's second convolution, conv2. TFLOP/s count its products, whatever else a kernel does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nbcnn.check import gradcheck
from nbcnn.gpu.device import Gpu, GpuUnavailable
from nbcnn.lab.measure.caches import Calls
from nbcnn.lab.measure.clocks import Watch
from nbcnn.lab.measure.op import Choice, NotTimed, Prepared, prepare, timed_in_turn
from nbcnn.lab.measure.opcases import LAYERS, PARITY_IMAGES, conv_problem
from nbcnn.lab.measure.resources import resources
from nbcnn.lab.measure.roofline import aligned
from nbcnn.lab.measure.steady import warm_up
from nbcnn.modes import Row
from nbcnn.ops.conv.fused import relu_cases
from nbcnn.ops.conv.hopper_ladder import STEPS, Step
from nbcnn.ops.conv.reference import conv_cases
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.kernel.case import Case
from nbcnn.plan.op import Map, Op
from nbcnn.plan.shapes import ConvShape
from nbcnn.run.peaks import peaks_of

LAYER = "conv2"
OP = Op("conv", "fprop", after=(Map("relu"),))
"""What mode im2col, step 6 and the engine compute; steps 1 … 5 the convolution alone."""
BELOW = ("mode im2col", "CUDA cores, float32")
ABOVE = ("engine", "256-pixel tiles, patches kept")
IM2COL, ENGINE = Choice("im2col", part="im2col"), Choice("tensorcore", "bf16", part="wgmma")
"""What runs those two; the steps take the engine's operands."""
CAPABILITY = (9, 0)
CALLS = 10
"""Calls in one captured graph, unless it takes more to walk through all sets of operands."""
SECONDS = 3.0
"""All kernels together are sampled for at most so long."""


def case_of(step: Step, shape: ConvShape) -> Case:
    """The op of a step at `shape`: steps 1 … 5 have no bias."""
    made = (*conv_cases(shape), *relu_cases(shape))
    return next(case for case in made if case.op == step.op and (step.op != Op("conv", "fprop") or len(case.ins) == 2))


def call_of(step: Step, call: Call) -> Call:
    """The engine's call, as a step sees it: the same arrays, the same packed filters, without what it does not read."""
    count = 3 if step.op == OP else 2
    return replace(call, op=step.op, ins=call.ins[:count], in_shapes=call.in_shapes[:count], in_dtypes=call.in_dtypes[:count], tile=None)


def verified(step: Step, row: Row, device: Any, shape: ConvShape) -> tuple[float, float]:
    """(error, bound) of a step on few images against the NumPy reference. Raises NotTimed if the error is over its bound."""
    case = case_of(step, replace(shape, N=min(shape.N, PARITY_IMAGES)))
    error, limit = gradcheck.parity(row, step.impl, case, device), gradcheck.bound(case, row.precision)
    if not error <= limit:
        raise NotTimed(f"step {step.name} is not timed: error {error:.1e} is over its bound {limit:.1e}")
    return error, limit


def climb(batch: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for mode im2col, each step, and the engine. Raises GpuUnavailable without compute capability 9.0, NotTimed where parity fails."""
    gpu = Gpu()
    if gpu.capability != CAPABILITY:
        has = ".".join(map(str, gpu.capability))
        raise GpuUnavailable(f"the ladder for Hopper needs compute capability 9.0 and no other (TMA, wgmma); this GPU has {has}")
    shape = replace(LAYERS[LAYER], N=batch)
    say(f"{LAYER}, batch {batch}: verifying and compiling …")
    problem = conv_problem(OP, shape)
    below, engine = prepare(IM2COL, problem), prepare(ENGINE, problem)
    errors = [verified(step, engine.row, gpu, shape) for step in STEPS]
    works = [below.work("rotate", graph=True)]
    for step in STEPS:
        sets = [step.impl.bind(call_of(step, bound.call)) for bound in engine.bounds]
        works.append(Calls(step.name, gpu, sets, graph=True))
    works.append(engine.work("rotate", graph=True))
    launches = [_only(below), *(step.impl.bind(call_of(step, engine.bounds[0].call))[0] for step in STEPS), _only(engine)]
    names = [(*BELOW, OP, "fp32"), *((step.name, step.idea, step.op, "bf16") for step in STEPS), (*ABOVE, OP, "bf16")]
    with Watch(gpu) as watch:
        say("timing all of them in turn …")
        warm = warm_up(works, watch)
        found = timed_in_turn(works, max(CALLS, len(engine.bounds)), warm, watch, SECONDS)
    rows: list[dict[str, Any]] = []
    peaks = peaks_of(gpu)
    for (name, idea, op, precision), measured, launch, (error, limit) in zip(
        names, found, launches, [(below.error, below.limit), *errors, (engine.error, engine.limit)], strict=True
    ):
        timing = measured.timing
        tflops = shape.flops() / timing.median / 1e9
        taken = _taken(launch, gpu)
        rows.append(
            {
                "variant": name,
                "idea": idea,
                "layer": LAYER,
                "op": str(op),
                "batch": batch,
                "precision": precision,
                "ms": timing.as_dict(),
                "tflops": tflops,
                "percent_of_peak": 1e14 * tflops / peaks.flops[precision] if peaks else None,
                "over_before": tflops / rows[-1]["tflops"] if rows else None,
                **taken,
                "error": error,
                "bound": limit,
                **measured.samples.gpu,
                "steady": measured.samples.steady,
            }
        )
    return rows


def _only(prepared: Prepared) -> Any:
    """The launch of an op, the last one if there are several."""
    return prepared.bounds[0].launches[-1]


def _taken(launch: Any, gpu: Any) -> dict[str, Any]:
    """Registers per thread, spilled bytes, shared bytes per block, and blocks that a multiprocessor holds."""
    launch.run(gpu.stream)
    gpu.synchronize()
    found = resources(launch) or {}
    return {
        "registers": found.get("registers"),
        "local_bytes": found.get("local_bytes"),
        "shared_bytes": found.get("shared_bytes"),
        "blocks": found.get("resident_blocks"),
    }


HEAD = ("kernel", "idea", "ms", "TFLOP/s", "% of peak", "× before", "registers", "shared KiB", "blocks/SM", "error/bound")


def table(rows: list[dict[str, Any]]) -> str:
    """The climb as text."""
    text = aligned([HEAD, *map(_cells, rows)], range(2))
    batch = rows[0]["batch"]
    text.append(f"{LAYER} at batch {batch:,}; % of peak: of the datasheet's for what multiplies; blocks/SM: blocks that a multiprocessor holds")
    return "\n".join(text)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    def shown(value: float | None, form: str) -> str:
        return "" if value is None else f"{value:{form}}"

    shared = None if row["shared_bytes"] is None else row["shared_bytes"] / 1024
    return (
        *(row["variant"], row["idea"], f"{row['ms']['median']:.3f}", f"{row['tflops']:.0f}", shown(row["percent_of_peak"], ".0f")),
        *(shown(row["over_before"], ".2f"), shown(row["registers"], "d"), shown(shared, ".0f"), shown(row["blocks"], "d")),
        f"{row['error'] / row['bound']:.2f}",
    )
