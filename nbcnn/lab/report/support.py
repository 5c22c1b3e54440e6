"""The tables of docs/support.md: which GPUs, precisions and engines run, are compiled for, or neither, from the program and the results files."""

from __future__ import annotations

import re

from nbcnn.lab.measure import results
from nbcnn.lab.measure.kernels import capability_of
from nbcnn.lab.measure.occupancy import LIMITS
from nbcnn.lab.report.tables import kept, markdown, section
from nbcnn.modes import ENGINES, MODES, Row
from nbcnn.plan.names import ARCHITECTURES, REPORTED, TENSOR_CORES
from nbcnn.run.peaks import engine_of
from nbcnn.run.rows import fastest, on_tensor_cores

GPUS = {
    "75": "T4, RTX 20, Quadro RTX",
    "80": "A100, A30",
    "86": "A10, A40, A6000, RTX 30",
    "87": "Jetson Orin",
    "89": "L4, L40S, RTX 40",
    "90a": "H100, H200, GH200",
    "100": "B200, GB200",
    "103": "B300, GB300",
    "110": "Jetson Thor",
    "120": "RTX 50, RTX PRO",
    "121": "GB10",
}
"""By architecture, GPUs of that compute capability (developer.nvidia.com/cuda-gpus)."""
ALIKE = {"87": "86", "103": "100", "110": "100", "121": "120"}
"""Architectures for which not every kernel is compiled in `.ci/full`, and one with the same instructions for which it is."""
_CAPABILITY = re.compile(r"^(.*) \(compute capability (\d+)\.(\d+)\)$")


def gpu_of(device: str) -> tuple[str, tuple[int, int]] | None:
    """The name and the compute capability of a results file's device; None for a CPU."""
    match = _CAPABILITY.match(device)
    return (match[1], (int(match[2]), int(match[3]))) if match else None


def measured_on() -> dict[tuple[int, int], list[str]]:
    """The GPUs of the results files, by compute capability."""
    found = dict[tuple[int, int], list[str]]()
    for path in sorted(results.RESULTS.glob("*.json")):
        if gpu := gpu_of(kept(path.name)["device"]):
            found.setdefault(gpu[1], []).append(gpu[0])
    return found


def gpus() -> str:
    """What mode auto takes on every architecture, and how it is known that it works."""
    run, lines = measured_on(), list[tuple[str, ...]]()
    for arch in ARCHITECTURES:
        capability = capability_of(arch)
        mode, own = fastest(capability)
        precisions = ", ".join(on_tensor_cores(capability) or [own])
        engines = ", ".join(dict.fromkeys(engine for engine in (engine_of(capability), "mma" if mode == "tensorcore" else "") if engine))
        if capability in run:
            known = f"run on {', '.join(run[capability])}"
        elif arch in REPORTED:
            known = "compiled, not run"
        else:
            known = f"one kernel compiled; instructions of {ALIKE[arch]}"
        shared = f"{LIMITS[arch].block_kib}"
        version = ".".join(map(str, capability))
        lines.append((version, GPUS[arch], mode, precisions, engines, known, shared, f"{LIMITS[arch].warps}"))
    head = ("compute capability", "GPUs", "`--mode auto`", "precisions", "engines", "how it is known", "KiB per block", "warps per SM")
    return markdown(head, lines, 6) + "\n"


def _timed(mode: str, precision: str, engine: str) -> list[str]:
    """What a kept section of a results file has of a mode, its precision and an engine ("" for a mode without)."""
    found = list[str]()
    for path in sorted(results.RESULTS.glob("*.json")):
        for name, kept_section in kept(path.name)["sections"].items():
            parts = name.split("-")
            if engine == "mma" and "mma" not in parts:
                continue
            if engine != "mma" and name.startswith("ladder"):
                rows = [row for row in kept_section["rows"] if (row.get("mode"), row.get("precision")) == (mode, precision)]
                found += ["whole steps"] if rows else []
            elif mode in parts and (precision in parts or mode != "tensorcore") and ("mma" in parts) == (engine == "mma"):
                found.append({"convs": "convolutions", "step": "whole steps", "epoch": "whole steps"}.get(parts[0], ""))
    return sorted({what for what in found if what})


def modes() -> str:
    """Every mode, precision and engine: what it needs, and what of it is timed in the results files."""
    lines = list[tuple[str, ...]]()
    for (mode, precision), row in MODES.items():
        for engine in _engines(row):
            needs = max(ENGINES[engine], TENSOR_CORES[precision]) if engine else (0, 0)
            gpu = "no GPU" if row.device == "host" else "compute capability 7.5" if not engine else f"compute capability {needs[0]}.{needs[1]}"
            gpu += " and no other" if engine == "wgmma" else ""
            lines.append((mode, precision, engine, gpu, ", ".join(_timed(mode, precision, engine)) or "parity alone"))
    return markdown(("mode", "precision", "engine", "needs", "timed on the GPU or CPU of the results"), lines, 5) + "\n"


def _engines(row: Row) -> list[str]:
    return [name for name in ENGINES if name in dict(row.fallbacks)] or [""]


def suite() -> str:
    """How the GPU suite ended on each GPU whose results file has it, a row each."""
    lines = list[tuple[str, ...]]()
    for path in sorted(results.RESULTS.glob("*.json")):
        if "suite" in kept(path.name)["sections"]:
            (row,), environment = section(path.name, "suite")
            gpu = gpu_of(environment["device"])
            skipped = [
                f"{count:,}: {reason.replace('|', '/')}" for reason, count in sorted(row["skipped"].items(), key=lambda item: (-item[1], item[0]))
            ]
            origin = (gpu[0] if gpu else environment["device"], environment["date"], environment["revision"] or "unknown", environment["python"])
            ended = (", ".join(row["failed"]) or "none", "; ".join(skipped) or "none", f"{row['passed']:,}", f"{row['seconds']:.0f}")
            lines.append((*origin, *ended))
    if not lines:
        return "No results file has the section `suite` yet.\n"
    return markdown(("GPU", "date", "revision", "Python", "failed", "skipped", "passed", "seconds"), lines, 6) + "\n"


TABLES = {"support_gpus": gpus, "support_modes": modes, "support_suite": suite}
