"""The ladder: cpu → naive → tiled → im2col → tensorcore on this machine, the whole training step and its passes, and a chart."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nbcnn.cuda import Gpu, gpu_missing
from nbcnn.net import TENSOR_CORES
from nbcnn.ops import MODES

RUNGS = (
    ("cpu", "fp32"),
    ("naive", "fp32"),
    ("tiled", "fp32"),
    ("im2col", "fp32"),
    ("tensorcore", "fp32"),
    ("tensorcore", "tf32"),
    ("tensorcore", "bf16"),
)
CPU_BATCHES = {1: 1, 64: 64, 256: 64}
"""The CPU rung of a large batch runs 64 images: a step of 256 takes ten seconds on two cores and is no faster per image."""


def climb(batch: int, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Measure every rung that can run here, each in a process of its own. A rung that fails is said and left out."""
    for mode, precision in RUNGS:
        missing = gpu_missing() if MODES[mode, precision].place == "gpu" else None
        if mode == "tensorcore" and not missing and Gpu().capability < TENSOR_CORES:
            missing = "this GPU has no tensor cores that it can use"
        if missing:
            say(f"{mode} {precision}: left out ({missing})")
            continue
        size = CPU_BATCHES.get(batch, batch) if mode == "cpu" else batch
        say(f"{mode} {precision}, batch {size} …")
        command = [sys.executable, "-m", "nbcnn.bench.rung", mode, str(size), precision]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            say(f"{mode} {precision}: failed: {done.stderr.strip().splitlines()[-1]}")
            continue
        yield json.loads(done.stdout.strip().splitlines()[-1])


def table(rows: list[dict[str, Any]]) -> str:
    """The rungs as text: step, rate, passes, speed-ups per image over the rung before and over the CPU, memory."""
    head = (
        "mode",
        "precision",
        "batch",
        "ms/step",
        "images/s",
        "s/50,000",
        "TFLOP/s",
        "fprop",
        "dgrad",
        "wgrad",
        "rest",
        "× before",
        "× cpu",
        "GPU MiB",
        "host MiB",
    )
    lines, before, first = [head], None, None
    for row in rows:
        rate = row["images_per_second"]
        gpu = sum(row["planned_bytes"].values()) / 2**20 if row["mode"] != "cpu" else 0
        lines.append(
            (
                row["mode"],
                row["precision"],
                str(row["batch"]),
                f"{row['step_ms']['median']:.3f}",
                f"{rate:,.0f}",
                f"{row['epoch_seconds']:,.2f}",
                f"{row['tflops']:.2f}",
                *(f"{row['passes_ms'][name]['median']:.3f}" for name in ("fprop", "dgrad", "wgrad")),
                f"{row['rest_ms']:.3f}",
                f"{rate / before:.2f}" if before else "",
                f"{rate / first:.1f}" if first else "",
                f"{gpu:,.0f}" if gpu else "",
                f"{row['host_peak_bytes'] / 2**20:,.0f}",
            )
        )
        before, first = rate, first or rate
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def chart(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Milliseconds per image of every rung, stacked by pass, on a logarithmic axis of their own panels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), width_ratios=(1, 1.6), layout="constrained")
    names = [row["mode"] + (f" {row['precision']}" if row["mode"] == "tensorcore" else "") for row in rows]
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
