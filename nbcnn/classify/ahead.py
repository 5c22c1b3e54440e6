"""This module lists the kernels that a classifier launches on a GPU, so that they are compiled together, by several processes, or in advance.

A kernel is known by its function and the types of its arguments, so arrays of a few elements stand for those of all samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbcnn.ops.products.gemm import launch_gemm_nt
from nbcnn.ops.products.gram_wgmma import launch_gram
from nbcnn.ops.products.parts import launch_product
from nbcnn.ops.products.rbf import launch_rbf
from nbcnn.ops.svm import mirror, rows, smo

_WIDTH = 64


def launches(capability: tuple[int, int], sizes: Sequence[int], *, mirrored: bool = False, ridge: bool = False) -> list[Any]:
    """One launch of every kernel for classes of so many training samples each, on a GPU of that compute capability. They are not to be run."""
    f, d, i, n, h = (np.zeros(_WIDTH, dtype) for dtype in ("float32", "float64", "int32", "int64", "uint16"))
    one, wgmma = (_WIDTH, _WIDTH), capability == (9, 0)
    made = [
        rows.launch_place_rows(f, i, f, 1, *one),
        rows.launch_moments(f, i, d, d, d, 1, *one, 1),
        rows.launch_standardise(f, i, f, f, 1, *one),
        rows.launch_norms(f, d, f, f, 1, _WIDTH),
        launch_product(f, f, f, 4, 4, 4, (4, 4, 4)),
    ]
    if wgmma:
        operand = h, f, _WIDTH
        made += [rows.launch_halves(f, h, 1.0, _WIDTH), launch_gram(operand, operand, f, (*one, _WIDTH), _WIDTH, 1.0, 1.0, 1)]
    else:
        # Rows are padded to a multiple of 64 values, and columns to one of 32, or are as many as a test set has.
        made += [launch_gemm_nt(f, f, f, 1, columns, _WIDTH) for columns in (4, 5)] + [launch_rbf(f, f, f, 1, 1, 1.0)]
    if mirrored:
        made += [mirror.launch_apart(f, f, d, 1, _WIDTH), mirror.launch_add_transpose(f, 1, 1), mirror.launch_weigh(f, f, f, 1, 1, 1, True)]
        made += [] if wgmma else [mirror.launch_add_values(f, f, 1, 1, 1)]
    if ridge:
        return [*made, rows.launch_copy(f, f, 1, 1), rows.launch_isolate(f, 2, 1)]
    two = [1, 1, *sorted(sizes)][-2:]
    stride = smo.Pair(0, two[0], 0, two[1], 4).places
    return [*made, smo.launch_smo((f, n, i, d, f, f, i, f), 1, stride, 1.0, 1.0, 1), smo.launch_refresh((f, n, i, d, f, f), 1, stride)]
