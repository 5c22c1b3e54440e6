"""This module measures where the time of one training step goes: it runs the launches of the plan one by one, between events.

The kernels and their order are those of the CUDA graph that other training steps replay, so the bits are the same. A graph has its
launches ready; here the host must enqueue each, and would come too late: so the GPU first waits, in a kernel that does nothing, for
about as long as the host needs. Then kernels run back to back, and what is left between them are the gaps that a GPU needs itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nbcnn.gpu.device import elapsed_ms, event
from nbcnn.gpu.language import SIMULATOR
from nbcnn.gpu.ranges import Mark, nothing
from nbcnn.ops.kernel.call import Launch
from nbcnn.plan.flops import conv_shape
from nbcnn.plan.graph import Step
from nbcnn.run.peak_kernels import SLEEP_NS, wait_kernel
from nbcnn.run.program import Program

LONGEST_MS = 20.0
PASSES = ("fprop", "dgrad", "wgrad")


def wait_launch(milliseconds: float) -> Launch:
    """The launch that keeps the GPU waiting for about so long, at most LONGEST_MS."""
    return Launch(wait_kernel, 1, 1, (np.int32(min(milliseconds, LONGEST_MS) * 1e6 / SLEEP_NS),))


def label(step: Step) -> str:
    """Op and pass under which a step's time is added up: "conv wgrad" for every convolution's, fused or not; else the op's name."""
    if conv_shape(step) is not None:
        return "conv " + (step.op.direction if step.op.direction in PASSES else "fprop")
    return str(step.op).replace("_", " ")


def watch(program: Program, mark: Mark = nothing) -> Callable[[], dict[str, Any]]:
    """Enqueue the plan launch by launch; the function that comes back waits for it and says where the time went.

    kernels_ms  milliseconds by `label`, the most first; gaps_ms  between kernels; step_ms  from the first to the last, their sum;
    host_ms     what the host needed to enqueue the launches one by one; 0 where it runs them itself.

    mark: makes a range around every step of the plan (`nbcnn.gpu.ranges`).
    """
    if program.device.name == "host" or SIMULATOR:
        return _watch_host(program, mark)
    stream = program.device.stream
    marks = [(event(), event()) for _ in program.launches]
    wait_launch(1.5 * program.enqueue_ms).run(stream)
    began, at = time.perf_counter(), iter(marks)
    for item, launches in program.bound:
        with mark(f"{item.step.scope}.{item.step.op}"):
            for launch in launches:
                before, after = next(at)
                before.record(stream)
                launch.run(stream)
                after.record(stream)
    program.enqueue_ms = host_ms = (time.perf_counter() - began) * 1e3

    def result() -> dict[str, Any]:
        marks[-1][1].synchronize()
        spent = [elapsed_ms(*pair) for pair in marks]
        return _sums(program, spent, elapsed_ms(marks[0][0], marks[-1][1]), host_ms)

    return result


def _watch_host(program: Program, mark: Mark) -> Callable[[], dict[str, Any]]:
    """Watch a program of the host, whose launches run at once, by the wall clock."""
    spent: list[float] = []
    with program.threads():
        began = time.perf_counter()
        for item, launches in program.bound:
            with mark(f"{item.step.scope}.{item.step.op}"):
                for launch in launches:
                    start = time.perf_counter()
                    launch.run(getattr(program.device, "stream", 0))
                    spent.append((time.perf_counter() - start) * 1e3)
        whole = (time.perf_counter() - began) * 1e3
    found = _sums(program, spent, whole, 0.0)
    return lambda: found


def _sums(program: Program, spent: list[float], step_ms: float, host_ms: float) -> dict[str, Any]:
    kernels: dict[str, float] = {}
    at = iter(spent)
    for item, launches in program.bound:
        name = label(item.step)
        kernels[name] = kernels.get(name, 0.0) + sum(next(at) for _ in launches)
    ordered = {name: round(ms, 5) for name, ms in sorted(kernels.items(), key=lambda pair: -pair[1])}
    return {"kernels_ms": ordered, "gaps_ms": round(step_ms - sum(spent), 5), "host_ms": round(host_ms, 5), "step_ms": round(step_ms, 5)}


def line(found: Mapping[str, Any]) -> str:
    """What `watch` found, in a line: shares of the step, down to two percent."""
    whole = max(found["step_ms"], 1e-9)
    parts = [(name, ms / whole) for name, ms in found["kernels_ms"].items()]
    large = [f"{name} {share:.0%}" for name, share in parts if share >= 0.02]
    rest = sum(share for _, share in parts if share < 0.02)
    small = [f"others {rest:.0%}"] if rest >= 0.005 else []
    gaps = f"gaps {found['gaps_ms'] / whole:.0%}"
    host = f"; enqueuing it took the host {found['host_ms']:.2f} ms" if found["host_ms"] else ""
    return f"one step's {found['step_ms']:.2f} ms: {', '.join([*large, *small, gaps])}{host}"
