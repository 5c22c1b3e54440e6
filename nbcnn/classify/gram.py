"""This module fills the kernel matrix on the CPU: for each pair of classes the kernel values of all samples with all samples.

Most of it is one product with GK = F: 2·n²/2·F = 20.5 TFLOP for 50,000 × 8,192, and 8.2 for 10,000 test images; BLAS uses SYRK on the
diagonal. What is done beside it on a core alone, BLAS waits for: threads scale the samples and make kernel values of products, another one writes. On
a GPU `gpu.classify` does all of it instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from nbcnn.classify.blocks import Blocks
from nbcnn.classify.kernel import PANEL_VALUES, Samples, kernel
from nbcnn.classify.scale import Scaler
from nbcnn.files.threads import in_threads

Progress = Callable[[int], object]
"""Called with the number of kernel values that have been computed since the last call."""


def samples_of(train: np.ndarray, members: list[np.ndarray], test: np.ndarray, mirrors: list[np.ndarray], scaler: Scaler) -> list[Samples]:
    """Scaled samples of each class and, last, of the test set; `mirrors` are the training and test features of the mirrored images, or none."""
    exact = all(each.dtype == np.float32 for each in (train, test, *mirrors))
    sets: list[Sequence[np.ndarray]] = [(train, test), *([mirrors] if mirrors else [])]
    parts = [(0, index) for index in members] + [(1, np.arange(len(test)))]
    scaled = [[scaler.taken(own[which], index, exact) for own in sets] for which, index in parts]
    return in_threads(lambda rows: Samples.of(*rows), scaled)


def fill(blocks: Blocks, samples: list[Samples], gamma: float, progress: Progress) -> None:
    """Compute every block from the `samples` of each class and, last, of the test set."""
    # Of two buffers one is written to the disk while the other is filled.
    buffers, writing, turn = [np.empty(0, np.float32) for _ in range(2)], list[Future[None]](), 0
    with ThreadPoolExecutor(1, thread_name_prefix="nbcnn-write") as disk:
        for j in range(blocks.test_row):
            columns = blocks.rows(j)
            step = max(1, PANEL_VALUES // columns)
            for i in (*range(j + 1), blocks.test_row):
                for first in range(0, blocks.rows(i), step):
                    rows = samples[i].part(slice(first, first + step))
                    if len(writing) == len(buffers):
                        writing.pop(0).result()
                    if buffers[turn].size < len(rows) * columns:
                        buffers[turn] = np.empty(len(rows) * columns, np.float32)
                    k = kernel(rows, samples[j], gamma, buffers[turn][: len(rows) * columns].reshape(len(rows), columns))
                    writing.append(disk.submit(blocks.write, i, j, first, k))
                    turn = 1 - turn
                    progress(k.size)
        for each in writing:
            each.result()
