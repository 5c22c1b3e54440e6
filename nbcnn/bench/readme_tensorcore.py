"""The README's tables of mode tensorcore: whole steps, layers, the two engines, a real epoch, what precision costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from nbcnn.bench.tables import GPU, footer, markdown, measured, section
from nbcnn.plots import write_png

STEPS = (("bf16", 1024), ("bf16", 256), ("bf16", 64), ("bf16", 1), ("tf32", 1024), ("fp32", 1024))
PRECISIONS = ("bf16", "tf32", "fp32")
_NAMES = {"eager": "eager", "graph": "CUDA graph", "compile": "torch.compile", "compile-max": "max-autotune"}


def step() -> str:
    """The whole training step beside the fastest PyTorch of the same precision."""
    rows: list[tuple[str, ...]] = []
    for precision, batch in STEPS:
        if not measured(GPU, f"step-tensorcore-{precision}-{batch}"):
            continue
        (ours, *peers), environment = section(GPU, f"step-tensorcore-{precision}-{batch}")
        best = min(peers, key=lambda peer: peer["step_ms"]["median"])
        mine, its = ours["step_ms"]["median"], best["step_ms"]["median"]
        planned = sum(v for k, v in ours["planned_bytes"].items() if k not in ("data set", "tables"))
        name = _NAMES[best["form"].removeprefix("PyTorch ")]
        figures = (f"**{mine:.3f}**", f"{ours['images_per_second']:,.0f}", f"{its:.3f} ({name})", f"**{its / mine:.2f}×**")
        rows.append((precision, str(batch), *figures, f"{planned / 2**20:,.0f} / {best['peak_bytes'] / 2**20:,.0f}"))
    head = ("precision", "batch", "nbcnn ms", "images/s", "fastest PyTorch, ms", "ours is", "MiB: nbcnn / it")
    return markdown(head, rows) + footer(environment)


def layers() -> str:
    """Every layer and pass at batch 1024, as the fused plan runs it, against cuDNN's convolution alone."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    known = [precision for precision in PRECISIONS if measured(GPU, f"convs-fused-tensorcore-{precision}-1024")]
    for precision in known:
        rows, environment = section(GPU, f"convs-fused-tensorcore-{precision}-1024")
        for row in rows:
            found.setdefault((row["layer"], row["path"]), {})[precision] = row
    lines: list[tuple[str, ...]] = []
    for (layer, path), by in found.items():
        cells = [f"{by[p]['ms']['median'] * 1e3:,.0f} ({by[p]['ratio']:.2f}×)" for p in known]
        lines.append((layer, path, f"`{by[known[0]]['op']}`", *cells))
    head = ("layer", "pass", "op", *(f"{p} µs (over cuDNN)" for p in known))
    return markdown(head, lines, 3) + footer(environment)


def engines() -> str:
    """The direct convolutions by both engines at batch 1024, against cuDNN in the same precision."""
    lines: list[tuple[str, ...]] = []
    for precision in ("bf16", "tf32"):
        if not measured(GPU, f"convs-tensorcore-{precision}-mma-1024"):
            continue
        automatic, environment = section(GPU, f"convs-tensorcore-{precision}-1024")
        forced, _ = section(GPU, f"convs-tensorcore-{precision}-mma-1024")
        for row, mma in zip(automatic, forced, strict=True):
            ours = f"{row['ms']['median'] * 1e3:,.0f} ({row['runs_as']})"
            figures = (ours, f"{row['tflops']:.0f}", f"{mma['ms']['median'] * 1e3:,.0f}", f"{row['cudnn_ms']['median'] * 1e3:,.0f}")
            lines.append((precision, row["layer"], row["path"], *figures, f"{row['ratio']:.2f}×"))
    head = ("precision", "layer", "pass", "nbcnn µs", "TFLOP/s", "forced to mma, µs", "cuDNN µs", "ours is")
    return markdown(head, lines, 3) + footer(environment)


def epoch() -> str:
    """A real epoch: permutation, upload, every training step, the smaller last batch."""
    lines: list[tuple[str, ...]] = []
    for precision in PRECISIONS:
        if not measured(GPU, f"epoch-tensorcore-{precision}-1024"):
            continue
        (row,), environment = section(GPU, f"epoch-tensorcore-{precision}-1024")
        seconds = row["seconds"]
        spread = f"{seconds['p5']:.4f} … {seconds['p95']:.4f}"
        lines.append((precision, str(row["batch"]), f"{row['images']:,}", str(row["steps"]), f"**{seconds['median']:.4f}**", spread))
    return markdown(("precision", "batch", "images", "training steps", "s per epoch", "5 … 95 %"), lines) + footer(environment)


def precisions() -> str:
    """The default recipe in every precision: the same run but for its rounding."""
    rows, environment = section(GPU, "quality-precisions")
    lines: list[tuple[str, ...]] = []
    for seed in sorted({row["seed"] for row in rows}):
        base = next(row for row in rows if row["seed"] == seed and row["mode"] == "im2col")["test_loss"]
        for row in (row for row in rows if row["seed"] == seed):
            figures = (f"{row['test_loss']:.5f}", f"{100 * (row['test_loss'] / base - 1):+.1f} %")
            lines.append((f"{row['mode']} {row['precision']}", str(seed), *figures))
    head = ("mode", "seed", "test MSE after 15 epochs", "against im2col fp32")
    return markdown(head, lines) + footer(environment)


def chart(path: Path) -> None:
    """Test loss by epoch of every precision and seed, as a PNG at `path`."""
    rows, _ = section(GPU, "quality-precisions")
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    styles = {
        "im2col fp32": ("#000000", "-"),
        "tensorcore fp32": ("#0072B2", "--"),
        "tensorcore tf32": ("#009E73", "-."),
        "tensorcore bf16": ("#D55E00", ":"),
    }
    for row in rows:
        name = f"{row['mode']} {row['precision']}"
        colour, line = styles[name]
        label = f"{name}, seed {row['seed']}: {row['test_loss']:.5f}"
        axes.plot(range(1, len(row["test_losses"]) + 1), row["test_losses"], color=colour, linestyle=line, label=label)
    axes.set(yscale="log", xlabel="epoch", ylabel="test MSE", title="the default recipe in every precision")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    write_png(figure, path)
