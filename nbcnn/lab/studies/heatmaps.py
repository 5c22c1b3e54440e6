"""This module draws annotated heatmaps of a study: rows are its cases, columns the variants, with a panel of ratios beside each.

Every picture has a CSV with the same name, which holds all its numbers and more.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm, Normalize, TwoSlopeNorm
from matplotlib.figure import Figure

from nbcnn.files import atomic
from nbcnn.train.plots import write_png

Row = dict[str, Any]
METRICS: dict[str, tuple[str, Callable[[Row], float | None], bool]] = {
    "latency": ("µs per call", lambda row: row["ms"]["median"] * 1e3, False),
    "memory": ("MB", lambda row: None if row["memory_bytes"] is None else row["memory_bytes"] / 1e6, False),
    "throughput": ("", lambda row: row["throughput"], True),
    "efficiency": ("% of attainable", lambda row: 100 * row["efficiency"], True),
}
"""Name -> (unit, value of a row, whether more is better)."""
COLUMNS = ("study", "case", "variant", "launch", "precision", "median_us", "p5_us", "p95_us", "samples", "memory_bytes", "throughput", "unit")
MORE = ("attainable_us", "efficiency", "percent_of_peak", "times_the_peer", "error")


def write(folder: Path, rows: Sequence[Row]) -> list[Path]:
    """One picture and one CSV for every metric and launch of a study's rows (memory has no launch); the paths, pictures first."""
    folder.mkdir(parents=True, exist_ok=True)
    study, pictures, tables = rows[0]["study"], [], []
    for metric in METRICS:
        for launch in ("graph",) if metric == "memory" else dict.fromkeys(row["launch"] for row in rows):
            name = f"{study}-{metric}" + ("" if metric == "memory" else f"-{launch}")
            shown = [row for row in rows if row["launch"] == launch]
            picture(folder / f"{name}.png", shown, metric, launch)
            table(folder / f"{name}.csv", shown)
            pictures.append(folder / f"{name}.png")
            tables.append(folder / f"{name}.csv")
    return [*pictures, *tables]


def grid(rows: Sequence[Row], value: Callable[[Row], float | None]) -> tuple[list[str], list[str], np.ndarray]:
    """(cases, variants, values); NaN where a case lacks a variant or the value is None."""
    cases, variants = (list(dict.fromkeys(row[name] for row in rows)) for name in ("case", "variant"))
    made = np.full((len(cases), len(variants)), np.nan)
    for row in rows:
        found = value(row)
        if found is not None:
            made[cases.index(row["case"]), variants.index(row["variant"])] = found
    return cases, variants, made


def ratios(values: np.ndarray, variants: Sequence[str], more_is_better: bool) -> np.ndarray:
    """How many times better than the first peer (the first variant that is not ours) each value is; than the first variant if there is no peer."""
    base = next((at for at, label in enumerate(variants) if not label.startswith("nbcnn")), 0)
    against = values[:, base : base + 1]
    return values / against if more_is_better else against / values


def picture(path: Path, rows: Sequence[Row], metric: str, launch: str) -> None:
    """The heatmap of one metric as a PNG at `path`, and beside it the panel of ratios to the first peer."""
    unit, value, more = METRICS[metric]
    unit = unit or f"{rows[0]['unit']}/s"
    cases, variants, values = grid(rows, value)
    width, height = 2.6 + 1.05 * len(variants), 1.6 + 0.36 * len(cases)
    figure = Figure(figsize=(2 * width, height), layout="constrained", dpi=110)
    left, right = figure.subplots(1, 2, sharey=True)
    finite = values[np.isfinite(values) & (values > 0)]
    norm: Normalize | None = LogNorm(float(finite.min()), max(float(finite.max()), float(finite.min()) * 1.01)) if finite.size else None
    if metric == "efficiency":
        norm = Normalize(0, max(100.0, float(finite.max()) if finite.size else 0))
    _panel(left, values, cases, variants, norm, "viridis" if more else "viridis_r", short)
    left.set_title(f"{metric}, {unit}", fontsize=9)
    against = ratios(values, variants, more)
    _panel(right, against, cases, variants, TwoSlopeNorm(0, -np.log(4), np.log(4)), "RdYlGn", lambda v: f"{v:.2f}×", np.log)
    base = next((label for label in variants if not label.startswith("nbcnn")), variants[0])
    right.set_title(f"times as good as {base}", fontsize=9)
    how = "replayed as a CUDA graph" if launch == "graph" else "launched from Python, call by call"
    figure.suptitle(f"study {rows[0]['study']}: {metric}" + ("" if metric == "memory" else f", {how}"), fontsize=10)
    write_png(figure, path)


def _panel(
    axes: Any, values: np.ndarray, cases: Sequence[str], variants: Sequence[str], norm: Any, colours: str, text: Any, scale: Any = None
) -> None:
    shade = scale(np.where(values > 0, values, np.nan)) if scale else values
    if norm is not None:
        axes.imshow(np.ma.masked_invalid(shade), cmap=colours, norm=norm, aspect="auto", alpha=0.55)
    for (row, column), value in np.ndenumerate(values):
        axes.text(column, row, text(value) if np.isfinite(value) else "–", ha="center", va="center", fontsize=7.5)
    axes.set_xticks(range(len(variants)), variants, rotation=30, ha="right", rotation_mode="anchor", fontsize=7.5)
    axes.set_yticks(range(len(cases)), cases, fontsize=7.5)
    axes.set(xlim=(-0.5, len(variants) - 0.5), ylim=(len(cases) - 0.5, -0.5))


def short(value: float) -> str:
    """A number in a cell: three digits and a letter for its thousands."""
    for letter, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def table(path: Path, rows: Sequence[Row]) -> None:
    """The rows as CSV at `path`."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow((*COLUMNS, *MORE))
    for row in rows:
        ms = row["ms"]
        times = [f"{ms[name] * 1e3:.4f}" for name in ("median", "p5", "p95")]
        writer.writerow(
            [
                *(row[name] for name in COLUMNS[:5]),
                *times,
                ms["count"],
                row["memory_bytes"],
                f"{row['throughput']:.6g}",
                row["unit"],
                f"{row['attainable_ms'] * 1e3:.4f}",
                *("" if row[name] is None else f"{row[name]:.6g}" for name in MORE[1:]),
            ]
        )
    atomic.replace_bytes(path, out.getvalue().encode())
