"""`python -m nbcnn bench`: training steps and convolutions of this machine, beside PyTorch and cuDNN in the same run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nbcnn.cli.errors import OK, RUNTIME, guarded
from nbcnn.cli.flags import MODES, PRECISIONS, Parser, compare_flag, count, flag, one_of, results_flags, some_of

EXAMPLES = (
    "python -m nbcnn bench step --batch 256",
    "python -m nbcnn bench step --mode tensorcore --precision bf16 --batch 1024 --forms compile,compile-max",
    "python -m nbcnn bench convs --batch 1024 --layers conv1,conv5",
    "python -m nbcnn bench convs --mode tensorcore --precision tf32 --batch 1024 --fused",
    "python -m nbcnn bench epoch --mode tensorcore --batch 1024",
    "python -m nbcnn bench step --batch 64 --peer none --json",
    "python -m nbcnn bench step --batch 1024 --compare nbcnn/bench/results/nvidia-h200.json",
)
LAYERS = tuple(f"conv{number}" for number in range(1, 6))
FORMS = ("eager", "graph", "compile", "compile-max")


def parser() -> Parser:
    made = Parser("python -m nbcnn bench", "Verify, then time; PyTorch beside it in the same run if it is installed.", EXAMPLES, "step|convs|epoch")
    what = "the whole training step, every layer and pass, or a real epoch of 50,000 images with shuffling and the last batch"
    made.add_argument("what", metavar="step|convs|epoch", type=one_of("step", "convs", "epoch"), help=what)
    group = made.add_argument_group("kernels")
    flag(group, "--mode", one_of(*MODES[1:]), "whose kernels", "im2col")
    flag(group, "--precision", one_of(*PRECISIONS), "what multiplications round to, ours and the peer's", "bf16 for tensorcore, else fp32")
    flag(group, "--engine", one_of("auto", "wgmma", "mma"), "tensorcore's kernels", "auto")
    flag(group, "--fused", bool, "convs: the fused ops of the training plan, with what they are fused with", "off")
    flag(group, "--batch", count(1), "images", 256, "images")
    flag(group, "--layers", some_of(*LAYERS), "convs: only these layers", ",".join(LAYERS))
    flag(group, "--peer", one_of("torch", "none"), "torch: PyTorch beside it in the same run, and cuDNN", "torch")
    flag(group, "--forms", some_of(*FORMS), "step: PyTorch's forms; compile-max is torch.compile's max-autotune, minutes", "eager,graph,compile")
    group = made.add_argument_group("output")
    results_flags(group)
    compare_flag(group)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 0, or 1 if --compare finds something slower. Exit 4 without a GPU."""
    flags = parser().parse_args(argv)
    return guarded(lambda: _measure(flags), without_gpu="python -m nbcnn ladder, which times the NumPy path as well")


def _measure(flags: SimpleNamespace) -> int:
    from nbcnn.bench import peers, regressions, results
    from nbcnn.cuda import Gpu

    device = Gpu().device_name
    before = regressions.baseline(flags, _section(flags), device)
    if flags.peer != "none" and not peers.available():
        print(peers.MISSING, file=sys.stderr)
        flags.peer = "none"
    rows, lines = {"step": _step, "convs": _convs, "epoch": _epoch}[flags.what](flags)
    if flags.save:
        results.save(_section(flags), rows, device, Path(flags.results) if flags.results else None)
    print(json.dumps(rows) if flags.json else "\n".join(lines))
    return RUNTIME if before and before.regressed(rows, flags) else OK


def _section(flags: SimpleNamespace) -> str:
    """The section of the results file: what, mode unless it is im2col, precision where the mode has several, batch."""
    mode, precision = flags.mode or "im2col", flags.precision
    named = [] if mode == "im2col" else [mode, precision or "bf16"] if mode == "tensorcore" else [mode]
    parts = [flags.what, *(["fused"] if flags.fused else []), *named]
    return "-".join([*parts, *([flags.engine] if flags.engine else []), str(flags.batch or 256)])


def _epoch(flags: SimpleNamespace) -> tuple[list[dict[str, Any]], list[str]]:
    from nbcnn.bench import rung

    row = rung.measure_epoch(flags.mode or "im2col", flags.batch or 256, flags.precision, flags.engine or "auto")
    return [row], [
        f"{row['mode']} {row['precision']}, batch {row['batch']}: {row['images']:,} images, {row['steps']} training steps",
        f"median {row['seconds']['median']:.4f} s of {row['seconds']['count']} epochs ({row['seconds']['p5']:.4f} … {row['seconds']['p95']:.4f})",
    ]


def _step(flags: SimpleNamespace) -> tuple[list[dict[str, Any]], list[str]]:
    from nbcnn.bench import peers, rung

    batch = flags.batch or 256
    ours = rung.measure(flags.mode or "im2col", batch, flags.precision, flags.engine or "auto")
    rows: list[dict[str, Any]] = [{"form": f"nbcnn {ours['mode']}", **ours, "peak_bytes": sum(ours["planned_bytes"].values())}]
    if flags.peer != "none":
        forms = flags.forms or FORMS[:3]
        rows += [{**row, "form": f"PyTorch {row['form']}"} for row in peers.training_step(batch, ours["precision"], forms)]
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
    lines = [f"{'layer':8}{'pass':8}{'runs as':>9}{'µs':>9}{'TFLOP/s':>9}{'GB/s':>8}{'cuDNN µs':>10}{'ours is':>9}"]
    what = {"precision": flags.precision, "engine": flags.engine or "auto", "fused": bool(flags.fused)}
    for row in convs.passes(flags.mode or "im2col", flags.batch or 256, flags.layers or LAYERS, flags.peer != "none", **what):
        rows.append(row)
        peer = f"{row['cudnn_ms']['median'] * 1e3:10.1f}{row['ratio']:8.2f}×" if row["ratio"] else ""
        rates = f"{row['tflops']:9.1f}{row['gbytes_per_second']:8.0f}"
        lines.append(f"{row['layer']:8}{row['path']:8}{row['runs_as']:>9}{row['ms']['median'] * 1e3:9.1f}{rates}{peer}")
    return rows, lines
