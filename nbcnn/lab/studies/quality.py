"""This study records the main job as users run it: training, features, classification.

`python -m nbcnn.lab.studies.quality main --data-dir DIR --scratch DIR`.

Every figure is what a command of this project printed with --json; the wall time is the whole process, imports,
compilation and disk included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nbcnn.files import numerals
from nbcnn.gpu.device import Gpu
from nbcnn.lab.measure import results
from nbcnn.train.runlog import RunFolder

ROOT = Path(__file__).parents[3]


def command(*words: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run one of the project's commands and return the line of JSON that it prints, with its wall time. Raises on failure."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *words, "--json"], cwd=ROOT, capture_output=True, text=True, env=os.environ | dict(environment or {}))
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found | {"wall_seconds": round(time.perf_counter() - start, 2), "command": "python " + " ".join(words)}


def main_job(data_dir: str, scratch: Path, seeds: list[int]) -> list[dict[str, Any]]:
    """Train with the default recipe, write the features, classify them: for every seed."""
    rows = []
    for seed in seeds:
        run, features = scratch / f"run-{seed}", scratch / f"features-{seed}"
        rows.append({"what": "train", "seed": seed} | train("--data-dir", data_dir, "--seed", str(seed), "--out", str(run)))
        rows.append({"what": "features", "seed": seed} | command("extract_features.py", str(run), "--out", str(features), "--batch", "1024"))
        rows.append({"what": "classify", "seed": seed} | command("-m", "nbcnn", "classify", str(features)))
    return rows


def baselines(data_dir: str, scratch: Path, seeds: list[int]) -> list[dict[str, Any]]:
    """Classify the features of the first seed again, beside a random encoder's and raw pixels. Needs `main_job` before it."""
    words = ("-m", "nbcnn", "classify", str(scratch / f"features-{seeds[0]}"), "--baselines", "--data-dir", data_dir)
    return [{"what": "classify with baselines", "seed": seeds[0]} | command(*words)]


def per_image(data_dir: str, scratch: Path, seeds: list[int]) -> list[dict[str, Any]]:
    """Train with the per-image recipe: a million training steps."""
    out = str(scratch / "per-image")
    return [{"what": "train per-image", "seed": 0} | train("--recipe", "per-image", "--data-dir", data_dir, "--out", out)]


AT_ONCE = 3
"""Runs that share the GPU where only what they end with counts, not how long they take."""


def precisions(data_dir: str, scratch: Path, seeds: list[int]) -> list[dict[str, Any]]:
    """Train with the default recipe in every precision of tensorcore, and in cudacore: the same run but for its rounding."""

    def of_seed(seed: int) -> list[dict[str, Any]]:
        rows = []
        for mode, precision in (("cudacore", "fp32"), ("tensorcore", "fp32"), ("tensorcore", "tf32"), ("tensorcore", "bf16")):
            run = scratch / f"{mode}-{precision}-{seed}"
            flags = ("--precision", precision, "--data-dir", data_dir, "--seed", str(seed), "--out", str(run))
            row = {"what": "train", "seed": seed, "mode": mode, "precision": precision} | train(*flags, mode=mode)
            row["test_losses"] = [epoch["test_loss"] for epoch in RunFolder(run).rows()]
            rows.append(row)
        return rows

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [row for rows in pool.map(of_seed, seeds) for row in rows]


def startup(data_dir: str, scratch: Path, seeds: list[int]) -> list[dict[str, Any]]:
    """One epoch of 4,096 images on an empty kernel cache, and again: what a first and a second start cost before the first training step."""
    rows = []
    for start in ("first", "second"):
        flags = ("--limit", "4096", "--epochs", "1", "--batch", "1024", "--data-dir", data_dir, "--out", str(scratch / f"start-{start}"))
        cache = {"NUMBA_CACHE_DIR": str(scratch / "kernels")}
        rows.append({"what": f"{start} start"} | train(*flags, mode="tensorcore", environment=cache))
    return rows


JOBS = {"main": main_job, "baselines": baselines, "per-image": per_image, "precisions": precisions, "startup": startup}


def train(*flags: str, mode: str = "cudacore", environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    return command("train.py", "--mode", mode, "--dataset", "cifar10", *flags, environment=environment)


def seeds(text: str) -> list[int]:
    """Seeds with commas between them. Raises ValueError for other text."""
    return [numerals.whole(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="+", choices=JOBS, help="what to run, in this order")
    parser.add_argument("--data-dir", required=True, help="folder with CIFAR-10")
    parser.add_argument("--seeds", type=seeds, default="0", help="comma-separated seeds (default 0)")
    parser.add_argument("--scratch", required=True, help="folder for runs and features; 10 GB")
    parser.add_argument("--results", default=None, help="folder of the results file (default: nbcnn/lab/results)")
    args = parser.parse_args()
    device = Gpu().device_name
    results.opened(device, args.results)
    for job in args.jobs:
        rows = JOBS[job](args.data_dir, Path(args.scratch), args.seeds)
        results.save(f"quality-{job}", rows, device, args.results)
        for row in rows:
            print(json.dumps({key: value for key, value in row.items() if key != "classifiers"})[:300], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
