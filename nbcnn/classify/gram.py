"""This module fills the kernel matrix: for each pair of classes one product of all samples with all samples, then exp(-gamma d²).

The product is a GEMM with GK = F: 2·n²/2·F = 20.5 TFLOP for 50,000 × 8,192, and 8.2 for 10,000 test images. `HostEngine`
leaves it to BLAS, which uses SYRK on the diagonal. On a GPU `gpu.classify` does all of it instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from nbcnn.classify.blocks import Blocks
from nbcnn.classify.scale import Scaler
from nbcnn.ops.products.rbf import rbf

# 2^25 kernel values are 128 MiB of float32: large enough for BLAS and for the GPU, small in memory.
PANEL_VALUES = 1 << 25

Progress = Callable[[int], object]
"""Called with the number of kernel values that have been computed since the last call."""


class Engine(Protocol):
    """Computes panels of kernel values against one set of columns at a time."""

    name: str

    def panel_rows(self, columns: int, width: int) -> int:
        """The most rows that `panel` takes at a time."""

    def columns(self, b: np.ndarray, norms: np.ndarray) -> None:
        """Set the columns: `b` (N, F) float32 and its squared norms (N,) float32."""

    def panel(self, a: np.ndarray, norms: np.ndarray, gamma: float) -> np.ndarray:
        """exp(-gamma |a - b|²), (M, N) float32, for `a` (M, F); valid until the next call."""


class HostEngine:
    """BLAS on the CPU."""

    name = "BLAS"

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.float32)

    def panel_rows(self, columns: int, width: int) -> int:
        return max(1, PANEL_VALUES // columns)

    def columns(self, b: np.ndarray, norms: np.ndarray) -> None:
        self._b, self._norms = b, norms

    def panel(self, a: np.ndarray, norms: np.ndarray, gamma: float) -> np.ndarray:
        values = len(a) * len(self._b)
        if self._buffer.size < values:
            self._buffer = np.empty(values, np.float32)
        k = self._buffer[:values].reshape(len(a), len(self._b))
        np.matmul(a, self._b.T, out=k)
        rbf(norms, self._norms, k, gamma=gamma)
        return k


def scaled_classes(train: np.ndarray, members: list[np.ndarray], test: np.ndarray, scaler: Scaler) -> list[np.ndarray]:
    """Scaled copies, float32 and contiguous: one (n_c, F) for each class's `members` of `train`, then `test`."""
    if train.dtype != np.float32 or test.dtype != np.float32:
        return [*(scaler.applied(train[index]) for index in members), scaler.applied(test)]
    rows = [train[index] for index in members]
    rows.append(np.array(test, np.float32, order="C"))
    for part in rows:
        scaler.apply(part)
    return rows


def fill(blocks: Blocks, rows: list[np.ndarray], norms: list[np.ndarray], gamma: float, engine: Engine, progress: Progress) -> None:
    """Compute every block from `rows`: (n_c, F) of each class and, last, the test samples; `norms` are their squared norms."""
    single = [part.astype(np.float32) for part in norms]
    for j in range(blocks.test_row):
        step = engine.panel_rows(blocks.rows(j), rows[j].shape[1])
        engine.columns(rows[j], single[j])
        for i in (*range(j + 1), blocks.test_row):
            for first in range(0, blocks.rows(i), step):
                part = slice(first, first + step)
                k = engine.panel(rows[i][part], single[i][part], gamma)
                blocks.write(i, j, first, k)
                progress(k.size)
