"""The pictures of a run, for shapes that are easy to forget."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from nbcnn.train import plots


@pytest.mark.parametrize("shape", [(1, 1, 5, 7), (3, 3, 32, 32)], ids=str)
def test_reconstructions_of_grey_and_of_few_images_are_drawn(tmp_path, shape):
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    plots.reconstructions(tmp_path / "made.png", images, np.zeros(shape, np.float32), "title")
    with Image.open(tmp_path / "made.png") as drawn:
        assert drawn.height == 460


def test_pictures_in_a_row_keep_their_pixels():
    pictures = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    row = plots._in_a_row(pictures, np.nan)
    assert row.shape == (3, 9)
    np.testing.assert_array_equal(row[:, :4], pictures[0])
    np.testing.assert_array_equal(row[:, 5:], pictures[1])
    assert np.isnan(row[:, 4]).all()
