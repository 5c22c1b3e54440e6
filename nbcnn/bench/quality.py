"""The main job as users run it, recorded: training, features, classification. `python -m nbcnn.bench.quality --data-dir DIR`.

Every figure is what a command of this project printed with --json; the wall time is the whole process, imports,
compilation and disk included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nbcnn.bench import results

ROOT = Path(__file__).parents[2]


def command(*words: str) -> dict[str, Any]:
    """Run one of the project's commands and return the line of JSON that it prints, with its wall time. Raises on failure."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *words, "--json"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found | {"wall_seconds": round(time.perf_counter() - start, 2), "command": "python " + " ".join(words)}


def study(data_dir: str, seeds: list[int], scratch: Path, baselines: bool, per_image: bool) -> list[dict[str, Any]]:
    """Train and classify for every seed; then, of the first, the baselines; then the per-image recipe."""
    rows = []
    for seed in seeds:
        run, features = scratch / f"run-{seed}", scratch / f"features-{seed}"
        rows.append({"what": "train", "seed": seed} | train("--data-dir", data_dir, "--seed", str(seed), "--out", str(run)))
        rows.append({"what": "features", "seed": seed} | command("extract_features.py", str(run), "--out", str(features), "--batch", "1024"))
        extra = ["--baselines", "--data-dir", data_dir] if baselines and seed == seeds[0] else []
        rows.append({"what": "classify", "seed": seed} | command("-m", "nbcnn", "classify", str(features), *extra))
    if per_image:
        out = scratch / "per-image"
        rows.append({"what": "train per-image", "seed": 0} | train("--recipe", "per-image", "--data-dir", data_dir, "--out", str(out)))
    return rows


def train(*flags: str) -> dict[str, Any]:
    return command("train.py", "--mode", "im2col", "--dataset", "cifar10", *flags)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True, help="folder with CIFAR-10")
    parser.add_argument("--seeds", default="0", help="comma-separated seeds (default 0)")
    parser.add_argument("--baselines", action="store_true", help="also classify random features and raw pixels")
    parser.add_argument("--per-image", action="store_true", help="also run the per-image recipe (minutes)")
    parser.add_argument("--section", default="quality", help="section of the results file (default quality)")
    parser.add_argument("--results", default=None, help="folder of the results file (default: nbcnn/bench/results)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = study(args.data_dir, [int(s) for s in args.seeds.split(",")], Path(folder), args.baselines, args.per_image)
    device = next(row["device"] for row in rows if "device" in row)
    results.save(args.section, rows, device, Path(args.results) if args.results else None)
    for row in rows:
        print(json.dumps({key: value for key, value in row.items() if key != "classifiers"})[:300])
    return 0


if __name__ == "__main__":
    sys.exit(main())
