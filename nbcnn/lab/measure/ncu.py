"""This module runs a module of ours under NVIDIA's ncu, which counts what its kernels do, with clocks and caches left alone.

Only kernels between the profiler's start and stop (`cuda.profile_start`, `cuda.profile_stop`) are counted.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

MISSING = "ncu is not on the PATH, so DRAM bytes are not counted: it comes with NVIDIA Nsight Compute"
_BYTES = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "sector": 32.0}
_MILLISECONDS = {"ns": 1e-6, "nsecond": 1e-6, "us": 1e-3, "usecond": 1e-3, "ms": 1.0, "msecond": 1.0, "s": 1e3, "second": 1e3}
_UNITS = _BYTES | _MILLISECONDS


class NotCounted(RuntimeError):
    """ncu is missing, or may not read the counters here; the message says which."""


def count(module: str, arguments: Sequence[str], metrics: Mapping[str, str], timeout: float) -> list[dict[str, float]]:
    """Run `python -m module arguments` under ncu: for every kernel, in order, `metrics` (ncu's name -> ours) in bytes and milliseconds.

    Raises NotCounted, also after `timeout` seconds.
    """
    if shutil.which("ncu") is None:
        raise NotCounted(MISSING)
    command = ["ncu", "--csv", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off"]
    command += ["--target-processes", "application-only", "--metrics", ",".join(metrics)]
    command += [sys.executable, "-W", "ignore", "-m", module, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=Path(__file__).parents[3])
    except subprocess.TimeoutExpired:
        raise NotCounted(f"ncu did not finish within {timeout:.0f} s") from None
    return parse(done.stdout + done.stderr, metrics)


def parse(text: str, metrics: Mapping[str, str]) -> list[dict[str, float]]:
    """The kernels in what `ncu --csv` printed, a line a metric. Raises NotCounted with ncu's own words if there is no table."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if len(lines) < 2:
        said = [line for line in text.splitlines() if line.startswith("==ERROR==")] or text.strip().splitlines()[-1:]
        raise NotCounted("ncu counted nothing: " + " ".join(said or ["no output"]))
    kernels: dict[int, dict[str, float]] = {}
    for row in csv.DictReader(lines):
        if row["Metric Name"] in metrics:
            value = float(row["Metric Value"].replace(",", "")) * _UNITS[row["Metric Unit"]]
            kernels.setdefault(int(row["ID"]), dict.fromkeys(metrics.values(), 0.0))[metrics[row["Metric Name"]]] = value
    return [kernels[at] for at in sorted(kernels)]
