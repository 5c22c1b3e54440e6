"""`python -m nbcnn bench`: training steps and convolutions of this machine, beside PyTorch and cuDNN in the same run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nbcnn.cli.errors import guarded
from nbcnn.cli.flags import MODES, Parser, count, flag, one_of, results_flags, some_of

EXAMPLES = (
    "python -m nbcnn bench step --batch 256",
    "python -m nbcnn bench convs --batch 1024 --layers conv1,conv5",
    "python -m nbcnn bench step --batch 64 --peer none --json",
)
LAYERS = tuple(f"conv{number}" for number in range(1, 6))


def parser() -> Parser:
    made = Parser("python -m nbcnn bench", "Verify, then time; PyTorch beside it in the same run if it is installed.", EXAMPLES, "step|convs")
    made.add_argument("what", metavar="step|convs", type=one_of("step", "convs"), help="the whole training step, or every layer and pass")
    group = made.add_argument_group("kernels")
    flag(group, "--mode", one_of(*MODES[1:]), "whose kernels", "im2col")
    flag(group, "--batch", count(1), "images", 256, "images")
    flag(group, "--layers", some_of(*LAYERS), "convs: only these layers", ",".join(LAYERS))
    flag(group, "--peer", one_of("torch", "none"), "torch: PyTorch eager, CUDA graph and torch.compile, and cuDNN", "torch")
    group = made.add_argument_group("output")
    results_flags(group)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 0. Exit 4 without a GPU."""
    flags = parser().parse_args(argv)
    return guarded(lambda: _measure(flags), without_gpu="python -m nbcnn ladder, which times the NumPy path as well")


def _measure(flags: SimpleNamespace) -> int:
    from nbcnn.bench import peers, results
    from nbcnn.cuda import Gpu

    device = Gpu().device_name
    if flags.peer != "none" and not peers.available():
        print(peers.MISSING, file=sys.stderr)
        flags.peer = "none"
    rows, lines = {"step": _step, "convs": _convs}[flags.what](flags)
    if flags.save:
        results.save(f"{flags.what}-{flags.batch or 256}", rows, device, Path(flags.results) if flags.results else None)
    print(json.dumps(rows) if flags.json else "\n".join(lines))
    return 0


def _step(flags: SimpleNamespace) -> tuple[list[dict[str, Any]], list[str]]:
    from nbcnn.bench import peers, rung

    batch = flags.batch or 256
    ours = rung.measure(flags.mode or "im2col", batch)
    rows: list[dict[str, Any]] = [{"form": f"nbcnn {ours['mode']}", **ours, "peak_bytes": sum(ours["planned_bytes"].values())}]
    if flags.peer != "none":
        rows += [{**row, "form": f"PyTorch {row['form']}"} for row in peers.training_step(batch)]
    lines = [f"{'':18}{'ms/step':>10}{'images/s':>12}{'MiB':>8}{'ours is':>10}"]
    for row in rows:
        ratio = row["step_ms"]["median"] / ours["step_ms"]["median"]
        row["ratio"] = ratio
        lines.append(
            f"{row['form']:18}{row['step_ms']['median']:10.3f}{row['images_per_second']:12,.0f}{row['peak_bytes'] / 2**20:8,.0f}{ratio:9.2f}×"
        )
    return rows, lines


def _convs(flags: SimpleNamespace) -> tuple[list[dict[str, Any]], list[str]]:
    from nbcnn.bench import convs

    rows = []
    lines = [f"{'layer':8}{'pass':8}{'µs':>9}{'TFLOP/s':>9}{'GB/s':>8}{'cuDNN µs':>10}{'ours is':>9}"]
    for row in convs.passes(flags.mode or "im2col", flags.batch or 256, flags.layers or LAYERS, flags.peer != "none"):
        rows.append(row)
        peer = f"{row['cudnn_ms']['median'] * 1e3:10.1f}{row['ratio']:8.2f}×" if row["ratio"] else ""
        lines.append(f"{row['layer']:8}{row['path']:8}{row['ms']['median'] * 1e3:9.1f}{row['tflops']:9.1f}{row['gbytes_per_second']:8.0f}{peer}")
    return rows, lines
