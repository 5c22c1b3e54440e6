"""Pictures of what an encoder learned: its first filters, the nearest neighbours of images among its features, a map of them in the plane.

    draw(folder, weights, data, process, train, test, "what it is")     filters.png, neighbours.png, map.png

Distances are Euclidean, of processed features, or of standardised ones where there are no steps. The map is scikit-learn's t-SNE of the first 50
principal components. Labels colour the points and frame the neighbours; nothing else sees them.

Source: L. van der Maaten, G. Hinton, "Visualizing data using t-SNE", JMLR 9 (2008).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.classify.processing import Processing
from nbcnn.classify.scale import standard
from nbcnn.datasets import Dataset
from nbcnn.files import extras
from nbcnn.train.plots import Figure, write_png

FILTERS, NEIGHBOURS, MAP = "filters.png", "neighbours.png", "map.png"
SHOWN = 256
"""Filters of a picture."""
QUERIES, NEAREST = 10, 8
"""Test images of the picture of neighbours, and how many training images stand beside each."""
SEARCHED = 10_000
"""Training images among which neighbours are looked for: a few seconds of a CPU."""
POINTS = 5_000
"""Test images on the map."""
_COMPONENTS = 50


def draw(
    folder: Path,
    weights: Mapping[str, np.ndarray],
    data: Dataset,
    process: Processing | None,
    train: np.ndarray,
    test: np.ndarray,
    what: str,
    points: int = POINTS,
) -> dict[str, str]:
    """Draw the pictures into `folder`; returns their paths by name: "filters", "neighbours", "map".

    `weights` are the encoder's, by name; `data` has the images and labels whose features are `train` and `test`, in their order, of which both may
    be the first ones only. `what` names the features in the titles. A picture for which there are too few images is left out.
    """
    made = {}
    found = first_filters(weights)
    if found is not None:
        draw_filters(folder / FILTERS, found, f"{what}: first filters")
        made["filters"] = str(folder / FILTERS)
    ready = standard(np.asarray(train[:SEARCHED], np.float32)).applied if process is None else process.applied
    rows, others = ready(train[:SEARCHED]), ready(test[:points])
    queries = spread(data.test_labels, len(others), QUERIES)
    if len(rows) >= NEAREST and len(queries):
        nearest = neighbours(others[queries], rows, NEAREST)
        title = f"{what}: a test image and its {NEAREST} nearest among {len(rows):,} training images"
        draw_neighbours(folder / NEIGHBOURS, data, queries, nearest, title)
        made["neighbours"] = str(folder / NEIGHBOURS)
    if len(others) > _COMPONENTS:
        labels = None if data.test_labels is None else data.test_labels[: len(others)]
        draw_map(folder / MAP, plane(others), labels, data.classes or (), f"{what}: t-SNE of {len(others):,} test images")
        made["map"] = str(folder / MAP)
    return made


def first_filters(weights: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """The filters of the first convolution, float32 (n, C, k, k), as they meet the image; None where there is none.

    A 1×1 convolution of whitened patches is one of the patches themselves: its atoms times the whitening.
    """
    first = weights.get("conv1.weight")
    if first is None:
        return None
    if first.shape[2:] == (1, 1) and (patches := weights.get("patches1.weight")) is not None and patches.shape[0] == first.shape[1]:
        return np.einsum("nd,dckl->nckl", first[:, :, 0, 0], patches)
    return first


def spread(labels: np.ndarray | None, count: int, wanted: int) -> np.ndarray:
    """Positions of `wanted` of the first `count` samples: the first of each class in turn, or the first ones where there are no labels."""
    if labels is None:
        return np.arange(min(count, wanted))
    mine = labels[:count]
    turns = [np.flatnonzero(mine == c) for c in np.unique(mine)]
    order = [each[at] for at in range(max(map(len, turns), default=0)) for each in turns if at < len(each)]
    return np.array(order[:wanted], np.int64)


def neighbours(queries: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """Positions (q, count) of the `rows` (n, F) that are nearest to each of `queries` (q, F), nearest first."""
    distances = np.einsum("nf,nf->n", rows, rows) - 2 * queries @ rows.T
    return np.argsort(distances, 1, kind="stable")[:, :count]


def plane(rows: np.ndarray, seed: int = 0) -> np.ndarray:
    """t-SNE of `rows` (n, F), n more than 50: points (n, 2), the same for the same rows and versions."""
    extras.need("sklearn", "a map of features needs")
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    few = PCA(min(_COMPONENTS, *rows.shape), svd_solver="randomized", random_state=seed).fit_transform(rows)
    perplexity = min(30.0, (len(rows) - 1) / 3)
    made: np.ndarray = TSNE(2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(few)
    return made


def draw_filters(path: Path, filters: np.ndarray, title: str) -> None:
    """Filters (n, C, k, k) as a PNG: with three channels in colours, else their first channel; each stretched to its own largest weight."""
    shown = filters[:SHOWN]
    largest = np.abs(shown).max((1, 2, 3), keepdims=True)
    scaled = 0.5 + 0.5 * shown / np.where(largest > 0, largest, 1)
    pictures = [each.transpose(1, 2, 0) if each.shape[0] == 3 else np.repeat(each[0][..., None], 3, 2) for each in scaled]
    columns = math.ceil(math.sqrt(2 * len(pictures)))
    grid = _grid(pictures, columns, 1)
    figure = Figure(figsize=(9, 9 * grid.shape[0] / grid.shape[1] + 0.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.imshow(grid, interpolation="nearest")
    figure.suptitle(f"{title}, {len(shown)} of {len(filters)}" if len(shown) < len(filters) else title, fontsize=10)
    write_png(figure, path)


def draw_neighbours(path: Path, data: Dataset, queries: np.ndarray, nearest: np.ndarray, title: str) -> None:
    """A row for each query: the test image, then the training images `nearest` (q, count); a red frame is another class than the query's."""
    rows: list[np.ndarray] = []
    for query, found in zip(queries, nearest, strict=True):
        rows.append(_framed(data.test_images[query], None))
        for at in found:
            same = None if data.train_labels is None or data.test_labels is None else bool(data.train_labels[at] == data.test_labels[query])
            rows.append(_framed(data.train_images[at], same))
    columns = nearest.shape[1] + 1
    grid = _grid(rows, columns, 2)
    figure = Figure(figsize=(8, 8 * grid.shape[0] / grid.shape[1] + 0.6), layout="constrained", dpi=120)
    axes = figure.add_subplot()
    axes.imshow(grid, interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    step = rows[0].shape[1] + 2
    axes.axvline(step - 1.5, color="black", linewidth=1.5)
    figure.suptitle(f"{title}\nred frame: another class" if data.test_labels is not None else title, fontsize=10)
    write_png(figure, path)


def draw_map(path: Path, points: np.ndarray, labels: np.ndarray | None, names: Sequence[str], title: str) -> None:
    """Points (n, 2) as a PNG, coloured by their labels."""
    import matplotlib

    figure = Figure(figsize=(8, 7), layout="constrained", dpi=120)
    axes = figure.add_subplot()
    colours = matplotlib.colormaps["tab10" if len(names) <= 10 else "tab20"]
    area = min(36.0, max(4.0, 8_000 / len(points)))  # square points: dots cover about 3 % of the picture, however few they are
    if labels is None:
        axes.scatter(points[:, 0], points[:, 1], s=area, linewidths=0)
    else:
        for c in np.unique(labels):
            mine = points[labels == c]
            name = names[int(c)] if int(c) < len(names) else str(c)
            axes.scatter(mine[:, 0], mine[:, 1], s=area, linewidths=0, color=colours(int(c) % colours.N), label=name)
        if len(np.unique(labels)) <= 20:
            axes.legend(markerscale=6 / area**0.5, fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set(xticks=[], yticks=[])
    axes.set_title(title, fontsize=10)
    write_png(figure, path)


def _grid(pictures: list[Any], columns: int, gap: int) -> np.ndarray:
    """Pictures (h, w, 3) in rows of `columns`, white between them."""
    height, width = pictures[0].shape[:2]
    rows = math.ceil(len(pictures) / columns)
    made = np.ones((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), np.float32)
    for number, picture in enumerate(pictures):
        top, left = (number // columns) * (height + gap), (number % columns) * (width + gap)
        made[top : top + height, left : left + width] = picture
    return made


def _framed(image: np.ndarray, same: bool | None) -> np.ndarray:
    """(C, H, W) as (H + 2, W + 2, 3) in 0..1, with a frame: red where `same` is False."""
    floats = image.astype(np.float32) / 255 if image.dtype == np.uint8 else image.clip(0, 1)
    colours = floats.transpose(1, 2, 0) if len(image) == 3 else np.repeat(floats[0][..., None], 3, 2)
    made = np.ones((colours.shape[0] + 2, colours.shape[1] + 2, 3), np.float32)
    if same is False:
        made[...] = (0.84, 0.15, 0.12)
    made[1:-1, 1:-1] = colours
    return made
