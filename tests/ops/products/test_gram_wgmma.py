"""Tests of the order in which the blocks of a Gram matrix take its tiles; its values are tested with the kernels of classifiers."""

from __future__ import annotations

import numpy as np
import pytest

from nbcnn.ops.products.gram_wgmma import BAND, SIDE, tiles


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (SIDE + 1, 3 * SIDE), (BAND * SIDE, BAND * SIDE), (40 * SIDE - 5, 40 * SIDE - 5)])
def test_tiles_go_by_bands_and_columns(size, symmetric):
    down, across = (-(-extent // SIDE) for extent in size)
    every = [(row, column) for row in range(down) for column in range(across) if column >= row or not symmetric]
    expected = sorted(every, key=lambda tile: (tile[0] // BAND, tile[1], tile[0]))
    made = tiles(*size, symmetric)
    assert made.dtype == np.int32
    assert made.tolist() == [list(tile) for tile in expected]
