"""This module checks the model of traffic against NVIDIA's counters: DRAM bytes of every kernel of a training step as ncu counts them.

`python -m nbcnn.lab.measure.counters MODE PRECISION BATCH FUSING` runs one training step launch by launch between the profiler's start and stop;
ncu runs it, and what it counts is matched with the launches of the plan in their order.

A kernel's reads from DRAM lie between nothing (all it reads is still in L2) and its logical bytes; where its tensors are several times as
large as L2, they should be its different bytes: `least`. Its writes are what it stores, sooner or later: what is still dirty in L2 when it
ends is written while the next kernels run, and counts there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nbcnn.lab.measure import ncu
from nbcnn.lab.measure.roofline import aligned, traffic_of
from nbcnn.lab.measure.steps import time_alone, time_steps
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.run.program import Program

METRICS = {"dram__bytes_read.sum": "dram_read", "dram__bytes_write.sum": "dram_write", "gpu__time_duration.sum": "ms"}
TWICE = 1.25
"""A kernel streams if it asks for less than this times its different bytes."""
LONG_MS = 0.2
"""Milliseconds from which on event times should agree with ncu's durations."""
L2_TIMES = 4
"""How many times the size of L2 a kernel's bytes must be, so that those of DRAM test the model."""


def count(mode: str, precision: str, batch: int, fusing: bool, timeout: float = 400.0) -> list[dict[str, float]]:
    """DRAM bytes read and written and milliseconds of every kernel of one training step, in the order of the plan. Raises ncu.NotCounted."""
    return ncu.count("nbcnn.lab.measure.counters", (mode, precision, str(batch), str(int(fusing))), METRICS, timeout)


def compare(program: Program, counted: Sequence[Mapping[str, Any]], cache_bytes: int) -> list[dict[str, Any]]:
    """One row a launch: the model's bytes, DRAM's, and the model's error. Raises ncu.NotCounted if launches and kernels do not match."""
    launches = [(item, launch) for item, made in program.bound for launch in made]
    if len(launches) != len(counted):
        raise ncu.NotCounted(f"ncu counted {len(counted)} kernels, the plan has {len(launches)} launches")
    rows, at = [], 0
    for item, made in program.bound:
        traffic: Sequence[Traffic | None] = traffic_of(program.plan, item) or [None] * len(made)
        for launch, model in zip(made, traffic, strict=True):
            found = counted[at]
            at += 1
            dram = found["dram_read"] + found["dram_write"]
            row = {
                "scope": item.step.scope,
                "op": str(item.step.op),
                "kernel": getattr(getattr(launch.kernel, "py_func", launch.kernel), "__name__", launch.name),
                "dram_read": found["dram_read"],
                "dram_write": found["dram_write"],
                "ms": found["ms"],
            }
            if model is not None:
                streams = model.logical < TWICE * model.least
                row |= {
                    "read": model.read,
                    "write": model.write,
                    "distinct": model.distinct,
                    "error": round(model.least / dram - 1, 4) if dram else None,
                    "streams": bool(streams and model.least >= L2_TIMES * cache_bytes),
                }
            rows.append(row)
    return rows


def table(found: Mapping[str, Any]) -> str:
    """What `validate` found as text: model and counters, and how far the model and the event times are off where they must not be."""
    rows, cache_bytes = found["kernels"], found["l2_bytes"]
    head = ("step", "op", "kernel", "model least", "model logical", "DRAM read", "DRAM write", "least / DRAM", "logical / DRAM", "µs", "streams")
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        dram = max(row["dram_read"] + row["dram_write"], 1.0)
        known = "read" in row
        lines.append(
            (
                row["scope"],
                row["op"],
                row["kernel"].removesuffix("_kernel"),
                f"{(row['distinct'] + row['write']) / 1e6:.1f}" if known else "–",
                f"{(row['read'] + row['write']) / 1e6:.1f}" if known else "–",
                f"{row['dram_read'] / 1e6:.1f}",
                f"{row['dram_write'] / 1e6:.1f}",
                f"{(row['distinct'] + row['write']) / dram:.2f}" if known else "–",
                f"{(row['read'] + row['write']) / dram:.2f}" if known else "–",
                f"{row['ms'] * 1e3:.1f}",
                "yes" if row.get("streams") else "",
            )
        )
    text = aligned(lines, (0, 1, 2))
    errors = [abs(row["error"]) for row in rows if row.get("streams") and row["error"] is not None]
    text.append("MB. least: every different byte once; logical: what the kernel asks for.")
    least = f"{L2_TIMES} × L2 ({cache_bytes / 2**20:.0f} MiB)"
    if errors:
        text.append(f"{len(errors)} streaming kernels of {least} or more: the model is off by at most {max(errors):.1%}")
    else:
        text.append(f"no streaming kernel moves {least} here: take a larger batch to test the model")
    long = [step for step in found["steps"] if step["ncu_ms"] >= LONG_MS]
    if long:
        text.append(f"{len(long)} steps of {LONG_MS * 1e3:.0f} µs or more, event times beside ncu's durations, at most off by:")
        text.append(f"  {_worst(long, 'alone_ms')} when each runs after a rest, as under ncu")
        text.append(f"  {_worst(long, 'event_ms')} in the running training step, where the clock is lower under load")
    return "\n".join(line.rstrip() for line in text)


def _worst(steps: Sequence[Mapping[str, Any]], key: str) -> str:
    """How far the times `key` are from ncu's at most, and where."""
    worst = max(steps, key=lambda step: abs(step[key] / step["ncu_ms"] - 1))
    return f"{worst[key] / worst['ncu_ms'] - 1:+.1%} ({worst['scope']} {worst['op']})"


def cache_of(device: Any) -> int:
    """Bytes of the second-level cache."""
    from nbcnn.gpu.compiler import SIMULATOR
    from nbcnn.gpu.driver import device as driver_device

    return 0 if SIMULATOR else driver_device().attribute("L2_CACHE_SIZE")


def validate(session: Any) -> dict[str, Any]:
    """Count the session's training step beside the model, and time its steps by events beside ncu's durations. Raises ncu.NotCounted.

    l2_bytes; kernels: one row per launch (`compare`); steps: scope, op, milliseconds by events in the running training step (`event_ms`) and
    each alone (`alone_ms`), and by ncu, which runs kernels one by one (`ncu_ms`).
    """
    net, program = session.net, session.program
    cache = cache_of(net.device)
    kernels = compare(program, count(net.mode, net.precision, session.batch, net.fusing), cache)
    at, steps = iter(kernels), []
    running = [timing.median for timing in time_steps(session).steps]
    for (item, launches), event_ms, alone_ms in zip(program.bound, running, time_alone(session), strict=True):
        times = {"event_ms": event_ms, "alone_ms": alone_ms, "ncu_ms": sum(next(at)["ms"] for _ in launches)}
        steps.append({"scope": item.step.scope, "op": str(item.step.op)} | {name: round(ms, 5) for name, ms in times.items()})
    return {"l2_bytes": cache, "kernels": kernels, "steps": steps}


def main(argv: Sequence[str]) -> int:
    """The training step that is counted: the third one, launch by launch, after two replays of the graph."""
    from nbcnn.gpu.driver import device as driver_device
    from nbcnn.lab.measure.rung import session_for

    mode, precision, batch, fusing = argv
    session = session_for(int(batch), int(batch), mode=mode, precision=precision, fusing=fusing == "1")
    device = session.net.device
    for _ in range(2):
        session.step()
        session.begin_epoch(0)
    driver_device().profile(True)
    session.step(Program.run)
    device.synchronize()
    driver_device().profile(False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
