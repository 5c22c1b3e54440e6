"""This script sets `nbcnn classify` on a CPU beside its floor: its matrix products at the rate that BLAS reaches here, and the solving of the pairs.

    python -m nbcnn.lab.measure.classify_floor FEATURES [LIMIT]

It prints the seconds of the whole command, of its stages, of the products at this machine's rate, of solving the pairs, and the ratio; the last
line is JSON. The pairs are libsvm's own work, so the floor has the seconds that they took.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.classify.features import read_features
from nbcnn.lab.measure.rung import sgemm_gflops


def flops(sizes: list[int], test: int, width: int, mirrored: bool = False) -> int:
    """Flops of a classification's products: `sizes` training samples by class, `test` others, `width` features.

    The kernel matrix of each class (half a square) with the others and with the test samples; where it is mirrored four of these products, of a
    class's own square two halves and one whole. Then the decisions: every kernel value times the coefficients of the pairs of its class.
    """
    n = sum(sizes)
    square = sum(count * count for count in sizes)
    apart = (n * n - square) // 2 + test * n
    kernels = (4 * apart + 2 * square) if mirrored else (apart + square // 2)
    return 2 * width * kernels + 2 * (n + test) * n * (len(sizes) - 1)


def measure(folder: Path, limit: int | None = None) -> dict[str, Any]:
    """One row: seconds of the whole command and of its stages, the floor, the ratio."""
    features = read_features(folder, verify=False)
    assert features.train_labels is not None
    labels = features.train_labels[:limit]
    test = len(features.test[:limit])
    rate = sgemm_gflops(4096)
    with tempfile.TemporaryDirectory() as out:
        words = [sys.executable, "-m", "nbcnn", "classify", str(folder), "--device", "cpu", "--json", "--quiet", "--out", out]
        began = time.perf_counter()
        done = subprocess.run([*words, *(["--limit", str(limit)] if limit else [])], capture_output=True, text=True, check=True)
        whole = time.perf_counter() - began
    row = json.loads(done.stdout.splitlines()[-1])["classifiers"]["encoder"]
    work = flops(np.unique(labels, return_counts=True)[1].tolist(), test, features.train.shape[1], features.train_mirrored is not None)
    products, pairs = work / rate / 1e9, row["seconds"]["fit"]
    return {
        "training": len(labels),
        "test": test,
        "features": features.train.shape[1],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processes": row["processes"],
        "sgemm_gflops": round(rate, 1),
        "whole_seconds": round(whole, 2),
        "stages": row["seconds"],
        "products_seconds": round(products, 2),
        "pairs_seconds": pairs,
        "ratio": round(whole / (products + pairs), 3),
    }


def main(argv: list[str]) -> int:
    """Print the row for people and for programs."""
    row = measure(Path(argv[0]), int(argv[1]) if len(argv) > 1 else None)
    print(f"whole command {row['whole_seconds']:.1f} s: {', '.join(f'{name} {seconds:.1f}' for name, seconds in row['stages'].items())}")
    floor = f"products at {row['sgemm_gflops']:.0f} GFLOP/s {row['products_seconds']:.1f} s, solving the pairs {row['pairs_seconds']:.1f} s"
    print(f"{floor}; ratio {row['ratio']:.2f}")
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
