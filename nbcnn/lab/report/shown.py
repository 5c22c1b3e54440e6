"""The pictures of a training in docs/results/accuracy.md: curves, samples of the classes, reconstructions, mistakes of its classifier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbcnn.files import atomic
from nbcnn.lab.report import svg
from nbcnn.lab.report.stamp import stamp
from nbcnn.lab.report.tables import GPU, footer, measured, section
from nbcnn.lab.studies.shown import SAMPLES, SECTION, unpacked
from nbcnn.train import plots

FILES = (GPU, "cpu.json")
CURVES, PICTURES = "curves.svg", ("samples.png", "reconstructions.png", "mistakes.png")


def kept() -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The row and environment of the results file that has it, a GPU's first."""
    for file in FILES:
        if measured(file, SECTION):
            (row,), environment = section(file, SECTION)
            return row, environment
    return None


def words(row: dict[str, Any]) -> str:
    """Which training it was."""
    of = f"{row['epochs']} epochs of {row['training_images']:,} images of {row['dataset']}"
    return f"{row['model']}, {of}, {row['mode']} {row['precision']}: test MSE {row['test_losses'][-1]:.5f}"


def table() -> str:
    """The pictures; nothing before they are made."""
    if (found := kept()) is None:
        return ""
    row, environment = found
    shown = (
        (CURVES, "loss by epoch"),
        (PICTURES[0], "test images by class"),
        (PICTURES[1], "test images, what the autoencoder makes of them, and the error"),
        (PICTURES[2], f"mistakes: {row['wrong']:,} of the first {row['looked']:,} test images are classified wrongly on its features"),
    )
    return f"{words(row)}.\n\n" + "\n\n".join(f"![{alt}](../pictures/{name})" for name, alt in shown) + footer(environment)


def charts(folder: Path) -> None:
    """The pictures in `folder`, which say what they were drawn from; none before they are made."""
    if (found := kept()) is None:
        return
    row, names = found[0], found[0]["classes"]
    curves = [svg.Series(f"{part} images", list(enumerate(row[f"{part}_losses"], 1)), at) for at, part in enumerate(("train", "test"), 1)]
    atomic.replace_bytes(folder / CURVES, svg.standalone(svg.lines(curves, "epoch", "MSE", whole=True)).encode())
    samples, made = unpacked(row["samples"]), unpacked(row["made"])
    plots.captioned(folder / PICTURES[0], samples, [names[at // SAMPLES] for at in range(len(samples))], "test images by class")
    plots.reconstructions(folder / PICTURES[1], samples[::SAMPLES], made / 255.0, words(row))
    said = [f"{names[true]} → {names[other]}" for true, other in zip(row["true"], row["said"], strict=True)]
    plots.captioned(folder / PICTURES[2], unpacked(row["mistakes"]), said, f"{row['wrong']:,} of {row['looked']:,} wrong, the first of them")
    for name in PICTURES:
        stamp(folder / name, [row])


TABLES = {"shown": table}
