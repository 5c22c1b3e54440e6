"""Training on several GPUs: weak and strong scaling, the all-reduce alone, and PyTorch's DistributedDataParallel in the same run.

Each number of ranks is a set of processes of its own (`scaling_rank`), one set after another. Weak scaling keeps the images per GPU,
strong scaling those of the whole batch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

PRECISIONS = ("bf16", "tf32", "fp32")
ON_GPU = {"checked": 256, "steps": 50, "epoch": 16, "warm": 1.5}
ON_CPU = {"checked": 4, "steps": 2, "epoch": 5, "warm": 0.0}
"""How much: images in a batch of the parity check, and its training steps; steps in an epoch that is timed; seconds to warm up."""
COMPILED = "bf16"
"""The precision in which PyTorch is timed compiled as well: compiling takes it most of a minute."""


def measure(
    ranks: Sequence[int],
    say: Callable[[str], None],
    *,
    mode: str = "tensorcore",
    precisions: Sequence[str] = PRECISIONS,
    each: int = 1024,
    seconds: float = 1.0,
    peer: bool = True,
) -> list[dict[str, Any]]:
    """Rows of every number of `ranks`, with what they are worth (`judge`); `each` images per GPU.

    Raises RuntimeError with the last words of a rank that failed.
    """
    amount = ON_CPU if mode == "cpu" else ON_GPU
    forms = [("eager", precision) for precision in precisions] + [("compile", COMPILED)] * (COMPILED in precisions)
    rows: list[dict[str, Any]] = []
    for size in ranks:
        say(f"{size} rank{'s' if size > 1 else ''} …")
        spec = {"mode": mode, "precisions": list(precisions), "each": each, "seconds": seconds, "peer": forms if peer else []}
        rank = [sys.executable, "-m", "nbcnn.bench.scaling_rank", json.dumps(spec | amount)]
        command = [sys.executable, "-m", "nbcnn", "launch", "--nproc", str(size), *rank]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{size} ranks ended with exit code {done.returncode}: " + " | ".join(done.stderr.strip().splitlines()[-8:]))
        rows += json.loads(done.stdout.splitlines()[-1])
    return judge(rows)


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows, those of training steps with `efficiency`: the rate per rank as a part of that of one rank, form and precision alike."""
    alone = {(row["form"], row["precision"]): row["images_per_second"] for row in rows if row["what"] == "weak" and row["ranks"] == 1}
    for row in rows:
        one = alone.get((row["form"], row.get("precision"))) if "step_ms" in row else None
        if one is not None:
            row["efficiency"] = row["images_per_second"] / row["ranks"] / one
    return rows


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows as a table for people."""
    made = [f"{'':12}{'form':18}{'precision':>10}{'ranks':>6}{'batch':>7}{'ms':>10}{'images/s':>12}{'efficiency':>11}"]
    for row in rows:
        head = f"{row['what']:12}{row['form']:18}{row.get('precision', ''):>10}{row['ranks']:6}"
        if "step_ms" in row:
            share = f"{row['efficiency']:11.1%}" if "efficiency" in row else ""
            made.append(f"{head}{row['batch']:7}{row['step_ms']['median']:10.3f}{row['images_per_second']:12,.0f}{share}")
        elif "ms" in row:
            made.append(f"{head}       {row['ms']['median']:10.4f}  {row['bytes']:,} bytes")
        else:
            gradients = f"gradients off by {row['gradient_error']:.1e} (bound {row['bound']:.1e})"
            weights = f"weights after {row['steps']} steps {row['drift']:.1e}, with other sums in one process {row['drift_of_splits']:.1e}"
            made.append(f"{head}{row['batch']:7}  {gradients}; {weights}")
    return made
