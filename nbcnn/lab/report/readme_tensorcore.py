"""Tables of mode tensorcore for the documentation: whole steps, layers, the two engines, a real epoch, what precision costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from nbcnn.lab.report import sections
from nbcnn.lab.report.readme_front import newest
from nbcnn.lab.report.tables import GPU, footer, joined, markdown, measured, section
from nbcnn.train.plots import write_png

STEPS = (("bf16", 1024), ("bf16", 256), ("bf16", 64), ("bf16", 1), ("tf32", 1024), ("fp32", 1024))
PRECISIONS = ("bf16", "tf32", "fp32")


def step() -> str:
    """The whole training step against the fastest code that a typical user would write in the same precision, and that of an expert."""
    found = [(precision, *newest(name)) for precision, batch in STEPS if measured(GPU, name := f"step-tensorcore-{precision}-{batch}")]
    table = joined([sections.beside_peers(rows).labelled("precision", precision) for precision, rows, _ in found])
    return table.filled().markdown() + footer(*(environment for *_, environment in found))


def layers() -> str:
    """Every layer and pass at batch 1024, as the fused plan runs it, against cuDNN's convolution alone."""
    found: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    known = [precision for precision in PRECISIONS if measured(GPU, f"convs-fused-tensorcore-{precision}-1024")]
    environments = []
    for precision in known:
        rows, environment = section(GPU, f"convs-fused-tensorcore-{precision}-1024")
        environments.append(environment)
        for row in rows:
            found.setdefault((row["layer"], row["path"], row["op"]), {})[precision] = row
    lines: list[tuple[str, ...]] = []
    for (layer, path, op), by in found.items():
        cells = [f"{by[p]['ms']['median'] * 1e3:,.0f} ({by[p]['ratio']:.2f}×)" if p in by else "" for p in known]
        lines.append((layer, path, f"`{op}`", *cells))
    head = ("layer", "pass", "op", *(f"{p} µs (over cuDNN)" for p in known))
    return markdown(head, lines, 3) + footer(*environments)


def gradients() -> str:
    """Data gradients beside cuDNN's best plan of the same work, masked on both sides or on neither; a sentence as long as none was timed so."""
    tables, environments = [], []
    for precision in PRECISIONS:
        if measured(GPU, name := f"convs-fused-tensorcore-{precision}-1024"):
            rows, environment = section(GPU, name)
            table = sections.alike(rows)
            if table.rows:
                tables.append(table.labelled("precision", precision))
                environments.append(environment)
    return joined(tables).markdown() + footer(*environments) if tables else "These pairs have not been timed yet.\n"


def engines() -> str:
    """The direct convolutions by both engines at batch 1024, against cuDNN in the same precision."""
    lines: list[tuple[str, ...]] = []
    environments = []
    for precision in ("bf16", "tf32"):
        if not measured(GPU, f"convs-tensorcore-{precision}-1024"):
            continue
        automatic, environment = section(GPU, f"convs-tensorcore-{precision}-1024")
        environments.append(environment)
        name = f"convs-tensorcore-{precision}-mma-1024"
        forced = [f"{row['ms']['median'] * 1e3:,.0f}" for row in section(GPU, name)[0]] if measured(GPU, name) else [""] * len(automatic)
        for row, mma in zip(automatic, forced, strict=True):
            ours = f"{row['ms']['median'] * 1e3:,.0f} ({row['runs_as']})"
            figures = (ours, f"{row['tflops']:.0f}", mma, f"{row['cudnn_ms']['median'] * 1e3:,.0f}")
            lines.append((precision, row["layer"], row["path"], *figures, f"{row['ratio']:.2f}×"))
    head = ("precision", "layer", "pass", "nbcnn µs", "TFLOP/s", "forced to mma, µs", "cuDNN µs", "ours is")
    return markdown(head, lines, 3) + footer(*environments)


def epoch() -> str:
    """A real epoch: permutation, upload, every training step, the smaller last batch."""
    found = [(precision, *section(GPU, name)) for precision in PRECISIONS if measured(GPU, name := f"epoch-tensorcore-{precision}-1024")]
    table = joined([sections.epochs(rows).labelled("precision", precision) for precision, rows, _ in found])
    return table.markdown() + footer(*(environment for *_, environment in found))


def by_mode(rows: list[dict[str, Any]], key: str) -> dict[str, np.ndarray]:
    """What `rows` of the job `precisions` hold under `key`, by mode and precision, in the order of their seeds."""
    found: dict[str, list[Any]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        found.setdefault(f"{row['mode']} {row['precision']}", []).append(row[key])
    return {name: np.asarray(values) for name, values in found.items()}


def precisions() -> str:
    """The default recipe in every precision: the same runs but for their rounding, over several seeds."""
    rows, environment = section(GPU, "quality-precisions")
    errors = by_mode(rows, "test_loss")
    base = errors["cudacore fp32"]
    lines: list[tuple[str, ...]] = []
    for name, found in errors.items():
        doubt = 100 * np.hypot(spread(found), spread(base)) / base.mean()
        apart = f"{100 * (found.mean() / base.mean() - 1):+.1f}" if name != "cudacore fp32" else ""
        mean, margin = f"{found.mean():.5f}", f" ± {spread(found):.5f}" if len(found) > 1 else ""
        cells = (mean + margin, f"{found.min():.5f} … {found.max():.5f}" if margin else "", apart and apart + (f" ± {doubt:.1f}" if margin else ""))
        lines.append((name, str(len(found)), *cells))
    head = ("mode", "seeds", "mean test MSE after 15 epochs", "least … most", "% over cudacore fp32's")
    return markdown(head, lines) + footer(environment)


def spread(values: np.ndarray) -> float:
    """Standard error of the mean, 0 for a single value."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def chart(path: Path) -> None:
    """Test loss by epoch of every precision, as a PNG at `path`: the mean over all seeds, and the band from the least to the most."""
    rows, _ = section(GPU, "quality-precisions")
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    colours = {"cudacore fp32": "#000000", "tensorcore fp32": "#0072B2", "tensorcore tf32": "#009E73", "tensorcore bf16": "#D55E00"}
    for name, curves in by_mode(rows, "test_losses").items():
        epochs = np.arange(1, curves.shape[1] + 1)
        axes.fill_between(epochs, curves.min(0), curves.max(0), color=colours[name], alpha=0.12, linewidth=0)
        axes.plot(epochs, curves.mean(0), color=colours[name], label=f"{name}: {curves[:, -1].mean():.5f}, {len(curves)} seeds")
    axes.set(yscale="log", xlabel="epoch", ylabel="test MSE", title="the default recipe in every precision: mean, least and most")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    write_png(figure, path)
