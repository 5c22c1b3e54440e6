"""Windows drawn as rows, and their contrast: the kernels beside their references."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import assert_lean, on_every_arch

from nbcnn.ops.images.draw import draw_windows, launch_draw_windows, launch_normal_contrast, normal_contrast

EPS = float(np.finfo(np.float32).eps)


def on(device, values):
    array = device.empty(values.size, str(values.dtype))
    device.upload(array, values)
    return array


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_windows_at_places(device, rng, dtype):
    maps = (255 * rng.random((4, 3, 5, 7))).astype(dtype)
    window, count, pitch = (2, 3), 11, 32
    places = np.stack([rng.integers(0, extent, count) for extent in (4, 4, 5)]).astype(np.int32)
    shift, factor = rng.standard_normal(3).astype(np.float32), rng.standard_normal(3).astype(np.float32)
    got, wanted = on(device, np.full(count * pitch, 7, np.float32)), np.full((count, pitch), 7, np.float32)
    given = (on(device, each) for each in (maps.reshape(-1), places.reshape(-1), shift, factor))
    launch_draw_windows(*given, got, count, (3, 5, 7), window, pitch).run(device.stream)
    draw_windows(maps, places, shift, factor, wanted, window=window)
    assert not wanted[:, 18:].any()
    np.testing.assert_array_equal(wanted[0, :3], ((maps[places[0, 0], 0, places[1, 0], places[2, 0] :][:3]) - shift[0]) * factor[0])
    # A difference, which the compiler may not contract with the product, and the product.
    np.testing.assert_allclose(device.download(got).reshape(wanted.shape), wanted, rtol=2 * EPS)


def test_contrast_of_rows(device, rng):
    rows = np.full((11, 48), 7, np.float32)
    rows[:, :40] = 5 + rng.standard_normal((11, 40))
    rows[3, :40] = 2  # nothing but its mean
    there = on(device, rows)
    launch_normal_contrast(there, 11, 40, 48, 0.5).run(device.stream)
    normal_contrast(rows, width=40, norm=0.5)
    # Values of 5 + 3 at most lose the rounding of a mean of 40, and are divided by 0.7 at least; their factor has half as many terms of its own.
    np.testing.assert_allclose(device.download(there).reshape(rows.shape), rows, rtol=0, atol=4 * EPS * np.sqrt(40) * 8 / 0.7)
    np.testing.assert_array_equal(rows[:, 40:], 7)
    np.testing.assert_array_equal(rows[3, :40], 0)


@pytest.mark.full  # the kernels page has their registers
@on_every_arch
def test_they_compile_without_spills(arch):
    f, i, b = np.zeros(64, np.float32), np.zeros(6, np.int32), np.zeros(64, np.uint8)
    for maps in (f, b):
        assert_lean(launch_draw_windows(maps, i, f, f, f, 2, (1, 8, 8), (2, 2), 4), arch)
    assert_lean(launch_normal_contrast(f, 2, 32, 32, 0.1), arch)
