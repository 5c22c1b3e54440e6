"""Statistics of patches: patches drawn from images, and of their covariance the matrices that whiten them (ZCA, principal components)."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from nbcnn.dictionary.samples import places

SINGLE = 512
"""From so many dimensions on eigenvectors are found in float32: their error, 1e-7 of the largest eigenvalue, is far below what is added to all."""


def drawn(maps: np.ndarray, window: tuple[int, int], count: int, random: np.random.Generator) -> np.ndarray:
    """`count` windows (R, S) of random images of `maps` (N, C, H, W) at random places: (count, C·R·S), of the dtype of `maps`.

    >>> drawn(np.zeros((2, 3, 5, 5), np.uint8), (2, 2), 7, np.random.default_rng(0)).shape
    (7, 12)
    """
    return _windows(maps, window, places(maps.shape, window, count, random))


def _windows(maps: np.ndarray, window: tuple[int, int], where: np.ndarray) -> np.ndarray:
    """The windows at the places `where` (3, count): (count, C·R·S)."""
    image, row, column = where
    windows = np.lib.stride_tricks.sliding_window_view(maps, window, axis=(2, 3))  # (N, C, P, Q, R, S)
    return windows[image, :, row, column].reshape(len(image), -1)


def drawn_of_all(blocks: Iterable[np.ndarray], images: int, window: tuple[int, int], count: int, random: np.random.Generator) -> np.ndarray:
    """`count` windows, as `drawn`, of `images` images that come in blocks; every block gives as many as its part of the images. float32.

    Threads copy the windows of a block while the next ones are made.
    """
    seen = given = 0
    made: np.ndarray | None = None
    with ThreadPoolExecutor() as threads:
        waiting = []
        for block in blocks:
            seen += len(block)
            due = count * seen // images
            if made is None:
                made = np.empty((count, block.shape[1] * window[0] * window[1]), np.float32)
            waiting.append(threads.submit(_copied, made[given:due], block, window, places(block.shape, window, due - given, random)))
            given = due
        for each in waiting:
            each.result()
    assert made is not None
    return made


def _copied(target: np.ndarray, maps: np.ndarray, window: tuple[int, int], where: np.ndarray) -> None:
    target[...] = _windows(maps, window, where)


def eigen(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues, the largest first and none below 0, and eigenvectors (columns) of a symmetric matrix, float64."""
    values, vectors = np.linalg.eigh(matrix.astype(np.float32) if len(matrix) >= SINGLE else matrix)
    return np.maximum(values[::-1], 0).astype(np.float64), vectors[:, ::-1].astype(np.float64)


def zca(matrix: np.ndarray, eps: float) -> np.ndarray:
    """U (λ + eps·mean λ)^(−1/2) Uᵀ of a covariance U λ Uᵀ, float64: it whitens and changes as little as possible.

    >>> zca(np.diag([4.0, 4.0]), 0.0)
    array([[0.5, 0. ],
           [0. , 0.5]])
    """
    values, vectors = eigen(matrix)
    return np.asarray((vectors / np.sqrt(values + eps * values.mean())) @ vectors.T)


def components(matrix: np.ndarray, count: int, eps: float) -> np.ndarray:
    """The first `count` principal axes of a covariance as columns (D, count), divided by √(λ + eps · the mean of their λ): float64."""
    values, vectors = eigen(matrix)
    values = values[:count]
    return np.asarray(vectors[:, :count] / np.sqrt(values + eps * values.mean()))


def mirrored_mean(matrix: np.ndarray, channels: int, size: int) -> np.ndarray:
    """A covariance of patches (C, size, size), averaged over the patches as they are, mirrored, upside down and both.

    Filters made of it are the same when they are mirrored, so that a convolution with reflected borders has an exact inverse (`nn.whitening.undone`).
    Photographs have nearly this covariance by themselves.
    """
    places = np.arange(channels * size * size).reshape(channels, size, size)
    ways = [each.reshape(-1) for each in (places, places[:, ::-1], places[:, :, ::-1], places[:, ::-1, ::-1])]
    return np.asarray(sum(matrix[np.ix_(way, way)] for way in ways) / len(ways))
