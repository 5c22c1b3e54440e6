"""This module draws the pictures of a run. It uses Matplotlib without pyplot, so it touches no global state, window or thread."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.datasets.masks import palette
from nbcnn.files import atomic, extras

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import LogFormatter, MaxNLocator, PercentFormatter
except ModuleNotFoundError:
    extras.need("matplotlib", "pictures need")
    raise

# Okabe and Ito's blue and vermilion: told apart with every kind of colour vision.
TRAIN, TEST = "#0072B2", "#D55E00"


SCORES = {"test_accuracy": "test accuracy", "test_iou": "mean intersection over union"}
"""Scores of an epoch that `curves` draws."""


class Plain(LogFormatter):
    """Labels of a logarithmic axis as people write them: 0.9, not 9e−01."""

    def _num_to_string(self, x: float, vmin: float, vmax: float) -> str:
        return f"{x:g}"


def curves(path: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Training and test loss by epoch, logarithmic, below it the test accuracy where there is one; a PNG at `path`. `rows` are a run's metrics."""
    scored = {name: words for name, words in SCORES.items() if any(name in row for row in rows)}
    figure = Figure(figsize=(7, 7.2 if scored else 4.2), layout="constrained")
    axes, *below = figure.subplots(2 if scored else 1, 1, sharex=True, squeeze=False, height_ratios=(3, 2) if scored else (1,)).flat
    epochs = [row["epoch"] for row in rows]
    axes.plot(epochs, [row["train_loss"] for row in rows], color=TRAIN, marker="o", markersize=4, label="training")
    tested = [row for row in rows if "test_loss" in row]
    if tested:
        at = [row["epoch"] for row in tested]
        axes.plot(at, [row["test_loss"] for row in tested], color=TEST, marker="s", markersize=4, linestyle="--", label="test")
    which = "test_loss" if tested else "train_loss"
    best = min(tested or rows, key=lambda row: row[which])
    axes.set(yscale="log", ylabel="loss (mean)")
    (below[0] if below else axes).set_xlabel("epoch")
    axes.set_title(f"{title}\nbest {which.replace('_', ' ')} {best[which]:.5f} after epoch {best['epoch']}", fontsize=10)
    axes.yaxis.set_major_formatter(Plain())
    axes.yaxis.set_minor_formatter(Plain(minor_thresholds=(3, 1)))
    for each, (name, words), colour in zip(below * 2, scored.items(), (TEST, TRAIN), strict=False):
        each.plot(
            [row["epoch"] for row in rows if name in row],
            [row[name] for row in rows if name in row],
            color=colour,
            marker="s",
            markersize=4,
            label=words,
        )
        each.set(ylabel="share")
        each.yaxis.set_major_formatter(PercentFormatter(1.0))
        each.grid(True, alpha=0.3)
        each.legend()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    write_png(figure, path)


def reconstructions(path: Path, images: np.ndarray, outputs: np.ndarray, title: str) -> None:
    """A grid of three rows as a PNG at `path`: inputs, outputs, error maps on one scale.

    `images` uint8 or float32 (n, C, H, W) with C 1 or 3; `outputs` float32 of the same shape, 0..1 (values outside are shown as the
    nearest inside), as are floats of `images`. The error map is the absolute difference, mean over channels.
    """
    inputs = _floats(images)
    errors = np.abs(outputs - inputs).mean(axis=1)
    figure = Figure(figsize=(1.25 * len(images) + 1.2, 4.6), layout="constrained")
    # One picture a row: Matplotlib takes 10 ms for the axes of each.
    axes = figure.subplots(3, 1)
    for each, name, pictures in zip(axes, ("input", "output"), (inputs, outputs), strict=False):
        each.imshow(_in_a_row([_pixels(picture.clip(0, 1)) for picture in pictures], 1.0), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        each.set(ylabel=name, xticks=[], yticks=[])
    shown = axes[2].imshow(_in_a_row(errors, np.nan), cmap="viridis", vmin=0, vmax=max(float(errors.max()), 1e-6), interpolation="nearest")
    axes[2].set(ylabel="|error|", yticks=[])
    width = images.shape[-1]
    middles = [at * (width + _gap(width)) + (width - 1) / 2 for at in range(len(images))]
    axes[2].set_xticks(middles, [f"MSE {np.mean((made - given) ** 2):.4f}" for made, given in zip(outputs, inputs, strict=True)], fontsize=8)
    axes[2].tick_params(length=0)
    for each in axes:
        each.spines[:].set_visible(False)
    figure.colorbar(shown, ax=axes[2], shrink=0.8)
    figure.suptitle(title, fontsize=10)
    write_png(figure, path)


def confusion(path: Path, counts: np.ndarray, names: Sequence[str], title: str) -> None:
    """The confusion matrix `counts` (true class, predicted class) as a PNG at `path`: counts in the cells, shade by share of the true class."""
    classes = len(names)
    side = min(24.0, 2.6 + 0.62 * classes)
    figure = Figure(figsize=(side + 1, side), layout="constrained", dpi=120)
    axes = figure.add_subplot()
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    # Square cells would leave the layout no say in the width, and it would cut the axis's label.
    image = axes.imshow(share, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    figure.colorbar(image, ax=axes, label="share of the true class", fraction=0.046)
    figure.suptitle("\n".join(textwrap.fill(line, int(11 * side)) for line in title.splitlines()), fontsize=10)
    axes.set(xlabel="predicted class", ylabel="true class")
    axes.set_xticks(range(classes), names, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(classes), names)
    if classes <= 30:
        for (row, column), count in np.ndenumerate(counts):
            axes.text(column, row, str(count), ha="center", va="center", fontsize=8, color="white" if share[row, column] > 0.55 else "black")
    write_png(figure, path)


LEGEND = 20
"""The largest number of classes that `segmentation` names."""
MISTAKES = 40
"""The largest number of images that `mistakes` draws."""


def mistakes(path: Path, images: np.ndarray, labels: np.ndarray, logits: np.ndarray, names: Sequence[str], title: str) -> None:
    """Misclassified images as a PNG at `path`, the surest mistakes first: true class → predicted class, and its probability.

    `images` uint8 or float32 (n, C, H, W) with C 1 or 3, `labels` int32 (n), `logits` (n, classes).
    """
    wrong = np.flatnonzero(logits.argmax(1) != labels)
    exponential = np.exp(logits[wrong] - logits[wrong].max(1, keepdims=True))
    sure = 1 / exponential.sum(1)
    shown = np.argsort(-sure, kind="stable")[:MISTAKES]
    columns = 8
    rows = max(1, -(-len(shown) // columns))
    figure = Figure(figsize=(1.3 * columns, 1.5 * rows + 0.6), layout="constrained", dpi=120)
    # All in one picture: Matplotlib takes 10 ms for the axes of each.
    axes = figure.add_subplot()
    axes.set_axis_off()
    height, width = images.shape[2:]
    step, above = width + _gap(width), max(1, round(0.22 * width))  # room for a line of text above each
    blank = np.ones_like(_pixels(_floats(images[0])))
    lines = []
    for row in range(rows):
        here = [_pixels(_floats(images[wrong[at]]).clip(0, 1)) for at in shown[row * columns : (row + 1) * columns]]
        line = _in_a_row([*here, *[blank] * (columns - len(here))], 1.0)
        lines += [np.ones((above, *line.shape[1:]), np.float32), line]
    axes.imshow(np.concatenate(lines), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    for number, at in enumerate(shown):
        each, (row, column) = wrong[at], divmod(number, columns)
        said = f"{names[labels[each]]} → {names[logits[each].argmax()]}  {sure[at]:.0%}"
        axes.text(column * step + (width - 1) / 2, (row + 1) * above + row * height - 1, said, fontsize=6.5, ha="center", va="bottom")
    figure.suptitle(f"{title}; {len(wrong):,} of {len(images):,} wrong", fontsize=10)
    write_png(figure, path)


def segmentation(path: Path, images: np.ndarray, labels: np.ndarray | None, found: np.ndarray, names: Sequence[str], title: str) -> None:
    """Rows as a PNG at `path`: images, the true classes of their pixels unless None, the found ones; a legend names the classes that are shown.

    `images` uint8 or float32 (n, C, H, W), `labels` and `found` (n, H, W), classes below len(names); a label that is none is white.
    """
    colours = palette() / 255
    rows = {"image": [_pixels(_floats(image).clip(0, 1)) for image in images]}
    if labels is not None:
        rows["true"] = [*np.where((labels < len(names))[..., None], colours[labels.astype(np.int64) % 256], 1.0)]
    rows["found"] = [*colours[found]]
    figure = Figure(figsize=(1.25 * len(images) + 2.4, 1.4 * len(rows) + 0.5), layout="constrained")
    for each, (name, pictures) in zip(figure.subplots(len(rows), 1), rows.items(), strict=True):
        each.imshow(_in_a_row(pictures, 1.0), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        each.set(ylabel=name, xticks=[], yticks=[])
        each.spines[:].set_visible(False)
    there = np.unique(np.concatenate([part.reshape(-1) for part in (labels, found) if part is not None]))
    patches = [Patch(facecolor=colours[at], edgecolor="black", label=names[at]) for at in there if at < len(names)]
    figure.legend(handles=patches[:LEGEND], loc="outside right center", fontsize=8)
    figure.suptitle(title, fontsize=10)
    write_png(figure, path)


def captioned(path: Path, images: np.ndarray, captions: Sequence[str], title: str) -> None:
    """Images with what was found of each below it, as a PNG at `path`; uint8 (n, C, H, W) with C 1, 3 or 4."""
    columns = min(8, len(images))
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(1.6 * columns + 0.4, 1.8 * rows + 0.6), layout="constrained", dpi=120)
    for axes, at in zip(figure.subplots(rows, columns, squeeze=False).flat, (*range(len(images)), *[None] * columns), strict=False):
        axes.set_axis_off()
        if at is not None:
            axes.imshow(_pixels(images[at]), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
            axes.set_title(captions[at], fontsize=7, y=-0.16)
    figure.suptitle(title, fontsize=10)
    write_png(figure, path)


def forecast(path: Path, predicted: np.ndarray, readings: np.ndarray, title: str) -> None:
    """Forecasts and readings of one meter, hour by hour, as a PNG at `path`; both (hours)."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(readings, color="black", linewidth=1.2, label="reading")
    axes.plot(predicted, color=TEST, linewidth=1.2, linestyle="--", label="forecast an hour before")
    axes.set(xlabel="hour", ylabel="meter reading", ylim=(0, None))
    axes.set_title(title, fontsize=10)
    axes.grid(True, alpha=0.3)
    axes.legend()
    write_png(figure, path)


def _floats(images: np.ndarray) -> np.ndarray:
    """Bytes as floats in 0..1; floats as they are."""
    return images.astype(np.float32) / 255 if images.dtype == np.uint8 else images


def _pixels(image: np.ndarray) -> np.ndarray:
    """(C, H, W) as Matplotlib wants it: (H, W, 3), or (H, W) for any other number of channels, of which the first is shown."""
    return image.transpose(1, 2, 0) if image.shape[0] == 3 else image[0]


def _gap(width: int) -> int:
    """Pixels between pictures of so many in a row."""
    return max(1, width // 16)


def _in_a_row(pictures: Sequence[np.ndarray], between: float) -> np.ndarray:
    """Pictures (H, W) or (H, W, 3) beside each other, with `between` in the gaps: (H, n·(W + gap) − gap[, 3]) float32."""
    height, width, *colours = pictures[0].shape
    step = width + _gap(width)
    made = np.full((height, len(pictures) * step - _gap(width), *colours), between, np.float32)
    for at, picture in enumerate(pictures):
        made[:, at * step : at * step + width] = picture
    return made


def write_png(figure: Figure, path: Path) -> None:
    """Draw `figure` and put it in place of `path`, whole or not at all."""
    content = io.BytesIO()
    FigureCanvasAgg(figure).print_png(content)
    atomic.replace_bytes(path, content.getvalue())
