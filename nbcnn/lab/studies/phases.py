"""This study trains the autoencoder in every phase of the climb: serial loops, then every mode, plain and fused; a table and a chart.

A phase trains the same images in the same order with the same first weights, for as many epochs as a whole training has, and no longer than so many
seconds: of the slow ones the seconds of an epoch are those of the part that was trained, and the total is that many epochs of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from nbcnn.gpu.device import Gpu, gpu_missing
from nbcnn.lab.measure import results
from nbcnn.lab.measure.phase import SERIAL, Spec
from nbcnn.lab.measure.roofline import aligned
from nbcnn.lab.measure.rung import DEPTH, EPOCH_IMAGES, TERMS, form_of
from nbcnn.lab.studies.ladder import RUNGS, of_climb
from nbcnn.modes import MODES
from nbcnn.plan.bounds import parity_bound

PHASES = ((SERIAL, "fp32", False), *(rung for rung in RUNGS if rung[0] != "tensorcore" or rung[2]))
"""(mode, precision, fused): what fusing is worth on tensor cores `nbcnn ladder` says."""
BATCH, EPOCHS, SECONDS = 64, 15, 5.0
"""The batch and the epochs are the default recipe's; a phase trains no longer than so many seconds."""


def climb(say: Callable[[str], None], batch: int = BATCH, images: int = EPOCH_IMAGES, seconds: float = SECONDS) -> Iterator[dict[str, Any]]:
    """Train every phase that can run here, each in a process of its own, and what it is worth beside the phase before and the first.

    A phase that cannot run, fails, or has another loss than NumPy's is said and left out.
    """
    first = before = numpys = None
    no_gpu = gpu_missing()
    if no_gpu:
        say(f"the GPU's phases are left out: {no_gpu}")
    for mode, precision, fused in PHASES:
        if mode != SERIAL and MODES[mode, precision].device == "gpu" and no_gpu:
            continue
        if mode == "tensorcore" and precision not in of_climb(Gpu().capability):
            continue
        name = f"{mode} {precision} {'fused' if fused else 'plain'}"
        # A batch of serial loops would take a minute, and is no faster per image.
        spec = Spec(mode, precision, fused, 1 if mode == SERIAL else batch, images, EPOCHS, seconds)
        done = subprocess.run([sys.executable, "-m", "nbcnn.lab.measure.phase", json.dumps(asdict(spec))], capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            say(f"{name}: failed: {said[-1]}")
            continue
        row = json.loads(done.stdout.strip().splitlines()[-1])
        numpys = row["opening_loss"] if mode == "cpu" else numpys
        if numpys and not abs(row["opening_loss"] - numpys) <= DEPTH * parity_bound(TERMS, precision) * numpys:
            say(f"{name}: left out: its first steps have a mean loss of {row['opening_loss']:.6f}, NumPy's have {numpys:.6f}")
            continue
        first = first or row
        row |= {
            "epochs": EPOCHS,
            "total_seconds": EPOCHS * row["epoch_seconds"],
            "over_before": before["epoch_seconds"] / row["epoch_seconds"] if before else None,
            "over_first": first["epoch_seconds"] / row["epoch_seconds"] if before else None,
            "cpu_cores": results.cores(),
        }
        say(f"{name}: {row['images']:,} images in {row['seconds']:.1f} s, ready after {row['ready_seconds']:.1f} s")
        before = row
        yield row


def name_of(row: dict[str, Any]) -> str:
    """A phase in few words."""
    mode = {SERIAL: "serial loops", "cpu": "cpu (NumPy)"}.get(row["mode"], row["mode"])
    both = any(rung == (row["mode"], row["precision"], not row["fused"]) for rung in PHASES)
    return " ".join([mode, *([row["precision"]] if row["mode"] == "tensorcore" else []), *([form_of(row)] if both else [])])


HEAD = (
    "phase",
    "images trained",
    "s per epoch",
    "× before",
    "× first",
    "15 epochs",
    "first loss",
    "GPU MiB",
    "host MiB",
    "algebra of the convolutions",
)


def duration(seconds: float) -> str:
    """2.3 s, 4.5 min, 3.2 h, 6.1 days."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} s"


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A phase under `HEAD`; GPU memory is what was planned."""
    on_gpu = row["mode"] not in (SERIAL, "cpu")
    return (
        *(name_of(row), f"{row['images']:,}", f"{row['epoch_seconds']:,.3g}" if row["epoch_seconds"] < 100 else f"{row['epoch_seconds']:,.0f}"),
        *("" if row[name] is None else f"{row[name]:,.1f}" for name in ("over_before", "over_first")),
        *(duration(row["total_seconds"]), "" if row["opening_loss"] is None else f"{row['opening_loss']:.5f}"),
        *(f"{sum(row['planned_bytes'].values()) / 2**20:,.0f}" if on_gpu else "", f"{row['host_peak_bytes'] / 2**20:,.0f}", row["algebra"]),
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The phases as text."""
    text = aligned([HEAD, *map(cells, rows)], (0,))
    text.append(f"an epoch is {EPOCH_IMAGES:,} images; first loss: mean of the first training steps, which all phases but the serial loops share")
    return "\n".join(text)
