"""This study measures training on several GPUs: weak and strong scaling, the all-reduce alone, and PyTorch's DistributedDataParallel.

Each number of ranks is a set of processes of its own (`scaling_rank`), one set after another; PyTorch has its own, too. Weak scaling
keeps the images per GPU, strong scaling those of the whole batch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

PRECISIONS = ("bf16", "tf32", "fp32")
ON_GPU = {"checked": 1024, "steps": 50, "epoch": 16, "warm": 1.5}
ON_CPU = {"checked": 4, "steps": 2, "epoch": 4, "warm": 0.0}
"""The sizes of the study: images in a batch of the parity check, and its training steps; steps in an epoch that is timed; seconds to warm up."""
DRIFT = 2.0
"""How many times as far ranks may drift from one process as that does from itself with its weight gradients summed in other parts."""
COMPILED = "bf16"
"""The precision in which PyTorch is timed compiled as well: compiling takes it most of a minute."""


def measure(
    ranks: Sequence[int],
    say: Callable[[str], None],
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
    *,
    mode: str = "tensorcore",
    precisions: Sequence[str] = PRECISIONS,
    each: int = 1024,
    seconds: float = 1.0,
    peer: bool = True,
) -> list[dict[str, Any]]:
    """Rows of every number of `ranks`, with what they are worth (`judge`); `each` images per GPU. All of ours come first, then PyTorch's.

    keep: gets all rows so far whenever a set of processes has ended, also if it failed or is told to end, so that nothing measured is lost.
    Raises RuntimeError if a rank fails; it has said why on stderr.
    """
    amount = ON_CPU if mode == "cpu" else ON_GPU
    forms = [("eager", precision) for precision in precisions] + [("compile", COMPILED)] * (COMPILED in precisions)
    rows: list[dict[str, Any]] = []
    begun = time.perf_counter()
    for whose in ("nbcnn", "PyTorch") if peer else ("nbcnn",):
        for size in ranks:
            say(f"{time.perf_counter() - begun:4.0f} s  {whose}, {size} rank{'s' if size > 1 else ''} …")
            reduced = next((row["bytes"] for row in rows if row["what"] == "all-reduce" and row["ranks"] == size), 0)
            spec = amount | {"mode": mode, "precisions": list(precisions), "each": each, "seconds": seconds}
            spec |= {"forms": forms, "bytes": reduced} if whose == "PyTorch" else {}
            try:
                for row in _rows(size, spec):
                    rows.append(row)
                    say(f"{time.perf_counter() - begun:4.0f} s  {lines(judge(rows))[-1]}")
            finally:
                if rows:
                    keep(rows)
    return rows


def _rows(size: int, spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows that `size` ranks print, as they come."""
    rank = [sys.executable, "-m", "nbcnn.lab.studies.scaling_rank", json.dumps(spec)]
    command = [sys.executable, "-m", "nbcnn", "launch", "--nproc", str(size), *rank]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield from map(json.loads, process.stdout)
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        raise RuntimeError(f"{size} ranks ended with exit code {process.returncode}; what they said is above")


def agrees(parity: dict[str, Any]) -> bool:
    """True if a row of parity keeps its bound, and the weights did not drift further than DRIFT times what other sums make of them."""
    near = parity["drift"] <= DRIFT * parity["drift_of_splits"] or not parity["drift_of_splits"]
    return bool(parity["gradient_error"] <= parity["bound"] and near)


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
            weights = f"weights after {row['steps']} steps by {row['drift']:.1e}, with other sums in one process by {row['drift_of_splits']:.1e}"
            verdict = "ok" if row["ok"] else f"TOO FAR: more than the bound, or than {DRIFT:g} times the other sums"
            made.append(f"{head}{row['batch']:7}  {gradients}; {weights}; {verdict}")
    return made
