"""This module times the first calls of a fresh process, phase by phase, as a program pays them that runs an op once and ends.

Every sample is a process of its own (`python -m nbcnn.lab.measure.fresh OP SHAPE CHOICE SECONDS`), after a rest; the process that asks must not
have opened the GPU yet, else it stays awake. A first process, which does not count, compiles what is not on disk.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

BEGAN = time.time()
PROCESSES, CALLS = 3, 20
BURST, BURST_MS = 1000, 300.0
"""Calls in a row behind the single ones, or as many as take so long."""
PHASES = {
    "start": "start of Python",
    "imports": "imports",
    "context": "opening the GPU",
    "operands": "making operands and uploading them",
    "kernels": "loading kernels from disk",
}
"""The phases before the first call."""


def study(choice: str, op: str, shape: str, sleep: float, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Medians over `PROCESSES` fresh processes; None, and the reason said, if one of them fails.

    phases_ms   milliseconds of each of `PHASES`
    compiled    kernels that the uncounted first process compiled, compiling_ms in so long
    calls_ms    the host's milliseconds of calls 1, 2, … `CALLS`, each waited for; gpu_ms between their events; burst_ms per call of many in a row
    sm_mhz      the SM clock before the first call and behind the last
    """
    runs = []
    for number in range(PROCESSES + 1):
        say(f"a fresh process: {number} of {PROCESSES}, {CALLS} single calls" if number else "a fresh process, for what is not compiled yet")
        time.sleep(sleep if number else 0.0)
        command = [sys.executable, "-W", "ignore", "-m", "nbcnn.lab.measure.fresh", op, shape, choice]
        done = subprocess.run([*command, repr(time.time())], capture_output=True, text=True, cwd=Path(__file__).parents[3])
        if done.returncode:
            say("the first calls of a fresh process were not measured: " + (done.stderr.strip().splitlines() or ["it ended without a word"])[-1])
            return None
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return summary(runs)


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The medians of all but the first run."""
    first, *counted = runs

    def middle(name: str, at: Any) -> float:
        return float(median(run[name][at] for run in counted))

    clocks = [[run["sm_mhz"][end] for run in counted if run["sm_mhz"][end] is not None] for end in (0, 1)]
    return {
        "processes": len(counted),
        "compiled": first["compiled"],
        "compiling_ms": first["phases_ms"]["kernels"],
        "phases_ms": {name: middle("phases_ms", name) for name in PHASES},
        "calls_ms": [middle("calls_ms", at) for at in range(len(first["calls_ms"]))],
        "gpu_ms": [middle("gpu_ms", at) for at in range(len(first["gpu_ms"]))],
        "burst_ms": float(median(run["burst_ms"] for run in counted)),
        "sm_mhz": [float(median(values)) if values else None for values in clocks],
    }


def main(argv: Sequence[str]) -> int:
    """Measure this process and print one line of JSON."""
    op, shape, words, asked = argv
    phases = {"start": (BEGAN - float(asked)) * 1e3}
    last = time.perf_counter()

    def mark(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        phases[name], last = (now - last) * 1e3, now

    from nbcnn.gpu.compile_pool import compile_all
    from nbcnn.gpu.device import Gpu, Host
    from nbcnn.lab.measure.caches import Calls
    from nbcnn.lab.measure.clocks import source_for
    from nbcnn.lab.measure.op import Choice, bound_of
    from nbcnn.lab.measure.opcases import problem

    choice = Choice.parse(words)
    mark("imports")
    device: Any = Host() if choice.mode == "cpu" else Gpu()
    mark("context")
    first = bound_of(choice, problem(op, shape or None)).first
    mark("operands")
    compiled = compile_all(first.launches)
    mark("kernels")
    source = source_for(device)
    work = Calls(op, first.device, [first.launches])

    def clock() -> float | None:
        reading = source.read() if source else None
        return reading.sm_mhz if reading else None

    before, calls, events = clock(), [], []
    for _ in range(CALLS):
        start = time.perf_counter()
        events.append(work.repeat(1))
        calls.append((time.perf_counter() - start) * 1e3)
    burst = work.repeat(int(min(BURST, max(1, BURST_MS / max(events[-1], 1e-4)))))
    found = {"phases_ms": phases, "compiled": compiled, "calls_ms": calls, "gpu_ms": events, "burst_ms": burst, "sm_mhz": [before, clock()]}
    if source:
        source.close()
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
