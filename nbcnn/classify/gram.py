"""This module fills the kernel matrix on the CPU: for each pair of classes the kernel values of all samples with all samples.

Most of it is one product with GK = F: 2·n²/2·F = 20.5 TFLOP for 50,000 × 8,192, and 8.2 for 10,000 test images; BLAS uses SYRK on the
diagonal. On a GPU `gpu.classify` does all of it instead.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nbcnn.classify.blocks import Blocks
from nbcnn.classify.kernel import PANEL_VALUES, Samples, kernel
from nbcnn.classify.scale import Scaler

Progress = Callable[[int], object]
"""Called with the number of kernel values that have been computed since the last call."""


def scaled_classes(train: np.ndarray, members: list[np.ndarray], test: np.ndarray, scaler: Scaler) -> list[np.ndarray]:
    """Scaled copies, float32 and contiguous: one (n_c, F) for each class's `members` of `train`, then `test`."""
    if train.dtype != np.float32 or test.dtype != np.float32:
        return [*(scaler.applied(train[index]) for index in members), scaler.applied(test)]
    rows = [train[index] for index in members]
    rows.append(np.array(test, np.float32, order="C"))
    for part in rows:
        scaler.apply(part)
    return rows


def samples_of(train: np.ndarray, members: list[np.ndarray], test: np.ndarray, mirrors: list[np.ndarray], scaler: Scaler) -> list[Samples]:
    """Scaled samples of each class and, last, of the test set; `mirrors` are the training and test features of the mirrored images, or none."""
    rows = scaled_classes(train, members, test, scaler)
    if not mirrors:
        return [Samples.of(part) for part in rows]
    mirrored = scaled_classes(mirrors[0], members, mirrors[1], scaler)
    return [Samples.of(part, other) for part, other in zip(rows, mirrored, strict=True)]


def fill(blocks: Blocks, samples: list[Samples], gamma: float, progress: Progress) -> None:
    """Compute every block from the `samples` of each class and, last, of the test set."""
    buffer = np.empty(0, np.float32)
    for j in range(blocks.test_row):
        columns = blocks.rows(j)
        step = max(1, PANEL_VALUES // columns)
        for i in (*range(j + 1), blocks.test_row):
            for first in range(0, blocks.rows(i), step):
                rows = samples[i].part(slice(first, first + step))
                if buffer.size < len(rows) * columns:
                    buffer = np.empty(len(rows) * columns, np.float32)
                k = kernel(rows, samples[j], gamma, buffer[: len(rows) * columns].reshape(len(rows), columns))
                blocks.write(i, j, first, k)
                progress(k.size)
