"""This study is the ladder: cpu → naive → tiled → im2col → cudacore → tensorcore on this machine: training steps, passes, a chart.

Each rung as a part of its peak: of the datasheet's for what it multiplies with (CUDA cores; tensor cores in tf32 or bf16, or a sixth of
bf16 for fp32, which takes six products), and on the CPU of a large matrix product by BLAS. Flops are those of the direct convolutions.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nbcnn.gpu.device import Gpu, gpu_missing
from nbcnn.lab.measure import results
from nbcnn.lab.measure.roofline import aligned
from nbcnn.lab.measure.rung import form_of, fuses
from nbcnn.modes import MODES
from nbcnn.plan import names
from nbcnn.run.peaks import Ceilings, peaks_of
from nbcnn.run.rows import on_tensor_cores

RUNGS = tuple(
    (mode, precision, fused)
    for mode, precisions in names.MODES.items()
    for precision in reversed(precisions)
    for fused in ((False, True) if fuses(MODES[mode, precision]) else (False,))
)
"""Modes in their order, with their precisions; plain, and fused where the mode has fused convolutions."""
CPU_BATCHES = {1: 1, 64: 64, 256: 64}
"""The CPU rung of a large batch runs 64 images: a step of 256 takes ten seconds on two cores and is no faster per image."""


def of_climb(capability: tuple[int, int]) -> list[str]:
    """The precisions of tensor cores that are a climb's on such a GPU: fp16 is for those that have no other."""
    there = on_tensor_cores(capability)
    return [precision for precision in there if precision != "fp16"] or there


def climb(batch: int, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Measure every rung that can run here, each in a process of its own; and what it is worth beside its peak, the rung before and the CPU.

    A rung that cannot run, or fails, is said and left out.
    """
    before: dict[str, Any] | None = None
    first: dict[str, Any] | None = None
    no_gpu = gpu_missing()
    ceilings = None if no_gpu else peaks_of(Gpu())
    if no_gpu:
        say(f"the GPU's modes are left out: {no_gpu}")
    for mode, precision, fused in RUNGS:
        form = "fused" if fused else "plain"
        if MODES[mode, precision].device == "gpu" and no_gpu:
            continue
        if mode == "tensorcore" and precision not in (found := of_climb(Gpu().capability)):
            if not found:
                say(f"{mode} {precision} {form}: left out (this GPU has no tensor cores that it can use)")
            continue
        size = CPU_BATCHES.get(batch, batch) if mode == "cpu" else batch
        say(f"{mode} {precision} {form}, batch {size} …")
        command = [sys.executable, "-m", "nbcnn.lab.measure.rung", mode, str(size), precision, form]
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            say(f"{mode} {precision} {form}: failed: {said[-1]}")
            continue
        row = json.loads(done.stdout.strip().splitlines()[-1])
        say(f"{mode} {precision} {form}: {row['images_per_second']:,.0f} images/s, measured in {time.perf_counter() - start:.1f} s")
        first = row if mode == "cpu" else first
        row |= worth(row, before, first, ceilings)
        before = row
        yield row


def worth(row: dict[str, Any], before: dict[str, Any] | None, first: dict[str, Any] | None, ceilings: Ceilings | None) -> dict[str, Any]:
    """The ratios of a rung to others; None where there is nothing to compare with. `first` is the CPU's rung."""
    peak = peak_tflops(row, ceilings)

    def over(other: dict[str, Any] | None) -> float | None:
        return row["images_per_second"] / other["images_per_second"] if other and other is not row else None

    return {
        "peak_tflops": peak,
        "percent_of_peak": 100 * row["tflops"] / peak if peak else None,
        "over_before": over(before),
        "over_cpu": over(first),
        "cpu_cores": results.cores(),
    }


def peak_tflops(row: dict[str, Any], ceilings: Ceilings | None) -> float | None:
    """TFLOP/s that the rung could reach at most; None for a GPU whose peaks are not known."""
    if row["mode"] == "cpu":
        return float(row["sgemm_gflops"] / 1e3)
    if ceilings is None:
        return None
    kind = "fp32 split" if (row["mode"], row["precision"]) == ("tensorcore", "fp32") else row["precision"]
    return ceilings.flops[kind] / 1e12


HEAD = (
    *("mode", "precision", "form", "batch", "ms/step", "images/s", "s/50,000", "TFLOP/s", "% of peak", "fprop", "dgrad", "wgrad", "rest"),
    *("× before", "× cpu", "GPU MiB", "host MiB", "algebra of the convolutions"),
)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One rung under `HEAD`; GPU memory is what was planned."""
    gpu = sum(row["planned_bytes"].values()) / 2**20 if row["mode"] != "cpu" else 0

    def shown(name: str, form: str) -> str:
        return f"{row[name]:{form}}" if row.get(name) is not None else ""

    return (
        *(row["mode"], row["precision"], form_of(row), str(row["batch"]), f"{row['step_ms']['median']:.3f}", f"{row['images_per_second']:,.0f}"),
        *(f"{row['epoch_seconds']:,.2f}", f"{row['tflops']:.2f}", shown("percent_of_peak", ".1f")),
        *(f"{row['passes_ms'][name]['median']:.3f}" for name in ("fprop", "dgrad", "wgrad")),
        *(f"{row['rest_ms']:.3f}", shown("over_before", ".2f"), shown("over_cpu", ",.1f")),
        *(f"{gpu:,.0f}" if gpu else "", f"{row['host_peak_bytes'] / 2**20:,.0f}", row.get("algebra", "")),
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The rungs as text: step, rate, part of the peak, passes, speed-ups per image, memory; and which CPU it was."""
    text = aligned([HEAD, *(cells(row) for row in rows)], ())
    text.append(
        "milliseconds; passes are the convolutions alone; % of peak: of the datasheet's, on the CPU of a large product by BLAS; GPU memory as planned"
    )
    name = results.cpu_name()
    text.append(f"cpu: {rows[0].get('cpu_cores', results.cores())} cores{f' of {name}' if name else ''}")
    return "\n".join(text)


def chart(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Milliseconds per image of every rung, stacked by pass, on a logarithmic axis of their own panels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 1.2 + 0.34 * len(rows)), width_ratios=(1, 1.6), layout="constrained")
    names = [" ".join(filter(None, (row["mode"], row["precision"] if row["mode"] == "tensorcore" else "", form_of(row)))) for row in rows]
    rates = [row["images_per_second"] for row in rows]
    axes[0].barh(names, rates, color="#4063d8")
    axes[0].set_xscale("log")
    axes[0].set_xlabel("training images per second")
    axes[0].set_xlim(right=max(rates) * 6)
    for at, rate in enumerate(rates):
        axes[0].text(rate * 1.1, at, f"{rate:,.0f}", va="center")
    axes[0].invert_yaxis()
    left = [0.0] * len(rows)
    for name, colour in (("fprop", "#389826"), ("dgrad", "#cb3c33"), ("wgrad", "#9558b2"), ("rest", "#999999")):
        values = [max(0.0, row["rest_ms"] if name == "rest" else row["passes_ms"][name]["median"]) for row in rows]
        shares = [100 * value / row["step_ms"]["median"] for value, row in zip(values, rows, strict=True)]
        axes[1].barh(names, shares, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes[1].invert_yaxis()
    axes[1].set_xlabel("share of the training step, %")
    axes[1].legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
